"""Torch-TensorRT: an exported torch program converted to a TensorRT engine, which then runs as any other.

It needs a GPU even to be imported: `torch-tensorrt-rtx` 2.14.0 (with TensorRT-RTX 1.6.1, torch 2.14.1, no driver) asks for the
device's compute capability then, and for the current device. With torch.cuda's queries replaced it converts a program and
TensorRT-RTX builds the engine, but the converter deserializes it at once, which needs the driver: nothing comes out. So this
path is tested by no machine of ours, unlike `tensorrt` (tests/fakes/tensorrt_api/README.md).
Source: Torch-TensorRT documentation, "Exporting a serialized TensorRT engine" (`convert_exported_program_to_serialized_trt_engine`).
"""

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from optpipe.backends.base import (
    Backend,
    BuildRequest,
    BuildResult,
    Capability,
    Device,
    Option,
    Serving,
    describe_options,
    merge_options,
)
from optpipe.backends.tensorrt import ENGINE_FILE, TENSORRT, name_server_release
from optpipe.backends.torch_program import TORCH_PRECISIONS, export_program, layers_from_program
from optpipe.core.entries import ArtifactInfo
from optpipe.core.precision import Precision
from optpipe.workspace.environment import get_gpu_name, get_package_version, list_gpus

if TYPE_CHECKING:
    from pathlib import Path

    from optpipe.backends.base import Session


OPTIONS = {"workspace_bytes": 0}
_HELP = {"workspace_bytes": "scratch memory for the builder's kernels, in bytes; 0 is the library's own limit"}


class TorchTensorRT(Backend):
    """TensorRT reached through torch instead of ONNX."""

    name = "torch-tensorrt"
    purpose = "TensorRT engines directly from PyTorch"
    package = "torch-tensorrt"
    needs_module = True

    def describe_options(self, device: Device) -> tuple[Option, ...]:
        """The converter's, and those of a TensorRT session."""
        return (
            *describe_options(OPTIONS, _HELP, OPTIONS),
            *(e for e in TENSORRT.describe_options(device) if not e.builds),
        )

    def precisions(self, device: Device) -> frozenset[Precision]:  # noqa: ARG002
        """Floating point; INT8 reaches TensorRT through ONNX."""
        return TORCH_PRECISIONS

    def devices(self) -> tuple[Device, ...]:
        return ("cuda",)

    def probe_capability(self, device: Device) -> Capability:
        """Whether the library and a GPU are there: it builds on the GPU that it is for."""
        version = get_package_version("torch-tensorrt")
        if version is None or importlib.util.find_spec("torch_tensorrt") is None:
            install = "`uv sync --no-dev --extra torch-tensorrt` in a checkout; TensorRT comes from NVIDIA's index"
            return Capability(False, False, None, "torch-tensorrt is not installed", install)
        if device == "cpu" or not list_gpus():
            return Capability(False, False, version, "no NVIDIA GPU on this machine")
        return Capability(True, True, version)

    def recipe(self, device: Device, options: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        return {
            "torch_tensorrt": get_package_version("torch-tensorrt"),
            "torch": get_package_version("torch"),
            "gpu": get_gpu_name(),
            "options": merge_options(options, OPTIONS, self.name),
        }

    def find_unsupported(self, request: BuildRequest) -> tuple[str, ...]:
        """The operators without a converter."""
        from torch_tensorrt.dynamo import CONVERTERS

        program = export_program(request).run_decompositions()
        targets = {node.target for node in program.graph.nodes if node.op == "call_function"}
        return tuple(
            sorted(str(target) for target in targets if target not in CONVERTERS and hasattr(target, "overloadpacket"))
        )

    def build(self, request: BuildRequest) -> BuildResult:
        """Converts with explicit types, so that the program's own types are the engine's."""
        import torch_tensorrt

        options = merge_options(request.options, OPTIONS, self.name)
        program = export_program(request)
        inputs = [
            torch_tensorrt.Input(min_shape=e.min, opt_shape=e.opt, max_shape=e.max, name=e.name)
            for e in request.card.inputs
        ]
        plan = torch_tensorrt.dynamo.convert_exported_program_to_serialized_trt_engine(
            program,
            arg_inputs=inputs,
            use_explicit_typing=True,
            disable_tf32=request.precision is not Precision.TF32,
            workspace_size=options["workspace_bytes"],
            require_full_compilation=True,
        )
        (request.directory / ENGINE_FILE).write_bytes(plan)
        layers = layers_from_program(program, request.precision)
        return BuildResult(layers, ENGINE_FILE, details={"gpu": get_gpu_name()})

    def find_run_blocker(self, info: ArtifactInfo) -> str | None:
        return TENSORRT.find_run_blocker(info)

    def load(self, directory: "Path", info: ArtifactInfo, options: Mapping[str, Any]) -> "Session":
        return TENSORRT.load(directory, info, options)

    def serving(self, info: ArtifactInfo, options: Mapping[str, Any], version: str) -> Serving:  # noqa: ARG002
        """By optpipe's own session, which needs the same version."""
        return Serving(name_server_release(self.package, version))
