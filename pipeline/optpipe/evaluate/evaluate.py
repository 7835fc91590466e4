"""Scores the source model and every artifact that can run here on the same samples, and writes the run.

The judged figure is the difference on paired predictions, with its interval, because two separate scores prove little.
"""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optpipe.backends.plain_session import PlainSession
from optpipe.backends.registry import BACKENDS, load_artifact
from optpipe.backends.selections import read_selection
from optpipe.core import pl
from optpipe.core.card import ModelCard, Task
from optpipe.core.entries import (
    ArtifactInfo,
    CalibrationInfo,
    GraphInfo,
    ModelInfo,
    OutputError,
    VerificationInfo,
)
from optpipe.core.errors import BadInputError, StageError, require_existing
from optpipe.core.events import UNWATCHED, Listener, ProgressStep
from optpipe.core.metrics.sampled import SampleScore
from optpipe.core.precision import Precision
from optpipe.core.records import json_from_record
from optpipe.core.verdict import Verdict
from optpipe.core.wording import Argument, Call
from optpipe.evaluate.result import Dataset, EvaluatedModel, Evaluation, ScoreRule
from optpipe.evaluate.sampled_scores import (
    PartRecorder,
    Parts,
    choose_scores,
    columns_from_parts,
    score_parts,
    state_rules,
)
from optpipe.evaluate.tasks import find_task, require_fitting_task
from optpipe.evaluate.tasks.bounds import measure_answers, require_bounded
from optpipe.evaluate.tasks.callable import CallableTask
from optpipe.evaluate.tasks.contract import TaskContract, Values
from optpipe.evaluate.tasks.user_file import UserTask
from optpipe.models.artifacts.engine_files import hash_engine
from optpipe.models.artifacts.missing_builds import explain_no_build
from optpipe.models.export.exported import (
    Model,
    compute_model_id,
    export_model,
    prepare_model,
    read_card,
    run_torch_model,
)
from optpipe.models.inputs.program_data import store_python_file
from optpipe.models.inputs.rows import rows_from_outputs
from optpipe.models.inputs.sample_set import SampleSet
from optpipe.models.inputs.task_data import fit_batch_size, iterate_input_batches, load_sample_set
from optpipe.models.inputs.text_set import TextSet
from optpipe.models.sources.resolve import format_source
from optpipe.models.stored_card import read_stored_card
from optpipe.stats.paired import FEWEST_SAMPLES, TOLERATED_RELATIVE_ERROR, compute_output_error
from optpipe.stats.selected_rows import EMPTY, Selection, align_rows
from optpipe.workspace.entry import Entry, drop_folder, get_command_line
from optpipe.workspace.file_names import CALIBRATION_SET, EVALUATION, ONNX, PREDICTIONS
from optpipe.workspace.files import write_bytes, write_parquet
from optpipe.workspace.runs import finish_run, open_run
from optpipe.workspace.store import Store

Runner = Callable[[Mapping[str, NDArray[Any]]], Mapping[str, NDArray[Any]]]
EVALUATION_BATCH = 32
KEPT_VALUES = 1 << 26
"""Values of the first output that are kept for its SNR, from the first samples."""


@dataclass(frozen=True, eq=False)
class Predictions:
    """Decoded predictions of one model for every sample, and its first output, (samples, values)."""

    values: Values
    outputs: NDArray[np.float32]
    """Only the first samples of a large set; one row of all values if sizes differ between batches."""
    classes: int
    """0 without a last axis."""
    undefined: frozenset[int] = frozenset()
    """Places of the inputs with NaN in an output: of samples, or of the windows of texts."""
    rows: tuple[Mapping[str, NDArray[Any]], ...] = ()
    """Of each batch the outputs that were asked for, by name, (samples, ...); only the first batches of a large set."""
    parts: Mapping[str, Parts] = field(default_factory=dict)
    """What each sample adds to the scores of plug-ins, by name."""
    withheld: Mapping[str, str] = field(default_factory=dict)
    """Why a score of a plug-in is withheld, by name."""


@dataclass(frozen=True, eq=False)
class EvaluatedArtifact:
    """An artifact's predictions, or the reason why it could not run; `entry` is None for the source model."""

    entry: Entry[ArtifactInfo] | None
    predictions: Predictions | None
    why_not: str | None = None
    failed: bool = False
    calibrated_on: int = 0


