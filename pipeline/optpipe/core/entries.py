"""Records in the manifests of store entries that several verbs read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from optpipe.core.errors import BadInputError
from optpipe.core.files import hash_file
from optpipe.core.precision import MixedPrecision, Precision, PrecisionProof
from optpipe.core.wording import Argument


@dataclass(frozen=True, slots=True)
class WeightsRequest:
    """`default` (as published), `random` (seeded) or a `file`."""

    kind: Literal["default", "random", "file"] = "default"
    seed: int = 0
    path: Path | None = None

    def recipe(self) -> dict[str, str | int]:
        """Recipe of the weights; a file counts by its content, not by its name."""
        if self.path is not None:
            return {"file": hash_file(self.path)}
        return {"random": self.seed} if self.kind == "random" else {"default": True}


@dataclass(frozen=True, slots=True)
class WeightsRecord:
    source: str
    """`default:NAME` (as published, or set by a factory), `random`, `file`, `embedded` (in an ONNX file); of a module in memory
    `asserted` if the user says that it is trained, otherwise `unknown`."""
    sha256: str
    """Over names, types, shapes and bytes of all tensors; over the file's bytes for ONNX."""
    seed: int | None = None
    drawn: str | None = None
    """For a factory's random weights: how many tensors depend on the seed, and the first of them."""
    converted_from: str | None = field(default=None, kw_only=True)
    """`float16`, `bfloat16`, or `float64`: the type of a module that was converted to float32; None for others."""
    trained: bool = field(init=False, default=True)
    """False for random weights, whose accuracy is meaningless, and for weights about which nobody says anything."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "trained", self.source not in ("random", "unknown"))

    @property
    def own_precision(self) -> Precision:
        """The precision whose rounding the source model's own outputs have."""
        own = {"float16": Precision.FP16, "bfloat16": Precision.BF16}
        return own.get(str(self.converted_from), Precision.FP32)


def weights_from_text(text: str, seed: int = 0) -> WeightsRequest:
    """Reads `--weights`: `default`, `random`, `random:SEED`, or the path of a safetensors file or a state dict."""
    kind, _, number = text.partition(":")
    if text == "default" or (kind == "random" and number.isdecimal()) or text == "random":
        return WeightsRequest(
            kind="random" if kind == "random" else "default", seed=int(number or seed)
        )
    path = Path(text)
    if not path.is_file():
        raise BadInputError(
            "no such file; expected default, random, random:SEED, or a .safetensors, .pt or .pth file",
            argument=Argument("weights", text),
        )
    return WeightsRequest(kind="file", path=path)


Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class OutputError:
    name: str
    max_abs: float
    mean_abs: float
    relative: float
    """‖got - reference‖ / ‖reference‖."""
    snr_db: float | None
    """20·log10(1 / relative); None if bitwise equal."""
    cosine: float
    finite: bool
    """Whether the shape is the reference's and neither has NaN or infinity."""


@dataclass(frozen=True, slots=True)
class SampleSetSummary:
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
    """INT8 or FP8 if the model comes quantized, FP16 or BF16 if its weights are; None for FP32."""
    left_out: tuple[str, ...] = ()
    """What a module's forward returns besides tensors, such as `past_key_values (DynamicCache)`."""
    card: str | None = None
    """Path of the model card at the first export, relative to the workspace's folder if it lies there; a dossier keeps only the
    name of a file elsewhere."""
    remarks: tuple[str, ...] = ()
    """What was left out of the exported graph, and why; empty in records of earlier versions."""
    content: str = ""
    """The model's ID (`models.identity.compute_content_id`); empty in records of earlier versions."""


@dataclass(frozen=True, slots=True)
class RecoveryStep:
    """One step of `--recover`, judged on samples that it did not see."""

    name: str
    did: str
    """`12 corrected biases`."""
    snr_db: float | None = None
    """Of the quantized graph after the step, the lowest of its outputs."""
    gain_db: float | None = None
    """How much the SNR of a sample rises on average; None for the ranges, which come first."""
    gain_ci: tuple[float, float] | None = None
    drop: float | None = None
    drop_ci: tuple[float, float] | None = None
    seconds: float = 0.0
    kept: bool = False


@dataclass(frozen=True, slots=True)
class RecoveredInfo(ModelInfo):
    """The graph of a model in FP32 after steps of `--recover`: `model.onnx` and `card.json`."""

    KIND: ClassVar[str] = "recovered"

    steps: tuple[RecoveryStep, ...] = ()
    """All that were tried; empty for the graph of one step."""


