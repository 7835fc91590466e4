"""The JSON documents of the commands, with their version and JSON Schemas."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any, TypedDict

import msgspec

from optpipe.core.records import plain_from_record
from optpipe.core.verdict import StepRecord, Verdict

Json = dict[str, Any]
SCHEMA_VERSION = 6
"""The version that all documents share; it increases when the shape of any document changes."""
SCHEMA_FILE = Path(__file__).with_name("documents.schema.json")


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


class SignedPlace(TypedDict):
    """What `signoff` adds to the verdict."""

    dossier: str
    warnings: list[str]


class PipelineRun(SignedPlace):
    steps: list[StepRecord]


class Failure(TypedDict):
    message: str
    exit_status: int


DOCUMENTS = {
    "build": ("build.records:BuildResult", "build.choose:ChoiceResult"),
    "calibrate": ("quantize.calibrated_graph:CalibrationResult",),
    "preprocess": ("preprocess.records:PreprocessRecord",),
    "bench": ("measure.pair:BenchRecord", "preprocess.end_to_end:EndToEndRecord"),
    "evaluate": ("evaluate.result:Evaluation", "evaluate.layers:LayerComparison"),
    "profile": (
        "trace.profile_model:ModelProfileDocument",
        "trace.report:TraceProfile",
        "trace.report:ProfileDiff",
    ),
    "compare": ("core.comparison:Comparison", "sweep.fleet:FleetRecord"),
    "signoff": ("core.verdict:VerdictRecord", "cli.schemas:PolicyTemplate"),
    "signoff approve": ("cli.schemas:Approval",),
    "signoff attest": ("signoff.verify:AttestRecord",),
    "signoff recheck": ("deploy.records:RecheckRecord",),
    "verify": ("core.verdict:VerificationRecord",),
    "run": ("core.verdict:VerdictRecord",),
    "deploy": ("deploy.records:DeployResult",),
    "sweep": ("sweep.plan:SweepRecord", "cli.schemas:NodeLabels"),
    "store ls": ("models.artifacts.housekeeping:StoreListing",),
    "store show": ("models.artifacts.housekeeping:EntryDetails",),
    "store rm": ("models.artifacts.housekeeping:Removal",),
    "store gc": ("models.artifacts.housekeeping:Removal",),
    "store merge": ("sweep.ledger:MergeRecord",),
    "doctor": ("build.doctor:Diagnosis", "build.doctor:OptionListing"),
}
"""The records that a command prints, `module:class`."""
ADDED: Json = {"signoff": SignedPlace, "run": PipelineRun}


def make_document(record: object) -> Json:
    return {"schema_version": SCHEMA_VERSION, **plain_from_record(record)}


def make_schemas() -> Json:
    """JSON Schemas by command, without prose: two versions differ in shape only."""
    kinds = {
        name: [
            getattr(import_module(f"optpipe.{module}"), kind) for module, kind in (each.split(":") for each in where)
        ]
        for name, where in DOCUMENTS.items()
    }
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


def read_schemas() -> Json:
    found: Json = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    return found
