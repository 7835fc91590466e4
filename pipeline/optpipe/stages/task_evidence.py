"""What evaluation, preprocessing and profile runs show for a build. A run kind that is absent shows nothing."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from optpipe.core.evidence import Build, Figure
from optpipe.core.runs import Run


def accuracy_figures(runs: Sequence[Run], build: Build, confidence: float) -> Mapping[str, Figure]:  # noqa: ARG001
    """`top1`, `drop` and `agreement` of the newest evaluation that has the build, as fractions."""
    return {}


def preprocessing_figures(runs: Sequence[Run], build: Build, confidence: float) -> Mapping[str, Figure]:  # noqa: ARG001
    """`agreement` (fraction) and `snr` (dB) of the newest parity proof for the build's model."""
    return {}


def tensor_core_figure(runs: Sequence[Run], build: Build) -> Figure | None:  # noqa: ARG001
    """Share of the eligible kernel time that used Tensor Cores, from the newest profile of the build."""
    return None


def documents(runs: Sequence[Run], root: Path) -> dict[str, Any]:  # noqa: ARG001
    """What the report shows of them: fields of `core.report.Report`; file paths are relative to `root`."""
    return {}
