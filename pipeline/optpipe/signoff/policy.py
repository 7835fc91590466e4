"""A release policy (TOML): its format as structs for msgspec, and its reading into criteria.

Every limit has a unit. Errors name the line of an unknown key, of a limit that cannot hold, and of limits that contradict each
other.
"""

import hashlib
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import StrEnum
from math import inf, log
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

import msgspec
from msgspec import Meta, Struct

from optpipe.core.errors import BadInputError
from optpipe.core.measurement import MEAN, Mode, Scenario, format_option, percent_from_name
from optpipe.core.plan import BATCH, LENGTH, MODE, RATE, SCENARIO, STREAMS
from optpipe.core.precision import Precision
from optpipe.core.quantity import Dimension, choose_dimension, format_quantity, quantity_from_text, score_from_text
from optpipe.evaluate.tasks.detection import PARITY_SCORE, SCORE_THRESHOLDS

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


class ScoreThreshold(float):
    """The score from which a detector's boxes count: a multiple of 5%."""

    @classmethod
    def from_toml(cls, value: object) -> "ScoreThreshold":
        found = quantity_from_text(value, Dimension.SHARE)
        if min(abs(found - each) for each in SCORE_THRESHOLDS) > 1e-9:
            raise ValueError(f'"{value}" must be 5%, 10%, …, or 95%')
        return cls(found)


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
    maximum_f1_drop: MaxDrop | None = None
    """The drop of F1 of a detector at `at_threshold`."""
    at_threshold: ScoreThreshold | None = None
    """By default 25%."""

    def __post_init__(self) -> None:
        """Raises ValueError for a threshold without the limit that it belongs to."""
        super().__post_init__()
        if self.at_threshold is not None and self.maximum_f1_drop is None:
            raise ValueError("at_threshold is the score of maximum_f1_drop, which is not limited")

    @property
    def f1(self) -> str:
        return f"F1@{self.at_threshold or PARITY_SCORE:.0%}"


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
    """The GPU's name or "none", the CPU's name, and the versions of driver, Python, and packages that a figure must come from."""

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
    narrowing = LoadFilter.__struct_fields__ if issubclass(section, LoadFilter) else ("output", "at_threshold")
    return [name for name in list_keys(section) if name not in narrowing]


@dataclass(frozen=True, slots=True)
class Criterion:
    """One limit of a policy. `threshold` is in the base unit of `dimension`; a name for environment criteria."""

    section: str
    metric: str
    sense: Sense
    threshold: float | str
    dimension: Dimension | None = None
    where: LoadFilter = field(default_factory=LoadFilter)
    score: str | None = None
    """The task's score, if the limit names one."""
    output: str | None = None
    """The output, if the section names one."""

    @property
    def name(self) -> str:
        """The name for `--waive` and reports: `latency.p99.b8.single-stream`, `accuracy.maximum_drop.AP50`."""
        parts = (f"{self.section}.{self.metric}{self.where.to_slug()}", self.score, self.output)
        return ".".join(part for part in parts if part)

    @property
    def limit(self) -> str:
        """`at most 15.0 ms`, `is NVIDIA H200`."""
        if isinstance(self.threshold, str) or self.dimension is None:
            return f"{self.sense} {self.threshold}"
        text = format_quantity(self.threshold, self.dimension)
        return f"{self.sense} {text.replace('points', self.score) if self.score else text}"

    def measure_distance(self, value: float) -> float:
        """Absolute log ratio of a time, rate, or loss to the limit; infinite if one is not positive."""
        one, other = self.base + value, self.base + float(self.threshold)
        return abs(log(one) - log(other)) if one > 0 and other > 0 else inf

    @property
    def base(self) -> float:
        """Added to a figure to make a ratio: a loss is a ratio minus one."""
        return 1.0 if self.section == "regression" else 0.0


@dataclass(frozen=True, slots=True)
class Policy:
    """A parsed policy; `source` is its text, byte for byte."""

    name: str
    criteria: tuple[Criterion, ...]
    source: bytes
    model: str | None = None
    build: BuildFilter = field(default_factory=BuildFilter)
    confidence: float = 0.95
    preregistered: bool = False

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.source).hexdigest()

    @property
    def options(self) -> Mapping[str, str]:
        """Runtime options as typed; only measurements with them are judged."""
        return {key: str(value) for key, value in self.build.options.items()}


