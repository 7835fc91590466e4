"""The stored verification of an artifact: its outputs against the reference."""

from dataclasses import replace
from pathlib import Path

from optpipe.backends.base import Backend
from optpipe.backends.registry import load_artifact
from optpipe.build.verify import Trajectory, verify_session
from optpipe.core import pl
from optpipe.core.entries import ArtifactInfo, ModelInfo, ReferenceInfo, VerificationInfo
from optpipe.core.events import Listener
from optpipe.models.artifacts.engine_files import hash_engine
from optpipe.models.export.exported import reference_from_file
from optpipe.models.stored_card import read_stored_card
from optpipe.stats.paired import TOLERATED_RELATIVE_ERROR, pool_errors
from optpipe.workspace.entry import Entry
from optpipe.workspace.environment import get_gpu_name
from optpipe.workspace.file_names import ONNX, OUTPUT_ERRORS, REFERENCE
from optpipe.workspace.files import write_parquet
from optpipe.workspace.store import Store

VERIFICATION_REVISION = 4


def verify_artifact(
    artifact: Entry[ArtifactInfo],
    reference: Entry[ReferenceInfo],
    model: Entry[ModelInfo],
    backend: Backend,
    store: Store,
    listener: Listener,
    minimum_snr_db: float | None = None,
    trajectory: Trajectory | None = None,
) -> tuple[Entry[VerificationInfo], bool]:
    """The store entry `verification`: errors per output and sample, of the state after `trajectory` too, and whether each output
    has its minimum SNR.

    Code for single batch sizes also runs at those sizes, and the worst result counts. Repeated if the artifact's bytes, the
    reference or the GPU change.
    """
    card = read_stored_card(model)
    recipe = {
        "revision": VERIFICATION_REVISION,
        "artifact": {"id": artifact.id, "sha256": hash_engine(artifact)},
        "reference": reference.id,
        "gpu": get_gpu_name() if artifact.info.device == "cuda" else None,
        "minimum_snr_db": minimum_snr_db,
        **({} if trajectory is None else {"trajectory": trajectory.recipe}),
    }

    def make(directory: Path) -> VerificationInfo:
        sizes = backend.list_static_batches(artifact.info)
        rounded = artifact.info.precision, artifact.info.weights.own_precision
        tolerated = max(TOLERATED_RELATIVE_ERROR[precision] for precision in rounded)
        if minimum_snr_db is not None:
            tolerated = 10 ** (-minimum_snr_db / 20)
        with load_artifact(artifact, store) as session:
            tensors = reference_from_file(reference.file(REFERENCE))
            info, rows = verify_session(
                session, card, tolerated, tensors, reference.info, sizes, model.file(ONNX)
            )
            if trajectory is not None:
                states = trajectory.compare(session)
                pooled = tuple(pool_errors(name, errors) for name, errors in states.items())
                info, rows = replace(info, steps=trajectory.steps, trajectory=pooled), rows | states
        frames = [
            pl.DataFrame({"output": [name] * len(errors["values"]), **errors})
            for name, errors in rows.items()
        ]
        if frames:
            write_parquet(directory / OUTPUT_ERRORS, pl.concat(frames, how="vertical_relaxed"))
        return info

    return store.produce(
        VerificationInfo, recipe, make, parents=(artifact.id, reference.id), listener=listener
    )
