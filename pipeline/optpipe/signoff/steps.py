"""The steps that gather evidence, as `optpipe run` takes them all and `optpipe signoff` takes what is missing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optpipe.build.records import BuiltArtifact
from optpipe.core.defaults import MAX_CV, PROCESSES
from optpipe.core.events import Listener
from optpipe.models.export.model import Model
from optpipe.signoff.loads import loads_from_criteria
from optpipe.signoff.policy import Criterion
from optpipe.workspace.entry import Entry
from optpipe.workspace.store import Store


@dataclass(frozen=True, slots=True)
class MeasurementBudget:
    """How long each load is measured, in how many processes, and how much it may scatter.

    As long as p99 takes, or a higher percentile of the policy; fewer samples would show less drift. `max_seconds` only ends what hangs.
    """

    min_seconds: float = 0.6
    max_seconds: float = 300.0
    processes: int = PROCESSES
    max_cv: float = MAX_CV


def require_evaluable(model: Model, data: Path, store: Store, listener: Listener, *, truncate: bool) -> None:
    """Raises BadInputError, before anything is exported, for data that are not there or do not fit the model."""
    from optpipe.core.errors import require_existing
    from optpipe.evaluate.tasks.registry import TASKS
    from optpipe.models.export.exported import prepare_model, read_card, read_tokenizer
    from optpipe.models.export.onnx_export import read_outputs_early
    from optpipe.models.inputs.task_data import load_sample_set, resolve_texts

    require_existing(data, "--data")
    model, stored = prepare_model(model, store, listener)
    card = read_card(model, stored)
    resolve_texts(data, card, read_tokenizer(model, stored), store.workspace / "calibration", truncate=truncate)
    shown = card if stored else read_outputs_early(model.load())
    if card.tokenization is None and card.task in TASKS and shown is not None:
        task = TASKS[card.task]
        task.require_model(shown)
        task.read_truths(load_sample_set(stored, card, data, None, 0, listener)[0], shown, task.count_classes(shown))


def run_evaluate_step(
    model: Model, data: Path | None, store: Store, listener: Listener, *, truncate: bool = False
) -> list[Path]:
    """Task accuracy of everything that is built of `model`; returns the run."""
    from optpipe.evaluate.evaluation_run import run_evaluation

    return [Path(run_evaluation(model, data, None, 0, None, store, listener, truncate=truncate).run_dir)]


def run_preprocess_step(model: Model, images: Path | None, store: Store, listener: Listener) -> list[Path]:
    """The proof of the derived preprocessing, without its speed; returns the run."""
    from optpipe.preprocess.preprocess import PreprocessRequest, choose_dali_plan, derive_preprocessing

    request = PreprocessRequest(images=images, plan=choose_dali_plan("auto"), throughput=False)
    return [Path(derive_preprocessing(model, request, store, listener).run_dir)]


def run_bench_step(
    artifacts: Sequence[Entry],
    criteria: Sequence[Criterion],
    pace: MeasurementBudget,
    store: Store,
    listener: Listener,
    *,
    options: Mapping[str, Mapping[str, str]] | None = None,
) -> list[Path]:
    """Every load that `criteria` need, on every artifact, with the `options` of its backend; returns the runs.

    One that was interrupted ends what it is part of.
    """
    from optpipe.measure.bench import bench_artifacts
    from optpipe.measure.session_plan import BenchPlan
    from optpipe.measure.validity import LIMITS
    from optpipe.models.artifacts.lookup import find_artifacts

    found = tuple(artifact for each in artifacts for artifact in find_artifacts(each.id, store))
    limits = {**LIMITS, "max_cv": pace.max_cv}
    on_gpu = any(each.info.device != "cpu" for each in artifacts)
    longest = max(pace.max_seconds, pace.min_seconds)
    loads = loads_from_criteria(criteria, pace.min_seconds, longest, energy=on_gpu)
    plans = [
        BenchPlan(
            load=load,
            batches=batches,
            lengths=None if load.length is None else (load.length,),
            limits=limits,
            to_the_end=True,
            options=options or {},
            processes=pace.processes,
        )
        for load, batches in loads
    ]
    runs = []
    for plan in plans:
        result = bench_artifacts(found, plan, store, listener)
        if result.interrupted:
            raise KeyboardInterrupt
        runs.append(Path(result.run_dir))
    return runs


def run_profile_step(
    artifact: BuiltArtifact,
    model: Entry,
    criteria: Sequence[Criterion],
    store: Store,
    listener: Listener,
    *,
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Path]:
    """Inference under nsys at the largest batch size and length that `criteria` name; returns the run."""
    from optpipe.profile.profile_model import profile_model, require_profilable
    from optpipe.profile.record import ProfilePlan
    from optpipe.trace.ranges import Stage

    sizes = {one.where.batch_size for one in criteria if one.where.batch_size}
    lengths = {one.where.length for one in criteria if one.where.length}
    plan = ProfilePlan(
        device=artifact.entry.info.device,
        options=options or {},
        stages=(Stage.INFERENCE,),
        batch_sizes=(max(sizes, default=1),),
        lengths=(max(lengths),) if lengths else None,
    )
    require_profilable(plan.tracer)
    return [profile_model(plan, [artifact], model, store, listener).run_dir]
