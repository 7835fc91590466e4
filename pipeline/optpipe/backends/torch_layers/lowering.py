"""A module's FP16 program whose layers are INT8 steps, with the weights and ranges of a Q/DQ graph, or whose convolutions are FP16 steps.

The graph's layers are matched to the program's by their weights, after batch normalization is folded in. Addition, activation,
and quantization after such a layer are fused with it, also after a depthwise convolution or the first one. Between layers with
the same range activations stay in INT8, also if a residual addition reads them.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from operator import add, attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optpipe.backends.base import BuildRequest
from optpipe.backends.onnx_graph import QuantizedLayer, layers_from_qdq, load_onnx
from optpipe.backends.torch_layers.attention import get_only, lower_attention, put_batches_first
from optpipe.backends.torch_layers.overflow import (
    WIDENED,
    explain_overflows,
    widen_overflows,
)
from optpipe.backends.torch_program import (
    add_constant,
    copy_where_needed,
    export_with_weights,
    fold_normalization,
    make_example_inputs,
    read_arguments,
    read_product,
    split_outputs,
    type_name_from_torch,
)
from optpipe.core import torch
from optpipe.core.precision import Precision
from optpipe.kernels import steps, tactics
from optpipe.kernels.operators import register_operator

ALIGNED = 16
"""TMA strides are multiples of 16 bytes, so INT8 tensors have zero-padded channels in multiples of 16."""
_ALIGNED_HALVES = 8
"""The same for FP16 channels."""
_MOST_DENSE = 512
"""Most input channels of a convolution whose groups fit no kernel and become one, with zeros."""
_LEAST_DEPTH = 32
"""Bytes of the smallest block of input channels."""
_STEM_CHANNELS = 4
_STEM_OUTPUTS = (16, 32, 64, 128)
_LARGEST_HALF = 65504.0
_TOLERANCE = 0.6
"""In steps of a weight: covers rounding, and scales that the graph stores in FP16."""


def lower_program(request: BuildRequest) -> tuple[Any, tuple[str, ...]]:
    """The program as a GraphModule for all shapes of the card, without tactics; and a remark if INT8 layers of the graph stay in FP16.

    Layers that share a weight are taken in order. In FP16 the request's graph is not read.
    """
    register_operator()
    exported, wide = export_with_weights(request, Precision.FP16)
    program = exported.run_decompositions({}).module()
    inputs = make_example_inputs(request.card.inputs, request.device)
    widened = widen_overflows(program, wide, inputs)
    put_batches_first(program)
    half = request.precision is Precision.FP16
    if half:
        _join_linear_layers(program)
    layers = [] if half else [*layers_from_qdq(load_onnx(request.graph), _have_same_weights)]
    missed = _Lowering(program, layers, wide, half).run()
    lower_attention(program, {quantize_tensor: "int8"}, kernels=True)
    stay = (f"{len(missed)} layers stay in fp16: {missed[0]}",) if missed else ()
    return program, (*stay, *explain_overflows(widened))


def _join_linear_layers(program: Any) -> None:
    """Makes linear layers of one tensor, such as queries, keys, and values, one layer; those before an activation stay."""
    groups: dict[Any, list[Any]] = {}
    for node in program.graph.nodes:
        stored = node.target is torch.ops.aten.linear.default and all(
            getattr(each, "op", None) == "get_attr" for each in node.args[1:]
        )
        reader = get_only(node.users) if stored else None
        if stored and (reader is None or _name_activation(reader) is None):
            groups.setdefault((node.args[0], len(node.args)), []).append(node)
    for number, group in enumerate(group for group in groups.values() if len(group) > 1):
        sizes = [each.meta["val"].shape[-1] for each in group]
        with program.graph.inserting_before(group[0]):
            joined = []
            for at, parts in enumerate(zip(*(each.args[1:] for each in group), strict=True)):
                value = torch.cat([attrgetter(each.target)(program).detach() for each in parts])
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


@dataclass(eq=False, slots=True)
class _Layer:
    """A layer of the program with the nodes that are fused with it."""

    node: Any
    given: Any
    weight: Any
    """FP32, (outputs, input channels of a group, kernel …), with batch normalization."""
    bias: Any
    """FP32, (outputs)."""
    last: Any
    """The last fused node, which the step replaces."""
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1
    floating: bool = False
    """A convolution in FP16, or a linear layer before an activation."""
    computed_bias: Any = None
    """A node that computes the bias of a linear layer."""
    table: QuantizedLayer | None = None
    added: Any = None
    activation: str = ""
    pool: Any = None
    output_scale: float | None = None
    """Scale of an INT8 output."""
    parts: tuple["_Layer", ...] = ()
    """Linear layers of one tensor that are computed as this one."""

    @property
    def flat(self) -> bool:
        return not self.stride

    @property
    def fits_half(self) -> bool:
        kind = type_name_from_torch(self.given.meta["val"].dtype)
        reader = get_only(self.last.users)
        bent = (
            self.computed_bias is None
            and reader is not None
            and _name_activation(reader) is not None
        )
        if (
            not (len(self.stride) == 2 or (self.flat and bent))
            or kind != "fp16"
            or _find_obstacle(self)
        ):
            return False
        outputs, depth = self.weight.shape[:2]
        return bool(outputs % _ALIGNED_HALVES == depth * self.groups % _ALIGNED_HALVES == 0)

    @property
    def line(self) -> bool:
        return len(self.stride) == 1


@dataclass
class _Lowering:
    program: Any
    waiting: list[QuantizedLayer]
    """Layers of the graph that are not matched yet."""
    wide: Mapping[str, Any]
    """FP32 weights by name."""
    half: bool = False
    """Whether convolutions that the graph does not have become steps too."""
    layers: dict[Any, _Layer] = field(default_factory=dict)
    """Matched layers by their node."""
    patches: list[_Layer] = field(default_factory=list)
    """Convolutions that become linear layers; nothing is fused with them."""
    scales: dict[Any, float] = field(default_factory=dict)
    """Scales of tensors that a layer reads in INT8, by node."""
    additions: dict[Any, _Layer] = field(default_factory=dict)
    """Layers by the residual addition that is fused with them."""
    replaced: dict[Any, Any] = field(default_factory=dict)
    """New nodes of floating-point tensors by the old ones."""
    written: dict[Any, Any] = field(default_factory=dict)
    """Nodes of INT8 tensors with padded channels, by the node of the value."""
    missed: list[str] = field(default_factory=list)

    def run(self) -> tuple[str, ...]:
        for node in self.program.graph.nodes:
            if (layer := self._read_layer(node)) is not None:
                self._take(layer)
        self._find_scales()
        for find in (self._find_addition, self._find_end, self._find_output):
            for layer in self.layers.values():
                find(layer)
        for number, layer in enumerate(self.patches):
            with self.program.graph.inserting_before(layer.last):
                self._replace_patches(layer, f"patches_{number}")
        lasts = {layer.pool or layer.last: layer for layer in self._join_layers()}
        for number, node in enumerate(list(self.program.graph.nodes)):
            if node in lasts:
                self._replace(lasts[node], f"int8_{number}")
        self.program.graph.eliminate_dead_code()
        self.program.delete_all_unused_submodules()
        copy_where_needed(self.program)
        self.program.graph.lint()
        self.program.recompile()
        never = [
            f"{each.name}: the program has no layer with its weights"
            for each in self.waiting
            if not each.kept
        ]
        return (*self.missed, *never)

    def _read_layer(self, node: Any) -> _Layer | None:
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
            return _Layer(node, source, weight, shift, node, computed_bias=None if stored else bias)
        if bias is not None and not stored:
            return None
        stride, padding, dilation = (
            tuple(given[each]) for each in ("stride", "padding", "dilation")
        )
        return self._fold_normalization(
            _Layer(node, source, weight, shift, node, stride, padding, dilation, given["groups"])
        )

    def _read(self, node: Any) -> Any:
        held = self.wide.get(node.target)
        return (
            (attrgetter(node.target)(self.program) if held is None else held).detach().float().cpu()
        )

    def _fold_normalization(self, layer: _Layer) -> _Layer:
        reader = get_only(layer.node.users)
        aten = torch.ops.aten
        if reader is None or reader.target is not aten._native_batch_norm_legit_no_training.default:
            return layer
        given = read_arguments(reader)
        parts = [given[each] for each in ("weight", "bias", "running_mean", "running_var")]
        if (
            any(getattr(each, "op", "get_attr") != "get_attr" for each in parts)
            or len(reader.users) != 1
        ):
            return layer
        values = (None if each is None else self._read(each) for each in parts)
        weight, bias = fold_normalization(layer.weight, layer.bias, values, given["eps"])
        return replace(layer, weight=weight, bias=bias, last=next(iter(reader.users)))

    def _take(self, layer: _Layer) -> None:
        match = next(
            (each for each in self.waiting if _have_same_weights(layer.weight.numpy(), each)), None
        )
        if match is not None:
            self.waiting = [each for each in self.waiting if each is not match]
            if match.kept:
                return
            obstacle = _find_obstacle(layer) or _find_overflow(layer)
            if obstacle is not None:
                self.missed.append(f"{match.name}: {obstacle}")
                return
            layer.table = match
        narrow = _find_overflow(layer) is None
        own = narrow and (_is_depthwise(layer) or _is_stem(layer))
        layer.floating = match is None and narrow and not own and self.half and layer.fits_half
        if match is None and narrow and _is_patches(layer):
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

    def _find_addition(self, layer: _Layer) -> None:
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
        found = getattr(other, "meta", {}).get("val")  # a number has none
        if (
            found is None
            or found.dtype != layer.last.meta["val"].dtype
            or _get_shape(other) != _get_shape(layer.last)
        ):
            return
        rivals = [
            each
            for each in self.layers.values()
            if each.last is other and (each.table or each.floating)
        ]
        taken_later = (layer.floating or layer.last in self.scales) and len(other.users) == 1
        if taken_later and any(layer.node < each.node for each in rivals):
            return
        if layer.floating or other in self.scales:
            layer.added, layer.last = other, reader
            self.additions[reader] = layer

    def _find_end(self, layer: _Layer) -> None:
        """Fuses an activation, and max pooling after one that is never negative."""
        reader = get_only(layer.last.users)
        if reader is None or layer.line or layer.computed_bias is not None:
            return
        if (activation := _name_activation(reader)) is None:
            return
        layer.activation, layer.last = activation, reader
        pool = get_only(reader.users)
        if pool is not None and activation in ("relu", "relu6") and _is_plain_pool(pool):
            layer.pool = pool

    def _find_output(self, layer: _Layer) -> None:
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

    def _join_layers(self) -> Iterator[_Layer]:
        """All layers; INT8 linear layers of one tensor with plain FP16 outputs, such as queries, keys, and values, as one."""
        groups: dict[Any, list[_Layer]] = {}
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
                [each.table for each in (first, *others) if each.table],
            )
            weights, scales = (
                np.concatenate([getattr(each, name) for each in tables])
                for name in ("weight", "weight_scale")
            )
            bias = np.concatenate([np.asarray(each.bias) for each in layers])
            yield replace(
                first,
                bias=bias,
                table=replace(tables[0], weight=weights, weight_scale=scales),
                parts=layers,
            )

    def _is_read_in_int8(self, layer: _Layer, value: Any) -> bool:
        scale = self.scales.get(value)
        return scale is not None and all(
            self._takes_int8(reader, layer, value, scale) for reader in value.users
        )

    def _takes_int8(self, reader: Any, layer: _Layer, value: Any, scale: float) -> bool:
        if (adding := self.additions.get(reader)) is not None:
            return adding.added is value and not adding.floating
        found = self.layers.get(reader)
        if found is None or found.table is None or found.given is not value or found.line:
            return False
        return found.flat == layer.flat and found.table.scale == scale

    def _replace(self, layer: _Layer, name: str) -> None:
        with self.program.graph.inserting_before(layer.pool or layer.last):
            if layer.table is not None or layer.floating:
                self._replace_convolution(layer, name)
            else:
                self._replace_half(layer, name)

    def _replace_convolution(self, layer: _Layer, name: str) -> None:
        table, half = layer.table, layer.output_scale is None
        whole = layer.weight.numpy().astype(np.float16) if table is None else table.weight
        outputs = len(whole)
        weight = whole.reshape(*whole.shape, *[1] * (4 - whole.ndim))
        if layer.line:
            weight = weight.transpose(0, 1, 3, 2)
        weight, groups = merge_groups(
            np.ascontiguousarray(weight.transpose(0, 2, 3, 1)), layer.groups
        )
        spare = -outputs % (
            _ALIGNED_HALVES if half and (layer.added is None or layer.floating) else ALIGNED
        )
        padded = groups == 1 and table is not None
        weight = np.pad(
            weight, [(0, spare), (0, 0), (0, 0), (0, -weight.shape[-1] % ALIGNED if padded else 0)]
        )
        scale = (
            np.ones(outputs, np.float32)
            if table is None
            else table.weight_scale * np.float32(table.scale)
        )
        bias = np.asarray(layer.bias, np.float32)
        output_scale = np.float32(layer.output_scale or 1.0)
        ahead = output_scale if layer.activation in steps.BEFORE_SCALING else np.float32(1.0)
        constants = tactics.arrange_convolution(
            weight, np.pad(scale / ahead, (0, spare)), np.pad(bias / ahead, (0, spare))
        )
        stride, padding, dilation = (
            layer.stride or (1,),
            layer.padding or (0,),
            layer.dilation or (1,),
        )
        rows, columns = (0, padding[0]) if layer.line else (padding[0], padding[-1])
        step = steps.Convolution(
            outputs=outputs + spare,
            kernel=weight.shape[1:3],
            depth=weight.shape[3],
            macs=prod(whole.shape),
            stride=stride[0],
            padding=(rows, columns, rows, columns),
            dilation=dilation[0],
            groups=groups,
            activation=layer.activation,
            half=half,
            added=layer.added is not None,
            flat=layer.flat,
            floating=table is None,
        )
        added, added_scale = None, 0.0
        if table is None:
            given = self.replaced.get(layer.given, layer.given)
            if layer.added is not None:
                added, added_scale = self.replaced.get(layer.added, layer.added), 1.0
        else:
            given = self._read_int8(layer.given, table.scale, -1 if layer.flat else 1)
            if layer.added is not None:
                added, added_scale = (
                    self._read_int8(layer.added, self.scales[layer.added], 1),
                    self.scales[layer.added],
                )
        if layer.line:
            given = self.program.graph.call_method("unsqueeze", (given, 2))
        factors = (float(np.float32(added_scale) / ahead), float(np.float32(1.0) / output_scale))
        new = self._call(name, step, given, added, constants, factors)
        self._write(layer, step, new, outputs)

    def _replace_patches(self, layer: _Layer, name: str) -> None:
        weight, bias = (
            each.half().to(next(self.program.parameters()).device)
            for each in (layer.weight, layer.bias)
        )
        kept = [
            add_constant(self.program, f"{name}_{at}", each)
            for at, each in enumerate((weight.flatten(1), bias))
        ]
        new = self.program.graph.call_function(
            _multiply_patches, (_find_input(layer.given), *kept, weight.shape[-1])
        )
        new.meta = dict(layer.last.meta)
        layer.last.replace_all_uses_with(new)
        self.replaced[layer.last] = new

    def _replace_half(self, layer: _Layer, name: str) -> None:
        half = layer.output_scale is None
        weight, bias = layer.weight.numpy().astype(np.float16), layer.bias.numpy()
        outputs, channels, *kernel = weight.shape
        (rows, columns), (height, width) = layer.padding, kernel
        padding = (rows, columns, rows, columns)
        step: steps.Stem | steps.Depthwise
        if _is_stem(layer):
            step = steps.Stem(outputs, channels, (height, width), padding, layer.activation, half)
            given, constants = _find_input(layer.given), tactics.arrange_stem(step, weight, bias)
        else:
            padded = outputs if half else outputs + -outputs % ALIGNED
            step = steps.Depthwise(
                outputs, padded, (height, width), layer.stride[0], padding, layer.activation, half
            )
            given, constants = (
                self.replaced.get(layer.given, layer.given),
                tactics.arrange_depthwise(weight, bias),
            )
        new = self._call(
            name, step, given, None, constants, (0.0, 1.0 / (layer.output_scale or 1.0))
        )
        self._write(layer, step, new, outputs)

    def _call(
        self,
        name: str,
        step: steps.Step,
        given: Any,
        added: Any,
        constants: Iterable[NDArray[Any]],
        factors: tuple[float, float],
    ) -> Any:
        device = next(iter(self.program.parameters())).device
        kept = []
        for index, values in enumerate(constants):
            kept.append(
                add_constant(
                    self.program, f"{name}_{index}", torch.from_numpy(np.array(values)).to(device)
                )
            )
        arguments = (given, added, kept, *factors, steps.text_from_step(step), "")
        return self.program.graph.call_function(register_operator(), arguments)

    def _write(self, layer: _Layer, step: steps.Step, new: Any, outputs: int) -> None:
        graph, last = self.program.graph, layer.pool or layer.last
        if layer.pool is not None:
            new = self._pool(layer.pool, step, new)
        if layer.output_scale is not None:
            axis, scale = -1 if layer.flat else 1, layer.output_scale
            codes = partial(
                quantize_tensor, inverse_scale=1 / scale, axis=axis, spare=step.outputs - outputs
            )
            new.meta |= {
                "val": last.meta["val"],
                "value": last,
                "range": (-128 * scale, 127 * scale),
            }
            new.meta["codes"] = codes, lambda each: each.narrow(axis, 0, outputs).float() * scale
            self.written[last] = new
            return
        if layer.parts:
            lasts, sizes = (
                [each.last for each in layer.parts],
                [len(each.weight) for each in layer.parts],
            )
            new.meta = {
                "val": last.meta["val"].new_empty((*last.meta["val"].shape[:-1], sum(sizes)))
            }
            self.replaced |= zip(lasts, split_outputs(graph, new, lasts, sizes), strict=True)
            return
        if layer.line:
            new = graph.call_method("squeeze", (new, 2))
        if step.outputs > outputs:
            new = graph.call_method("narrow", (new, -1 if layer.flat else 1, 0, outputs))
        if layer.computed_bias is not None:
            new = graph.call_function(add, (new, layer.computed_bias))
        if last.meta["val"].dtype != torch.float16:
            new = graph.call_method("to", (new, last.meta["val"].dtype))
        new.meta = {**last.meta, "value": last}
        last.replace_all_uses_with(new)
        self.replaced[last] = new

    def _pool(self, pool: Any, step: steps.Step, new: Any) -> Any:
        given = read_arguments(pool)
        kernel, stride, padding = (
            _list_sides(given[each]) for each in ("kernel_size", "stride", "padding")
        )
        sides = (padding[0], padding[1]) * 2
        found = steps.MaxPool(step.outputs, (kernel[0], kernel[1]), stride[0], sides, step.half)
        arguments: Any = (new, None, [], 0.0, 1.0, steps.text_from_step(found), "")
        return self.program.graph.call_function(register_operator(), arguments)

    def _read_int8(self, tensor: Any, scale: float, axis: int) -> Any:
        """A tensor in INT8 with padded channels: as a layer wrote it, or quantized once after the node that computes it."""
        key = tensor if tensor in self.written else (tensor, scale, axis)
        if key not in self.written:
            source = self.replaced.get(tensor, tensor)
            spare = -int(_get_shape(tensor)[axis]) % ALIGNED
            with self.program.graph.inserting_after(source):
                made = self.program.graph.call_function(
                    quantize_tensor, (source, 1.0 / scale, axis, spare)
                )
            self.written[key] = made
        return self.written[key]


def _multiply_patches(value: Any, weight: Any, bias: Any, size: int) -> Any:
    """(images, channels, height, width) in patches of `size` pixels a side, in FP16; the output is channels last."""
    import torch  # a tracer follows this function

    rows, columns = value.shape[2] // size, value.shape[3] // size
    patches = (
        value[:, :, : rows * size, : columns * size]
        .unflatten(3, (columns, size))
        .unflatten(2, (rows, size))
    )
    pixels = patches.permute(0, 2, 4, 1, 3, 5).flatten(3)
    return torch.nn.functional.linear(pixels.half(), weight, bias).permute(0, 3, 1, 2)


def quantize_tensor(value: Any, inverse_scale: float, axis: int, spare: int) -> Any:
    """INT8, with `spare` zeros at the end of `axis`."""
    import torch  # a tracer follows this function

    found = (value.float() * inverse_scale).round().clamp(-128, 127).to(torch.int8)
    # as kernels read it: the compiler arranges it while it quantizes
    found = (
        found.contiguous()
        if axis < 0 or value.dim() != 4
        else found.contiguous(memory_format=torch.channels_last)
    )
    behind = -1 - axis if axis < 0 else value.dim() - 1 - axis
    return torch.nn.functional.pad(found, (*(0, 0) * behind, 0, spare)) if spare else found


def _have_same_weights(values: NDArray[Any], layer: QuantizedLayer) -> bool:
    if values.shape != layer.weight.shape:
        return False
    rows, whole, scale = (
        each.reshape(len(values), -1) for each in (values, layer.weight, layer.weight_scale)
    )
    some = (1, len(values))  # the first row rejects most layers
    return all(bool(np.abs(rows[:n] / scale[:n] - whole[:n]).max() < _TOLERANCE) for n in some)


def _find_obstacle(layer: _Layer) -> str | None:
    if layer.flat:
        return None
    if len(set(layer.stride)) > 1 or len(set(layer.dilation)) > 1:
        return "its stride or its dilation differs by axis"
    outputs, depth = layer.weight.shape[:2]
    if layer.groups == 1:
        return None
    merged = choose_merge(layer.groups, outputs, depth)
    if merged is None or (merged < layer.groups and depth * layer.groups % ALIGNED):
        return f"{layer.groups} groups of {depth} input channels fit no kernel"
    return None


def _find_overflow(layer: _Layer) -> str | None:
    """Why kernels with FP16 weights and outputs do not fit: values or weights beyond FP16's range."""
    if WIDENED in layer.node.meta or WIDENED in layer.last.meta:
        return "fp16 cannot hold its values"
    largest = float(layer.weight.abs().max()) if layer.weight.numel() else 0.0
    return None if largest < _LARGEST_HALF else "fp16 cannot hold its weights"


