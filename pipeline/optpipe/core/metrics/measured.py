"""The figures of a measurement that optpipe itself computes, in the order in which they are shown."""

from enum import StrEnum

from optpipe.core import np
from optpipe.core.comparison import ComparisonRow
from optpipe.core.load import Scenario
from optpipe.core.measurement import Measurement
from optpipe.core.metrics.contract import Metric, Window
from optpipe.core.percentile_names import (
    MEAN,
    percent_from_name,
    pooled_percent_from_name,
)
from optpipe.core.quantity import Dimension, Estimate
from optpipe.core.wording import Argument

SENSOR_SHARE = 0.05
"""Relative error of the board's power sensor (NVML documentation of nvmlDeviceGetPowerUsage)."""

MIN_WINDOW_S = 10.0
"""The energy counter moves in steps of some tens of milliseconds: ten seconds keep them below one percent."""
ENERGY_SECONDS = MIN_WINDOW_S + 2
FEWEST_READINGS = 12
NOT_COMPUTED = "not computed"


class Percentile(Metric):
    """A percentile of the latency, `p99`; above p50 it is over all requests, `mean_p99` the mean over processes."""

    dimension = Dimension.TIME
    remedy = "measure longer"
    needs_longer = True

    def __init__(self, name: str, *, in_history: bool = False) -> None:
        self.name, self.title = name, f"{name} latency"
        self.in_history = in_history
        self.column, self.mark = f"{name}_ns", f"{name} "
        self.percent = percent_from_name(name)
        self.is_pooled = pooled_percent_from_name(name) > 0
        self.is_over_processes = name.startswith(MEAN)
        self.in_regression = not self.is_over_processes
        self._key = name.removeprefix(MEAN)

    @property
    def is_median(self) -> bool:
        """The median needs no interval of its own over processes."""
        return self._key == self.name and self.percent == 50.0

    def read(self, measured: Measurement) -> Estimate | None:
        latency = measured.latency_ns
        return None if latency is None else latency.percentiles.get(self._key)

    def read_row(self, row: ComparisonRow) -> Estimate | None:
        return row.latency_ns.get(self._key)

    def read_without_interval(self, measured: Measurement) -> float | None:
        estimate, latency = self.read(measured), measured.latency_ns
        if estimate is None and self.is_median and latency is not None:
            return latency.median
        return None if estimate is None else estimate.value

    def explain_missing(self, measured: Measurement) -> str:
        return f"{self.name} is not available: {self.find_reason(measured) or NOT_COMPUTED}"

    def find_reason(self, measured: Measurement) -> str | None:
        latency = measured.latency_ns
        return None if latency is None else latency.withheld.get(self._key)


class Throughput(Metric):
    """Images, or samples of another kind, per second: while answering (closed loops), or from the first start to the last end."""

    name = "throughput"
    column = "throughput_per_s"
    title = "throughput"
    dimension = Dimension.RATE
    remedy = "measure longer"
    needs_longer = True
    higher_is_better = True
    in_regression = True

    def compute(self, window: Window) -> Estimate:
        samples = window.samples
        if window.load.scenario in (Scenario.SINGLE_STREAM, Scenario.MULTI_STREAM):
            busy_ns = (samples["end_ns"] - samples["start_ns"]).to_numpy()
            note = "images divided by total inference time"
        else:
            first = samples["start_ns"].to_numpy().min()
            busy_ns = np.diff(samples["end_ns"].to_numpy(), prepend=first)
            note = "images divided by the time from first start to last end"
        rate = window.estimate_rate(samples["images"].to_numpy(), busy_ns)
        return Estimate(rate.value, rate.low, rate.high, note)

    def read(self, measured: Measurement) -> Estimate | None:
        return measured.throughput_images_per_s

    def read_row(self, row: ComparisonRow) -> Estimate | None:
        return row.throughput_images_per_s

    def explain_missing(self, measured: Measurement) -> str:
        return f"{self.name} is not available: {NOT_COMPUTED}"


class Tokens(Metric):
    """Tokens per second, without padding; only models of sequences have it."""

    name = "tokens"
    column = "tokens_per_s"
    title = "tokens per second"
    dimension = Dimension.RATE
    in_history = False
    remedy = "measure longer"
    needs_longer = True
    higher_is_better = True

    def compute(self, window: Window) -> Estimate | str:
        tokens = (window.load.length or 0) * (1 - window.padding)
        if not tokens:
            return "the inputs are not sequences"
        scaled = THROUGHPUT.compute(window).scale(tokens)
        return Estimate(scaled.value, scaled.low, scaled.high, "tokens without padding")

    def read(self, measured: Measurement) -> Estimate | None:
        return measured.throughput_tokens_per_s

    def read_row(self, row: ComparisonRow) -> Estimate | None:
        return row.throughput_tokens_per_s


