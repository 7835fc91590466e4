"""torch itself, eager or replayed from a CUDA graph: the baseline everything else is measured against."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from optpipe.backends.base import (
    BuildRequest,
    BuildResult,
    Device,
    LayerTimes,
    Mark,
    Option,
    describe_options,
    merge_options,
)
from optpipe.backends.torch_backend import TorchBackend, record_tensors
from optpipe.backends.torch_costs import count_program_costs
from optpipe.backends.torch_int8 import backend as torch_int8
from optpipe.backends.torch_program import export_program, layers_from_program, refuse_pickles
from optpipe.core.entries import ArtifactInfo
from optpipe.core.precision import Precision
from optpipe.workspace.environment import get_gpu_name, get_package_version

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

    from optpipe.backends.base import Session

PROGRAM_FILE = "model.pt2"
OPTIONS: dict[Device, dict[str, bool | int | str]] = {"cpu": {"threads": 0}, "cuda": {"cuda_graph": True, "fuse": True}}
"""`fuse`: convolutions, additions and ReLUs in FP16 or BF16 in one cuDNN kernel each; off, the program as it was exported."""
_HELP = {
    "threads": "threads of one operator; 0 leaves the number to torch",
    "cuda_graph": "captures an inference into a CUDA graph",
    "fuse": "convolutions, additions and ReLUs in FP16 or BF16 in one cuDNN kernel each",
}


class TorchEager(TorchBackend):
    """The exported program, called as it is."""

    name = "torch"
    purpose = "PyTorch baseline"

    def describe_options(self, device: Device) -> tuple[Option, ...]:
        """All of them are a session's."""
        return describe_options(OPTIONS[device], _HELP)

    def precisions(self, device: Device) -> frozenset[Precision]:
        """INT8 too on a GPU, with kernels of its own."""
        return TorchBackend.precisions(self, device) | ({Precision.INT8} if device == "cuda" else set())

    def recipe(self, device: Device, options: Mapping[str, Any]) -> dict[str, Any]:
        """torch's version and, on a GPU, what INT8's tactics were measured with: the GPU, Triton and the steps."""
        measured = {"gpu": get_gpu_name(), "triton": get_package_version("triton"), "lowering": torch_int8.LOWERING}
        tuned_with = measured if device == "cuda" else {}
        chosen = merge_options(options, OPTIONS[device], self.name)
        return {"torch": get_package_version("torch"), **tuned_with, "options": chosen}

    def find_run_blocker(self, info: ArtifactInfo) -> str | None:
        """As of all torch programs; in INT8 the steps have to be those that were proven."""
        return torch_int8.find_stale_lowering(info) or TorchBackend.find_run_blocker(self, info)

    def find_unsupported(self, request: BuildRequest) -> tuple[str, ...]:
        """In INT8 the operators that it has no step for."""
        return torch_int8.find_unsupported(request) if request.precision is Precision.INT8 else ()

    def build(self, request: BuildRequest) -> BuildResult:
        """Exports and saves the program; in INT8, lowers the Q/DQ graph and measures its kernels."""
        import torch

        if request.precision is Precision.INT8:
            return torch_int8.build_int8(request, merge_options(request.options, OPTIONS[request.device], self.name))
        program = export_program(request)
        torch.export.save(program, request.directory / PROGRAM_FILE)
        options = merge_options(request.options, OPTIONS[request.device], self.name)
        layers = layers_from_program(program, request.precision)
        return BuildResult(layers, PROGRAM_FILE, options, record_tensors(request))

    def load(self, directory: "Path", info: ArtifactInfo, options: Mapping[str, Any]) -> "Session":
        """Loads the program."""
        from optpipe.backends.torch_session import TorchSession

        chosen = resolve_session_options(info, options)
        if "tactics" in info.details:
            return TorchSession(torch_int8.load_program(directory, info), info, chosen)
        return TorchSession(load_program(directory / PROGRAM_FILE, chosen), info, chosen)

    @contextmanager
    def layer_times(
        self,
        directory: "Path",
        info: ArtifactInfo,
        options: Mapping[str, Any],
        bound: Mapping[str, Any],
        inputs: Mapping[str, "np.ndarray"],  # noqa: ARG002
        mark: Mark,
        scratch: "Path",  # noqa: ARG002
    ) -> Iterator[LayerTimes]:
        """On a GPU: each module, or each step of an INT8 network, inside a range called after it."""
        if info.device != "cuda":
            yield LayerTimes()
        elif "tactics" in info.details:
            yield torch_int8.mark_steps(directory, info, bound, mark)
        else:
            yield _mark_modules(directory / PROGRAM_FILE, resolve_session_options(info, options), bound, mark)


def _mark_modules(path: "Path", options: Mapping[str, Any], inputs: Mapping[str, Any], mark: Mark) -> LayerTimes:
    import torch

    program = load_program(path, options)

    class Marked(torch.fx.Interpreter):
        def run_node(self, n: Any) -> Any:
            with mark(_get_layer_name(n)) if n.op == "call_function" else nullcontext():
                return super().run_node(n)

    def iteration() -> None:
        with torch.inference_mode():
            Marked(program).run(*inputs.values())
        torch.cuda.synchronize()

    iteration()
    return LayerTimes(iteration, program=count_program_costs(program, inputs, _get_layer_name))


def _get_layer_name(node: Any) -> str:
    """The module that a node of an exported program comes from, such as `layer1.0.conv1`; else the node's own name."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    return path.removeprefix("L['self'].") or str(node.name)


def resolve_session_options(info: ArtifactInfo, options: Mapping[str, Any]) -> dict[str, bool | int | str]:
    """What a session of an artifact runs with: `options` over those it was built with over the defaults."""
    return merge_options({**info.options, **options}, OPTIONS[info.device], "torch")


def load_program(path: "Path", options: Mapping[str, Any]) -> Any:
    """The saved program as a GraphModule, fused where `options` ask for it; refuses one with pickles in it."""
    import torch

    from optpipe.backends.torch_fusion import fuse_convolutions

    refuse_pickles(path)
    program = torch.export.load(path).module()
    if options.get("fuse"):
        fuse_convolutions(program)
    return program
