"""A release policy (TOML): the keys of its tables, and its reading into criteria.

Every limit has a unit. Errors name the line of an unknown key, of a limit that cannot hold, and of limits that contradict each
other.
"""

import hashlib
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import exp, inf, log
from pathlib import Path
from typing import Annotated, Any

from optpipe.core.errors import BadInputError
from optpipe.core.files import read_user_bytes
from optpipe.core.load import Mode, Scenario
from optpipe.core.metrics.contract import Metric
from optpipe.core.metrics.registry import METRICS, PLUGINS, find_metric
from optpipe.core.metrics.sampled import PLUGIN_SCORES, is_score_name
from optpipe.core.metrics.scores import ERROR_NAMES, F1, SCORE_NAMES
from optpipe.core.metrics.sections import (
    ACCURACY,
    DROP,
    ENVIRONMENT,
    F1_DROP,
    JUDGED,
    LATENCY,
    LEAST_KEY,
    LEAST_SCORE,
    MIN_SHARE,
    MORE_METRICS,
    MORE_SCORES,
    MOST_KEY,
    OUTPUTS,
    PRECISION,
    SECTIONS,
    SPEEDUP,
    Limit,
    Section,
    Sense,
    explain_no_limit,
)
from optpipe.core.params import BATCH, LENGTH, MODE, RATE, SCENARIO, STREAMS
from optpipe.core.precision import Precision
from optpipe.core.quantity import (
    Dimension,
    choose_dimension,
    format_quantity,
    quantity_from_text,
    score_from_text,
)
from optpipe.core.settings import format_option
from optpipe.core.suggestions import suggest_names
from optpipe.core.toml import parse_toml
from optpipe.core.wording import Call, Message
from optpipe.evaluate.tasks.box_agreement import PARITY_SCORE
from optpipe.evaluate.tasks.detection import SCORE_THRESHOLDS

MAX_COUNT = 1_000_000
NEVER_ZERO = Dimension.TIME, Dimension.SIZE, Dimension.ENERGY, Dimension.POWER
"""Dimensions in which nothing meets a limit of zero."""

QUERY_RATE = Sense.AT_LEAST, Dimension.QUERIES
SCORE_THRESHOLD = Sense.EQUALS, Dimension.SHARE
"""The score from which a detector's boxes count: a multiple of 5%."""
LIMITS: Mapping[str, Mapping[str, Limit]] = {table.name: table.limits for table in JUDGED}
"""The limits in each table, in the order of the criteria. A table may be an array of tables."""
OPTIONS, PACKAGES = "options", "packages"
Kind = Limit | type | str
"""The value of a key: a limit, a choice, a count (`int`), printable text, a table of options, or one of packages' versions."""
LOAD: Mapping[str, Kind] = {
    "batch_size": int, "length": int, "scenario": Scenario, "mode": Mode, "streams": int, "rate": QUERY_RATE,
}  # fmt: skip
TABLES: Mapping[str, Mapping[str, Kind]] = {
    "": {"schema": int, "name": str, "model": str, "confidence": MIN_SHARE},
    "build": {"artifact": str, "backend": str, "precision": Precision, "options": OPTIONS},
    "evidence": {"preregistered": bool},
    ENVIRONMENT.name: {"gpu": str, "driver": str, "cpu": str, "python": str, "packages": PACKAGES},
    **{table.name: {**(LOAD if table.is_measured else {}), **table.limits} for table in JUDGED},
    SPEEDUP.name: {"over": str, "batch_size": int, "length": int, **SPEEDUP.limits},
    ACCURACY.name: {**ACCURACY.limits, "at_threshold": SCORE_THRESHOLD},
    OUTPUTS.name: {"output": str, "steps": int, **OUTPUTS.limits},
    MORE_METRICS.name: {},
    MORE_SCORES.name: {},
}
"""The keys of each table of a policy; of the document itself for an empty name."""