def _is_patches(layer: _Layer) -> bool:
    if len(layer.stride) != 2 or layer.groups > 1 or len(set(layer.stride)) > 1:
        return False
    _, channels, *kernel = layer.weight.shape
    plain = tuple(kernel) == layer.stride and not any(layer.padding) and set(layer.dilation) == {1}
    return (
        bool(plain)
        and channels <= _STEM_CHANNELS
        and _find_input(layer.given) is not None
        and not _is_stem(layer)
    )


def _is_depthwise(layer: _Layer) -> bool:
    """One input and one output for each group."""
    regular = len(layer.stride) == 2 and len(set(layer.stride)) == 1 and set(layer.dilation) == {1}
    return regular and layer.groups > 1 and tuple(layer.weight.shape[:2]) == (layer.groups, 1)


def _is_stem(layer: _Layer) -> bool:
    """Whether it convolves an input of the network that has few channels, with stride 2."""
    if len(layer.stride) != 2 or layer.groups > 1 or _find_input(layer.given) is None:
        return False
    outputs, channels, height, width = layer.weight.shape
    fits = channels <= _STEM_CHANNELS and height == width <= 7 and outputs in _STEM_OUTPUTS
    return (
        fits
        and layer.stride == (2, 2)
        and len(set(layer.padding)) == 1
        and set(layer.dilation) == {1}
    )


