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

from optpipe.core.measurement import format_option
from optpipe.core.quantity import Dimension, format_quantity, quantity_from_text
from optpipe.errors import BadInputError
from optpipe.signoff.load_filter import FILTER_KEYS, LoadFilter, load_filter_from_table

POLICY_SCHEMA_VERSION = 1
POLICY_PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "int8", "fp8")


class Sense(StrEnum):
    """How an observation is held against its limit."""

    AT_MOST = "at most"
    AT_LEAST = "at least"
    EQUALS = "is"


@dataclass(frozen=True, slots=True)
class LimitSpec:
    """One limit that a section may set."""

    sense: Sense
    dimension: Dimension
    doc: str


@dataclass(frozen=True, slots=True)
class PolicySection:
    """One kind of criterion: its limits, and whether it can be narrowed to a batch size, scenario or mode."""

    doc: str
    limits: Mapping[str, LimitSpec]
    measured: bool = False


def _limit_at_most(dimension: Dimension, doc: str) -> LimitSpec:
    return LimitSpec(Sense.AT_MOST, dimension, doc)


def _limit_at_least(dimension: Dimension, doc: str) -> LimitSpec:
    return LimitSpec(Sense.AT_LEAST, dimension, doc)


_PERCENTILES = ("p50", "p90", "p95", "p99", "p99.9")
SECTIONS: Mapping[str, PolicySection] = {
    "latency": PolicySection(
        "Maximum query latency, by percentile of the raw samples.",
        {name: _limit_at_most(Dimension.TIME, f"Limit of the {name} latency.") for name in _PERCENTILES},
        measured=True,
    ),
    "throughput": PolicySection(
        "Images per second.",
        {"minimum": _limit_at_least(Dimension.RATE, "Minimum images per second.")},
        measured=True,
    ),
    "regression": PolicySection(
        "Maximum loss compared with the approved baseline, tested against the bound of its interval.",
        {
            **{
                name: _limit_at_most(Dimension.SHARE, f"Maximum increase of the {name} latency.")
                for name in _PERCENTILES
            },
            "throughput": _limit_at_most(Dimension.SHARE, "Maximum decrease of the throughput."),
        },
        measured=True,
    ),
    "memory": PolicySection(
        "Peak memory: device memory on a GPU, process memory on a CPU.",
        {"maximum": _limit_at_most(Dimension.SIZE, "Maximum peak memory.")},
        measured=True,
    ),
    "energy": PolicySection(
        "Energy per image; approximate, from the driver's counter.",
        {"maximum": _limit_at_most(Dimension.ENERGY, "Maximum energy per image.")},
        measured=True,
    ),
    "stability": PolicySection(
        "Stability of the runtime.",
        {"maximum_cv": _limit_at_most(Dimension.SHARE, "Maximum coefficient of variation of the latency.")},
        measured=True,
    ),
    "accuracy": PolicySection(
        "Task accuracy on the validation set, on paired predictions.",
        {
            "maximum_drop": _limit_at_most(Dimension.POINTS, "Maximum drop in top-1 accuracy from the source model."),
            "minimum_top1": _limit_at_least(Dimension.SHARE, "Minimum top-1 accuracy."),
            "minimum_agreement": _limit_at_least(
                Dimension.SHARE, "Minimum share of predictions equal to the source model's."
            ),
        },
    ),
    "preprocessing": PolicySection(
        "Agreement between DALI and the model's own preprocessing, measured on the model's outputs.",
        {
            "minimum_agreement": _limit_at_least(Dimension.SHARE, "Minimum top-1 agreement."),
            "minimum_snr": _limit_at_least(Dimension.DECIBEL, "Minimum signal-to-noise ratio of the outputs."),
        },
    ),
    "precision": PolicySection(
        "Share of the MACs that run in a precision, verified in the built network.",
        {name: _limit_at_least(Dimension.SHARE, f"Minimum share of MACs in {name}.") for name in POLICY_PRECISIONS},
    ),
    "size": PolicySection("Size of the engine file.", {"maximum": _limit_at_most(Dimension.SIZE, "Largest file.")}),
    "tensor_cores": PolicySection(
        "Share of Tensor Core eligible kernel time that uses Tensor Cores, from the profile.",
        {"minimum_share": _limit_at_least(Dimension.SHARE, "Minimum share.")},
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
    where: LoadFilter = field(default_factory=LoadFilter)

    @property
    def name(self) -> str:
        """What `--waive` and reports call it: `latency.p99.b8.single-stream`."""
        return f"{self.section}.{self.metric}{self.where.to_slug()}"

    @property
    def threshold_text(self) -> str:
        """`at most 15.0 ms`, `is NVIDIA H200`."""
        if isinstance(self.threshold, str) or self.dimension is None:
            return f"{self.sense} {self.threshold}"
        return f"{self.sense} {format_quantity(self.threshold, self.dimension)}"


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
        return _policy_from_document(document, source)
    except UnicodeDecodeError as error:
        raise BadInputError(f"{origin}: not UTF-8 text (byte {error.start})") from error
    except tomllib.TOMLDecodeError as error:
        raise BadInputError(f"{origin}: not TOML: {error}") from error
    except ValueError as error:
        raise BadInputError(f"{origin}: {error}") from error


def _policy_from_document(document: Mapping[str, Any], source: bytes) -> Policy:
    version = document.get("schema")
    if version != POLICY_SCHEMA_VERSION or type(version) is not int:
        stated = "no schema version" if version is None else f"schema version {version}"
        raise ValueError(
            f"{stated}; this version of optpipe reads `schema = {POLICY_SCHEMA_VERSION}` (optpipe signoff --init writes a template)"
        )
    _require_known_keys(
        document, ("schema", "name", "model", "confidence", "build", "environment", *SECTIONS), "the top level"
    )
    criteria = (
        *_read_environment(document),
        *(one for section in SECTIONS for one in _read_section(section, document)),
    )
    if not criteria:
        raise ValueError("the policy has no criteria; run optpipe signoff --init for a template")
    build, options = _read_build(document.get("build", {}))
    if build.get("precision", POLICY_PRECISIONS[0]) not in POLICY_PRECISIONS:
        raise ValueError(f"build.precision = {build['precision']!r}: must be one of {', '.join(POLICY_PRECISIONS)}")
    _refuse_contradictions(criteria, build)
    return Policy(
        name=_read_text(document, "name") or "unnamed policy",
        criteria=criteria,
        source=source,
        model=_read_text(document, "model"),
        build=build,
        options=options,
        confidence=_read_confidence(document),
    )


def _read_build(table: object) -> tuple[dict[str, str], dict[str, str]]:
    """Which build, and with which options it has to run."""
    options = table.get("options", {}) if isinstance(table, dict) else {}
    names = {key: value for key, value in table.items() if key != "options"} if isinstance(table, dict) else table
    if not isinstance(options, dict):
        raise ValueError("build.options must be a table, for example [build.options] followed by threads = 2")
    for key, value in options.items():
        if not isinstance(value, bool | int | float) and not _is_name(value):
            raise ValueError(f"build.options.{key} = {value!r} must be a number, a boolean, or a quoted string")
    return _read_names(names, BUILD_KEYS, "build"), {key: format_option(value) for key, value in options.items()}


def _read_confidence(document: Mapping[str, Any]) -> float:
    value = quantity_from_text(document["confidence"], Dimension.SHARE) if "confidence" in document else 0.95
    if not 0.5 <= value < 1:
        raise ValueError(f"confidence = {document['confidence']!r}: must be at least 50 % and less than 100 %")
    return value


def _read_section(name: str, document: Mapping[str, Any]) -> Iterator[Criterion]:
    tables = document.get(name, [])
    if isinstance(tables, dict):
        tables = [tables]
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ValueError(f"{name} must be a table: write [[{name}]] followed by its limits")
    section = SECTIONS[name]
    for number, table in enumerate(tables, start=1):
        place = f"[[{name}]] number {number}" if len(tables) > 1 else f"[[{name}]]"
        narrowing = FILTER_KEYS if section.measured else ()
        _require_known_keys(table, (*section.limits, *narrowing), place)
        where = load_filter_from_table(table, place)
        chosen = [metric for metric in table if metric in section.limits]
        if not chosen:
            raise ValueError(f"{place} sets no limit; available limits: {', '.join(section.limits)}")
        for metric in chosen:
            limit = section.limits[metric]
            threshold = _read_threshold(table[metric], limit, f"{place}: {metric}")
            yield Criterion(name, metric, limit.sense, threshold, limit.dimension, where)


def _read_threshold(value: object, limit: LimitSpec, place: str) -> float:
    try:
        threshold = quantity_from_text(value, limit.dimension)
    except ValueError as error:
        raise ValueError(f"{place} = {error}") from error
    bounded = limit.dimension in (Dimension.SHARE, Dimension.POINTS) and limit.sense is Sense.AT_LEAST
    if bounded and threshold > 1:
        raise ValueError(f'{place} = "{value}" can never be met: the maximum is 100 %')
    if threshold == 0 and limit.sense is Sense.AT_LEAST:
        raise ValueError(f'{place} = "{value}" is always met; remove it or set a meaningful limit')
    if threshold == 0 and limit.dimension in (Dimension.TIME, Dimension.SIZE, Dimension.ENERGY):
        raise ValueError(f'{place} = "{value}" can never be met')
    return threshold


def _read_environment(document: Mapping[str, Any]) -> Iterator[Criterion]:
    table = document.get("environment", {})
    if not isinstance(table, dict):
        raise ValueError('environment must be a table, for example [environment] followed by gpu = "NVIDIA H200"')
    packages = _read_names(table.get("packages", {}), None, "environment.packages")
    names = _read_names(
        {key: value for key, value in table.items() if key != "packages"}, ENVIRONMENT_KEYS, "environment"
    )
    for key, value in names.items():
        yield Criterion("environment", key, Sense.EQUALS, value)
    for key, value in packages.items():
        yield Criterion("environment", f"packages.{key}", Sense.EQUALS, value)


def _refuse_contradictions(criteria: tuple[Criterion, ...], build: Mapping[str, str]) -> None:
    by_name: dict[str, Criterion] = {}
    for one in criteria:
        if one.name in by_name:
            raise ValueError(
                f"{one.name} has two limits: {by_name[one.name].threshold_text} and {one.threshold_text}; keep one"
            )
        by_name[one.name] = one
    for one in criteria:
        if one.section == "latency":
            _refuse_inverted(one, criteria)
    shares = {one.metric: one.threshold for one in criteria if one.section == "precision"}
    total = sum(float(share) for share in shares.values())
    if total > 1 + 1e-9:
        raise ValueError(
            f"precision: {' and '.join(shares)} add up to {format_quantity(total, Dimension.SHARE)} of the MACs"
        )
    gpu = by_name.get("environment.gpu")
    if gpu is not None and gpu.threshold == "none":
        for one in criteria:
            if one.section in ("energy", "tensor_cores") or one.name == "environment.driver":
                raise ValueError(f'{one.name} requires a GPU, but environment.gpu = "none"')
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
                f"{one.name} ({one.threshold_text}) has no effect: {other.metric} is already limited to "
                f"{other.threshold_text}; a lower percentile needs a smaller limit"
            )


def _read_names(table: object, allowed: Mapping[str, str] | tuple[str, ...] | None, place: str) -> dict[str, str]:
    if not isinstance(table, dict):
        raise ValueError(f"{place} must be a table of strings")
    if allowed is not None:
        _require_known_keys(table, tuple(allowed), f"[{place}]")
    for key, value in table.items():
        if not _is_name(value):
            raise ValueError(f"{place}.{key} = {value!r} must be a quoted string")
    return dict(table)


def _read_text(document: Mapping[str, Any], key: str) -> str | None:
    value = document.get(key)
    if value is not None and not _is_name(value):
        raise ValueError(f"{key} = {value!r} must be a quoted string")
    return None if value is None else str(value)


def _is_name(value: object) -> bool:
    """Text with something to read and no control characters, which no report could carry."""
    return isinstance(value, str) and bool(value.strip()) and value.isprintable()


def _require_known_keys(table: Mapping[str, Any], allowed: tuple[str, ...], place: str) -> None:
    for key in table:
        if key not in allowed:
            near = get_close_matches(key, allowed, n=1)
            hint = f"did you mean {near[0]}?" if near else f"valid keys: {', '.join(allowed)}"
            raise ValueError(f"unknown key {key!r} in {place}; {hint}")
