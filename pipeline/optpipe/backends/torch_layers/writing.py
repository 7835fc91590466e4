"""Puts steps into a program in place of its layers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from operator import add
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optpipe.backends.torch_graph import add_constant, read_arguments, split_outputs
from optpipe.backends.torch_layers.layers import (
    ALIGNED,
    ALIGNED_HALVES,
    Layer,
    find_input,
    get_shape,
    is_stem,
    list_sides,
    merge_groups,
)
from optpipe.core import torch
from optpipe.kernels import steps, tactics
from optpipe.kernels.operators import register_operator


@dataclass
class StepWriter:
    """Replaces the layers of a program, in the program's order."""

    program: Any
    scales: Mapping[Any, float]
    """Scales of tensors that a layer reads in INT8, by node."""
    replaced: dict[Any, Any] = field(default_factory=dict)
    """New nodes of floating-point tensors by the old ones."""
    written: dict[Any, Any] = field(default_factory=dict)
    """Nodes of INT8 tensors with padded channels, by the node of the value."""

    def replace_layer(self, layer: Layer, name: str) -> None:
        with self.program.graph.inserting_before(layer.pool or layer.last):
            if layer.table is not None or layer.floating:
                self._replace_convolution(layer, name)
            else:
                self._replace_half(layer, name)

    def _replace_convolution(self, layer: Layer, name: str) -> None:
        table, half = layer.table, layer.output_scale is None
        whole = layer.weight.numpy().astype(np.float16) if table is None else table.weight
        outputs = len(whole)
        unit = ALIGNED_HALVES if half and (layer.added is None or layer.floating) else ALIGNED
        spare = -outputs % unit
        weight, groups = _arrange_weight(layer, whole, spare)

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

        step = _make_convolution(layer, weight.shape, groups, prod(whole.shape))
        given, added, added_scale = self._read_operands(layer)
        factors = (float(np.float32(added_scale) / ahead), float(np.float32(1.0) / output_scale))
        new = self._call(name, step, given, added, constants, factors)
        self._write(layer, step, new, outputs)

    def _read_operands(self, layer: Layer) -> tuple[Any, Any, float]:
        """The input of a convolution, the tensor that it adds, and the scale of that tensor: 0 if it adds none."""
        added, added_scale = None, 0.0
        if layer.table is None:
            given = self.replaced.get(layer.given, layer.given)
            if layer.added is not None:
                added, added_scale = self.replaced.get(layer.added, layer.added), 1.0
        else:
            given = self._read_int8(layer.given, layer.table.scale, -1 if layer.flat else 1)
            if layer.added is not None:
                added_scale = self.scales[layer.added]
                added = self._read_int8(layer.added, added_scale, 1)
        if layer.line:
            given = self.program.graph.call_method("unsqueeze", (given, 2))
        return given, added, added_scale

    def replace_patches(self, layer: Layer, name: str) -> None:
        weight, bias = (
            tensor.half().to(next(self.program.parameters()).device)
            for tensor in (layer.weight, layer.bias)
        )
        rows = weight.flatten(1)
        rows = torch.nn.functional.pad(rows, (0, -rows.shape[1] % ALIGNED_HALVES))
        kept = [
            add_constant(self.program, f"{name}_{at}", constant)
            for at, constant in enumerate((rows, bias))
        ]
        new = self.program.graph.call_function(
            _multiply_patches, (find_input(layer.given), *kept, weight.shape[-1])
        )
        new.meta = dict(layer.last.meta)
        layer.last.replace_all_uses_with(new)
        self.replaced[layer.last] = new

    def _replace_half(self, layer: Layer, name: str) -> None:
        half = layer.output_scale is None
        weight, bias = layer.weight.numpy().astype(np.float16), layer.bias.numpy()
        outputs, channels, *kernel = weight.shape
        (rows, columns), (height, width) = layer.padding, kernel
        padding = (rows, columns, rows, columns)
        step: steps.Stem | steps.Depthwise
        if is_stem(layer):
            stride = layer.stride[0]
            step = steps.Stem(
                outputs, channels, (height, width), padding, layer.activation, half, stride
            )
            given, constants = find_input(layer.given), tactics.arrange_stem(step, weight, bias)
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

    def _write(self, layer: Layer, step: steps.Step, new: Any, outputs: int) -> None:
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
            new.meta["codes"] = (
                codes,
                lambda stored: stored.narrow(axis, 0, outputs).float() * scale,
            )
            self.written[last] = new
            return
        if layer.parts:
            lasts, sizes = (
                [part.last for part in layer.parts],
                [len(part.weight) for part in layer.parts],
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
            list_sides(given[name]) for name in ("kernel_size", "stride", "padding")
        )
        sides = (padding[0], padding[1]) * 2
        pooling = steps.MaxPool(step.outputs, (kernel[0], kernel[1]), stride[0], sides, step.half)
        arguments: Any = (new, None, [], 0.0, 1.0, steps.text_from_step(pooling), "")
        return self.program.graph.call_function(register_operator(), arguments)

    def _read_int8(self, tensor: Any, scale: float, axis: int) -> Any:
        """A tensor in INT8 with padded channels: as a layer wrote it, or quantized once after the node that computes it."""
        key = tensor if tensor in self.written else (tensor, scale, axis)
        if key not in self.written:
            source = self.replaced.get(tensor, tensor)
            spare = -int(get_shape(tensor)[axis]) % ALIGNED
            with self.program.graph.inserting_after(source):
                made = self.program.graph.call_function(
                    quantize_tensor, (source, 1.0 / scale, axis, spare)
                )
            self.written[key] = made
        return self.written[key]


