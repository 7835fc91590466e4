"""All processes that measured one artifact with the same settings under the same load, judged together.

Memory layout, clocks and thread placement differ between processes, so a build's figure is the mean over processes with
Student's t interval, with processes nested in runs (`stats.means`). Groups are formed when read, so that every try
counts; INVALID ones are left out and reported.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import islice
from math import exp, log
from typing import Any

import numpy as np

from optpipe.core.entries import Environment
from optpipe.core.load import LoadSpec
from optpipe.core.measurement import Measurement
from optpipe.core.measurement_group import GroupFigure, LeftOut, MeasurementGroup
from optpipe.core.metrics.measured import ENERGY, P50, SHOWN, THROUGHPUT, TOKENS
from optpipe.core.metrics.registry import find_metric
from optpipe.core.quantity import Dimension, Estimate
from optpipe.stats.means import (
    MIN_VALUES,
    SPEED_GAP,
    Mean,
    OtherSpeed,
    Scatter,
    combine_speeds,
    estimate_run_scatter,
    mean_from_runs,
    split_scatter,
    subtract_across_runs,
    subtract_means,
)
from optpipe.stats.percentiles import (
    STALL_GAP,
    STALL_REQUESTS,
    count_samples_needed,
    count_stretches,
    count_stretches_for_stalls,
    find_order_statistic,
    invert_clustered_share,
    pool_percentile,
)
from optpipe.stats.seen_speeds import (
    SeenSpeeds,
    SpeedMean,
    SpeedRatio,
    seen_speeds_from_values,
)
from optpipe.stats.stability import bound_repeated_change, compute_end_change


@dataclass(frozen=True, slots=True)
class RecordedMeasurement:
    measurement: Measurement
    run: str
    environment: Environment = field(default_factory=Environment)
    clock_mhz: float | None = None
    """Median clock of the GPU's multiprocessors during the measurement; None without a GPU."""
    latencies: np.ndarray | None = field(default=None, compare=False, repr=False)
    """(samples,) in ns; None without raw samples."""


def find_environment_differences(left: Environment, right: Environment) -> list[str]:
    """Differences in facts that a timing depends on: GPU, driver, CPU."""
    pairs = {name: (left.get_fact(name), right.get_fact(name)) for name in ("gpu", "driver", "cpu")}
    return [
        f"{name}: {first} and {second}"
        for name, (first, second) in pairs.items()
        if first != second
    ]


CLOCK_TOLERANCE = 0.05
"""Two timings are not comparable if their median clocks differ by more than this share."""


