"""AOTInductor: the exported program compiled ahead of time into a package with a shared library.

Source: PyTorch documentation, "AOTInductor: Ahead-Of-Time Compilation for Torch.Export-ed Models".
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optpipe.backends.base import (
    BuildRequest,
    BuildResult,
    Capability,
    Device,
    Option,
    describe_options,
    merge_options,
)
from optpipe.backends.torch_backend import TorchBackend, name_processor, record_tensors
from optpipe.backends.torch_program import export_program, layers_from_program, set_float32_products
from optpipe.core.entries import ArtifactInfo
from optpipe.core.precision import Precision
from optpipe.errors import StageError, first_line
from optpipe.workspace.environment import get_package_version

if TYPE_CHECKING:
    from pathlib import Path

    from optpipe.backends.base import Session

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
        """Exports, compiles and packages."""
        import torch
        from torch._inductor.exc import InductorError

        options = merge_options(request.options, OPTIONS[request.device], self.name)
        set_float32_products(tf32=request.precision is Precision.TF32)
        program = export_program(request)
        layers = layers_from_program(program, request.precision)
        configs = {"max_autotune": True} if options.get("max_autotune") else {}
        try:
            torch._inductor.aoti_compile_and_package(
                program, package_path=str(request.directory / PACKAGE_FILE), inductor_configs=configs
            )
        except InductorError as error:
            raise StageError(f"AOTInductor could not compile {request.card.name}: {first_line(error)}") from error
        made = {"compiled_for": name_processor(request.device), "compiled_by": get_package_version("torch")}
        return BuildResult(layers, PACKAGE_FILE, options, {**record_tensors(request), **made})

    def load(self, directory: "Path", info: ArtifactInfo, options: Mapping[str, Any]) -> "Session":
        """Loads the package's shared library."""
        from optpipe.backends.torch_session import TorchSession

        merged = merge_options({**info.options, **options}, OPTIONS[info.device], self.name)
        return TorchSession(_load_package(directory / PACKAGE_FILE, info.device), info, merged)


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
