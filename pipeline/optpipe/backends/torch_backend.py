"""What `torch` and `inductor`, torch's own backends, have in common."""

from collections.abc import Iterator, Mapping
from typing import Any

from optpipe.backends.base import Backend, BuildRequest, Capability, Device
from optpipe.backends.torch_program import TORCH_PRECISIONS
from optpipe.core.entries import ArtifactInfo
from optpipe.core.precision import Precision
from optpipe.core.units import format_duration
from optpipe.workspace.environment import get_gpu_name, get_package_version, list_gpus, read_cpu_model


class TorchBackend(Backend):
    """All of a backend but its recipe, its build and its session."""

    package = "torch"
    needs_module = True

    def precisions(self, device: Device) -> frozenset[Precision]:
        """Floating point; TF32 is a type of NVIDIA's Tensor Cores."""
        return TORCH_PRECISIONS if device == "cuda" else TORCH_PRECISIONS - {Precision.TF32}

    def devices(self) -> tuple[Device, ...]:
        """A GPU first where there is one."""
        return ("cuda", "cpu")

    def probe_capability(self, device: Device) -> Capability:
        """torch is always there; a GPU may not be."""
        version = get_package_version("torch")
        if device == "cuda" and not list_gpus():
            return Capability(False, False, version, "no NVIDIA GPU on this machine")
        return Capability(True, True, version)

    def find_run_blocker(self, info: ArtifactInfo) -> str | None:
        """It needs the kind of processor that it was compiled for, and the torch whose library its code calls."""
        here, version = name_processor(info.device), get_package_version("torch")
        if (made_for := info.details.get("compiled_for", here)) != here:
            return f"compiled for {made_for}, this is {here}"
        if (made_by := info.details.get("compiled_by", version)) != version:
            return f"compiled by torch {made_by}, this is torch {version}"
        return TorchBackend.probe_capability(self, info.device).why_not  # what only building needs may be missing

    def advise_fusion(self, options: Mapping[str, Any]) -> str:
        """torch fuses where it is told to; beside it the other of the two does."""
        if not options.get("fuse", True):
            option = f"optpipe build --option {self.name}.fuse=true"
            return f"{option} fuses elementwise work into the matrix kernels; so does --backend inductor"
        return Backend.advise_fusion(self, options).replace(f"{self.name},", "")

    def describe_details(self, details: Mapping[str, Any]) -> Iterator[str]:
        """What computes an INT8 network at each batch size, and what the build measured against FP16, in turns on its GPU."""
        for batch, chosen in details.get("tactics", {}).items():
            kernels = ", ".join(f"{name} {count}" for name, count in sorted(chosen["kernels"].items()))
            yield f"tactics  batch {batch}: {format_duration(chosen['sum_us'] * 1e3)} in {kernels}"
        for batch, each in details.get("against_fp16", {}).items():
            ratio = f"{each['speed']:.2f} ({each['low']:.2f} to {each['high']:.2f}) times the speed of fp16"
            yield f"against fp16  batch {batch}: {ratio}{'' if each['pays'] else ', not shown to be faster'}"


def name_processor(device: Device) -> str | None:
    """The GPU, or the CPU, that code for `device` is compiled for here."""
    return (get_gpu_name() if device == "cuda" else None) or read_cpu_model()


def record_tensors(request: BuildRequest) -> dict[str, Any]:
    """Names, types and shapes of inputs and outputs, which a torch package does not keep."""
    card = request.card
    return {
        "inputs": [each.tensor.to_dict() for each in card.inputs],
        "outputs": [each.to_dict() for each in card.outputs],
    }
