"""The policy format for editors and other tools: a JSON Schema, and the commented template of `signoff --init`."""

from importlib import resources
from typing import Any

import msgspec

from optpipe.core.quantity import EXAMPLES, make_quantity_pattern
from optpipe.signoff.policy_format import SECTIONS, Limit, LoadFilter, Name, PolicyDocument, list_metrics

TEMPLATE = "policy-template.toml"


def read_policy_template() -> str:
    """The commented template; it parses as it stands."""
    return resources.files("optpipe.signoff").joinpath(TEMPLATE).read_text(encoding="utf-8")


def make_policy_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a policy's TOML document."""
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


def _describe_type(kind: type) -> dict[str, Any]:
    if issubclass(kind, Limit):
        pattern, example = make_quantity_pattern(kind.dimension), EXAMPLES[kind.dimension]
        return {"type": "string", "pattern": pattern, "description": kind.__doc__, "examples": [example]}
    name = {"type": "string", "pattern": r"\S"}
    return name if issubclass(kind, Name) else {"anyOf": [{"type": ["number", "boolean"]}, name]}


def _drop_nulls(schema: Any) -> Any:
    """The schema without null, which TOML does not have, and without defaults, which only null and empty tables are."""
    if isinstance(schema, list):
        return [_drop_nulls(one) for one in schema if one != {"type": "null"}]
    if not isinstance(schema, dict):
        return schema
    kept = {key: _drop_nulls(value) for key, value in schema.items() if key != "default"}
    only = kept.get("anyOf", ())
    return {**{key: value for key, value in kept.items() if key != "anyOf"}, **only[0]} if len(only) == 1 else kept


def _only_with(key: str, scenarios: list[str]) -> dict[str, Any]:
    there = {"required": ["scenario"], "properties": {"scenario": {"enum": scenarios}}}
    return {"if": {"required": [key]}, "then": there}


def _needs(scenario: str, key: str) -> dict[str, Any]:
    asked = {"required": ["scenario"], "properties": {"scenario": {"const": scenario}}}
    return {"if": asked, "then": {"required": [key]}}


_LOADS = [
    _needs("server", "rate"),
    _needs("multi-stream", "streams"),
    _only_with("rate", ["server"]),
    _only_with("streams", ["multi-stream", "offline"]),
]
"""A server is loaded by a rate, several streams by their number; neither means anything without the other."""