_PLUGIN_TABLES: Mapping[str, Mapping[str, Kind]] = {
    MORE_METRICS.name: {**LOAD, MOST_KEY: str, LEAST_KEY: str},
    MORE_SCORES.name: MORE_SCORES.limits,
}
"""The keys of `[metrics.NAME]` and of `[scores.NAME]`."""


@dataclass(frozen=True, slots=True)
class LoadFilter:
    """Selects measurements; None selects all."""

    batch_size: Annotated[int | None, BATCH] = None
    length: Annotated[int | None, LENGTH] = None
    scenario: Annotated[Scenario | None, SCENARIO] = None
    mode: Annotated[Mode | None, MODE] = None
    streams: Annotated[int | None, STREAMS] = None
    rate: Annotated[float | None, RATE] = None

    def to_slug(self) -> str:
        """`.b8.single-stream`, `.b1.server.500qps`; empty without a filter."""
        return "".join(
            f".{part}" for part in self._list_parts("b{}", "l{}", "{}", "{}x", "{:g}qps", "{}")
        )

    def to_text(self) -> str:
        """`batch 8, single-stream`; empty without a filter."""
        return ", ".join(
            self._list_parts("batch {}", "length {}", "{}", "{} streams", "{:g} queries/s", "{}")
        )

    def _list_parts(self, *forms: str) -> Iterator[str]:
        given = self.batch_size, self.length, self.scenario, self.streams, self.rate, self.mode
        return (
            form.format(value)
            for form, value in zip(forms, given, strict=True)
            if value is not None
        )

    def __bool__(self) -> bool:
        return self != LoadFilter()


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
    steps: int | None = None
    """The steps of a trajectory, whose state is judged in place of the outputs."""
    over: str | None = None
    """The precision, or the ID, of the build that a speedup is over."""

    @property
    def name(self) -> str:
        """The name for `--waive` and reports: `latency.p99.b8.single-stream`, `accuracy.maximum_drop.AP50`."""
        state = self.steps and f"{self.steps}-steps"
        parts = (
            f"{self.section}.{self.metric}{self.where.to_slug()}",
            self.score,
            self.output,
            state,
            self.over and f"over-{self.over}",
        )
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
        observed, limit = self.base + value, self.base + float(self.threshold)
        return abs(log(observed) - log(limit)) if observed > 0 and limit > 0 else inf

    def move_limit(self, distance: float) -> float:
        """The limit of a time, rate, or loss, loosened by `distance`, the logarithm of a ratio."""
        side = -1 if self.sense is Sense.AT_LEAST else 1
        return (self.base + float(self.threshold)) * exp(side * distance) - self.base

    @property
    def base(self) -> float:
        """Added to a figure to make a ratio: a loss is a ratio minus one."""
        return 1.0 if self.is_loss else 0.0

    @property
    def table(self) -> Section:
        """The table of the policy that it is from."""
        return SECTIONS[self.section]

    @property
    def is_loss(self) -> bool:
        return self.table.of_loss

    @property
    def needs_plugin(self) -> str | None:
        """The name of the metric if only a plug-in that is not here can measure it."""
        name = self.find_metric().name if self.is_of(MORE_METRICS) else ""
        return name if name and name not in PLUGINS else None

    @property
    def sampled_score(self) -> str | None:
        """The name of the plug-in's or the Python program's score that it limits."""
        return self.metric.rpartition(".")[0] if self.is_of(MORE_SCORES) else None

    def is_of(self, section: Section) -> bool:
        return self.table is section

    def find_metric(self) -> Metric:
        """The measured metric that it limits."""
        if self.is_of(MORE_METRICS):
            return find_metric(self.metric.rpartition(".")[0])
        return self.table.metrics.get(self.metric) or find_metric(self.metric)


@dataclass(frozen=True, slots=True)
class Policy:
    """A parsed policy; `source` is its text, byte for byte."""

    name: str
    criteria: tuple[Criterion, ...]
    source: bytes
    model: str | None = None
    build: Mapping[str, str] = field(default_factory=dict)
    """`artifact`, `backend` and `precision` of the judged build, where they are given."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Runtime options as typed; only measurements with them are judged."""
    confidence: float = 0.95
    preregistered: bool = False

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.source).hexdigest()


