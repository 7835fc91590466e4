"""FP8 linear layers in torch: a module's FP16 program whose linear layers compute in E4M3 with static scales.

The weights and scales come from a Q/DQ graph. The program comes from the module, so that attention is one operator; its layers
are matched by their weights. Products have FP32 sums (on a GPU with the fast accumulation of its matrix units) and FP16 outputs
with the bias added. Source: PyTorch, `torch._scaled_mm`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optpipe.backends.base import BuildRequest
from optpipe.backends.onnx_graph import load_onnx
from optpipe.backends.onnx_quantized import QuantizedLayer, layers_from_qdq
from optpipe.backends.torch_decompositions import list_decompositions
from optpipe.backends.torch_graph import (
    copy_where_needed,
    read_arguments,
    read_product,
    split_outputs,
)
from optpipe.backends.torch_layers.attention import lower_attention, put_batches_first
from optpipe.backends.torch_layers.lowering import lower_own_layers
from optpipe.backends.torch_layers.overflow import (
    WIDENED,
    explain_overflows,
    widen_overflows,
)
from optpipe.backends.torch_program import export_with_weights, make_example_inputs
from optpipe.core import torch
from optpipe.core.precision import Precision
from optpipe.kernels.operators import register_operator
from optpipe.kernels.steps import Attention, approximate_gelu, step_from_text

LEAST_FEATURES = 32
"""Matrix units take no fewer products of 8-bit numbers at once."""


def lower_fp8(
    request: BuildRequest, around: Precision = Precision.FP16, *, kernels: bool = False
) -> tuple[Any, tuple[str, ...]]:
    """The program as a GraphModule for all shapes of the card, with the type `around` outside its FP8 layers, and a remark if layers of
    the graph keep that type because no linear layer of the program has their weights. With `kernels`, attention becomes steps.
    """
    exported, wide = export_with_weights(request, around)
    program = exported.run_decompositions(list_decompositions()).module()
    if around is Precision.FP16:
        widen_overflows(program, wide, make_example_inputs(request.card.inputs, request.device))
    put_batches_first(program)
    if kernels:
        lower_own_layers(program, wide)
    missed = replace_linear_layers(
        program, layers_from_qdq(load_onnx(request.graph), _have_same_weights), wide
    )
    lower_attention(program, {quantize: "e4m3"}, kernels=kernels)
    _attend_in_8_bits(program)
    copy_where_needed(program)
    why = "for the torch program has no linear layer with their weights"
    stay = (f"{len(missed)} layers stay in fp16, {why}: {missed[0]}",) if missed else ()
    return program, (*stay, *explain_overflows(program.meta.get(WIDENED, ())))


def replace_linear_layers(
    program: Any, layers: Iterable[QuantizedLayer], wide: Mapping[str, Any]
) -> tuple[str, ...]:
    """Makes linear layers of the GraphModule `program` FP8, in place, if their FP32 weights in `wide` match one of `layers`.

    Layers that share a weight are taken in order. Layers of one tensor, such as queries, keys, and values, are computed as one. Returns
    the names of the layers that were not found.
    """
    groups, missed = _match_layers(program, layers, wide)
    codes: dict[Any, Any] = {}
    for number, group in enumerate(groups):
        _replace_group(program, f"fp8_{number}", group, codes)
    program.graph.eliminate_dead_code()
    program.delete_all_unused_submodules()  # the weights in FP16
    program.recompile()
    return missed


_Match = tuple[Any, QuantizedLayer, Any]
"""The node of a linear layer, the layer in the graph, and the node of its bias or None."""


def _match_layers(
    program: Any, layers: Iterable[QuantizedLayer], wide: Mapping[str, Any]
) -> tuple[list[list[_Match]], tuple[str, ...]]:
    """The layers of `program` that become FP8, those of one tensor together; and the names of `layers` that it does not have."""
    waiting = list(layers)
    groups: dict[Any, list[_Match]] = {}
    for node in program.graph.nodes:
        product = read_product(node)
        if product is None or product[1].target not in wide:
            continue
        given, weight, bias, transposed = product
        values = wide[weight.target].detach().float().numpy()
        values = values.T if transposed else values
        layer = next(
            (candidate for candidate in waiting if _have_same_weights(values, candidate)), None
        )
        if layer is None:
            continue
        waiting = [other for other in waiting if other is not layer]
        if not layer.kept:
            plain = bias is None or bias.op == "get_attr"
            key = (given, layer.scale) if plain else node
            groups.setdefault(key, []).append((node, layer, bias))
    return list(groups.values()), tuple(layer.name for layer in waiting if not layer.kept)


def _replace_group(program: Any, name: str, group: Sequence[_Match], codes: dict[Any, Any]) -> None:
    """Computes linear layers of one tensor as the FP8 module `name`; `codes` are the tensors that are quantized already."""
    nodes, tables, biases = zip(*group, strict=True)
    given, weight, bias, _ = read_product(nodes[0])  # type: ignore[misc]
    stored = all(shift is None or shift.op == "get_attr" for shift in biases)
    sizes, example = [len(table.weight) for table in tables], nodes[0].meta["val"]
    device = attrgetter(weight.target)(program).device
    shift = None
    if stored and any(biases):
        zeros = (torch.zeros(size, dtype=example.dtype, device=device) for size in sizes)
        shift = torch.cat(
            [
                zero if node is None else attrgetter(node.target)(program).detach()
                for node, zero in zip(biases, zeros, strict=True)
            ]
        )
    linear = make_linear(_join_tables(tables), device, example.dtype, shift)
    program.add_submodule(name, linear)
    with program.graph.inserting_before(nodes[0]):
        key = given, tables[0].scale
        if key not in codes:
            codes[key] = _quantize(program.graph, given, tables[0].scale)
        new = program.graph.call_module(name, (codes[key],))
        if not stored:  # a computed bias, such as one joined from parts
            new = program.graph.call_function(torch.ops.aten.add.Tensor, (new, bias))
        if len(nodes) > 1:
            new.meta = {"val": example.new_empty((*example.shape[:-1], sum(sizes)))}
            split_outputs(program.graph, new, nodes, sizes)
        else:
            new.meta = {**nodes[0].meta, "value": nodes[0]}
            nodes[0].replace_all_uses_with(new)
    for node in nodes:
        program.graph.erase_node(node)


def _quantize(graph: Any, given: Any, scale: float) -> Any:
    """Adds the node of `given` in E4M3, after GELU by our approximation where it is torch's own."""
    source = given
    if (
        given.target is torch.ops.aten.gelu.default
        and read_arguments(given)["approximate"] == "none"
    ):
        source = graph.call_function(_bend, given.args)
        source.meta = {**given.meta, "value": given}
    return graph.call_function(quantize, (source, 1.0 / scale))


