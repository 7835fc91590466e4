"""Files to answers: throughput and latency with preprocessing and inference overlapped, and what limits them."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from optpipe.core.transform import Transform
from optpipe.core.verdict import Verdict
from optpipe.preprocess.dali.pipeline import DaliPlan
from optpipe.preprocess.throughput.processes import run_job
from optpipe.preprocess.throughput.throughput import LIMIT_S, PATIENCE
from optpipe.preprocess.throughput.windows import compute_images_per_s, compute_rate_interval
from optpipe.workspace.store import Entry, Store

END_TO_END_WORKER = "optpipe.end_to_end.end_to_end_worker"
NEAR = 1.15
"""A part whose own rate is within this factor of the whole's is what the whole waits for."""
BUSY = 0.9
"""Share of all cores in use from which the CPU counts as the limit."""
ENQUEUE_BOUND = 0.8
"""Launching takes this share of inference from which the launches are the limit (trtexec's rule)."""
REQUIRED_OUTPUT_AGREEMENT = 0.9
"""The timed run's answers must equal the reference's for this share of those checked; precision may flip a few."""
SLOW_CPU = 5
"""On a CPU it may take so many times longer: a batch takes seconds, and several divisions of the cores are tried."""


@dataclass(frozen=True, slots=True)
class EndToEndBottleneck:
    """What the whole path waits for: `I/O`, `CPU`, `copy`, `GPU`, `launch`, and the numbers that say so."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class EndToEndResult:
    """One artifact fed from files."""

    label: str
    artifact: str
    plan: DaliPlan
    measured: Mapping[str, Any]
    error: str | None = None

    @property
    def images_per_s(self) -> float:
        """Of the overlapped path."""
        return compute_images_per_s(self.measured["batch_ns"], self.plan.batch_size)

    @property
    def of_slower_part(self) -> float:
        """The overlapped rate over that of the slower part alone: at most 1, but for noise."""
        parts = self.measured["parts"]
        return self.images_per_s / float(min(parts["preprocess"], parts["inference"]))

    @property
    def verdict(self) -> Verdict:
        """FAIL where the timed answers are other answers; INCONCLUSIVE where all are one class."""
        if self.error is not None:
            return Verdict.FAIL
        checked = self.measured["checked"]
        if checked["equal"] < REQUIRED_OUTPUT_AGREEMENT * checked["answers"]:
            return Verdict.FAIL
        return Verdict.PASS if checked["classes"] > 1 else Verdict.INCONCLUSIVE

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, with three ratios on a CPU, where both parts want the same cores.

        `of_slower_part` is over the slower part alone at its best; `sharing` has `bound_of_slower_part`, the most that
        this can be by the processor time that both cost, and `of_slower_part_with_same_threads`, over the slower part
        alone with the threads that it has beside the other.
        """
        base = {
            "artifact": self.artifact,
            "label": self.label,
            "batch_size": self.plan.batch_size,
            "plan": self.plan.to_dict(),
        }
        if self.error is not None:
            return {**base, "error": self.error, "verdict": str(self.verdict)}
        parts = self.measured["parts"]
        serial = 1 / (1 / parts["preprocess"] + 1 / parts["inference"])
        sharing = self.measured["sharing"]
        round_of = sharing["division"]["streams"] if sharing else 1
        bottleneck = find_end_to_end_bottleneck(self.images_per_s, self.measured, self.plan)
        return {
            **base,
            "error": None,
            "images_per_s": self.images_per_s,
            "ci": compute_rate_interval(self.measured["batch_ns"], round_of, self.plan.batch_size),
            "latency_ms": self._latency(),
            "parts_images_per_s": parts,
            "of_slower_part": self.of_slower_part,
            "of_one_after_the_other": self.images_per_s / serial,
            "sharing": sharing,
            "timeline": self._timeline(),
            "cpu_share": self.measured["cpu_share"],
            "other_cpu_cores": self.measured["other_cpu_cores"],
            "handover": self.measured["handover"],
            "environment": self.measured["environment"] if self.plan.device == "gpu" else {},
            "bottleneck": asdict(bottleneck),
            "answers_checked": self.measured["checked"],
            "verdict": str(self.verdict),
        }

    def _latency(self) -> dict[str, Any]:
        """Percentiles of the time from scheduling a batch until its answers; every image waits for its batch."""
        import numpy as np

        from optpipe.stats.percentiles import count_samples_needed, find_order_statistic

        ordered = np.sort(np.asarray(self.measured["latency_ns"], float))
        wanted = {f"p{percent:g}": percent for percent in (50.0, 90.0, 99.0)}
        return {
            name: find_order_statistic(ordered, percent) / 1e6
            for name, percent in wanted.items()
            if len(ordered) >= count_samples_needed(percent)
        }

    def _timeline(self) -> dict[str, float]:
        """Shares of the measured time as the process that joins the parts spent it."""
        total = sum(self.measured["batch_ns"])
        named = {"waiting for preprocessing": "wait_ns", "launching": "launch_ns", "waiting for outputs": "answer_ns"}
        shares = {name: sum(self.measured[key]) / total for name, key in named.items()}
        return {**shares, "rest": max(0.0, 1 - sum(shares.values()))}