class _BadKeyError(ValueError):
    """Has a text, then the table, its number, and the key or None."""


MAX_BYTES = 2**18
MAX_CRITERIA = 500
"""Each limit is judged on every measurement of its load."""


def policy_from_file(path: Path) -> Policy:
    """Raises BadInputError if the file cannot be read, and as `policy_from_toml`."""
    try:
        source = read_user_bytes(path, MAX_BYTES)
    except OSError as error:
        problem = f"cannot read policy {path}: {error.strerror}"
        raise BadInputError(
            f"{problem}; write one with `" + Call("signoff", init=True) + "`"
        ) from error
    return policy_from_toml(source, str(path))


def policy_from_toml(source: bytes, origin: str = "the policy", *, lines: bool = True) -> Policy:
    """Raises BadInputError with `origin`, the line, the key, and a correction; without `lines` if no file has them."""
    if len(source) > MAX_BYTES:
        raise BadInputError(f"{origin} is too large: {len(source):,} bytes; at most {MAX_BYTES:,}")
    try:
        text = source.decode("utf-8-sig")  # editors on Windows write a byte order mark
        document = parse_toml(text)
    except UnicodeDecodeError as error:
        raise BadInputError(f"{origin}: not UTF-8 text (byte {error.start})") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise BadInputError(f"{origin}: not TOML: {error}") from error
    version = document.get("schema")
    if version != 1 or type(version) is not int:
        stated = "no schema version" if version is None else f"schema version {version}"
        problem = f"{origin}: {stated}; this version of optpipe reads `schema = 1`"
        raise BadInputError(f"{problem} (" + Call("signoff", init=True) + " writes a template)")
    try:
        return _policy_from_document(document, source)
    except _BadKeyError as error:
        said, *place = error.args
        line = _find_line(text, *place) if lines else None
        raise BadInputError(f"{origin}{f', line {line}' if line else ''}: {said}") from error
    except ValueError as error:
        said = error.args[0] if error.args and isinstance(error.args[0], Message) else str(error)
        raise BadInputError(said, place=origin) from error


def _policy_from_document(document: Mapping[str, object], source: bytes) -> Policy:
    top = _read_table(
        {key: value for key, value in document.items() if not key or key not in TABLES}, ""
    )
    closed = [name for name in TABLES if name in document and name not in _PLUGIN_TABLES]
    tables = {name: list(_read_tables(document[name], name)) for name in closed}
    more = [
        criterion
        for section in _PLUGIN_TABLES
        for criterion in _list_plugin_criteria(section, document.get(section, {}))
    ]
    build, evidence, environment = (
        tables.get(name, [{}])[0] for name in ("build", "evidence", ENVIRONMENT.name)
    )
    criteria = (*_list_environment_criteria(environment), *_list_criteria(tables), *more)
    if not criteria:
        raise ValueError(
            "the policy has no criteria; write one with `" + Call("signoff", init=True) + "`"
        )
    if len(criteria) > MAX_CRITERIA:
        raise ValueError(f"{len(criteria):,} limits; a policy has at most {MAX_CRITERIA}")
    confidence, *_ = top.get("confidence", (0.95,))
    if not 0.5 <= confidence < 1:
        problem = f'confidence = "{format_quantity(confidence, Dimension.SHARE)}"'
        raise ValueError(f"{problem}: must be at least 50% and less than 100%")
    _refuse_contradictions(criteria, build.get("precision"))
    return Policy(
        name=top.get("name", "unnamed policy"),
        criteria=criteria,
        source=source,
        model=top.get("model"),
        build={key: str(value) for key, value in build.items() if key != OPTIONS},
        options=build.get(OPTIONS, {}),
        confidence=confidence,
        preregistered=evidence.get("preregistered", False),
    )


