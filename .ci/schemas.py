"""Makes the published JSON Schemas: of each command's JSON document, and of a release policy.

`uv run python .ci/schemas.py` writes them. A document whose shape changes needs another SCHEMA_VERSION first.
"""

import json
import re
import sys
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Any, TypedDict

import msgspec

from optpipe.backends.base import Option
from optpipe.build.doctor import ToolStatus
from optpipe.cli.app import SCHEMA_VERSION
from optpipe.core.entries import Environment
from optpipe.core.metrics.sections import (
    ACCURACY,
    ENERGY_PER_SAMPLE,
    ENVIRONMENT,
    F1_DROP,
    JUDGED,
    LEAST_KEY,
    MAX_DROP,
    MAX_ERROR,
    MAX_SHARE,
    MAX_SIZE,
    MAX_TIME,
    MIN_COSINE,
    MIN_FACTOR,
    MIN_RATIO,
    MIN_SCORE,
    MIN_SHARE,
    MORE_METRICS,
    MORE_SCORES,
    MOST_KEY,
    PER_WATT,
    POWER_DRAW,
    RATE,
    SECTIONS,
)
from optpipe.core.quantity import NUMBER, Dimension
from optpipe.core.verdict import StepRecord, Verdict
from optpipe.evaluate.tasks.detection import SCORE_THRESHOLDS
from optpipe.signoff.policy import (
    LIMITS,
    LOAD,
    MAX_COUNT,
    OPTIONS,
    PACKAGES,
    POLICY_SCHEMA,
    QUERY_RATE,
    SCORE_THRESHOLD,
    TABLES,
    Kind,
)

Json = dict[str, Any]
ROOT = Path(__file__).parents[1]
DOCUMENT_SCHEMAS = ROOT / "pipeline" / "optpipe" / "cli" / "documents.schema.json"
EXAMPLE = ROOT / "reports" / "examples" / "policy.schema.json"


class Approval(TypedDict):
    """Of `signoff approve`."""

    model: str
    baseline: str
    verdict: Verdict
    because: str | None


class Attestation(TypedDict):
    """Of `signoff attest`."""

    file: str
    dossier: str
    dossier_sha256: str
    verdict: Verdict
    bill: str


class Stamp(TypedDict):
    """Of `signoff stamp`."""

    dossier: str
    file: str
    time_utc: str


class Exported(TypedDict):
    """Of `signoff export`."""

    dossier: str
    tracker: str
    place: str


class PolicyTemplate(TypedDict):
    """Of `signoff --init`."""

    policy: str
    schema: str


class CardTemplate(TypedDict):
    """Of `build --init`."""

    card: str


class NodeLabels(TypedDict):
    """Of `sweep --node-labels`."""

    labels: dict[str, str]


@dataclass
class Diagnosis:
    """Of `doctor`."""

    findings: list[ToolStatus]
    environment: Environment


@dataclass
class OptionListing:
    """Of `doctor --options`: by backend."""

    options: dict[str, list[Option]]


class SignedPlace(TypedDict):
    """What `signoff` adds to the verdict."""

    dossier: str
    warnings: list[str]


class PipelineRun(SignedPlace):
    steps: list[StepRecord]


class Failure(TypedDict):
    message: str
    exit_status: int


