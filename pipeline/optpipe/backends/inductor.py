"""AOTInductor: the exported program compiled ahead of time into a package with a shared library.

Source: PyTorch documentation, "AOTInductor: Ahead-Of-Time Compilation for Torch.Export-ed Models".
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from optpipe.backends.base import BuildRequest, BuildResult, Capability, Device, Option, describe_options, merge_options
from optpipe.backends.torch_backend import TorchBackend, name_processor, record_tensors
from optpipe.backends.torch_fp8 import ON_CPU, explain_missed, export_fp8_program
from optpipe.backends.torch_int8.backend import draw_inputs
from optpipe.backends.torch_int8.comparison import compare_calls, explain_speeds
from optpipe.backends.torch_program import (
    export_program,
    layers_from_program,
    set_float32_products,
    translate_refusals,
)
from optpipe.core.entries import ArtifactInfo
from optpipe.core.precision import Precision
from optpipe.workspace.environment import get_package_version

if TYPE_CHECKING:
    from pathlib import Path

    from optpipe.backends.base import Session
    from optpipe.backends.torch_int8.comparison import SpeedOverFp16

PACKAGE_FILE = "model.pt2"
OPTIONS: dict[Device, dict[str, bool | int | str]] = {
    "cpu": {"threads": 0},
    "cuda": {"cuda_graph": True, "max_autotune": False},
}
"""`cuda_graph`: 0.41 instead of 0.97 ms for ResNet-50 in FP16 at batch 1 on an H200 with torch 2.11. It needs the package loaded
for a single caller, as below: with torch's pool of runners the capture ended there."""
BUILD_ONLY = ("max_autotune",)
"""Of the options, those that decide what is compiled and mean nothing when it is loaded."""
_HELP = {
    "threads": "threads of one operator; 0 leaves the number to torch",
    "cuda_graph": "captures an inference into a CUDA graph",
    "max_autotune": "times more kernels while it compiles",
}


@dataclass(frozen=True, slots=True)
class Inductor(TorchBackend):
    """torch's own compiler, without Python at run time."""

    name: str = "inductor"
    purpose: str = "ahead-of-time compiled PyTorch"

    def runtime_options(self, device: Device) -> dict[str, bool | int | str]:
        """All but what decides the compiled code."""
        return {key: value for key, value in OPTIONS[device].items() if key not in BUILD_ONLY}

    def describe_options(self, device: Device) -> tuple[Option, ...]:
        """Its compiler's and its session's."""
        return describe_options(OPTIONS[device], _HELP, BUILD_ONLY)

    def precisions(self, device: Device) -> frozenset[Precision]:
        """FP8 too, in linear layers."""
        return TorchBackend.precisions(self, device) | {Precision.FP8}

    def probe_capability(self, device: Device) -> Capability:
        """torch, and for the CPU a C++ compiler."""
        found = TorchBackend.probe_capability(self, device)
        if found.builds and shutil.which("g++") is None and shutil.which("clang++") is None:
            why_not = "AOTInductor needs a C++ compiler; none was found"
            return Capability(False, found.runs, found.version, why_not, "`apt-get install g++`")
        return found

    def recipe(self, device: Device, options: Mapping[str, Any]) -> dict[str, Any]:
        """torch's version and the processor that the code is compiled for."""
        return {
            "torch": get_package_version("torch"),
            "compiled_for": name_processor(device),
            "options": merge_options(options, OPTIONS[device], self.name),
        }

    def build(self, request: BuildRequest) -> BuildResult:
        """Exports, compiles and packages; for FP8 on a GPU says where it is not faster than FP16."""
        options = merge_options(request.options, OPTIONS[request.device], self.name)
        made: dict[str, object] = {
            "compiled_for": name_processor(request.device),
            "compiled_by": get_package_version("torch"),
        }
        set_float32_products(tf32=request.precision is Precision.TF32)
        remarks: tuple[str, ...] = ()
        if request.precision is Precision.FP8:
            program, missed = export_fp8_program(request)
            remarks = explain_missed(missed)
        else:
            program = export_program(request)
        layers = layers_from_program(program, request.precision)
        _compile(program, request, options, PACKAGE_FILE)
        if request.precision is Precision.FP8:
            speeds = _compare_with_fp16(request, options) if request.device == "cuda" else ()
            made["against_fp16"] = {str(each.batch_size): each.to_dict() for each in speeds}
            remarks += tuple(explain_speeds(speeds, Precision.FP8)) if speeds else (ON_CPU,)
        return BuildResult(layers, PACKAGE_FILE, options, {**record_tensors(request), **made}, remarks=remarks)

    def load(self, directory: "Path", info: ArtifactInfo, options: Mapping[str, Any]) -> "Session":
        """Loads the package's shared library."""
        from optpipe.backends.torch_session import TorchSession

        merged = merge_options({**info.options, **options}, OPTIONS[info.device], self.name)
        return TorchSession(_load_package(directory / PACKAGE_FILE, info.device), info, merged)


def _compile(program: Any, request: BuildRequest, options: Mapping[str, Any], file: str) -> None:
    import torch

    configs = {"max_autotune": True} if options.get("max_autotune") else {}
    with translate_refusals(request.card, "AOTInductor could not compile"):
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(request.directory / file), inductor_configs=configs
        )


def _compare_with_fp16(request: BuildRequest, options: Mapping[str, Any]) -> "tuple[SpeedOverFp16, ...]":
    """The package against one in FP16, which is compiled for it and then removed."""
    rival = "fp16.pt2"
    _compile(export_program(replace(request, precision=Precision.FP16)), request, options, rival)
    low, half = (_load_package(request.directory / each, request.device) for each in (PACKAGE_FILE, rival))
    speeds = compare_calls(low, half, draw_inputs(request.card.inputs))
    (request.directory / rival).unlink()
    return speeds


def _load_package(package: "Path", device: Device) -> Any:
    """The package's library as a callable.

    With torch 2.11 on an H200 a fresh process ended with signal 11 while loading, unless CUDA's libraries were loaded by
    name first, which is what ONNX Runtime offers. Before that torch spent 25 s compiling probes of the processor's vector
    instructions, which code for a GPU does not use.
    """
    import torch

    if device == "cpu":
        return torch._inductor.aoti_load_package(str(package), run_single_threaded=True)
    import onnxruntime
    from torch._inductor import config

    onnxruntime.preload_dlls()
    with config.patch({"cpp.vec_isa_ok": True}):
        return torch._inductor.aoti_load_package(str(package), run_single_threaded=True)