def explain_clock_difference(left: RecordedMeasurement, right: RecordedMeasurement) -> str | None:
    first, second = left.clock_mhz, right.clock_mhz
    if not first or not second or max(first, second) / min(first, second) <= 1 + CLOCK_TOLERANCE:
        return None
    return f"GPU clocks differ: {first:.0f} MHz and {second:.0f} MHz"


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    tries: tuple[RecordedMeasurement, ...]

    @property
    def newest(self) -> RecordedMeasurement:
        return self.tries[-1]

    @property
    def load(self) -> LoadSpec:
        """The load; its duration is that of the last try."""
        return self.newest.measurement.load

    @property
    def valid(self) -> tuple[RecordedMeasurement, ...]:
        return tuple(recorded for recorded in self.tries if recorded.measurement.is_valid)

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        invalid = (recorded for recorded in self.tries if not recorded.measurement.is_valid)
        return tuple(
            LeftOut(recorded.run, recorded.measurement.id, recorded.measurement.invalid_codes)
            for recorded in invalid
        )

    def list_values(self, name: str) -> list[list[float]]:
        """The figure `name` of every VALID process that has it, by run."""
        return [
            [sum(values) / len(values) for values in run.values()]
            for run in self._collect(name).values()
        ]

    def _collect(
        self, name: str, *, latencies: bool = False
    ) -> dict[str, dict[tuple[bool, int], list[Any]]]:
        """The figure, or the `latencies` of those that have it, by run, then by process, first stage before second stage.

        Over processes the median of each counts, and its percentile over all requests, even if its samples are too correlated for
        an interval: leaving such processes out would select them by their disturbance, and the scatter of processes has its own.
        """
        runs: dict[str, dict[tuple[bool, int], list[Any]]] = {}
        medians = self.count_processes() >= MIN_VALUES
        for recorded in sorted(self.valid, key=lambda recorded: recorded.measurement.second_stage):
            if (value := read_counted(recorded, name, medians=medians)) is not None:
                process = recorded.measurement.second_stage, recorded.measurement.process
                runs.setdefault(recorded.run, {}).setdefault(process, []).append(
                    recorded.latencies if latencies else value
                )
        return runs

    def list_parts(self, name: str) -> list[list[float]]:
        """Contributions of each process to the build's figure, by run; their mean is that figure.

        A contribution is the process's figure. A percentile above p50 is over the requests of all processes, if their
        samples are available.
        """
        percent, runs = _pooled_percent(name), self._collect(name, latencies=True)
        processes = [process for run in runs.values() for process in run.values()]
        if not percent or any(latencies is None for process in processes for latencies in process):
            return self.list_values(name)
        parts = iter(
            pool_percentile([np.concatenate(process) for process in processes], percent)
            if processes
            else []
        )
        return [list(islice(parts, len(run))) for run in runs.values()]

    def find_other_speed(self, name: str, *, alone: bool = False) -> OtherSpeed:
        """What the tries that were left out, and a speed that no process drew, may add to the figure `name`.

        Every INVALID try counts, whatever its reason, by its raw figure: a build may cause heat, moved clocks and stalls itself,
        and a published percentile is withheld where stalls make samples alike. A coefficient of variation has no second speed.
        A percentile over all requests that is judged `alone`, not against another build's, allows for stalls that so few missed.
        """
        percent = _pooled_percent(name)
        values = [value for run in self.list_values(name) for value in run]
        gap = SPEED_GAP if find_metric(name).has_speeds else 0.0
        if alone and percent and self._count_stretches() < count_stretches_for_stalls(percent):
            gap = STALL_GAP
        if values and min(values) > 0:
            middle = sum(values) / len(values)
            others = (read_raw_value(recorded, name) for recorded in self._list_invalid())
            gaps = (abs(log(value / middle)) for value in others if value is not None and value > 0)
            gap = max(gap, *gaps, 0.0)
        left_out = len(self._list_invalid())
        return OtherSpeed(len(values), left_out, gap, percent, self._find_repeated_change(name))

    def _find_repeated_change(self, name: str) -> float:
        """The change of latency during a measurement that all VALID processes repeat, as the logarithm of a ratio."""
        if not find_metric(name).has_speeds:
            return 0.0
        given = (recorded.latencies for recorded in self.valid if recorded.latencies is not None)
        changes = (compute_end_change(latencies) for latencies in given)
        return bound_repeated_change([change for change in changes if change is not None])

    def _count_stretches(self) -> float:
        """`count_stretches` of all tries; of those without raw samples as of uncorrelated ones."""
        return sum(
            recorded.measurement.samples / STALL_REQUESTS
            if recorded.latencies is None
            else count_stretches(recorded.latencies)
            for recorded in self.tries
        )

    def count_left_out_without(self, name: str) -> int:
        """The tries that were left out and lack the figure `name`, so that nothing bounds what they would add."""
        return sum(
            not (read_raw_value(recorded, name) or 0) > 0 for recorded in self._list_invalid()
        )

    def find_units(self) -> dict[str, Dimension]:
        """The metrics without a field of their own that any try has, with the unit of its figures."""
        figures = {
            name: figure
            for recorded in self.tries
            for name, figure in recorded.measurement.figures.items()
        }
        return {name: figures[name].unit for name in sorted(figures)}

    def count_tried(self, name: str) -> int:
        """VALID processes in which a metric without a field of its own was computed, or gave a reason."""
        return sum(name in recorded.measurement.figures for recorded in self.valid)

    def _list_invalid(self) -> list[RecordedMeasurement]:
        return [recorded for recorded in self.tries if not recorded.measurement.is_valid]

    def _count_first(self, name: str) -> list[int]:
        """Number of each run's processes that determined how many there would be."""
        return [sum(not second for second, _ in run) for run in self._collect(name).values()]

    def count_processes(self) -> int:
        return len({(recorded.run, recorded.measurement.process) for recorded in self.valid})

    def count_showing(self, name: str) -> int:
        return sum(map(len, self.list_values(name)))

    def count_requested(self, name: str) -> int:
        """VALID processes that have the percentile `name` or were to measure it; all for another figure."""
        requested = (
            recorded
            for recorded in self.valid
            if is_requested(recorded, name) or read_figure(recorded.measurement, name) is not None
        )
        return len({(recorded.run, recorded.measurement.process) for recorded in requested})

    def keep_requested(self, name: str) -> "ProcessGroup":
        """The tries that were to measure the percentile `name`, unless all the others have it too.

        A process that was measured for a lower percentile has it only if it was quick enough for many samples, so that
        all of them count or none.
        """
        asked = tuple(recorded for recorded in self.tries if is_requested(recorded, name))
        others = (recorded for recorded in self.valid if not is_requested(recorded, name))
        if not asked or all(
            read_figure(recorded.measurement, name) is not None for recorded in others
        ):
            return self
        return ProcessGroup(asked)

    def compute_mean(self, name: str) -> Mean | None:
        values = self.list_parts(name)
        return mean_from_runs(values, self._count_first(name)) if values else None

    def find_seen_speeds(self, name: str) -> SeenSpeeds | None:
        """The two speeds of the processes, of a figure that has speeds; percentiles over all requests count shares themselves."""
        if _pooled_percent(name) or not find_metric(name).has_speeds:
            return None
        return seen_speeds_from_values([value for run in self.list_values(name) for value in run])

    def compute_distribution(self, name: str) -> Mean | SpeedMean | None:
        """`compute_mean` of processes that may have run at two speeds."""
        mean, speeds = self.compute_mean(name), self.find_seen_speeds(name)
        return mean if mean is None or speeds is None else SpeedMean(mean, speeds)

    def _invert_share(self, name: str, confidence: float) -> tuple[float, float] | None:
        """`invert_clustered_share` of a percentile over all requests; None for other figures, or without raw samples."""
        percent, runs = _pooled_percent(name), self._collect(name, latencies=True)
        processes = [[*run.values()] for run in runs.values()]
        given = [part for run in processes for process in run for part in process]
        if not percent or not given or any(part is None for part in given):
            return None
        joined = [[np.concatenate(process) for process in run] for run in processes]
        return invert_clustered_share(joined, percent, confidence, self._count_first(name))

    def estimate(
        self, name: str, confidence: float = 0.95, unseen: float | None = None
    ) -> Estimate | None:
        """The figure with its interval over processes, without one below three; None if no process has it.

        The interval of a time or rate allows for a second speed that no process drew, at confidence `unseen` if given.
        """
        runs = self.list_parts(name)
        values = [value for run in runs for value in run]
        if not values:
            return None
        mean = self.compute_distribution(name)
        if mean is None:
            return Estimate(sum(values) / len(values), note=explain_no_interval(len(values)))
        low, high = mean.interval(confidence)
        metric = find_metric(name)
        low, high = metric.allow_for_sensor(low, high)  # one sensor read all processes
        if (bounds := self._invert_share(name, confidence)) is not None:
            low, high = min(low, bounds[0]), max(high, bounds[1])
        note, level = "", confidence if unseen is None else unseen
        if not metric.judges_peak and mean.value > 0:
            speed = self.find_other_speed(name, alone=True)
            (low, high), note = speed.widen(mean.value, (low, high), level)
        if isinstance(mean, SpeedMean) and mean.speeds.gap > SPEED_GAP:
            note = "; ".join(filter(None, (note, mean.explain(confidence))))
        if low == high and not metric.judges_peak:
            return Estimate(mean.value, note=explain_equal_values(len(values)))
        return Estimate(
            mean.value, max(low, 0.0), high, note or None
        )  # no time, rate or size is negative


