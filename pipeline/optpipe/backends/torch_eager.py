"""torch itself, eager or replayed from a CUDA graph: the baseline everything else is measured against."""

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from optpipe.backends.base import (
    BuildRequest,
    BuildResult,
    Device,
    LayerTimes,
    Mark,
    NodeCost,
    Option,
    ProgramCosts,
)
from optpipe.backends.torch_program import (
    CUDA_GRAPH,
    THREADS,
    TorchBackend,
    TorchSession,
    add_constant,
    export_program,
    fold_normalization,
    layers_from_program,
    read_arguments,
    record_tensors,
    refuse_pickles,
    type_name_from_torch,
)
from optpipe.core.entries import ArtifactInfo
from optpipe.workspace.environment import get_package_version

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

    from optpipe.backends.base import Session

PROGRAM_FILE = "model.pt2"


class TorchEager(TorchBackend):
    name = "torch"
    purpose = "PyTorch baseline"

    def describe_options(self, device: Device) -> tuple[Option, ...]:
        if device == "cpu":
            return (THREADS,)
        fuse = "convolutions, additions and ReLUs in FP16 or BF16 in one cuDNN kernel each"
        return CUDA_GRAPH, Option("fuse", True, fuse)

    def recipe(self, device: Device, options: Mapping[str, Any]) -> dict[str, Any]:
        return {"torch": get_package_version("torch"), "options": self.merge_options(options, device)}

    def build(self, request: BuildRequest) -> BuildResult:
        import torch

        program = export_program(request)
        torch.export.save(program, request.directory / PROGRAM_FILE)
        options = self.merge_options(request.options, request.device)
        layers = layers_from_program(program, request.precision)
        return BuildResult(layers, PROGRAM_FILE, options, record_tensors(request))

    def load(self, directory: "Path", info: ArtifactInfo, options: Mapping[str, Any]) -> "Session":
        chosen = self.merge_options({**info.options, **options}, info.device)
        return TorchSession(load_program(directory / PROGRAM_FILE, chosen), info, chosen)

    @contextmanager
    def layer_times(
        self,
        directory: "Path",
        info: ArtifactInfo,
        options: Mapping[str, Any],
        bound: Mapping[str, Any],
        inputs: Mapping[str, "np.ndarray"],  # noqa: ARG002
        mark: Mark,
        scratch: "Path",  # noqa: ARG002
    ) -> Iterator[LayerTimes]:
        """Marks a range for each module, on a GPU."""
        if info.device != "cuda":
            yield LayerTimes()
        else:
            chosen = self.merge_options({**info.options, **options}, info.device)
            yield _mark_modules(directory / PROGRAM_FILE, chosen, bound, mark)


def _mark_modules(path: "Path", options: Mapping[str, Any], inputs: Mapping[str, Any], mark: Mark) -> LayerTimes:
    import torch

    program = load_program(path, options)

    class Marked(torch.fx.Interpreter):
        def run_node(self, n: Any) -> Any:
            with mark(_get_layer_name(n)) if n.op == "call_function" else nullcontext():
                return super().run_node(n)

    def iteration() -> None:
        with torch.inference_mode():
            Marked(program).run(*inputs.values())
        torch.cuda.synchronize()

    iteration()
    return LayerTimes(iteration, program=count_program_costs(program, inputs, _get_layer_name))


