"""The requests of a deployment, which its proof and live check send, and the outputs that they must get.

`requests/outputs.npz` has the artifact's outputs for them as `NUMBER:OUTPUT`, if it ran where the deployment was written.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from optpipe.core.card import ModelCard
from optpipe.core.errors import read_as_user_file
from optpipe.core.files import Files
from optpipe.deploy.records import MODELS, OUTPUTS, REQUESTS, TENSORS, DeploymentRecord
from optpipe.deploy.session_process import Answer, open_artifact, open_preprocessing
from optpipe.deploy.triton_config import CONFIG, read_config
from optpipe.models.export.exported import reference_from_file
from optpipe.models.inputs.rows import fill_sequences, read_length
from optpipe.preprocess.dali_pipeline import INPUT as DALI_INPUT
from optpipe.workspace.arrays import read_arrays, write_arrays

DALI_OUTPUT = "DALI_OUTPUT_0"
ENCODED = "encoded_image"
"""The ensemble's input: an image file as bytes."""
ROWS_AT_ONCE = 4
"""Samples in one request of the engine, so that the order of a batch is checked too."""
RECORDED_IMAGES = 4
"""Images whose outputs are recorded; of the others, which may be masks of many megabytes, only the prediction is."""


@dataclass(frozen=True, slots=True)
class Expected:
    """A request and the outputs that it must get; empty if they are not known."""

    model: str
    inputs: Mapping[str, np.ndarray]
    source: Mapping[str, np.ndarray] = field(default_factory=dict)
    """The source model's outputs."""
    prediction: int | None = None
    outputs: Mapping[str, np.ndarray] = field(default_factory=dict)
    """The artifact's, from the deployment's files."""


def list_expected(
    folder: Path, record: DeploymentRecord, card: ModelCard, engine: Answer | None = None
) -> Iterator[Expected]:
    """Requests of the engine, then of the ensemble, with the outputs of `engine`; without it with the recorded ones."""
    requests, recorded = list(_list_requests(folder, record, card)), folder / REQUESTS / OUTPUTS
    if engine is not None:
        preprocess = None
        for request in requests:
            inputs = request.inputs
            if request.model != record.engine:
                preprocess = preprocess or open_preprocessing(
                    folder / MODELS / str(record.preprocessing) / "1"
                )
                inputs = {
                    card.inputs[0].name: preprocess([{DALI_INPUT: inputs[ENCODED]}])[0][DALI_OUTPUT]
                }
            yield replace(request, outputs=engine([inputs])[0])
    elif recorded.is_file():
        with read_as_user_file(recorded, "the outputs of a deployment"):
            arrays = read_arrays(recorded)
        for number, request in enumerate(requests):
            names = [name for name in arrays if name.startswith(f"{number}:")]
            yield replace(request, outputs={name.partition(":")[2]: arrays[name] for name in names})
    else:
        yield from requests


def record_outputs(folder: Path, record: DeploymentRecord, card: ModelCard) -> None:
    """Writes the outputs of the artifact in a deployment's `folder` for its requests."""
    place = folder / MODELS / record.engine
    engine = open_artifact(place / "1", record.options, read_config(place / CONFIG).max_batch_size)
    arrays: dict[str, np.ndarray] = {}
    images = 0
    for number, request in enumerate(list_expected(folder, record, card, engine)):
        images += request.model != record.engine
        if images <= RECORDED_IMAGES:
            arrays |= {f"{number}:{name}": array for name, array in request.outputs.items()}
    write_arrays(folder / REQUESTS / OUTPUTS, arrays)


def _list_requests(folder: Path, record: DeploymentRecord, card: ModelCard) -> Iterator[Expected]:
    """The known inputs, sequences of the shortest and the longest length of the model, and the images."""
    with read_as_user_file(folder / REQUESTS / TENSORS, "the requests of a deployment"):
        known = reference_from_file(folder / REQUESTS / TENSORS)
    batched = read_config(folder / MODELS / record.engine / CONFIG).max_batch_size
    count = len(next(iter(known.inputs.values())))
    step = min(ROWS_AT_ONCE, batched) or count
    for start in range(0, count, step):
        part = slice(start, start + step)
        inputs, outputs = (
            {name: array[part] for name, array in rows.items()}
            for rows in (known.inputs, known.outputs)
        )
        yield Expected(record.engine, inputs, outputs)
    lengths = {*(card.length_range or ())} if batched else set()
    for length in sorted(lengths - {read_length(card, known.inputs)}):
        inputs = fill_sequences(card, known.inputs, length, step)
        yield Expected(record.engine, {name: array[:step] for name, array in inputs.items()})
    if record.ensemble is not None:
        files = Files(folder).below(REQUESTS)
        for name, prediction in record.images.items():
            content = np.frombuffer(files.read(name), np.uint8)[np.newaxis]
            yield Expected(record.ensemble, {ENCODED: content}, prediction=prediction)
