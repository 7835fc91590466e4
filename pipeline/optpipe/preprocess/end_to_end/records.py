"""Files to predictions as records: the job of the process that measures, its answer, and what is stored of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from optpipe.core.verdict import Verdict
from optpipe.preprocess.dali.pipeline import DaliPlan


@dataclass(frozen=True, slots=True)
class EndToEndJob:
    """One artifact to feed from files."""

    workspace: str
    artifact: str
    """Its ID."""
    paths: tuple[str, ...]
    transform: Mapping[str, Any]
    """As `Transform.to_dict` writes it."""
    plan: DaliPlan
    options: Mapping[str, Any]
    """Of the runtime, all of them."""
    seconds: float


@dataclass(frozen=True, slots=True)
class OverlappedBatches:
    """One entry per batch in every list."""

    batch_ns: tuple[int, ...]
    latency_ns: tuple[int, ...]
    """From scheduling a batch until its predictions were there; every image waits for its batch."""
    wait_ns: tuple[int, ...]
    """Waiting for preprocessing."""
    launch_ns: tuple[int, ...]
    output_ns: tuple[int, ...]
    """Waiting for predictions."""


@dataclass(frozen=True, slots=True)
class PartRates:
    """Images per second of each part alone."""

    read: float
    decode: float
    preprocess: float
    inference: float

    @property
    def slower(self) -> float:
        """Of the two that overlap."""
        return min(self.preprocess, self.inference)


@dataclass(frozen=True, slots=True)
class PredictionCheck:
    """Predictions of the timed run beside those of the reference preprocessing through the same artifact."""

    predictions: int
    equal: int
    classes: int
    """Different classes among those of the reference."""


@dataclass(frozen=True, slots=True)
class EndToEndMeasurement:
    """What the process answers."""

    batches: OverlappedBatches
    parts: PartRates
    launch_share: float
    """Of inference alone, the share of the time that launching takes."""
    cpu_share: float
    """Of all cores, while both parts ran."""
    other_cpu_cores: float
    """Cores that other processes kept busy meanwhile."""
    handover: str
    """What is copied between DALI and the runtime."""
    environment: Mapping[str, str | None]
    check: PredictionCheck


@dataclass(frozen=True, slots=True)
class EndToEndBottleneck:
    """What the whole path waits for: `I/O`, `CPU`, `copy`, `GPU`, `launch`, and the numbers that say so."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """Shares of the measured time as the thread that joins the parts spent it."""

    waiting_for_preprocessing: float
    launching: float
    waiting_for_outputs: float
    other: float


@dataclass(frozen=True, slots=True)
class EndToEndFigures:
    """What a measurement says."""

    images_per_s: float
    ci: tuple[float, float] | None
    """95 % interval of the rate; None where too few batches were timed for one."""
    latency_p50_ns: float | None
    """None where the batches are too few for the percentile."""
    latency_p99_ns: float | None
    parts_images_per_s: PartRates
    of_slower_part: float
    """The overlapped rate over that of the slower part alone: at most 1, but for noise."""
    timeline: Timeline
    cpu_share: float
    other_cpu_cores: float
    handover: str
    environment: Mapping[str, str | None]
    """What was set for the process on a GPU, to be set in one's own too."""
    bottleneck: EndToEndBottleneck
    check: PredictionCheck


@dataclass(frozen=True, slots=True)
class EndToEndResult:
    """One artifact fed from files: its figures, or the error in their place."""

    artifact: str
    label: str
    plan: DaliPlan
    options: Mapping[str, Any]
    verdict: Verdict
    figures: EndToEndFigures | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class EndToEndRecord:
    """`end-to-end.json`, and what `optpipe bench-e2e --json` prints."""

    folder: str
    images: int
    images_bytes: int
    results: tuple[EndToEndResult, ...]
    verdict: Verdict
    run_dir: str
    warnings: tuple[str, ...] = ()
