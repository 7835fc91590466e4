"""An evaluation from the command to its run folder."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from optpipe.core.card import ModelCard, card_from_file
from optpipe.core.entries import ArtifactInfo
from optpipe.core.errors import BadInputError, require_existing
from optpipe.core.events import Listener
from optpipe.core.plan import for_workspace
from optpipe.core.records import json_from_record
from optpipe.evaluate.evaluate import (
    EvaluatedArtifact,
    evaluate_artifacts,
    list_model_artifacts,
    score_artifacts,
    write_predictions,
)
from optpipe.evaluate.result import Dataset, Evaluation
from optpipe.evaluate.tasks.contract import BootstrapTask, Values
from optpipe.evaluate.tasks.registry import find_task, require_fitting_task
from optpipe.evaluate.tasks.user_file import UserTask
from optpipe.models.export.exported import compute_model_id, export_model, prepare_model, read_card
from optpipe.models.export.model import Model
from optpipe.models.inputs.sample_set import SampleSet
from optpipe.models.inputs.task_data import load_sample_set
from optpipe.models.inputs.text_set import TextSet
from optpipe.models.sources.resolve import format_source
from optpipe.stats.paired import FEWEST_SAMPLES
from optpipe.workspace.entry import Entry, drop_folder, get_command_line
from optpipe.workspace.file_names import CARD, EVALUATION, PREDICTIONS
from optpipe.workspace.files import write_bytes
from optpipe.workspace.runs import finish_run, open_run
from optpipe.workspace.store import Store


def run_evaluation(
    model: Model,
    data: Path | None,
    count: int | None,
    seed: int,
    budget: float | None,
    store: Store,
    listener: Listener,
    user_task: UserTask | None = None,
    only: Sequence[Entry[ArtifactInfo]] | None = None,
    *,
    truncate: bool = False,
) -> Evaluation:
    """Evaluates what is stored of `model`, or `only` some of it, by `user_task` instead of the card's where given; writes the run.

    `truncate` says that texts longer than the model's input are cut. Raises BadInputError where there are no images, or nothing
    was built yet.
    """
    store.require_writable()
    require_existing(data, "--data")
    model, stored = prepare_model(model, store, listener)
    card = read_card(model, stored)
    task = user_task or find_task(card)
    if stored is not None and user_task is None:
        require_fitting_task(model, stored)
    _require_data(card, data)
    artifacts = list_model_artifacts(compute_model_id(model), store) if only is None else list(only)
    if not artifacts:
        raise BadInputError(
            f"{card.name} has no build with these options in {store.workspace}\n"
            f"first run `{for_workspace(f'optpipe build {format_source(model.source)}')}` with the same options"
        )
    exported, _ = export_model(model, store, listener, stored)
    card = card_from_file(exported.file(CARD))
    task.require_model(card)
    source = data or Path(card.data["validation"])
    validates = count is None and is_validation_set(source, card)
    samples, unreadable = load_sample_set(exported, card, source, count, seed, listener, truncate=truncate)
    truths = task.read_truths(samples, card, task.count_classes(card))  # what does not fit ends it before anything runs
    rows = evaluate_artifacts(model, exported, artifacts, samples, task, store, listener)
    _warn_about_calibration_samples(rows, samples, listener)
    assert rows[0].predictions is not None
    classes, trained = task.count_classes(card) or rows[0].predictions.classes, exported.info.weights.trained
    truths = task.read_truths(samples, card, classes) if truths is None else truths
    labels = card.labels if task.names_classes else ()
    if isinstance(task, BootstrapTask):
        _warn_about_few(task, truths, rows[0].predictions.values, samples, listener)
    with open_run(store.workspace, "evaluate") as run:
        write_predictions(run.path / PREDICTIONS, samples, truths, task, rows)
        found = Evaluation(
            model=card.name,
            source=drop_folder(card.source),
            model_id=exported.id,
            weights=exported.info.weights,
            dataset=Dataset(
                name=samples.name,
                kind=task.sample_kind or samples.kind,
                sha256=samples.sha256,
                count=task.count_samples(rows[0].predictions.values),
                unreadable=tuple(str(each.path) for each in unreadable),
                labeled=truths is not None,
                classes=classes,
                labels=labels,
                truncated=samples.truncated if isinstance(samples, TextSet) else 0,
                validation=validates,
            ),
            accuracy_budget=budget,
            results=tuple(score_artifacts(rows, truths, task, labels, classes, budget, trained=trained)),
            run_dir=str(run.path),
            task=user_task.name if user_task else card.task,
            scoring=task.describe_scoring(card),
        )
        write_bytes(run.path / EVALUATION, json_from_record(replace(found, run_dir=run.name)))
        parents = [exported.id, *(each.id for each in artifacts)]
        finish_run(run, command=get_command_line(), parents=parents, model=card.name, trained=trained)
    return found


def is_validation_set(source: Path, card: ModelCard) -> bool:
    """Whether `source` is the validation set that the card names."""
    return "validation" in card.data and source.resolve() == Path(card.data["validation"]).resolve()


def _require_data(card: ModelCard, data: Path | None) -> None:
    """Raises BadInputError where neither the user nor the card names a validation set."""
    if data is None and "validation" not in card.data:
        what = "texts with --data FILE" if card.tokenization else "images with --data DIR"
        raise BadInputError(f"the model card of {card.name} has no validation set; pass labeled {what}")


def _warn_about_few(
    task: BootstrapTask, truths: Values | None, predictions: Values, samples: SampleSet, listener: Listener
) -> None:
    """Where the bootstrap has little to draw from, or the scores leave samples out."""
    count, kind = task.count_samples(predictions), task.sample_kind or samples.kind
    if truths is not None:
        count, kind = task.count_units(truths), task.unit_kind or kind
        if left_out := task.describe_left_out(truths):
            listener.warn(left_out)
    if count < FEWEST_SAMPLES:
        listener.warn(f"only {count} {kind}: intervals of fewer than {FEWEST_SAMPLES} span all that the score can be")


def _warn_about_calibration_samples(rows: Sequence[EvaluatedArtifact], samples: SampleSet, listener: Listener) -> None:
    for row in rows:
        if row.calibrated_on and row.entry:
            listener.warn(
                f"{row.calibrated_on} of the {len(samples.files)} {samples.kind} were used to calibrate {row.entry.id}, so its accuracy"
                " is overestimated; evaluate on other data"
            )
