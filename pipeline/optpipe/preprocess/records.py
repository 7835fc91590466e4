"""The stored records of a parity proof, and the derived pipeline as an entry of the store."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from optpipe.core.card import ModelCard
from optpipe.core.entries import OutputError
from optpipe.core.errors import StageError
from optpipe.core.events import Listener
from optpipe.core.records import plain_from_record
from optpipe.core.transform import Transform
from optpipe.core.verdict import Verdict
from optpipe.preprocess.dali_pipeline import INPUT, DaliPlan, dali_from_transform, require_dali
from optpipe.preprocess.throughput import ThroughputTuning
from optpipe.workspace.entry import Entry
from optpipe.workspace.environment import get_package_version
from optpipe.workspace.store import Store

Outcome = Literal[
    "equal", "near", "different", "refused by both", "refused by DALI", "refused by Pillow, decoded by DALI"
]
"""Result for an edge-case file; `equal` allows one level."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Absolute differences in 8-bit levels, over images."""

    mean_levels: float = 0.0
    """The mean of the images' means: every image has the same weight, whatever its size."""
    max_levels: float = 0.0
    off_share: float = 0.0
    """Share of levels that differ by more than half a level."""
    images: int = 0


@dataclass(frozen=True, slots=True)
class StepDifference:
    step: str
    cumulative: Difference
    """After the step, including all earlier steps."""
    alone: Difference
    """Difference of the step alone, on the reference's pixels."""


@dataclass(frozen=True, slots=True)
class RefusedImage:
    image: str
    reason: str


@dataclass(frozen=True, slots=True)
class WorstImage:
    image: str
    mean_levels: float
    max_levels: float
    file: str
    """The image of reference, result and difference side by side, in the run's folder."""
    difference_times: float


@dataclass(frozen=True, slots=True)
class EdgeCaseFile:
    name: str
    outcome: Outcome
    mean_levels: float | None = None
    max_levels: float | None = None

    @property
    def matches(self) -> bool:
        return self.outcome in ("equal", "refused by both")


@dataclass(frozen=True, slots=True)
class Agreement:
    """Equal top-1 predictions of both pipelines, with the exact 95% interval of their share."""

    equal: int
    images: int
    share: float
    ci: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Accuracy:
    reference: float
    dali: float


@dataclass(frozen=True, slots=True)
class TaskScore:
    """The first score of a detector or segmenter (AP, mIoU) with both pipelines, as fractions."""

    name: str
    reference: float
    dali: float
    drop: float
    drop_ci: tuple[float, float]
    """95%, over images."""


@dataclass(frozen=True, slots=True)
class PredictionAgreement:
    """The mean over images of the task's parity of predictions, from 0 to 1, with its 95% interval."""

    share: float
    ci: tuple[float, float]
    images: int


@dataclass(frozen=True, slots=True)
class Proof:
    verdict: Verdict
    reason: str
    remedy: str | None
    output: OutputError
    top1_agreement: Agreement | None
    accuracy: Accuracy | None
    task_score: TaskScore | None = None
    prediction_agreement: PredictionAgreement | None = None


@dataclass(frozen=True, slots=True)
class ParityRecord:
    proof: Proof
    images: int
    steps: tuple[StepDifference, ...]
    largest_step: str
    far: int
    refused: tuple[RefusedImage, ...]
    edge_cases: tuple[EdgeCaseFile, ...]
    worst: tuple[WorstImage, ...] = ()


@dataclass(frozen=True, slots=True)
class PipelineRecord:
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
    folder: str
    count: int
    unreadable: tuple[RefusedImage, ...] = ()
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class PreprocessRecord:
    model: str
    classifies: bool
    trained: bool
    """Agreement of random weights proves little."""
    pipeline: PipelineRecord
    images: ImagesRecord
    parity: ParityRecord
    throughput: ThroughputTuning | None
    verdict: Verdict
    """Verdict of the parity proof; speed is reported, not judged."""
    run_dir: str
    warnings: tuple[str, ...] = ()
    task: str | None = None
    """Task of the model; None in records of earlier versions."""
    model_sha256: str | None = None
    """`hash_model` of the exported model of the proof; None in records of earlier versions."""


PIPELINE = "1/model.dali"


@dataclass(frozen=True, slots=True)
class PreprocessingInfo:
    KIND: ClassVar[str] = "preprocessing"

    model: str
    transform_sha256: str
    plan: DaliPlan
    file: str


def build_preprocessing_artifact(
    card: ModelCard, transform: Transform, plan: DaliPlan, model: str, store: Store, listener: Listener
) -> tuple[Entry[PreprocessingInfo], bool]:
    """The serialized pipeline and the transform of the exported `model`.

    The written file is loaded and must give the same tensor as the original pipeline.
    """
    require_dali()
    recipe = {
        "revision": 5,
        "model": model,
        "transform": transform.hash,
        "plan": plain_from_record(plan),
        "dali": get_package_version("nvidia-dali-cuda130"),
    }

    def make(directory: Path) -> PreprocessingInfo:
        target = directory / PIPELINE
        target.parent.mkdir()
        dali_from_transform(transform, plan).serialize(filename=str(target))
        _require_same(target, transform, plan)
        (directory / "transform.json").write_text(json.dumps(transform.to_dict(), indent=1), encoding="utf-8")
        return PreprocessingInfo(card.name, transform.hash, plan, PIPELINE)

    return store.produce(PreprocessingInfo, recipe, make, parents=(model,), listener=listener)


def _require_same(path: Path, transform: Transform, plan: DaliPlan) -> None:
    import numpy as np
    from nvidia.dali.pipeline import Pipeline

    from optpipe.models.inputs.synthetic import make_edge_case_files

    one = replace(plan, batch_size=1)
    device_id = 0 if plan.device == "gpu" else None
    loaded = Pipeline.deserialize(
        filename=str(path), batch_size=1, num_threads=plan.threads, device_id=device_id, prefetch_queue_depth=1
    )
    fresh = dali_from_transform(transform, one, prefetch=1)
    data = np.frombuffer(next(iter(make_edge_case_files()))[1], np.uint8)
    results = []
    for pipeline in (loaded, fresh):
        pipeline.feed_input(INPUT, [data])
        results.append(np.array(pipeline.run()[0].as_cpu()[0]))
    if not np.array_equal(results[0], results[1]):
        raise StageError(f"{path.name}: the serialized pipeline does not reproduce the original pipeline's tensor")
