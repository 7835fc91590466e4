"""What `torch` and `inductor`, torch's own backends, have in common."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from optpipe.backends.base import BuildRequest, Capability, Device
from optpipe.backends.torch_program import PRECISIONS
from optpipe.core.precision import Precision
from optpipe.workspace.environment import (
    cpu_model,
    gpu_name,
    gpus,
    package_version,
)


@dataclass(frozen=True, slots=True)
class TorchBackend:
    """All of a backend but its recipe, its build and its session."""

    name: str
    needs_module: bool = True

    def precisions(self, device: Device) -> frozenset[Precision]:
        """Floating point; TF32 is a type of NVIDIA's Tensor Cores."""
        return PRECISIONS if device == "cuda" else PRECISIONS - {Precision.TF32}

    def devices(self) -> tuple[Device, ...]:
        """A GPU first where there is one."""
        return ("cuda", "cpu")

    def capability(self, device: Device) -> Capability:
        """torch is always there; a GPU may not be."""
        version = package_version("torch")
        if device == "cuda" and not gpus():
            return Capability(False, False, version, "no NVIDIA GPU on this machine")
        return Capability(True, True, version)

    def unsupported(self, request: BuildRequest) -> tuple[str, ...]:  # noqa: ARG002
        """Nothing: what could be exported, torch can run."""
        return ()

    def runnable(self, info: Mapping[str, Any], device: Device) -> str | None:
        """On its device, the kind of processor that it was compiled for, and the torch whose library its code calls."""
        if info["device"] != device:
            return f"built for {info['device']}"
        here = processor(device)
        if (made_for := info.get("compiled_for", here)) != here:
            return f"compiled for {made_for}, this is {here}"
        version = package_version("torch")
        if (made_by := info.get("compiled_by", version)) != version:
            return f"compiled by torch {made_by}, this is torch {version}"
        return TorchBackend.capability(self, device).why_not  # what only building needs may be missing


def processor(device: Device) -> str | None:
    """The GPU, or the CPU, that code for `device` is compiled for here."""
    return (gpu_name() if device == "cuda" else None) or cpu_model()


def tensor_records(request: BuildRequest) -> dict[str, Any]:
    """Names, types and shapes of inputs and outputs, which a torch package does not keep."""
    card = request.card
    return {
        "inputs": [each.tensor.to_dict() for each in card.inputs],
        "outputs": [each.to_dict() for each in card.outputs],
        "tf32": request.precision is Precision.TF32,
        "device": request.device,
    }