@dataclass(frozen=True, slots=True)
class FigureRatio:
    """A figure of a build over that of another."""

    change: Mean | SpeedRatio
    """Of the logarithm of the ratio."""
    speed: OtherSpeed

    def interval(
        self, confidence: float, unseen: float | None = None
    ) -> tuple[tuple[float, float], str]:
        """Interval of the ratio, widened for what the left-out processes of either side may add, and the reason."""
        low, high = (exp(bound) for bound in self.change.interval(confidence))
        ratio, level = exp(self.change.value), unseen or confidence
        widened, why = self.speed.widen(ratio, (low, high), level)
        mirrored, _ = self.speed.widen(1 / ratio, (1 / high, 1 / low), level)
        return (min(widened[0], 1 / mirrored[1]), max(widened[1], 1 / mirrored[0])), why

    @property
    def p_value(self) -> float:
        """Two-sided: the probability of a ratio at least this far from 1 between equals.

        Few slow processes move a percentile over all requests by the whole distance of two speeds, so that much is always possible.
        """
        change, least, unseen = self.change, self.speed.repeated, 0.0
        if self.speed.percent > 50:
            least += self.speed.gap
        else:
            unseen = self.speed.compute_pair_p_value(abs(change.value))
        slower = change.value > 0
        tail = (
            change.compute_p_value_above(least) if slower else change.compute_p_value_below(-least)
        )
        return min(1.0, 2 * (tail + unseen))

    def assume_gap(self, gap: float) -> "FigureRatio":
        """The same ratio if the speeds of a build may be `gap` apart, as those of others on the same machine are."""
        return replace(self, speed=replace(self.speed, gap=max(self.speed.gap, gap)))


