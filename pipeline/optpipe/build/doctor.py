"""The tools and devices of this machine, and how to install missing ones."""

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace

from optpipe.backends.base import Option
from optpipe.backends.registry import BACKENDS
from optpipe.core.entries import Environment
from optpipe.workspace.environment import describe_environment, get_package_version, list_gpus


@dataclass(frozen=True, slots=True)
class ToolStatus:
    name: str
    found: bool
    version: str | None
    adds: str
    note: str | None = None
    install: str | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    findings: tuple[ToolStatus, ...]
    environment: Environment


@dataclass(frozen=True, slots=True)
class OptionListing:
    options: Mapping[str, tuple[Option, ...]]
    """By backend."""


def list_options() -> OptionListing:
    """Each option once; imports no framework."""
    found = {
        name: {each.name: each for device in backend.devices() for each in backend.describe_options(device)}
        for name, backend in BACKENDS.items()
    }
    return OptionListing({name: tuple(options.values()) for name, options in found.items()})


PACKAGES = (
    ("CUDA runtime", "nvidia-cuda-runtime", "required by PyTorch and ONNX Runtime", None),
    ("ModelOpt", "nvidia-modelopt", "FP16, BF16 and INT8 graphs", "`pip install nvidia-modelopt`"),
    ("DALI", "nvidia-dali-cuda130", "GPU-accelerated preprocessing", "`pip install nvidia-dali-cuda130`"),
    ("timm", "timm", "models `timm:NAME`", "`uv sync --extra timm` in a checkout"),
    ("transformers", "transformers", "models `hf:NAME`", "`uv sync --extra hf` in a checkout"),
)
"""Name, distribution, purpose, and the command that installs it."""


def diagnose_machine() -> Diagnosis:
    """Imports no framework, so it takes well under a second."""
    found = []
    for name, distribution, adds, install in PACKAGES:
        version = get_package_version(distribution)
        found.append(ToolStatus(name, version is not None, version, adds, None, None if version else install))
    cuda, *others = found
    return Diagnosis((_check_gpu(), cuda, *_check_backends(), *others, _check_nsys()), describe_environment())


def _check_gpu() -> ToolStatus:
    adds = "GPU measurement, verification and tuned engines"
    if not list_gpus():
        return ToolStatus("GPU", False, None, adds, None, "requires an NVIDIA GPU with driver 580 or newer (CUDA 13)")
    first = list_gpus()[0]
    memory_gib = first.memory_bytes / (1 << 30)
    shown = f"{first.name}, compute capability {first.compute_capability}, {memory_gib:.0f} GiB, driver {first.driver}"
    return ToolStatus(
        "GPU", True, shown, adds, f"{len(list_gpus())} GPUs found; the first is used" if len(list_gpus()) > 1 else None
    )


def _check_backends() -> tuple[ToolStatus, ...]:
    found = []
    for name, backend in BACKENDS.items():
        by_device = {device: backend.probe_capability(device) for device in backend.devices()}
        version = next((each.version for each in by_device.values() if each.version), None)
        limits = [f"{device}: {each.why_not}" for device, each in by_device.items() if version and each.why_not]
        install = next((each.install for each in by_device.values() if each.install), None)
        found.append(
            ToolStatus(
                f"backend {name}", version is not None, version, backend.purpose, "; ".join(limits) or None, install
            )
        )
    return tuple(found)


def _check_nsys() -> ToolStatus:
    install = "on Debian, enable the non-free component, then `apt-get install nsight-systems`"
    missing, path = ToolStatus("nsys", False, None, "profiling of every stage", None, install), shutil.which("nsys")
    if path is None:
        return missing
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return replace(missing, note=f"{path} failed to run: {type(error).__name__}")
    lines = [line for line in said.stdout.splitlines() if "ersion" in line] or said.stdout.splitlines()
    if said.returncode != 0 or not lines:
        return replace(missing, note=f"{path} --version exited with status {said.returncode}")
    return replace(missing, found=True, version=lines[-1].strip(), install=None)
