"""Rules that find common causes of slow or inaccurate INT8 and FP16 inference in an ONNX graph.

Sources: TensorRT developer guide ("Q/DQ placement recommendations", "Optimizing for Tensor Cores"); ONNX Runtime's notes on
quantization.
"""

from collections.abc import Callable, Iterator
from typing import Any

from optpipe.backends.onnx_graph import WEIGHTED_OPS, OnnxGraph
from optpipe.core.entries import LintFinding

_ACTIVATIONS = ("Relu", "Clip", "BatchNormalization", "LeakyRelu", "Sigmoid", "HardSwish")
_TRANSPARENT = ("MaxPool", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Concat", "Identity")


class QuantizedGraph(OnnxGraph):
    def find_dequantize(self, name: str) -> Any | None:
        node = self.producers.get(name)
        return node if node is not None and node.op_type == "DequantizeLinear" else None

    def int8(self, node: Any) -> bool:
        return node.op_type in WEIGHTED_OPS and all(self.find_dequantize(name) is not None for name in node.input[:2])

    def weight(self, node: Any) -> Any | None:
        if len(node.input) < 2:
            return None
        behind = self.find_dequantize(node.input[1])
        return self.weights.get(behind.input[0] if behind is not None else node.input[1])

    def is_quantized_behind(self, node: Any) -> bool:
        readers = self.consumers.get(node.output[0], [])
        reached = (node.output[0], *(name for each in readers for name in each.output))
        return any(each.op_type == "QuantizeLinear" for name in reached for each in self.consumers.get(name, []))


def lint_graph(model: Any) -> tuple[LintFinding, ...]:
    """The findings of all rules, in the graph's order within each. A graph without Q/DQ is judged as FP16."""
    graph = QuantizedGraph(model)
    return tuple(finding for rule in LINT_RULES for finding in rule(graph))


def _find_padded_channels(graph: QuantizedGraph) -> Iterator[LintFinding]:
    """Tensor Cores process 16 INT8 or 8 FP16 channels at a time; kernels pad other numbers."""
    quantized = any(node.op_type == "QuantizeLinear" for node in graph.model.graph.node)
    for node in graph.model.graph.node:
        weight = graph.weight(node) if node.op_type in WEIGHTED_OPS else None
        if weight is None or len(weight.dims) < 2 or (quantized and not graph.int8(node)):
            continue
        kind, multiple = ("INT8", 16) if quantized else ("FP16", 8)
        sizes = {"input": weight.dims[1], "output": weight.dims[0]}
        odd = [f"{size} {side} channels" for side, size in sizes.items() if size % multiple]
        if odd:
            advice = f"make them a multiple of {multiple}, or keep the layer in a wider type (`keep` in its calibration table)"
            yield LintFinding("channels", node.name, f"{' and '.join(odd)}: {kind} kernels pad to {multiple}", advice)


def _find_split_fusions(graph: QuantizedGraph) -> Iterator[LintFinding]:
    """A Q/DQ pair between a product and a fusible activation makes two kernels and two roundings of one."""
    for node in graph.model.graph.node:
        if node.op_type not in WEIGHTED_OPS:
            continue
        for quantize in graph.consumers.get(node.output[0], []):
            if quantize.op_type != "QuantizeLinear":
                continue
            behind = [
                after
                for dq in graph.consumers.get(quantize.output[0], [])
                for after in graph.consumers.get(dq.output[0], [])
            ]
            if blocked := next((each.op_type for each in behind if each.op_type in _ACTIVATIONS), None):
                message = f"Q/DQ between this layer and {blocked} keeps TensorRT from fusing them"
                yield LintFinding("split-fusion", node.name, message, f"quantize the output of {blocked} instead")


def _find_floating_shortcuts(graph: QuantizedGraph) -> Iterator[LintFinding]:
    """A residual addition after an INT8 convolution whose other operand is not dequantized."""
    for node in graph.model.graph.node:
        if node.op_type != "Add" or any(name in graph.weights for name in node.input):
            continue
        writers = [graph.producers.get(name) for name in node.input]
        fused = [each for each in writers if each is not None and graph.int8(each)]
        others = [name for name, each in zip(node.input, writers, strict=True) if each not in fused]
        open_side = len(fused) == 2 or any(graph.find_dequantize(name) is None for name in others)
        if fused and open_side and graph.is_quantized_behind(node):
            message = "the shortcut is not quantized, so the addition is not fused with the INT8 convolution"
            yield LintFinding(
                "floating-shortcut",
                node.name,
                message,
                "insert Q/DQ on the branch that is not fused with a convolution",
            )


def _find_lonely_pairs(graph: QuantizedGraph) -> Iterator[LintFinding]:
    """A Q/DQ pair that no INT8 kernel reads costs two conversions and a rounding."""
    for node in graph.model.graph.node:
        if node.op_type != "DequantizeLinear" or node.input[0] in graph.weights:
            continue
        readers = graph.consumers.get(node.output[0], [])
        if readers and not any(graph.int8(each) or each.op_type in ("Add", *_TRANSPARENT) for each in readers):
            message = f"read only by {', '.join(sorted({each.op_type for each in readers}))}: the conversion is useless"
            yield LintFinding("lonely-pair", node.name, message, "leave this tensor unquantized")


def _find_reformats(graph: QuantizedGraph) -> Iterator[LintFinding]:
    """A floating-point layer between INT8 layers needs conversions on both sides."""
    for node in graph.model.graph.node:
        if node.op_type not in WEIGHTED_OPS or graph.int8(node) or graph.weight(node) is None:
            continue
        source = graph.producers.get(node.input[0])
        before = source is not None and any(
            graph.int8(each) for each in (source, *(graph.producers.get(n) for n in source.input)) if each is not None
        )
        if before and graph.is_quantized_behind(node):
            message = "floating point between INT8 layers: its tensors are reformatted on both sides"
            yield LintFinding(
                "reformat",
                node.name,
                message,
                "quantize it too, unless the sensitivity analysis kept it in floating point",
            )


def _find_per_tensor_weights(graph: QuantizedGraph) -> Iterator[LintFinding]:
    """One scale for all output channels costs accuracy and saves nothing."""
    for node in graph.model.graph.node:
        if not graph.int8(node):
            continue
        dequantize = graph.find_dequantize(node.input[1])
        scale = graph.weights.get(dequantize.input[1]) if dequantize is not None else None
        weight = graph.weight(node)
        if scale is not None and weight is not None and sum(scale.dims) <= 1 and max(weight.dims[:2]) > 1:
            message = "one scale for all weights"
            yield LintFinding("per-tensor-weights", node.name, message, "use one scale per output channel")


LINT_RULES: tuple[Callable[[QuantizedGraph], Iterator[LintFinding]], ...] = (
    _find_padded_channels,
    _find_split_fusions,
    _find_floating_shortcuts,
    _find_lonely_pairs,
    _find_reformats,
    _find_per_tensor_weights,
)