def list_model_artifacts(model: Model, card: ModelCard, store: Store) -> list[Entry[ArtifactInfo]]:
    """The stored artifacts of a model, the newest of each backend, device, precision, options, and graph.

    Raises BadInputError without any.
    """
    newest, model_id = {}, compute_model_id(model)
    for entry in store.list_entries(ArtifactInfo):
        if model_id in entry.manifest.parents:
            options = tuple(sorted(entry.info.options.items()))  # layout options may break outputs
            newest[entry.info.label, options, entry.manifest.parents] = entry
    if newest:
        return list(newest.values())
    build = Call("build", format_source(model.source))
    others = [
        artifact
        for artifact in store.list_entries(ArtifactInfo)
        if artifact.info.model == card.name
    ]
    problem = f"{card.name} has no build with these options in {store.workspace}"
    way = "first run `" + build + "` with the same options"
    if others:
        listed = ", ".join(f"{artifact.info.label} {artifact.id}" for artifact in others[-5:])
        problem += f": its builds ({listed}) are of other options, weights, or source"
        way += ", or give the ID of a build"
    else:
        problem += explain_no_build(card.name, store)
    raise BadInputError(problem, remedy=way)


def list_states(store: Store) -> dict[str, OutputError]:
    """By the id of an artifact, the error of the state after the steps of its last `build --steps`."""
    checked = store.list_entries(VerificationInfo)
    return {
        parent: state
        for verification in checked
        for state in verification.info.trajectory
        for parent in verification.manifest.parents
    }


def evaluate_artifacts(
    model: Model,
    exported: Entry[ModelInfo],
    artifacts: Sequence[Entry[ArtifactInfo]],
    samples: SampleSet,
    task: TaskContract,
    store: Store,
    listener: Listener,
    selection: Selection = EMPTY,
    make_recorder: Callable[[], PartRecorder] | None = None,
) -> list[EvaluatedArtifact]:
    """The predictions of the source and of each artifact; the rows of the first output if the `selection` has it.

    `make_recorder` makes what collects a model's parts for scores of plug-ins.
    """
    card = read_stored_card(exported)
    keep = selection.outputs if card.outputs[0].name in selection.outputs else ()

    def predict(run: Runner, name: str) -> Predictions:
        recorder = make_recorder() if make_recorder else None
        with listener.step(f"evaluate {name}", total=len(samples.rows)) as step:
            return predict_samples(exported, card, samples, task, run, step, keep, recorder)

    source = _predict_source(model, card, predict)
    count = len(samples.rows)
    kind = samples.kind if samples.rows is samples.files else "inputs"
    _check_source(source, f"{len(source.undefined)} of {count} {kind}", task, listener)
    rows = [EvaluatedArtifact(None, source)]
    for entry in artifacts:
        backend = BACKENDS[entry.info.backend]
        if (reason := backend.find_run_blocker(entry.info)) is not None:
            rows.append(EvaluatedArtifact(entry, None, reason))
            continue
        try:
            with load_artifact(entry, store) as session:
                predictions = predict(session.run, f"{backend.name} {entry.info.precision}")
        except StageError as error:  # continue with the other artifacts
            rows.append(EvaluatedArtifact(entry, None, error.message, failed=True))
            continue
        if broken := predictions.undefined - source.undefined:
            what = "NaN or infinity" if task.needs_finite else "NaN"
            problem = f"gives {what} for {len(broken)} of {count} {kind}, unlike the source model: its scores are withheld"
            rows.append(EvaluatedArtifact(entry, None, problem, failed=True))
            continue
        if used := _count_calibration_samples(entry, samples, store):
            problem = f"{used} of the {len(samples.files)} {samples.kind} were used to calibrate {entry.id}"
            listener.warn(f"{problem}, so its accuracy is overestimated; evaluate on other data")
        rows.append(EvaluatedArtifact(entry, predictions, calibrated_on=used))
    return rows


def _predict_source(
    model: Model, card: ModelCard, predict: Callable[[Runner, str], Predictions]
) -> Predictions:
    """The predictions of the user's ONNX file, or of the module."""
    loaded = model.load()
    if loaded.onnx is None:
        return predict(partial(run_torch_model, loaded.given, card), "source")
    with PlainSession(loaded.onnx) as session:
        return predict(session.run, "source")


