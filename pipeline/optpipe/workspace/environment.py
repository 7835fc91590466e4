"""This machine's environment, as recorded in manifests and shown by `doctor`."""

import os
import platform
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib import metadata
from typing import Any

from optpipe.core.entries import Environment, Gpu
from optpipe.core.plugins import list_distributions


@cache
def get_package_version(name: str) -> str | None:
    """Version of an installed distribution from its metadata, without importing it; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@cache
def list_packages() -> dict[str, str]:
    """Versions of the installed packages that optpipe and its plug-ins require, including extras, and of the plug-ins."""
    try:
        requirements = list(metadata.requires("optpipe") or ())
    except metadata.PackageNotFoundError:  # run from a source tree: every package may matter
        requirements = [package.name for package in metadata.distributions() if package.name]
    for plugin in list_distributions():
        requirements += [plugin.name, *(plugin.requires or ())]
    names = sorted({re.split(r"[^\w.-]", text)[0] for text in requirements} - {"optpipe"})
    return {name: version for name in names if (version := get_package_version(name))}


@cache
def list_gpus() -> tuple[Gpu, ...]:
    """NVIDIA GPUs that CUDA shows, in its order, as named by NVML; empty without a driver."""
    with open_nvml() as nvml:
        if nvml is None:
            return ()
        handles = [
            nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())
        ]
        uuids = [nvml.nvmlDeviceGetUUID(handle) for handle in handles]
        shown = select_visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), uuids)
        return tuple(_describe_gpu(nvml, index, handles[index]) for index in shown)


@contextmanager
def open_nvml() -> Iterator[Any]:
    """The module `pynvml`; None without it or a driver."""
    nvml: Any = None
    with suppress(ModuleNotFoundError):
        import pynvml

        with suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            nvml = pynvml
    try:
        yield nvml
    finally:
        if nvml is not None:
            nvml.nvmlShutdown()


def select_visible_gpus(text: str | None, uuids: Sequence[str]) -> tuple[int, ...]:
    """Indices of a host's GPUs that CUDA shows, in its order; `text` is CUDA_VISIBLE_DEVICES, None if it is not set.

    It lists indices of nvidia-smi or beginnings of UUIDs, and counts up to the first that is neither (CUDA programming
    guide, CUDA environment variables). If it names a part of a GPU (MIG), all are shown: NVML lists no parts.
    """
    if text is None or "MIG-" in text:
        return tuple(range(len(uuids)))
    indices: list[int] = []
    for word in (word.strip() for word in text.split(",")):
        meant = (
            [int(word)]
            if word.isdecimal()
            else [at for at, uuid in enumerate(uuids) if uuid.startswith(word or "-")]
        )
        if len(meant) != 1 or meant[0] >= len(uuids):
            break
        indices += meant
    return tuple(indices)


def get_gpu_name() -> str | None:
    """Name of the first GPU, for which engines are tuned; None without one."""
    return list_gpus()[0].name if list_gpus() else None


def _describe_gpu(nvml: Any, index: int, handle: Any) -> Gpu:
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(
        index=index,
        name=nvml.nvmlDeviceGetName(handle),
        compute_capability=f"{major}.{minor}",
        memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        driver=nvml.nvmlSystemGetDriverVersion(),
    )


def count_cores() -> int:
    return len(os.sched_getaffinity(0))


def describe_environment() -> Environment:
    return Environment(
        python=platform.python_version(),
        platform=f"{platform.system()}-{platform.machine()}",
        cpu=read_cpu_model(),
        cpu_count=os.cpu_count(),
        packages=list_packages(),
        gpus=list_gpus(),
    )


@cache
def read_cpu_model() -> str:
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:  # noqa: PTH123
        for line in lines:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"
