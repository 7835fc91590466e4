"""Attention of a lowered program: queries, keys, and values are read from the linear layer's output, without copies.

Attention over few tokens whose scores have a bias or a mask, as in the windows of Swin, becomes one step. Any other attention stays
torch's operator.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from operator import attrgetter, getitem
from typing import Any

from optpipe.backends.torch_layers import steps
from optpipe.backends.torch_layers.operators import register_operator
from optpipe.backends.torch_program import add_constant, read_arguments

MOST_TOKENS = 64
"""A step keeps all scores of a head in registers."""
FEATURES = (16, 32, 64)


@dataclass(frozen=True, slots=True)
class _Part:
    """Queries, keys, or values (sequences, heads, tokens, features) as a view of a linear layer's output with three axes."""

    root: Any
    first: int
    """First element of the last axis."""
    order: tuple[int, int, int, int]
    """Axes of the root with its last one split into heads and features."""
    heads: int
    features: int
    copied: bool

    def add_view(self, graph: Any) -> Any:
        return graph.call_function(_view_part, (self.root, self.first, self.heads, self.features, self.order))


def lower_attention(program: Any, *, windows: bool) -> None:
    """Rewrites the GraphModule in place; without `windows` it has no steps afterward that it did not have."""
    import torch

    aten = torch.ops.aten
    search = _Search(program)
    for number, node in enumerate(list(program.graph.nodes)):
        with program.graph.inserting_before(node):
            if node.target is aten.scaled_dot_product_attention.default:
                parts = [search.find_part(given) for given in node.args[:3]]
                for at, part in enumerate(parts):
                    if part is not None and part.copied:
                        _make_contiguous(part.root)
                        node.update_arg(at, part.add_view(program.graph))
            elif windows and node.target is aten.matmul.default:
                search.replace_windows(node, f"attention_{number}")
    program.graph.eliminate_dead_code()
    program.graph.lint()
    program.recompile()


class _Search:
    """Finds attention in a program, and computes what depends on no input."""

    def __init__(self, program: Any) -> None:
        import torch

        self.program = program
        self.device = next(each.meta["val"].device for each in program.graph.nodes if each.op == "placeholder")
        self.layouts: dict[Any, Any] = {}
        """Layouts of views by the sizes of the viewed tensor and the calls that make the view."""
        self.values: dict[Any, Any] = {}
        self.varying: set[Any] = set()
        for node in program.graph.nodes:
            made = node.target is torch.ops.aten.new_zeros.default and all(
                isinstance(each, int) for each in node.args[1]
            )
            if node.op == "placeholder" or not (made or self.varying.isdisjoint(node.all_input_nodes)):
                self.varying.add(node)

    def find_part(self, node: Any, *, transposed: bool = False) -> _Part | None:
        """How `node` shows a tensor with three axes; None for any other view."""
        import torch

        chain: list[Any] = []
        while node.op == "call_function" and _is_view(node):
            chain.insert(0, node)
            node = node.args[0]
        found = node.meta.get("val")
        if not isinstance(found, torch.Tensor) or found.dim() != 3 or not chain:
            return None
        sizes = tuple(map(_get_hint, found.shape))
        calls = tuple((each.target, repr(torch.fx.node.map_arg(each.args[1:], _read_hint))) for each in chain)
        if (key := (sizes, calls, transposed)) not in self.layouts:
            shown = whole = torch.arange(prod(sizes), dtype=torch.int32).view(sizes)
            for each in chain:
                shown = each.target(shown, *torch.fx.node.map_arg(each.args[1:], _read_hint), **each.kwargs)
            self.layouts[key] = _read_layout(whole, shown.transpose(-2, -1) if transposed else shown)
        if (layout := self.layouts[key]) is None:
            return None
        copied = any(each.target is torch.ops.aten.clone.default for each in chain)
        first, order, heads, features = layout
        return _Part(node, first, order, heads, features, copied)

    def replace_windows(self, product: Any, name: str) -> None:
        """Makes softmax(queries keys^T scale + bias) values one step, if `product` is its second product and fits the kernel."""
        import torch

        aten = torch.ops.aten
        softmax, values = product.args
        if getattr(softmax, "target", None) is not aten.softmax.int or read_arguments(softmax)["dim"] != -1:
            return
        scores, added = self._read_scores(softmax.args[0])
        if scores is None or any(len(each.users) != 1 for each in (softmax, scores)):
            return
        queries, keys = scores.args
        scale = 1.0
        if queries.target is aten.mul.Tensor and isinstance(queries.args[1], float):
            queries, scale = queries.args
        parts = [self.find_part(queries), self.find_part(keys, transposed=True), self.find_part(values)]
        if (first := parts[0]) is None or any(each is None or each.root is not first.root for each in parts):
            return
        wide, tokens = first.heads * first.features, _get_hint(first.root.meta["val"].shape[1])
        fits = tokens <= MOST_TOKENS and first.features in FEATURES and first.root.meta["val"].dtype == torch.float16
        same = [(each.first, each.order) for each in parts if each] == [(at * wide, (0, 2, 1, 3)) for at in range(3)]
        table = _join_biases(added, first.heads, tokens)
        if not (fits and same) or table is None or _get_hint(first.root.meta["val"].shape[2]) != 3 * wide:
            return
        step = steps.Attention(wide, first.heads, tokens, scale)
        constant = add_constant(self.program, name, table.to(self.device))
        arguments = (first.root, None, [constant], 0.0, 1.0, steps.text_from_step(step), "")
        new = self.program.graph.call_function(register_operator(), arguments)
        new.meta = {"val": first.root.meta["val"][..., :wide]}
        shown = _Part(new, 0, (0, 2, 1, 3), first.heads, first.features, False).add_view(self.program.graph)
        for reader in list(_find_joined(product)):
            reader.update_arg(0, new)
        product.replace_all_uses_with(shown)

    def _read_scores(self, node: Any) -> tuple[Any, list[tuple[Any, int]]]:
        """The product before views and additions of constants, or None; and the constants, each with the axes of its sum."""
        import torch

        aten = torch.ops.aten
        added: list[tuple[Any, int]] = []
        while node.op == "call_function" and node.target is not aten.matmul.default:
            if node.target is aten.add.Tensor and not node.kwargs:
                sides = [each for each in node.args if isinstance(each, torch.fx.Node)]
                values = [self._compute(each) for each in sides]
                constants = [each for each in values if each is not None]
                if len(sides) != 2 or len(constants) != 1:
                    return None, []
                added.append((constants[0], len(node.meta["val"].shape)))
                node = sides[0 if values[0] is None else 1]
            elif node.target in (
                aten.view.default,
                aten.reshape.default,
                aten._unsafe_view.default,
                aten.clone.default,
            ):
                node = node.args[0]
            else:
                return None, []
        return (node, added) if node.op == "call_function" else (None, [])

    def _compute(self, node: Any) -> Any:
        """The value of `node`, or None if it depends on an input."""
        import torch

        if node in self.varying:
            return None
        if node not in self.values:
            arguments = torch.fx.node.map_arg((node.args, node.kwargs), self._compute)
            if node.op == "get_attr":
                self.values[node] = attrgetter(node.target)(self.program).detach()
            elif node.target is torch.ops.aten.new_zeros.default:
                self.values[node] = torch.zeros(node.args[1], dtype=node.meta["val"].dtype, device=self.device)
            else:
                self.values[node] = node.target(*arguments[0], **arguments[1])
        return self.values[node]