def _read_tables(value: object, section: str) -> Iterator[Mapping[str, Any]]:
    several = section in LIMITS
    for number, table in enumerate(value if isinstance(value, list) and several else [value]):
        if not isinstance(table, dict):
            wanted = "a table or an array of tables" if several else "a table"
            raise _BadKeyError(f"{section} = {table!r}: expected {wanted}", section, number, None)
        values = _read_table(table, section, number)
        try:
            _require_complete(values, section)
        except ValueError as error:
            raise _BadKeyError(f"{section}: {error}", section, number, None) from error
        yield values


def _read_table(table: Mapping[str, object], section: str, number: int = 0) -> Mapping[str, Any]:
    keys = TABLES[section] if section in TABLES else _PLUGIN_TABLES[section.partition(".")[0]]
    values = {}
    for key, value in table.items():
        if key not in keys:
            known = [*keys, *filter(None, TABLES)] if not section else list(keys)
            hint = suggest_names(key, known, otherwise=f"valid keys: {', '.join(known)}")
            hint = (not section and explain_no_limit(key)) or hint
            place = f"[{section}]" if section else "the top level"
            raise _BadKeyError(f"unknown key {key!r} in {place}; {hint}", section, number, key)
        try:
            values[key] = _read_value(keys[key], value)
        except ValueError as error:
            what, name = str(error), f"{section}.{key}" if section else key
            if isinstance(value, dict):
                name += ":"
            elif what.startswith((str(value), repr(value), f'"{value}"')):
                name += " ="
            else:
                name += f" = {value!r}:"
            raise _BadKeyError(f"{name} {what}", section, number, key) from error
    return values


def _read_value(kind: Kind, value: object) -> Any:
    """A limit as (number, dimension, score), everything else as itself. Raises ValueError."""
    if isinstance(kind, tuple):
        return _read_limit(*kind, value)
    if kind is int:
        if type(value) is not int or not 1 <= value <= MAX_COUNT:
            raise ValueError(f"expected an integer from 1 to {MAX_COUNT}")
    elif kind is bool:
        if not isinstance(value, bool):
            raise ValueError("expected true or false")
    elif kind in (OPTIONS, PACKAGES):
        if not isinstance(value, dict):
            raise ValueError("expected a table")
        return {name: _read_option(option, kind == PACKAGES) for name, option in value.items()}
    elif isinstance(kind, type) and issubclass(kind, StrEnum):
        if value not in list(kind):
            raise ValueError(f"must be one of {', '.join(kind)}")
        return kind(str(value))
    elif not (isinstance(value, str) and value.strip() and value.isprintable()):
        raise ValueError(f"{value!r} must be a quoted string without control characters")
    return value


def _read_option(value: object, only_text: bool) -> str:
    """A runtime option as typed on the command line; in TOML a number, a boolean, or a quoted string."""
    if only_text or isinstance(value, str):
        return str(_read_value(str, value))
    if not isinstance(value, bool | int | float):
        raise ValueError(f"{value!r} must be a number, a boolean, or a quoted string")
    return format_option(value)


def _read_limit(
    sense: Sense, dimension: Dimension, value: object
) -> tuple[float, Dimension, str | None]:
    """The limit in the base unit, its dimension, and the score that a limit in points names: `AP` of `"0.5 AP"`.

    Raises ValueError for an invalid limit, and for one that is always or never met.
    """
    limit, least = quantity_from_text(value, dimension), sense is Sense.AT_LEAST
    largest = {
        Dimension.SHARE: (1, "100%"),
        Dimension.NUMBER: (1, "1"),
        Dimension.POINTS: (100, "100 points"),
    }
    most, shown = largest.get(dimension, (inf, ""))
    if (
        sense is Sense.EQUALS
        and min(abs(limit - threshold) for threshold in SCORE_THRESHOLDS) > 1e-9
    ):
        raise ValueError(f'"{value}" must be 5%, 10%, …, or 95%')
    if limit == 0 and dimension is Dimension.QUERIES:
        raise ValueError(f'invalid rate "{value}": it must be greater than zero')
    if least and limit > most:
        raise ValueError(f'"{value}" can never be met: the maximum is {shown}')
    if limit == 0 and least:
        raise ValueError(f'"{value}" is always met; remove it or set a meaningful limit')
    if limit == 0 and dimension in NEVER_ZERO:
        raise ValueError(f'"{value}" can never be met')
    counted = "sample" if isinstance(value, str) and "sample" in value else "image"
    return limit, choose_dimension(dimension, counted), score_from_text(value)


