"""Runs an artifact on the reference inputs and holds its outputs against the source model's."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optpipe.backends.base import Backend, Device, Session
from optpipe.core.card import ModelCard, Task, card_from_file
from optpipe.core.environment import gpus
from optpipe.core.events import Listener
from optpipe.core.precision import Precision
from optpipe.core.store import Entry, Store
from optpipe.stages.export import CARD, REFERENCE
from optpipe.stats.agreement import TOLERATED_RELATIVE_ERROR, output_error, top1_agreement

if TYPE_CHECKING:
    import numpy as np

REVISION = 1


def verification(
    artifact: Entry, reference: Entry, model: Entry, backend: Backend, device: Device, store: Store, listener: Listener
) -> tuple[Entry, bool]:
    """The store entry `verification`: errors per output, and whether all are inside the precision's tolerance.

    Reruns where the artifact's bytes, the reference or the GPU differ.
    """
    card = card_from_file(model.file(CARD))
    precision = Precision(artifact.info["precision"])
    recipe = {
        "revision": REVISION,
        "artifact": {"id": artifact.id, "sha256": artifact.sha256(artifact.info["file"])},
        "reference": reference.id,
        "gpu": gpus()[0]["name"] if device == "cuda" and gpus() else None,
    }

    def make(directory: Path) -> Mapping[str, Any]:  # noqa: ARG001 - the outcome is the manifest's info alone
        with backend.load(store.verified(artifact).path, artifact.info, device, {}) as session:
            inputs, expected = reference_tensors(reference.file(REFERENCE))
            found = run_in_batches(session, card, inputs)
        return parity_record(card, precision, expected, found, str(reference.info["origin"]))

    return store.produce("verification", recipe, make, parents=(artifact.id, reference.id), listener=listener)


def reference_tensors(path: Path) -> tuple[dict[str, "np.ndarray"], dict[str, "np.ndarray"]]:
    """Inputs and outputs of a reference file."""
    import numpy as np

    with np.load(path) as stored:
        inputs = {name.removeprefix("input:"): stored[name] for name in stored.files if name.startswith("input:")}
        outputs = {name.removeprefix("output:"): stored[name] for name in stored.files if name.startswith("output:")}
    return inputs, outputs


def run_in_batches(session: Session, card: ModelCard, inputs: Mapping[str, "np.ndarray"]) -> dict[str, "np.ndarray"]:
    """All samples through the session, first as one batch as large as the profile allows, then the rest."""
    import numpy as np

    total = len(next(iter(inputs.values())))
    step = min(total, *(each.max[0] for each in card.inputs))
    runs = [
        session.run({name: value[start : start + step] for name, value in inputs.items()})
        for start in range(0, total - total % step, step)
    ]
    return {each.name: np.concatenate([run[each.name] for run in runs]) for each in session.outputs}


def parity_record(
    card: ModelCard,
    precision: Precision,
    expected: Mapping[str, "np.ndarray"],
    found: Mapping[str, "np.ndarray"],
    origin: str,
) -> dict[str, Any]:
    """The JSON form of a comparison; agreement only for classifiers whose reference answers vary."""
    import numpy as np

    tolerance = TOLERATED_RELATIVE_ERROR[precision]
    errors = [output_error(name, value[: len(found[name])], found[name]) for name, value in expected.items()]
    agreement = None
    if card.task in (Task.CLASSIFICATION, Task.TEXT_CLASSIFICATION):
        name = next(iter(expected))
        agreement = top1_agreement(expected[name][: len(found[name])], found[name].astype(np.float32))
    return {
        "reference": origin,
        "samples": len(next(iter(found.values()))),
        "tolerance_relative": tolerance,
        "max_abs": max(each.max_abs for each in errors),
        "relative": max(each.relative for each in errors),
        "snr_db": min((each.snr_db for each in errors if each.snr_db is not None), default=None),
        "cosine": min(each.cosine for each in errors),
        "top1_agreement": agreement,
        "outputs": [each.to_dict() for each in errors],
        "passed": all(each.finite and each.relative <= tolerance for each in errors),
    }
