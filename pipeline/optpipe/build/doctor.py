"""The tools and devices of this machine, and how to install missing ones."""

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

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


def diagnose_machine() -> Diagnosis:
    """Imports no framework, so it takes well under a second."""
    findings = (
        _check_gpu(),
        _check_package("CUDA runtime", "nvidia-cuda-runtime", "required by PyTorch and ONNX Runtime"),
        *_check_backends(),
        *_check_tools(),
    )
    return Diagnosis(findings, describe_environment())


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


def _check_tools() -> tuple[ToolStatus, ...]:
    return (
        _check_package("ModelOpt", "nvidia-modelopt", "FP16, BF16 and INT8 graphs", "`pip install nvidia-modelopt`"),
        _check_package(
            "DALI", "nvidia-dali-cuda130", "GPU-accelerated preprocessing", "`pip install nvidia-dali-cuda130`"
        ),
        _check_package("timm", "timm", "models `timm:NAME`", "`uv sync --extra timm` in a checkout"),
        _check_package("transformers", "transformers", "models `hf:NAME`", "`uv sync --extra hf` in a checkout"),
        _check_program(
            "nsys",
            "profiling of every stage",
            "on Debian, enable the non-free component, then `apt-get install nsight-systems`",
        ),
    )


def _check_package(name: str, distribution: str, adds: str, install: str | None = None) -> ToolStatus:
    version = get_package_version(distribution)
    return ToolStatus(name, version is not None, version, adds, None, install if version is None else None)


def _check_program(name: str, adds: str, install: str) -> ToolStatus:
    path = shutil.which(name)
    if path is None:
        return ToolStatus(name, False, None, adds, None, install)
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return ToolStatus(name, False, None, adds, f"{path} failed to run: {type(error).__name__}", install)
    lines = [line for line in said.stdout.splitlines() if "ersion" in line] or said.stdout.splitlines()
    if said.returncode != 0 or not lines:
        return ToolStatus(name, False, None, adds, f"{path} --version exited with status {said.returncode}", install)
    return ToolStatus(name, True, lines[-1].strip(), adds)
