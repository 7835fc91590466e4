"""May these figures be believed? Every reason says what was seen and what to do about it; nothing is ever trimmed.

Reasons that invalidate: what spoils the figures. Reasons that do not: properties of the artifact that a reader must know.
Each check is a small function from an `Evidence` to reasons; all of them run every time.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from optpipe.core.measurement import (
    Mode,
    OutputCheck,
    Reason,
    Scenario,
)
from optpipe.measuring.machine import POWER_CAP, THROTTLE_REASONS
from optpipe.stats.stability import trend, two_modes

if TYPE_CHECKING:
    import polars as pl

RULES = "rules_revision"
"""Key of the revision of the rules below among the limits. 2: a power cap is a note, as long as the clocks stay."""
LIMITS: Mapping[str, float] = {
    RULES: 2,
    "max_cv": 0.025,  # trtexec warns over the same
    "max_drift": 0.03,
    "max_other_cpu_share": 0.10,
    "max_clock_change": 0.03,
    "max_gpu_temperature_c": 85.0,
    "enqueue_bound": 0.8,  # trtexec: enqueue over 0.8 of compute
    "cached_answer": 0.75,
}
"""Thresholds by name; recorded with every measurement."""
WRONG_ANSWERS = frozenset({"wrong-output", "stale-answer", "cached-answer"})
"""Codes of answers that no figure makes up for."""
WITNESSED = WRONG_ANSWERS | frozenset(
    {
        "inputs-alike", "interrupted", "too-few-samples", "not-steady",
        "out-of-memory", "died", "refused", "int8-not-faster", "int8-accuracy",
    }
)  # fmt: skip
"""Codes of what the worker or its parent saw and no raw file holds; all others follow from samples and machine rows."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything that a measurement is judged by."""

    samples: "pl.DataFrame"
    """Measured samples only, in order of their end."""
    machine: "pl.DataFrame"
    """Rows between the first start and the last end."""
    scenario: Scenario
    mode: Mode
    cpus: int
    steady: bool
    wanted_samples: int
    output_check: OutputCheck | None
    cache_probe: Mapping[str, Any]
    rate_per_s: float | None = None
    interrupted: bool = False
    on_gpu: bool = False
    limits: Mapping[str, float] = field(default_factory=lambda: LIMITS)


def reasons_for(evidence: Evidence) -> tuple[Reason, ...]:
    """All reasons, those that invalidate first."""
    found = [reason for check in CHECKS for reason in check(evidence)]
    return tuple(sorted(found, key=lambda reason: not reason.invalidates))


def _bad(code: str, message: str, remedy: str, **evidence: float | int | str) -> list[Reason]:
    return [Reason(code, message, remedy, invalidates=True, evidence=evidence)]


def _note(code: str, message: str, remedy: str, **evidence: float | int | str) -> list[Reason]:
    return [Reason(code, message, remedy, invalidates=False, evidence=evidence)]


def service_ns(samples: "pl.DataFrame") -> Any:
    """The time that the runtime itself took: on the device where events say so, else from call to answer."""
    if samples["compute_ns"].null_count() == 0:
        return samples["compute_ns"].to_numpy().astype(float)
    return (samples["end_ns"] - samples["start_ns"]).to_numpy().astype(float)


def _too_few(evidence: Evidence) -> list[Reason]:
    count = len(evidence.samples)
    if count >= evidence.wanted_samples:
        return []
    return _bad(
        "too-few-samples",
        f"{count:,} samples where the wanted percentile needs {evidence.wanted_samples:,}",
        "give it more time with --max-time, or ask for a lower percentile (--percentile, --slo)",
        samples=count,
        needed=evidence.wanted_samples,
    )


def _interrupted(evidence: Evidence) -> list[Reason]:
    return _bad("interrupted", "stopped before its end", "run it again") if evidence.interrupted else []


def _unsteady(evidence: Evidence) -> list[Reason]:
    if evidence.steady:
        return []
    return _bad("not-steady", "warm-up ended without a steady level", "raise --max-warm-up, or quiet the machine")


def _drift(evidence: Evidence) -> list[Reason]:
    found = trend(service_ns(evidence.samples))
    if found is None or found.p_value > 0.01 or abs(found.change) <= evidence.limits["max_drift"]:
        return []
    way = "slower" if found.change > 0 else "faster"
    return _bad(
        "drift",
        f"it became {abs(found.change):.1%} {way} while it was measured (p = {found.p_value:.1g})",
        "let the machine settle (clocks, temperature, neighbours), or warm up longer with --warm-up",
        change=found.change,
        p_value=found.p_value,
    )


