"""OpenVINO on the CPU, as a backend that lives outside optpipe.

The artifact is an OpenVINO model (`model.xml` and `model.bin`) of the ONNX graph that optpipe hands over; OpenVINO compiles it
for the processor when it is loaded. Source of the properties: docs.openvino.ai, "CPU Device" and "Precision Control".
"""

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
    Session,
    SpeedBounds,
)
from optpipe.core.entries import ArtifactInfo
from optpipe.core.precision import Precision, QdqForm
from optpipe.workspace.environment import get_package_version, read_cpu_model

MODEL_FILE, WEIGHTS_FILE = "model.xml", "model.bin"
OPTIONS = (
    Option("threads", 0, "threads of an inference; with 0, OpenVINO chooses their number"),
    Option("pinning", False, "pins each thread to a core"),
)
HALF_TYPES = {Precision.FP16: "FP16", Precision.BF16: "BF16"}
"""Precisions that only some processors compute, by the name of OpenVINO's capability."""


class OpenVino(Backend):
    """FP32 and INT8 on any x86-64 processor; FP16 and BF16 where the processor computes them."""

    name = "openvino"
    purpose = "ONNX inference on Intel and other x86-64 CPUs"
    packages = ("openvino",)
    loading_runs_code = False

    def devices(self) -> tuple[Device, ...]:
        return ("cpu",)

    def probe_capability(self, device: Device) -> Capability:
        version = get_package_version("openvino")
        if version is None:
            return Capability(
                builds=False,
                runs=False,
                why_not="openvino is not installed",
                install="`pip install openvino`",
            )
        return Capability(builds=True, runs=True, version=version)

    def precisions(self, device: Device) -> frozenset[Precision]:
        """What the processor computes; OpenVINO would run other types in FP32 without a word."""
        from optpipe_openvino.runtime import list_capabilities

        able = list_capabilities()
        half = {precision for precision, name in HALF_TYPES.items() if name in able}
        return frozenset({Precision.FP32, Precision.INT8, *half})

    def describe_options(self, device: Device) -> tuple[Option, ...]:
        return OPTIONS

    def speed_bounds(self, device: Device) -> SpeedBounds:
        return SpeedBounds(fuses=True)

    def qdq_form(self, precision: Precision, device: Device) -> QdqForm:
        """Seven bits for weights on processors without VNNI, where oneDNN's INT8 kernels saturate at 16 bits.

        `digits` on AVX2: 12.9 dB with eight bits, 35.9 dB with seven.
        """
        from optpipe_openvino.runtime import has_vnni

        return "cpu" if has_vnni() else "cpu-7bit"

    def recipe(self, device: Device, options: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "version": get_package_version("openvino"),
            "cpu": read_cpu_model(),
            "options": self.merge_options(options, device),
        }

    def build(self, request: BuildRequest) -> BuildResult:
        from optpipe_openvino.runtime import convert_graph, read_layers

        options = self.merge_options(request.options, request.device)
        convert_graph(request.graph, request.directory / MODEL_FILE)
        layers = read_layers(request, request.directory / MODEL_FILE, options)
        return BuildResult(
            layers,
            MODEL_FILE,
            options,
            details={"precision": str(request.precision)},
            more_files=(WEIGHTS_FILE,),
        )

    def list_files(self, info: ArtifactInfo) -> tuple[str, ...]:
        return (MODEL_FILE, WEIGHTS_FILE)

    def load(self, directory: Path, info: ArtifactInfo, options: Mapping[str, Any]) -> Session:
        from optpipe_openvino.runtime import OpenVinoSession

        merged = self.merge_options({**info.options, **options}, info.device)
        return OpenVinoSession(directory / MODEL_FILE, info.precision, merged)

    def open_marked(self, info: ArtifactInfo, request: BuildRequest, source: Path) -> Marked:
        """OpenVINO compiles the graph with one more output for each tensor that is read."""
        from optpipe_openvino.runtime import open_marked_graphs

        return open_marked_graphs(info, request, source)

    def time_layers(
        self,
        directory: Path,
        info: ArtifactInfo,
        options: Mapping[str, Any],
        inputs: Mapping[str, Any],
        scratch: Path,
    ) -> Mapping[str, float] | None:
        """Times nodes in a second session, because timing slows the session down."""
        from optpipe_openvino.runtime import OpenVinoSession

        merged = self.merge_options({**info.options, **options}, info.device)
        path = directory / MODEL_FILE
        with OpenVinoSession(path, info.precision, merged, profile=True) as session:
            return session.time_nodes(inputs)
