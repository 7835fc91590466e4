"""Checks whether figures may be believed. Every reason has an observation and a remedy; nothing is ever trimmed.

Invalidating reasons spoil the figures; the others are properties of the artifact that readers must know. Each check is
a small function from `ValidityEvidence` to reasons, and all of them always run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from optpipe.core.measurement import MAX_CV, Measurement, Mode, Reason, Scenario
from optpipe.measure.process import POWER_CAP, THROTTLE_REASONS
from optpipe.measure.worker.plan import CacheProbe
from optpipe.stats.ratio import SMALLEST_ROUNDS, ratio_from_rounds
from optpipe.stats.stability import find_trend, find_two_modes

if TYPE_CHECKING:
    import polars as pl

LIMITS: Mapping[str, float] = {
    "max_cv": MAX_CV,
    "max_drift": 0.025,  # finds a drift of 3% despite noise
    "max_other_cpu_share": 0.10,
    "max_clock_change": 0.03,
    "max_gpu_temperature_c": 85.0,
    "enqueue_bound": 0.8,  # trtexec: enqueue over 0.8 of compute
    "cached_answer": 0.75,
}
PROBE_CONFIDENCE = 0.999
"""Confidence of the ratio that shows a cache of answers."""
FEWEST_WAITED = 20
"""Minimum waiting queries for an estimate of a server's capacity."""
WRONG_OUTPUTS = frozenset({"wrong-output", "stale-answer", "cached-answer"})
"""Codes of wrong answers, which no figure compensates."""
HOST_CAUSES = frozenset({"loaded-host", "busy-gpu", "throttled", "clocks-moved", "hot"})
"""Codes of causes on the machine, which the next process meets too."""
WITNESSED = WRONG_OUTPUTS | frozenset(
    {
        "inputs-alike", "interrupted", "too-few-samples", "not-steady",
        "out-of-memory", "died", "refused", "int8-not-faster", "int8-accuracy", "fp8-not-faster", "fp8-accuracy",
    }
)  # fmt: skip
"""Codes of observations by the worker or its parent that no raw file holds; all others follow from samples and machine rows."""


@dataclass(frozen=True, slots=True)
class ValidityEvidence:
    measurement: Measurement
    """Its figures and verdict are ignored."""
    samples: "pl.DataFrame"
    machine: "pl.DataFrame"
    """Rows between the first start and the last end."""
    steady: bool = True
    wanted_samples: int = 0
    cache_probe: CacheProbe = field(default_factory=CacheProbe)

    @property
    def limits(self) -> Mapping[str, float]:
        return {**LIMITS, **self.measurement.limits}

    def list_readings(self, name: str) -> list[float]:
        """Values of a machine column, one per row; empty if it was not read."""
        column = self.machine.get_column(name, default=None)
        return [] if column is None else [float(value) for value in column.drop_nulls()]


def find_reasons(evidence: ValidityEvidence) -> tuple[Reason, ...]:
    found = [reason for check in CHECKS for reason in check(evidence)]
    return tuple(sorted(found, key=lambda reason: not reason.invalidates))


def _invalidate(code: str, message: str, remedy: str, **evidence: float | int | str) -> list[Reason]:
    return [Reason(code, message, remedy, invalidates=True, evidence=evidence)]


def _note(code: str, message: str, remedy: str, **evidence: float | int | str) -> list[Reason]:
    return [Reason(code, message, remedy, invalidates=False, evidence=evidence)]


def compute_service_ns(samples: "pl.DataFrame") -> Any:
    """ns that the runtime took: on the device if events measured it, otherwise from call to answer."""
    if samples["compute_ns"].null_count() == 0:
        return samples["compute_ns"].to_numpy().astype(float)
    return (samples["end_ns"] - samples["start_ns"]).to_numpy().astype(float)


def _check_sample_count(evidence: ValidityEvidence) -> list[Reason]:
    count = len(evidence.samples)
    if count >= evidence.wanted_samples:
        return []
    return _invalidate(
        "too-few-samples",
        f"{count:,} samples; the requested percentile needs {evidence.wanted_samples:,}",
        "increase --max-time, or request a lower percentile (--percentile, --slo)",
        samples=count,
        needed=evidence.wanted_samples,
    )


def _check_interruption(evidence: ValidityEvidence) -> list[Reason]:
    return (
        _invalidate("interrupted", "interrupted before completion", "run it again")
        if evidence.measurement.interrupted
        else []
    )


def _check_steadiness(evidence: ValidityEvidence) -> list[Reason]:
    if evidence.steady:
        return []
    return _invalidate(
        "not-steady",
        "latency was not stable after warm-up",
        "increase max-warm-up (--set), or stop other work on the machine",
    )


def _check_drift(evidence: ValidityEvidence) -> list[Reason]:
    found = find_trend(compute_service_ns(evidence.samples))
    if found is None or found.p_value > 0.01 or abs(found.change) <= evidence.limits["max_drift"]:
        return []
    way = "slower" if found.change > 0 else "faster"
    return _invalidate(
        "drift",
        f"it became up to {abs(found.change):.1%} {way} while it was measured (p = {found.p_value:.1g})",
        "let the machine settle (clocks, temperature, other work), or increase warm-up (--set)",
        change=found.change,
        p_value=found.p_value,
    )