DOCUMENTS: dict[str, tuple[str | type, ...]] = {
    "build": ("build.records:BuildResult", "build.choose:ChoiceResult", CardTemplate),
    "calibrate": ("quantize.calibrated_graph:CalibrationResult",),
    "preprocess": ("preprocess.proof:PreprocessRecord", "preprocess.proof:AgainstRecord"),
    "bench": (
        "measure.pair:BenchRecord",
        "measure.turns:TurnsReport",
        "preprocess.end_to_end:EndToEndRecord",
    ),
    "evaluate": ("evaluate.result:Evaluation", "evaluate.layers:LayerComparison"),
    "profile": ("trace.report:ModelProfileDocument", "trace.report:TraceProfile"),
    "compare": ("core.comparison:Comparison", "core.history:History"),
    "signoff": ("core.verdict:VerdictRecord", PolicyTemplate),
    "signoff approve": (Approval,),
    "signoff attest": (Attestation,),
    "signoff stamp": (Stamp,),
    "signoff export": (Exported,),
    "signoff recheck": ("deploy.records:RecheckRecord",),
    "verify": ("core.verdict:VerificationRecord",),
    "run": ("core.verdict:VerdictRecord",),
    "deploy": ("deploy.records:DeployResult",),
    "sweep": ("sweep.plan:SweepRecord", NodeLabels),
    "store ls": ("models.artifacts.housekeeping:StoreListing",),
    "store show": ("models.artifacts.housekeeping:EntryDetails",),
    "store rm": ("models.artifacts.housekeeping:Removal",),
    "store gc": ("models.artifacts.housekeeping:Removal",),
    "store merge": ("sweep.ledger:MergeRecord",),
    "doctor": (Diagnosis, OptionListing),
}
"""The records that a command prints, `module:class` of the package or a class of this file."""
MOVED = {"optpipe.core.comparison.Comparison": "optpipe.core.measurement.Comparison"}
"""The published names of types that share their name with another one, so that it has a module, and have moved since."""
ADDED: Json = {"signoff": SignedPlace, "run": PipelineRun}


def make_document_schemas() -> Json:
    """JSON Schemas by command, without prose: two versions differ in shape only."""
    kinds = {name: [_find_class(each) for each in where] for name, where in DOCUMENTS.items()}
    every = list(
        dict.fromkeys(
            [kind for some in kinds.values() for kind in some] + [*ADDED.values(), Failure]
        )
    )
    found, parts = msgspec.json.schema_components(
        every, schema_hook=lambda _: {"type": "string"}, ref_template="#/$defs/{name}"
    )
    refs = dict(zip(every, found, strict=True))
    version = {
        "properties": {"schema_version": {"const": SCHEMA_VERSION}},
        "required": ["schema_version"],
    }
    documents = {
        name: {"allOf": [version, {"anyOf": [_describe(name, kind, refs) for kind in some]}]}
        for name, some in sorted(kinds.items())
    }
    documents["error"] = {
        "allOf": [version, {"properties": {"error": refs[Failure]}, "required": ["error"]}]
    }
    published = {MOVED.get(name, name): _leave_out_prose(part) for name, part in parts.items()}
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "schema_version": SCHEMA_VERSION,
        "documents": documents,
        "$defs": dict(sorted(published.items())),
    }
    return _rename_refs(schema)


def _rename_refs(schema: Any) -> Any:
    """`schema`, in which references to a type that moved have its published name."""
    if isinstance(schema, dict):
        ref = str(schema.get("$ref", "")).removeprefix("#/$defs/")
        if ref in MOVED:
            return {**schema, "$ref": f"#/$defs/{MOVED[ref]}"}
        return {key: _rename_refs(part) for key, part in schema.items()}
    return [_rename_refs(part) for part in schema] if isinstance(schema, list) else schema


def _find_class(where: str | type) -> type:
    if not isinstance(where, str):
        return where
    module, _, name = where.partition(":")
    found: type = getattr(import_module(f"optpipe.{module}"), name)
    return found


def _describe(name: str, kind: Any, refs: dict[Any, Any]) -> Any:
    added = ADDED.get(name) if kind.__name__ == "VerdictRecord" else None
    return refs[kind] if added is None else {"allOf": [refs[kind], refs[added]]}


LEFT_OUT = ("description", "title", "default", "propertyNames")
"""Keys of msgspec's schemas that are no shape; only msgspec 0.23 and newer state the keys of a mapping."""


