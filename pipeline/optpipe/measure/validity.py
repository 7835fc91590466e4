"""Checks whether figures may be believed. Every reason has an observation and a remedy; nothing is ever trimmed.

Invalidating reasons spoil the figures; the others are properties of the artifact that readers must know. All
checks always run.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np
import polars as pl

from optpipe.core.bench_defaults import MAX_CV
from optpipe.core.load import Mode, Scenario
from optpipe.core.measurement import Measurement, Reason
from optpipe.core.wording import Argument, Call
from optpipe.measure.process import POWER_CAP, THROTTLE_REASONS
from optpipe.measure.worker.messages import CacheProbe
from optpipe.stats.ratio import SMALLEST_ROUNDS, ratio_from_rounds
from optpipe.stats.stability import (
    FEWEST_REPEATS,
    compute_trend_p_value,
    find_trend,
    find_two_modes,
    remove_input_costs,
)

LIMITS: Mapping[str, float] = {
    "max_cv": MAX_CV,
    "max_drift": 0.025,  # finds a drift of 3% despite noise
    "drift_risk": 1e-6,  # absent in older records, which took slow noise for drift
    "input_repeats": FEWEST_REPEATS,  # absent in older records, which took inputs of different cost for two speeds
    "max_other_cpu_share": 0.10,
    "max_clock_change": 0.03,
    "max_gpu_temperature_c": 85.0,
    "power_cap_share": 0.25,  # absent in older records, which judged clocks at the power cap as others
    "enqueue_bound": 0.8,  # trtexec: enqueue over 0.8 of compute
    "cached_answer": 0.75,
}
WARM_UP = Argument("warm_up", setting=True)
PROBE_CONFIDENCE = 0.999
"""Confidence of the ratio that shows a cache of answers."""
FEWEST_WAITED = 20
"""Minimum waiting queries for an estimate of a server's capacity."""
WRONG_OUTPUTS = frozenset({"wrong-output", "stale-answer", "cached-answer"})
"""Codes of wrong answers, which no figure compensates."""
HOST_CAUSES = frozenset({"loaded-host", "busy-gpu", "throttled", "clocks-moved", "hot"})
"""Codes of causes on the machine, which the next process meets too."""
STOP_AFTER = 2
"""Processes in a row that one cause on the machine made INVALID: the next ones would meet it too."""
WITNESSED = WRONG_OUTPUTS | {
    "inputs-alike", "interrupted", "too-few-samples", "not-steady",
    "out-of-memory", "died", "refused", "impossible", "int8-not-faster", "int8-accuracy", "fp8-not-faster", "fp8-accuracy",
}  # fmt: skip
"""Codes of observations by the worker or its parent that no raw file holds; all others follow from samples and machine rows."""


@dataclass(frozen=True, slots=True)
class ValidityEvidence:
    measurement: Measurement
    """Its figures and verdict are ignored."""
    samples: pl.DataFrame
    machine: pl.DataFrame
    """Rows between the first start and the last end."""
    steady: bool = True
    wanted_samples: int = 0
    cache_probe: CacheProbe = field(default_factory=CacheProbe)

    @property
    def limits(self) -> Mapping[str, float]:
        return {**LIMITS, **self.measurement.limits}

    @property
    def seconds(self) -> float:
        """From the first start to the last end; 0 without samples."""
        if self.samples.is_empty():
            return 0.0
        first, last = self.samples["start_ns"].to_numpy(), self.samples["end_ns"].to_numpy()
        return float(last.max() - first.min()) / 1e9

    def list_readings(self, name: str) -> list[float]:
        """Values of a machine column, one per row; empty if it was not read."""
        column = self.machine.get_column(name, default=None)
        return [] if column is None else [float(value) for value in column.drop_nulls()]


def find_reasons(evidence: ValidityEvidence) -> tuple[Reason, ...]:
    """All reasons, invalidating ones first; causes on the host come before their effects on latency."""
    checks = (
        _check_outputs,
        _check_completeness,
        _check_host,
        _check_gpu,
        _check_clocks,
        _check_latencies,
        _check_queue,
        _check_work,
    )
    reasons = [reason for check in checks for reason in check(evidence)]
    return tuple(sorted(reasons, key=lambda reason: not reason.invalidates))


