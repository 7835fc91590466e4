"""Finds how DALI and ONNX Runtime share a CPU's cores fastest, and measures both at once and each alone."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from optpipe.backends.base import Session
from optpipe.core.transform import Transform
from optpipe.end_to_end.consumers import HostConsumer
from optpipe.end_to_end.loops import (
    OverlappedRun,
    Rate,
    measure_inference_rate,
    measure_pipeline_rate,
    run_overlapped,
)
from optpipe.end_to_end.sharing import (
    CoreSharing,
    CoreSplit,
    list_core_splits,
    vary_dali_threads,
)
from optpipe.preprocess.dali.pipeline import DaliPlan, make_reading_pipeline
from optpipe.workspace.environment import count_cores

TRIAL_S = 1.5
"""Each division is looked at for so long, `TRIAL_ROUNDS` times; the better look counts, as one may have been disturbed."""
TRIAL_ROUNDS = 2
BATCH_S = 0.25
"""Where inference takes longer for a batch, divisions are told apart with smaller ones."""

SessionLoader = Callable[[Mapping[str, Any]], Session]
"""Loads the artifact with these options over its own."""


@dataclass(frozen=True, slots=True)
class CoreSplitResult:
    """The fastest division in full."""

    whole: OverlappedRun
    preprocess: float
    """Images per second alone, at its best."""
    inference: float
    sharing: CoreSharing


@dataclass(frozen=True, slots=True)
class _Work:
    """What all loops have in common."""

    load: SessionLoader
    paths: list[Path]
    transform: Transform
    plan: DaliPlan

    def alone(self, consumer: HostConsumer, dali_threads: int, seconds: float) -> tuple[Rate, Rate]:
        plan = replace(self.plan, threads=dali_threads)
        preprocess = measure_pipeline_rate(make_reading_pipeline(self.paths, self.transform, plan), plan, seconds)
        return preprocess, measure_inference_rate(consumer, plan, self.transform, seconds)

    def whole(self, consumer: HostConsumer, dali_threads: int, seconds: float, **options: float) -> OverlappedRun:
        plan = replace(self.plan, threads=dali_threads)
        pipeline = make_reading_pipeline(self.paths, self.transform, plan)
        return run_overlapped(pipeline, consumer, plan, None, seconds, **options)


def find_core_split(
    load: SessionLoader,
    paths: list[Path],
    transform: Transform,
    plan: DaliPlan,
    fixed: Mapping[str, Any],
    seconds: float,
    part_s: float,
) -> CoreSplitResult:
    """Tries the divisions that agree with the `fixed` options, then measures the fastest: parts, whole, parts again.

    A part alone counts at its best: with all cores as the runtime takes them, or with the threads of the division.
    """
    work = _Work(load, paths, transform, plan)
    count = count_cores()
    first, *others = list_core_splits(count, plan.threads, fixed)
    with load(first.options) as session:
        alone = [work.alone(HostConsumer(session), first.dali_threads, part_s)]
        size = plan.batch_size if isinstance(session.inputs[0].shape[0], int) else _choose_quick_size(plan, alone[0][1])
    quick = replace(work, plan=replace(plan, batch_size=size))
    look_s = min(TRIAL_S, seconds)
    tried = _try_core_splits(quick, (first, *others), look_s)
    tried |= _try_core_splits(quick, vary_dali_threads(max(tried, key=tried.__getitem__), count), look_s)
    best = max(tried, key=tried.__getitem__)
    with load(best.options) as session:
        consumer = HostConsumer(session, best.streams)
        alone.append(work.alone(consumer, best.dali_threads, part_s))
        whole = work.whole(consumer, best.dali_threads, seconds)
        # the better of two: a part that was disturbed once must not make the overlap look good
        alone.append(work.alone(consumer, best.dali_threads, part_s))
    preprocess, inference = zip(*alone, strict=True)
    return CoreSplitResult(
        whole,
        max(each.images_per_s for each in preprocess),
        max(each.images_per_s for each in inference),
        CoreSharing(
            count,
            best,
            tried,
            max(each.images_per_s for each in preprocess[1:]),
            max(each.images_per_s for each in inference[1:]),
            min(each.cpu_s for each in preprocess),
            min(_measure_one_thread_s(quick, look_s), *(each.cpu_s for each in inference)),
            whole.rate.cpu_s,
        ),
    )


def _try_core_splits(work: _Work, choices: Iterable[CoreSplit], seconds: float) -> dict[CoreSplit, float]:
    """Images per second of each, from short looks in turn."""
    tried: dict[CoreSplit, float] = {}
    for each in (*choices,) * TRIAL_ROUNDS:
        with work.load(each.options) as session:
            consumer = HostConsumer(session, each.streams)
            rate = work.whole(consumer, each.dali_threads, seconds, patience=1.0).rate.images_per_s
        tried[each] = max(rate, tried.get(each, 0.0))
    return tried


def _choose_quick_size(plan: DaliPlan, inference: Rate) -> int:
    return max(1, min(plan.batch_size, int(inference.images_per_s * BATCH_S)))


def _measure_one_thread_s(work: _Work, seconds: float) -> float:
    """Processor time of inference where no thread waits for another."""
    with work.load({"threads": 1, "spinning": False}) as session:
        return measure_inference_rate(HostConsumer(session), work.plan, work.transform, seconds).cpu_s