def _leave_out_prose(part: Any) -> Any:
    if isinstance(part, list):
        return [_leave_out_prose(each) for each in part]
    if not isinstance(part, dict):
        return part
    return {
        key: {name: _leave_out_prose(each) for name, each in value.items()}
        if key == "properties"
        else _leave_out_prose(value)
        for key, value in part.items()
        if key not in LEFT_OUT
    }


LIMIT_WORDS = {
    MAX_TIME: "Maximum time.",
    MAX_SHARE: "Maximum share.",
    MAX_DROP: "Maximum drop in percentage points of the task's first score, or of the score that it names.",
    MIN_SCORE: "Minimum score, out of 100 points, of the task's first score, or of the score that it names.",
    MAX_SIZE: "Maximum size.",
    ENERGY_PER_SAMPLE.limits["maximum"]: "Maximum energy per image or sample.",
    POWER_DRAW.limits["maximum"]: "Maximum mean power of the GPU.",
    PER_WATT.limits["minimum"]: "Minimum images or samples per second and watt.",
    RATE.limits["minimum"]: "Minimum images or samples per second.",
    MIN_FACTOR: "Minimum of how many times as fast as the other build.",
    MIN_SHARE: "Minimum share.",
    MIN_RATIO: "Minimum signal-to-noise ratio.",
    MIN_COSINE: "Minimum cosine similarity.",
    MAX_ERROR: "Maximum absolute error, in the output's own unit.",
    QUERY_RATE: "Queries per second that arrive in the server scenario.",
}
DESCRIPTIONS = {
    "": "A release policy as it is written. A section may be one table or an array of tables.",
    "build": "Which build is judged, and with which runtime options it has to be measured.",
    "evidence": "Which evidence decides.",
} | {name: section.about for name, section in SECTIONS.items()}


def make_policy_schema() -> Json:
    """Makes a JSON Schema (draft 2020-12)."""
    parts = {name: _describe_table(name) for name in TABLES if name}
    whole = _describe_table("")
    whole["properties"]["schema"] = {"enum": [1]}
    whole["required"] = ["schema"]
    whole["anyOf"] = [
        {"required": [name]}
        for name in (*LIMITS, ENVIRONMENT.name, MORE_METRICS.name, MORE_SCORES.name)
    ]
    for name in parts:
        one: Json = {"$ref": f"#/$defs/{name}"}
        whole["properties"][name] = _once_or_more(one) if name in LIMITS else one
    parts["metric"] = _describe_plugin_table()
    parts[MORE_METRICS.name] = {
        "description": MORE_METRICS.about,
        "type": "object",
        "additionalProperties": _once_or_more({"$ref": "#/$defs/metric"}),
    }
    parts["score"] = _describe_score_table()
    parts[MORE_SCORES.name] = {
        "description": MORE_SCORES.about,
        "type": "object",
        "additionalProperties": _once_or_more({"$ref": "#/$defs/score"}),
    }
    for section in JUDGED:
        parts[section.name]["anyOf"] = [{"required": [metric]} for metric in section.limits]
        if section.is_measured:
            parts[section.name]["allOf"] = _LOADS
    parts[ACCURACY.name]["dependentRequired"] = {"at_threshold": [F1_DROP]}
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "optpipe release policy",
    }
    return {**schema, "$ref": "#/$defs/policy", "$defs": {"policy": whole, **parts}}


def _once_or_more(one: Json) -> Json:
    """One table, or an array of tables."""
    return {"anyOf": [{"type": "array", "items": one, "minItems": 1}, one]}


def _describe_score_table() -> Json:
    """The table of a score of a plug-in or of a Python program."""
    return {
        "description": "Limits of a score.",
        "type": "object",
        "properties": {key: _describe_kind(kind) for key, kind in MORE_SCORES.limits.items()},
        "additionalProperties": False,
        "anyOf": [{"required": [key]} for key in MORE_SCORES.limits],
    }