def find_end_to_end_bottleneck(whole: float, measured: Mapping[str, Any], plan: DaliPlan) -> EndToEndBottleneck:
    """What limits the whole, by the rates of its parts alone and the CPU's load."""
    parts = measured["parts"]
    load = f"{measured['cpu_share']:.0%} of CPU capacity in use"
    if parts["read"] <= NEAR * whole:
        return EndToEndBottleneck("I/O", f"reading alone runs at {parts['read']:,.0f} images/s")
    if parts["preprocess"] <= parts["inference"]:
        return _find_preprocessing_bottleneck(measured, plan, load)
    if plan.device == "cpu" and measured["cpu_share"] >= BUSY:
        return EndToEndBottleneck("CPU", f"{load}; inference alone runs at {parts['inference']:,.0f} images/s")
    if measured["enqueue_share"] >= ENQUEUE_BOUND and plan.device == "gpu":
        return EndToEndBottleneck("launch", f"kernel launches take {measured['enqueue_share']:.0%} of inference time")
    where = "GPU" if plan.device == "gpu" else "CPU"
    return EndToEndBottleneck(
        where,
        f"inference alone runs at {parts['inference']:,.0f} images/s, preprocessing at {parts['preprocess']:,.0f}",
    )


def _find_preprocessing_bottleneck(measured: Mapping[str, Any], plan: DaliPlan, load: str) -> EndToEndBottleneck:
    parts = measured["parts"]
    alone = f"preprocessing alone runs at {parts['preprocess']:,.0f} images/s, decoding at {parts['decode']:,.0f}"
    if plan.device == "cpu" or measured["cpu_share"] >= BUSY:
        return EndToEndBottleneck("CPU", f"{alone}; {load}")
    if plan.decode == "cpu":
        copied = parts["decode"] <= NEAR * parts["preprocess"]
        return EndToEndBottleneck("CPU" if copied else "copy", f"{alone}; {load}")
    decoder = "the decoder" if parts["decode"] <= NEAR * parts["preprocess"] else "processing after decoding"
    return EndToEndBottleneck("GPU", f"{alone}: {decoder} is the limit; {load}")


def measure_end_to_end(
    entry: Entry,
    label: str,
    transform: Transform,
    paths: Sequence[Path],
    plan: DaliPlan,
    options: Mapping[str, Any],
    seconds: float,
    store: Store,
) -> EndToEndResult:
    """Measures one stored artifact in a process of its own; its hash is verified first. A failure is kept as `error`."""
    store.verify_entry(entry)
    job = {
        "paths": [str(path) for path in paths],
        "transform": transform.to_dict(),
        "plan": plan.to_dict(),
        "directory": str(entry.path),
        "backend": entry.info["backend"],
        "info": dict(entry.info),
        "device": entry.info["device"],
        "options": dict(options),
        "seconds": seconds,
    }
    limit_s = LIMIT_S * (SLOW_CPU if entry.info["device"] == "cpu" else 1) + PATIENCE * seconds
    result = run_job(END_TO_END_WORKER, job, limit_s)
    if isinstance(result, str):
        return EndToEndResult(label, entry.id, plan, {}, result)
    return EndToEndResult(label, entry.id, plan, result)
