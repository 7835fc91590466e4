"""Builds a model and takes all steps: `optpipe run`. An interrupted one goes on where it was."""

from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import monotonic

from optpipe import __version__
from optpipe.build.build import build_model, require_artifacts
from optpipe.build.plan import BuildPlan
from optpipe.build.records import BuiltArtifact, ModelBuild
from optpipe.core.errors import BadInputError, MissingError, OptpipeError, require_existing
from optpipe.core.events import Listener
from optpipe.core.files import hash_value
from optpipe.core.metrics.sections import SPEEDUP
from optpipe.core.records import plain_from_record, record_from_json
from optpipe.core.verdict import StepRecord
from optpipe.evaluate.tasks import TASKS
from optpipe.models.export.exported import (
    Model,
    prepare_model,
    read_card,
    read_tokenizer,
)
from optpipe.models.export.onnx_export import read_outputs_early
from optpipe.models.inputs.program_data import store_python_file
from optpipe.models.inputs.task_data import hash_data, load_sample_set, resolve_texts
from optpipe.models.stored_card import read_stored_card
from optpipe.signoff.collect import (
    SignoffRequest,
    find_judged_artifact,
    register_policy,
)
from optpipe.signoff.steps import make_steps
from optpipe.workspace.entry import MANIFEST
from optpipe.workspace.environment import describe_environment
from optpipe.workspace.files import write_json
from optpipe.workspace.runs import RUNS
from optpipe.workspace.store import NOTES, Store


def require_evaluable(
    model: Model, data: Path, store: Store, listener: Listener, *, truncate: bool
) -> Path:
    """`data`, or the stored samples of a Python file. Raises BadInputError, before the export, for those that do not fit the model."""
    require_existing(data, "data")
    model, stored = prepare_model(model, store, listener)
    card = read_card(model, stored)
    data = store_python_file(data, card, store, listener)
    resolve_texts(
        data,
        card,
        read_tokenizer(model, stored),
        store.workspace / "calibration",
        truncate=truncate,
    )
    shown = card if stored else read_outputs_early(model.load())
    if card.tokenization is None and card.task in TASKS and shown is not None:
        task = TASKS[card.task]
        task.require_model(shown)
        task.read_truths(
            load_sample_set(stored, card, data, None, 0, listener)[0],
            shown,
            task.count_classes(shown),
        )
    return data


def run_pipeline(
    model: Model,
    wanted: SignoffRequest,
    plan: BuildPlan,
    data: Path | None,
    left_out: Collection[str],
    store: Store,
    listener: Listener,
) -> tuple[list[StepRecord], Path]:
    """Builds `model` and takes the steps that are not `left_out`; a sign-off judges what they measured.

    A step that this machine cannot do leaves its criteria INCONCLUSIVE. Also returns the file of the finished steps, which is
    needed until the sign-off. Raises the errors of building, and BadInputError if the policy does not select one of several builds.
    """
    started = monotonic()
    if data is not None:
        data = require_evaluable(model, data, store, listener, truncate=plan.truncate)
    built = build_model(model, plan, store, listener)
    require_artifacts(built)
    judged = find_judged_artifact(wanted, store)
    register_policy(wanted.policy, store)
    steps = [StepRecord("build", "done", round(monotonic() - started, 3))]
    notes = _place_notes(wanted, plan, data, built, store)
    artifacts = [build.entry for build in built.artifacts if build.why_not is None]
    build = next(
        (build for build in built.artifacts if build.entry.id == judged.id),
        BuiltArtifact(judged, None, None),
    )
    work = make_steps(
        wanted, build, artifacts, built.model, lambda: model, store, listener, plan, data
    )
    if not any(criterion.is_of(SPEEDUP) for criterion in wanted.policy.criteria):
        del work["turns"]  # nothing to compare with
    taken = {
        name: partial(step, wanted.policy.criteria)
        for name, step in work.items()
        if name not in left_out
    }
    steps += [_run_step(name, step, notes, listener) for name, step in taken.items()]
    return steps, notes


def _run_step(
    name: str, work: Callable[[], list[Path]], notes: Path, listener: Listener
) -> StepRecord:
    """Runs a step, or takes its runs from the notes of an interrupted pipeline; an error of the step is only recorded."""
    done: dict[str, list[str]] = {}
    with suppress(OSError, BadInputError):
        done = record_from_json(notes.read_bytes(), dict[str, list[str]], notes)
    known = done.get(name, [])
    if known and all((notes.parent.parent / RUNS / run / MANIFEST).is_file() for run in known):
        with listener.step(name) as step:
            step.cached()
        return StepRecord(name, "resumed", runs=tuple(known))
    started = monotonic()
    try:
        runs = work()
    except OptpipeError as error:
        skipped = isinstance(error, MissingError | BadInputError)
        how = "was skipped" if skipped else "failed"
        listener.warn(f"{name} {how}: " + error.message)
        status = "skipped" if skipped else "failed"
        return StepRecord(name, status, round(monotonic() - started, 3), reason=error.message)
    names = [path.name for path in runs]
    write_json(notes, done | {name: names})
    return StepRecord(name, "done", round(monotonic() - started, 3), tuple(names))


def _place_notes(
    wanted: SignoffRequest, plan: BuildPlan, data: Path | None, built: ModelBuild, store: Store
) -> Path:
    """The file of exactly this pipeline's finished steps. Raises BadInputError for data that cannot be read."""
    own = read_stored_card(built.model).data.get("validation")
    validation = Path(own) if own and Path(own).exists() else None
    decisive = {
        "optpipe": __version__,
        "artifacts": sorted(build.entry.id for build in built.artifacts),
        "policy": wanted.policy.sha256,
        "options": {name: dict(given) for name, given in plan.options.items()},
        "settings": [wanted.min_seconds, wanted.max_cv, plan.truncate],
        "data": [
            path and hash_data(path) for path in (data or validation, plan.images or validation)
        ],
        "environment": plain_from_record(describe_environment()),
    }
    return store.workspace / NOTES / f"steps-{hash_value(decisive)[:12]}.json"