def compare_groups(
    new: ProcessGroup, old: ProcessGroup, name: str, run_scatter: Scatter | None
) -> FigureRatio | str:
    """The figure `name` of `new` over that of `old`, or why nothing is claimed.

    Processes of one common run are compared directly; otherwise the scatter between runs is added.
    """
    first, second = (group.compute_mean(name) for group in (new, old))
    if first is None or second is None or min(first.value, second.value) <= 0:
        return "too few processes"
    mine, theirs = first.take_logarithm(), second.take_logarithm()
    if new.count_left_out_without(name) or old.count_left_out_without(name):
        return "left out without it"
    change: Mean | None = subtract_means(mine, theirs)
    if len({recorded.run for group in (new, old) for recorded in group.valid}) > 1:
        runs = len(new.list_values(name)), len(old.list_values(name))
        change = subtract_across_runs(mine, theirs, runs, run_scatter)
    if change is None:
        return "different runs"
    speed = combine_speeds(*(group.find_other_speed(name) for group in (new, old)))
    speeds = [group.find_seen_speeds(name) for group in (new, old)]
    values = (value for group in (new, old) for run in group.list_values(name) for value in run)
    if any(speeds) and min(values) > 0:
        return FigureRatio(SpeedRatio(change, first.value, second.value, *speeds), speed)
    return FigureRatio(change, speed)


def find_run_scatter(groups: Iterable[ProcessGroup], name: str) -> Scatter | None:
    """Scatter of the figure `name` between runs, from all builds that were measured in several."""
    return estimate_run_scatter(group.list_parts(name) for group in groups)


def find_usual_gap(groups: Iterable[ProcessGroup], name: str) -> float:
    """The distance of the fastest and the slowest process of a typical build (the median over `groups`), a logarithm of a ratio.

    A machine with two speeds shows both to most builds, and the others may have drawn one of them only.
    """
    values = ([value for run in group.list_values(name) for value in run] for group in groups)
    gaps = [
        log(max(processes) / min(processes))
        for processes in values
        if processes and min(processes) > 0
    ]
    return float(np.median(gaps)) if gaps else 0.0


def explain_no_interval(processes: int) -> str:
    counted = "one process" if processes == 1 else f"{processes} processes"
    return f"{counted}: the scatter between processes is not known"


def explain_equal_values(processes: int) -> str:
    return f"all {processes} processes have the same value, so that their scatter is not known"


def is_requested(recorded: RecordedMeasurement, name: str) -> bool:
    """Whether a try was to measure the percentile `name`; true for other figures."""
    return recorded.measurement.load.percentile >= find_metric(name).percent


def _pooled_percent(name: str) -> float:
    """The percentile if the figure is over the requests of all processes; 0 for any other."""
    metric = find_metric(name)
    return metric.percent if metric.is_pooled else 0.0


def read_value(measurement: Measurement, name: str, *, medians: bool = True) -> float | None:
    """The figure of one process; with `medians` the median counts without an interval too."""
    metric = find_metric(name)
    if medians:
        return metric.read_without_interval(measurement)
    figure = metric.read(measurement)
    return figure.value if figure else None


def read_counted(recorded: RecordedMeasurement, name: str, *, medians: bool) -> float | None:
    """The figure with which a process counts among others; with `medians` a percentile needs no interval, but enough samples."""
    value, percent = read_value(recorded.measurement, name, medians=medians), _pooled_percent(name)
    if value is not None or not medians or not percent or recorded.latencies is None:
        return value
    enough = len(recorded.latencies) >= count_samples_needed(percent)
    return read_raw_value(recorded, name) if enough else None


