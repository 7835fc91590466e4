"""Code that the backends of torch programs share."""

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optpipe.backends.base import (
    Backend,
    Capability,
    Device,
    Option,
)
from optpipe.backends.torch_program import TORCH_PRECISIONS
from optpipe.core.entries import ArtifactInfo
from optpipe.core.errors import (
    StageError,
)
from optpipe.core.precision import Precision
from optpipe.workspace.environment import (
    get_gpu_name,
    get_package_version,
    list_gpus,
    read_cpu_model,
)

THREADS = Option("threads", 0, "threads of one operator; with 0, torch chooses their number")


CUDA_GRAPH = Option("cuda_graph", True, "captures an inference into a CUDA graph")


def refuse_pickles(package: Path) -> None:
    """Raises `StageError` if loading a torch package would unpickle anything."""
    with zipfile.ZipFile(package) as archive:
        for name in archive.namelist():
            if name.endswith("_config.json") and _names_pickle(json.loads(archive.read(name))):
                raise StageError(
                    f"{package.name} contains pickled constants, which optpipe does not load; use another backend for this model"
                )


def _names_pickle(value: Any) -> bool:
    if isinstance(value, Mapping):
        return bool(value.get("use_pickle")) or any(
            _names_pickle(inner) for inner in value.values()
        )
    return isinstance(value, list) and any(_names_pickle(inner) for inner in value)


class TorchBackend(Backend):
    packages: tuple[str, ...] = ("torch",)
    needs_module = True

    def precisions(self, device: Device) -> frozenset[Precision]:
        return TORCH_PRECISIONS if device == "cuda" else TORCH_PRECISIONS - {Precision.TF32}

    def probe_capability(self, device: Device) -> Capability:
        version = get_package_version("torch")
        if device == "cuda" and not list_gpus():
            return Capability(False, False, version, "no NVIDIA GPU on this machine")
        return Capability(True, True, version)

    def find_run_blocker(self, info: ArtifactInfo) -> str | None:
        """Compiled code needs the same kind of processor and the same version of torch's library."""
        here, version = name_processor(info.device), get_package_version("torch")
        if (made_for := info.details.get("compiled_for", here)) != here:
            return f"compiled for {made_for}, this is {here}"
        if (made_by := info.details.get("compiled_by", version)) != version:
            return f"compiled by torch {made_by}, this is torch {version}"
        return TorchBackend.probe_capability(
            self, info.device
        ).why_not  # without what only a build needs


def name_processor(device: Device) -> str | None:
    return (get_gpu_name() if device == "cuda" else None) or read_cpu_model()
