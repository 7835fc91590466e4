"""Builds one artifact and proves that it has the precision that was asked for."""

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from optpipe.backends.base import Backend, BuildRequest
from optpipe.core.card import card_from_file
from optpipe.core.entries import ArtifactInfo, Device, GraphInfo, LintSummary, ModelInfo
from optpipe.core.errors import StageError
from optpipe.core.events import Listener
from optpipe.core.precision import Precision, prove_precision
from optpipe.core.quiet import redirect_output
from optpipe.workspace.file_names import CARD, ONNX
from optpipe.workspace.store import Entry, Store

REVISION = 4
BUILD_LOG = "build.log"
LISTED_FINDINGS = 10
"""How many of the linter's findings a manifest names."""


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
) -> tuple[Entry[ArtifactInfo], bool]:
    """The store entry `artifact`: the engine, package or optimized graph, with the proof of its precision.

    Raises `StageError` for operators that the backend cannot take, named before the build starts.
    """
    card = card_from_file(model.file(CARD))
    recipe = {
        "revision": REVISION,
        "backend": backend.name,
        "precision": str(precision),
        "device": device,
        "graph": graph.id,
        "inputs": [each.to_dict() for each in card.inputs],
        "built_with": dict(backend.recipe(device, options)),
    }

    def make(directory: Path) -> ArtifactInfo:
        request = BuildRequest(card, precision, graph.file(ONNX), module, device, options, directory)
        if refused := backend.find_unsupported(request):
            raise StageError(f"{backend.name} does not support {card.name} in {precision}: {'; '.join(refused[:5])}")
        with redirect_output(directory / BUILD_LOG):
            built = backend.build(request)
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
            lint=_lint_graph(graph, device, precision),
            options=built.options,
            details=built.details,
            remarks=built.remarks,
            mixed=graph.info.mixed if isinstance(graph.info, GraphInfo) else None,
        )

    return store.produce(ArtifactInfo, recipe, make, parents=(model.id, graph.id), listener=listener)


def _lint_graph(graph: Entry[ModelInfo] | Entry[GraphInfo], device: Device, precision: Precision) -> LintSummary:
    """What may keep the graph from Tensor Cores; all of it is in the graph's entry or `optpipe calibrate`."""
    import onnx

    from optpipe.backends.onnx_lint import lint_graph

    if device != "cuda" or precision not in (Precision.FP16, Precision.BF16, Precision.INT8):
        return LintSummary()
    known = graph.info.lint if isinstance(graph.info, GraphInfo) else None
    findings = lint_graph(onnx.load(graph.file(ONNX))) if known is None else known
    counts = Counter(each.rule for each in findings)
    return LintSummary(dict(counts.most_common()), findings[:LISTED_FINDINGS])
