"""A torch program whose intermediate tensors can be read, set, and saved with a script that runs their part alone."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from math import prod
from pathlib import Path
from typing import Any

from optpipe.backends.base import (
    BuildRequest,
    MarkedNetwork,
    Run,
)
from optpipe.backends.torch_graph import get_layer_name, read_sizes
from optpipe.backends.torch_products import DATA_MOVEMENT
from optpipe.backends.torch_program import export_program
from optpipe.core import torch
from optpipe.core.precision import Precision

REPRODUCER = """# {tensor}: compiled by AOTInductor, and run as it is. Needs torch alone, unless it imports more.

from pathlib import Path

import torch
{needed}
here = Path(__file__).parent
program = torch.export.load(here / "subgraph.pt2")
inputs = torch.load(here / "inputs.pt", weights_only=True)
expected = program.module()(*inputs)[0].double()
package = torch._inductor.aoti_compile_and_package(program, package_path=str(here / "compiled.pt2"))
found = torch._inductor.aoti_load_package(package)(*inputs)[0].double()
noise = (found - expected).square().sum()
print(torch.__version__, f"SNR {{10 * torch.log10(expected.square().sum() / noise):.1f}} dB",
      f"largest difference {{(found - expected).abs().max():.3g}}")
"""


def run_as_it_is(program: Any, _examples: Sequence[Any]) -> Any:
    """Compiles nothing, for a `MarkedProgram`."""
    return program


class MarkedProgram(MarkedNetwork):
    """A `MarkedNetwork` of the GraphModule `program`, made runnable by `compile_program(program, example tensors)`.

    Tensors are named as in `like`, after both sequences of layers are aligned. A node's meta `value` is the node that it replaced,
    and `codes` the functions that write and read the integers of a layer in INT8.
    """

    def __init__(
        self,
        program: Any,
        request: BuildRequest,
        compile_program: Callable[[Any, Sequence[Any]], Callable[..., Any]],
        like: "MarkedProgram | None" = None,
    ) -> None:
        self._program = program
        self._card = request.card
        self._device = request.device
        self._compile = compile_program
        named_nodes = []
        for node in program.graph.nodes:
            origin = node.meta.get("value", node)
            value = node.meta.get("val")
            op = str(getattr(origin.target, "overloadpacket", origin.target)).rpartition(".")[2]
            floats = isinstance(value, torch.Tensor) and value.is_floating_point()
            if node.op.startswith("call") and floats and op not in DATA_MOVEMENT:
                named_nodes.append((node, origin.name, f"{get_layer_name(origin)} {op}"))

        if like is not None:
            names = list(like.layers)
            labels = [label for *_, label in named_nodes]
            aligned = SequenceMatcher(None, list(like.layers.values()), labels, autojunk=False)
            named_nodes = [
                (named_nodes[block.b + at][0], names[block.a + at], labels[block.b + at])
                for block in aligned.get_matching_blocks()
                for at in range(block.size)
            ]

        self._nodes = {name: node for node, name, _ in named_nodes}
        self.layers = {name: label for _, name, label in named_nodes}
        self.sizes = {
            name: prod(read_sizes(node.meta["val"])) for name, node in self._nodes.items()
        }
        self.ranges = {
            name: node.meta["range"] for name, node in self._nodes.items() if "range" in node.meta
        }
        self.outputs = tuple(output.name for output in request.card.outputs)

    def cut(self, tensors: Iterable[str], given: Iterable[str] = ()) -> tuple[tuple[str, ...], Run]:
        tensors = tuple(tensors)
        program, read = self._cut_program(tensors, given)
        call: Callable[..., Any] | None = None

        def run(values: Mapping[str, Any]) -> Mapping[str, Any]:
            """Compiles the part at its first call, whose arguments are the compiler's example."""
            nonlocal call
            with torch.no_grad():
                arguments = self._convert_inputs(read, values)
                if call is None:
                    call = self._compile(program, arguments)
                outputs = zip(tensors, call(*arguments), strict=True)
                return {
                    name: self._convert(name, value, 1).cpu().numpy() for name, value in outputs
                }

        return tuple(name for name in read if name in self._nodes), run

    def save(
        self, tensor: str, given: Iterable[str], values: Mapping[str, Any], folder: Path
    ) -> None:
        program, read = self._cut_program((tensor,), given)
        with torch.no_grad():
            arguments = self._convert_inputs(read, values)
            exported = torch.export.export(program, tuple(arguments))
        folder.mkdir(parents=True, exist_ok=True)
        torch.export.save(exported, folder / "subgraph.pt2")
        torch.save(arguments, folder / "inputs.pt")
        own = "from optpipe.kernels.operators import register_operator\n\nregister_operator()\n"
        needed = own if "optpipe" in str(exported.graph) else ""
        (folder / "reproduce.py").write_text(
            REPRODUCER.format(tensor=tensor, needed=needed), encoding="utf-8"
        )

    def _cut_program(
        self, tensors: tuple[str, ...], given: Iterable[str]
    ) -> tuple[Any, tuple[str, ...]]:
        """The program that computes `tensors`, and the names of its inputs."""
        graph, new = torch.fx.Graph(), dict[Any, Any]()
        ends = dict(zip(self.outputs, graph.graph_copy(self._program.graph, new), strict=True))
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        feeds = dict(zip(inputs, (spec.name for spec in self._card.inputs), strict=True))
        for node in [
            node for node in graph.nodes if node.name.startswith(("_guards_fn", "_assert"))
        ]:
            graph.erase_node(node)
        for number, name in enumerate(given):
            with graph.inserting_after(inputs[-1]):
                held = graph.placeholder(f"given_{number}")
            new[self._nodes[name]].replace_all_uses_with(held)
            feeds[held] = name
        graph.output(
            tuple(new[self._nodes[name]] if name in self._nodes else ends[name] for name in tensors)
        )
        graph.eliminate_dead_code()
        for node in [node for node in feeds if not node.users]:
            graph.erase_node(node)
        read = tuple(feeds[node] for node in graph.nodes if node.op == "placeholder")
        return torch.fx.GraphModule(self._program, graph), read

    def _convert_inputs(self, read: tuple[str, ...], values: Mapping[str, Any]) -> list[Any]:
        return [
            self._convert(name, torch.from_numpy(values[name]).to(self._device), 0) for name in read
        ]

    def _convert(self, name: str, value: Any, at: int) -> Any:
        """An intermediate tensor in its type (`at` 0), or in FP32 again (1)."""
        if name not in self._nodes:
            return value
        meta = self._nodes[name].meta
        return (
            meta["codes"][at](value)
            if "codes" in meta
            else value.float()
            if at
            else value.to(meta["val"].dtype)
        )


def mark_source(request: BuildRequest) -> MarkedProgram:
    """The module in FP32 on the CPU."""
    wanted = replace(request, precision=Precision.FP32, device="cpu")
    program = export_program(wanted).run_decompositions({}).module()
    return MarkedProgram(program, wanted, run_as_it_is)
