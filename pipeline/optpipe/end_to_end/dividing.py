"""Finds how DALI and ONNX Runtime share a CPU's cores fastest, and measures both at once and each alone."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from optpipe.backends.base import Session
from optpipe.core.transform import Transform
from optpipe.end_to_end.consumers import OnHost
from optpipe.end_to_end.loops import (
    Rate,
    Whole,
    inference_rate,
    overlapped,
    pipeline_rate,
)
from optpipe.end_to_end.sharing import (
    Division,
    Sharing,
    divisions,
    with_other_dali_threads,
)
from optpipe.preprocess.dali.pipeline import DaliPlan, reading_pipeline
from optpipe.workspace.environment import cores

LOOK_S = 1.5
"""Each division is looked at for so long, `ROUNDS` times; the better look counts, as one may have been disturbed."""
ROUNDS = 2
BATCH_S = 0.25
"""Where inference takes longer for a batch, divisions are told apart with smaller ones."""

Load = Callable[[Mapping[str, Any]], Session]
"""Loads the artifact with these options over its own."""


@dataclass(frozen=True, slots=True)
class Divided:
    """The fastest division in full."""

    whole: Whole
    preprocess: float
    """Images per second alone, at its best."""
    inference: float
    sharing: Sharing


@dataclass(frozen=True, slots=True)
class _Work:
    """What all loops have in common."""

    load: Load
    paths: list[Path]
    transform: Transform
    plan: DaliPlan

    def alone(self, consumer: OnHost, dali_threads: int, seconds: float) -> tuple[Rate, Rate]:
        plan = replace(self.plan, threads=dali_threads)
        preprocess = pipeline_rate(reading_pipeline(self.paths, self.transform, plan), plan, seconds)
        return preprocess, inference_rate(consumer, plan, self.transform, seconds)

    def whole(self, consumer: OnHost, dali_threads: int, seconds: float, **options: float) -> Whole:
        plan = replace(self.plan, threads=dali_threads)
        pipeline = reading_pipeline(self.paths, self.transform, plan)
        return overlapped(pipeline, consumer, plan, None, seconds, **options)


def divided(
    load: Load,
    paths: list[Path],
    transform: Transform,
    plan: DaliPlan,
    fixed: Mapping[str, Any],
    seconds: float,
    part_s: float,
) -> Divided:
    """Tries the divisions that agree with the `fixed` options, then measures the fastest: parts, whole, parts again.

    A part alone counts at its best: with all cores as the runtime takes them, or with the threads of the division.
    """
    work = _Work(load, paths, transform, plan)
    count = cores()
    first, *others = divisions(count, plan.threads, fixed)
    with load(first.options) as session:
        alone = [work.alone(OnHost(session), first.dali_threads, part_s)]
        size = plan.batch_size if isinstance(session.inputs[0].shape[0], int) else _quick_size(plan, alone[0][1])
    quick = replace(work, plan=replace(plan, batch_size=size))
    look_s = min(LOOK_S, seconds)
    tried = _tried(quick, (first, *others), look_s)
    tried |= _tried(quick, with_other_dali_threads(max(tried, key=tried.__getitem__), count), look_s)
    best = max(tried, key=tried.__getitem__)
    with load(best.options) as session:
        consumer = OnHost(session, best.streams)
        alone.append(work.alone(consumer, best.dali_threads, part_s))
        whole = work.whole(consumer, best.dali_threads, seconds)
        # the better of two: a part that was disturbed once must not make the overlap look good
        alone.append(work.alone(consumer, best.dali_threads, part_s))
    preprocess, inference = zip(*alone, strict=True)
    return Divided(
        whole,
        max(each.images_per_s for each in preprocess),
        max(each.images_per_s for each in inference),
        Sharing(
            count,
            best,
            tried,
            max(each.images_per_s for each in preprocess[1:]),
            max(each.images_per_s for each in inference[1:]),
            min(each.cpu_s for each in preprocess),
            min(_one_thread_s(quick, look_s), *(each.cpu_s for each in inference)),
            whole.rate.cpu_s,
        ),
    )


def _tried(work: _Work, choices: Iterable[Division], seconds: float) -> dict[Division, float]:
    """Images per second of each, from short looks in turn."""
    tried: dict[Division, float] = {}
    for each in (*choices,) * ROUNDS:
        with work.load(each.options) as session:
            consumer = OnHost(session, each.streams)
            rate = work.whole(consumer, each.dali_threads, seconds, patience=1.0).rate.images_per_s
        tried[each] = max(rate, tried.get(each, 0.0))
    return tried


def _quick_size(plan: DaliPlan, inference: Rate) -> int:
    return max(1, min(plan.batch_size, int(inference.images_per_s * BATCH_S)))


def _one_thread_s(work: _Work, seconds: float) -> float:
    """Processor time of inference where no thread waits for another."""
    with work.load({"threads": 1, "spinning": False}) as session:
        return inference_rate(OnHost(session), work.plan, work.transform, seconds).cpu_s