def find_repeated_cause(measured: Sequence[Measurement]) -> Reason | None:
    """The cause on the machine that made the last STOP_AFTER processes INVALID, in all their measurements; None without one.

    It may have symptoms beside it, such as two speeds. Each build has a process of its own in a round of several.
    """
    causes: dict[int, list[dict[str, Reason]]] = {}
    for measurement in measured:
        by_code = {
            reason.code: reason
            for reason in measurement.reasons
            if reason.invalidates and reason.code in HOST_CAUSES
        }
        causes.setdefault(measurement.process, []).append(by_code)
    if len(causes) < STOP_AFTER:
        return None
    points = [point for process in list(causes.values())[-STOP_AFTER:] for point in process]
    return next(
        (reason for code, reason in points[-1].items() if all(code in point for point in points)),
        None,
    )


def explain_stop(done: str, cause: Reason, turns: Call, anyway: Call) -> str:
    """The warning of a measurement that stopped at `find_repeated_cause`; `done` is such as `process 2 of 5`."""
    way = "let two builds take turns under the same disturbance (`" + turns + "`), or "
    way += "measure all processes anyway (`" + anyway + "`)"
    problem = f"stopped after {done}, because the last two were disturbed: {cause.message}"
    return problem + "\n" + cause.remedy + "; or " + way


def _invalidate(code: str, message: str, remedy: str, **evidence: float | int | str) -> Reason:
    return Reason(code, message, remedy, invalidates=True, evidence=evidence)


def _note(code: str, message: str, remedy: str, **evidence: float | int | str) -> Reason:
    return Reason(code, message, remedy, invalidates=False, evidence=evidence)


def compute_service_ns(samples: pl.DataFrame) -> Any:
    """ns that the runtime took: on the device if events measured it, otherwise from call to answer."""
    if samples["compute_ns"].null_count() == 0:
        return samples["compute_ns"].to_numpy().astype(float)
    return (samples["end_ns"] - samples["start_ns"]).to_numpy().astype(float)


def _quantile(values: Sequence[float], level: float) -> float:
    return float(np.quantile(values, level))


def _check_outputs(evidence: ValidityEvidence) -> Iterator[Reason]:
    check, probe = evidence.measurement.output_check, evidence.cache_probe
    if check is not None and not check.passed:
        remedy = "do not use these results: check the parity reported by "
        remedy += Call("build") + ", or disable runtime caches"
        error = check.relative_error or 0.0
        yield _invalidate(
            "wrong-output", f"a timed output {check.why_not}", remedy, relative_error=error
        )
    elif check is not None and check.tells_inputs_apart is False:
        text = "different inputs produce identical outputs: a stale output could not be detected"
        yield _note("inputs-alike", text, "use distinct inputs (" + Argument("images") + ")")
    if probe.stale:
        text = "the timed output for a new input differs from the runtime's own untimed output"
        yield _invalidate(
            "stale-answer",
            text,
            "the runtime returned a stale output for a new input: do not use it",
        )
    elif len(probe.known_ns) >= SMALLEST_ROUNDS:
        ratio = ratio_from_rounds(probe.new_ns, probe.known_ns, PROBE_CONFIDENCE)
        # equal rounds have no interval, and may still be answers of a cache
        highest = ratio.ci[1] if ratio.is_known else ratio.value
        if highest < evidence.limits["cached_answer"]:
            text = f"a repeated input takes {ratio.value:.0%} of the time of a new one"
            remedy = "disable the runtime's output cache; the benchmark measures cache hits"
            yield _invalidate("cached-answer", text, remedy, known_over_new=ratio.value)


