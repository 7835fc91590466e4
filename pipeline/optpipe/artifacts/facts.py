"""What a stored artifact's manifest says of the build that it is."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from optpipe.workspace.manifest import Manifest


@dataclass(frozen=True, slots=True)
class JudgedBuild:
    """The build that is judged."""

    model: str
    artifact: str
    backend: str
    precision: str
    sha256: str | None = None
    size_bytes: int | None = None
    macs_share: Mapping[str, float] | None = None
    """Share of the multiply-adds per type, proven from the built network."""
    weights: str | None = None
    calibration: str | None = None
    """sha256 of the calibration table, for INT8."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The runtime options that it was built with and runs with where no others are given."""


def judged_build_from_manifest(manifest: Manifest) -> JudgedBuild:
    """The build that a stored artifact is."""
    info = manifest.info
    record = manifest.files.get(info["file"])
    shares = info["precision_proof"]["share"]
    return JudgedBuild(
        model=info["model"],
        artifact=manifest.id,
        backend=info["backend"],
        precision=info["precision"],
        sha256=record.sha256 if record else None,
        size_bytes=record.size_bytes if record else None,
        macs_share=shares.get("macs") or shares.get("layers"),
        weights=info["weights"]["source"],
        calibration=info.get("calibration") and str(info["calibration"]),
        options=info.get("options", {}),
    )
