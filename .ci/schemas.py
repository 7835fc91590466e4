"""Makes the published JSON Schemas: of each command's JSON document, and of a release policy.

`uv run python .ci/schemas.py` writes them. A document whose shape changes needs another SCHEMA_VERSION first.
"""

import json
import re
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypedDict

import msgspec

from optpipe.backends.base import Option
from optpipe.build.doctor import ToolStatus
from optpipe.cli.app import SCHEMA_VERSION
from optpipe.core.entries import Environment
from optpipe.core.quantity import NUMBER, Dimension
from optpipe.core.verdict import StepRecord, Verdict
from optpipe.evaluate.tasks.detection import SCORE_THRESHOLDS
from optpipe.signoff.policy import (
    POLICY_SCHEMA,
    SECTIONS,
    Limit,
    LoadFilter,
    Name,
    PolicyDocument,
    ScoreThreshold,
    list_metrics,
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


class PolicyTemplate(TypedDict):
    """Of `signoff --init`."""

    policy: str
    schema: str


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
    "build": ("build.records:BuildResult", "build.choose:ChoiceResult"),
    "calibrate": ("quantize.calibrated_graph:CalibrationResult",),
    "preprocess": ("preprocess.proof:PreprocessRecord",),
    "bench": ("measure.pair:BenchRecord", "preprocess.end_to_end:EndToEndRecord"),
    "evaluate": ("evaluate.result:Evaluation", "evaluate.layers:LayerComparison"),
    "profile": (
        "trace.profile_model:ModelProfileDocument",
        "trace.report:TraceProfile",
    ),
    "compare": ("core.measurement:Comparison",),
    "signoff": ("core.verdict:VerdictRecord", PolicyTemplate),
    "signoff approve": (Approval,),
    "signoff attest": ("signoff.verify:AttestRecord",),
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
ADDED: Json = {"signoff": SignedPlace, "run": PipelineRun}


def make_document_schemas() -> Json:
    """JSON Schemas by command, without prose: two versions differ in shape only."""
    kinds = {name: [_find_class(each) for each in where] for name, where in DOCUMENTS.items()}
    every = list(dict.fromkeys([kind for some in kinds.values() for kind in some] + [*ADDED.values(), Failure]))
    found, parts = msgspec.json.schema_components(
        every, schema_hook=lambda _: {"type": "string"}, ref_template="#/$defs/{name}"
    )
    refs = dict(zip(every, found, strict=True))
    version = {"properties": {"schema_version": {"const": SCHEMA_VERSION}}, "required": ["schema_version"]}
    documents = {
        name: {"allOf": [version, {"anyOf": [_describe(name, kind, refs) for kind in some]}]}
        for name, some in sorted(kinds.items())
    }
    documents["error"] = {"allOf": [version, {"properties": {"error": refs[Failure]}, "required": ["error"]}]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "schema_version": SCHEMA_VERSION,
        "documents": documents,
        "$defs": {name: _leave_out_prose(part) for name, part in sorted(parts.items())},
    }


def _find_class(where: str | type) -> type:
    if not isinstance(where, str):
        return where
    module, _, name = where.partition(":")
    found: type = getattr(import_module(f"optpipe.{module}"), name)
    return found


def _describe(name: str, kind: Any, refs: dict[Any, Any]) -> Any:
    added = ADDED.get(name) if kind.__name__ == "VerdictRecord" else None
    return refs[kind] if added is None else {"allOf": [refs[kind], refs[added]]}


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
        if key not in ("description", "title", "default")
    }


def make_policy_schema() -> Json:
    """Makes a JSON Schema (draft 2020-12)."""
    schema = _drop_nulls(msgspec.json.schema(PolicyDocument, schema_hook=_describe_type))
    whole = schema["$defs"]["PolicyDocument"]
    whole["anyOf"] = [{"required": [name]} for name in (*SECTIONS, "environment")]
    for name, section in SECTIONS.items():
        whole["properties"][name]["anyOf"][0]["minItems"] = 1
        table = schema["$defs"][section.__name__]
        table["anyOf"] = [{"required": [metric]} for metric in list_metrics(section)]
        if issubclass(section, LoadFilter):
            table["allOf"] = _LOADS
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "optpipe release policy", **schema}


def _describe_type(kind: type) -> Json:
    if issubclass(kind, Limit):
        number, units = NUMBER.removeprefix("[+-]?"), "|".join(map(re.escape, kind.dimension.units))
        pattern, example = rf"^\s*\+?{number}\s*(?:{units})\s*$", kind.dimension.example
        if kind.dimension is Dimension.NUMBER:
            return {"type": "number", "minimum": 0, "description": kind.__doc__, "examples": [float(example)]}
        return {"type": "string", "pattern": pattern, "description": kind.__doc__, "examples": [example]}
    if kind is ScoreThreshold:
        return {"type": "string", "enum": [f"{each:.0%}" for each in SCORE_THRESHOLDS], "description": kind.__doc__}
    name = {"type": "string", "pattern": r"\S"}
    return name if issubclass(kind, Name) else {"anyOf": [{"type": ["number", "boolean"]}, name]}


def _drop_nulls(schema: Any) -> Any:
    """Drops null, which TOML does not have, and defaults, which are only null or empty tables."""
    if isinstance(schema, list):
        return [_drop_nulls(one) for one in schema if one != {"type": "null"}]
    if not isinstance(schema, dict):
        return schema
    kept = {key: _drop_nulls(value) for key, value in schema.items() if key != "default"}
    only = kept.get("anyOf", ())
    return {**{key: value for key, value in kept.items() if key != "anyOf"}, **only[0]} if len(only) == 1 else kept


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
        sys.exit(f"a document has another shape: raise SCHEMA_VERSION, now {SCHEMA_VERSION}, in optpipe.cli.app")
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_files()
