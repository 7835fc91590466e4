"""Exported torch programs in one precision, from which the torch, inductor, and torch-tensorrt backends start.

The module's parameters are cast before the export; inputs and outputs stay FP32, as in the ONNX graphs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from optpipe.backends.base import (
    BuildRequest,
    Device,
    prefers_channels_last,
)
from optpipe.core import torch
from optpipe.core.card import InputSpec, ModelCard
from optpipe.core.errors import (
    OptpipeError,
    StageError,
    escape,
    first_line,
)
from optpipe.core.precision import Precision
from optpipe.core.wording import Argument, Message

_DTYPES = {
    Precision.FP32: "float32",
    Precision.TF32: "float32",
    Precision.FP16: "float16",
    Precision.BF16: "bfloat16",
}


TORCH_PRECISIONS = frozenset(_DTYPES)
"""Precisions of exported programs. torch has no INT8 convolutions on a GPU; `torch_layers` has."""


def cast_module(precision: Precision, module: Any, device: Device) -> Any:
    dtype = getattr(torch, _DTYPES[precision])
    layout = (
        torch.channels_last if prefers_channels_last(precision, device) else torch.contiguous_format
    )
    inner = module.to(device=device, dtype=dtype, memory_format=layout)

    class InPrecision(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = inner

        def forward(self, *inputs: Any) -> Any:
            outputs = self.model(*(_cast(tensor, dtype, layout) for tensor in inputs))
            flat = outputs if isinstance(outputs, tuple) else (outputs,)
            return tuple(_cast(tensor, torch.float32, layout) for tensor in flat)

    return InPrecision().eval()


def _cast(tensor: Any, dtype: Any, layout: Any) -> Any:
    if not tensor.is_floating_point():
        return tensor
    return tensor.to(
        dtype=dtype, memory_format=layout if tensor.dim() == 4 else torch.contiguous_format
    )


def make_example_inputs(inputs: tuple[InputSpec, ...], device: str) -> tuple[Any, ...]:
    """Seeded tensors of the `opt` shapes; an open dimension of size 1 becomes 2, since export specializes on 1."""
    generator = torch.Generator().manual_seed(0)
    tensors = []
    for spec in inputs:
        shape = [
            max(usual, 2) if low != high and high > 1 else usual
            for low, usual, high in zip(spec.min, spec.opt, spec.max, strict=True)
        ]
        if spec.dtype.startswith("float"):
            tensors.append(torch.randn(shape, generator=generator).to(device))
        else:
            tensors.append(torch.ones(shape, dtype=getattr(torch, spec.dtype), device=device))
    return tuple(tensors)


def make_dynamic_shapes(inputs: tuple[InputSpec, ...]) -> tuple[dict[int, Any], ...]:
    """One named dimension per open axis. Inputs share the batch, and equal ranges of one axis share a dimension."""
    dims: dict[tuple[str, int, int], Any] = {}
    shapes = []
    for spec in inputs:
        axes = {}
        for axis, (low, high) in enumerate(zip(spec.min, spec.max, strict=True)):
            if low != high:
                name = "batch" if axis == spec.batch else f"dim{axis}"
                axes[axis] = dims.setdefault(
                    (name, low, high), torch.export.Dim(name, min=low, max=high)
                )
        shapes.append(axes)
    return tuple(shapes)


def export_program(request: BuildRequest) -> Any:
    """`torch.export` of the source module in the requested precision.

    Raises what `export_module` raises, and `StageError` if the program does not run: export does not see that an FP32 tensor
    made in forward meets FP16 weights.
    """
    name, precision = request.card.name, request.precision
    if request.module is None:
        raise StageError(f"{name} has no torch module to export")
    program = export_module(cast_module(precision, request.module(), request.device), request)
    try:
        with torch.no_grad():
            program.module()(*make_example_inputs(request.card.inputs, request.device))
    except Exception as error:
        cast = precision in (Precision.FP16, Precision.BF16)
        way_out: str = "try another backend"
        if cast:
            way_out = "try " + Argument("precision", "fp32") + ", or on a GPU "
            way_out += Argument("backend", "onnxruntime")
        raise StageError(
            f"torch cannot run {name} in {precision}: {first_line(error)}", remedy=way_out
        ) from error
    return program


def export_with_weights(request: BuildRequest, precision: Precision) -> tuple[Any, dict[str, Any]]:
    """The exported program in `precision`, and the module's FP32 weights by the program's names for them."""
    module = request.module() if request.module else None
    weights = (
        {}
        if module is None
        else {f"model.{name}": tensor for name, tensor in module.state_dict().items()}
    )
    wanted = replace(request, precision=precision, module=(lambda: module) if module else None)
    return export_program(wanted), weights


def export_rewritten(program: Any, request: BuildRequest) -> Any:
    """Exports a GraphModule with its images channels last, whatever layouts it was traced with.

    Raises what `export_module` raises.
    """
    from optpipe.backends.torch_layers.layouts import make_arranger

    arranger = make_arranger()

    class Rewritten(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.program = program

        def forward(self, *inputs: Any) -> Any:
            return arranger(self.program).run(*inputs)

    return export_module(Rewritten(), request)


def export_module(module: Any, request: BuildRequest) -> Any:
    """`torch.export` of a module whose starred forward takes the card's inputs.

    Raises `StageError` with torch's reason if torch cannot export the module for all shapes of the card.
    """
    examples = make_example_inputs(request.card.inputs, request.device)
    with torch.no_grad(), translate_refusals(request.card, "torch.export could not export"):
        return torch.export.export(
            module, examples, dynamic_shapes=(make_dynamic_shapes(request.card.inputs),)
        )


@contextmanager
def translate_refusals(card: ModelCard, what: str) -> Iterator[None]:
    try:
        yield
    except OptpipeError:
        raise
    except Exception as error:
        low, _, high = card.batch_range
        fixed = "a fixed size (" + Argument("batch", 1) + ") or " if low != high else ""
        reason = f"{type(error).__name__}: {first_line(error)}"
        lines = [line.strip() for line in str(error).splitlines()]
        if "Suggested fixes:" in lines:  # constraints are violated
            after = lines[lines.index("Suggested fixes:") + 1 :]
            suggested = [line for line in after if " = " in line]
            reason = escape(f"{lines[0].partition('!')[0]}; torch suggests {', '.join(suggested)}")
        raise StageError(
            f"{what} {card.name}: {reason}", remedy=Message("try ", fixed, "another backend")
        ) from error
