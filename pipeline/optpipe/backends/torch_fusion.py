"""Convolutions of an exported torch program with all that follows them, in one cuDNN kernel each.

Eager torch runs batch normalization, addition and ReLU as kernels of their own, and each reads and writes the whole
activation: in ResNet-50 that is most of the memory traffic. cuDNN does convolution, bias, addition and ReLU in one kernel
(NVIDIA cuDNN documentation, "Runtime Fusion Engines"), which torch offers as `aten::cudnn_convolution_relu` and
`aten::cudnn_convolution_add_relu`.
"""

import operator
from dataclasses import dataclass, replace
from typing import Any


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