def _find_input(node: Any) -> Any:
    """The program's FP32 input if a node is one or casts one; None for any other."""
    aten = torch.ops.aten
    while node.op == "call_function" and node.target in (
        aten._to_copy.default,
        aten.clone.default,
        aten.to.dtype,
    ):
        node = node.args[0]
    given = node.meta.get("val")
    return (
        node
        if node.op == "placeholder" and given is not None and given.dtype == torch.float32
        else None
    )


def _name_activation(node: Any) -> str | None:
    aten = torch.ops.aten
    if node.target is aten.gelu.default:
        return "gelu" if read_arguments(node)["approximate"] == "none" else None
    if node.target in (aten.hardtanh.default, aten.clamp.default):
        given = read_arguments(node)
        bounds = [
            given.get(low, given.get(high))
            for low, high in (("min_val", "min"), ("max_val", "max"))
        ]
        return "relu6" if bounds == [0, 6] else None
    named = {aten.relu6: "relu6", aten.relu: "relu", aten.silu: "silu", aten.hardswish: "hardswish"}
    return named.get(getattr(node.target, "overloadpacket", None))


def _is_plain_pool(node: Any) -> bool:
    if node.target is not torch.ops.aten.max_pool2d.default:
        return False
    given = read_arguments(node)
    even = all(
        len(set(_list_sides(given[each]))) == 1
        for each in ("kernel_size", "stride", "padding", "dilation")
    )
    return (
        even
        and bool(given["stride"])
        and _list_sides(given["dilation"])[0] == 1
        and not given["ceil_mode"]
    )


