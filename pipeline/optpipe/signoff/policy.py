"""Reads a policy from TOML, and the template of `signoff --init`.

Errors name the line of an unknown key, of a limit that cannot hold, and of limits that contradict each other.
"""

import hashlib
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from math import inf, log
from pathlib import Path
from typing import Any

import msgspec

from optpipe.core.errors import BadInputError
from optpipe.core.measurement import MEAN, Mode, Scenario, percent_from_name
from optpipe.core.precision import Precision
from optpipe.core.quantity import Dimension, format_quantity
from optpipe.signoff.policy_format import (
    SECTIONS,
    BuildFilter,
    EnvironmentFilter,
    EvidenceRules,
    LoadFilter,
    MeasuredSection,
    Outputs,
    PolicyDocument,
    Sense,
    Table,
    list_keys,
)


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
                yield Criterion(name, metric, limit.sense, float(limit), limit.dimension, where, limit.score, output)


def _refuse_contradictions(criteria: tuple[Criterion, ...], wanted: Precision | None) -> None:
    by_name: dict[str, Criterion] = {}
    for one in criteria:
        if one.name in by_name:
            raise ValueError(f"{one.name} has two limits: {by_name[one.name].limit} and {one.limit}; keep one")
        by_name[one.name] = one
    for one in criteria:
        if one.section == "latency":
            _refuse_inverted(one, criteria)
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


def _refuse_inverted(one: Criterion, criteria: tuple[Criterion, ...]) -> None:
    for other in criteria:
        alike = other.metric.startswith(MEAN) == one.metric.startswith(MEAN)
        comparable = other.section == "latency" and other.where == one.where and alike
        higher = comparable and percent_from_name(other.metric) > percent_from_name(one.metric)
        if higher and float(other.threshold) < float(one.threshold):
            raise ValueError(
                f"{one.name} ({one.limit}) has no effect: {other.metric} is already limited to "
                f"{other.limit}; a lower percentile needs a smaller limit"
            )


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
"""Of `PolicyDocument`, for editors; `.ci/schemas.py` makes it."""


def read_policy_template(*, labeled: bool = True) -> str:
    """The commented, valid template. For a model without labels it limits the outputs, not the accuracy."""
    text = TEMPLATE.read_text(encoding="utf-8")
    if labeled:
        return text
    text = text.replace("\n[accuracy]\nmaximum_drop", "\n# [accuracy]\n# maximum_drop")
    return text.replace("\n# [outputs]", "\n[outputs]").replace('\n# minimum_snr = "30 dB"', '\nminimum_snr = "30 dB"')
