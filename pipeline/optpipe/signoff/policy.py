"""A release policy: what a build must prove before it may ship. TOML in, a frozen value out; nothing is guessed.

Format history
    1  first version.

Every limit carries its unit. A key that is not known, a limit that cannot hold and two limits that contradict each
other are refused with the place in the file. `SECTIONS` is the one description of the format: the parser and the JSON
Schema (`core.policy_schema`) both read it.
"""

import hashlib
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import StrEnum
from typing import Any

from optpipe.core.measurement import option_text
from optpipe.core.quantity import Dimension, quantity, quantity_text
from optpipe.errors import BadInputError
from optpipe.signoff.load_filter import NARROWING, Where, where_from_table

SCHEMA_VERSION = 1
PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "int8", "fp8")


class Sense(StrEnum):
    """How an observation is held against its limit."""

    AT_MOST = "at most"
    AT_LEAST = "at least"
    EQUALS = "is"


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit that a section may set."""

    sense: Sense
    dimension: Dimension
    doc: str


@dataclass(frozen=True, slots=True)
class Section:
    """One kind of criterion: its limits, and whether it can be narrowed to a batch size, scenario or mode."""

    doc: str
    limits: Mapping[str, Limit]
    measured: bool = False


def _at_most(dimension: Dimension, doc: str) -> Limit:
    return Limit(Sense.AT_MOST, dimension, doc)


def _at_least(dimension: Dimension, doc: str) -> Limit:
    return Limit(Sense.AT_LEAST, dimension, doc)


_PERCENTILES = ("p50", "p90", "p95", "p99", "p99.9")
SECTIONS: Mapping[str, Section] = {
    "latency": Section(
        "Longest time a query may take, by percentile of the raw samples.",
        {name: _at_most(Dimension.TIME, f"Limit of the {name} latency.") for name in _PERCENTILES},
        measured=True,
    ),
    "throughput": Section(
        "Images per second.",
        {"minimum": _at_least(Dimension.RATE, "Fewest images per second.")},
        measured=True,
    ),
    "regression": Section(
        "Largest loss against the approved baseline, held against the interval's bound.",
        {
            **{name: _at_most(Dimension.SHARE, f"Largest rise of the {name} latency.") for name in _PERCENTILES},
            "throughput": _at_most(Dimension.SHARE, "Largest fall of the throughput."),
        },
        measured=True,
    ),
    "memory": Section(
        "Peak memory: of the device on a GPU, of the process on the CPU.",
        {"maximum": _at_most(Dimension.SIZE, "Largest peak memory.")},
        measured=True,
    ),
    "energy": Section(
        "Energy per image; approximate, from the driver's counter.",
        {"maximum": _at_most(Dimension.ENERGY, "Largest energy per image.")},
        measured=True,
    ),
    "stability": Section(
        "How steady the runtime is.",
        {"maximum_cv": _at_most(Dimension.SHARE, "Largest coefficient of variation of the latency.")},
        measured=True,
    ),
    "accuracy": Section(
        "Task accuracy on the validation set, on paired predictions.",
        {
            "maximum_drop": _at_most(Dimension.POINTS, "Largest loss of top-1 accuracy against the source model."),
            "minimum_top1": _at_least(Dimension.SHARE, "Lowest top-1 accuracy."),
            "minimum_agreement": _at_least(Dimension.SHARE, "Lowest share of answers equal to the source model's."),
        },
    ),
    "preprocessing": Section(
        "Agreement of the fast preprocessing with the model's own transform, on the model's outputs.",
        {
            "minimum_agreement": _at_least(Dimension.SHARE, "Lowest top-1 agreement."),
            "minimum_snr": _at_least(Dimension.DECIBEL, "Lowest signal-to-noise ratio of the outputs."),
        },
    ),
    "precision": Section(
        "Share of the multiply-adds that run in a type, proven from the built network.",
        {name: _at_least(Dimension.SHARE, f"Lowest share of multiply-adds in {name}.") for name in PRECISIONS},
    ),
    "size": Section("Size of the engine file.", {"maximum": _at_most(Dimension.SIZE, "Largest file.")}),
    "tensor_cores": Section(
        "Share of the kernel time that could use Tensor Cores and does, from the profile.",
        {"minimum_share": _at_least(Dimension.SHARE, "Lowest share.")},
    ),
}
"""The sections that hold quantities. `[environment]` holds names instead and is described by ENVIRONMENT_KEYS."""

ENVIRONMENT_KEYS = {
    "gpu": 'Name of the GPU, or "none".',
    "driver": "Version of the NVIDIA driver.",
    "cpu": "Model name of the CPU.",
    "python": "Version of Python.",
}
BUILD_KEYS = ("artifact", "backend", "precision")


@dataclass(frozen=True, slots=True)
class Criterion:
    """One limit of a policy. `threshold` is in the base unit of `dimension`; of an environment criterion, a name."""

    section: str
    metric: str
    sense: Sense
    threshold: float | str
    dimension: Dimension | None = None
    where: Where = field(default_factory=Where)

    @property
    def name(self) -> str:
        """What `--waive` and reports call it: `latency.p99.b8.single-stream`."""
        return f"{self.section}.{self.metric}{self.where.slug()}"

    @property
    def threshold_text(self) -> str:
        """`at most 15.0 ms`, `is NVIDIA H200`."""
        if isinstance(self.threshold, str) or self.dimension is None:
            return f"{self.sense} {self.threshold}"
        return f"{self.sense} {quantity_text(self.threshold, self.dimension)}"


@dataclass(frozen=True, slots=True)
class Policy:
    """A parsed policy; `source` is the text it was read from, byte for byte."""

    name: str
    criteria: tuple[Criterion, ...]
    source: bytes
    model: str | None = None
    build: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    """Runtime options, as they are typed: only what was measured with them is judged."""
    confidence: float = 0.95

    @property
    def sha256(self) -> str:
        """Of the text, comments included."""
        return hashlib.sha256(self.source).hexdigest()


def policy_from_toml(source: bytes, origin: str = "the policy") -> Policy:
    """Parses a policy. Raises BadInputError naming `origin`, the key and what to write instead."""
    try:
        document = tomllib.loads(source.decode("utf-8-sig"))  # editors on Windows write a byte order mark
        return _policy(document, source)
    except UnicodeDecodeError as error:
        raise BadInputError(f"{origin}: not UTF-8 text (byte {error.start})") from error
    except tomllib.TOMLDecodeError as error:
        raise BadInputError(f"{origin}: not TOML: {error}") from error
    except ValueError as error:
        raise BadInputError(f"{origin}: {error}") from error


def _policy(document: Mapping[str, Any], source: bytes) -> Policy:
    version = document.get("schema")
    if version != SCHEMA_VERSION or type(version) is not int:
        stated = "no schema version" if version is None else f"schema version {version}"
        raise ValueError(
            f"{stated}; this optpipe reads `schema = {SCHEMA_VERSION}` (optpipe signoff --init writes a template)"
        )
    _known(document, ("schema", "name", "model", "confidence", "build", "environment", *SECTIONS), "the top level")
    criteria = (*_environment(document), *(one for section in SECTIONS for one in _section(section, document)))
    if not criteria:
        raise ValueError(
            "no criterion: a policy without one would pass anything; optpipe signoff --init writes a template"
        )
    build, options = _build(document.get("build", {}))
    if build.get("precision", PRECISIONS[0]) not in PRECISIONS:
        raise ValueError(f"build.precision = {build['precision']!r}: one of {', '.join(PRECISIONS)}")
    _refuse_contradictions(criteria, build)
    return Policy(
        name=_text(document, "name") or "unnamed policy",
        criteria=criteria,
        source=source,
        model=_text(document, "model"),
        build=build,
        options=options,
        confidence=_confidence(document),
    )


def _build(table: object) -> tuple[dict[str, str], dict[str, str]]:
    """Which build, and with which options it has to run."""
    options = table.get("options", {}) if isinstance(table, dict) else {}
    names = {key: value for key, value in table.items() if key != "options"} if isinstance(table, dict) else table
    if not isinstance(options, dict):
        raise ValueError("build.options must be a table: write [build.options] and below it for example threads = 2")
    for key, value in options.items():
        if not isinstance(value, bool | int | float) and not _is_name(value):
            raise ValueError(f"build.options.{key} = {value!r} must be a number, true, false or a name in quotes")
    return _names(names, BUILD_KEYS, "build"), {key: option_text(value) for key, value in options.items()}


def _confidence(document: Mapping[str, Any]) -> float:
    value = quantity(document["confidence"], Dimension.SHARE) if "confidence" in document else 0.95
    if not 0.5 <= value < 1:
        raise ValueError(f"confidence = {document['confidence']!r}: between 50 % and below 100 %")
    return value


def _section(name: str, document: Mapping[str, Any]) -> Iterator[Criterion]:
    tables = document.get(name, [])
    if isinstance(tables, dict):
        tables = [tables]
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ValueError(f"{name} must be a table: write [[{name}]] and its limits below")
    section = SECTIONS[name]
    for number, table in enumerate(tables, start=1):
        place = f"[[{name}]] number {number}" if len(tables) > 1 else f"[[{name}]]"
        narrowing = NARROWING if section.measured else ()
        _known(table, (*section.limits, *narrowing), place)
        where = where_from_table(table, place)
        chosen = [metric for metric in table if metric in section.limits]
        if not chosen:
            raise ValueError(f"{place} sets no limit; it takes {', '.join(section.limits)}")
        for metric in chosen:
            limit = section.limits[metric]
            threshold = _threshold(table[metric], limit, f"{place}: {metric}")
            yield Criterion(name, metric, limit.sense, threshold, limit.dimension, where)


def _threshold(value: object, limit: Limit, place: str) -> float:
    try:
        threshold = quantity(value, limit.dimension)
    except ValueError as error:
        raise ValueError(f"{place} = {error}") from error
    bounded = limit.dimension in (Dimension.SHARE, Dimension.POINTS) and limit.sense is Sense.AT_LEAST
    if bounded and threshold > 1:
        raise ValueError(f'{place} = "{value}" can never be met: at most 100 %')
    if threshold == 0 and limit.sense is Sense.AT_LEAST:
        raise ValueError(f'{place} = "{value}" is met by anything; leave it out or set a real limit')
    if threshold == 0 and limit.dimension in (Dimension.TIME, Dimension.SIZE, Dimension.ENERGY):
        raise ValueError(f'{place} = "{value}" can never be met')
    return threshold


def _environment(document: Mapping[str, Any]) -> Iterator[Criterion]:
    table = document.get("environment", {})
    if not isinstance(table, dict):
        raise ValueError(
            'environment must be a table: write [environment] and below it for example gpu = "NVIDIA H200"'
        )
    packages = _names(table.get("packages", {}), None, "environment.packages")
    names = _names({key: value for key, value in table.items() if key != "packages"}, ENVIRONMENT_KEYS, "environment")
    for key, value in names.items():
        yield Criterion("environment", key, Sense.EQUALS, value)
    for key, value in packages.items():
        yield Criterion("environment", f"packages.{key}", Sense.EQUALS, value)


def _refuse_contradictions(criteria: tuple[Criterion, ...], build: Mapping[str, str]) -> None:
    by_name: dict[str, Criterion] = {}
    for one in criteria:
        if one.name in by_name:
            raise ValueError(
                f"{one.name} is limited twice: {by_name[one.name].threshold_text} and {one.threshold_text}; keep one"
            )
        by_name[one.name] = one
    for one in criteria:
        if one.section == "latency":
            _refuse_inverted(one, criteria)
    shares = {one.metric: one.threshold for one in criteria if one.section == "precision"}
    total = sum(float(share) for share in shares.values())
    if total > 1 + 1e-9:
        raise ValueError(
            f"precision: {' and '.join(shares)} together ask for {quantity_text(total, Dimension.SHARE)} of the work"
        )
    gpu = by_name.get("environment.gpu")
    if gpu is not None and gpu.threshold == "none":
        for one in criteria:
            if one.section in ("energy", "tensor_cores") or one.name == "environment.driver":
                raise ValueError(f'{one.name} needs a GPU, and environment.gpu = "none" forbids one')
    wanted = build.get("precision")
    if wanted is not None:
        for metric, share in shares.items():
            if metric != wanted and float(share) > 0.5:
                raise ValueError(f"precision.{metric} contradicts build.precision = {wanted!r}")


def _refuse_inverted(one: Criterion, criteria: tuple[Criterion, ...]) -> None:
    for other in criteria:
        comparable = other.section == "latency" and other.where == one.where
        higher = comparable and float(other.metric[1:]) > float(one.metric[1:])
        if higher and float(other.threshold) < float(one.threshold):
            raise ValueError(
                f"{one.name} ({one.threshold_text}) can never decide: {other.metric} is held to "
                f"{other.threshold_text} already; the limit of a lower percentile must be the smaller one"
            )


def _names(table: object, allowed: Mapping[str, str] | tuple[str, ...] | None, place: str) -> dict[str, str]:
    if not isinstance(table, dict):
        raise ValueError(f"{place} must be a table of names")
    if allowed is not None:
        _known(table, tuple(allowed), f"[{place}]")
    for key, value in table.items():
        if not _is_name(value):
            raise ValueError(f"{place}.{key} = {value!r} must be a name in quotes")
    return dict(table)


def _text(document: Mapping[str, Any], key: str) -> str | None:
    value = document.get(key)
    if value is not None and not _is_name(value):
        raise ValueError(f"{key} = {value!r} must be a name in quotes")
    return None if value is None else str(value)


def _is_name(value: object) -> bool:
    """Text with something to read and no control characters, which no report could carry."""
    return isinstance(value, str) and bool(value.strip()) and value.isprintable()


def _known(table: Mapping[str, Any], allowed: tuple[str, ...], place: str) -> None:
    for key in table:
        if key not in allowed:
            near = get_close_matches(key, allowed, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(allowed)}"
            raise ValueError(f"unknown key {key!r} in {place}; {hint}")
