"""The tools and devices of this machine, and how to install missing ones."""

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from optpipe.backends.base import Option
from optpipe.backends.registry import BACKENDS
from optpipe.core.metrics.registry import METRICS
from optpipe.core.plugins import FAILURES, VARIABLE
from optpipe.core.process import NEUTRAL_FOLDER
from optpipe.core.wording import Argument
from optpipe.report.document import (
    Column,
    ColumnKind,
    Document,
    Row,
    Sentence,
    Tone,
    make_document,
    make_table,
)
from optpipe.workspace.environment import get_package_version, list_gpus


@dataclass(frozen=True, slots=True)
class ToolStatus:
    name: str
    found: bool
    version: str | None
    adds: str
    note: str | None = None
    install: str | None = None


def list_options() -> dict[str, tuple[Option, ...]]:
    """Each option once, by backend; imports no framework."""
    by_backend = {
        name: {
            option.name: option
            for device in backend.devices()
            for option in backend.describe_options(device)
        }
        for name, backend in BACKENDS.items()
    }
    return {name: tuple(options.values()) for name, options in by_backend.items()}


PACKAGES = (
    ("CUDA runtime", "nvidia-cuda-runtime", "required by PyTorch and ONNX Runtime", None),
    ("ModelOpt", "nvidia-modelopt", "FP16, BF16, and INT8 graphs", "`pip install nvidia-modelopt`"),
    (
        "DALI",
        "nvidia-dali-cuda130",
        "GPU-accelerated preprocessing",
        "`pip install nvidia-dali-cuda130`",
    ),
    ("timm", "timm", "models `timm:NAME`", "`uv sync --extra timm` in a checkout"),
    ("transformers", "transformers", "models `hf:NAME`", "`uv sync --extra hf` in a checkout"),
)
"""Name, distribution, purpose, and the command that installs it."""


def diagnose_machine() -> tuple[ToolStatus, ...]:
    """Imports no framework, so it takes well under a second."""
    tools = []
    for name, distribution, adds, install in PACKAGES:
        version = get_package_version(distribution)
        tools.append(
            ToolStatus(name, version is not None, version, adds, None, None if version else install)
        )
    cuda, *others = tools
    return (_check_gpu(), cuda, *_check_backends(), *_check_plugins(), *others, _check_nsys())


REGISTRIES = (BACKENDS, METRICS)
"""Plug-ins are loaded where their registry is imported; only then are those that fail known."""


def _check_plugins() -> tuple[ToolStatus, ...]:
    """The plug-ins that could not be loaded; those that were are backends, tasks, and metrics like any other."""
    return tuple(
        ToolStatus(
            name=f"plug-in {failure.name}",
            found=False,
            version=None,
            adds=f"{failure.group.removeprefix('optpipe.')} of {failure.distribution}",
            note=failure.reason,
            install=f"repair {failure.distribution}, or leave it out with {VARIABLE}",
        )
        for failure in FAILURES
    )


def _check_gpu() -> ToolStatus:
    adds = "GPU measurement, verification, and tuned engines"
    if not list_gpus():
        return ToolStatus(
            "GPU",
            False,
            None,
            adds,
            None,
            "requires an NVIDIA GPU with driver 580 or newer (CUDA 13)",
        )
    first = list_gpus()[0]
    memory_gib = first.memory_bytes / (1 << 30)
    shown = f"{first.name}, compute capability {first.compute_capability}, {memory_gib:.0f} GiB, driver {first.driver}"
    return ToolStatus(
        "GPU",
        True,
        shown,
        adds,
        f"{len(list_gpus())} GPUs found; the first is used" if len(list_gpus()) > 1 else None,
    )


def _check_backends() -> tuple[ToolStatus, ...]:
    tools = []
    for name, backend in BACKENDS.items():
        by_device = {device: backend.probe_capability(device) for device in backend.devices()}
        version = next(
            (capability.version for capability in by_device.values() if capability.version), None
        )
        limits = [
            f"{device}: {capability.why_not}"
            for device, capability in by_device.items()
            if version and capability.why_not
        ]
        install = next(
            (capability.install for capability in by_device.values() if capability.install), None
        )
        tools.append(
            ToolStatus(
                f"backend {name}",
                version is not None,
                version,
                backend.purpose,
                "; ".join(limits) or None,
                install,
            )
        )
    return tuple(tools)


def _check_nsys() -> ToolStatus:
    install = "on Debian, enable the non-free component, then `apt-get install nsight-systems`"
    missing, path = (
        ToolStatus("nsys", False, None, "profiling of every stage", None, install),
        shutil.which("nsys"),
    )
    if path is None:
        return missing
    try:
        said = subprocess.run(
            [Path(path).absolute(), "--version"],
            cwd=NEUTRAL_FOLDER,  # it imports ./sitecustomize.py
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return replace(missing, note=f"{path} failed to run: {type(error).__name__}")
    lines = [
        line for line in said.stdout.splitlines() if "ersion" in line
    ] or said.stdout.splitlines()
    if said.returncode != 0 or not lines:
        return replace(missing, note=f"{path} --version exited with status {said.returncode}")
    return replace(missing, found=True, version=lines[-1].strip(), install=None)


def document_from_diagnosis(findings: Sequence[ToolStatus]) -> Document:
    installed = [(tool.name, tool.version, tool.adds, tool.note) for tool in findings if tool.found]
    return make_document(
        [
            make_table(
                ("tool", "version", Column("good for", rank=2), Column("limits here", rank=2)),
                installed,
            )
            if installed
            else None,
            *(
                Sentence(
                    f"{tool.name}: would add {tool.adds}",
                    Tone.DOUBTFUL,
                    "missing",
                    tuple(text for text in (tool.note, tool.install) if text),
                )
                for tool in findings
                if not tool.found
            ),
        ]
    )


def document_from_options(listing: Mapping[str, Sequence[Option]]) -> Document:
    rows: list[Row] = []
    for backend, option in (
        (name, option) for name, options in listing.items() for option in options
    ):
        default = (
            str(option.default).lower()
            if isinstance(option.default, bool)
            else str(option.default) or "none"
        )
        choices = f" ({', '.join(option.choices)})" if option.choices else ""
        rows.append(
            (
                f"{backend}.{option.name}",
                default,
                "build" if option.builds else "run",
                option.help + choices,
            )
        )
    name = Column(Argument("option"), ColumnKind.NAME)
    return make_document(
        [make_table((name, "default", "taken by", Column("description", rank=2)), rows)]
    )