def _check_source(source: Predictions, broken: str, task: TaskContract, listener: Listener) -> None:
    """Warns if the source model gives NaN; raises BadInputError if the task cannot compare then. `broken` counts the samples."""
    if not source.undefined:
        return
    if task.needs_finite:
        raise BadInputError(
            f"the source model gives NaN or infinity for {broken}, and nothing can be compared with it",
            remedy="evaluate on other data, or correct the model",
        )
    listener.warn(f"the source model gives NaN for {broken}; their scores mean nothing")


def _count_calibration_samples(
    artifact: Entry[ArtifactInfo], samples: SampleSet, store: Store
) -> int:
    """Samples that are also in the calibration set of an INT8 artifact, by content, if the store has the set."""
    graphs = (
        graph for graph in store.list_entries(GraphInfo) if graph.id in artifact.manifest.parents
    )
    used = next((graph.info.set.sha256 for graph in graphs if graph.info.set), None)
    drawn = [
        calibration
        for calibration in store.list_entries(CalibrationInfo)
        if calibration.info.set.sha256 == used
    ]
    if not drawn:
        return 0
    known = {
        file["sha256"] for file in json.loads(drawn[-1].file(CALIBRATION_SET).read_bytes())["files"]
    }
    return sum(file.sha256 in known for file in samples.files)


def predict_samples(
    exported: Entry[ModelInfo],
    card: ModelCard,
    samples: SampleSet,
    task: TaskContract,
    run: Runner,
    step: ProgressStep = UNWATCHED,
    keep: Collection[str] = (),
    recorder: PartRecorder | None = None,
) -> Predictions:
    """Decodes the outputs of `run` for all samples; `step` counts their rows. Rows of the outputs in `keep` are kept; `recorder`
    collects what plug-ins score.
    """
    values: list[Any] = []
    kept: list[NDArray[Any]] = []
    parts: list[dict[str, NDArray[Any]]] = []
    room, room_of_parts, classes = KEPT_VALUES, KEPT_VALUES, 0
    undefined, of_rows = set[int](), samples.rows
    for batch, count in iterate_input_batches(
        exported, card, samples, fit_batch_size(card, EVALUATION_BATCH)
    ):
        rows = rows_from_outputs(card.outputs, run(batch), count)
        # a filled batch; others stay whole, because the first axis may count boxes of one image
        if count < card.batch_range[0]:
            rows = {key: output[:count] for key, output in rows.items()}
        first = rows[card.outputs[0].name]
        axis = -1 if task.class_axis is None else task.class_axis
        classes = int(first.shape[axis]) if first.ndim > max(axis, 1) else 0
        undefined |= {
            len(values) + place for place in _find_undefined(rows, count, finite=task.needs_finite)
        }
        files, start = of_rows[len(values) : len(values) + count], len(values)
        decoded = task.decode(rows, files, samples, card)
        if recorder is not None and of_rows is samples.files:
            recorder.add_batch(rows, decoded, files, start, classes)
        values += decoded
        if room >= first.size:
            kept.append(np.asarray(first, np.float32).reshape(count, -1))
            room -= first.size
        part = {name: output for name, output in rows.items() if name in keep}
        size = sum(output.size for output in part.values())
        if part and room_of_parts >= size:
            parts.append(part)
            room_of_parts -= size
        step.advance(count)
    if len({block.shape[1] for block in kept}) > 1:
        kept = [np.concatenate([block.reshape(1, -1) for block in kept], axis=1)]
    outputs = np.concatenate(kept) if kept else np.zeros((0, 0), np.float32)
    joined = task.join_rows(values, samples)
    if recorder is not None and of_rows is not samples.files:  # no outputs: a sample has several
        recorder.add_batch({}, joined, samples.files, 0, classes)
    predictions = Predictions(joined, outputs, classes, frozenset(undefined), tuple(parts))
    if recorder is None:
        return predictions
    return replace(predictions, parts=recorder.parts, withheld=recorder.withheld)


def _find_undefined(
    rows: Mapping[str, NDArray[Any]], count: int, *, finite: bool = False
) -> list[int]:
    """Which of `count` samples have NaN in an output, or infinity if it must be `finite`; all if its rows are no samples."""
    undefined = np.zeros(count, bool)
    for value in rows.values():
        if value.dtype.kind != "f":
            continue
        wrong = ~np.isfinite(value) if finite else np.isnan(value)
        if wrong.any():
            apart = value.shape[:1] == (count,)
            undefined |= wrong.reshape(count, -1).any(axis=1) if apart else True
    return [int(place) for place in np.flatnonzero(undefined)]


