"""FP8 linear layers in torch: a module's FP16 program whose linear layers compute in E4M3 with static scales.

A Q/DQ graph holds the layers' weights and scales. The program comes from the module itself, where attention is one operator, and
its layers are found by their weights. Products add up in FP32 (on a GPU with the fast accumulation of its matrix units) and
leave in FP16 with the bias added. Source: PyTorch, `torch._scaled_mm`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optpipe.backends.base import BuildRequest
from optpipe.backends.onnx_graph import OnnxGraph, name_nodes
from optpipe.backends.torch_program import copy_where_needed, export_program
from optpipe.core.precision import Precision


@dataclass(frozen=True, slots=True)
class Fp8Layer:
    """A linear layer of a Q/DQ graph. An E4M3 number stands for itself times its scale, a power of two."""

    name: str
    weight: NDArray[Any]
    """(output features, input features), E4M3."""
    weight_scale: float
    scale: float
    """Of what the layer reads."""
    kept: bool = False
    """Whether it stays in a wider type."""


def lower_fp8(request: BuildRequest, around: Precision = Precision.FP16) -> tuple[Any, tuple[str, ...]]:
    """The program as a GraphModule in all shapes of the card, `around` its FP8 layers in another type; and the layers of the graph that
    it leaves in that type, since no linear layer has their weights.
    """
    import onnx

    module = request.module() if request.module else None
    wide = {} if module is None else {f"model.{name}": each for name, each in module.state_dict().items()}
    half = replace(request, precision=around, module=(lambda: module) if module else None)
    program = export_program(half).module()
    missed = replace_linear_layers(program, layers_from_graph(onnx.load(request.graph)), wide)
    copy_where_needed(program)
    return program, explain_missed(missed)


def explain_missed(names: tuple[str, ...]) -> tuple[str, ...]:
    """What must be said of layers that stayed in FP16; nothing where there are none."""
    if not names:
        return ()
    return (
        f"{len(names)} layers stay in fp16, for the torch program has no linear layer with their weights: {names[0]}",
    )


def layers_from_graph(model: Any) -> tuple[Fp8Layer, ...]:
    """The layers of a Q/DQ graph whose data and weights are dequantized from E4M3, in the graph's order.

    Between them those that stay in a wider type and share a weight with one of them.
    """
    import onnx
    import torch

    graph = OnnxGraph(name_nodes(model))

    def read(name: str) -> NDArray[Any]:
        values: NDArray[Any] = onnx.numpy_helper.to_array(graph.weights[name])
        return values

    found: dict[str, Fp8Layer] = {}
    wide = {}
    for node in (each for each in model.graph.node if each.op_type in ("Gemm", "MatMul")):
        data, held = (graph.producers.get(name) for name in node.input[:2])
        transposed = any(each.name == "transB" and each.i for each in node.attribute)
        if data is not None and held is not None and {data.op_type, held.op_type} == {"DequantizeLinear"}:
            weight, scales = read(held.input[0]), (float(read(held.input[1])), float(read(data.input[1])))
            found[node.name] = Fp8Layer(node.name, weight if transposed else np.ascontiguousarray(weight.T), *scales)
        elif node.input[1] in graph.weights and (weight := read(node.input[1])).ndim == 2:
            wide[node.name] = torch.from_numpy((weight if transposed else weight.T).copy())
    same = {_sign(each.weight, each.weight_scale): each for each in found.values()}
    for name, values in wide.items():
        for scale in {key[1] for key in same if key[0] == tuple(values.shape)}:
            if twin := same.get(_sign(_round(values, scale), scale)):
                found[name] = replace(twin, name=name, kept=True)
    return tuple(found[node.name] for node in model.graph.node if node.name in found)


def replace_linear_layers(program: Any, layers: Iterable[Fp8Layer], wide: Mapping[str, Any]) -> tuple[str, ...]:
    """Rewrites the GraphModule `program`: linear layers with the weights of `layers`, which `wide` has in FP32 by name, become FP8.

    Layers that share a weight are taken in order. Returns the names of those for FP8 that were not found.
    """

    waiting: dict[tuple[Any, ...], list[Fp8Layer]] = {}
    for each in layers:
        waiting.setdefault(_sign(each.weight, each.weight_scale), []).append(each)
    scales = {key[:2] for key in waiting}
    for number, node in enumerate(list(program.graph.nodes)):
        found = _read_product(node)
        if found is None or found.weight.target not in wide:
            continue
        weight = wide[found.weight.target].t() if found.transposed else wide[found.weight.target]
        for shape, scale in scales:
            if shape == tuple(weight.shape) and (same := waiting.get(_sign(_round(weight, scale), scale))):
                if not (layer := same.pop(0)).kept:
                    _replace(program, node, found, layer, f"fp8_{number}")
                break
    program.graph.eliminate_dead_code()
    program.delete_all_unused_submodules()  # the weights in FP16
    program.recompile()
    return tuple(each.name for same in waiting.values() for each in same if not each.kept)


def _sign(weight: NDArray[Any], scale: float) -> tuple[Any, ...]:
    return weight.shape, scale, sha256(weight.tobytes()).digest()


def _round(weight: Any, scale: float) -> NDArray[Any]:
    """An FP32 weight as bytes of E4M3."""
    import torch

    return np.asarray(_to_e4m3(weight.detach().float(), 1.0 / scale).view(torch.uint8).numpy())


def _to_e4m3(values: Any, inverse_scale: float) -> Any:
    """Rounded half to even; what is too large becomes the largest number. `inverse_scale` is a power of two."""
    import torch

    largest = torch.finfo(torch.float8_e4m3fn).max
    return (values * inverse_scale).clamp(-largest, largest).to(torch.float8_e4m3fn)


@dataclass(frozen=True, slots=True)
class _Product:
    """The operands of a linear layer, nodes of its program."""

    given: Any
    weight: Any
    bias: Any = None
    transposed: bool = False
    """Whether the weight is (input features, output features)."""


def _read_product(node: Any) -> _Product | None:
    """A call with a stored matrix as its weight; None for any other node. GPT-2's layers are `addmm`."""
    import torch

    aten, found = torch.ops.aten, None
    if node.target is aten.linear.default:
        found = _Product(*node.args)
    elif node.target is aten.addmm.default and not node.kwargs:
        bias, given, weight = node.args
        found = _Product(given, weight, bias, transposed=True)
    elif node.target in (aten.mm.default, aten.matmul.default):
        given, weight = node.args
        found = _Product(given, weight, transposed=True)
    return found if getattr(getattr(found, "weight", None), "op", None) == "get_attr" else None


def _replace(program: Any, node: Any, product: _Product, layer: Fp8Layer, name: str) -> None:
    import torch

    held, bias = attrgetter(product.weight.target)(program), product.bias
    stored = getattr(bias, "op", None) == "get_attr"  # others are computed, such as joined from parts
    program.add_submodule(name, make_linear(layer, held.device, attrgetter(bias.target)(program) if stored else None))
    with program.graph.inserting_before(node):
        new = program.graph.call_module(name, (product.given,))
        if bias is not None and not stored:
            new = program.graph.call_function(torch.ops.aten.add.Tensor, (new, bias))
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    program.graph.erase_node(node)


def make_linear(layer: Fp8Layer, device: Any, bias: Any = None) -> Any:
    """A torch module: (..., input features) in, (..., output features) of the same floating-point type out."""
    import torch

    class Fp8Linear(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = torch.from_numpy(layer.weight.view(np.uint8).copy()).view(torch.float8_e4m3fn)
            self.register_buffer("weight", weight.to(device))
            self.register_buffer("scale", torch.tensor(layer.scale, device=device))
            self.register_buffer("weight_scale", torch.tensor(layer.weight_scale, device=device))
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
