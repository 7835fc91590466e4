"""Attention of a lowered program: queries, keys, and values are read from the linear layer's output, without copies.

Attention over few tokens becomes one step: torch's operator, or products and a softmax whose scores have a bias or a mask, as in the
windows of Swin. The step also quantizes its output for a layer in 8 bits. Any other attention stays torch's operator.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from operator import attrgetter, getitem
from typing import Any

from optpipe.backends.torch_graph import add_constant, read_arguments
from optpipe.core import torch
from optpipe.kernels import steps
from optpipe.kernels.operators import register_operator

MOST_TOKENS, MOST_BIASED = 256, 64
"""A step keeps all scores of some queries in registers; with a table of biases, those of all queries of a head."""
FEATURES = (16, 32, 64)


@dataclass(frozen=True, slots=True)
class _Part:
    """Queries, keys, or values (sequences, heads, tokens, features) as a view of a linear layer's output with three axes."""

    root: Any
    first: int
    """First element of the last axis."""
    heads: int
    features: int
    copied: bool

    def add_view(self, graph: Any) -> Any:
        return graph.call_function(_view_part, (self.root, self.first, self.heads, self.features))


def lower_attention(program: Any, quantizers: Mapping[Any, str], *, kernels: bool) -> None:
    """Rewrites the GraphModule in place; without `kernels` it has no steps afterward that it did not have.

    `quantizers` are functions that quantize, with the inverse of a scale as second argument, and the types that they return.
    """
    attention = torch.ops.aten.scaled_dot_product_attention.default
    search = _Search(program, quantizers)
    for number, node in enumerate(list(program.graph.nodes)):
        with program.graph.inserting_before(node):
            if node.target is attention:
                parts = [search.find_part(given) for given in node.args[:3]]
                if kernels and search.replace_attention(node, parts):
                    continue
                for at, part in enumerate(parts):
                    if part is not None and part.copied:
                        node.update_arg(at, part.add_view(program.graph))
            elif kernels and node.target is torch.ops.aten.matmul.default:
                search.replace_windows(node, f"attention_{number}")
    # torch would keep attention, since it may draw numbers
    program.graph.eliminate_dead_code(
        lambda node: node.is_impure() and node.target is not attention
    )
    program.graph.lint()
    program.recompile()


def put_batches_first(program: Any) -> None:
    """Lets the linear layers of `torch.nn.MultiheadAttention`, which puts tokens first, read and write batches first.

    Also removes clones that keep the layout, such as dropout's, which would hide what reads a layer.
    """
    aten, graph = torch.ops.aten, program.graph
    for node in list(graph.nodes):
        if node.target is aten.clone.default and node.kwargs.get("memory_format") is None:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    for node in list(graph.nodes):
        with graph.inserting_before(node):
            if node.target is aten.linear.default and _swaps(node.args[0]):
                new = graph.call_function(node.target, (node.args[0].args[0], *node.args[1:]))
                new.meta = {"val": node.meta["val"].transpose(0, 1)}
                swapped = graph.call_function(aten.transpose.int, (new, 0, 1))
                swapped.meta = {**node.meta, "value": node}
                node.replace_all_uses_with(swapped)
                graph.erase_node(node)
        if node.target is aten.scaled_dot_product_attention.default:
            chain = [node]
            while len(chain) < 6 and chain[-1] is not None:
                chain.append(_find_reader(chain[-1]))
            if chain[-1] is None or not _swaps(chain[-1]) or chain[1].args[1:] != ([2, 0, 1, 3],):
                continue
            flat, layer, apart, last = chain[2:]
            if layer.target is not aten.linear.default or not (
                _is_reshape(flat) and _is_reshape(apart)
            ):
                continue
            with graph.inserting_before(layer):
                heads = graph.call_function(aten.transpose.int, (node, 1, 2))
                heads.meta = {"val": node.meta["val"].transpose(1, 2)}
                joined = graph.call_function(aten.flatten.using_ints, (heads, 2))
                joined.meta = {"val": heads.meta["val"].flatten(2)}
                new = graph.call_function(layer.target, (joined, *layer.args[1:]))
                new.meta = {"val": last.meta["val"]}
            last.replace_all_uses_with(new)
    graph.eliminate_dead_code()