def _require_complete(table: Mapping[str, Any], section: str) -> None:
    """Raises ValueError for a table without a limit, a scenario without its load, and keys without the limit that they belong to."""
    limits = LIMITS.get(section)
    if limits is not None and not limits.keys() & table.keys():
        raise ValueError(f"sets no limit; available limits: {', '.join(limits)}")
    scenario = table.get("scenario")
    for needing, key, example in (
        ("server", "rate", '"500 queries/s"'),
        ("multi-stream", "streams", "4"),
    ):
        if scenario == needing and key not in table:
            raise ValueError(f"scenario '{scenario}' requires {key}; for example {key} = {example}")
        if (
            key in table
            and scenario != needing
            and not (key == "streams" and scenario == "offline")
        ):
            raise ValueError(f'{key} requires scenario = "{needing}"')
    if section == SPEEDUP.name and "over" not in table:
        raise ValueError(
            'requires over, the precision or ID of another build; for example over = "fp32"'
        )
    if "at_threshold" in table and F1_DROP not in table:
        raise ValueError(f"at_threshold is the score of {F1_DROP}, which is not limited")
    if "steps" in table and "output" in table:
        problem = "steps limits the state after a trajectory, not an output"
        raise ValueError(f"{problem}; use a second [[outputs]] for output")


def _list_environment_criteria(wanted: Mapping[str, Any]) -> Iterator[Criterion]:
    packages = {f"packages.{name}": version for name, version in wanted.get(PACKAGES, {}).items()}
    for key in (*TABLES[ENVIRONMENT.name], *packages):
        value = packages.get(key) or wanted.get(key)
        if isinstance(value, str):
            yield Criterion(ENVIRONMENT.name, key, Sense.EQUALS, value)


def _list_criteria(tables: Mapping[str, list[Mapping[str, Any]]]) -> Iterator[Criterion]:
    for section, limits in LIMITS.items():
        for table in tables.get(section, ()):
            load = {key: table[key] for key in LOAD if key in table}
            where = LoadFilter(**load | {"rate": load["rate"][0]} if "rate" in load else load)
            for metric, (sense, _) in limits.items():
                if metric not in table:
                    continue
                threshold, dimension, score = table[metric]
                if metric == LEAST_SCORE and score in ERROR_NAMES:
                    raise ValueError(
                        f'{section}.{metric}: {score} is better when lower; write {DROP} = "1 {score}" for its rise'
                    )
                if metric == F1_DROP:
                    if score not in (None, F1.name):
                        problem = f"{section}.{F1_DROP} is a drop of {F1}, not of {score}"
                        raise ValueError(f"{problem}: write it in points")
                    score = f"{F1}@{table.get('at_threshold', (PARITY_SCORE,))[0]:.0%}"
                yield Criterion(
                    section,
                    metric,
                    sense,
                    threshold,
                    dimension,
                    where,
                    score,
                    output=table.get("output"),
                    steps=table.get("steps"),
                    over=table.get("over"),
                )


_ANY_UNIT = tuple(
    dimension for dimension in Dimension if dimension not in (Dimension.QUERIES, Dimension.POINTS)
)


def _list_plugin_criteria(section: str, tables: object) -> Iterator[Criterion]:
    """The limits of `[metrics.NAME]`, whose unit says what the metric is, or of `[scores.NAME]`: a policy is read without the
    plug-in too.
    """
    limits = [key for key in _PLUGIN_TABLES[section] if key not in LOAD]
    if not isinstance(tables, dict):
        problem = f"{section}: expected a table for each, such as [{section}.NAME]"
        raise _BadKeyError(problem, section, 0, None)
    for name, value in tables.items():
        for number, table in enumerate(value if isinstance(value, list) else [value]):
            if not isinstance(table, dict):
                problem = f"{section}.{name}: expected a table with {' or '.join(limits)}"
                raise _BadKeyError(problem, f"{section}.{name}", number, None)
            read = _read_score_table if section == MORE_SCORES.name else _read_plugin_table
            yield from read(name, table, number)


