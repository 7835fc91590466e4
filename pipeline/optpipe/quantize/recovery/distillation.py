"""Distillation: weights, biases, and ranges of the quantized network, learned from the FP32 network without labels.

The network runs with its Q/DQ pairs where a build has them, and rounding passes gradients on as the identity does (Bengio et al.,
"Estimating or Propagating Gradients Through Stochastic Neurons", 2013). The ends of each activation's range are learned together
with the weights (Esser et al., "Learned Step Size Quantization", 2020; Bhalgat et al., "LSQ+", 2020); a weight's scale follows its
largest value, as in a build. The targets are the FP32 network's outputs and, because calibration data are few, the results of all
quantized layers (Li et al., "BRECQ", 2021). Model Optimizer distills torch modules that it has quantized itself; here the source is
a graph of any architecture.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optpipe.core import torch
from optpipe.core.errors import first_line
from optpipe.quantize.qdq import (
    CPU_FORMS,
    LEVELS,
    SEVEN_BIT_LEVELS,
    UNSIGNED_LEVELS,
    Placement,
)
from optpipe.quantize.ranges import TensorRange
from optpipe.quantize.recovery.layers import EditedGraph, find_output_axis
from optpipe.quantize.recovery.torch_graph import TorchGraph

STEPS = 300
FEWEST_STEPS = 30
LONGEST_S = 600.0
RATE = 2e-3
"""How far a step moves a weight at first, as a share of its tensor's mean magnitude; the rate falls to zero along a cosine."""
RANGE_RATE = 1e-2
"""The same for the logarithm of a range's end."""
HIDDEN_WEIGHT = 1.0
"""Of the mean error of the layers' results, beside those of the outputs."""
WARM_STEPS = 3
SMALLEST = 1e-12

Batch = Mapping[str, NDArray[Any]]


class NotLearnedError(Exception):
    """Why nothing was learned, in words: no time, no memory, or values that are not finite."""


class Distilled(NamedTuple):
    graph: Any
    ranges: Mapping[str, TensorRange]
    layers: int
    steps: int


def distill_graph(
    graph: Any,
    teacher: Any,
    placed: Placement,
    ranges: Mapping[str, TensorRange],
    batches: Sequence[Batch],
    device: str,
) -> Distilled:
    """`graph` with learned weights and biases, and its learned ranges.

    `teacher` is the graph in FP32 with the same tensors; `placed` says where `graph` gets its pairs. The result depends on the
    order of sums, so that another number of threads gives other weights. Raises UnknownOperatorError for an operator without
    gradient, and NotLearnedError if fewer than `FEWEST_STEPS` steps fit into `LONGEST_S` or into memory, or the errors overflow.
    """
    student = _Student(graph, placed, ranges, device)
    run_student, run_teacher = TorchGraph(graph, device), TorchGraph(teacher, device)
    outputs = [output.name for output in graph.graph.output]
    hidden = [name for name in student.results if name not in outputs]

    optimizer = torch.optim.Adam(student.list_groups())
    rates = [group["lr"] for group in optimizer.param_groups]
    order = np.random.default_rng(0)
    started, count, step = time.monotonic(), STEPS, 0
    while step < count:
        if step == WARM_STEPS:
            count = _choose_steps(time.monotonic() - started, step)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * 0.5 * (1 + np.cos(np.pi * step / count))
        feeds = {
            name: torch.from_numpy(np.ascontiguousarray(value)).to(device)
            for name, value in batches[int(order.integers(len(batches)))].items()
        }
        with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
            with torch.no_grad():
                wanted = run_teacher.run(feeds, [*outputs, *hidden])
            results = run_student.run(feeds, [*outputs, *hidden], student.read)
            loss = _measure_errors(results, wanted, outputs)
            if hidden:
                loss = loss + HIDDEN_WEIGHT / len(hidden) * _measure_errors(results, wanted, hidden)
            optimizer.zero_grad()
            _differentiate(loss)
        optimizer.step()
        step += 1
    return Distilled(student.write(), student.read_ranges(), len(placed.layers), count)


def _differentiate(loss: Any) -> None:
    if not bool(torch.isfinite(loss.detach())):
        raise NotLearnedError("the network's errors are not finite")
    try:
        loss.backward()
    except RuntimeError as error:  # among them torch.OutOfMemoryError
        raise NotLearnedError(first_line(error)) from error


def _choose_steps(seconds: float, steps: int) -> int:
    """How many steps fit into the time, from that of the first."""
    step_s = seconds / steps
    fitting = int(LONGEST_S / max(step_s, 1e-9))
    if fitting < FEWEST_STEPS:
        raise NotLearnedError(f"a step takes {step_s:.0f} s here")
    return min(STEPS, fitting)


def _measure_errors(
    actual: Mapping[str, Any], wanted: Mapping[str, Any], names: Sequence[str]
) -> Any:
    """The sum over tensors of the mean over samples of ‖found - wanted‖² / ‖wanted‖²."""
    total = torch.zeros(())
    for name in names:
        target = wanted[name]
        if not target.is_floating_point() or not target.ndim:
            continue
        rows = target.reshape(len(target), -1)
        off = (actual[name].reshape(rows.shape) - rows).square().sum(1)
        total = total.to(off.device) + (off / rows.square().sum(1).clamp(min=SMALLEST)).mean()
    return total


