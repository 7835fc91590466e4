"""The steps that measure evidence: evaluation, preprocessing, bench, turns, and profile."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from optpipe.build.plan import BuildPlan
from optpipe.build.records import BuiltArtifact
from optpipe.core.entries import ArtifactInfo
from optpipe.core.errors import (
    BadInputError,
    MissingError,
)
from optpipe.core.events import Listener
from optpipe.core.metrics.sections import SPEEDUP
from optpipe.core.wording import Call
from optpipe.evaluate.evaluate import EvaluationRequest, run_evaluation
from optpipe.measure.bench import bench_artifacts
from optpipe.measure.measure import BenchPlan
from optpipe.measure.turns import measure_turns
from optpipe.models.artifacts.lookup import (
    find_artifacts,
)
from optpipe.models.export.exported import (
    Model,
)
from optpipe.preprocess.preprocess import PreprocessRequest, choose_dali_plan, derive_preprocessing
from optpipe.signoff.collect import (
    SignoffRequest,
)
from optpipe.signoff.evidence import find_kind
from optpipe.signoff.loads import load_from_filter, loads_from_criteria
from optpipe.signoff.policy import Criterion, LoadFilter
from optpipe.trace.nsys import ProfilePlan, Stage, find_nsys
from optpipe.trace.profile_model import profile_model
from optpipe.workspace.entry import Entry
from optpipe.workspace.store import Store

TURNS_MIN_SECONDS, TURNS_WARM_UP_SECONDS = 0.05, 1.0
"""Of a process that takes turns: its trials are short, and need no steady speed."""


MAX_SECONDS = 300.0
"""Stops a hanging load; the highest percentile decides the time, because fewer samples would show less drift."""


def run_bench_step(
    artifacts: Sequence[Entry],
    criteria: Sequence[Criterion],
    wanted: SignoffRequest,
    store: Store,
    listener: Listener,
    backend: str = "",
) -> list[Path]:
    """Measures every load of `criteria` on every artifact, those of `backend` with the policy's options; returns the runs."""
    criteria = [criterion for criterion in criteria if find_kind(criterion.section) == "bench"]
    stored = tuple(artifact for entry in artifacts for artifact in find_artifacts(entry.id, store))
    on_gpu = any(entry.info.device != "cpu" for entry in artifacts)
    runs = []
    for load, batches in loads_from_criteria(
        criteria, wanted.min_seconds, MAX_SECONDS, energy=on_gpu
    ):
        plan = BenchPlan(
            load=load,
            batches=batches,
            lengths=None if load.length is None else (load.length,),
            limits={"max_cv": wanted.max_cv},
            options={backend: wanted.policy.options} if backend else {},
            keep_going=False,
        )
        result = bench_artifacts(stored, plan, store, listener)
        if result.interrupted:
            raise KeyboardInterrupt
        runs.append(Path(result.run_dir))
    return runs


def run_turns_step(
    over: str,
    where: LoadFilter,
    judged: Entry[ArtifactInfo],
    wanted: SignoffRequest,
    store: Store,
    listener: Listener,
) -> Path:
    """Raises BadInputError if no build, or only the judged one, is called `over`."""
    mine, model = judged.info, judged.manifest.parents[0]
    others = [
        build
        for build in store.list_entries(ArtifactInfo)
        if build.id != judged.id and build.manifest.parents[:1] == (model,)
        if build.id == over
        or (
            (str(build.info.precision), build.info.backend, build.info.device)
            == (over, mine.backend, mine.device)
        )
    ]
    if not others:
        problem = f"the policy's [speedup] is over {over}, but {wanted.model} has no such build"
        raise BadInputError(problem + "; run `" + Call("build", wanted.model, precision=over) + "`")
    load = load_from_filter(where, TURNS_MIN_SECONDS, MAX_SECONDS)
    plan = BenchPlan(
        load=replace(load, max_warm_up_seconds=TURNS_WARM_UP_SECONDS),
        batches=(load.batch_size,),
        lengths=None if load.length is None else (load.length,),
        options={mine.backend: wanted.policy.options},
    )
    (rival,), (own,) = (find_artifacts(entry.id, store) for entry in (others[-1], judged))
    return measure_turns(rival, own, plan, store, listener).path


Step = Callable[[Sequence[Criterion]], list[Path]]
"""Measures the evidence for some criteria; returns the new runs."""


def make_steps(
    wanted: SignoffRequest,
    judged: BuiltArtifact,
    artifacts: Sequence[Entry],
    made_of: Entry,
    model: Callable[[], Model],
    store: Store,
    listener: Listener,
    plan: BuildPlan,
    data: Path | None = None,
) -> dict[str, Step]:
    """The steps by kind of run, in their order. `artifacts` are measured, and `judged` is profiled with the options of `plan`.

    `made_of` is the entry of its model, and `model` resolves the model's source.
    """

    def evaluate(_criteria: Sequence[Criterion]) -> list[Path]:
        return [
            Path(
                run_evaluation(
                    model(), EvaluationRequest(data, truncate=plan.truncate), store, listener
                ).run_dir
            )
        ]

    def preprocess(_criteria: Sequence[Criterion]) -> list[Path]:
        request = PreprocessRequest(
            images=plan.images, plan=choose_dali_plan("auto"), throughput=False
        )
        return [Path(derive_preprocessing(model(), request, store, listener).run_dir)]

    def bench(criteria: Sequence[Criterion]) -> list[Path]:
        if judged.entry.id not in {artifact.id for artifact in artifacts}:
            label = f"{judged.entry.info.backend} {judged.entry.info.precision}"
            raise MissingError(f"the judged build ({label}) cannot run on this machine")
        return run_bench_step(
            artifacts, criteria, wanted, store, listener, judged.entry.info.backend
        )

    def profile(_criteria: Sequence[Criterion]) -> list[Path]:
        """Profiles inference at the largest batch size and length of the policy."""
        lengths = {
            criterion.where.length for criterion in wanted.policy.criteria if criterion.where.length
        }
        capture = ProfilePlan(
            stage=(Stage.INFERENCE,),
            batch_size=(
                max(
                    (criterion.where.batch_size or 1 for criterion in wanted.policy.criteria),
                    default=1,
                ),
            ),
            length=(max(lengths),) if lengths else None,
        )
        find_nsys()
        return [profile_model(capture, [judged], made_of, store, listener, plan.options).run_dir]

    def turns(criteria: Sequence[Criterion]) -> list[Path]:
        """Compares the judged build with each build that a speedup is over."""
        loads = dict.fromkeys(
            (criterion.over, criterion.where) for criterion in criteria if criterion.is_of(SPEEDUP)
        )
        return [
            run_turns_step(str(over), where, judged.entry, wanted, store, listener)
            for over, where in loads
        ]

    return {
        "evaluate": evaluate,
        "preprocess": preprocess,
        "bench": bench,
        "turns": turns,
        "profile": profile,
    }
