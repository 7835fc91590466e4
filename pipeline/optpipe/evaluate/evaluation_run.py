"""An evaluation from the command to its run folder."""

import shlex
from pathlib import Path
from typing import Any

from optpipe.artifacts.lookup import typed
from optpipe.core.card import card_from_file
from optpipe.core.events import Listener
from optpipe.errors import BadInputError
from optpipe.evaluate.evaluate import (
    artifacts_of,
    evaluated,
    require_classifier,
    result_rows,
    write_predictions,
)
from optpipe.export.exported import exportable, exported_model, model_id
from optpipe.export.model import Model
from optpipe.inputs.task_data import label_indices, sample_set
from optpipe.workspace.file_names import CARD, EVALUATION, PREDICTIONS
from optpipe.workspace.manifest import command_line
from optpipe.workspace.runs import finish_run, whole_run, write_json
from optpipe.workspace.store import Store


def evaluation_run(
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
    model, stored = exportable(model, store, listener)
    card = card_from_file(stored.file(CARD)) if stored else model.loaded().card
    require_classifier(card)
    if data is None and "validation" not in card.data:
        what = "texts with --data FILE" if card.tokenization else "images with --data DIR"
        raise BadInputError(f"{card.name} has no validation set on its card; give labelled {what}")
    artifacts = artifacts_of(model_id(model), store)
    if not artifacts:
        raise BadInputError(
            f"nothing is built of {card.name} with these options in {store.workspace}\n"
            f"run `optpipe build {typed(card)}` first, with the options given here"
        )
    exported, _ = exported_model(model, store, listener, stored)
    card = card_from_file(exported.file(CARD))
    samples, unreadable = sample_set(exported, card, data or Path(card.data["validation"]), count, seed, listener)
    if isinstance(classes := card.outputs[0].shape[-1], int):
        label_indices(samples, card, classes)  # labels that fit no class end it before anything runs
    rows = evaluated(model, exported, artifacts, samples, store, listener)
    for row in rows:
        if row.calibrated_on and row.entry:
            listener.warn(
                f"{row.calibrated_on} of the {len(samples.files)} {samples.kind} calibrated {row.entry.id}: its accuracy"
                " on them flatters; evaluate on others"
            )
    assert rows[0].predictions is not None
    labels = label_indices(samples, card, rows[0].predictions.scores.shape[1])
    weights = dict(exported.info["weights"])
    with whole_run(store.workspace, "evaluate") as run:
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
            "results": list(result_rows(rows, labels, bool(weights["trained"]), budget)),
            "run_dir": str(run.path),
        }
        write_json(run.path / EVALUATION, record)
        parents = [exported.id, *(each.id for each in artifacts)]
        details = {"model": card.name, "dataset": record["dataset"], "trained": bool(weights["trained"])}
        finish_run(run, command=shlex.split(command_line()), parents=parents, details=details)
    return record
