"""Sources of a recording beyond CUDA and NVTX: how nsys is asked for them, and what allows them where they are refused.

GPU metrics are hardware counters, sampled 10,000 times per second; OS calls are those of libc that take at least 1 µs; CPU
samples are call stacks, taken 1,000 times per second, with context switches; Python samples are Python's stacks at the
same rate. Modules are ranges around the modules of a PyTorch network, which optpipe opens itself (`trace/marks`).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from optpipe.core.params import choices_from_text


class Source(StrEnum):
    GPU_METRICS = "gpu-metrics"
    OS_CALLS = "os-calls"
    CPU = "cpu"
    PYTHON = "python"
    MODULES = "modules"


ALL = "all"
SAMPLING_HZ = 1_000
_PYTHON_SAMPLING_SINCE = (2023, 2)
_DEVICES_RENAMED_IN = 2024

REMEDIES = {
    Source.GPU_METRICS: "allow counters to all users (NVreg_RestrictProfilingToAdminUsers=0, see "
    "https://developer.nvidia.com/ERR_NVGPUCTRPERM), or run as root; in a container also --cap-add=SYS_ADMIN; "
    "end other profilers on this GPU",
    Source.OS_CALLS: "see what this machine allows: nsys status --environment",
    Source.CPU: "sudo sysctl kernel.perf_event_paranoid=2; in a container also --cap-add=SYS_ADMIN, or a seccomp "
    "profile that allows perf_event_open",
    Source.PYTHON: "nsys 2023.2 or newer and CPython 3.8 or newer",
    Source.MODULES: "a Python program that runs torch modules",
}
"""What allows a source that a driver, a container, or a version of nsys forbids."""


@dataclass(frozen=True, slots=True)
class SourceState:
    """A requested source, and the reason if it was not recorded."""

    name: Source
    recorded: bool
    why: str = ""
    remedy: str = ""


def refuse_source(source: Source, why: str) -> SourceState:
    return SourceState(source, False, why, REMEDIES[source])


def sources_from_text(text: str, flag: str) -> tuple[Source, ...]:
    """Reads a comma-separated list, or `all`. Raises BadInputError for another word.

    >>> sources_from_text("cpu,python", "--record")
    (<Source.CPU: 'cpu'>, <Source.PYTHON: 'python'>)
    """
    words = choices_from_text(text, (*Source, ALL), flag)
    return tuple(Source) if ALL in words else tuple(map(Source, words))


def find_known_refusal(source: Source, version: str, *, on_gpu: bool) -> SourceState | None:
    """A refusal that is known before anything runs."""
    if source is Source.GPU_METRICS and not on_gpu:
        return SourceState(source, False, "no GPU is used", "")
    if source is Source.PYTHON and read_release(version) < _PYTHON_SAMPLING_SINCE:
        return refuse_source(source, f"nsys {version} does not sample Python")
    return None


def read_release(version: str) -> tuple[int, int]:
    """Year and release of nsys: (2025, 3) for 2025.3.2.0; (0, 0) if the text is no version."""
    matched = re.match(r"(\d+)\.(\d+)", version)
    return (int(matched[1]), int(matched[2])) if matched else (0, 0)


def list_source_options(sources: Sequence[Source], version: str) -> list[str]:
    """Options of `nsys profile` for `sources`, except the list of --trace."""
    year, _ = read_release(version)
    options = []
    if Source.GPU_METRICS in sources:
        renamed = year >= _DEVICES_RENAMED_IN
        options += ["--gpu-metrics-devices" if renamed else "--gpu-metrics-device", "all"]
    if Source.CPU in sources:
        options += ["--sample", "process-tree", "--cpuctxsw", "process-tree", "--backtrace", "fp"]
        # the default rate is 1 kHz; the option that sets it was renamed between versions
    else:
        options += ["--sample", "none", "--cpuctxsw", "none"]
    if Source.PYTHON in sources:
        options += ["--python-sampling", "true", "--python-sampling-frequency", str(SAMPLING_HZ)]
    return options


def list_traced(sources: Sequence[Source], *, on_gpu: bool) -> str:
    """The list of `nsys profile --trace`."""
    traced = ["nvtx", *(("cuda", "cublas", "cudnn") if on_gpu else ())]
    return ",".join([*traced, *(["osrt"] if Source.OS_CALLS in sources else [])])
