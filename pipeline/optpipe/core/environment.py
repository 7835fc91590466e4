"""What this machine is: recorded in every manifest, and what `doctor` reads."""

import os
import platform
from functools import cache
from importlib import metadata
from typing import Any

PACKAGES = (
    "torch",
    "torchvision",
    "onnx",
    "onnxruntime-gpu",
    "nvidia-modelopt",
    "tensorrt-rtx-cu13",
    "tensorrt-cu13",
    "torch-tensorrt",
    "nvidia-dali-cuda130",
    "polars",
    "timm",
    "transformers",
)


@cache
def package_version(name: str) -> str | None:
    """The installed version of distribution `name`, or None. Reads metadata only: nothing is imported."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@cache
def gpus() -> tuple[dict[str, Any], ...]:
    """The NVIDIA GPUs as the driver's management library (NVML) names them; empty without a driver."""
    try:
        import pynvml
    except ModuleNotFoundError:
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        return tuple(_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount()))
    finally:
        pynvml.nvmlShutdown()


def gpu_name() -> str | None:
    """The first GPU's name, which engines are tuned for; None without one."""
    return gpus()[0]["name"] if gpus() else None


def _gpu(nvml: Any, index: int) -> dict[str, Any]:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return {
        "index": index,
        "name": nvml.nvmlDeviceGetName(handle),
        "compute_capability": f"{major}.{minor}",
        "memory_bytes": int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        "driver": nvml.nvmlSystemGetDriverVersion(),
    }


def cores() -> int:
    """The processors this process may use."""
    return len(os.sched_getaffinity(0))


def environment() -> dict[str, Any]:
    """Tool versions, device, driver and host, as they go into a manifest. Names neither the host nor its user."""
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()}-{platform.machine()}",
        "cpu": cpu_model(),
        "cpu_count": os.cpu_count(),
        "packages": {name: version for name in PACKAGES if (version := package_version(name))},
        "gpus": list(gpus()),
    }


@cache
def cpu_model() -> str:
    """The processor as the kernel names it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:  # noqa: PTH123
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
