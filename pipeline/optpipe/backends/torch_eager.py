"""torch itself, eager or replayed from a CUDA graph: the baseline everything else is measured against."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optpipe.backends.base import (
    BuildRequest,
    BuildResult,
    Device,
    Marked,
    Option,
    Session,
    SpeedBounds,
)
from optpipe.backends.torch_backend import CUDA_GRAPH, THREADS, TorchBackend, refuse_pickles
from optpipe.backends.torch_marked import MarkedProgram, mark_source, run_as_it_is
from optpipe.backends.torch_products import layers_from_program
from optpipe.backends.torch_program import export_program
from optpipe.backends.torch_session import TorchSession, record_tensors
from optpipe.core import torch
from optpipe.core.entries import ArtifactInfo
from optpipe.workspace.environment import get_package_version

PROGRAM_FILE = "model.pt2"


class TorchEager(TorchBackend):
    name = "torch"
    purpose = "PyTorch baseline"

    def speed_bounds(self, device: Device) -> SpeedBounds:
        return SpeedBounds(compiled_by="inductor" if device == "cuda" else "")

    def describe_options(self, device: Device) -> tuple[Option, ...]:
        return (THREADS,) if device == "cpu" else (CUDA_GRAPH,)

    def recipe(self, device: Device, options: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "torch": get_package_version("torch"),
            "options": self.merge_options(options, device),
        }

    def build(self, request: BuildRequest) -> BuildResult:
        program = export_program(request)
        torch.export.save(program, request.directory / PROGRAM_FILE)
        options = self.merge_options(request.options, request.device)
        layers = layers_from_program(program, request.precision)
        return BuildResult(layers, PROGRAM_FILE, options, record_tensors(request))

    def list_files(self, info: ArtifactInfo) -> tuple[str, ...]:
        return (PROGRAM_FILE,)

    def load(self, directory: Path, info: ArtifactInfo, options: Mapping[str, Any]) -> Session:
        chosen = self.merge_options({**info.options, **options}, info.device)
        refuse_pickles(directory / PROGRAM_FILE)
        return TorchSession(torch.export.load(directory / PROGRAM_FILE).module(), info, chosen)

    def open_marked(self, info: ArtifactInfo, request: BuildRequest, source: Path) -> Marked:
        refuse_pickles(request.directory / PROGRAM_FILE)
        program = (
            torch.export.load(request.directory / PROGRAM_FILE).run_decompositions({}).module()
        )
        module = mark_source(request)
        return module, MarkedProgram(program, request, run_as_it_is, module)