def _arrange_weight(layer: Layer, whole: NDArray[Any], spare: int) -> tuple[NDArray[Any], int]:
    """The weight of `layer` as (outputs, rows, columns, inputs) in fewer groups, and their number.

    It has `spare` more outputs, and INT8 of a single group as many more inputs as the kernels need.
    """
    weight = whole.reshape(*whole.shape, *[1] * (4 - whole.ndim))
    if layer.line:
        weight = weight.transpose(0, 1, 3, 2)
    channels_last = np.ascontiguousarray(weight.transpose(0, 2, 3, 1))
    weight, groups = merge_groups(channels_last, layer.groups)
    padded = groups == 1 and layer.table is not None
    more = -weight.shape[-1] % ALIGNED if padded else 0
    return np.pad(weight, [(0, spare), (0, 0), (0, 0), (0, more)]), groups


def _make_convolution(
    layer: Layer, shape: Sequence[int], groups: int, macs: int
) -> steps.Convolution:
    """The step of a layer whose weight has `shape`, (outputs, rows, columns, inputs), `macs` of them stored."""
    stride, dilation, padding = layer.stride or (1,), layer.dilation or (1,), layer.padding or (0,)
    rows, columns = (0, padding[0]) if layer.line else (padding[0], padding[-1])
    outputs, height, width, depth = shape
    return steps.Convolution(
        outputs=outputs,
        kernel=(height, width),
        depth=depth,
        macs=macs,
        stride=stride[0],
        padding=(rows, columns, rows, columns),
        dilation=dilation[0],
        groups=groups,
        activation=layer.activation,
        half=layer.output_scale is None,
        added=layer.added is not None,
        flat=layer.flat,
        floating=layer.table is None,
    )


def _multiply_patches(value: Any, weight: Any, bias: Any, size: int) -> Any:
    """(images, channels, height, width) in patches of `size` pixels a side, in FP16; the output is channels last.

    Patches get zeros at their end for weights that have them, so that Tensor Cores read 16 bytes at a time.
    """
    import torch  # a tracer follows this function

    rows, columns = value.shape[2] // size, value.shape[3] // size
    patches = (
        value[:, :, : rows * size, : columns * size]
        .unflatten(3, (columns, size))
        .unflatten(2, (rows, size))
    )
    pixels = patches.permute(0, 2, 4, 1, 3, 5).flatten(3)
    pixels = torch.nn.functional.pad(pixels, (0, weight.shape[1] - value.shape[1] * size**2))
    return torch.nn.functional.linear(pixels.half(), weight, bias).permute(0, 3, 1, 2)


def quantize_tensor(value: Any, inverse_scale: float, axis: int, spare: int) -> Any:
    """INT8, with `spare` zeros at the end of `axis`."""
    import torch  # a tracer follows this function

    codes = (value.float() * inverse_scale).round().clamp(-128, 127).to(torch.int8)
    # as kernels read it: the compiler arranges it while it quantizes
    codes = (
        codes.contiguous()
        if axis < 0 or value.dim() != 4
        else codes.contiguous(memory_format=torch.channels_last)
    )
    behind = -1 - axis if axis < 0 else value.dim() - 1 - axis
    return torch.nn.functional.pad(codes, (*(0, 0) * behind, 0, spare)) if spare else codes