class _Student:
    """What is learned of a graph: the weights and biases of its quantized layers, and the ranges of its activations."""

    def __init__(
        self, graph: Any, placed: Placement, ranges: Mapping[str, TensorRange], device: str
    ) -> None:
        self._edited, self._placed, self._device = EditedGraph(graph), placed, device
        self._ranges = {name: ranges[name] for name in placed.tensors}
        self._unsigned = placed.target in CPU_FORMS
        self._levels = SEVEN_BIT_LEVELS if placed.target == "cpu-7bit" else LEVELS
        self._edges, self._after = {*placed.edges}, {*placed.after}
        nodes = [self._edited.nodes[name] for name in placed.layers]
        self.results = [node.output[0] for node in nodes]
        """The tensors that the quantized layers compute."""

        self._axes, self._weights, self._biases = dict[str, int](), dict[str, Any](), {}
        for node in nodes:
            weight, bias = self._edited.read_weight(node), self._edited.find_bias(node)
            assert weight is not None, node.name
            self._axes[node.name] = find_output_axis(node)
            self._weights[node.name] = self._learn(weight)
            if bias is not None and bias.values is not None:
                self._biases[bias.node.name, bias.position] = self._learn(bias.values)
        bounds = {
            name: _find_bounds(bounds, self._unsigned) for name, bounds in self._ranges.items()
        }
        self._bounds = {name: self._learn(np.array(ends)) for name, ends in bounds.items()}
        self._growth = {name: self._learn(np.zeros(2)) for name in bounds}

    def _learn(self, values: NDArray[Any]) -> Any:
        held = np.array(values, np.float32)
        return torch.from_numpy(held).to(self._device).requires_grad_()

    def list_groups(self) -> list[dict[str, Any]]:
        """What is learned, with its rate at first."""
        values = [*self._weights.values(), *self._biases.values()]
        groups = [
            {
                "params": [parameter],
                "lr": RATE * max(float(parameter.detach().abs().mean()), SMALLEST),
            }
            for parameter in values
        ]
        return [*groups, {"params": [*self._growth.values()], "lr": RANGE_RATE}]

    def read(self, node: Any, position: int, value: Any) -> Any:
        """What the quantized network's `node` reads."""
        if position == 1 and node.name in self._weights:
            return self._round_weight(node.name)
        if (node.name, position) in self._biases:
            return self._biases[node.name, position].reshape(value.shape)
        name = node.input[position]
        if (node.name, position) in self._edges or name in self._after:
            return self._round_activation(name, value)
        return value

    def _round_weight(self, layer: str) -> Any:
        weight, axis = self._weights[layer], self._axes[layer]
        others = [dim for dim in range(weight.ndim) if dim != axis]
        peak = weight.abs().amax(others, keepdim=True)
        scale = self._store(peak.clamp(min=float(np.finfo(np.float32).tiny)) / self._levels)
        return _round(weight / scale).clamp(-self._levels, self._levels) * scale

    def _store(self, scale: Any) -> Any:
        """A scale as `qdq.round_scale` rounds it up: to FP16 for TensorRT. The gradient is that of the identity."""
        if self._unsigned:
            return scale
        values = scale.detach().clamp(2.0**-24, float(np.finfo(np.float16).max))
        half = values.half().float()
        step = torch.exp2(values.log2().floor() - 10).clamp(min=2.0**-24)
        return scale + (torch.where(half < values, half + step, half) - scale).detach()

    def _find_ends(self, tensor: str) -> Any:
        return self._bounds[tensor].detach() * self._growth[tensor].exp()

    def _round_activation(self, tensor: str, value: Any) -> Any:
        low, high = self._find_ends(tensor).unbind()
        if not self._unsigned:
            scale = self._store(high / LEVELS)
            return _round(value / scale).clamp(-LEVELS - 1, LEVELS) * scale
        scale = (high - low) / UNSIGNED_LEVELS
        zero = _round(-low / scale)
        return ((_round(value / scale) + zero).clamp(0, UNSIGNED_LEVELS) - zero) * scale

    def write(self) -> Any:
        for name, weight in self._weights.items():
            self._edited.write(self._edited.nodes[name], 1, weight.detach().cpu().numpy())
        for (name, position), bias in self._biases.items():
            node = self._edited.nodes[name]
            shape = self._edited.read(node.input[position])
            assert shape is not None
            self._edited.write(node, position, bias.detach().cpu().numpy().reshape(shape.shape))
        return self._edited.finish()

    def read_ranges(self) -> dict[str, TensorRange]:
        ranges = {}
        for name, before in self._ranges.items():
            low, high = (float(end) for end in self._find_ends(name).detach().cpu())
            ranges[name] = (
                TensorRange(max(-low, high), low, high)
                if self._unsigned
                else TensorRange(high, before.low, before.high)
            )
        return ranges


def _find_bounds(bounds: TensorRange, unsigned: bool) -> tuple[float, float]:
    """The ends of a range as a build has them."""
    if not unsigned:
        return -bounds.amax, bounds.amax
    return max(min(bounds.low, 0.0), -bounds.amax), min(max(bounds.high, 0.0), bounds.amax)


def _round(x: Any) -> Any:
    """Rounds; the gradient is that of the identity."""
    return x + (x.round() - x).detach()