def measure_power(window: Window) -> Estimate | str:
    """Mean power in W over the readings during the measurement, by the driver's counter, with the interval of ten parts of the
    window, and without the tolerance of the sensor; or the reason why there is none."""
    machine = window.machine
    too_short = f"measured for {window.seconds:.1f} s; the energy counter needs at least "
    too_short += f"{MIN_WINDOW_S:.0f} s (" + Argument("energy") + ")"
    has_counter = "gpu_energy_mj" in machine.columns
    rows = machine.drop_nulls("gpu_energy_mj") if has_counter else machine.clear()
    if rows.is_empty():
        return "no energy counter: it requires an NVIDIA GPU, Volta or newer"
    if len(rows) < FEWEST_READINGS or window.images < 1:
        return too_short
    times_s = rows["time_ns"].to_numpy() / 1e9
    watched_s = float(times_s[-1] - times_s[0])
    if watched_s < 0.8 * MIN_WINDOW_S:
        return too_short
    joules = rows["gpu_energy_mj"].to_numpy() / 1e3
    value = float(joules[-1] - joules[0]) / watched_s
    cuts = np.linspace(0, len(rows) - 1, 11).astype(int)
    parts = window.estimate_mean(np.diff(joules[cuts]) / np.diff(times_s[cuts]))
    note = f"NVML energy counter over {watched_s:.1f} s"
    if parts.interval is None or value <= 0:
        return Estimate(value, note=note)
    return Estimate(value, *parts.interval, note)


PACKAGES_NOTE = "; CPU packages"
"""Begins what RAPL said while a build ran on a CPU. No raw file keeps it, so that no reason of a verdict may repeat it."""


def keep_packages_note(computed: str | None, stored: str | None) -> str | None:
    """Why there is no energy, as raw files give it, with what RAPL said by the record."""
    _, mark, said = (stored or "").partition(PACKAGES_NOTE)
    return computed if computed is None else computed + mark + said


class EnergyCounterMetric(Metric):
    """A metric that is derived from the energy counter of a GPU, and shares the error of its sensor."""

    mark = "≈ "
    sensor_share = SENSOR_SHARE
    is_optional = True
    remedy = "measure it on a GPU"
    least_seconds = ENERGY_SECONDS
    needs_gpu = True


class Energy(EnergyCounterMetric):
    """Energy per image or sample: mean power over the measured window times the time per image.

    The driver's energy counter moves in steps, and power readings of this class of GPU sample only a part of the time (arXiv
    2312.02741): a window of at least ten seconds keeps the steps below one percent. The interval is that of the power over ten
    parts of the window, and each end allows for all of the sensor's tolerance: an error that no reading averages out.
    """

    name = "energy"
    column = "energy_j"
    title = "energy"
    dimension = Dimension.ENERGY

    def compute(self, window: Window) -> Estimate | str:
        power = measure_power(window)
        if isinstance(power, str):
            return power
        value = power.value * window.seconds / window.images
        note = f"{power.note}, {power.value:.0f} W; approximate (sensor ±{SENSOR_SHARE:.0%})"
        if power.interval is None:
            return Estimate(value, note=f"{note}; no interval: its parts do not show their scatter")
        low_w, high_w = power.interval
        spread = (high_w - low_w) / 2 / power.value
        low, high = self.allow_for_sensor(value * max(0.0, 1 - spread), value * (1 + spread))
        return Estimate(value, low, high, note)

    def read(self, measured: Measurement) -> Estimate | None:
        return measured.energy_j_per_image

    def read_row(self, row: ComparisonRow) -> Estimate | None:
        return row.energy_j_per_image

    def explain_missing(self, measured: Measurement) -> str:
        why = measured.energy_why_not or "no energy counter on this machine"
        why = why.partition(PACKAGES_NOTE)[0]
        return f"the energy was not measured: {why}"


ENERGY = Energy()


class Power(EnergyCounterMetric):
    """Mean power of the GPU during a measurement, from the energy counter: what a rack, a cap, and a cooler must bear.

    A process's interval is left to the processes; the sensor's tolerance is that of ENERGY, which is the same reading.
    """

    name = "power"
    column = "power_w"
    title = "power"
    dimension = Dimension.POWER

    def compute(self, window: Window) -> Estimate | str:
        return measure_power(window)


