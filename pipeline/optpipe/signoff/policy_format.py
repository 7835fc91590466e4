"""The format of a release policy (TOML): structs for msgspec, which also makes its JSON Schema.

Every limit has a unit. `policy` checks keys against each other and names the line of an error.
"""

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Annotated, ClassVar, Literal, get_args

import msgspec
from msgspec import Meta, Struct

from optpipe.core.measurement import Mode, Scenario, format_option
from optpipe.core.plan import BATCH, LENGTH, MODE, RATE, SCENARIO, STREAMS
from optpipe.core.precision import Precision
from optpipe.core.quantity import Dimension, choose_dimension, quantity_from_text, score_from_text

MAX_COUNT = 1_000_000


class Sense(StrEnum):
    AT_MOST = "at most"
    AT_LEAST = "at least"
    EQUALS = "is"


class Limit(float):
    """A limit in the base unit of its dimension, written as text with a unit."""

    sense: ClassVar[Sense]
    dimension: Dimension
    """The dimension of the type, or the one that the limit's unit names."""
    score: str | None = None
    """The score that a limit in points names: `AP` of `"0.5 AP"`."""

    def __init_subclass__(cls, sense: Sense, dimension: Dimension) -> None:
        cls.sense, cls.dimension = sense, dimension

    @classmethod
    def from_toml(cls, value: object) -> "Limit":
        """Raises ValueError for an invalid limit, and for one that is always or never met."""
        found, least = quantity_from_text(value, cls.dimension), cls.sense is Sense.AT_LEAST
        if found == 0 and cls.dimension is Dimension.QUERIES:
            raise ValueError(f'invalid rate "{value}": it must be greater than zero')
        if least and cls.dimension in (Dimension.SHARE, Dimension.NUMBER) and found > 1:
            largest = "100%" if cls.dimension is Dimension.SHARE else "1"
            raise ValueError(f'"{value}" can never be met: the maximum is {largest}')
        if found == 0 and least:
            raise ValueError(f'"{value}" is always met; remove it or set a meaningful limit')
        if found == 0 and cls.dimension in (Dimension.TIME, Dimension.SIZE, Dimension.ENERGY):
            raise ValueError(f'"{value}" can never be met')
        if least and cls.dimension is Dimension.POINTS and found > 100:
            raise ValueError(f'"{value}" can never be met: the maximum is 100 points')
        limit = cls(found)
        counted = "sample" if isinstance(value, str) and "sample" in value else "image"
        limit.score, limit.dimension = score_from_text(value), choose_dimension(cls.dimension, counted)
        return limit


class MaxTime(Limit, sense=Sense.AT_MOST, dimension=Dimension.TIME):
    """Maximum time."""


class MaxShare(Limit, sense=Sense.AT_MOST, dimension=Dimension.SHARE):
    """Maximum share."""


class MaxDrop(Limit, sense=Sense.AT_MOST, dimension=Dimension.POINTS):
    """Maximum drop in percentage points of the task's first score, or of the score that it names."""


class MinScore(Limit, sense=Sense.AT_LEAST, dimension=Dimension.POINTS):
    """Minimum score, out of 100 points, of the task's first score, or of the score that it names."""


class MaxSize(Limit, sense=Sense.AT_MOST, dimension=Dimension.SIZE):
    """Maximum size."""


class MaxEnergy(Limit, sense=Sense.AT_MOST, dimension=Dimension.ENERGY):
    """Maximum energy per image or sample."""


class MinRate(Limit, sense=Sense.AT_LEAST, dimension=Dimension.RATE):
    """Minimum images or samples per second."""


class MinShare(Limit, sense=Sense.AT_LEAST, dimension=Dimension.SHARE):
    """Minimum share."""


class MinRatio(Limit, sense=Sense.AT_LEAST, dimension=Dimension.DECIBEL):
    """Minimum signal-to-noise ratio."""


class MinCosine(Limit, sense=Sense.AT_LEAST, dimension=Dimension.NUMBER):
    """Minimum cosine similarity."""


class MaxError(Limit, sense=Sense.AT_MOST, dimension=Dimension.NUMBER):
    """Maximum absolute error, in the output's own unit."""


class QueryRate(Limit, sense=Sense.AT_LEAST, dimension=Dimension.QUERIES):
    """Queries per second that arrive in the server scenario."""


class Name(str):
    """Printable text that is not blank."""

    __slots__ = ()

    @classmethod
    def from_toml(cls, value: object) -> "Name":
        if not (isinstance(value, str) and value.strip() and value.isprintable()):
            raise ValueError(f"{value!r} must be a quoted string without control characters")
        return cls(value)


