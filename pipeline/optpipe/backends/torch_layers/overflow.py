"""Layers whose values FP16 cannot hold, which a program in FP16 computes in FP32.

A node of the program is wide if its output, computed in FP32 on the example inputs, leaves half of FP16's range. A wide node and what
reads it compute in FP32, with the module's FP32 weights; what is not wide becomes FP16 again. So one large layer does not make all
outputs NaN, and the layers between stay as fast as they were.
"""

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

from optpipe.backends.torch_graph import add_constant, copy_where_needed, get_layer_name
from optpipe.core import torch

WIDENED = "widened"
"""In the `meta` of a program: the names of the layers that it computes in FP32; in that of a node: whether it is one."""
MOST = 32752.0
"""Half of the largest number of FP16: other inputs may give larger values than the example's."""


def widen_overflows(
    program: Any, wide: Mapping[str, Any], inputs: Sequence[Any]
) -> tuple[str, ...]:
    """Rewrites a GraphModule in FP16 in place, and returns the names of the layers that are computed in FP32 from now on.

    `wide` are the module's FP32 weights by the program's names for them, `inputs` tensors on the program's device.
    """
    copy_where_needed(program)  # other types have other kernels, whose outputs have other strides
    overflowing = find_overflows(program, wide, inputs)
    if overflowing:
        _Widening(program, wide, overflowing).run()
    names = (get_layer_name(node).removeprefix("model.") for node in overflowing)
    widened = tuple(dict.fromkeys(names))
    program.meta[WIDENED] = widened
    return widened


def explain_overflows(names: Sequence[str]) -> tuple[str, ...]:
    """A remark that names the first of the layers that `widen_overflows` returned."""
    if not names:
        return ()
    if len(names) == 1:
        return (f"{names[0]} is computed in fp32: fp16 cannot hold its values",)
    return (
        f"{len(names)} layers are computed in fp32, since fp16 cannot hold their values: {names[0]}",
    )


def find_overflows(
    program: Any, wide: Mapping[str, Any], inputs: Sequence[Any]
) -> dict[Any, float]:
    """The nodes whose FP16 output would leave FP16's range, with the largest value that they have in FP32.

    Values that are not finite in FP32 either are no overflow of FP16, and are left out.
    """
    largest: dict[Any, Any] = {}

    class Wide(torch.fx.Interpreter):
        """Computes the program in FP32."""

        def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
            value = super().get_attr(target, args, kwargs)
            if _is_half(value):
                held = wide.get(target)
                return value.float() if held is None else held.detach().float().to(value.device)
            return value

        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            if _is_assertion(target):
                return None
            return _make_wide(super().call_function(target, args, _name_wide(kwargs)))

        def run_node(self, n: Any) -> Any:
            output = super().run_node(n)
            if _is_half(n.meta.get("val")) and isinstance(output, torch.Tensor) and output.numel():
                largest[n] = output.abs().amax()
            return output

    with torch.no_grad():
        Wide(program).run(*inputs)
    computed = {node: float(value) for node, value in largest.items() if node.op != "get_attr"}
    return {node: value for node, value in computed.items() if MOST < value < float("inf")}


def _is_assertion(target: Any) -> bool:
    return target is torch.ops.aten._assert_tensor_metadata.default


def _is_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float16


def _make_wide(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(map(_make_wide, value))
    return value.float() if _is_half(value) else value


def _name_wide(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments that ask for FP32 instead of FP16."""
    return {
        key: torch.float32 if value is torch.float16 else value for key, value in kwargs.items()
    }


class _Widening:
    def __init__(
        self, program: Any, weights: Mapping[str, Any], overflowing: Mapping[Any, float]
    ) -> None:
        self.program, self.weights = program, weights
        self.wide = set(overflowing)
        """Nodes whose output is FP32 instead of FP16."""
        self.casts: dict[Any, Any] = {}
        """FP32 copies of FP16 nodes, by node."""

    def run(self) -> None:
        for node in list(self.program.graph.nodes):
            reads_wide = any(given in self.wide for given in node.all_input_nodes)
            if reads_wide and _is_assertion(node.target):  # of the type, which is another one now
                self.program.graph.erase_node(node)
            elif node.op == "call_function" and (node in self.wide or reads_wide):
                self._widen(node)
        self.program.graph.eliminate_dead_code()
        self.program.graph.lint()
        self.program.recompile()

    def _widen(self, node: Any) -> None:
        value = node.meta.get("val")
        with self.program.graph.inserting_before(node):
            for given in node.all_input_nodes:
                if given not in self.wide and _is_half(given.meta.get("val")):
                    node.replace_input_with(given, self._cast_up(given))
        node.kwargs = _name_wide(node.kwargs)
        node.meta |= {"val": _make_wide(value), WIDENED: True}
        if isinstance(value, tuple | list):  # its parts are read by other nodes, which narrow them
            self.wide.add(node)
        elif node not in self.wide and _is_half(value):
            self._cast_down(node, value)

    def _cast_up(self, given: Any) -> Any:
        if given not in self.casts:
            held = self.weights.get(given.target) if given.op == "get_attr" else None
            if held is not None:
                device = attrgetter(given.target)(self.program).device
                weight = held.detach().float().to(device)
                name = f"wide_{len(self.casts)}"
                cast = add_constant(self.program, name, weight)
                cast.meta = {**given.meta, "val": _make_wide(given.meta["val"])}
            else:
                with self.program.graph.inserting_after(given):
                    cast = self._add_cast(given, torch.float32)
            self.casts[given] = cast
        return self.casts[given]

    def _cast_down(self, node: Any, value: Any) -> None:
        with self.program.graph.inserting_after(node):
            cast = self._add_cast(node, torch.float16)
        cast.meta["val"] = value
        node.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)
        self.casts[cast] = node

    def _add_cast(self, node: Any, kind: Any) -> Any:
        cast = self.program.graph.call_function(
            torch.ops.aten._to_copy.default, (node,), {"dtype": kind}
        )
        value = node.meta["val"]
        cast.meta = {**node.meta, "val": value.to(kind)}
        return cast
