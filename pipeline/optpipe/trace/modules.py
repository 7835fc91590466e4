"""GPU time by module: each kernel belongs to a path of the network, such as `layer3.0.conv2`.

The path comes from the NVTX ranges that are open when the kernel is launched, inside an iteration: those that optpipe's
marks open around the modules of a PyTorch network (`optpipe.module:layer3.0.conv2`), the layers of TensorRT and of ONNX
graphs (`/layer3/layer3.0/conv2/Conv`), or any other nested ranges of a program, whose names then are the path.

Equal blocks are siblings whose kernels below have the same names in the same places: the 23 blocks of a ResNet-101's
third layer are one group.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

import polars as pl

from optpipe.backends.torch_marks import LAYER_MARK
from optpipe.trace.analysis import Analysis, array_from_column
from optpipe.trace.kernels import find_precision, shorten_name
from optpipe.trace.nsys import LIBRARY_RANGES
from optpipe.trace.read import match_names
from optpipe.trace.tensor_cores import find_innermost

_MOST_ROWS = 2_000
"""A network of more modules keeps those that take longest."""
_OWN = "optpipe."

Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """A module with all that lies below it, over all iterations; `self_ns` is that of its own kernels."""

    path: str
    depth: int
    kernels: int
    time_ns: int
    self_ns: int
    share: float
    matrix_ns: int
    """Matrix work, which may use Tensor Cores."""
    tensor_core_ns: int
    precisions: tuple[str, ...]
    """Element types by the kernels' names, by time."""
    kernel: str
    """The kernel that takes longest."""


@dataclass(frozen=True, slots=True)
class ModuleGroup:
    """Siblings that run the same kernels."""

    paths: tuple[str, ...]
    kernels: int
    """Of one block."""
    time_ns: int
    """Of all blocks together."""
    share: float


@dataclass(frozen=True, slots=True)
class ModuleTree:
    """Modules in the order in which they first run, each before those below it."""

    iterations: int
    kernel_ns: int
    named_ns: int
    """Kernel time inside some module."""
    rows: tuple[ModuleRow, ...]
    groups: tuple[ModuleGroup, ...]


@dataclass(slots=True)
class _Node:
    path: Path
    first: int = 0
    kernels: int = 0
    time_ns: int = 0
    self_ns: int = 0
    matrix_ns: int = 0
    tensor_core_ns: int = 0
    by_precision: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    by_kernel: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    below: dict[str, "_Node"] = field(default_factory=dict)


def make_module_tree(measured: Analysis) -> ModuleTree | None:
    """None if no range inside an iteration, or inside the whole trace, names a module."""
    launches = locate_kernels(measured)
    if launches.is_empty():
        return None
    known = measured.kernels.select("name", "matrix", "tensor_core").with_columns(
        precision=pl.col("name").map_elements(find_precision, return_dtype=pl.String)
    )
    table = (
        launches.group_by("path", "kernel")
        .agg(
            pl.len().alias("count"),
            pl.col("kernel_ns").sum(),
            pl.col("called_ns").min().alias("first"),
        )
        .join(known, left_on="kernel", right_on="name", how="left")
        .sort("first", "path", "kernel")
    )
    root = _Node(())
    for row in table.iter_rows(named=True):
        _add(root, _split(row["path"]), row)
    if not root.below:
        return None
    named_ns = sum(node.time_ns for node in root.below.values())
    kernel_ns = measured.kernel_ns
    nodes = list(_walk(root))
    if len(nodes) > _MOST_ROWS:
        least = sorted((node.time_ns for node in nodes), reverse=True)[_MOST_ROWS]
        nodes = [node for node in nodes if node.time_ns > least]
    return ModuleTree(
        iterations=max(measured.iterations.height, 1),
        kernel_ns=kernel_ns,
        named_ns=named_ns,
        rows=tuple(_make_row(node, kernel_ns) for node in nodes),
        groups=tuple(_find_groups(root, kernel_ns)),
    )


def locate_kernels(measured: Analysis) -> pl.DataFrame:
    """One row per launched kernel: `called_ns`, `kernel_ns`, `kernel`, and the `path` of its module, empty if none is known."""
    projection = measured.projection
    if projection.is_empty():
        return pl.DataFrame()
    family = pl.col("family")
    named = projection.filter(~family.str.contains(LIBRARY_RANGES))
    marked = named.filter(match_names(named, f"^{LAYER_MARK}"))
    if marked.height:
        ranges = marked
    else:
        ranges = named.filter(~family.str.starts_with(_OWN))
        if measured.iterations.height:
            depth = measured.iterations["depth"][0]
            own = measured.iterations["family"][0]
            ranges = ranges.filter((pl.col("depth") > depth) & (family != own))
    ranges = ranges.sort("start_ns", "end_ns", descending=[False, True])
    if ranges.is_empty():
        return pl.DataFrame()
    called = array_from_column(measured.launches, "called_ns")
    thread = array_from_column(measured.launches, "thread")
    index = find_innermost(ranges, called, thread)
    paths = pl.Series("path", _name_paths(ranges, is_marked=bool(marked.height)), dtype=pl.String)
    return measured.launches.select(
        "called_ns", "kernel_ns", kernel=pl.col("name").cast(pl.String)
    ).with_columns(paths.gather(pl.Series(index).replace(-1, None)).fill_null("").alias("path"))


