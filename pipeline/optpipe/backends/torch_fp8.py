"""FP8 linear layers in torch: a module's FP16 program whose linear layers compute in E4M3 with static scales.

The weights and scales come from a Q/DQ graph. The program comes from the module, so that attention is one operator; its layers
are matched by their weights. Products have FP32 sums (on a GPU with the fast accumulation of its matrix units) and FP16 outputs
with the bias added. Source: PyTorch, `torch._scaled_mm`.
"""

from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optpipe.backends.base import BuildRequest
from optpipe.backends.onnx_graph import QuantizedLayer, layers_from_qdq, load_onnx
from optpipe.backends.torch_layers.attention import lower_attention
from optpipe.backends.torch_program import copy_where_needed, export_with_weights, read_product
from optpipe.core.precision import Precision


def lower_fp8(request: BuildRequest, around: Precision = Precision.FP16) -> tuple[Any, tuple[str, ...]]:
    """The program as a GraphModule for all shapes of the card, with the type `around` outside its FP8 layers, and a remark if layers of
    the graph keep that type because no linear layer of the program has their weights.
    """
    exported, wide = export_with_weights(request, around)
    program = exported.run_decompositions({}).module()
    missed = replace_linear_layers(program, layers_from_qdq(load_onnx(request.graph), _have_same_weights), wide)
    lower_attention(program, windows=False)
    copy_where_needed(program)
    why = "for the torch program has no linear layer with their weights"
    return program, (f"{len(missed)} layers stay in fp16, {why}: {missed[0]}",) if missed else ()


def replace_linear_layers(program: Any, layers: Iterable[QuantizedLayer], wide: Mapping[str, Any]) -> tuple[str, ...]:
    """Makes linear layers of the GraphModule `program` FP8, in place, if their FP32 weights in `wide` match one of `layers`.

    Layers that share a weight are taken in order. Returns the names of the layers that were not found.
    """
    import torch

    waiting = list(layers)
    for number, node in enumerate(list(program.graph.nodes)):
        product = read_product(node)
        if product is None or product[1].target not in wide:
            continue
        given, weight, bias, transposed = product
        values = wide[weight.target].detach().float().numpy()
        values = values.T if transposed else values
        layer = next((each for each in waiting if _have_same_weights(values, each)), None)
        if layer is None:
            continue
        waiting = [each for each in waiting if each is not layer]
        if layer.kept:
            continue
        stored = attrgetter(bias.target)(program) if getattr(bias, "op", None) == "get_attr" else None
        device = attrgetter(weight.target)(program).device
        program.add_submodule(f"fp8_{number}", make_linear(layer, device, stored))
        with program.graph.inserting_before(node):
            new = program.graph.call_module(f"fp8_{number}", (given,))
            if bias is not None and stored is None:  # a computed bias, such as one joined from parts
                new = program.graph.call_function(torch.ops.aten.add.Tensor, (new, bias))
        new.meta = {**node.meta, "value": node}
        node.replace_all_uses_with(new)
        program.graph.erase_node(node)
    program.graph.eliminate_dead_code()
    program.delete_all_unused_submodules()  # the weights in FP16
    program.recompile()
    return tuple(each.name for each in waiting if not each.kept)


def _have_same_weights(values: NDArray[Any], layer: QuantizedLayer) -> bool:
    import torch

    if values.shape != layer.weight.shape:
        return False
    for rows in (1, len(values)):  # the first row rejects most layers
        rounded = _to_e4m3(torch.tensor(values[:rows]), 1.0 / float(layer.weight_scale[0])).view(torch.uint8)
        if not np.array_equal(rounded.numpy(), layer.weight[:rows].view(np.uint8)):
            return False
    return True


def _to_e4m3(values: Any, inverse_scale: float) -> Any:
    """Rounds half to even and saturates. `inverse_scale` is a power of two."""
    import torch

    largest = torch.finfo(torch.float8_e4m3fn).max
    return (values * inverse_scale).clamp(-largest, largest).to(torch.float8_e4m3fn)


def make_linear(layer: QuantizedLayer, device: Any, bias: Any = None) -> Any:
    """A torch module from (..., input features) to (..., output features) of the same floating-point type."""
    import torch

    class Fp8Linear(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = torch.from_numpy(layer.weight.view(np.uint8).copy()).view(torch.float8_e4m3fn)
            self.register_buffer("weight", weight.to(device))
            self.register_buffer("scale", torch.tensor(layer.scale, device=device))
            self.register_buffer("weight_scale", torch.tensor(float(layer.weight_scale[0]), device=device))
            self.register_buffer("bias", None if bias is None else bias.detach())

        def forward(self, given: Any) -> Any:
            data = _to_e4m3(given, 1.0 / layer.scale).reshape(-1, given.shape[-1])
            product = torch._scaled_mm(
                data,
                self.weight.t(),
                scale_a=self.scale,
                scale_b=self.weight_scale,
                bias=self.bias,
                out_dtype=given.dtype,
                use_fast_accum=True,
            )
            return product.reshape(*given.shape[:-1], len(self.weight))

    return Fp8Linear()