class _Search:
    """Finds attention in a program, and computes what depends on no input."""

    def __init__(self, program: Any, quantizers: Mapping[Any, str]) -> None:
        self.program, self.quantizers = program, quantizers
        self.device = next(
            node.meta["val"].device for node in program.graph.nodes if node.op == "placeholder"
        )
        self.layouts: dict[Any, Any] = {}
        """Layouts of views by the sizes of the viewed tensor and the calls that make the view."""
        self.values: dict[Any, Any] = {}
        self.varying: set[Any] = set()
        for node in program.graph.nodes:
            made = node.target is torch.ops.aten.new_zeros.default and all(
                isinstance(size, int) for size in node.args[1]
            )
            if node.op == "placeholder" or not (
                made or self.varying.isdisjoint(node.all_input_nodes)
            ):
                self.varying.add(node)

    def find_part(self, node: Any, *, transposed: bool = False) -> _Part | None:
        """How `node` shows a tensor with three axes; None for any other view."""
        chain: list[Any] = []
        while _is_view(node):
            chain.insert(0, node)
            node = node.args[0]
        example = node.meta.get("val")
        if not isinstance(example, torch.Tensor) or example.dim() != 3 or not chain:
            return None
        sizes = tuple(map(_get_hint, example.shape))
        calls = tuple(
            (view.target, repr(torch.fx.node.map_arg(view.args[1:], _read_hint))) for view in chain
        )
        if (key := (sizes, calls, transposed)) not in self.layouts:
            shown = whole = torch.arange(prod(sizes), dtype=torch.int32).view(sizes)
            for view in chain:
                shown = view.target(
                    shown, *torch.fx.node.map_arg(view.args[1:], _read_hint), **view.kwargs
                )
            self.layouts[key] = _read_layout(
                whole, shown.transpose(-2, -1) if transposed else shown
            )
        if (layout := self.layouts[key]) is None:
            return None
        copied = any(view.target is torch.ops.aten.clone.default for view in chain)
        first, heads, features = layout
        return _Part(node, first, heads, features, copied)

    def replace_windows(self, product: Any, name: str) -> None:
        """Makes softmax(queries keys^T scale + bias) values one step, if `product` is its second product and fits the kernel."""
        aten = torch.ops.aten
        softmax, values = product.args
        if (
            getattr(softmax, "target", None) is not aten.softmax.int
            or read_arguments(softmax)["dim"] != -1
        ):
            return
        scores, added = self._read_scores(softmax.args[0])
        if scores is None or any(len(node.users) != 1 for node in (softmax, scores)):
            return
        queries, keys = scores.args
        scale = 1.0
        if queries.target is aten.mul.Tensor and isinstance(queries.args[1], float):
            queries, scale = queries.args
        parts = [
            self.find_part(queries),
            self.find_part(keys, transposed=True),
            self.find_part(values),
        ]
        step = self._make_step(parts, scale, biased=True)
        table = None if step is None else _join_biases(added, step)
        if step is not None and table is not None:
            constants = [add_constant(self.program, name, table.to(self.device))]
            self._write(product, parts[0], step, None, constants)

    def replace_attention(self, node: Any, parts: Sequence[_Part | None]) -> bool:
        """Makes torch's attention one step if it fits the kernel."""
        given = read_arguments(node)
        mask, scale = given["attn_mask"], given["scale"]
        scale = node.args[0].meta["val"].shape[-1] ** -0.5 if scale is None else scale
        step = self._make_step(parts, float(scale), added=mask is not None)
        known = mask is None or mask.meta["val"].dtype in (torch.bool, torch.float16)
        if (
            step is None
            or not known
            or given["is_causal"]
            or given["dropout_p"]
            or given["enable_gqa"]
        ):
            return False
        self._write(node, parts[0], step, mask, [])
        return True

    def _make_step(
        self, parts: Sequence[_Part | None], scale: float, **more: bool
    ) -> steps.Attention | None:
        """The step for queries, keys, and values if they are all of one tensor."""
        first = parts[0]
        if first is None or any(part is None or part.root is not first.root for part in parts):
            return None
        whole, wide = first.root.meta["val"], first.heads * first.features
        tokens = whole.shape[1]
        most = MOST_BIASED if "biased" in more else MOST_TOKENS
        fits = isinstance(tokens, int) and tokens <= most and first.features in FEATURES
        same = [part.first for part in parts if part] == [at * wide for at in range(3)]
        if (
            not (fits and same)
            or whole.dtype != torch.float16
            or _get_hint(whole.shape[2]) != 3 * wide
        ):
            return None
        return steps.Attention(wide, first.heads, tokens, scale, **more)

    def _write(
        self, product: Any, part: Any, step: steps.Attention, mask: Any, constants: list[Any]
    ) -> None:
        """Replaces the second product by a step, which also quantizes its output if that is all that reads it."""
        joined = _find_joined(product)
        end = get_only(joined.users) if joined is not None else None
        inverse = 1.0
        if end is not None and end.target in self.quantizers and not any(end.args[3:]):
            step, inverse = (
                replace(step, half=False, e4m3=self.quantizers[end.target] == "e4m3"),
                end.args[1],
            )
            end.replace_all_uses_with(joined)
        arguments = (part.root, mask, constants, 0.0, inverse, steps.text_from_step(step), "")
        new = self.program.graph.call_function(register_operator(), arguments)
        new.meta = {"val": part.root.meta["val"][..., : step.outputs]}
        if joined is not None:
            joined.update_arg(0, new)
        if step.half:
            shown = replace(part, root=new, first=0).add_view(self.program.graph)
            product.replace_all_uses_with(shown)

    def _read_scores(self, node: Any) -> tuple[Any, list[tuple[Any, int]]]:
        """The product before views and additions of constants, or None; and the constants, each with the axes of its sum."""
        aten = torch.ops.aten
        added: list[tuple[Any, int]] = []
        while node.op == "call_function" and node.target is not aten.matmul.default:
            if node.target is aten.add.Tensor and not node.kwargs:
                sides = [operand for operand in node.args if isinstance(operand, torch.fx.Node)]
                values = [self._compute(side) for side in sides]
                constants = [value for value in values if value is not None]
                if len(sides) != 2 or len(constants) != 1:
                    return None, []
                added.append((constants[0], len(node.meta["val"].shape)))
                node = sides[0 if values[0] is None else 1]
            elif node.target is aten.clone.default or _is_reshape(node):
                node = node.args[0]
            else:
                return None, []
        return (node, added) if node.op == "call_function" else (None, [])

    def _compute(self, node: Any) -> Any:
        """The value of `node`, or None if it depends on an input."""
        if node in self.varying:
            return None
        if node not in self.values:
            arguments = torch.fx.node.map_arg((node.args, node.kwargs), self._compute)
            if node.op == "get_attr":
                self.values[node] = attrgetter(node.target)(self.program).detach()
            elif node.target is torch.ops.aten.new_zeros.default:
                self.values[node] = torch.zeros(
                    node.args[1], dtype=node.meta["val"].dtype, device=self.device
                )
            else:
                self.values[node] = node.target(*arguments[0], **arguments[1])
        return self.values[node]


