"""What the manifest of a store entry says of it, for the kinds of entries that several verbs read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from optpipe.core.mixed_precision import MixedPrecision
from optpipe.core.precision import Precision, PrecisionProof
from optpipe.core.weights import WeightsRecord

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class OutputError:
    """One output against its reference; all figures are over all samples together."""

    name: str
    max_abs: float
    mean_abs: float
    relative: float
    """‖got - reference‖ / ‖reference‖."""
    snr_db: float | None
    """20·log10(1 / relative); None where the two are equal to the bit."""
    cosine: float
    finite: bool
    """Of the reference's shape, both without NaN or infinity."""


@dataclass(frozen=True, slots=True)
class LintFinding:
    """One reason why a graph may be slower or less accurate than it could be, at one layer, and what to do about it."""

    rule: str
    layer: str
    message: str
    advice: str


@dataclass(frozen=True, slots=True)
class SampleSetSummary:
    """The samples that something was computed from."""

    name: str
    sha256: str
    count: int
    seed: int


@dataclass(frozen=True, slots=True)
class SkippedLayer:
    """A layer that stays in floating point, and why."""

    layer: str
    reason: str


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """An exported model: `model.onnx` and `card.json`."""

    KIND: ClassVar[str] = "model"

    name: str
    source: str
    weights: WeightsRecord
    simplified: bool
    own_precision: Precision | None
    """INT8 where it comes quantized, FP16 or BF16 where its weights are; None for FP32."""
    card: str | None = None
    """Path of the model card that it was first exported from; a dossier keeps its last part."""


@dataclass(frozen=True, slots=True)
class ReferenceInfo:
    """The source model's outputs on real inputs."""

    KIND: ClassVar[str] = "reference"

    samples_kind: str
    samples: int
    samples_sha256: str
    origin: str
    """What computed the outputs."""
    export_parity: tuple[OutputError, ...]
    """The exported graph against the source model; empty where the source is the graph."""


@dataclass(frozen=True, slots=True)
class VerificationInfo:
    """An artifact's outputs against the source model's."""

    KIND: ClassVar[str] = "verification"

    reference: str
    """What computed the reference outputs."""
    samples: int
    tolerance_relative: float
    snr_db: float | None
    """The smallest of all outputs; None where all are equal to the bit."""
    top1_agreement: float | None
    top1_accuracy: float | None
    source_top1_accuracy: float | None
    outputs: tuple[OutputError, ...]
    values: int
    """How many numbers were compared."""
    passed: bool | None
    """None where the source model's outputs are empty: then nothing was compared."""


@dataclass(frozen=True, slots=True)
class GraphInfo:
    """An ONNX graph with a precision in it."""

    KIND: ClassVar[str] = "graph"

    precision: Precision
    tool: str | None = None
    """What changed the exported graph."""
    target: str | None = None
    """For INT8 and FP8: whose Q/DQ placement it has."""
    method: str | None = None
    set: SampleSetSummary | None = None
    """The calibration set."""
    int8_layers: tuple[str, ...] = ()
    """Those between Q/DQ pairs, in FP8 graphs too."""
    kept: tuple[SkippedLayer, ...] = ()
    lint: tuple[LintFinding, ...] | None = None
    """None where it was not linted."""
    mixed: MixedPrecision | None = None
    """Where it was made within a budget."""


@dataclass(frozen=True, slots=True)
class CalibrationInfo:
    """A calibration set and a table for each method."""

    KIND: ClassVar[str] = "calibration"

    model: str
    set: SampleSetSummary
    methods: tuple[str, ...]
    tensors: int


@dataclass(frozen=True, slots=True)
class LintSummary:
    """What may keep a graph from Tensor Cores."""

    counts: Mapping[str, int] = field(default_factory=dict)
    """By rule, the most frequent first."""
    findings: tuple[LintFinding, ...] = ()
    """The first few."""


@dataclass(frozen=True, slots=True)
class ArtifactInfo:
    """What is built: an engine, a package or an optimized graph, with the proof of its precision."""

    KIND: ClassVar[str] = "artifact"

    model: str
    source: str
    backend: str
    precision: Precision
    device: Device
    file: str
    """The main file in the entry."""
    weights: WeightsRecord
    precision_proof: PrecisionProof
    lint: LintSummary = field(default_factory=LintSummary)
    options: Mapping[str, Any] = field(default_factory=dict)
    """The backend's options that it was built with, and runs with where no others are given."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Facts that only its backend reads, to load it and to tell where it can run."""
    remarks: tuple[str, ...] = ()
    """What its backend found while it built: INT8 or FP8 that does not pay on this GPU."""
    mixed: MixedPrecision | None = None
    """Where it was built within a budget: the layers kept for it."""
    more_files: tuple[str, ...] = ()
    """What it loads beside the main file."""

    @property
    def label(self) -> str:
        """`onnxruntime fp16 (cuda)`."""
        return f"{self.backend} {self.precision} ({self.device})"
