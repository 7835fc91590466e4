"""Modules in float16, bfloat16, or float64: a copy in float32 is exported, and the user's own is the reference.

Modules that were quantized already are refused: their integer kernels belong to torch, and no other runtime has them.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from optpipe.core import torch
from optpipe.core.card import ModelCard
from optpipe.core.entries import WeightsRecord
from optpipe.core.errors import BadInputError
from optpipe.core.precision import Precision
from optpipe.core.wording import Argument
from optpipe.models.sources.modules import LoadedModel, flatten_module
from optpipe.models.sources.nesting import Arrange

CONVERTED_TYPES = {
    "bfloat16": Precision.BF16,
    "float16": Precision.FP16,
    "float64": Precision.FP32,
}
"""Types of weights that are converted to float32, the coarsest first, with the precision that their rounding is judged by."""
_QUANTIZED_PACKAGES = (
    "torch.ao.nn.quantized",
    "torch.ao.nn.intrinsic.quantized",
    "torch.nn.quantized",
    "torch.nn.intrinsic.quantized",
    "bitsandbytes",
    "torchao",
)


def make_loaded_model(
    module: Any,
    card: ModelCard,
    weights: WeightsRecord,
    arrange: Arrange | None = None,
) -> LoadedModel:
    """`module` with flat outputs, in float32; its own type is recorded with the weights."""
    own = find_own_type(module)
    if own is None:
        return LoadedModel(card, weights, module=flatten_module(module, arrange))
    exported = flatten_module(copy.deepcopy(module).float(), arrange)
    exported.converted_from = own
    inputs = tuple(
        replace(spec, dtype="float32") if spec.dtype in CONVERTED_TYPES else spec
        for spec in card.inputs
    )
    return LoadedModel(
        replace(card, inputs=inputs),
        replace(weights, converted_from=own),
        module=exported,
        own_module=_run_in_own_type(flatten_module(module, arrange), own),
    )


def find_own_type(module: Any) -> str | None:
    """The type of CONVERTED_TYPES that the module's parameters have; the coarsest of several, None for float32."""
    kinds = {str(parameter.dtype).removeprefix("torch.") for parameter in module.parameters()}
    return next((kind for kind in CONVERTED_TYPES if kind in kinds), None)


def describe_conversion(name: str, weights: WeightsRecord) -> str | None:
    """What was done to a module that is not in float32; None if nothing was."""
    if weights.converted_from is None:
        return None
    own = weights.converted_from
    return f"{name} is in {own} and was converted to float32; its outputs are compared with those of the module in {own}"


def find_quantized_part(module: Any) -> str | None:
    """The first part with integer weights of torch, such as `fc (quantized Linear)`; None without any."""
    for name, part in module.named_modules():
        kind = type(part)
        packed = kind.__module__.startswith(_QUANTIZED_PACKAGES)
        if packed or any(_is_quantized(tensor) for tensor in _list_own_tensors(part)):
            return f"{name or 'it'} ({'quantized ' if packed else ''}{kind.__name__})"
    return None


def _list_own_tensors(part: Any) -> Iterator[Any]:
    yield from part.parameters(recurse=False)
    yield from part.buffers(recurse=False)


def _is_quantized(tensor: Any) -> bool:
    kinds = type(tensor), type(getattr(tensor, "data", tensor))
    return bool(tensor.is_quantized) or any(
        kind.__module__.startswith(_QUANTIZED_PACKAGES) for kind in kinds
    )


def _run_in_own_type(flat: Any, own: str) -> Any:
    dtype = getattr(torch, own)

    class InOwnType(torch.nn.Module):
        """Takes and returns float32 around the user's module."""

        def __init__(self) -> None:
            super().__init__()
            self.model = flat

        def forward(self, *inputs: Any) -> Any:
            try:
                outputs = self.model(*(_cast(tensor, dtype) for tensor in inputs))
            except (RuntimeError, NotImplementedError) as error:
                sets = Argument("precision") + " sets its precision"
                raise BadInputError(
                    f"the module does not run in {own} on the CPU: {error}",
                    remedy="return the module in float32 (.float()); " + sets,
                ) from error
            return tuple(_cast(tensor, torch.float32) for tensor in outputs)

    return InOwnType().eval()


def _cast(tensor: Any, dtype: Any) -> Any:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
