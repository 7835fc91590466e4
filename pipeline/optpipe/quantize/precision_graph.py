"""Puts a precision into the ONNX graph: casts by ModelOpt's AutoCast, Q/DQ nodes from a calibration table.

TensorRT 11 takes the types as they stand in the graph; no builder flag changes them.
"""

from pathlib import Path

from optpipe.backends.base import Device
from optpipe.core.entries import GraphInfo, ModelInfo, ReferenceInfo
from optpipe.core.errors import BadInputError
from optpipe.core.events import Listener
from optpipe.core.mixed_precision import Budget
from optpipe.core.precision import CALIBRATED, Precision
from optpipe.quantize.as_given import make_graph_as_given
from optpipe.quantize.calibrated_graph import choose_target, make_calibrated_graph
from optpipe.quantize.half import convert_to_half, convert_within_budget
from optpipe.workspace.store import Entry, Store

BUDGETED = (Precision.FP16, Precision.INT8, Precision.FP8)
"""What a budget can keep layers out of."""


def convert_to_precision(
    precision: Precision,
    device: Device,
    model: Entry[ModelInfo],
    reference: Entry[ReferenceInfo],
    calibration: Path | None,
    store: Store,
    listener: Listener,
    budget: Budget | None = None,
) -> tuple[Entry[ModelInfo] | Entry[GraphInfo], bool]:
    """The entry whose `model.onnx` has `precision` in it; FP32 and TF32 are the exported graph itself.

    In an INT8 graph for a GPU the rest is FP16; for the CPU, which has no FP16 kernels, it is FP32. With a `budget`, FP16,
    INT8 and FP8 leave out the layers that exceed it.

    TF32 differs from FP32 only in what the runtime may do with FP32 products, so it has no graph of its own.
    """
    if (own := model.info.own_precision) is not None:
        if budget is not None and precision in BUDGETED:
            raise BadInputError(f"{model.info.name} comes in {own}, so --budget has no layers to choose; leave it out")
        return make_graph_as_given(Precision(own), precision, choose_target(precision, device), model, store, listener)
    if precision in (Precision.FP32, Precision.TF32):
        return model, True
    if precision in CALIBRATED:
        return make_calibrated_graph(precision, model, device, calibration, store, listener, budget)
    if budget is not None and precision in BUDGETED:
        return convert_within_budget(budget, model, reference, calibration, store, listener)
    return convert_to_half(precision, model, reference, store, listener)
