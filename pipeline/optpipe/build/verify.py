"""Runs an artifact on the reference inputs and compares its outputs with the source model's."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import gcd, inf
from pathlib import Path
from typing import TYPE_CHECKING

from optpipe.backends.base import Backend, Session
from optpipe.core.card import ModelCard, Task, card_from_file
from optpipe.core.entries import ArtifactInfo, ModelInfo, ReferenceInfo, VerificationInfo
from optpipe.core.events import Listener
from optpipe.core.precision import Precision
from optpipe.models.artifacts.engine import hash_engine
from optpipe.models.export.exported import Reference, reference_from_file
from optpipe.models.inputs.rows import count_batched, count_rows, join_batches, rows_from_outputs, split_batches
from optpipe.stats.agreement import (
    TOLERATED_RELATIVE_ERROR,
    compute_output_error,
    compute_top1_accuracy,
    compute_top1_agreement,
)
from optpipe.workspace.entry import Entry
from optpipe.workspace.environment import get_gpu_name
from optpipe.workspace.file_names import CARD, REFERENCE
from optpipe.workspace.store import Store

if TYPE_CHECKING:
    import numpy as np

REVISION = 1


def verify_artifact(
    artifact: Entry[ArtifactInfo],
    reference: Entry[ReferenceInfo],
    model: Entry[ModelInfo],
    backend: Backend,
    store: Store,
    listener: Listener,
) -> tuple[Entry[VerificationInfo], bool]:
    """The store entry `verification`: errors per output, and whether all are inside the precision's tolerance.

    Code for single batch sizes is run at those too, and the worst counts. Reruns where the artifact's bytes, the reference or the
    GPU differ.
    """
    card = card_from_file(model.file(CARD))
    recipe = {
        "revision": REVISION,
        "artifact": {"id": artifact.id, "sha256": hash_engine(artifact)},
        "reference": reference.id,
        "gpu": get_gpu_name() if artifact.info.device == "cuda" else None,
    }

    def make(directory: Path) -> VerificationInfo:  # noqa: ARG001 - the outcome is the manifest's info alone
        sizes = backend.list_static_batches(artifact.info)
        with backend.load(store.verify_entry(artifact).path, artifact.info, {}) as session:
            tensors = reference_from_file(reference.file(REFERENCE))
            return verify_session(session, card, artifact.info.precision, tensors, reference.info.origin, sizes)

    return store.produce(VerificationInfo, recipe, make, parents=(artifact.id, reference.id), listener=listener)


def verify_session(
    session: Session,
    card: ModelCard,
    precision: Precision,
    reference: Reference,
    origin: str,
    sizes: Sequence[int] = (),
) -> VerificationInfo:
    """All samples in batches as large as the profile allows, and again in batches of each of `sizes`: the worst of these."""
    found = []
    for size in (None, *sizes):
        tensors = reference if size is None else fill_batches(reference, size)
        outputs = run_in_batches(session, card, tensors.inputs, size)
        found.append(compare_to_reference(card, precision, tensors, outputs, origin, size))
    worst = min(found, key=lambda each: (each.passed is not False, inf if each.snr_db is None else each.snr_db))
    return replace(worst, samples=found[0].samples, values=found[0].values)


def fill_batches(reference: Reference, size: int) -> Reference:
    """The same samples, repeated until they fill batches of `size`."""
    count = size // gcd(count_rows(reference.inputs), size)

    def repeat(rows: "np.ndarray") -> "np.ndarray":
        return np.concatenate([rows] * count)

    import numpy as np

    return replace(
        reference,
        inputs={name: repeat(rows) for name, rows in reference.inputs.items()},
        outputs={name: repeat(rows) for name, rows in reference.outputs.items()},
        labels=None if reference.labels is None else repeat(reference.labels),
    )


def run_in_batches(
    session: Session, card: ModelCard, inputs: Mapping[str, "np.ndarray"], size: int | None = None
) -> dict[str, "np.ndarray"]:
    """All samples through the session, in batches of `size`, or as large as the profile allows."""
    batches = split_batches(card, inputs, size)
    runs = [rows_from_outputs(card.outputs, session.run(batch), count) for batch, count in batches]
    return {each.name: join_batches(each.name, [run[each.name] for run in runs]) for each in card.outputs}


def compare_to_reference(
    card: ModelCard,
    precision: Precision,
    reference: Reference,
    found: Mapping[str, "np.ndarray"],
    origin: str,
    size: int | None = None,
) -> VerificationInfo:
    """Outputs (samples, ...) of batches of `size` by name against the reference's, without the samples that no batch held.

    Agreement only for classifiers whose reference predictions vary.
    """
    import numpy as np

    tolerance = TOLERATED_RELATIVE_ERROR[precision]
    total = count_rows(reference.inputs)
    count = count_batched(card, total, size)
    rows = {name: value[:count] if len(value) == total else value for name, value in reference.outputs.items()}
    errors = tuple(compute_output_error(name, value, found[name]) for name, value in rows.items())
    values = sum(value.size for value in reference.outputs.values())  # a detector may have found nothing to compare
    agreement = accuracy = source_accuracy = None
    if card.task in (Task.CLASSIFICATION, Task.TEXT_CLASSIFICATION):
        name = next(iter(reference.outputs))
        expected, scores = rows[name], found[name].astype(np.float32)
        agreement = compute_top1_agreement(expected, scores)
        if reference.labels is not None:
            accuracy = compute_top1_accuracy(reference.labels[:count], scores)
            source_accuracy = compute_top1_accuracy(reference.labels[:count], expected)
    return VerificationInfo(
        reference=origin,
        samples=count,
        tolerance_relative=tolerance,
        snr_db=min((each.snr_db for each in errors if each.snr_db is not None), default=None),
        top1_agreement=agreement,
        top1_accuracy=accuracy,
        source_top1_accuracy=source_accuracy,
        outputs=errors,
        values=values,
        passed=all(each.finite and each.relative <= tolerance for each in errors) if values else None,
    )
