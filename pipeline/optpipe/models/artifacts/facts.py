"""What a stored artifact's manifest says of the build that it is."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from optpipe.core.entries import ArtifactInfo, ModelInfo
from optpipe.core.files import Files, hash_value
from optpipe.models.artifacts.engine import hash_engine, measure_engine
from optpipe.models.artifacts.lookup import format_model_argument
from optpipe.workspace.entry import Entry, Manifest, UnreadableManifestError, read_manifest


@dataclass(frozen=True, slots=True)
class JudgedBuild:
    """The build that is judged."""

    model: str
    """Its name."""
    artifact: str
    backend: str
    precision: str
    source: str = ""
    """Of the model, as `build` takes it."""
    sha256: str | None = None
    size_bytes: int | None = None
    macs_share: Mapping[str, float] | None = None
    """Share of the MACs per type, proven from the built network."""
    weights: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """The runtime options that it was built with and runs with where no others are given."""
    model_sha256: str | None = None
    """`hash_model` of the exported model that it was built from; None where its record is not there."""

    @property
    def argument(self) -> str:
        """The MODEL of a command that means its model."""
        return format_model_argument(self.model, self.source)

    def has_other_file(self, artifact: str | None, sha256: str | None) -> bool:
        """Whether a record of `artifact` is of another file than the build's under the same id: not every backend gives the same
        bytes twice. A record without a hash is of a version that stored none, and taken to be of this file."""
        return artifact == self.artifact and None not in (sha256, self.sha256) and sha256 != self.sha256


def judged_build_from_entry(entry: Entry[ArtifactInfo], exported: Mapping[str, Manifest] | None = None) -> JudgedBuild:
    """The build that a stored artifact is. The manifest of its model is in `exported`, by id, or lies beside its own."""
    info, model, sha256 = entry.info, next(iter(entry.manifest.parents), ""), None
    if exported is not None:
        sha256 = hash_model(exported[model]) if model in exported else None
    else:
        with suppress(UnreadableManifestError):
            sha256 = hash_model(read_manifest(Files(entry.path.parent / f"{ModelInfo.KIND}-{model}")))
    return JudgedBuild(
        model=info.model,
        artifact=entry.id,
        backend=info.backend,
        precision=info.precision,
        source=info.source,
        sha256=hash_engine(entry),
        size_bytes=measure_engine(entry),
        macs_share=info.precision_proof.share.counted,
        weights=info.weights.source,
        options=info.options,
        model_sha256=sha256,
    )


def hash_model(manifest: Manifest) -> str:
    """The hash of all that decides an exported model but the batch sizes and shapes that it takes, and the tools' versions."""
    return hash_value({**(manifest.recipe or {}).get("model", {}), "batch": None, "shapes": None})