def _describe_plugin_table() -> Json:
    """The table of a plug-in's metric, whose unit only the plug-in knows."""
    limit = {"anyOf": [{"type": "number", "minimum": 0}, {"type": "string", "pattern": r"\S"}]}
    return {
        "description": "Limits of a plug-in's metric.",
        "type": "object",
        "properties": {
            **{key: _describe_kind(kind) for key, kind in LOAD.items()},
            MOST_KEY: limit | {"description": "For a metric that is better when lower."},
            LEAST_KEY: limit | {"description": "For a metric that is better when higher."},
        },
        "additionalProperties": False,
        "anyOf": [{"required": [MOST_KEY]}, {"required": [LEAST_KEY]}],
        "allOf": _LOADS,
    }


def _describe_table(name: str) -> Json:
    properties = {key: _describe_kind(kind) for key, kind in TABLES[name].items()}
    return {
        "description": DESCRIPTIONS[name],
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }


def _describe_kind(kind: Kind) -> Json:
    text = {"type": "string", "pattern": r"\S"}
    if kind == SCORE_THRESHOLD:
        about = "The score from which a detector's boxes count: a multiple of 5%."
        return {
            "type": "string",
            "enum": [f"{each:.0%}" for each in SCORE_THRESHOLDS],
            "description": about,
        }
    if isinstance(kind, tuple):
        return _describe_limit(kind[1], LIMIT_WORDS[kind])
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return {"enum": [str(each) for each in kind]}
    if kind in (OPTIONS, PACKAGES):
        inner = text if kind == PACKAGES else {"anyOf": [{"type": ["number", "boolean"]}, text]}
        return {"type": "object", "additionalProperties": inner}
    count = {"type": "integer", "minimum": 1, "maximum": MAX_COUNT}
    return {int: count, bool: {"type": "boolean"}}.get(kind, text)  # type: ignore[arg-type]


def _describe_limit(dimension: Dimension, about: str) -> Json:
    number, units = NUMBER.removeprefix("[+-]?"), "|".join(map(re.escape, dimension.units))
    pattern, example = rf"^\s*\+?{number}\s*(?:{units})\s*$", dimension.example
    if dimension is Dimension.NUMBER:
        return {"type": "number", "minimum": 0, "description": about, "examples": [float(example)]}
    if dimension is Dimension.FACTOR:
        forms = [{"type": "number", "minimum": 0}, {"type": "string", "pattern": pattern}]
        return {"anyOf": forms, "description": about, "examples": [1.2, example]}
    return {"type": "string", "pattern": pattern, "description": about, "examples": [example]}


def _only_with(key: str, scenarios: list[str]) -> Json:
    there = {"required": ["scenario"], "properties": {"scenario": {"enum": scenarios}}}
    return {"if": {"required": [key]}, "then": there}


def _needs(scenario: str, key: str) -> Json:
    asked = {"required": ["scenario"], "properties": {"scenario": {"const": scenario}}}
    return {"if": asked, "then": {"required": [key]}}


_LOADS = [
    _needs("server", "rate"),
    _needs("multi-stream", "streams"),
    _only_with("rate", ["server"]),
    _only_with("streams", ["multi-stream", "offline"]),
]
"""The server scenario needs a rate, and multi-stream a number of streams; other scenarios have neither."""


def list_files() -> dict[Path, str]:
    """Each published file with its text."""
    policy = json.dumps(make_policy_schema(), indent=1) + "\n"
    documents = json.dumps(make_document_schemas(), indent=1, sort_keys=True) + "\n"
    return {DOCUMENT_SCHEMAS: documents, POLICY_SCHEMA: policy, EXAMPLE: policy}


def write_files() -> None:
    """Exits with 1 if a document has another shape under the same version."""
    texts = list_files()
    old = json.loads(DOCUMENT_SCHEMAS.read_text(encoding="utf-8"))
    if old["schema_version"] == SCHEMA_VERSION and old != json.loads(texts[DOCUMENT_SCHEMAS]):
        sys.exit(
            f"a document has another shape: raise SCHEMA_VERSION, now {SCHEMA_VERSION}, in optpipe.cli.app"
        )
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_files()