def _check_completeness(evidence: ValidityEvidence) -> Iterator[Reason]:
    if evidence.measurement.machine_file is None:
        what = "the state of the machine was not recorded, so other work or throttling cannot be excluded"
        yield _invalidate(
            "not-watched", what, "measure again, for longer (" + Argument("min_time") + ")"
        )
    elif len(evidence.machine) < int(evidence.seconds):
        read = f"read {len(evidence.machine)} times in {evidence.seconds:.1f} s"
        what = f"the machine was {read}, so other work or throttling cannot be excluded"
        yield _invalidate("not-watched", what, "measure again on a machine with less other work")
    if evidence.measurement.interrupted:
        yield _invalidate("interrupted", "interrupted before completion", "run it again")
    if (count := len(evidence.samples)) < evidence.wanted_samples:
        text = f"{count:,} samples; the requested percentile needs {evidence.wanted_samples:,}"
        remedy = "increase " + Argument("max_time") + ", or request a lower percentile ("
        remedy += Argument("percentile") + ", " + Argument("slo") + ")"
        yield _invalidate(
            "too-few-samples", text, remedy, samples=count, needed=evidence.wanted_samples
        )


def _check_host(evidence: ValidityEvidence) -> Iterator[Reason]:
    """Judges a CPU subject by other processes' use, and a GPU subject by the worker's waiting, since its host may be large."""
    readings = map(evidence.list_readings, ("other_cpu_cores", "worker_waited_cores"))
    other, waited = (sum(values) / max(len(values), 1) for values in readings)
    share, subject = evidence.limits["max_other_cpu_share"], evidence.measurement.subject
    cpus = len(subject.affinity or (0,))
    if other > share * cpus if subject.device == "cpu" else waited > share / 2:
        text = f"busy host: other processes used {other:.2f} of {cpus} cores, and the worker waited for {waited:.2f} of a core"
        isolate = "isolate the worker's cores (" + Argument("affinity") + ")"
        yield _invalidate(
            "loaded-host",
            text,
            "stop the other processes, or " + isolate,
            other_cpu_cores=other,
            worker_waited_cores=waited,
        )


def _check_gpu(evidence: ValidityEvidence) -> Iterator[Reason]:
    """Heat and hardware protection invalidate. A power cap is a setting of the card: a note, unless it moves the clocks."""
    if others := max(evidence.list_readings("gpu_other_processes"), default=0.0):
        text = f"{others:.0f} other process(es) on the GPU"
        yield _invalidate("busy-gpu", text, "stop them (see nvidia-smi)", others=others)
    masks = [int(mask) for mask in evidence.list_readings("gpu_throttle_reasons")]
    share = {
        name: fmean(bool(mask & bit) for mask in masks)
        for bit, name in THROTTLE_REASONS.items()
        if masks
    }
    capped = share.pop(POWER_CAP, 0.0)
    if seen := {name: part for name, part in share.items() if part > 0}:
        text = ", ".join(f"{name} {part:.0%} of the time" for name, part in seen.items())
        remedy = "improve cooling, or lock its clocks"
        yield _invalidate("throttled", f"the GPU was throttled: {text}", remedy, **seen)
    if capped:
        clocks = evidence.list_readings("gpu_sm_mhz")
        at = ""
        if clocks:
            slow, middle, fast = (_quantile(clocks, level) for level in (0.05, 0.5, 0.95))
            at = f", with its clock at {middle:.0f} MHz ({slow:.0f} to {fast:.0f})"
        text = f"the GPU hit its power limit {capped:.0%} of the time{at}"
        yield _note(
            "power-capped",
            text,
            "results are valid only for this power limit and load",
            share=capped,
        )


CAPPED_PARTS = 4
"""A GPU was at its power cap throughout if a share of the readings in each of so many parts of the measurement shows the cap."""