def _make_contiguous(product: Any) -> None:
    """Otherwise torch computes a linear layer of a permuted input as a product, and adds the bias while it copies the result."""
    import torch

    given = product.args[0]
    if product.target is torch.ops.aten.linear.default and not given.meta["val"].is_contiguous():
        with product.graph.inserting_before(product):
            kept = {"memory_format": torch.contiguous_format}
            copy = product.graph.call_function(torch.ops.aten.clone.default, (given,), kept)
        copy.meta = {"val": given.meta["val"].contiguous()}
        product.update_arg(0, copy)


def _view_part(root: Any, first: int, heads: int, features: int, order: Sequence[int]) -> Any:
    return root.narrow(2, first, heads * features).unflatten(2, (heads, features)).permute(*order)


def _is_view(node: Any) -> bool:
    import torch

    aten = torch.ops.aten
    views = (
        aten.view, aten.reshape, aten._unsafe_view, aten.transpose, aten.permute, aten.select, aten.squeeze, aten.unsqueeze,
        aten.clone, aten.alias, aten.unbind,
    )  # fmt: skip
    return node.target is getitem or getattr(node.target, "overloadpacket", None) in views


def _read_layout(whole: Any, shown: Any) -> tuple[int, tuple[int, int, int, int], int, int] | None:
    """First element, order of axes, heads, and features of the view that shows the elements `shown` of the indices `whole`."""
    import torch

    if shown.dim() != 4:
        return None
    first, (_, heads, _, features) = int(shown.flatten()[0]), shown.shape
    for order in ((0, 2, 1, 3), (1, 2, 0, 3)):
        if first + heads * features <= whole.shape[-1]:
            view = _view_part(whole, first, heads, features, order)
            if view.shape == shown.shape and torch.equal(view, shown):
                return first, order, heads, features
    return None


def _get_hint(size: Any) -> int:
    return int(size.node.hint) if hasattr(size, "node") else int(size)


def _read_hint(node: Any) -> int:
    return _get_hint(node.meta["val"])


def _find_joined(product: Any) -> Iterator[Any]:
    """The node that joins the heads again, whose input has the order of the step's output."""
    import torch

    aten, node = torch.ops.aten, product
    for targets in ((aten.transpose.int, aten.permute.default), (aten.clone.default,), (aten.reshape.default,)):
        readers = list(node.users)
        if len(readers) != 1 or readers[0].target not in targets:
            return
        node = readers[0]
        if node.target in (aten.transpose.int, aten.permute.default) and node.args[1:] not in ((1, 2), ([0, 2, 1, 3],)):
            return
    yield node


def _join_biases(added: Sequence[tuple[Any, int]], heads: int, tokens: int) -> Any:
    """The sum of biases and masks, FP16 (windows, heads, rows, columns), or None if a shape is neither's.

    Rows and columns are padded to a power of two, columns with minus infinity.
    """
    import torch

    total = torch.zeros(1, heads, tokens, tokens)
    for value, axes in added:
        mask = value.dim() == axes == 5 and value.shape[0] == 1
        if not mask and (axes != 4 or value.shape[:-3] not in ((), (1,))):
            return None
        total = total + (value[0] if mask else value).float().cpu()
    spare = max(16, 1 << (tokens - 1).bit_length()) - tokens
    wide = torch.nn.functional.pad(total, (0, spare), value=float("-inf"))
    return torch.nn.functional.pad(wide, (0, 0, 0, spare)).half()
