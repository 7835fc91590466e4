"""Puts a precision into the ONNX graph: casts by ModelOpt's AutoCast, Q/DQ nodes from a calibration table.

TensorRT 11 takes the types as they stand in the graph; no builder flag changes them.
"""

import re
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path

from optpipe.backends.base import Device
from optpipe.core.card import card_from_file
from optpipe.core.entries import GraphInfo, ModelInfo, ReferenceInfo
from optpipe.core.events import Listener
from optpipe.core.precision import Precision
from optpipe.core.quiet import redirect_output
from optpipe.errors import OptpipeError, StageError, escape, first_line
from optpipe.export.reference import reference_from_file
from optpipe.inputs.rows import split_batches
from optpipe.quantize.as_given import make_graph_as_given
from optpipe.quantize.int8 import make_int8_graph, target_from_device
from optpipe.workspace.environment import get_package_version
from optpipe.workspace.file_names import CARD, MODELOPT_LOG, ONNX, REFERENCE
from optpipe.workspace.store import Entry, Store

REVISION = 1
FP16_HEADROOM = 65504 / 8
"""Layers whose values come within three bits of FP16's largest number on the reference inputs stay in FP32."""
BF16_OPSET = 22
"""The first opset whose Conv takes BF16."""
CONVERTED = "converted.onnx"


def convert_to_precision(
    precision: Precision,
    device: Device,
    model: Entry[ModelInfo],
    reference: Entry[ReferenceInfo],
    calibration: Path | None,
    store: Store,
    listener: Listener,
) -> tuple[Entry[ModelInfo] | Entry[GraphInfo], bool]:
    """The entry whose `model.onnx` has `precision` in it; FP32 and TF32 are the exported graph itself.

    In an INT8 graph for a GPU the rest is FP16; for the CPU, which has no FP16 kernels, it is FP32.

    TF32 differs from FP32 only in what the runtime may do with FP32 products, so it has no graph of its own.
    """
    if (own := model.info.own_precision) is not None:
        return make_graph_as_given(Precision(own), precision, target_from_device(device), model, store, listener)
    if precision in (Precision.FP32, Precision.TF32):
        return model, True
    if precision is Precision.INT8:
        return make_int8_graph(model, device, calibration, store, listener)
    return _convert_to_half(precision, model, reference, store, listener)


def _convert_to_half(
    precision: Precision, model: Entry[ModelInfo], reference: Entry[ReferenceInfo], store: Store, listener: Listener
) -> tuple[Entry[GraphInfo], bool]:
    recipe = {
        "revision": REVISION,
        "model": model.id,
        "precision": str(precision),
        "tools": _list_tools(),
        "ranges": reference.id,
    }

    def make(directory: Path) -> GraphInfo:
        import onnx
        from modelopt.onnx.autocast import convert_to_mixed_precision
        from polygraphy.json import save_json

        samples, card = directory.resolve() / "samples.json", card_from_file(model.file(CARD))
        rows = reference_from_file(reference.file(REFERENCE)).inputs
        save_json([batch for batch, _ in split_batches(card, rows)], str(samples))
        source = _convert_opset(BF16_OPSET, model, directory) if precision is Precision.BF16 else model.file(ONNX)
        source = source.resolve()
        with redirect_output(directory / MODELOPT_LOG), _convert_in(card.name, precision, directory):
            graph = convert_to_mixed_precision(
                str(source),
                low_precision_type=str(precision),
                keep_io_types=True,
                data_max=FP16_HEADROOM,
                calibration_data=str(samples),
            )
        samples.unlink()
        (directory / CONVERTED).unlink(missing_ok=True)
        onnx.save(graph, directory / ONNX)
        return GraphInfo(precision, tool="modelopt.onnx.autocast")

    return store.produce(GraphInfo, recipe, make, parents=(model.id, reference.id), listener=listener)


@contextmanager
def _convert_in(name: str, precision: Precision, directory: Path) -> Iterator[None]:
    """In `directory`, where ModelOpt leaves files of its own. What it raises becomes a StageError with its last words."""
    try:
        with chdir(directory):
            yield
    except OptpipeError:
        raise
    except Exception as error:
        said = re.findall(r"ERROR[\s:-]+(.+)", (directory / MODELOPT_LOG).read_text(encoding="utf-8", errors="replace"))
        reason = escape(said[-1]) if said else f"{type(error).__name__}: {first_line(error)}"
        raise StageError(f"ModelOpt cannot convert {name} to {precision}: {reason[:240]}") from error
    finally:
        for left in (*directory.glob("*.data"), *directory.glob("sym_shape_infer*")):
            left.unlink()


def _convert_opset(opset: int, model: Entry[ModelInfo], directory: Path) -> Path:
    import onnx

    graph = onnx.load(model.file(ONNX))
    own = next(each.version for each in graph.opset_import if each.domain in ("", "ai.onnx"))
    if own >= opset:
        return model.file(ONNX)
    converted = directory / CONVERTED
    onnx.save(onnx.version_converter.convert_version(graph, opset), converted)
    return converted


def _list_tools() -> dict[str, str | None]:
    return {name: get_package_version(name) for name in ("nvidia-modelopt", "onnx", "onnxruntime-gpu")}
