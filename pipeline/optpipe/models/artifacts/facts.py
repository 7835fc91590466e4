"""Facts about a build from the manifest of a stored artifact."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from optpipe.core.entries import ArtifactInfo, ModelInfo
from optpipe.core.files import Files, hash_value
from optpipe.workspace.entry import Entry, Manifest, UnreadableManifestError, read_manifest


@dataclass(frozen=True, slots=True)
class JudgedBuild:
    model: str
    artifact: str
    backend: str
    precision: str
    source: str = ""
    """MODEL as `build` takes it."""
    sha256: str | None = None
    size_bytes: int | None = None
    macs_share: Mapping[str, float] | None = None
    """Share of MACs per type in the built network."""
    weights: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Runtime options of the build, and the defaults of a run."""
    model_sha256: str | None = None
    """`hash_model` of the exported model; None if its record is missing."""

    @property
    def argument(self) -> str:
        """The MODEL of a command that names its model."""
        from optpipe.models.artifacts.lookup import format_model_argument  # imports every backend and source

        return format_model_argument(self.model, self.source)

    def has_other_file(self, artifact: str | None, sha256: str | None) -> bool:
        """Whether a record of `artifact` is of another file with the build's id, since not every backend is
        reproducible. Records without a hash are from versions that stored none and count as the same file."""
        return artifact == self.artifact and None not in (sha256, self.sha256) and sha256 != self.sha256


def judged_build_from_entry(entry: Entry[ArtifactInfo], exported: Mapping[str, Manifest] | None = None) -> JudgedBuild:
    """The manifest of the model is in `exported`, by id, or lies next to the artifact's."""
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
    """Hash of everything that determines an exported model except batch sizes, shapes, and versions of tools."""
    return hash_value({**(manifest.recipe or {}).get("model", {}), "batch": None, "shapes": None})


def hash_engine(entry: Entry[ArtifactInfo]) -> str:
    """SHA-256 of the main file; with more files, a hash over all names and hashes."""
    names = _list_files(entry)
    return entry.sha256(names[0]) if len(names) == 1 else hash_value({name: entry.sha256(name) for name in names})


def measure_engine(entry: Entry[ArtifactInfo]) -> int:
    return sum(entry.manifest.files[name].size_bytes for name in _list_files(entry))


def _list_files(entry: Entry[ArtifactInfo]) -> tuple[str, ...]:
    return (entry.info.file, *entry.info.more_files)
