"""Builds one artifact and proves that it has the precision that was asked for."""

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from optpipe.backends.base import Backend, BuildRequest, Device
from optpipe.core.card import card_from_file
from optpipe.core.events import Listener
from optpipe.core.precision import Precision, PrecisionProof, prove_precision
from optpipe.core.quiet import redirect_output
from optpipe.errors import StageError
from optpipe.workspace.file_names import CARD, ONNX
from optpipe.workspace.store import Entry, Store

REVISION = 3
BUILD_LOG = "build.log"
LISTED_LAYERS = 10
"""How many layers of another type a manifest and a message name."""


def build_artifact(
    backend: Backend,
    precision: Precision,
    device: Device,
    graph: Entry,
    model: Entry,
    module: Callable[[], Any] | None,
    options: Mapping[str, Any],
    store: Store,
    listener: Listener,
) -> tuple[Entry, bool]:
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

    def make(directory: Path) -> Mapping[str, Any]:
        request = BuildRequest(card, precision, graph.file(ONNX), module, device, options, directory)
        if refused := backend.find_unsupported(request):
            raise StageError(f"{backend.name} does not support {card.name} in {precision}: {'; '.join(refused[:5])}")
        with redirect_output(directory / BUILD_LOG):
            built = backend.build(request)
        return {
            "model": card.name,
            "source": card.source,
            "backend": backend.name,
            "precision": str(precision),
            "device": device,
            "file": built.file,
            "weights": model.info["weights"],
            "precision_proof": record_from_proof(prove_precision(precision, built.layers)),
            "lint": _lint_graph(graph, device, precision),
            **built.info,
        }

    return store.produce("artifact", recipe, make, parents=(model.id, graph.id), listener=listener)


def _lint_graph(graph: Entry, device: Device, precision: Precision) -> dict[str, Any]:
    """What may keep the graph from Tensor Cores, by rule, with one example; all of it is in the graph's entry or `optpipe calibrate`."""
    import onnx

    from optpipe.backends.onnx_lint import lint_graph

    if device != "cuda" or precision not in (Precision.FP16, Precision.BF16, Precision.INT8):
        return {}
    findings = graph.info.get("lint")
    if findings is None:
        findings = [each.to_dict() for each in lint_graph(onnx.load(graph.file(ONNX)))]
    counts = Counter(each["rule"] for each in findings)
    return (
        {"counts": dict(counts.most_common()), "first": findings[0], "findings": findings[:LISTED_LAYERS]}
        if findings
        else {}
    )


def record_from_proof(proof: PrecisionProof) -> dict[str, Any]:
    """The JSON form of a proof, with the largest layers of another type."""
    return {
        "proven": proof.proven,
        "reason": proof.reason,
        "share": proof.share.to_dict(),
        "others": [
            {"name": each.name, "op": each.op, "type": each.type, "macs": each.macs}
            for each in proof.others[:LISTED_LAYERS]
        ],
        "others_count": len(proof.others),
    }