def _check_dispersion(evidence: ValidityEvidence) -> list[Reason]:
    values = compute_service_ns(evidence.samples)
    if len(values) < 2:
        return []
    cv, limit = float(values.std(ddof=1) / values.mean()), evidence.limits["max_cv"]
    if cv <= limit:
        return []
    of = ""  # names the duration if it is not the latency of the table
    if evidence.samples["compute_ns"].null_count() == 0:
        of = " on the device"
    elif evidence.measurement.load.scenario is Scenario.SERVER:
        of = " of the service time"
    return _invalidate(
        "dispersion",
        f"coefficient of variation {cv:.1%}{of} exceeds {limit:.1%}",
        "stop other work, lock the clocks, pin the worker (--affinity, with matching --option BACKEND.threads); "
        "or raise --max-cv, which is recorded",
        cv=cv,
        limit=limit,
    )


def _check_modes(evidence: ValidityEvidence) -> list[Reason]:
    modes = find_two_modes(compute_service_ns(evidence.samples))
    if modes is None:
        return []
    return _invalidate(
        "bimodal",
        f"bimodal latency: {modes.fast / 1e6:.3g} ms and {modes.slow / 1e6:.3g} ms ({modes.slow_share:.0%} of the samples)",
        "one number cannot describe it: check for two code paths, two clock levels, or thread migration (--affinity)",
        fast_ms=modes.fast / 1e6,
        slow_ms=modes.slow / 1e6,
        slow_share=modes.slow_share,
    )


def _check_host_load(evidence: ValidityEvidence) -> list[Reason]:
    """Judges a CPU subject by other processes' use, and a GPU subject by the worker's waiting, since its host may be large."""
    other, waited = (
        sum(values) / max(len(values), 1)
        for values in map(evidence.list_readings, ("other_cpu_cores", "worker_waited_cores"))
    )
    share, subject = evidence.limits["max_other_cpu_share"], evidence.measurement.subject
    cpus = len(subject.affinity or (0,))
    loaded = other > share * cpus if subject.device == "cpu" else waited > share / 2
    if not loaded:
        return []
    return _invalidate(
        "loaded-host",
        f"other processes used {other:.2f} of the worker's {cpus} cores (it waited for {waited:.2f})",
        "stop them, or isolate the worker's cores (--affinity)",
        other_cpu_cores=other,
        worker_waited_cores=waited,
    )


def _check_watching(evidence: ValidityEvidence) -> list[Reason]:
    if evidence.measurement.machine_file is not None:
        return []
    what = "nothing was recorded of the machine: other work or throttling cannot be excluded"
    return _invalidate("not-watched", what, "measure again, for longer (--min-time)")


def _check_gpu_processes(evidence: ValidityEvidence) -> list[Reason]:
    others = max(evidence.list_readings("gpu_other_processes"), default=0.0)
    if not others:
        return []
    return _invalidate(
        "busy-gpu", f"{others:.0f} other process(es) on the GPU", "stop them (see nvidia-smi)", others=others
    )


def _check_throttling(evidence: ValidityEvidence) -> list[Reason]:
    """Heat and hardware protection invalidate. A power cap is a setting of the card: a note, unless it moves the clocks."""
    masks = [int(mask) for mask in evidence.list_readings("gpu_throttle_reasons")]
    share = {
        name: sum(bool(mask & bit) for mask in masks) / len(masks) for bit, name in THROTTLE_REASONS.items() if masks
    }
    capped = share.pop(POWER_CAP, 0.0)
    seen = {name: part for name, part in share.items() if part > 0}
    found: list[Reason] = []
    if seen:
        text = ", ".join(f"{name} {part:.0%} of the time" for name, part in seen.items())
        found += _invalidate(
            "throttled", f"the GPU was throttled: {text}", "improve cooling, or lock its clocks", **seen
        )
    if capped:
        clocks = evidence.list_readings("gpu_sm_mhz")
        at = f", with its clock at {_quantile(clocks, 0.5):.0f} MHz" if clocks else ""
        text = f"the GPU hit its power limit {capped:.0%} of the time{at}"
        found += _note("power-capped", text, "results are valid only for this power limit and load", share=capped)
    return found


def _check_clocks(evidence: ValidityEvidence) -> list[Reason]:
    for name in ("gpu_sm_mhz", "gpu_mem_mhz", "cpu_mhz"):
        # clocks may idle at both ends of the measurement, but not in the middle, except for one reading in twenty: a range
        # grows with the number of readings
        inner = evidence.list_readings(name)[1:-1]
        if len(inner) >= 3 and max(inner) > 0:
            slow, fast = (_quantile(inner, level) for level in (0.05, 0.95))
            change = 1 - slow / fast
            if change > evidence.limits["max_clock_change"]:
                return _invalidate(
                    "clocks-moved",
                    f"{name} moved between {slow:.0f} and {fast:.0f} MHz ({change:.0%})",
                    "lock the clocks (nvidia-smi -lgc), or increase warm-up (--set)",
                    change=change,
                )
    return []