def align_predictions(
    source: Predictions, build: Predictions, selection: Selection
) -> list[tuple[Mapping[str, NDArray[Any]], Mapping[str, NDArray[Any]]]]:
    """The kept rows of both for each batch, those of `build` in the order of the source's where a selection reorders them."""
    return [
        (
            expected,
            align_rows(expected, actual, selection, TOLERATED_RELATIVE_ERROR[Precision.FP32]),
        )
        for expected, actual in zip(source.rows, build.rows, strict=False)
    ]


def _pair_outputs(
    source: Predictions, build: Predictions, selection: Selection
) -> tuple[NDArray[Any], NDArray[Any]]:
    """The first output of both, (samples, values); rows that a selection reorders as sets."""
    name = next(iter(source.rows[0]), "") if source.rows else ""
    if name not in selection.outputs:
        return source.outputs, build.outputs
    pairs = [
        (expected[name], actual[name])
        for expected, actual in align_predictions(source, build, selection)
    ]
    expected, aligned = (
        np.concatenate([part.reshape(1, -1) for part in side], axis=1)
        for side in zip(*pairs, strict=True)
    )
    return expected, aligned


def score_artifacts(
    rows: Sequence[EvaluatedArtifact],
    truths: Values | None,
    task: TaskContract,
    labels: Sequence[str],
    classes: int,
    budget: float | None,
    *,
    trained: bool,
    selected: bool = False,
    selection: Selection = EMPTY,
    rules: Mapping[str, ScoreRule] | None = None,
) -> Iterator[EvaluatedModel]:
    """Scores every row; `labels` name the classes. Random weights have no accuracy.

    Rows of a `selection` are compared as sets; those of a detector with `selected` rows only as boxes.
    """
    source = rows[0].predictions
    assert source is not None
    for row in rows:
        info, predictions = row.entry.info if row.entry else None, row.predictions
        same_sizes = predictions is None or (
            predictions.outputs.shape == source.outputs.shape and not selected
        )
        scored = EvaluatedModel(
            backend=info.backend if info else "source",
            precision=info.precision if info else "source",
            device=info.device if info else "cpu",
            samples=len(source.values),
            artifact=row.entry.id if row.entry else None,
            sha256=hash_engine(row.entry) if row.entry else None,
            why_not=row.why_not,
            failed=row.failed,
            calibrated_on=row.calibrated_on,
            snr_db=compute_output_error("", *_pair_outputs(source, predictions, selection)).snr_db
            if predictions and same_sizes
            else None,
            same_sizes=same_sizes,
            agreement=None
            if predictions is None
            else task.compute_parity(source.values, predictions.values),
        )
        if predictions is not None and truths is not None and trained:
            scored = task.add_scores(
                scored, truths, source.values, predictions.values, labels, classes
            )
            sampled = score_parts(
                rules or {}, source.parts, predictions.parts, predictions.withheld, task.groups
            )
            scored = replace(scored, sampled=sampled)
        yield replace(scored, verdict=_judge_drop(scored, budget, task))


def _judge_drop(row: EvaluatedModel, budget: float | None, task: TaskContract) -> Verdict | None:
    """PASS if the drop's whole interval, with `TaskContract.bound_hidden_loss`, is inside the budget; FAIL if all of it is outside."""
    if budget is None or row.artifact is None:
        return None
    if row.drop_ci is None:
        return Verdict.INCONCLUSIVE
    low, high = row.drop_ci
    if high + task.bound_hidden_loss(row) <= budget:
        return Verdict.PASS
    return Verdict.FAIL if low > budget else Verdict.INCONCLUSIVE