def _name_paths(ranges: pl.DataFrame, *, is_marked: bool) -> list[str]:
    """The path of each range: that of its mark, or the names of the ranges around it and its own."""
    names = ranges["name"].cast(pl.String).to_list()
    if is_marked:
        return [name.removeprefix(LAYER_MARK) for name in names]
    clean = [".".join(path_from_layer(name)) for name in names]
    starts, ends = ranges["start_ns"].to_list(), ranges["end_ns"].to_list()
    threads = ranges["thread"].to_list()
    open_by_thread: dict[int, list[tuple[int, str]]] = defaultdict(list)
    paths = []
    for name, start, end, thread in zip(clean, starts, ends, threads, strict=True):
        around = open_by_thread[thread]
        while around and around[-1][0] <= start:
            around.pop()
        parent = around[-1][1] if around else ""
        path = name if not parent or name.startswith(parent + ".") else f"{parent}.{name}"
        around.append((end, path))
        paths.append(path)
    return paths


@cache
def path_from_layer(name: str) -> Path:
    """The module of a layer's name.

    >>> path_from_layer("/layer3/layer3.0/conv2/Conv")
    ('layer3', '0', 'conv2', 'Conv')
    >>> path_from_layer("node_conv_12")
    ('node_conv_12',)
    """
    first = name.split(" + ")[0].strip()
    if not first.startswith("/"):
        return (re.sub(r"\.(?=\D)|\s+", "_", first) if " " in first else first,) if first else ()
    path: list[str] = []
    for part in first.strip("/").split("/"):
        prefix = ".".join(path)
        rest = part[len(prefix) + 1 :] if prefix and part.startswith(prefix + ".") else part
        path += [part for part in rest.split(".") if part]
    return tuple(path)


def _split(path: str) -> Path:
    return tuple(path.split(".")) if path else ()


def _add(root: _Node, path: Path, row: dict[str, object]) -> None:
    """Counts a kernel's launches in its module and in all above it."""
    count, time_ns = int(row["count"]), int(row["kernel_ns"])  # type: ignore[call-overload]
    node = root
    for depth in range(len(path) + 1):
        if depth:
            name = path[depth - 1]
            if name not in node.below:
                node.below[name] = _Node(path[:depth], int(row["first"]))  # type: ignore[call-overload]
            node = node.below[name]
        node.kernels += count
        node.time_ns += time_ns
        node.matrix_ns += time_ns if row["matrix"] else 0
        node.tensor_core_ns += time_ns if row["tensor_core"] else 0
        node.by_kernel[str(row["kernel"])] += time_ns
        if row["precision"]:
            node.by_precision[str(row["precision"])] += time_ns
    node.self_ns += time_ns


def _walk(node: _Node) -> Iterator[_Node]:
    for child in sorted(node.below.values(), key=lambda child: child.first):
        yield child
        yield from _walk(child)


def _make_row(node: _Node, kernel_ns: int) -> ModuleRow:
    longest = max(node.by_kernel, key=lambda name: (node.by_kernel[name], name))
    types = sorted(node.by_precision, key=lambda name: (-node.by_precision[name], name))
    return ModuleRow(
        path=".".join(node.path),
        depth=len(node.path),
        kernels=node.kernels,
        time_ns=node.time_ns,
        self_ns=node.self_ns,
        share=node.time_ns / kernel_ns if kernel_ns else 0.0,
        matrix_ns=node.matrix_ns,
        tensor_core_ns=node.tensor_core_ns,
        precisions=tuple(types),
        kernel=shorten_name(longest),
    )


def _find_groups(root: _Node, kernel_ns: int) -> Iterator[ModuleGroup]:
    """Groups of at least two siblings that have modules below them, longest first."""
    groups: list[ModuleGroup] = []

    def visit(node: _Node) -> None:
        alike: dict[object, list[_Node]] = defaultdict(list)
        for child in node.below.values():
            visit(child)
            if child.below:
                alike[_sign(child)].append(child)
        for same in alike.values():
            if len(same) > 1:
                time_ns = sum(sibling.time_ns for sibling in same)
                paths = tuple(".".join(sibling.path) for sibling in same)
                share = time_ns / kernel_ns if kernel_ns else 0.0
                groups.append(ModuleGroup(paths, same[0].kernels, time_ns, share))

    visit(root)
    yield from sorted(groups, key=lambda group: (-group.time_ns, group.paths))


def _sign(node: _Node) -> object:
    """Equal for modules that launch the same kernels, as often, and in the same places below."""
    below = tuple((name, _sign(child)) for name, child in node.below.items())
    return node.kernels, frozenset(node.by_kernel), below


def group_paths(paths: Sequence[str]) -> str:
    """`layer3.[0-5]` for consecutive numbers, otherwise the first and the number of others.

    >>> group_paths(["layer3.1", "layer3.2", "layer3.3"])
    'layer3.[1-3]'
    """
    heads, tails = zip(*(path.rpartition(".")[::2] for path in paths), strict=True)
    if len(set(heads)) == 1 and all(tail.isdigit() for tail in tails):
        numbers = sorted(map(int, tails))
        if numbers == list(range(numbers[0], numbers[-1] + 1)):
            prefix = f"{heads[0]}." if heads[0] else ""
            return f"{prefix}[{numbers[0]}-{numbers[-1]}]"
    return f"{paths[0]} and {len(paths) - 1} more"
