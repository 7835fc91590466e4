"""A build as evidence and comparisons know it: its names, hash, shares of the precisions, and packages."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from optpipe.core.entries import ArtifactInfo, ModelInfo
from optpipe.core.files import Files
from optpipe.core.precision import PrecisionShare
from optpipe.core.wording import IN_MEMORY, Call
from optpipe.models.artifacts.engine_files import hash_engine, hash_model, measure_engine
from optpipe.models.artifacts.model_names import choose_way, format_model_argument
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
    share: PrecisionShare | None = None
    """The shares of the types in the built network."""
    weights: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Runtime options of the build, and the defaults of a run."""
    model_sha256: str | None = None
    """`hash_model` of the exported model; None if its record is missing."""
    packages: tuple[str, ...] = ()
    """The distributions whose versions decide how it behaves; empty in entries of earlier versions."""

    @property
    def argument(self) -> str:
        """The MODEL of a command that names its model."""
        return format_model_argument(self.model, self.source)

    @property
    def in_memory(self) -> bool:
        """Whether it is of a module in memory, which no command can name."""
        return self.source.startswith(IN_MEMORY)

    def choose_way(self, call: Call) -> str:
        """`call`, whose MODEL is this build's; for a module in memory the library's wording, empty if the library lacks it."""
        return choose_way(call, self.source)

    def has_other_file(self, artifact: str | None, sha256: str | None) -> bool:
        """Whether a record of `artifact` is of another file with the build's id, since not every backend is
        reproducible. Records without a hash are from versions that stored none and count as the same file."""
        return (
            artifact == self.artifact
            and None not in (sha256, self.sha256)
            and sha256 != self.sha256
        )


def judged_build_from_entry(
    entry: Entry[ArtifactInfo], exported: Mapping[str, Manifest] | None = None
) -> JudgedBuild:
    """The manifest of the model is in `exported`, by id, or lies next to the artifact's."""
    info, model, sha256 = entry.info, next(iter(entry.manifest.parents), ""), None
    if exported is not None:
        sha256 = hash_model(exported[model]) if model in exported else None
    else:
        with suppress(UnreadableManifestError):
            sha256 = hash_model(
                read_manifest(Files(entry.path.parent / f"{ModelInfo.KIND}-{model}"))
            )
    return JudgedBuild(
        model=info.model,
        artifact=entry.id,
        backend=info.backend,
        precision=info.precision,
        source=info.source,
        sha256=hash_engine(entry),
        size_bytes=measure_engine(entry),
        share=info.precision_proof.share,
        weights=info.weights.source,
        options=info.options,
        model_sha256=sha256,
        packages=info.packages,
    )