def read_raw_value(recorded: RecordedMeasurement, name: str) -> float | None:
    """The figure of one process as its raw samples give it, even where it would be withheld; None if it has none."""
    percent = find_metric(name).percent
    if percent and recorded.latencies is not None and len(recorded.latencies):
        return find_order_statistic(np.sort(recorded.latencies), percent)
    return read_value(recorded.measurement, name)


def read_figure(measurement: Measurement, name: str) -> Estimate | None:
    """One process's figure in the base unit of its metric."""
    return find_metric(name).read(measurement)


def merge_group(
    group: ProcessGroup, confidence: float = 0.95, unseen: float | None = None
) -> Measurement:
    """The newest VALID measurement with the figures of all; unchanged if fewer than three are VALID.

    `confidence` and `unseen` are those of `ProcessGroup.estimate`.
    """
    newest = (group.valid or group.tries)[-1].measurement
    if newest.latency_ns is None or group.compute_mean(P50.name) is None:
        return newest

    def estimate(name: str) -> Estimate | None:
        return group.estimate(name, confidence, unseen)

    estimates = {name: estimate(name) for name in newest.latency_ns.percentiles}
    percentiles = {name: figure for name, figure in estimates.items() if figure is not None}
    return replace(
        newest,
        latency_ns=replace(newest.latency_ns, percentiles=percentiles),
        throughput_images_per_s=estimate(THROUGHPUT.name),
        throughput_tokens_per_s=estimate(TOKENS.name),
        energy_j_per_image=estimate(ENERGY.name),
    )


def group_processes(measured: Iterable[RecordedMeasurement]) -> list[ProcessGroup]:
    groups: dict[object, list[RecordedMeasurement]] = {}
    for recorded in sorted(
        measured, key=lambda recorded: (recorded.measurement.started_utc, recorded.run)
    ):
        of = recorded.measurement.subject
        key = of.artifact, tuple(of.settings.items()), recorded.measurement.load.key
        groups[key] = [*groups.pop(key, []), recorded]
    return [ProcessGroup(tuple(tries)) for tries in groups.values()]


def summarize_group(
    group: ProcessGroup, confidence: float = 0.95, unseen: float | None = None
) -> MeasurementGroup:
    """Figures with the intervals of `ProcessGroup.estimate`, and both parts of their scatter."""
    figures = {}
    units = group.find_units()
    for name in (*(metric.name for metric in SHOWN), *units):
        if not group.valid and (shown := read_figure(group.newest.measurement, name)) is not None:
            figures[name] = GroupFigure(
                Estimate(shown.value, note="INVALID"), (shown.value,), None, None, units.get(name)
            )
        elif (estimate := group.estimate(name, confidence, unseen)) is not None:
            values = tuple(value for run in group.list_values(name) for value in run)
            shown_values = [
                figure
                for recorded in group.valid
                if (figure := read_figure(recorded.measurement, name)) is not None
            ]
            between, inside = _split_scatter(name, shown_values, confidence) or (None, None)
            figures[name] = GroupFigure(estimate, values, between, inside, units.get(name))
    subject = group.newest.measurement.subject
    runs = tuple(dict.fromkeys(recorded.run for recorded in group.valid))
    return MeasurementGroup(
        subject, group.load, group.count_processes(), runs, figures, group.left_out
    )


def _split_scatter(
    name: str, figures: list[Estimate], confidence: float
) -> tuple[float, float] | None:
    """`split_scatter` of processes' figures; None if one has no interval, so that nothing shows its scatter.

    An error of the sensor is the same in all of them, and no scatter.
    """
    intervals = [figure.interval for figure in figures]
    known = [interval for interval in intervals if interval is not None]
    if len(known) < len(figures):
        return None
    bounds = [find_metric(name).remove_sensor(*interval) for interval in known]
    halves = [(high - low) / 2 for low, high in bounds]
    return split_scatter([figure.value for figure in figures], halves, confidence)


def describe_tries(group: ProcessGroup) -> str:
    """`5 processes in 2 runs; left out: 2 INVALID (drift, loaded-host)`."""
    valid, runs = group.count_processes(), len({recorded.run for recorded in group.valid})
    text = f"{valid} process{'es' if valid != 1 else ''}" + (f" in {runs} runs" if runs > 1 else "")
    if group.left_out:
        codes = Counter(code for process in group.left_out for code in process.codes)
        text += f"; left out: {len(group.left_out)} INVALID ({', '.join(code for code, _ in codes.most_common())})"
    return text
