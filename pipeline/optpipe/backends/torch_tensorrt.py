"""Torch-TensorRT, which makes TensorRT engines from an exported torch program."""

import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optpipe.backends.base import (
    Backend,
    BuildRequest,
    BuildResult,
    Capability,
    Device,
    Marked,
    Option,
    Serving,
    merge_options,
)
from optpipe.backends.tensorrt import ENGINE_FILE, TENSORRT, TensorRT, name_server_release
from optpipe.backends.torch_products import layers_from_program
from optpipe.backends.torch_program import TORCH_PRECISIONS, export_program
from optpipe.core.entries import ArtifactInfo
from optpipe.core.errors import StageError
from optpipe.core.precision import Precision
from optpipe.workspace.environment import get_gpu_name, get_package_version, list_gpus


class TorchTensorRT(TensorRT):
    """Torch-TensorRT converts an exported torch program to a TensorRT engine, which then runs as any other.

    Its import needs a GPU: `torch-tensorrt-rtx` 2.14.0 (with TensorRT-RTX 1.6.1, torch 2.14.1, no driver) queries the device's
    compute capability and the current device. With torch.cuda's queries replaced, it converts a program and TensorRT-RTX builds
    the engine, but the converter deserializes it at once, which needs the driver. No machine of ours tests this class, unlike
    `tensorrt` (tests/fakes/tensorrt_api/README.md). Source: Torch-TensorRT documentation, "Exporting a serialized TensorRT
    engine" (`convert_exported_program_to_serialized_trt_engine`).
    """

    name = "torch-tensorrt"
    purpose = "TensorRT engines directly from PyTorch"
    packages = ("torch-tensorrt", "tensorrt-cu13", "torch")
    needs_module = True

    def describe_options(self, device: Device) -> tuple[Option, ...]:
        workspace, *others = TENSORRT.describe_options(device)
        return (workspace, *(option for option in others if not option.builds))

    def merge_options(
        self, given: Mapping[str, Any], device: Device
    ) -> dict[str, bool | int | str]:
        return Backend.merge_options(self, given, device)

    def precisions(self, device: Device) -> frozenset[Precision]:
        return TORCH_PRECISIONS

    def probe_capability(self, device: Device) -> Capability:
        version = get_package_version("torch-tensorrt")
        if version is None or importlib.util.find_spec("torch_tensorrt") is None:
            install = "`uv sync --no-dev --extra torch-tensorrt` in a checkout; TensorRT comes from NVIDIA's index"
            return Capability(False, False, None, "torch-tensorrt is not installed", install)
        if device == "cpu" or not list_gpus():
            return Capability(False, False, version, "no NVIDIA GPU on this machine")
        return Capability(True, True, version)

    def recipe(self, device: Device, options: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "torch_tensorrt": get_package_version("torch-tensorrt"),
            "torch": get_package_version("torch"),
            "gpu": get_gpu_name(),
            "options": merge_options(options, {"workspace_bytes": 0}, self.name),
        }

    def build(self, request: BuildRequest) -> BuildResult:
        """Converts with explicit types, so that the engine has the program's types."""
        import torch_tensorrt
        from torch_tensorrt.dynamo import CONVERTERS

        program = export_program(request)
        nodes = program.run_decompositions().graph.nodes
        targets = {node.target for node in nodes if hasattr(node.target, "overloadpacket")}
        if unknown := sorted(map(str, targets - CONVERTERS.keys())):
            raise StageError(
                f"{self.name} does not support {request.card.name}: {'; '.join(unknown[:5])}"
            )
        inputs = [
            torch_tensorrt.Input(min_shape=e.min, opt_shape=e.opt, max_shape=e.max, name=e.name)
            for e in request.card.inputs
        ]
        plan = torch_tensorrt.dynamo.convert_exported_program_to_serialized_trt_engine(
            program,
            arg_inputs=inputs,
            use_explicit_typing=True,
            disable_tf32=request.precision is not Precision.TF32,
            workspace_size=merge_options(request.options, {"workspace_bytes": 0}, self.name)[
                "workspace_bytes"
            ],
            require_full_compilation=True,
        )
        (request.directory / ENGINE_FILE).write_bytes(plan)
        layers = layers_from_program(program, request.precision)
        return BuildResult(layers, ENGINE_FILE, details={"gpu": get_gpu_name()})

    def find_run_blocker(self, info: ArtifactInfo) -> str | None:
        return TENSORRT.find_run_blocker(info)

    def open_marked(self, info: ArtifactInfo, request: BuildRequest, source: Path) -> Marked:
        return Backend.open_marked(self, info, request, source)

    def serving(self, info: ArtifactInfo, options: Mapping[str, Any], version: str) -> Serving:
        return Serving(name_server_release(self.package, version))