def _read_plugin_table(name: str, table: Mapping[str, object], number: int) -> Iterator[Criterion]:
    place = f"{MORE_METRICS}.{name}"
    limits = {key: value for key, value in table.items() if key in (MOST_KEY, LEAST_KEY)}
    load = _read_table(
        {key: value for key, value in table.items() if key not in limits}, place, number
    )
    try:
        _require_plugin_table(name, load, limits)
    except ValueError as error:
        raise _BadKeyError(f"{place}: {error}", place, number, None) from error
    if "rate" in load:
        load = {**load, "rate": load["rate"][0]}
    where = LoadFilter(**load)
    for key, value in limits.items():
        try:
            sense, threshold, dimension = _read_plugin_limit(name, key, value)
        except ValueError as error:
            raise _BadKeyError(f"{place}.{key}: {error}", place, number, key) from error
        yield Criterion(MORE_METRICS.name, f"{name}.{key}", sense, threshold, dimension, where)


def _require_plugin_table(name: str, load: Mapping[str, Any], limits: Mapping[str, object]) -> None:
    """Raises ValueError for a metric of optpipe, a table without a limit, and a load that is not complete."""
    if name in METRICS and name not in PLUGINS:
        raise ValueError(
            explain_no_limit(name) or "it is a metric of optpipe, which has its own table"
        )
    if not limits:
        raise ValueError(f"sets no limit; available limits: {MOST_KEY}, {LEAST_KEY}")
    _require_complete(load, MORE_METRICS.name)


def _read_score_table(name: str, table: Mapping[str, object], number: int) -> Iterator[Criterion]:
    place = f"{MORE_SCORES}.{name}"
    if not is_score_name(name):
        problem = f'it is a score of optpipe: write {DROP} = "1 {name}" in [{ACCURACY}]'
        if name not in SCORE_NAMES:
            problem = "a score has a name of lowercase letters, digits, - and _"
        raise _BadKeyError(f"{place}: {problem}", place, number, None)
    limits = _read_table(table, place, number)
    if not limits:
        problem = f"sets no limit; available limits: {', '.join(MORE_SCORES.limits)}"
        raise _BadKeyError(f"{place}: {problem}", place, number, None)
    for key in (key for key in MORE_SCORES.limits if key in limits):
        threshold, dimension, score = limits[key]
        if score is not None:
            problem = f"is a drop of {name}, not of {score}: write it in points"
            raise _BadKeyError(f"{place}.{key}: {problem}", place, number, key)
        known = PLUGIN_SCORES.get(name)
        wrong = LEAST_KEY if known is not None and known.lower_is_better else MOST_KEY
        if known is not None and key == wrong:
            better, other = ("lower", MOST_KEY) if key == LEAST_KEY else ("higher", LEAST_KEY)
            problem = f"{name} is better when {better}; limit its {other}, or its {DROP}"
            raise _BadKeyError(f"{place}.{key}: {problem}", place, number, key)
        sense = MORE_SCORES.limits[key][0]
        yield Criterion(MORE_SCORES.name, f"{name}.{key}", sense, threshold, dimension)


def _read_plugin_limit(name: str, key: str, value: object) -> tuple[Sense, float, Dimension]:
    """Raises ValueError for a limit on the wrong side, or in another unit than the metric's, if it is installed."""
    metric, is_least = PLUGINS.get(name), key == LEAST_KEY
    if metric is not None and metric.higher_is_better is not is_least:
        better, other = ("lower", MOST_KEY) if is_least else ("higher", LEAST_KEY)
        raise ValueError(f"{name} is better when {better}; limit its {other}")
    sense = Sense.AT_LEAST if is_least else Sense.AT_MOST
    dimension = _find_dimension(value) if metric is None else metric.dimension
    if dimension is Dimension.NUMBER:  # of any size, unlike a cosine
        return sense, quantity_from_text(value, dimension), dimension
    threshold, dimension, _ = _read_limit(sense, dimension, value)
    return sense, threshold, dimension


