"""One artifact of the store: what a backend makes of a graph, with the proof of its precision."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from optpipe.backends.base import Backend, BuildRequest, Device
from optpipe.core.card import ModelCard
from optpipe.core.entries import ArtifactInfo, GraphInfo, ModelInfo, ReferenceInfo
from optpipe.core.events import Listener, Steps, advance_steps
from optpipe.core.precision import Precision, prove_precision
from optpipe.core.process import redirect_output
from optpipe.models.export.exported import reference_from_file
from optpipe.models.inputs.rows import split_batches
from optpipe.models.stored_card import read_stored_card
from optpipe.workspace.entry import Entry
from optpipe.workspace.file_names import ONNX, REFERENCE
from optpipe.workspace.store import Store

PROBE_ROWS = 2


def choose_probe(reference: Entry[ReferenceInfo], card: ModelCard) -> dict[str, NDArray[Any]]:
    """The first samples of the reference as one batch: a few, since each rewrite runs on them twice."""
    least, _, most = card.batch_range
    rows = reference_from_file(reference.file(REFERENCE)).inputs
    batches = split_batches(card, rows, max(least, min(PROBE_ROWS, most)))
    return next(batch for batch, _ in batches)


REVISION = 5
BUILD_LOG = "build.log"


def build_artifact(
    backend: Backend,
    precision: Precision,
    device: Device,
    graph: Entry[ModelInfo] | Entry[GraphInfo],
    model: Entry[ModelInfo],
    module: Callable[[], Any] | None,
    options: Mapping[str, Any],
    store: Store,
    listener: Listener,
    gpu_lock: Path | None = None,
    reference: Entry[ReferenceInfo] | None = None,
) -> Steps[tuple[Entry[ArtifactInfo], bool]]:
    """The store entry `artifact`: the engine, package or optimized graph, with the proof of its precision.

    What a backend makes of the graph is compared with it on the first inputs of `reference`.
    """
    card = read_stored_card(model)
    recipe = {
        "revision": REVISION,
        "backend": backend.name,
        "precision": str(precision),
        "device": device,
        "graph": graph.id,
        "inputs": [spec.to_dict() for spec in card.inputs],
        "built_with": dict(backend.recipe(device, options)),
    }

    def make(directory: Path) -> Steps[ArtifactInfo]:
        probe = [] if reference is None else [choose_probe(reference, card)]
        request = BuildRequest(
            card, precision, graph.file(ONNX), module, device, options, directory, gpu_lock, probe
        )
        building = backend.build_in_steps(request)
        while True:
            with redirect_output(directory / BUILD_LOG):
                built = advance_steps(building)
            if built:
                break
            yield
        given = graph.info if isinstance(graph.info, GraphInfo) else None
        return ArtifactInfo(
            model=card.name,
            source=card.source,
            backend=backend.name,
            precision=precision,
            device=device,
            file=built.file,
            more_files=built.more_files,
            weights=model.info.weights,
            precision_proof=prove_precision(precision, built.layers, built.placement),
            options=built.options,
            details=built.details,
            remarks=(*given.remarks, *built.remarks) if given else built.remarks,
            ranges=given.ranges if given else "",
            recovery=given.recovery if given else (),
            packages=backend.packages,
            mixed=given.mixed if given else None,
        )

    return store.produce_in_steps(
        ArtifactInfo,
        recipe,
        make,
        parents=(model.id, graph.id),
        listener=listener,
        runs_code=backend.loading_runs_code,
    )