def _dispersion(evidence: Evidence) -> list[Reason]:
    values = service_ns(evidence.samples)
    if len(values) < 2:
        return []
    cv, limit = float(values.std(ddof=1) / values.mean()), evidence.limits["max_cv"]
    if cv <= limit:
        return []
    return _bad(
        "dispersion",
        f"coefficient of variation {cv:.1%}{_of_what(evidence)}, over {limit:.1%}",
        "quiet the machine, lock clocks, pin the worker (--affinity, with as many --option BACKEND.threads); "
        "or accept it with --max-cv, which is recorded",
        cv=cv,
        limit=limit,
    )


def _of_what(evidence: Evidence) -> str:
    """What varied, where that is not the latency whose variation the table shows."""
    if evidence.samples["compute_ns"].null_count() == 0:
        return " on the device"
    return " of the time in service" if evidence.scenario is Scenario.SERVER else ""


def _bimodal(evidence: Evidence) -> list[Reason]:
    modes = two_modes(service_ns(evidence.samples))
    if modes is None:
        return []
    return _bad(
        "bimodal",
        f"two speeds: {modes.fast / 1e6:.3g} ms and {modes.slow / 1e6:.3g} ms ({modes.slow_share:.0%} of the samples)",
        "one figure cannot describe it: look for two code paths, two clock levels or thread migration (--affinity)",
        fast_ms=modes.fast / 1e6,
        slow_ms=modes.slow / 1e6,
        slow_share=modes.slow_share,
    )


def _loaded_host(evidence: Evidence) -> list[Reason]:
    """For a CPU subject by who else was busy; for a GPU subject by what it did to the worker, whose host may be large."""
    other, waited = _mean(evidence, "other_cpu_cores") or 0.0, _mean(evidence, "worker_waited_cores") or 0.0
    share = evidence.limits["max_other_cpu_share"]
    loaded = waited > share / 2 if evidence.on_gpu else other > share * evidence.cpus
    if not loaded:
        return []
    return _bad(
        "loaded-host",
        f"other processes kept {other:.2f} cores busy beside the worker's {evidence.cpus} (it waited for {waited:.2f})",
        "stop them, or keep them off the worker's cores (--affinity with an isolated set)",
        other_cpu_cores=other,
        worker_waited_cores=waited,
    )


def _busy_gpu(evidence: Evidence) -> list[Reason]:
    others = _largest(evidence, "gpu_other_processes")
    if not others:
        return []
    return _bad(
        "busy-gpu", f"{others:.0f} other process(es) on the GPU", "stop them; nvidia-smi lists them", others=others
    )


def _throttled(evidence: Evidence) -> list[Reason]:
    """Heat and hardware protection invalidate. A power cap is how the card is run: a note, unless it moved the clocks."""
    column = evidence.machine.get_column("gpu_throttle_reasons", default=None)
    masks = [] if column is None else [int(mask) for mask in column.drop_nulls()]
    share = {
        name: sum(bool(mask & bit) for mask in masks) / len(masks) for bit, name in THROTTLE_REASONS.items() if masks
    }
    capped = share.pop(POWER_CAP, 0.0)
    seen = {name: part for name, part in share.items() if part > 0}
    found: list[Reason] = []
    if seen:
        text = ", ".join(f"{name} {part:.0%} of the time" for name, part in seen.items())
        found += _bad("throttled", f"the GPU was slowed: {text}", "cool it, or lock its clocks", **seen)
    if capped:
        clocks = evidence.machine.get_column("gpu_sm_mhz", default=None)
        median = None if clocks is None else clocks.median()
        at = "" if median is None else f", its clock at {float(median):.0f} MHz"
        text = f"the power limit held the GPU back {capped:.0%} of the time{at}"
        found += _note("power-capped", text, "the figures hold for this power limit and load only", share=capped)
    return found


def _clocks_moved(evidence: Evidence) -> list[Reason]:
    for name in ("gpu_sm_mhz", "gpu_mem_mhz", "cpu_mhz"):
        column = evidence.machine.get_column(name, default=None)
        values = [] if column is None else [float(value) for value in column.drop_nulls()]
        # ends of the measurement fall into idle clocks; the middle must not
        inner = values[1:-1]
        if len(inner) >= 3 and max(inner) > 0:
            change = 1 - min(inner) / max(inner)
            if change > evidence.limits["max_clock_change"]:
                return _bad(
                    "clocks-moved",
                    f"{name} went from {max(inner):.0f} to {min(inner):.0f} MHz ({change:.0%})",
                    "lock the clocks (nvidia-smi -lgc), or warm up longer with --warm-up",
                    change=change,
                )
    return []