def _find_dimension(value: object) -> Dimension:
    """The dimension that the unit of a limit has; a bare number has none."""
    unit = value.strip().lstrip("+-0123456789.eE").strip() if isinstance(value, str) else ""
    return next(
        (dimension for dimension in _ANY_UNIT if unit and unit in dimension.units), Dimension.NUMBER
    )


def _refuse_contradictions(criteria: tuple[Criterion, ...], wanted: Precision | None) -> None:
    by_name: dict[str, Criterion] = {}
    for criterion in criteria:
        if criterion.name in by_name:
            raise ValueError(
                f"{criterion.name} has two limits: {by_name[criterion.name].limit} and {criterion.limit}; keep one"
            )
        by_name[criterion.name] = criterion
    for criterion in criteria:
        for other in criteria if criterion.is_of(LATENCY) else ():
            if not other.is_of(LATENCY) or other.where != criterion.where:
                continue
            mine, theirs = criterion.find_metric(), other.find_metric()
            alike = theirs.is_over_processes == mine.is_over_processes
            if (
                alike
                and theirs.percent > mine.percent
                and float(other.threshold) < float(criterion.threshold)
            ):
                problem = f"{criterion.name} ({criterion.limit}) has no effect"
                reason = f"{other.metric} is already limited to {other.limit}"
                raise ValueError(f"{problem}: {reason}; a lower percentile needs a smaller limit")
    shares = {
        criterion.metric: float(criterion.threshold)
        for criterion in criteria
        if criterion.is_of(PRECISION)
    }
    if (total := sum(shares.values())) > 1 + 1e-9:
        raise ValueError(
            f"precision: {' and '.join(shares)} add up to {format_quantity(total, Dimension.SHARE)} of the MACs"
        )
    gpu = by_name.get(f"{ENVIRONMENT}.gpu")
    if gpu is not None and gpu.threshold == "none":
        for criterion in criteria:
            if criterion.table.needs_gpu or criterion.name == f"{ENVIRONMENT}.driver":
                raise ValueError(f'{criterion.name} requires a GPU, but environment.gpu = "none"')
    for metric, share in shares.items():
        if wanted is not None and metric != wanted and share > 0.5:
            raise ValueError(f'precision.{metric} contradicts build.precision = "{wanted}"')


def _find_line(text: str, section: str, number: int, key: str | None) -> int | None:
    """The line of a key, or of its table's header; None for TOML that is not written line by line."""
    header, count, start = "", -1, None
    for at, line in enumerate(text.splitlines(), start=1):
        if table := re.match(r"\s*\[+\s*([^\]\s]+)", line):
            header = table[1]
            count += header == section
            start = at if header == (section or key) and count in (number, -1) else start
        elif header == "" or (header == section and count == number):
            name = re.match(r"\s*[\"']?([^\s\"'=]+)[\"']?\s*=", line)
            if name and name[1] == (key or section):
                return at
    return start


TEMPLATE = Path(__file__).with_name("policy-template.toml")
POLICY_SCHEMA = Path(__file__).with_name("policy.schema.json")
"""The JSON Schema of a policy for editors, written by `.ci/schemas.py`."""


def read_policy_template(*, labeled: bool = True) -> str:
    """The commented, valid template. For a model without labels it limits the outputs, not the accuracy."""
    text = TEMPLATE.read_text(encoding="utf-8")
    if labeled:
        return text
    text = text.replace("\n[accuracy]\nmaximum_drop", "\n# [accuracy]\n# maximum_drop")
    return text.replace("\n# [outputs]", "\n[outputs]").replace(
        '\n# minimum_snr = "30 dB"', '\nminimum_snr = "30 dB"'
    )