class OptionText(str):
    """A runtime option as typed on the command line; in TOML a number, a boolean, or a quoted string."""

    __slots__ = ()

    @classmethod
    def from_toml(cls, value: object) -> "OptionText":
        if not isinstance(value, bool | int | float | str):
            raise ValueError(f"{value!r} must be a number, a boolean, or a quoted string")
        return cls(format_option(Name.from_toml(value) if isinstance(value, str) else value))


class Table(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


Count = Annotated[int, Meta(ge=1, le=MAX_COUNT)]


class LoadFilter(Table, frozen=True):
    """Selects measurements; None selects all."""

    batch_size: Annotated[Count | None, BATCH] = None
    length: Annotated[Count | None, LENGTH] = None
    scenario: Annotated[Scenario | None, SCENARIO] = None
    mode: Annotated[Mode | None, MODE] = None
    streams: Annotated[Count | None, STREAMS] = None
    rate: Annotated[QueryRate | None, RATE] = None

    def to_slug(self) -> str:
        """`.b8.single-stream`, `.b1.server.500qps`; empty without a filter."""
        batch = None if self.batch_size is None else f"b{self.batch_size}"
        length = None if self.length is None else f"l{self.length}"
        streams = None if self.streams is None else f"{self.streams}x"
        rate = None if self.rate is None else f"{self.rate:g}qps"
        return "".join(f".{part}" for part in (batch, length, self.scenario, streams, rate, self.mode) if part)

    def to_text(self) -> str:
        """`batch 8, single-stream`; empty without a filter."""
        batch = None if self.batch_size is None else f"batch {self.batch_size}"
        length = None if self.length is None else f"length {self.length}"
        streams = None if self.streams is None else f"{self.streams} streams"
        rate = None if self.rate is None else f"{self.rate:g} queries/s"
        return ", ".join(str(part) for part in (batch, length, self.scenario, streams, rate, self.mode) if part)

    def __bool__(self) -> bool:
        return self != LoadFilter()


class Section(Table, frozen=True):
    def __post_init__(self) -> None:
        """Raises ValueError for a table without a limit."""
        if not list(self.list_limits()):
            raise ValueError(f"sets no limit; available limits: {', '.join(list_metrics(type(self)))}")

    def list_limits(self) -> Iterator[tuple[str, Limit]]:
        for one in msgspec.structs.fields(self):
            value = getattr(self, one.name)
            if isinstance(value, Limit) and one.name not in LoadFilter.__struct_fields__:
                yield one.encode_name, value


class MeasuredSection(Section, LoadFilter, frozen=True):
    """A section about measurements, which may name a load."""

    def __post_init__(self) -> None:
        """Raises ValueError if a scenario lacks its load, or a load its scenario."""
        super().__post_init__()
        pairs = (("server", "rate", '"500 queries/s"'), ("multi-stream", "streams", "4"))
        for scenario, key, example in pairs:
            given = getattr(self, key) is not None
            if self.scenario == scenario and not given:
                raise ValueError(f"scenario '{scenario}' requires {key}; for example {key} = {example}")
            if given and self.scenario != scenario and not (key == "streams" and self.scenario == "offline"):
                raise ValueError(f'{key} requires scenario = "{scenario}"')

    @property
    def where(self) -> LoadFilter:
        return LoadFilter(**{name: getattr(self, name) for name in LoadFilter.__struct_fields__})


class Latency(MeasuredSection, frozen=True):
    """Maximum query latency: p50 as the mean over processes, others over all requests, `mean_p99` as p50."""

    p50: MaxTime | None = None
    p90: MaxTime | None = None
    p95: MaxTime | None = None
    p99: MaxTime | None = None
    p99_9: MaxTime | None = msgspec.field(default=None, name="p99.9")
    mean_p90: MaxTime | None = None
    mean_p95: MaxTime | None = None
    mean_p99: MaxTime | None = None


class Throughput(MeasuredSection, frozen=True):
    """Images, or samples of another kind, per second."""

    minimum: MinRate | None = None


class Regression(MeasuredSection, frozen=True):
    """Maximum loss compared with the approved baseline, tested against the bound of its interval."""

    p50: MaxShare | None = None
    p90: MaxShare | None = None
    p95: MaxShare | None = None
    p99: MaxShare | None = None
    p99_9: MaxShare | None = msgspec.field(default=None, name="p99.9")
    throughput: MaxShare | None = None


class Memory(MeasuredSection, frozen=True):
    """Peak memory: device memory on a GPU, process memory on a CPU."""

    maximum: MaxSize | None = None


class Energy(MeasuredSection, frozen=True):
    """Energy per image or sample; approximate, from the driver's counter."""

    maximum: MaxEnergy | None = None


class Stability(MeasuredSection, frozen=True):
    """Stability of the runtime: coefficient of variation of the latency."""

    maximum_cv: MaxShare | None = None


class Accuracy(Section, frozen=True):
    """The task's scores on the validation set, on paired predictions with the source model."""

    maximum_drop: MaxDrop | None = None
    minimum_score: MinScore | None = None
    minimum_top1: MinShare | None = None
    minimum_agreement: MinShare | None = None


class Preprocessing(Section, frozen=True):
    """Agreement between DALI and the model's own preprocessing, measured on the model's outputs."""

    minimum_agreement: MinShare | None = None
    minimum_snr: MinRatio | None = None


class Outputs(Section, frozen=True):
    """The build's outputs against the source model's, on the samples that the build was verified on."""

    output: Name | None = None
    """Without a name, every output is limited."""
    minimum_snr: MinRatio | None = None
    minimum_cosine: MinCosine | None = None
    minimum_agreement: MinShare | None = None
    """Share of places of the largest values along the last axis."""
    maximum_abs_error: MaxError | None = None


class PrecisionShare(Section, frozen=True):
    """Share of the MACs that run in a precision, verified in the built network."""

    fp32: MinShare | None = None
    tf32: MinShare | None = None
    fp16: MinShare | None = None
    bf16: MinShare | None = None
    int8: MinShare | None = None
    fp8: MinShare | None = None


class Size(Section, frozen=True):
    """Size of the engine file."""

    maximum: MaxSize | None = None


class TensorCores(Section, frozen=True):
    """Share of Tensor Core eligible kernel time that uses Tensor Cores, from the profile."""

    minimum_share: MinShare | None = None


class BuildFilter(Table, frozen=True):
    """Which build is judged, and with which runtime options it has to be measured."""

    artifact: Name | None = None
    backend: Name | None = None
    precision: Precision | None = None
    options: dict[str, OptionText] = {}

    def list_wanted(self) -> dict[str, str]:
        """`artifact`, `backend` and `precision`, where they are given."""
        wanted = {"artifact": self.artifact, "backend": self.backend, "precision": self.precision}
        return {key: str(value) for key, value in wanted.items() if value is not None}


class EvidenceRules(Table, frozen=True):
    """Which evidence decides."""

    preregistered: bool = False
    """Only runs that started after a sign-off first used the policy."""


class EnvironmentFilter(Table, frozen=True):
    """Where the figures must come from: the GPU's name or "none", the CPU's, and the versions of driver, Python, packages."""

    gpu: Name | None = None
    driver: Name | None = None
    cpu: Name | None = None
    python: Name | None = None
    packages: dict[str, Name] = {}


class PolicyDocument(Table, frozen=True):
    """A release policy as it is written. A section may be one table or an array of tables."""

    schema: Literal[1]
    name: Name | None = None
    model: Name | None = None
    confidence: MinShare | None = None
    build: BuildFilter = BuildFilter()
    evidence: EvidenceRules = EvidenceRules()
    environment: EnvironmentFilter = EnvironmentFilter()
    latency: Latency | tuple[Latency, ...] = ()
    throughput: Throughput | tuple[Throughput, ...] = ()
    regression: Regression | tuple[Regression, ...] = ()
    memory: Memory | tuple[Memory, ...] = ()
    energy: Energy | tuple[Energy, ...] = ()
    stability: Stability | tuple[Stability, ...] = ()
    accuracy: Accuracy | tuple[Accuracy, ...] = ()
    preprocessing: Preprocessing | tuple[Preprocessing, ...] = ()
    outputs: Outputs | tuple[Outputs, ...] = ()
    precision: PrecisionShare | tuple[PrecisionShare, ...] = ()
    size: Size | tuple[Size, ...] = ()
    tensor_cores: TensorCores | tuple[TensorCores, ...] = ()


SECTIONS: Mapping[str, type[Section]] = {
    one.encode_name: get_args(one.type)[0] for one in msgspec.structs.fields(PolicyDocument) if one.default == ()
}
"""The tables of limits by name, in the order of the criteria."""


def list_keys(section: type[Table]) -> list[str]:
    return [one.encode_name for one in msgspec.structs.fields(section)]


def list_metrics(section: type[Section]) -> list[str]:
    narrowing = LoadFilter.__struct_fields__ if issubclass(section, LoadFilter) else ("output",)
    return [name for name in list_keys(section) if name not in narrowing]
