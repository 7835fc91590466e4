"""What this machine can do for optpipe, tool by tool, and how to get what it lacks."""

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from optpipe.backends.registry import BACKENDS
from optpipe.workspace.environment import environment, gpus, package_version

_BACKEND_ADDS: Mapping[str, str] = {
    "tensorrt": "engines for data-center GPUs",
    "tensorrt-rtx": "engines for RTX GPUs, built ahead of time without one",
    "torch-tensorrt": "TensorRT engines straight from torch",
    "onnxruntime": "running ONNX on the CPU and on GPUs",
    "inductor": "torch compiled ahead of time",
    "torch": "the baseline",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One tool or device."""

    name: str
    found: bool
    version: str | None
    adds: str
    """What it is good for."""
    note: str | None = None
    """What limits it here."""
    install: str | None = None
    """What brings it, where it is missing."""

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return asdict(self)


def diagnose() -> tuple[Finding, ...]:
    """Looks at everything; imports no framework, so it takes well under a second."""
    return (
        _gpu(),
        _package("CUDA runtime", "nvidia-cuda-runtime", "what torch and ONNX Runtime link to"),
        *_backends(),
        *_tools(),
    )


def diagnosis_record(findings: tuple[Finding, ...]) -> dict[str, Any]:
    """The JSON document of `optpipe doctor`."""
    return {"findings": [each.to_dict() for each in findings], "environment": environment()}


def _gpu() -> Finding:
    adds = "measuring and verifying on the GPU, engines tuned for it"
    if not gpus():
        return Finding("GPU", False, None, adds, None, "an NVIDIA GPU with driver 580 or newer, which CUDA 13 needs")
    first = gpus()[0]
    memory_gib = first["memory_bytes"] / (1 << 30)
    shown = f"{first['name']}, compute capability {first['compute_capability']}, {memory_gib:.0f} GiB, driver {first['driver']}"
    return Finding("GPU", True, shown, adds, f"{len(gpus())} of them; the first is used" if len(gpus()) > 1 else None)


def _backends() -> tuple[Finding, ...]:
    found = []
    for name, backend in BACKENDS.items():
        by_device = {device: backend.capability(device) for device in backend.devices()}
        version = next((each.version for each in by_device.values() if each.version), None)
        limits = [f"{device}: {each.why_not}" for device, each in by_device.items() if version and each.why_not]
        install = next((each.install for each in by_device.values() if each.install), None)
        found.append(
            Finding(
                f"backend {name}", version is not None, version, _BACKEND_ADDS[name], "; ".join(limits) or None, install
            )
        )
    return tuple(found)


def _tools() -> tuple[Finding, ...]:
    return (
        _package("ModelOpt", "nvidia-modelopt", "FP16, BF16 and INT8 graphs", "`pip install nvidia-modelopt`"),
        _package(
            "DALI",
            "nvidia-dali-cuda130",
            "preprocessing that keeps up with the engine",
            "`pip install nvidia-dali-cuda130`",
        ),
        _package("timm", "timm", "models `timm:NAME`", "`uv sync --extra timm` in a checkout"),
        _package("transformers", "transformers", "models `hf:NAME`", "`uv sync --extra hf` in a checkout"),
        _program(
            "nsys",
            "profiles of every stage",
            "Debian: enable component non-free, then `apt-get install nsight-systems`",
        ),
        _program(
            "ncu", "measured bytes and cycles of single kernels", "it comes with the CUDA toolkit as Nsight Compute"
        ),
    )


def _package(name: str, distribution: str, adds: str, install: str | None = None) -> Finding:
    version = package_version(distribution)
    return Finding(name, version is not None, version, adds, None, install if version is None else None)


def _program(name: str, adds: str, install: str) -> Finding:
    path = shutil.which(name)
    if path is None:
        return Finding(name, False, None, adds, None, install)
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(name, False, None, adds, f"{path} does not run: {type(error).__name__}", install)
    lines = [line for line in said.stdout.splitlines() if "ersion" in line] or said.stdout.splitlines()
    if said.returncode != 0 or not lines:
        return Finding(name, False, None, adds, f"{path} --version ended with status {said.returncode}", install)
    return Finding(name, True, lines[-1].strip(), adds)
