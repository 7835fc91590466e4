"""torch itself, eager or replayed from a CUDA graph: the baseline everything else is measured against."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from optpipe.backends.base import (
    BuildRequest,
    BuildResult,
    Device,
    LayerTimes,
    Mark,
    Marked,
    NodeCost,
    Option,
    ProgramCosts,
)
from optpipe.backends.torch_program import (
    CUDA_GRAPH,
    THREADS,
    MarkedProgram,
    TorchBackend,
    TorchSession,
    export_program,
    get_layer_name,
    layers_from_program,
    mark_source,
    record_tensors,
    refuse_pickles,
    run_as_it_is,
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
        return (THREADS,) if device == "cpu" else (CUDA_GRAPH,)

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
        return TorchSession(load_program(directory / PROGRAM_FILE), info, chosen)

    def open_marked(self, info: ArtifactInfo, request: BuildRequest, source: "Path") -> Marked:  # noqa: ARG002
        import torch

        refuse_pickles(request.directory / PROGRAM_FILE)
        program = torch.export.load(request.directory / PROGRAM_FILE).run_decompositions({}).module()
        module = mark_source(request)
        return module, MarkedProgram(program, request, run_as_it_is, module)

    @contextmanager
    def layer_times(
        self,
        directory: "Path",
        info: ArtifactInfo,
        options: Mapping[str, Any],  # noqa: ARG002
        inputs: Mapping[str, "np.ndarray"],
        mark: Mark,
        scratch: "Path",  # noqa: ARG002
    ) -> Iterator[LayerTimes]:
        if info.device != "cuda":
            yield LayerTimes()
        else:
            yield _mark_modules(directory / PROGRAM_FILE, inputs, mark)


def _mark_modules(path: "Path", arrays: Mapping[str, "np.ndarray"], mark: Mark) -> LayerTimes:
    import torch

    program, inputs = load_program(path), {name: torch.from_numpy(array).cuda() for name, array in arrays.items()}

    class Marked(torch.fx.Interpreter):
        def run_node(self, n: Any) -> Any:
            with mark(get_layer_name(n)) if n.op == "call_function" else nullcontext():
                return super().run_node(n)

    def iteration() -> None:
        with torch.inference_mode():
            Marked(program).run(*inputs.values())
        torch.cuda.synchronize()

    iteration()
    return LayerTimes(iteration, program=count_program_costs(program, inputs, get_layer_name))


def load_program(path: "Path") -> Any:
    """The saved program as a GraphModule. Raises `StageError` if it holds pickles."""
    import torch

    refuse_pickles(path)
    return torch.export.load(path).module()


_OPERATORS = {
    "conv1d": "Conv", "conv2d": "Conv", "conv3d": "Conv", "convolution": "Conv", "linear": "Gemm", "mm": "MatMul",
    "bmm": "MatMul", "matmul": "MatMul", "batch_norm": "BatchNormalization", "layer_norm": "LayerNormalization",
    "group_norm": "GroupNormalization",
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
    return tuple(nodes), sum(each.nbytes for each in edges)


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
