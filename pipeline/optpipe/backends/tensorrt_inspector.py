"""What TensorRT's engine inspector says of an engine, kept with the artifact.

The inspector needs a deserialized engine, and deserializing needs the GPU; without one, the parsed network's layers are kept.
Source: NVIDIA TensorRT 11 documentation, "Engine Inspector".
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from optpipe.backends.tensorrt_network import PRODUCT_LAYERS, get_enum_name, get_type_name
from optpipe.core.engine_layers import ENGINE_LAYERS, EngineLayer, EngineLayers
from optpipe.core.records import json_from_record
from optpipe.workspace.environment import list_gpus

INSPECTOR_FILE = "inspector.json"
"""The inspector's own JSON, as the library wrote it."""
FROM_INSPECTOR = "engine inspector"


def keep_layers(trt: Any, logger: Any, plan: Any, network: Any, directory: Path) -> None:
    """Writes the engine's layers, and the inspector's JSON where the engine deserializes, into `directory`."""
    runtime = trt.Runtime(logger) if list_gpus() else None
    engine = runtime.deserialize_cuda_engine(plan) if runtime is not None else None
    if engine is None:
        why = "the engine does not load on this GPU" if list_gpus() else "no NVIDIA GPU to deserialize the engine on"
        found = EngineLayers(f"parsed network; {why}", layers_from_parsed(network))
    else:
        text = engine.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON)
        (directory / INSPECTOR_FILE).write_text(text, encoding="utf-8")
        found = EngineLayers(FROM_INSPECTOR, layers_from_inspector(text))
    (directory / ENGINE_LAYERS).write_bytes(json_from_record(found))


def layers_from_parsed(network: Any) -> tuple[EngineLayer, ...]:
    """The layers of a network before the builder fused them, without constants and what is computed from them alone.

    A product whose input was dequantized takes it as INT8: the builder fuses the two.
    """
    found = []
    constant: set[str] = set()
    dequantized: set[str] = set()
    for layer in (network.get_layer(index) for index in range(network.num_layers)):
        op = get_enum_name(layer.type)
        tensors = [each for each in map(layer.get_input, range(layer.num_inputs)) if each is not None]
        written = [layer.get_output(index) for index in range(layer.num_outputs)]
        if all(each.name in constant for each in tensors):
            constant |= {each.name for each in written}
        else:
            fused = dequantized if op in PRODUCT_LAYERS else set()
            inputs = tuple("int8" if each.name in fused else get_type_name(each.dtype) for each in tensors)
            found.append(EngineLayer(layer.name, op, inputs, tuple(get_type_name(each.dtype) for each in written)))
        if op == "DEQUANTIZE":
            dequantized |= {each.name for each in written}
    return tuple(found)


def layers_from_inspector(text: str) -> tuple[EngineLayer, ...]:
    """Reads the inspector's JSON; where the engine was built without details it holds names alone."""
    found = []
    for layer in json.loads(text)["Layers"]:
        if isinstance(layer, str):
            found.append(EngineLayer(layer, "", (), ()))
            continue
        inputs, outputs = (_read_formats(layer.get(side, ())) for side in ("Inputs", "Outputs"))
        op, tactic = str(layer.get("LayerType", "")), layer.get("TacticName") or None
        found.append(EngineLayer(str(layer.get("Name", "")), op, inputs, outputs, tactic))
    return tuple(found)


def _read_formats(tensors: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    return tuple(str(each.get("Format/Datatype", each.get("Format", "unknown"))) for each in tensors)