def _get_layer_name(node: Any) -> str:
    """The module that a node of an exported program comes from, such as `layer1.0.conv1`, or the node's own name."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    return path.removeprefix("L['self'].") or str(node.name)


def load_program(path: "Path", options: Mapping[str, Any]) -> Any:
    """The saved program as a GraphModule, fused if the option `fuse` is on. Raises `StageError` if it holds pickles."""
    import torch

    refuse_pickles(path)
    program = torch.export.load(path).module()
    if options.get("fuse"):
        fuse_convolutions(program)
    return program


_OPERATORS = {
    "conv1d": "Conv", "conv2d": "Conv", "conv3d": "Conv", "convolution": "Conv", "cudnn_convolution_relu": "Conv",
    "cudnn_convolution_add_relu": "Conv", "linear": "Gemm", "mm": "MatMul", "bmm": "MatMul", "matmul": "MatMul",
    "batch_norm": "BatchNormalization", "layer_norm": "LayerNormalization", "group_norm": "GroupNormalization",
}  # fmt: skip
"""ONNX's names, which rules expect, of torch operators; others keep torch's name. `torch.export` does not split linear layers."""


def count_program_costs(program: Any, inputs: Mapping[str, Any], name_of: Callable[[Any], str]) -> ProgramCosts:
    """Runs the GraphModule once on `inputs`, node by node.

    Nodes with the same `name_of(node)` become one row with the operator, type, and channels of the largest. Each node moves its
    inputs, weights, and outputs once; a view of an input moves no bytes. Raises what the program raises.
    """
    import torch

    rows: list[NodeCost] = []

    class Counted(torch.fx.Interpreter):
        def run_node(self, n: Any) -> Any:
            given, _ = self.fetch_args_kwargs_from_env(n)
            result = super().run_node(n)
            if n.op == "call_function" and isinstance(result, torch.Tensor):
                rows.append(_count_cost(name_of(n), n.target, given, result))
            return result

    with torch.inference_mode():
        answer = Counted(program).run(*inputs.values())
    weights = {node.target: attrgetter(node.target)(program) for node in program.graph.nodes if node.op == "get_attr"}
    edges = [*inputs.values(), *weights.values(), *_flatten([answer])]
    grouped: dict[str, list[NodeCost]] = {}
    for row in rows:
        grouped.setdefault(row.name, []).append(row)
    nodes = []
    for same in grouped.values():
        largest = max(same, key=lambda row: (row.macs, row.bytes))
        nodes.append(replace(largest, macs=sum(row.macs for row in same), bytes=sum(row.bytes for row in same)))
    return ProgramCosts(tuple(nodes), sum(each.nbytes for each in edges))


def _count_cost(label: str, operation: Any, given: tuple[Any, ...], result: Any) -> NodeCost:
    import torch

    tensors = [each for each in _flatten(given) if isinstance(each, torch.Tensor)]
    floats = [each for each in tensors if each.is_floating_point()]
    name = str(getattr(operation, "overloadpacket", operation)).rpartition(".")[2]
    view = any(each.data_ptr() == result.data_ptr() and each.numel() == result.numel() for each in tensors)
    in_place = bool(getattr(getattr(operation, "_schema", None), "is_mutable", False))
    operator = _OPERATORS.get(name, name)
    channels = None
    if operator in ("Conv", "Gemm"):
        image, weight = given[:2]
        groups = image.shape[1] // weight.shape[1] if weight.dim() > 2 else 1
        channels = (int(weight.shape[1]), int(weight.shape[0]) // groups)
    return NodeCost(
        name=label,
        op=operator,
        type=type_name_from_torch((floats or [result])[0].dtype),
        macs=_count_macs(operator, given, result),
        bytes=0 if view and not in_place else sum(each.nbytes for each in (*tensors, result)),
        channels=channels,
    )


def _flatten(values: Any) -> Iterator[Any]:
    for each in values:
        if isinstance(each, tuple | list):
            yield from _flatten(each)
        else:
            yield each


def _count_macs(operator: str, given: tuple[Any, ...], result: Any) -> int:
    """An output element of a product takes one multiply-add per summed element; attention is two products."""
    match operator:
        case "Conv":
            return int(result.numel() * prod(given[1].shape[1:]))
        case "Gemm" | "MatMul":
            return int(result.numel() * given[0].shape[-1])
        case "scaled_dot_product_attention":
            query, key, value = given[:3]
            return int(prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1]))
    return 0


# Fusion of convolutions with batch normalization, addition, and ReLU into one cuDNN kernel.
#
# Eager torch runs a kernel for each of them, which reads and writes the whole activation: in ResNet-50 that is most of the
# memory traffic. cuDNN computes convolution, bias, addition, and ReLU in one kernel (NVIDIA cuDNN documentation, "Runtime
# Fusion Engines"), which torch offers as `aten::cudnn_convolution_relu` and `aten::cudnn_convolution_add_relu`.


@dataclass(frozen=True, slots=True)
class _Convolution:
    """A convolution with the batch normalization after it folded in: `weight` and `bias` are FP32 tensors."""

    node: Any
    weight: Any
    bias: Any


def fuse_convolutions(program: Any) -> int:
    """Rewrites the GraphModule `program` in place; returns the number of fused convolutions.

    It fuses 2-d convolutions in FP16 or BF16 with one group that a ReLU follows, directly or after an addition. Without a ReLU, a
    folded bias is slower than batch normalization. Weights are scaled in FP32.
    """
    import torch

    aten = torch.ops.aten
    for relu in list(program.graph.nodes):
        if not _calls(relu, aten.relu.default, aten.relu_.default):
            continue
        source = relu.args[0]
        found = _fold_convolution(program, source)
        if found is not None:
            _replace_relu(program, relu, aten.cudnn_convolution_relu.default, found, ())
        elif _calls(source, aten.add.Tensor, aten.add_.Tensor) and len(source.users) == 1 and not source.kwargs:
            _fuse_addition(program, relu, source)
    program.delete_all_unused_submodules()
    program.graph.lint()
    program.recompile()
    return sum("cudnn_convolution" in str(node.target) for node in program.graph.nodes)


def _calls(node: Any, *targets: Any) -> bool:
    return getattr(node, "op", None) == "call_function" and node.target in targets


def _fold_convolution(program: Any, last: Any) -> _Convolution | None:
    import torch

    aten = torch.ops.aten
    normalized = _calls(last, aten.batch_norm.default)
    node = last.args[0] if normalized else last
    if not _calls(node, aten.conv2d.default) or len(last.users) > 1 or len(node.users) > 1:
        return None
    given, weight, bias, _stride, _padding, _dilation, groups = read_arguments(node).values()
    if (
        groups != 1
        or _is_changed_in_place(given)
        or any(each.op != "get_attr" for each in (weight, bias) if each is not None)
    ):
        return None
    kernel = _get_tensor(program, weight)
    if kernel.dtype not in (torch.float16, torch.bfloat16):
        return None
    kernel = kernel.float()
    shift = kernel.new_zeros(kernel.shape[0]) if bias is None else _get_tensor(program, bias).float()
    if normalized:
        parts = (None if each is None else _get_tensor(program, each).float() for each in last.args[1:5])
        kernel, shift = fold_normalization(kernel, shift, parts, last.args[7])
    return _Convolution(node, kernel, shift)


def _is_changed_in_place(value: Any, but_by: Any = None) -> bool:
    """Whether a node overwrites `value`: the fused kernel stands at the place of its ReLU and would read it too late."""
    schemas = ((user, getattr(user.target, "_schema", None)) for user in value.users if user is not but_by)
    return any(schema is not None and schema.is_mutable and user.args[0] is value for user, schema in schemas)


def _get_tensor(program: Any, node: Any) -> Any:
    return operator.attrgetter(node.target)(program).detach()


def _fuse_addition(program: Any, relu: Any, addition: Any) -> None:
    """Fuses one side's convolution with the addition of the other side; if that is a convolution too, its bias is added here."""
    import torch

    aten = torch.ops.aten
    left, right = addition.args
    in_place = addition.target is aten.add_.Tensor
    first, second = (getattr(each, "meta", {}).get("val") for each in (left, right))
    if first is None or second is None or (in_place and len(left.users) > 1):
        return
    if first.dtype != second.dtype or str(first.shape) != str(second.shape):
        return  # cuDNN's sum neither broadcasts nor converts
    found, other = _fold_convolution(program, left), right
    if found is None:
        found, other = _fold_convolution(program, right), left
    if found is None or _is_changed_in_place(other, but_by=addition):
        return
    bare = _fold_convolution(program, other)
    if bare is not None:
        found = replace(found, bias=found.bias + bare.bias)
        other = _call(program, relu, aten.conv2d.default, replace(bare, bias=None))
    _replace_relu(program, relu, aten.cudnn_convolution_add_relu.default, found, (other, 1.0))