def was_power_capped(evidence: ValidityEvidence) -> bool:
    """Whether the power cap held the clocks throughout: a card at its cap moves them all the time, its steady state.

    A card close to its cap reaches it in a part of the readings only, but then in every part of the measurement.
    """
    share = evidence.measurement.limits.get("power_cap_share")
    bit = next(bit for bit, name in THROTTLE_REASONS.items() if name == POWER_CAP)
    masks = evidence.list_readings("gpu_throttle_reasons")[1:-1]
    capped = [bool(int(mask) & bit) for mask in masks]
    cuts = [part * len(capped) // CAPPED_PARTS for part in range(CAPPED_PARTS + 1)]
    if share is None or len(capped) < 2 * CAPPED_PARTS:
        return False
    least = max(share, LIMITS["power_cap_share"])
    return all(fmean(capped[start:end]) >= least for start, end in pairwise(cuts))


def _check_clocks(evidence: ValidityEvidence) -> Iterator[Reason]:
    """Clocks that moved; those of a GPU at its power cap are the note `power-capped`, and drift and scatter judge the rest."""
    capped = was_power_capped(evidence)
    for name in ("gpu_sm_mhz", "gpu_mem_mhz", "cpu_mhz"):
        if capped and name == "gpu_sm_mhz":
            continue
        # clocks may idle at both ends of the measurement, but not in the middle, except for one reading in twenty: a range
        # grows with the number of readings
        inner = evidence.list_readings(name)[1:-1]
        if len(inner) >= 3 and max(inner) > 0:
            slow, fast = (_quantile(inner, level) for level in (0.05, 0.95))
            change = 1 - slow / fast
            if change > evidence.limits["max_clock_change"]:
                text = f"{name} moved between {slow:.0f} and {fast:.0f} MHz ({change:.0%})"
                remedy = "lock the clocks (nvidia-smi -lgc), or increase " + WARM_UP
                yield _invalidate("clocks-moved", text, remedy, change=change)
                break
    hottest = max(evidence.list_readings("gpu_temperature_c"), default=0.0)
    if hottest > evidence.limits["max_gpu_temperature_c"]:
        text = f"the GPU reached {hottest:.0f} °C"
        yield _invalidate(
            "hot", text, "let it cool down, or improve airflow", temperature_c=hottest
        )


def compute_leveled_ns(evidence: ValidityEvidence) -> np.ndarray:
    """The service time of each sample as if all inputs cost the same; older records are judged without that."""
    values: np.ndarray = compute_service_ns(evidence.samples)
    inputs = evidence.samples.get_column("input", default=None)
    repeats = evidence.measurement.limits.get("input_repeats")
    if inputs is None or repeats is None:
        return values
    return remove_input_costs(values, inputs.to_numpy(), max(repeats, FEWEST_REPEATS))


def _check_drift(evidence: ValidityEvidence, values: np.ndarray) -> Iterator[Reason]:
    """A trend invalidates; slow noise, which other processes do not repeat, is part of their scatter."""
    change, p_value = find_trend(values) or (0.0, 1.0)
    if p_value > 0.01 or abs(change) <= evidence.limits["max_drift"]:
        return
    way = "slower" if change > 0 else "faster"
    risk = evidence.measurement.limits.get("drift_risk")
    if risk is not None:
        p_value = compute_trend_p_value(values)
        if p_value > LIMITS["drift_risk"]:
            text = f"latency became up to {abs(change):.1%} {way}, which slow noise explains (p = {p_value:.1g})"
            remedy = "more processes narrow the interval; less other work or locked clocks narrow it sooner"
            yield _note("slow-noise", text, remedy, change=change, p_value=p_value)
            return
    text = (
        f"latency drifted: up to {abs(change):.1%} {way} during the measurement (p = {p_value:.1g})"
    )
    remedy = "let the machine settle (clocks, temperature, other work), or increase " + WARM_UP
    yield _invalidate("drift", text, remedy, change=change, p_value=p_value)


def _check_latencies(evidence: ValidityEvidence) -> Iterator[Reason]:
    if not evidence.steady:
        longer = Argument("max_warm_up", setting=True)
        remedy = "increase " + longer + ", or stop other work on the machine"
        yield _invalidate("not-steady", "latency was not stable after warm-up", remedy)
    values = compute_leveled_ns(evidence)
    yield from _check_drift(evidence, values)
    if (modes := find_two_modes(values)) is not None:
        fast, slow, share = modes[0] / 1e6, modes[1] / 1e6, modes[2]
        text = f"bimodal latency: {fast:.3g} ms and {slow:.3g} ms ({share:.0%} of the samples)"
        migration = "thread migration (" + Argument("affinity") + ")"
        remedy = "check for two code paths, two clock levels, or " + migration
        yield _invalidate("bimodal", text, remedy, fast_ms=fast, slow_ms=slow, slow_share=share)
    limit = evidence.limits["max_cv"]
    if len(values) > 1 and (cv := float(values.std(ddof=1) / values.mean())) > limit:
        of = ""  # names the duration if it is not the latency of the table
        if evidence.samples["compute_ns"].null_count() == 0:
            of = " on the device"
        elif evidence.measurement.load.scenario is Scenario.SERVER:
            of = " of the service time"
        text = f"coefficient of variation {100 * cv:.3g}%{of} exceeds {limit:.1%}"
        threads = Argument("option", {"BACKEND": {"threads": "N"}})
        pin = "pin the worker (" + Argument("affinity") + ", with matching " + threads + ")"
        turns = "(`" + Call("bench", "A", against="B", turns=True) + "`)"
        remedy = "stop other work, lock the clocks, " + pin
        remedy += ", or compare two builds in turns, which load disturbs alike " + turns
        yield _invalidate("dispersion", text, remedy, cv=cv, limit=limit)


def _check_queue(evidence: ValidityEvidence) -> Iterator[Reason]:
    """Judged by the capacity while queries wait, not by the queue, whose noise is unbounded near saturation."""
    samples, load = evidence.samples, evidence.measurement.load
    if load.scenario is not Scenario.SERVER or load.rate_per_s is None or len(samples) < 40:
        return
    due, start, end = (samples[f"{name}_ns"].to_numpy() for name in ("scheduled", "start", "end"))
    waited = due[1:] <= end[:-1]
    if waited.sum() < FEWEST_WAITED:
        return
    busy_ns = float((end[1:] - start[1:])[waited].mean()) + _quantile(
        (start[1:] - end[:-1])[waited], 0.5
    )
    served = 1e9 / max(busy_ns, 1.0)
    if served <= load.rate_per_s:
        text = (
            f"overloaded: {load.rate_per_s:.4g} queries/s arrive, and the build serves {served:.4g}"
        )
        remedy = "lower " + Argument("rate") + ", or use " + Argument("slo")
        remedy += " to find the maximum rate"
        yield _invalidate("falling-behind", text, remedy, served_per_s=served)


def _check_work(evidence: ValidityEvidence) -> Iterator[Reason]:
    """Notes on a GPU subject that the host's launches or the copies limit."""
    samples = evidence.samples
    if samples["compute_ns"].null_count():
        return
    enqueue, compute = (float(samples[name].median()) for name in ("enqueue_ns", "compute_ns"))  # type: ignore[arg-type]
    if enqueue > evidence.limits["enqueue_bound"] * compute:
        text = f"the host needs {enqueue / 1e6:.3g} ms to launch {compute / 1e6:.3g} ms of GPU work"
        graph = Argument("option", {"BACKEND": {"cuda_graph": "true"}})
        remedy = "use a CUDA graph (" + graph + ") or a larger batch"
        yield _note("enqueue-bound", text, remedy, enqueue_over_compute=enqueue / compute)
    if evidence.measurement.load.mode is Mode.END_TO_END and not samples["h2d_ns"].null_count():
        copies = float((samples["h2d_ns"] + samples["d2h_ns"]).median())  # type: ignore[arg-type]
        if copies > compute:
            text = f"copies take {copies / 1e6:.3g} ms, compute {compute / 1e6:.3g} ms"
            decode = "decode on it (" + Call("preprocess") + ")"
            remedy = "copy 8-bit pixels and normalize on the device, or " + decode
            yield _note("transfer-bound", text, remedy, copies_over_compute=copies / compute)