def _list_sides(values: Any) -> list[int]:
    found = [values] if isinstance(values, int) else list(values)
    return found * 2 if len(found) == 1 else found


def _get_shape(node: Any) -> tuple[Any, ...]:
    """The shape of a node's tensor; symbolic sizes become text, so that equal ones compare equal."""
    return tuple(each if isinstance(each, int) else str(each) for each in node.meta["val"].shape)


def merge_groups(weight: NDArray[Any], groups: int) -> tuple[NDArray[Any], int]:
    """Weights (output channels, rows, columns, input channels of a group) in fewer groups, with zeros, and their number."""
    outputs, *kernel, depth = weight.shape
    merged = 1 if groups == 1 else choose_merge(groups, outputs, depth) or 1
    wide = np.zeros((groups, outputs // groups, *kernel, merged, depth), weight.dtype)
    for group, part in enumerate(weight.reshape(groups, -1, *kernel, depth)):
        wide[group, ..., group % merged, :] = part
    return wide.reshape(outputs, *kernel, merged * depth), groups // merged


def choose_merge(groups: int, outputs: int, depth: int) -> int | None:
    """The number of groups to merge into one, so that its outputs are a multiple of ALIGNED and, if possible, its inputs fill a block.

    `depth` is the number of input channels of a group. None if no number fits.
    """
    fitting = [
        each
        for each in (1, 2, 4, 8)
        if groups % each == 0 and outputs // groups * each % ALIGNED == 0
    ]
    dense = groups if groups * depth <= _MOST_DENSE else None
    return next(
        (each for each in fitting if depth * each >= _LEAST_DEPTH),
        fitting[-1] if fitting else dense,
    )