def _replace_relu(program: Any, relu: Any, operation: Any, found: _Convolution, added: tuple[Any, ...]) -> None:
    relu.replace_all_uses_with(_call(program, relu, operation, found, added))
    _erase(program, relu)


def _call(program: Any, before: Any, operation: Any, found: _Convolution, added: tuple[Any, ...] = ()) -> Any:
    import torch

    given, old, _bias, *rest = read_arguments(found.node).values()
    dtype = _get_tensor(program, old).dtype
    weight = found.weight.to(dtype=dtype, memory_format=torch.channels_last)
    number = sum(name.startswith("fused_") for name, _ in program.named_buffers(recurse=False))
    with program.graph.inserting_before(before):
        constants = [
            None if value is None else add_constant(program, f"fused_{kind}_{number}", value)
            for kind, value in (
                ("weight", weight),
                ("bias", found.bias if found.bias is None else found.bias.to(dtype)),
            )
        ]
        node = program.graph.call_function(operation, (given, constants[0], *added, constants[1], *rest))
    node.meta = dict(found.node.meta)
    return node


def _erase(program: Any, node: Any) -> None:
    """Removes `node`, and then its inputs that nothing else uses, except placeholders."""
    if node.users or node.op not in ("call_function", "get_attr"):
        return
    inputs = node.all_input_nodes
    program.graph.erase_node(node)
    for each in inputs:
        _erase(program, each)