def _join_tables(tables: Sequence[QuantizedLayer]) -> QuantizedLayer:
    """One layer with the outputs of all. Scales are powers of two, so that the larger one only moves exponents."""
    scale = max(float(table.weight_scale[0]) for table in tables)
    parts = [
        table.weight.astype(np.float32) * (float(table.weight_scale[0]) / scale) for table in tables
    ]
    weight = np.concatenate(parts).astype(tables[0].weight.dtype)
    return replace(tables[0], weight=weight, weight_scale=np.full(len(weight), scale, np.float32))


def _bend(value: Any) -> Any:
    return approximate_gelu(value.float()).to(value.dtype)


def _attend_in_8_bits(program: Any) -> None:
    """Queries, keys, and values that only attention reads become E4M3, which costs ViT-B/16 0.4 dB and BERT-base none."""
    for node in program.graph.nodes:
        readers = [
            step_from_text(reader.args[5])
            for reader in node.users
            if reader.target is register_operator()
        ]
        fit = all(
            isinstance(step, Attention) and step.outputs // step.heads >= LEAST_FEATURES
            for step in readers
        )
        if node.op == "call_module" and fit and readers and len(readers) == len(node.users):
            program.get_submodule(node.target).kind = torch.float8_e4m3fn


def _have_same_weights(values: NDArray[Any], layer: QuantizedLayer) -> bool:
    if values.shape != layer.weight.shape:
        return False
    for rows in (1, len(values)):  # the first row rejects most layers
        rounded = quantize(torch.tensor(values[:rows]), 1.0 / float(layer.weight_scale[0])).view(
            torch.uint8
        )
        if not np.array_equal(rounded.numpy(), layer.weight[:rows].view(np.uint8)):
            return False
    return True


def quantize(values: Any, inverse_scale: float) -> Any:
    """E4M3: rounds half to even and saturates. `inverse_scale` is a power of two."""
    import torch  # a tracer follows this function

    largest = torch.finfo(torch.float8_e4m3fn).max
    return (values * inverse_scale).clamp(-largest, largest).to(torch.float8_e4m3fn)


def make_linear(layer: QuantizedLayer, device: Any, kind: Any, bias: Any = None) -> Any:
    """A torch module from E4M3 (..., input features) to (..., output features) of the floating-point type `kind`."""

    import torch

    class Fp8Linear(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kind = kind
            weight = torch.from_numpy(layer.weight.view(np.uint8).copy()).view(torch.float8_e4m3fn)
            self.register_buffer("weight", weight.to(device))
            self.register_buffer("scale", torch.tensor(layer.scale, device=device))
            self.register_buffer(
                "weight_scale", torch.tensor(float(layer.weight_scale[0]), device=device)
            )
            self.register_buffer("bias", None if bias is None else bias.detach())

        def forward(self, given: Any) -> Any:
            product = torch._scaled_mm(
                given.reshape(-1, given.shape[-1]),
                self.weight.t(),
                scale_a=self.scale,
                scale_b=self.weight_scale,
                bias=self.bias,
                out_dtype=self.kind,
                use_fast_accum=True,
            )
            return product.reshape(*given.shape[:-1], len(self.weight))

    return Fp8Linear()
