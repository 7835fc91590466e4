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
    describe_options,
    merge_options,
)
from optpipe.backends.torch_program import (
    TorchBackend,
    export_program,
    layers_from_program,
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
OPTIONS: dict[Device, dict[str, bool | int | str]] = {"cpu": {"threads": 0}, "cuda": {"cuda_graph": True, "fuse": True}}
"""`fuse`: convolutions, additions and ReLUs in FP16 or BF16 in one cuDNN kernel each; off, the program as it was exported."""
_HELP = {
    "threads": "threads of one operator; 0 leaves the number to torch",
    "cuda_graph": "captures an inference into a CUDA graph",
    "fuse": "convolutions, additions and ReLUs in FP16 or BF16 in one cuDNN kernel each",
}


class TorchEager(TorchBackend):
    """The exported program, called as it is."""

    name = "torch"
    purpose = "PyTorch baseline"

    def describe_options(self, device: Device) -> tuple[Option, ...]:
        return describe_options(OPTIONS[device], _HELP)

    def recipe(self, device: Device, options: Mapping[str, Any]) -> dict[str, Any]:
        """torch's version."""
        return {"torch": get_package_version("torch"), "options": merge_options(options, OPTIONS[device], self.name)}

    def build(self, request: BuildRequest) -> BuildResult:
        """Exports and saves the program."""
        import torch

        program = export_program(request)
        torch.export.save(program, request.directory / PROGRAM_FILE)
        options = merge_options(request.options, OPTIONS[request.device], self.name)
        layers = layers_from_program(program, request.precision)
        return BuildResult(layers, PROGRAM_FILE, options, record_tensors(request))

    def load(self, directory: "Path", info: ArtifactInfo, options: Mapping[str, Any]) -> "Session":
        from optpipe.backends.torch_session import TorchSession

        chosen = resolve_session_options(info, options)
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
        """On a GPU: each module inside a range called after it."""
        if info.device != "cuda":
            yield LayerTimes()
        else:
            yield _mark_modules(directory / PROGRAM_FILE, resolve_session_options(info, options), bound, mark)


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
    """The module that a node of an exported program comes from, such as `layer1.0.conv1`; else the node's own name."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    return path.removeprefix("L['self'].") or str(node.name)


def resolve_session_options(info: ArtifactInfo, options: Mapping[str, Any]) -> dict[str, bool | int | str]:
    """What a session of an artifact runs with: `options` over those it was built with over the defaults."""
    return merge_options({**info.options, **options}, OPTIONS[info.device], "torch")


def load_program(path: "Path", options: Mapping[str, Any]) -> Any:
    """The saved program as a GraphModule, fused where `options` ask for it; refuses one with pickles in it."""
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
"""Operators that rules know by their names in ONNX; the others keep torch's. `torch.export` leaves linear layers whole."""


def count_program_costs(program: Any, inputs: Mapping[str, Any], name_of: Callable[[Any], str]) -> ProgramCosts:
    """Calls the GraphModule once on `inputs`, node by node.

    `name_of(node)` names a node; nodes of one name are one row, with the operator and type of its largest. Bytes are those of inputs,
    weights and outputs, each moved once; what is only another view of an input moves none. Raises what the program raises.
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
    return ProgramCosts(tuple(_sum_by_name(rows)), sum(each.nbytes for each in edges))


def _count_cost(label: str, operation: Any, given: tuple[Any, ...], result: Any) -> NodeCost:
    import torch

    tensors = [each for each in _flatten(given) if isinstance(each, torch.Tensor)]
    floats = [each for each in tensors if each.is_floating_point()]
    name = str(getattr(operation, "overloadpacket", operation)).rpartition(".")[2]
    view = any(each.data_ptr() == result.data_ptr() and each.numel() == result.numel() for each in tensors)
    in_place = bool(getattr(getattr(operation, "_schema", None), "is_mutable", False))
    operator = _OPERATORS.get(name, name)
    return NodeCost(
        name=label,
        op=operator,
        type=type_name_from_torch((floats or [result])[0].dtype),
        macs=_count_macs(operator, given, result),
        bytes=0 if view and not in_place else sum(each.nbytes for each in (*tensors, result)),
        channels=_count_channels(given[0], given[1]) if operator in ("Conv", "Gemm") else None,
    )


def _flatten(values: Any) -> Iterator[Any]:
    for each in values:
        if isinstance(each, tuple | list):
            yield from _flatten(each)
        else:
            yield each


def _count_macs(operator: str, given: tuple[Any, ...], result: Any) -> int:
    """Each value of a product takes one multiply-add per value that it sums over; attention is two products."""
    match operator:
        case "Conv":
            return int(result.numel() * prod(given[1].shape[1:]))
        case "Gemm" | "MatMul":
            return int(result.numel() * given[0].shape[-1])
        case "scaled_dot_product_attention":
            query, key, value = given[:3]
            return int(prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1]))
    return 0


def _count_channels(given: Any, weight: Any) -> tuple[int, int]:
    groups = given.shape[1] // weight.shape[1] if weight.dim() > 2 else 1
    return int(weight.shape[1]), int(weight.shape[0]) // groups


def _sum_by_name(rows: list[NodeCost]) -> Iterator[NodeCost]:
    """One row per name: sums, and the operator, type and channels of the largest node."""
    grouped: dict[str, list[NodeCost]] = {}
    for row in rows:
        grouped.setdefault(row.name, []).append(row)
    for same in grouped.values():
        largest = max(same, key=lambda row: (row.macs, row.bytes))
        yield replace(largest, macs=sum(row.macs for row in same), bytes=sum(row.bytes for row in same))


# Convolutions of an exported torch program with all that follows them, in one cuDNN kernel each.
#
# Eager torch runs batch normalization, addition and ReLU as kernels of their own, and each reads and writes the whole
# activation: in ResNet-50 that is most of the memory traffic. cuDNN does convolution, bias, addition and ReLU in one kernel
# (NVIDIA cuDNN documentation, "Runtime Fusion Engines"), which torch offers as `aten::cudnn_convolution_relu` and
# `aten::cudnn_convolution_add_relu`.


@dataclass(frozen=True, slots=True)
class _Convolution:
    """A convolution with the batch normalization after it folded in: `weight` and `bias` are FP32 tensors."""

    node: Any
    weight: Any
    bias: Any


def fuse_convolutions(program: Any) -> int:
    """Rewrites the GraphModule `program`; returns how many convolutions are one kernel with their ReLU now.

    Fused are 2-d convolutions in FP16 or BF16 with one group that a ReLU follows, directly or after an addition. The others
    stay as they are: a folded bias without ReLU is slower than batch normalization. Weights are scaled in FP32.
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
    program.delete_all_unused_submodules()  # the weights that nothing reads any more
    program.graph.lint()
    program.recompile()
    return sum("cudnn_convolution" in str(node.target) for node in program.graph.nodes)


def _calls(node: Any, *targets: Any) -> bool:
    return getattr(node, "op", None) == "call_function" and node.target in targets


def _fold_convolution(program: Any, last: Any) -> _Convolution | None:
    """The convolution whose value, normalized or not, is `last` and is used nowhere else."""
    import torch

    aten = torch.ops.aten
    normalized = _calls(last, aten.batch_norm.default)
    node = last.args[0] if normalized else last
    if not _calls(node, aten.conv2d.default) or len(last.users) > 1 or len(node.users) > 1:
        return None
    given, weight, bias, _stride, _padding, _dilation, groups = _list_arguments(node)
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
        kernel, shift = _fold_normalization(program, last, kernel, shift)
    return _Convolution(node, kernel, shift)


def _fold_normalization(program: Any, node: Any, kernel: Any, shift: Any) -> tuple[Any, Any]:
    """Weight and bias of a convolution that gives what it and the batch normalization `node` give."""
    scale, offset, mean, variance = (
        None if each is None else _get_tensor(program, each).float() for each in node.args[1:5]
    )
    factor = (variance + node.args[7]).rsqrt()
    if scale is not None:
        factor = factor * scale
    shift = (shift - mean) * factor
    return kernel * factor[:, None, None, None], shift if offset is None else shift + offset


def _list_arguments(node: Any) -> tuple[Any, ...]:
    """All arguments of `aten::conv2d`: input, weight, bias, stride, padding, dilation, groups."""
    return (*node.args, *(None, [1, 1], [0, 0], [1, 1], 1)[len(node.args) - 2 :])


def _is_changed_in_place(value: Any, but_by: Any = None) -> bool:
    """Whether something overwrites `value`, which the fused kernel, placed where its ReLU was, would read too late."""
    schemas = ((user, getattr(user.target, "_schema", None)) for user in value.users if user is not but_by)
    return any(schema is not None and schema.is_mutable and user.args[0] is value for user, schema in schemas)


def _get_tensor(program: Any, node: Any) -> Any:
    return operator.attrgetter(node.target)(program).detach()


def _fuse_addition(program: Any, relu: Any, addition: Any) -> None:
    """One side's convolution adds the other side; where that is a convolution too, its bias joins the sum."""
    import torch

    aten = torch.ops.aten
    left, right = addition.args
    in_place = addition.target is aten.add_.Tensor
    if not _have_same_type(left, right) or (in_place and len(left.users) > 1):
        return
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


def _have_same_type(left: Any, right: Any) -> bool:
    """Two tensors of one shape and type: cuDNN's sum neither broadcasts nor converts."""
    first, second = (getattr(each, "meta", {}).get("val") for each in (left, right))
    if first is None or second is None:
        return False
    return bool(first.dtype == second.dtype) and str(first.shape) == str(second.shape)


def _replace_relu(program: Any, relu: Any, operation: Any, found: _Convolution, added: tuple[Any, ...]) -> None:
    """`operation` in place of `relu`, and everything that only `relu` used goes."""
    relu.replace_all_uses_with(_call(program, relu, operation, found, added))
    _erase(program, relu)


def _call(program: Any, before: Any, operation: Any, found: _Convolution, added: tuple[Any, ...] = ()) -> Any:
    """A new node: the convolution with constants of its own, in the type of the old ones."""
    import torch

    given, old, _bias, *rest = _list_arguments(found.node)
    dtype = _get_tensor(program, old).dtype
    weight = found.weight.to(dtype=dtype, memory_format=torch.channels_last)
    number = sum(name.startswith("fused_") for name, _ in program.named_buffers(recurse=False))
    with program.graph.inserting_before(before):
        constants = [
            None if value is None else _add_constant(program, f"fused_{kind}_{number}", value)
            for kind, value in (
                ("weight", weight),
                ("bias", found.bias if found.bias is None else found.bias.to(dtype)),
            )
        ]
        node = program.graph.call_function(operation, (given, constants[0], *added, constants[1], *rest))
    node.meta = dict(found.node.meta)
    return node


def _add_constant(program: Any, name: str, value: Any) -> Any:
    program.register_buffer(name, value)
    return program.graph.get_attr(name)


def _erase(program: Any, node: Any) -> None:
    """Takes `node` out, then what nothing uses any more; not what the graph is given."""
    if node.users or node.op not in ("call_function", "get_attr"):
        return
    inputs = node.all_input_nodes
    program.graph.erase_node(node)
    for each in inputs:
        _erase(program, each)
