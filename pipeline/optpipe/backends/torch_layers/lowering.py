"""A module's FP16 program whose layers are INT8 steps, with the weights and ranges of a Q/DQ graph, or whose convolutions are FP16 steps.

The graph's layers are matched to the program's by their weights, after batch normalization is folded in. Addition, activation,
and quantization after such a layer are fused with it, also after a depthwise convolution or the first one. Between layers with
the same range activations stay in INT8, also if a residual addition reads them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import numpy as np

from optpipe.backends.base import BuildRequest
from optpipe.backends.onnx_graph import load_onnx
from optpipe.backends.onnx_quantized import QuantizedLayer, layers_from_qdq
from optpipe.backends.torch_decompositions import list_decompositions
from optpipe.backends.torch_graph import (
    add_constant,
    copy_where_needed,
    fold_normalization,
    read_arguments,
    read_product,
    split_outputs,
)
from optpipe.backends.torch_layers.attention import get_only, lower_attention, put_batches_first
from optpipe.backends.torch_layers.layers import (
    Layer,
    find_obstacle,
    find_overflow,
    get_shape,
    have_same_weights,
    is_depthwise,
    is_patches,
    is_plain_pool,
    is_stem,
    name_activation,
)
from optpipe.backends.torch_layers.overflow import explain_overflows, widen_overflows
from optpipe.backends.torch_layers.writing import StepWriter, quantize_tensor
from optpipe.backends.torch_program import export_with_weights, make_example_inputs
from optpipe.core import torch
from optpipe.core.precision import Precision
from optpipe.kernels.operators import register_operator


def lower_program(request: BuildRequest) -> tuple[Any, tuple[str, ...]]:
    """The program as a GraphModule for all shapes of the card, without tactics; and a remark if INT8 layers of the graph stay in FP16.

    Layers that share a weight are taken in order. In FP16 the request's graph is not read.
    """
    register_operator()
    exported, wide = export_with_weights(request, Precision.FP16)
    program = exported.run_decompositions(list_decompositions()).module()
    inputs = make_example_inputs(request.card.inputs, request.device)
    widened = widen_overflows(program, wide, inputs)
    put_batches_first(program)
    half = request.precision is Precision.FP16
    if half:
        _join_linear_layers(program)
    layers = [] if half else [*layers_from_qdq(load_onnx(request.graph), have_same_weights)]
    missed = _Lowering(program, layers, wide, half).run()
    lower_attention(program, {quantize_tensor: "int8"}, kernels=True)
    stay = (f"{len(missed)} layers stay in fp16: {missed[0]}",) if missed else ()
    return program, (*stay, *explain_overflows(widened))


def _join_linear_layers(program: Any) -> None:
    """Makes linear layers of one tensor, such as queries, keys, and values, one layer; those before an activation stay."""
    groups: dict[Any, list[Any]] = {}
    for node in program.graph.nodes:
        stored = node.target is torch.ops.aten.linear.default and all(
            getattr(argument, "op", None) == "get_attr" for argument in node.args[1:]
        )
        reader = get_only(node.users) if stored else None
        if stored and (reader is None or name_activation(reader) is None):
            groups.setdefault((node.args[0], len(node.args)), []).append(node)
    for number, group in enumerate(group for group in groups.values() if len(group) > 1):
        sizes = [node.meta["val"].shape[-1] for node in group]
        with program.graph.inserting_before(group[0]):
            joined = []
            for at, parts in enumerate(zip(*(node.args[1:] for node in group), strict=True)):
                value = torch.cat([attrgetter(part.target)(program).detach() for part in parts])
                joined.append(add_constant(program, f"joined_{number}_{at}", value))
                joined[-1].meta = {"val": value}
            new = program.graph.call_function(
                torch.ops.aten.linear.default, (group[0].args[0], *joined)
            )
            first = group[0].meta["val"]
            new.meta = {"val": first.new_empty((*first.shape[:-1], sum(sizes)))}
            split_outputs(program.graph, new, group, sizes)


def lower_own_layers(program: Any, wide: Mapping[str, Any]) -> None:
    """Makes steps of depthwise convolutions and of the first one in FP16, and linear layers of convolutions over patches."""
    _Lowering(program, [], wide).run()


@dataclass
class _Lowering:
    """Finds the layers of a program, and what is fused with each, and replaces them."""

    program: Any
    waiting: list[QuantizedLayer]
    """Layers of the graph that are not matched yet."""
    wide: Mapping[str, Any]
    """FP32 weights by name."""
    half: bool = False
    """Whether convolutions that the graph does not have become steps too."""
    layers: dict[Any, Layer] = field(default_factory=dict)
    """Matched layers by their node."""
    patches: list[Layer] = field(default_factory=list)
    """Convolutions that become linear layers; nothing is fused with them."""
    scales: dict[Any, float] = field(default_factory=dict)
    """Scales of tensors that a layer reads in INT8, by node."""
    additions: dict[Any, Layer] = field(default_factory=dict)
    """Layers by the residual addition that is fused with them."""
    missed: list[str] = field(default_factory=list)

    def run(self) -> tuple[str, ...]:
        for node in self.program.graph.nodes:
            if (layer := self._read_layer(node)) is not None:
                self._take(layer)
        self._find_scales()
        for find in (self._find_addition, self._find_end, self._find_output):
            for layer in self.layers.values():
                find(layer)
        self._replace_layers(StepWriter(self.program, self.scales))
        self.program.graph.eliminate_dead_code()
        self.program.delete_all_unused_submodules()
        copy_where_needed(self.program)
        self.program.graph.lint()
        self.program.recompile()
        never = [
            f"{table.name}: the program has no layer with its weights"
            for table in self.waiting
            if not table.kept
        ]
        return (*self.missed, *never)

    def _replace_layers(self, writer: StepWriter) -> None:
        for number, layer in enumerate(self.patches):
            with self.program.graph.inserting_before(layer.last):
                writer.replace_patches(layer, f"patches_{number}")
        lasts = {layer.pool or layer.last: layer for layer in self._join_layers()}
        for number, node in enumerate(list(self.program.graph.nodes)):
            if node in lasts:
                writer.replace_layer(lasts[node], f"int8_{number}")

    def _read_layer(self, node: Any) -> Layer | None:
        aten = torch.ops.aten
        if convolves := node.target in (aten.conv1d.default, aten.conv2d.default):
            given = read_arguments(node)
            source, held, bias, transposed = given["input"], given["weight"], given["bias"], False
        elif (product := read_product(node)) is not None:
            source, held, bias, transposed = product
        else:
            return None
        if held.op != "get_attr" or getattr(source, "op", None) == "get_attr":
            return None
        if not convolves and held.meta["val"].dim() != 2:
            return None
        weight = self._read(held).t() if transposed else self._read(held)
        stored = bias is not None and bias.op == "get_attr" and bias.meta["val"].dim() == 1
        shift = self._read(bias) if stored else weight.new_zeros(len(weight))
        if not convolves:
            return Layer(node, source, weight, shift, node, computed_bias=None if stored else bias)
        if bias is not None and not stored:
            return None
        stride, padding, dilation = (
            tuple(given[name]) for name in ("stride", "padding", "dilation")
        )
        return self._fold_normalization(
            Layer(node, source, weight, shift, node, stride, padding, dilation, given["groups"])
        )

    def _read(self, node: Any) -> Any:
        held = self.wide.get(node.target)
        return (
            (attrgetter(node.target)(self.program) if held is None else held).detach().float().cpu()
        )

    def _fold_normalization(self, layer: Layer) -> Layer:
        reader = get_only(layer.node.users)
        aten = torch.ops.aten
        if reader is None or reader.target is not aten._native_batch_norm_legit_no_training.default:
            return layer
        given = read_arguments(reader)
        parts = [given[name] for name in ("weight", "bias", "running_mean", "running_var")]
        if (
            any(getattr(part, "op", "get_attr") != "get_attr" for part in parts)
            or len(reader.users) != 1
        ):
            return layer
        values = (None if part is None else self._read(part) for part in parts)
        weight, bias = fold_normalization(layer.weight, layer.bias, values, given["eps"])
        return replace(layer, weight=weight, bias=bias, last=next(iter(reader.users)))

    def _take(self, layer: Layer) -> None:
        match = next(
            (table for table in self.waiting if have_same_weights(layer.weight.numpy(), table)),
            None,
        )
        if match is not None:
            self.waiting = [table for table in self.waiting if table is not match]
            if match.kept:
                return
            obstacle = find_obstacle(layer) or find_overflow(layer)
            if obstacle is not None:
                self.missed.append(f"{match.name}: {obstacle}")
                return
            layer.table = match
        narrow = find_overflow(layer) is None
        own = narrow and (is_depthwise(layer) or is_stem(layer))
        layer.floating = match is None and narrow and not own and self.half and layer.fits_half
        if match is None and narrow and is_patches(layer):
            self.patches.append(layer)
        elif match is not None or own or layer.floating:
            self.layers[layer.node] = layer

    def _find_scales(self) -> None:
        for layer in self.layers.values():
            if layer.table is not None:
                self.scales.setdefault(layer.given, layer.table.scale)
        for layer in self.layers.values():
            if layer.table is not None and layer.table.output_scale is not None:
                self.scales.setdefault(layer.last, layer.table.output_scale)

    def _find_addition(self, layer: Layer) -> None:
        """Fuses a residual addition with the convolution whose other side has an INT8 scale; of two such, the one that runs last."""
        reader = get_only(layer.last.users)
        if reader is None or not (layer.table or layer.floating) or len(layer.stride) != 2:
            return
        if (
            reader.target is not torch.ops.aten.add.Tensor
            or reader.kwargs
            or reader in self.additions
        ):
            return
        sides = list(reader.args)
        other = sides[1 - sides.index(layer.last)]
        if other is layer.last:
            return
        example = getattr(other, "meta", {}).get("val")  # a number has none
        if (
            example is None
            or example.dtype != layer.last.meta["val"].dtype
            or get_shape(other) != get_shape(layer.last)
        ):
            return
        rivals = [
            rival
            for rival in self.layers.values()
            if rival.last is other and (rival.table or rival.floating)
        ]
        taken_later = (layer.floating or layer.last in self.scales) and len(other.users) == 1
        if taken_later and any(layer.node < rival.node for rival in rivals):
            return
        if layer.floating or other in self.scales:
            layer.added, layer.last = other, reader
            self.additions[reader] = layer

    def _find_end(self, layer: Layer) -> None:
        """Fuses an activation, and max pooling after one that is never negative."""
        reader = get_only(layer.last.users)
        if reader is None or layer.line or layer.computed_bias is not None:
            return
        if (activation := name_activation(reader)) is None:
            return
        layer.activation, layer.last = activation, reader
        pool = get_only(reader.users)
        if pool is not None and activation in ("relu", "relu6") and is_plain_pool(pool):
            layer.pool = pool

    def _find_output(self, layer: Layer) -> None:
        if layer.pool is not None:
            if self._is_read_in_int8(layer, layer.pool):
                layer.output_scale = self.scales[layer.pool]
                return
            layer.pool = layer.pool if self.half and layer.table is None else None
            if layer.pool is not None:
                return
        if (
            not layer.line
            and layer.computed_bias is None
            and self._is_read_in_int8(layer, layer.last)
        ):
            layer.output_scale = self.scales[layer.last]

    def _join_layers(self) -> Iterator[Layer]:
        """All layers; INT8 linear layers of one tensor with plain FP16 outputs, such as queries, keys, and values, as one."""
        groups: dict[Any, list[Layer]] = {}
        for layer in self.layers.values():
            plain = (
                layer.flat
                and layer.last is layer.node
                and layer.computed_bias is layer.output_scale is None
            )
            alike = plain and layer.table is not None
            groups.setdefault(
                (layer.given, layer.table.scale) if alike and layer.table else layer, []
            ).append(layer)
        for first, *others in groups.values():
            if not others:
                yield first
                continue
            layers, tables = (
                (first, *others),
                [part.table for part in (first, *others) if part.table],
            )
            weights, scales = (
                np.concatenate([getattr(table, name) for table in tables])
                for name in ("weight", "weight_scale")
            )
            bias = np.concatenate([np.asarray(part.bias) for part in layers])
            yield replace(
                first,
                bias=bias,
                table=replace(tables[0], weight=weights, weight_scale=scales),
                parts=layers,
            )

    def _is_read_in_int8(self, layer: Layer, value: Any) -> bool:
        scale = self.scales.get(value)
        return scale is not None and all(
            self._takes_int8(reader, layer, value, scale) for reader in value.users
        )

    def _takes_int8(self, reader: Any, layer: Layer, value: Any, scale: float) -> bool:
        if (adding := self.additions.get(reader)) is not None:
            return adding.added is value and not adding.floating
        reading = self.layers.get(reader)
        if reading is None or reading.table is None or reading.given is not value or reading.line:
            return False
        return reading.flat == layer.flat and reading.table.scale == scale