class LoadTime(Metric):
    """From the start of loading a build to its first answer, in a fresh process that has imported the runtime.

    The first answer is at the smallest batch size of the profile, whatever is measured after it; checking the file's hash and
    importing libraries do not count. The worker alone sees it, once in each process, as it does the peak of its memory.
    """

    name = "load_time"
    column = "load_time_ns"
    title = "load time"
    dimension = Dimension.TIME
    in_history = False
    is_optional = True
    is_witnessed = True


class BuildTime(Metric):
    """Time of a build, as its manifest states it. One build, on whatever ran beside it, shows no scatter, and no raw file shows how
    it came about: it is shown, and decides nothing.
    """

    name = "build_time"
    column = "build_time_ns"
    title = "build time"
    dimension = Dimension.TIME
    in_history = False
    is_optional = True
    is_witnessed = True

    def read_row(self, row: ComparisonRow) -> Estimate | None:
        note = "stated by the build's manifest; one build, without an interval"
        return None if row.build_s is None else Estimate(row.build_s * 1e9, note=note)


class Efficiency(EnergyCounterMetric):
    """Images, or samples of another kind, per second per watt: the reciprocal of the energy of one.

    It is judged and shown from the figures of ENERGY, with the bounds swapped, so that both always say the same.
    """

    name = "efficiency"
    column = "efficiency_per_s_w"
    title = "performance per watt"
    dimension = Dimension.EFFICIENCY
    higher_is_better = True
    sensor_share = 0.0  # the figures of ENERGY allow for it
    inverse_of = ENERGY

    def read_row(self, row: ComparisonRow) -> Estimate | None:
        energy = ENERGY.read_row(row)
        return None if energy is None else energy.invert()


class Variation(Metric):
    """Coefficient of variation of the latency: standard deviation over mean of all samples of a process."""

    name = column = "cv"
    title = "coefficient of variation"
    dimension = Dimension.SHARE
    in_history = False
    remedy = "measure longer"
    needs_longer = True
    has_speeds = False

    def read(self, measured: Measurement) -> Estimate | None:
        return None if measured.latency_ns is None else measured.latency_ns.cv

    def explain_missing(self, measured: Measurement) -> str:
        return f"{self.name} is not available: {NOT_COMPUTED}"


class PeakMemory(Metric):
    """Peak memory: of the device on a GPU, of the process on a CPU. A process that needs more ends a service."""

    name = "memory"
    column = "memory_bytes"
    title = "peak memory"
    dimension = Dimension.SIZE
    has_speeds = False
    judges_peak = True
    is_optional = True

    def read(self, measured: Measurement) -> Estimate | None:
        peak = measured.memory_bytes
        return None if peak is None else Estimate(float(peak))


class MeanLatency(Metric):
    """Mean of all latencies of a process; only a comparison by pairs takes it."""

    name = "mean"
    column = "mean_ns"
    title = "mean latency"
    dimension = Dimension.TIME

    def read(self, measured: Measurement) -> Estimate | None:
        return None if measured.latency_ns is None else Estimate(measured.latency_ns.mean)


P50, P99 = (Percentile(name, in_history=True) for name in ("p50", "p99"))
P90, P999 = Percentile("p90"), Percentile("p99.9")
THROUGHPUT, TOKENS, EFFICIENCY = Throughput(), Tokens(), Efficiency()
CV, MEMORY, MEAN_LATENCY = Variation(), PeakMemory(), MeanLatency()
POWER, LOAD_TIME, BUILD_TIME = Power(), LoadTime(), BuildTime()

SHOWN: tuple[Metric, ...] = (
    P50,
    P90,
    Percentile("p95"),
    P99,
    P999,
    THROUGHPUT,
    TOKENS,
    ENERGY,
    CV,
    MEMORY,
)
"""The figures of a group of processes, in the order of its record."""
RECORDED: tuple[Metric, ...] = (POWER, LOAD_TIME)
"""Figures of a process that lie in `Measurement.figures`, as those of plug-ins do; records of earlier versions lack them."""
OTHERS: tuple[Metric, ...] = (
    *(Percentile(f"{MEAN}{name}") for name in ("p90", "p95", "p99")),
    MEAN_LATENCY,
    EFFICIENCY,
    *RECORDED,
    BUILD_TIME,
)
"""Figures that only a limit or an option asks for."""


class PairMetric(StrEnum):
    """What `bench --against` compares."""

    P50 = P50.name
    P90 = P90.name
    P99 = P99.name
    MEAN = MEAN_LATENCY.name
    THROUGHPUT = THROUGHPUT.name

    @classmethod
    def for_metric(cls, name: str) -> "PairMetric":
        """The one called `name`; p99 for a figure that pairs do not compare."""
        return cls(name) if name in list(cls) else cls.P99
