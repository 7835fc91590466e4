"""Builds and loads the INT8 artifacts of the torch backend: the Q/DQ graph, and the tactics measured for it on one GPU."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optpipe.backends.base import BuildRequest, BuildResult, LayerTimes, Mark
from optpipe.backends.onnx_graph import infer_graph_types, name_nodes
from optpipe.backends.torch_int8 import LOWERING, steps
from optpipe.backends.torch_int8.lowering import explain_unknown, find_unknown_operators, lower_graph
from optpipe.backends.torch_int8.movements import MOVEMENTS
from optpipe.backends.torch_program import name_processor, record_tensors, translate_refusals
from optpipe.core.card import InputSpec, input_from_dict
from optpipe.core.entries import ArtifactInfo
from optpipe.core.precision import LayerType
from optpipe.workspace.environment import get_package_version

if TYPE_CHECKING:
    from optpipe.backends.torch_int8.program import Program
    from optpipe.backends.torch_int8.tactics import Tactic

GRAPH = "model.onnx"
TACTICS = "tactics.json"
LEAST_CAPABILITY = (9, 0)


def find_unsupported(request: BuildRequest) -> tuple[str, ...]:
    """The operators that no step computes; a GPU older than Hopper, whose TMA copies and matrix instructions the kernels use."""
    import onnx
    import torch

    if torch.cuda.get_device_capability() < LEAST_CAPABILITY:
        return (f"its kernels need a GPU of compute capability {'.'.join(map(str, LEAST_CAPABILITY))} or later",)
    unknown = find_unknown_operators(onnx.load(request.graph))
    return (explain_unknown(unknown),) if unknown else ()


def build_int8(request: BuildRequest, options: Mapping[str, Any]) -> BuildResult:
    """Lowers the graph, measures its steps on the GPU, and keeps both; says where FP16 is as fast."""
    import onnx

    from optpipe.backends.torch_int8.program import Program
    from optpipe.backends.torch_int8.tuning import compare_programs, explain_speeds

    model = onnx.load(request.graph)
    with translate_refusals(request.card, "torch could not run the INT8 program of"):
        network = network_from_graph(model, request.card.inputs)
        drawn = draw_inputs(request.card.inputs)
        measured = _measure_batches(network, drawn)
        speeds = compare_programs(request, Program(network, tactics_from_record(measured)), drawn)
    onnx.save(model, request.directory / GRAPH)
    (request.directory / TACTICS).write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    details = {
        **record_tensors(request),
        "profile": [each.to_dict() for each in request.card.inputs],
        "compiled_for": name_processor("cuda"),
        "compiled_by": get_package_version("torch"),
        "triton": get_package_version("triton"),
        "lowering": LOWERING,
        "tactics": summarize_tactics(measured),
        "against_fp16": {str(each.batch_size): each.to_dict() for each in speeds},
    }
    return BuildResult(list_executed_layers(network), GRAPH, options, details, remarks=tuple(explain_speeds(speeds)))


def network_from_graph(model: Any, inputs: tuple[InputSpec, ...]) -> steps.Network:
    """The steps of a Q/DQ graph, MACs at the profile's `opt` shapes."""
    return lower_graph(model, infer_graph_types(name_nodes(model), inputs))


def draw_inputs(inputs: tuple[InputSpec, ...]) -> dict[int, tuple[Any, ...]]:
    """Seeded tensors on the GPU at each batch size that is measured; ones where they are whole numbers."""
    import torch

    from optpipe.backends.torch_int8.tuning import choose_batch_sizes

    first = inputs[0]
    generator = torch.Generator(device="cuda").manual_seed(0)

    def draw(each: InputSpec, size: int) -> Any:
        shape = (size, *each.opt[1:])
        if each.dtype.startswith("float"):
            return torch.randn(shape, device="cuda", generator=generator)
        return torch.ones(shape, device="cuda", dtype=getattr(torch, each.dtype))

    sizes = choose_batch_sizes(first.min[0], first.opt[0], first.max[0])
    return {size: tuple(draw(each, size) for each in inputs) for size in sizes}


def _measure_batches(network: steps.Network, drawn: Mapping[int, tuple[Any, ...]]) -> dict[str, Any]:
    from optpipe.backends.torch_int8.tuning import compile_tactics, tune_steps

    compile_tactics(network, drawn.values())
    batches = {str(size): [each.to_dict() for each in tune_steps(network, inputs)] for size, inputs in drawn.items()}
    versions = {name: get_package_version(name) for name in ("torch", "triton")}
    return {"gpu": name_processor("cuda"), **versions, "batches": batches}


def summarize_tactics(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Per batch size how many steps each kernel computes, and the sum of the measured times."""
    summary = {}
    for size, chosen in measured["batches"].items():
        kernels: dict[str, int] = {}
        for each in chosen:
            kernels[each["kernel"]] = kernels.get(each["kernel"], 0) + 1
        summary[size] = {"kernels": kernels, "sum_us": round(sum(each["us"] for each in chosen), 1)}
    return summary


def list_executed_layers(network: steps.Network) -> tuple[LayerType, ...]:
    """The types that the steps compute in: the steps are all that runs, so this is the proof of precision."""
    layers = []
    for step in network.steps:
        match step:
            case steps.Convolution() | steps.Linear():
                layers.append(LayerType(step.name, type(step).__name__, "int8", step.macs))
            case steps.Stem():
                layers.append(LayerType(step.name, "Stem", "fp16", step.macs))
            case steps.Depthwise():
                layers.append(LayerType(step.name, "Conv", "fp16", step.macs))
            case steps.MaxPool():
                layers.append(LayerType(step.name, "MaxPool", "int8", 0))
            case steps.MeanPool():
                layers.append(LayerType(step.name, "MeanPool", "fp16", 0))
            case steps.Floating() if step.operator not in MOVEMENTS:
                layers.append(LayerType(step.name, step.operator, "fp16", step.macs))
    return tuple(layers)


def tactics_from_record(measured: Mapping[str, Any]) -> "dict[int, dict[str, Tactic]]":
    """What `tactics.json` chose, by batch size and step."""
    from optpipe.backends.torch_int8.tuning import choice_from_dict

    return {
        int(size): {each["step"]: choice_from_dict(each).tactic for each in rows}
        for size, rows in measured["batches"].items()
    }


def load_program(directory: Path, info: ArtifactInfo) -> "Program":
    """The program of an artifact, with its tactics."""
    import onnx

    from optpipe.backends.torch_int8.program import Program

    inputs = tuple(map(input_from_dict, info.details["profile"]))
    network = network_from_graph(onnx.load(directory / GRAPH), inputs)
    measured = json.loads((directory / TACTICS).read_text(encoding="utf-8"))
    return Program(network, tactics_from_record(measured))


def mark_steps(directory: Path, info: ArtifactInfo, inputs: Mapping[str, Any], mark: Mark) -> LayerTimes:
    """The program run step by step, each in a range called after its layer in the graph."""
    import torch

    from optpipe.backends.torch_int8.program import count_costs

    program, given = load_program(directory, info), tuple(inputs.values())

    def iteration() -> None:
        with torch.inference_mode():
            program.run_marked(given, mark)
        torch.cuda.synchronize()

    iteration()
    return LayerTimes(iteration, program=count_costs(program, given))