@dataclass(frozen=True, slots=True)
class ReferenceInfo:
    KIND: ClassVar[str] = "reference"

    samples_kind: str
    """`images`, `texts`, `tensors` or `synthetic`."""
    samples: int
    samples_sha256: str
    origin: str
    export_parity: tuple[OutputError, ...]
    """The exported graph against the source model; empty if the source is the graph."""
    data: str = ""
    """Origin of the samples: `voices.npz, held out from calibration`; empty in records of earlier versions."""
    held_out: tuple[str, ...] = ()
    """Hashes of the samples that are held out of calibration."""
    constant: bool = False
    """Whether the outputs are equal for all samples."""


@dataclass(frozen=True, slots=True)
class VerificationInfo:
    KIND: ClassVar[str] = "verification"

    reference: str
    samples: int
    tolerance_relative: float
    snr_db: float | None
    """Minimum over all outputs; None if all are bitwise equal."""
    top1_agreement: float | None
    top1_accuracy: float | None
    source_top1_accuracy: float | None
    outputs: tuple[OutputError, ...]
    values: int
    passed: bool | None
    """None if the source model's outputs are empty, so that nothing was compared."""
    data: str = ""
    selected: tuple[str, ...] = ()
    """Outputs whose rows NonMaxSuppression or TopK selects: their order and number may differ where the boxes are the same."""
    box_agreement: float | None = None
    """Mean F1 of a detector's boxes over the samples in which either model finds any; replaces the errors of `selected` outputs."""
    steps: int | None = None
    """Steps of the trajectory, if there is one."""
    trajectory: tuple[OutputError, ...] = ()
    """The error of the state after `steps` steps, which does not count in `passed`."""

    @property
    def by_boxes(self) -> tuple[str, ...]:
        """Outputs without an error, since their values cannot be compared one by one."""
        return () if self.box_agreement is None else self.selected


@dataclass(frozen=True, slots=True)
class GraphInfo:
    KIND: ClassVar[str] = "graph"

    precision: Precision
    tool: str | None = None
    """Tool that changed the exported graph."""
    target: str | None = None
    """For INT8 and FP8: the backend that the Q/DQ placement is for."""
    method: str | None = None
    set: SampleSetSummary | None = None
    int8_layers: tuple[str, ...] = ()
    """Layers between Q/DQ pairs, in FP8 graphs too."""
    kept: tuple[SkippedLayer, ...] = ()
    mixed: MixedPrecision | None = None
    """None if it was made without a budget."""
    ranges: str = ""
    """Of a model that comes quantized: which of its ranges and weights the graph has bit for bit."""
    remarks: tuple[str, ...] = ()
    """What was changed in the graph of a model that comes quantized."""
    recovery: tuple[RecoveryStep, ...] = ()
    """The steps of `--recover`, the ranges first; empty without it."""


@dataclass(frozen=True, slots=True)
class CalibrationInfo:
    KIND: ClassVar[str] = "calibration"

    model: str
    set: SampleSetSummary
    methods: tuple[str, ...]
    tensors: int


@dataclass(frozen=True, slots=True)
class ArtifactInfo:
    """A built engine, package or optimized graph, with the proof of its precision."""

    KIND: ClassVar[str] = "artifact"

    model: str
    source: str
    backend: str
    precision: Precision
    device: Device
    file: str
    weights: WeightsRecord
    precision_proof: PrecisionProof
    options: Mapping[str, Any] = field(default_factory=dict)
    """Backend options of the build, which are also the defaults of a run."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Facts for its backend alone, to load it and to tell where it can run."""
    remarks: tuple[str, ...] = ()
    """Findings of the backend during the build, such as INT8 that does not pay on this GPU."""
    mixed: MixedPrecision | None = None
    """None if it was built without a budget."""
    more_files: tuple[str, ...] = ()
    """Files that it loads besides the main file."""
    ranges: str = ""
    """Of a model that comes quantized: which of its ranges and weights the build has bit for bit."""
    recovery: tuple[RecoveryStep, ...] = ()
    """The steps of `--recover`, the ranges first; empty without it."""
    packages: tuple[str, ...] = ()
    """The distributions whose versions decide how it behaves, the runtime's first; empty in entries of earlier versions."""

    @property
    def label(self) -> str:
        """`onnxruntime fp16 (cuda)`."""
        return f"{self.backend} {self.precision} ({self.device})"


@dataclass(frozen=True, slots=True)
class Gpu:
    index: int
    name: str
    compute_capability: str
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
    """Versions of the installed distributions that builds and measurements depend on."""
    gpus: tuple[Gpu, ...] = ()

    def get_fact(self, key: str) -> str:
        """A fact by its policy name (`gpu`, `driver`, `cpu`, `python`, `packages.NAME`), or "none"."""
        facts = {"cpu": self.cpu, "python": self.python, "platform": self.platform}
        if self.gpus:
            facts |= {"gpu": self.gpus[0].name, "driver": self.gpus[0].driver}
        return (
            self.packages.get(key.removeprefix("packages."), "none")
            if "." in key
            else facts.get(key, "none")
        )