def _quantile(values: Sequence[float], level: float) -> float:
    import numpy as np

    return float(np.quantile(values, level))


def _check_temperature(evidence: ValidityEvidence) -> list[Reason]:
    readings, limit = evidence.list_readings("gpu_temperature_c"), evidence.limits["max_gpu_temperature_c"]
    hottest = max(readings, default=limit)
    if hottest <= limit:
        return []
    return _invalidate(
        "hot", f"the GPU reached {hottest:.0f} °C", "let it cool down, or improve airflow", temperature_c=hottest
    )


def _check_outputs(evidence: ValidityEvidence) -> list[Reason]:
    check = evidence.measurement.output_check
    if check is None:
        return []
    if not check.passed:
        remedy = "do not use these results: check the parity reported by optpipe build, or disable runtime caches"
        return _invalidate(
            "wrong-output", f"a timed output {check.why_not}", remedy, relative_error=check.relative_error or 0.0
        )
    if check.tells_inputs_apart is False:
        remedy = "use inputs that differ (--images)"
        return _note(
            "inputs-alike", "different inputs produce identical outputs: a stale output could not be detected", remedy
        )
    return []


def _check_cache(evidence: ValidityEvidence) -> list[Reason]:
    known, new = evidence.cache_probe.known_ns, evidence.cache_probe.new_ns
    if evidence.cache_probe.stale:
        remedy = "the runtime returned a stale output for a new input: do not use it"
        return _invalidate(
            "stale-answer", "the timed output for a new input differs from the runtime's own untimed output", remedy
        )
    if len(known) < SMALLEST_ROUNDS:
        return []
    ratio = ratio_from_rounds(new, known, PROBE_CONFIDENCE)
    if ratio.ci[1] >= evidence.limits["cached_answer"]:
        return []
    return _invalidate(
        "cached-answer",
        f"an input seen before is answered in {ratio.value:.0%} of the time of a new one",
        "disable the runtime's output cache; the benchmark measures cache hits",
        known_over_new=ratio.value,
    )


def _check_enqueue(evidence: ValidityEvidence) -> list[Reason]:
    samples = evidence.samples
    if samples["compute_ns"].null_count():
        return []
    enqueue, compute = float(samples["enqueue_ns"].median()), float(samples["compute_ns"].median())  # type: ignore[arg-type]
    if enqueue <= evidence.limits["enqueue_bound"] * compute:
        return []
    return _note(
        "enqueue-bound",
        f"the host needs {enqueue / 1e6:.3g} ms to launch {compute / 1e6:.3g} ms of GPU work",
        "use a CUDA graph (--option BACKEND.cuda_graph=true) or a larger batch",
        enqueue_over_compute=enqueue / compute,
    )


def _check_transfers(evidence: ValidityEvidence) -> list[Reason]:
    samples = evidence.samples
    if evidence.measurement.load.mode is not Mode.END_TO_END or samples["h2d_ns"].null_count():
        return []
    copies = float((samples["h2d_ns"] + samples["d2h_ns"]).median())  # type: ignore[arg-type]
    compute = float(samples["compute_ns"].median())  # type: ignore[arg-type]
    if copies <= compute:
        return []
    return _note(
        "transfer-bound",
        f"copies take {copies / 1e6:.3g} ms, compute {compute / 1e6:.3g} ms",
        "copy 8-bit pixels and normalize on the device, or decode on it (optpipe preprocess)",
        copies_over_compute=copies / compute,
    )


def _check_queue(evidence: ValidityEvidence) -> list[Reason]:
    """Judged by the capacity while queries wait, not by the queue, whose noise is unbounded near saturation."""
    samples, rate = evidence.samples, evidence.measurement.load.rate_per_s
    if evidence.measurement.load.scenario is not Scenario.SERVER or rate is None or len(samples) < 40:
        return []
    due, start, end = (samples[f"{name}_ns"].to_numpy() for name in ("scheduled", "start", "end"))
    waited = due[1:] <= end[:-1]
    if waited.sum() < FEWEST_WAITED:
        return []
    busy_ns = float((end[1:] - start[1:])[waited].mean()) + _quantile((start[1:] - end[:-1])[waited], 0.5)
    served = 1e9 / max(busy_ns, 1.0)
    if served > rate:
        return []
    return _invalidate(
        "falling-behind",
        f"the queue only grows: {rate:.4g} queries/s are due, and it serves {served:.4g}",
        "lower --rate, or use --slo to find the maximum rate",
        served_per_s=served,
    )


CHECKS: tuple[Callable[[ValidityEvidence], list[Reason]], ...] = (
    _check_outputs, _check_cache, _check_watching, _check_interruption, _check_sample_count, _check_host_load, _check_gpu_processes,
    _check_throttling, _check_clocks, _check_temperature, _check_steadiness, _check_drift, _check_modes, _check_dispersion, _check_queue,
    _check_enqueue, _check_transfers,
)  # fmt: skip
"""Causes on the host come before their effects on latency."""