def _hot(evidence: Evidence) -> list[Reason]:
    hottest, limit = _largest(evidence, "gpu_temperature_c"), evidence.limits["max_gpu_temperature_c"]
    if hottest is None or hottest <= limit:
        return []
    return _bad("hot", f"the GPU reached {hottest:.0f} °C", "let it cool, or improve its air", temperature_c=hottest)


def _outputs(evidence: Evidence) -> list[Reason]:
    check = evidence.output_check
    if check is None:
        return []
    if not check.passed:
        remedy = "do not use these figures: compare the artifact with optpipe build's parity, or disable runtime caches"
        return _bad(
            "wrong-output", f"a timed answer {check.why_not}", remedy, relative_error=check.relative_error or 0.0
        )
    if check.tells_inputs_apart is False:
        remedy = "rotate through inputs that differ (--images)"
        return _note("inputs-alike", "different inputs give equal outputs: a stale answer could not be seen", remedy)
    return []


def _cached(evidence: Evidence) -> list[Reason]:
    ratio, limit = evidence.cache_probe.get("known_over_new"), evidence.limits["cached_answer"]
    if evidence.cache_probe.get("stale"):
        remedy = "the runtime answered a new input with an old answer: do not use it"
        return _bad(
            "stale-answer", "an input never seen before got an answer that the runtime itself contradicts", remedy
        )
    upper = evidence.cache_probe.get("upper_bound")
    if ratio is None or upper is None or upper >= limit:
        return []
    return _bad(
        "cached-answer",
        f"an input seen before is answered in {ratio:.0%} of the time of a new one",
        "switch the runtime's answer cache off: it measures look-ups",
        known_over_new=ratio,
    )


def _enqueue_bound(evidence: Evidence) -> list[Reason]:
    samples = evidence.samples
    if samples["compute_ns"].null_count():
        return []
    enqueue, compute = float(samples["enqueue_ns"].median()), float(samples["compute_ns"].median())  # type: ignore[arg-type]
    if enqueue <= evidence.limits["enqueue_bound"] * compute:
        return []
    return _note(
        "enqueue-bound",
        f"the host takes {enqueue / 1e6:.3g} ms to launch {compute / 1e6:.3g} ms of work",
        "use a CUDA graph (--option BACKEND.cuda_graph=true) or a larger batch",
        enqueue_over_compute=enqueue / compute,
    )


def _transfer_bound(evidence: Evidence) -> list[Reason]:
    samples = evidence.samples
    if evidence.mode is not Mode.END_TO_END or samples["h2d_ns"].null_count():
        return []
    copies = float((samples["h2d_ns"] + samples["d2h_ns"]).median())  # type: ignore[arg-type]
    compute = float(samples["compute_ns"].median())  # type: ignore[arg-type]
    if copies <= compute:
        return []
    return _note(
        "transfer-bound",
        f"copies take {copies / 1e6:.3g} ms, the computation {compute / 1e6:.3g} ms",
        "copy 8-bit pixels and normalize on the device, or decode there (optpipe preprocess)",
        copies_over_compute=copies / compute,
    )


def _falling_behind(evidence: Evidence) -> list[Reason]:
    if evidence.scenario is not Scenario.SERVER or len(evidence.samples) < 40:
        return []
    waited = (evidence.samples["start_ns"] - evidence.samples["scheduled_ns"]).to_numpy()
    quarter = len(waited) // 4
    first, last = float(waited[:quarter].mean()), float(waited[-quarter:].mean())
    typical = float(service_ns(evidence.samples).mean())
    if last <= 2 * first or last <= 5 * typical:
        return []
    return _bad(
        "falling-behind",
        f"the queue grew to {last / 1e6:.3g} ms: {evidence.rate_per_s:.4g} queries/s is more than it can serve",
        "lower --rate, or let --slo find the highest",
        queue_ms=last / 1e6,
    )


def _mean(evidence: Evidence, name: str) -> float | None:
    column = evidence.machine.get_column(name, default=None)
    value = None if column is None else column.mean()
    return float(value) if isinstance(value, int | float) else None


def _largest(evidence: Evidence, name: str) -> float | None:
    column = evidence.machine.get_column(name, default=None)
    value = None if column is None else column.max()
    return float(value) if isinstance(value, int | float) else None


CHECKS: tuple[Callable[[Evidence], list[Reason]], ...] = (
    _outputs, _cached, _interrupted, _too_few, _unsteady, _drift, _bimodal, _dispersion, _falling_behind,
    _loaded_host, _busy_gpu, _throttled, _clocks_moved, _hot, _enqueue_bound, _transfer_bound,
)  # fmt: skip