def _view_part(root: Any, first: int, heads: int, features: int) -> Any:
    return root.narrow(2, first, heads * features).unflatten(2, (heads, features)).transpose(1, 2)


def _is_view(node: Any) -> bool:
    aten = torch.ops.aten
    views = (
        aten.view,
        aten.reshape,
        aten._unsafe_view,
        aten.transpose,
        aten.permute,
        aten.select,
        aten.squeeze,
        aten.unsqueeze,
        aten.clone,
        aten.alias,
        aten.unbind,
        aten.split,
        aten.split_with_sizes,
        aten.chunk,
    )
    apart = (
        node.target in (getitem, torch.narrow)
        or getattr(node.target, "overloadpacket", None) in views
    )
    return node.op == "call_function" and apart


def _read_layout(whole: Any, shown: Any) -> tuple[int, int, int] | None:
    """First element, heads, and features of the view that shows the elements `shown` of the indices `whole`."""
    if shown.dim() != 4:
        return None
    first, (_, heads, _, features) = int(shown.flatten()[0]), shown.shape
    if first + heads * features > whole.shape[-1]:
        return None
    view = _view_part(whole, first, heads, features)
    return (
        (first, heads, features) if view.shape == shown.shape and torch.equal(view, shown) else None
    )


def _get_hint(size: Any) -> int:
    return int(size.node.hint) if hasattr(size, "node") else int(size)


def _read_hint(node: Any) -> int:
    return _get_hint(node.meta["val"])


def _find_joined(product: Any) -> Any:
    """The node that joins the heads again, whose input has the order of the step's output, if nothing else reads the product."""
    aten = torch.ops.aten
    node = _find_reader(product)
    orders = ((1, 2), ([0, 2, 1, 3],))
    if (
        node is None
        or node.target not in (aten.transpose.int, aten.permute.default)
        or node.args[1:] not in orders
    ):
        return None
    node = _find_reader(node)
    return node if node is not None and _is_reshape(node) else None


def _find_reader(node: Any) -> Any:
    """The only reader of a node, after copies and reshapes that change nothing; None if there are several."""
    sizes = [*map(_get_hint, getattr(node.meta.get("val"), "shape", ()))]
    reader = get_only(node.users)
    while reader is not None and (
        reader.target is torch.ops.aten.clone.default or _is_reshape(reader)
    ):
        if [*map(_get_hint, reader.meta["val"].shape)] != sizes:
            break
        reader = get_only(reader.users)
    return reader


def _is_reshape(node: Any) -> bool:
    aten = torch.ops.aten
    return node.target in (
        aten.reshape.default,
        aten.view.default,
        aten._unsafe_view.default,
        aten.flatten.using_ints,
    )


def _swaps(node: Any) -> bool:
    """Whether it exchanges the first two of three axes."""
    swaps = node is not None and node.target is torch.ops.aten.transpose.int
    return swaps and node.meta["val"].dim() == 3 and {axis % 3 for axis in node.args[1:]} == {0, 1}


def get_only(nodes: Iterable[Any]) -> Any:
    listed = list(nodes)
    return listed[0] if len(listed) == 1 else None


def _join_biases(added: Sequence[tuple[Any, int]], step: steps.Attention) -> Any:
    """The sum of biases and masks, FP16 (windows, heads, rows, columns), or None if a shape is neither's.

    Rows and columns are padded to a power of two, columns with minus infinity.
    """
    total = torch.zeros(1, step.heads, step.tokens, step.tokens)
    for value, axes in added:
        mask = value.dim() == axes == 5 and value.shape[0] == 1
        if not mask and (axes != 4 or value.shape[:-3] not in ((), (1,))):
            return None
        total = total + (value[0] if mask else value).float().cpu()
    spare = step.padded - step.tokens
    wide = torch.nn.functional.pad(total, (0, spare), value=float("-inf"))
    return torch.nn.functional.pad(wide, (0, 0, 0, spare)).half()
