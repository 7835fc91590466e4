"""`preprocess.json`: what one `optpipe preprocess` found, as it is stored, shown, and read by those who judge it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from optpipe.core.transform import Transform
from optpipe.core.verdict import Verdict
from optpipe.preprocess.dali.pipeline import DaliPlan
from optpipe.preprocess.parity.records import ParityRecord, RefusedImage
from optpipe.preprocess.throughput import ThroughputTuning


@dataclass(frozen=True, slots=True)
class PipelineRecord:
    """The stored DALI pipeline."""

    id: str
    path: str
    sha256: str
    plan: DaliPlan
    steps: tuple[Mapping[str, Any], ...]
    """As `Transform.to_dict` writes them."""

    @property
    def transform(self) -> Transform:
        return Transform.from_dict({"steps": self.steps})


@dataclass(frozen=True, slots=True)
class ImagesRecord:
    """The images that were used, and which were not."""

    folder: str
    count: int
    unreadable: tuple[RefusedImage, ...] = ()
    left_out: int = 0
    """Beyond the limit."""


@dataclass(frozen=True, slots=True)
class PreprocessRecord:
    """A derived pipeline, its proof, and its speed."""

    model: str
    classifies: bool
    trained: bool
    """Whether the model's weights are trained: agreement of random ones proves little."""
    pipeline: PipelineRecord
    images: ImagesRecord
    parity: ParityRecord
    throughput: ThroughputTuning | None
    verdict: Verdict
    """Of the parity proof; speed is reported, not judged."""
    run_dir: str
    warnings: tuple[str, ...] = ()
    task: str | None = None
    """Of the model; None in records of earlier versions."""
    model_sha256: str | None = None
    """`hash_model` of the exported model that it was proven on; None in records of earlier versions."""
