"""What the manifest of a store entry says of it, for the kinds of entries that several verbs read."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from optpipe.core.errors import BadInputError
from optpipe.core.files import hash_file
from optpipe.core.precision import MixedPrecision, Precision, PrecisionProof


@dataclass(frozen=True, slots=True)
class WeightsRequest:
    """`default` (as published), `random` (seeded) or a `file`."""

    kind: Literal["default", "random", "file"] = "default"
    seed: int = 0
    path: Path | None = None

    def recipe(self) -> dict[str, str | int]:
        """What of the request decides the result: a file counts by its content, not by its name."""
        if self.path is not None:
            return {"file": hash_file(self.path)}
        return {"random": self.seed} if self.kind == "random" else {"default": True}


@dataclass(frozen=True, slots=True)
class WeightsRecord:
    source: str
    """`default:NAME` (as published, or as a factory sets them), `random`, `file` or `embedded` (part of an ONNX file)."""
    sha256: str
    """Over names, types, shapes and bytes of all tensors; for an ONNX file over its bytes."""
    seed: int | None = None
    drawn: str | None = None
    """Of a factory's random weights: how many of its tensors depend on the seed, and the first of them."""
    trained: bool = field(init=False, default=True)
    """Whether accuracy can mean anything."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "trained", self.source != "random")


def weights_from_text(text: str, seed: int = 0) -> WeightsRequest:
    """Reads `--weights`: `default`, `random` or `random:SEED`, or the path of a safetensors file or a state dict."""
    kind, _, number = text.partition(":")
    if text == "default" or (kind == "random" and number.isdecimal()) or text == "random":
        return WeightsRequest(kind="random" if kind == "random" else "default", seed=int(number or seed))
    path = Path(text)
    if not path.is_file():
        raise BadInputError(
            f"--weights {text}: no such file; expected default, random, random:SEED, or a .safetensors, .pt or .pth file"
        )
    return WeightsRequest(kind="file", path=path)


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
    """The source model's outputs on the samples that builds are verified on."""

    KIND: ClassVar[str] = "reference"

    samples_kind: str
    """`images`, `texts`, `tensors` or `synthetic`."""
    samples: int
    samples_sha256: str
    origin: str
    """What computed the outputs."""
    export_parity: tuple[OutputError, ...]
    """The exported graph against the source model; empty where the source is the graph."""
    data: str = ""
    """Whose the samples are: `voices.npz, held out from calibration`; empty in records of earlier versions."""
    held_out: tuple[str, ...] = ()
    """The hashes of the samples that are kept out of calibration."""
    constant: bool = False
    """Whether the outputs are the same for every sample."""


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
    data: str = ""
    """Whose the samples are, as in the reference."""


@dataclass(frozen=True, slots=True)
class GraphInfo:
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
    KIND: ClassVar[str] = "calibration"

    model: str
    set: SampleSetSummary
    methods: tuple[str, ...]
    tensors: int


@dataclass(frozen=True, slots=True)
class LintSummary:
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


ENGINE_LAYERS = "layers.json"
"""The record in an artifact."""


@dataclass(frozen=True, slots=True)
class EngineLayer:
    name: str
    op: str
    inputs: tuple[str, ...]
    """The type, and where known the format, of each input."""
    outputs: tuple[str, ...]
    tactic: str | None = None
    """The kernel that the builder chose; None where only the network is known."""


@dataclass(frozen=True, slots=True)
class EngineLayers:
    origin: str
    """`engine inspector`, or why only the parsed network is known."""
    layers: tuple[EngineLayer, ...]

    def count_types(self) -> dict[str, int]:
        """How many layers there are by the type of their first input, the most frequent first."""
        counted = Counter(layer.inputs[0] for layer in self.layers if layer.inputs)
        return dict(counted.most_common())


@dataclass(frozen=True, slots=True)
class Gpu:
    index: int
    name: str
    compute_capability: str
    """Such as `9.0`."""
    memory_bytes: int
    driver: str


@dataclass(frozen=True, slots=True)
class Environment:
    """Versions, devices and driver; names neither the host nor its user."""

    python: str = "none"
    platform: str = "none"
    cpu: str = "none"
    cpu_count: int | None = None
    packages: Mapping[str, str] = field(default_factory=dict)
    """The version of every installed distribution that a build or a measurement depends on."""
    gpus: tuple[Gpu, ...] = ()

    def get_fact(self, key: str) -> str:
        """One fact by its policy name: `gpu`, `driver`, `cpu`, `python`, `packages.NAME`; or "none"."""
        facts = {"cpu": self.cpu, "python": self.python, "platform": self.platform}
        if self.gpus:
            facts |= {"gpu": self.gpus[0].name, "driver": self.gpus[0].driver}
        return self.packages.get(key.removeprefix("packages."), "none") if "." in key else facts.get(key, "none")