def policy_from_toml(source: bytes, origin: str = "the policy") -> Policy:
    """Raises BadInputError with `origin`, the line, the key, and a correction."""
    try:
        text = source.decode("utf-8-sig")  # editors on Windows write a byte order mark
        document = tomllib.loads(text)
    except UnicodeDecodeError as error:
        raise BadInputError(f"{origin}: not UTF-8 text (byte {error.start})") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise BadInputError(f"{origin}: not TOML: {error}") from error
    version = document.get("schema")
    if version != 1 or type(version) is not int:
        stated = "no schema version" if version is None else f"schema version {version}"
        raise BadInputError(
            f"{origin}: {stated}; this version of optpipe reads `schema = 1` (optpipe signoff --init writes a template)"
        )
    try:
        parsed = msgspec.convert(document, PolicyDocument, dec_hook=lambda kind, value: kind.from_toml(value))
        return _policy_from_document(parsed, source)
    except msgspec.ValidationError as error:
        raise BadInputError(f"{origin}{_locate_error(str(error), document, text)}") from error
    except ValueError as error:
        raise BadInputError(f"{origin}: {error}") from error


def _policy_from_document(document: PolicyDocument, source: bytes) -> Policy:
    criteria = tuple(_list_criteria(document))
    if not criteria:
        raise ValueError("the policy has no criteria; run optpipe signoff --init for a template")
    confidence = 0.95 if document.confidence is None else float(document.confidence)
    if not 0.5 <= confidence < 1:
        raise ValueError(
            f'confidence = "{format_quantity(confidence, Dimension.SHARE)}": must be at least 50% and less than 100%'
        )
    _refuse_contradictions(criteria, document.build.precision)
    return Policy(
        name=str(document.name or "unnamed policy"),
        criteria=criteria,
        source=source,
        model=str(document.model) if document.model else None,
        build=document.build,
        confidence=confidence,
        preregistered=document.evidence.preregistered,
    )


def _list_criteria(document: PolicyDocument) -> Iterator[Criterion]:
    wanted = document.environment
    names = {key: getattr(wanted, key) for key in list_keys(EnvironmentFilter) if key != "packages"}
    for key, value in (*names.items(), *((f"packages.{key}", value) for key, value in wanted.packages.items())):
        if value is not None:
            yield Criterion("environment", key, Sense.EQUALS, str(value))
    for name in SECTIONS:
        tables = getattr(document, name)
        for table in tables if isinstance(tables, tuple) else (tables,):
            where = table.where if isinstance(table, MeasuredSection) else LoadFilter()
            output = str(table.output) if isinstance(table, Outputs) and table.output else None
            for metric, limit in table.list_limits():
                score = limit.score
                if isinstance(table, Accuracy) and metric == "maximum_f1_drop":
                    if score not in (None, "F1"):
                        raise ValueError(
                            f"accuracy.maximum_f1_drop is a drop of F1, not of {score}: write it in points"
                        )
                    score = table.f1
                yield Criterion(name, metric, limit.sense, float(limit), limit.dimension, where, score, output)


def _refuse_contradictions(criteria: tuple[Criterion, ...], wanted: Precision | None) -> None:
    by_name: dict[str, Criterion] = {}
    for one in criteria:
        if one.name in by_name:
            raise ValueError(f"{one.name} has two limits: {by_name[one.name].limit} and {one.limit}; keep one")
        by_name[one.name] = one
    for one in criteria:
        for other in criteria if one.section == "latency" else ():
            alike = other.metric.startswith(MEAN) == one.metric.startswith(MEAN)
            comparable = other.section == "latency" and other.where == one.where and alike
            higher = comparable and percent_from_name(other.metric) > percent_from_name(one.metric)
            if higher and float(other.threshold) < float(one.threshold):
                raise ValueError(
                    f"{one.name} ({one.limit}) has no effect: {other.metric} is already limited to "
                    f"{other.limit}; a lower percentile needs a smaller limit"
                )
    shares = {one.metric: float(one.threshold) for one in criteria if one.section == "precision"}
    if (total := sum(shares.values())) > 1 + 1e-9:
        raise ValueError(
            f"precision: {' and '.join(shares)} add up to {format_quantity(total, Dimension.SHARE)} of the MACs"
        )
    gpu = by_name.get("environment.gpu")
    if gpu is not None and gpu.threshold == "none":
        for one in criteria:
            if one.section in ("energy", "tensor_cores") or one.name == "environment.driver":
                raise ValueError(f'{one.name} requires a GPU, but environment.gpu = "none"')
    for metric, share in shares.items():
        if wanted is not None and metric != wanted and share > 0.5:
            raise ValueError(f'precision.{metric} contradicts build.precision = "{wanted}"')