def write_predictions(
    path: Path,
    samples: SampleSet,
    truths: Values | None,
    task: TaskContract,
    rows: Sequence[EvaluatedArtifact],
) -> None:
    columns: dict[str, Any] = {
        **{
            name: [getattr(file, name) for file in samples.files]
            for name in ("path", "sha256", "label")
        },
        **(
            {"group": [file.group for file in samples.files]}
            if any(file.group is not None for file in samples.files)
            else {}
        ),
        task.truth_column: [None] * len(samples.files) if truths is None else truths,
    }
    for row in rows:
        if row.predictions is not None:
            name = row.entry.id if row.entry else "source"
            columns[f"{name}:{task.prediction_column}"] = row.predictions.values
            columns |= columns_from_parts(name, row.predictions.parts)
    table = pl.DataFrame(columns)
    require_bounded(measure_answers(table), samples.name)
    write_parquet(path, table)


@dataclass(frozen=True, slots=True)
class EvaluationRequest:
    """What is scored, and on which samples."""

    data: Path | None = None
    """The card's validation set by default."""
    count: int | None = None
    seed: int = 0
    budget: float | None = None
    """The highest drop of the score, as a share; None judges no drop."""
    task: UserTask | CallableTask | None = None
    """Replaces the card's task."""
    only: Sequence[Entry[ArtifactInfo]] | None = None
    """Some of the stored artifacts; all of the model by default."""
    scores: Sequence[SampleScore] = ()
    """Join those of plug-ins."""
    truncate: bool = False
    """Whether texts that are longer than the model's input are cut."""


@dataclass(frozen=True, slots=True)
class _Subject:
    """What is evaluated, and on which samples."""

    model: Model
    exported: Entry[ModelInfo]
    artifacts: Sequence[Entry[ArtifactInfo]]
    task: TaskContract
    """With the groups of the samples."""
    task_name: str
    scores: Sequence[SampleScore]
    samples: SampleSet
    unreadable: Sequence[tuple[Path, str]]
    whole_validation_set: bool
    read_truths: Callable[[int], Values | None]
    """The truth of every sample for a number of classes, which may be known only from the first outputs."""

    @property
    def card(self) -> ModelCard:
        return read_stored_card(self.exported)

    @property
    def trained(self) -> bool:
        return self.exported.info.weights.trained

    @property
    def groups(self) -> list[str | None]:
        """Of each sample."""
        return [file.group for file in self.samples.files]


def run_evaluation(
    model: Model, request: EvaluationRequest, store: Store, listener: Listener
) -> Evaluation:
    """Evaluates the stored artifacts of `model`, and writes the run.

    Raises BadInputError without samples or artifacts, and for scores that the task does not have.
    """
    store.require_writable()
    require_existing(request.data, "data")
    subject = _prepare_subject(model, request, store, listener)
    task, card = subject.task, subject.card
    selection = read_selection(subject.exported.file(ONNX))

    recorder = None
    if subject.scores and subject.trained:
        recorder = partial(PartRecorder, subject.scores, task, subject.read_truths)
    rows = evaluate_artifacts(
        subject.model,
        subject.exported,
        subject.artifacts,
        subject.samples,
        task,
        store,
        listener,
        selection,
        recorder,
    )
    predicted = rows[0].predictions
    assert predicted is not None
    classes = task.count_classes(card) or predicted.classes
    truths = subject.read_truths(classes)
    labels = card.labels if task.names_classes else ()
    _warn_of_samples(
        task,
        truths,
        predicted.values,
        subject.samples.kind,
        labels,
        listener,
        trained=subject.trained,
    )

    rules = state_rules(subject.scores) if truths is not None and subject.trained else {}
    scored = score_artifacts(
        rows,
        truths,
        task,
        labels,
        classes,
        request.budget,
        trained=subject.trained,
        selected=card.task is Task.DETECTION and card.outputs[0].name in selection.outputs,
        selection=selection,
        rules=rules,
    )
    dataset = _describe_dataset(
        subject, len(predicted.values), classes, labels, labeled=truths is not None
    )
    return _write_run(subject, dataset, request.budget, rows, truths, scored, rules, store)


