"""An evaluation from the command to its run folder."""

import shlex
from pathlib import Path
from typing import Any

from optpipe.artifacts.lookup import format_model_argument
from optpipe.core.card import card_from_file
from optpipe.core.events import Listener
from optpipe.errors import BadInputError
from optpipe.evaluate.evaluate import (
    evaluate_artifacts,
    list_model_artifacts,
    records_from_evaluation,
    require_classifier,
    write_predictions,
)
from optpipe.export.exported import compute_model_id, export_model, prepare_model
from optpipe.export.model import Model
from optpipe.inputs.task_data import find_label_indices, load_sample_set
from optpipe.workspace.file_names import CARD, EVALUATION, PREDICTIONS
from optpipe.workspace.manifest import get_command_line
from optpipe.workspace.runs import finish_run, open_run, write_json
from optpipe.workspace.store import Store


def run_evaluation(
    model: Model,
    data: Path | None,
    count: int | None,
    seed: int,
    budget: float | None,
    store: Store,
    listener: Listener,
) -> dict[str, Any]:
    """Evaluates what is stored of `model` and writes the run; returns the JSON document.

    Raises BadInputError where there are no images, or nothing was built yet.
    """
    store.require_writable()
    model, stored = prepare_model(model, store, listener)
    card = card_from_file(stored.file(CARD)) if stored else model.load().card
    require_classifier(card)
    if data is None and "validation" not in card.data:
        what = "texts with --data FILE" if card.tokenization else "images with --data DIR"
        raise BadInputError(f"the model card of {card.name} has no validation set; pass labeled {what}")
    artifacts = list_model_artifacts(compute_model_id(model), store)
    if not artifacts:
        raise BadInputError(
            f"{card.name} has no build with these options in {store.workspace}\n"
            f"first run `optpipe build {format_model_argument(card)}` with the same options"
        )
    exported, _ = export_model(model, store, listener, stored)
    card = card_from_file(exported.file(CARD))
    samples, unreadable = load_sample_set(exported, card, data or Path(card.data["validation"]), count, seed, listener)
    if isinstance(classes := card.outputs[0].shape[-1], int):
        find_label_indices(samples, card, classes)  # labels that fit no class end it before anything runs
    rows = evaluate_artifacts(model, exported, artifacts, samples, store, listener)
    for row in rows:
        if row.calibrated_on and row.entry:
            listener.warn(
                f"{row.calibrated_on} of the {len(samples.files)} {samples.kind} were used to calibrate {row.entry.id}, so its accuracy"
                " is overestimated; evaluate on other data"
            )
    assert rows[0].predictions is not None
    labels = find_label_indices(samples, card, rows[0].predictions.scores.shape[1])
    weights = dict(exported.info["weights"])
    with open_run(store.workspace, "evaluate") as run:
        write_predictions(run.path / PREDICTIONS, samples, labels, rows)
        record = {
            "model": card.name,
            "source": card.source,
            "model_id": exported.id,
            "weights": weights,
            "dataset": {
                "name": samples.name,
                "kind": samples.kind,
                "sha256": samples.sha256,
                "count": len(samples.files),
                "unreadable": [str(each.path) for each in unreadable],
                "labelled": labels is not None,
                "classes": int(rows[0].predictions.scores.shape[1]),
            },
            "accuracy_budget": budget,
            "results": list(records_from_evaluation(rows, labels, bool(weights["trained"]), budget)),
            "run_dir": str(run.path),
        }
        write_json(run.path / EVALUATION, record)
        parents = [exported.id, *(each.id for each in artifacts)]
        details = {"model": card.name, "dataset": record["dataset"], "trained": bool(weights["trained"])}
        finish_run(run, command=shlex.split(get_command_line()), parents=parents, details=details)
    return record