_PLACE = re.compile(r"^(?P<what>.*?)(?: - at `\$\.(?P<path>.*)`)?$", re.DOTALL)
_STEPS = re.compile(r"(?P<section>\w+)(?:\[(?P<number>\d+)\])?(?:\.(?P<key>.+?))?(?:\[\.\.\.\])?")
_WORDS = {
    "`object`": "a table", "`object | array`": "a table or an array of tables", "`array`": "an array",
    "`int`": "an integer", "`str`": "a quoted string", ", got": ", not",
}  # fmt: skip
_CHOICES = {"scenario": Scenario, "mode": Mode, "precision": Precision}


def _locate_error(message: str, document: Mapping[str, Any], text: str) -> str:
    """Adds the line, the key, and the value to an error of msgspec: `, line 4: latency.p99 = 15 has no unit; …`."""
    found = _PLACE.fullmatch(message)
    assert found is not None
    steps = _STEPS.fullmatch(found["path"] or "")
    section, number, key = (steps["section"], int(steps["number"] or 0), steps["key"]) if steps else ("", 0, None)
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", found["what"], re.DOTALL):
        key, said = unknown[1], _suggest_key(unknown[1], section)
    else:
        value = document[section][number] if steps and steps["number"] else document[section]
        value = value[key] if key else value
        said = ".".join(filter(None, (section, key))) + _explain_value(found["what"], value, key or section)
    line = _find_line(text, section, number, key)
    return f"{f', line {line}' if line else ''}: {said}"


def _explain_value(what: str, value: object, key: str) -> str:
    """` = 15 has no unit`, ` = 0: expected an integer >= 1`; `: sets no limit` for a table."""
    if "Invalid enum value" in what:
        what = f"must be one of {', '.join(_CHOICES[key])}"
    for name, words in _WORDS.items():
        what = what.replace(name, words)
    what = what[0].lower() + what[1:]
    if isinstance(value, Mapping):
        return f": {what}"
    return f" = {what}" if what.startswith((str(value), repr(value), f'"{value}"')) else f" = {value!r}: {what}"


def _suggest_key(key: str, section: str) -> str:
    tables: dict[str, type[Table]] = {
        "": PolicyDocument, "build": BuildFilter, "evidence": EvidenceRules, "environment": EnvironmentFilter,
    }  # fmt: skip
    known = list_keys({**tables, **SECTIONS}[section])
    near = get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"valid keys: {', '.join(known)}"
    return f"unknown key {key!r} in {f'[{section}]' if section else 'the top level'}; {hint}"


def _find_line(text: str, section: str, number: int, key: str | None) -> int | None:
    """The line of a key, or of its table's header; None for TOML that is not written line by line."""
    header, count, found = "", -1, None
    for at, line in enumerate(text.splitlines(), start=1):
        if table := re.match(r"\s*\[+\s*([^\]\s]+)", line):
            header = table[1]
            count += header == section
            found = at if header == (section or key) and count in (number, -1) else found
        elif header == "" or (header == section and count == number):
            name = re.match(r"\s*[\"']?([^\s\"'=]+)[\"']?\s*=", line)
            if name and name[1] == (key or section):
                return at
    return found


TEMPLATE = Path(__file__).with_name("policy-template.toml")
POLICY_SCHEMA = Path(__file__).with_name("policy.schema.json")
"""The JSON Schema of `PolicyDocument` for editors, written by `.ci/schemas.py`."""


def read_policy_template(*, labeled: bool = True) -> str:
    """The commented, valid template. For a model without labels it limits the outputs, not the accuracy."""
    text = TEMPLATE.read_text(encoding="utf-8")
    if labeled:
        return text
    text = text.replace("\n[accuracy]\nmaximum_drop", "\n# [accuracy]\n# maximum_drop")
    return text.replace("\n# [outputs]", "\n[outputs]").replace('\n# minimum_snr = "30 dB"', '\nminimum_snr = "30 dB"')