def _prepare_subject(
    model: Model, request: EvaluationRequest, store: Store, listener: Listener
) -> _Subject:
    """Exports the model and loads the samples; raises BadInputError if they do not fit each other."""
    model, stored = prepare_model(model, store, listener)
    card = read_card(model, stored)
    data = request.data
    if data is not None:
        data = store_python_file(data, card, store, listener, request.count, request.seed)
    task = request.task or find_task(card)
    task_name = request.task.name if request.task else str(card.task)
    scores = choose_scores(request.scores, task_name)
    if stored is not None and request.task is None:
        require_fitting_task(model, stored)
    source = data or _find_validation_set(card)
    artifacts = (
        list_model_artifacts(model, card, store) if request.only is None else list(request.only)
    )

    exported, _ = export_model(model, store, listener, stored)
    card = read_stored_card(exported)
    task.require_model(card)
    samples, unreadable = load_sample_set(
        exported, card, source, request.count, request.seed, listener, truncate=request.truncate
    )
    task.require_rows(samples)
    task.require_capacity(samples, card, 1 + len(artifacts))
    task = task.with_groups([file.group for file in samples.files])
    # fails before anything runs if the truths do not fit
    known_truths = task.read_truths(samples, card, task.count_classes(card))

    @cache
    def read_truths(classes: int) -> Values | None:
        return task.read_truths(samples, card, classes) if known_truths is None else known_truths

    return _Subject(
        model=model,
        exported=exported,
        artifacts=artifacts,
        task=task,
        task_name=task_name,
        scores=scores,
        samples=samples,
        unreadable=unreadable,
        whole_validation_set=request.count is None and _is_validation_set(source, card),
        read_truths=read_truths,
    )


def _describe_dataset(
    subject: _Subject, count: int, classes: int, labels: tuple[str, ...], *, labeled: bool
) -> Dataset:
    """`count` samples were predicted; `labels` name the classes."""
    samples, groups = subject.samples, subject.groups
    return Dataset(
        name=samples.name,
        kind=samples.kind,
        sha256=samples.sha256,
        count=count,
        unreadable=tuple(str(path) for path, _ in subject.unreadable),
        labeled=labeled,
        classes=classes,
        labels=labels,
        truncated=samples.truncated if isinstance(samples, TextSet) else 0,
        validation=subject.whole_validation_set,
        groups=len(set(groups)) if groups and None not in groups else None,
    )


def _write_run(
    subject: _Subject,
    dataset: Dataset,
    budget: float | None,
    rows: Sequence[EvaluatedArtifact],
    truths: Values | None,
    scored: Iterable[EvaluatedModel],
    rules: Mapping[str, ScoreRule],
    store: Store,
) -> Evaluation:
    card = subject.card
    with open_run(store.workspace, "evaluate") as run:
        write_predictions(run.path / PREDICTIONS, subject.samples, truths, subject.task, rows)
        evaluation = Evaluation(
            model=card.name,
            source=drop_folder(card.source),
            model_id=subject.exported.id,
            weights=subject.exported.info.weights,
            dataset=dataset,
            accuracy_budget=budget,
            results=tuple(scored),
            run_dir=str(run.path),
            task=subject.task_name,
            sampled=rules,
            scoring=subject.task.describe_scoring(card),
        )
        write_bytes(run.path / EVALUATION, json_from_record(replace(evaluation, run_dir=run.name)))
        finish_run(
            run,
            command=get_command_line(),
            parents=[subject.exported.id, *(artifact.id for artifact in subject.artifacts)],
            model=card.name,
            trained=subject.trained,
        )
    return evaluation


def _find_validation_set(card: ModelCard) -> Path:
    """The card's; raises BadInputError if it names none."""
    own = card.data.get("validation")
    if own is None:
        what, form = ("texts", "FILE") if card.tokenization else ("images", "DIR")
        raise BadInputError(
            f"the model card of {card.name} has no validation set; pass labeled {what} with "
            + Argument("data", form)
        )
    return Path(str(own))


def _is_validation_set(source: Path, card: ModelCard) -> bool:
    own = card.data.get("validation")
    return own is not None and source.resolve() == Path(own).resolve()


def _warn_of_samples(
    task: TaskContract,
    truths: Values | None,
    predicted: Values,
    kind: str,
    labels: Sequence[str],
    listener: Listener,
    *,
    trained: bool,
) -> None:
    """Warns about truths that are left out, classes that no sample has, and few samples."""
    units = len(predicted)
    if truths is not None:
        units, kind = task.count_units(truths), task.unit_kind or kind
        if left_out := task.describe_left_out(truths):
            listener.warn(left_out)
        if trained and (absent := task.describe_absent(truths, predicted, labels)):
            listener.warn(absent)

    if units < FEWEST_SAMPLES:
        listener.warn(
            f"few samples ({units} {kind}): intervals of fewer than {FEWEST_SAMPLES} span all that the score can be"
        )
