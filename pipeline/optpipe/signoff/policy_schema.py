"""The policy format for editors and other tools: a JSON Schema, and the commented template of `signoff --init`."""

from importlib import resources
from typing import Any

from optpipe.core.quantity import EXAMPLES, Dimension, make_quantity_pattern
from optpipe.signoff.load_filter import MODES, SCENARIOS
from optpipe.signoff.policy import (
    BUILD_KEYS,
    ENVIRONMENT_KEYS,
    POLICY_PRECISIONS,
    POLICY_SCHEMA_VERSION,
    SECTIONS,
)
from optpipe.signoff.policy import PolicySection as PolicySection

TEMPLATE = "policy-template.toml"


def read_policy_template() -> str:
    """The commented template; it parses as it stands."""
    return resources.files("optpipe.signoff").joinpath(TEMPLATE).read_text(encoding="utf-8")


def make_policy_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a policy's TOML document."""
    sections = {name: _tables(section) for name, section in SECTIONS.items()}
    judged = [*sections, "environment"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "optpipe release policy",
        "type": "object",
        "additionalProperties": False,
        "required": ["schema"],
        "anyOf": [{"required": [name]} for name in judged],
        "properties": {
            "schema": {"const": POLICY_SCHEMA_VERSION, "type": "integer"},
            "name": _NAME,
            "model": _NAME,
            "confidence": _quantity(Dimension.SHARE, "Confidence level of all intervals; default: 95 %."),
            "build": {
                "type": "object",
                "additionalProperties": False,
                "properties": dict.fromkeys(BUILD_KEYS, _NAME)
                | {"precision": {"enum": list(POLICY_PRECISIONS)}, "options": _OPTIONS},
            },
            "environment": {
                "type": "object",
                "additionalProperties": False,
                "properties": {key: _NAME | {"description": doc} for key, doc in ENVIRONMENT_KEYS.items()}
                | {"packages": {"type": "object", "additionalProperties": _NAME}},
            },
            **sections,
        },
    }


_NAME: dict[str, Any] = {"type": "string", "pattern": r"\S"}
_OPTIONS: dict[str, Any] = {
    "type": "object",
    "description": "Runtime options: only measurements made with them are judged.",
    "additionalProperties": {"anyOf": [{"type": ["number", "boolean"]}, _NAME]},
}


def _quantity(dimension: Dimension, doc: str) -> dict[str, Any]:
    example = EXAMPLES[dimension]
    return {"type": "string", "pattern": make_quantity_pattern(dimension), "description": doc, "examples": [example]}


def _only_with(key: str, scenarios: list[str]) -> dict[str, Any]:
    there = {"required": ["scenario"], "properties": {"scenario": {"enum": scenarios}}}
    return {"if": {"required": [key]}, "then": there}


def _needs(scenario: str, key: str) -> dict[str, Any]:
    asked = {"required": ["scenario"], "properties": {"scenario": {"const": scenario}}}
    return {"if": asked, "then": {"required": [key]}}


_LOADS = {
    "allOf": [
        _needs("server", "rate"),
        _needs("multi-stream", "streams"),
        _only_with("rate", ["server"]),
        _only_with("streams", ["multi-stream", "offline"]),
    ]
}
"""A server is loaded by a rate, several streams by their number; neither means anything without the other."""


def _tables(section: PolicySection) -> dict[str, Any]:
    properties = {name: _quantity(limit.dimension, limit.doc) for name, limit in section.limits.items()}
    if section.measured:
        properties |= {
            "batch_size": {"type": "integer", "minimum": 1},
            "scenario": {"enum": list(SCENARIOS)},
            "mode": {"enum": list(MODES)},
            "streams": {"type": "integer", "minimum": 1},
            "rate": _quantity(Dimension.QUERIES, "Queries per second of the server scenario."),
        }
    table = {
        "type": "object",
        "additionalProperties": False,
        "anyOf": [{"required": [name]} for name in section.limits],
        "properties": properties,
    } | (_LOADS if section.measured else {})
    return {"description": section.doc, "oneOf": [table, {"type": "array", "minItems": 1, "items": table}]}
