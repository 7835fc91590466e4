"""The keys and types of the JSON documents of a dossier, as `optpipe` reads them: for the format and its verifier.

A shape is a name of `PLAIN`, of a record, or of an enumeration, or a list: `["or", …]` for one of several, `["list", SHAPE]`,
`["map", SHAPE]` for an object with any keys, `["row", …]` for an array of that length, `["word", …]` for one of these texts. A
record's key that ends in `?` may be absent, where that says as much as an empty value.
"""

from dataclasses import MISSING, fields
from enum import Enum
from typing import Any

import msgspec.inspect as inspected

from optpipe.core.records import EMPTY, plain_from_record
from optpipe.core.verdict import VerdictRecord
from optpipe.signoff.dossier import BUILD_KINDS, DossierRequest
from optpipe.signoff.evidence import DOCUMENTS
from optpipe.workspace.entry import Manifest, RunInfo

PLAIN = {
    inspected.StrType: "text",
    inspected.IntType: "integer",
    inspected.FloatType: "number",
    inspected.BoolType: "truth",
    inspected.NoneType: "null",
    inspected.AnyType: "any",
}
Shape = str | list[Any]


class Shapes:
    """The shapes of types, by name; of two types with one name the second is called by its module too."""

    def __init__(self) -> None:
        self.records: dict[str, dict[str, Shape]] = {}
        self.words: dict[str, Shape] = {}
        self._names: dict[type, str] = {}

    def describe(self, found: inspected.Type) -> Shape:
        if type(found) in PLAIN:
            return PLAIN[type(found)]
        if isinstance(found, inspected.DataclassType):
            return self._describe_record(found)
        if isinstance(found, inspected.UnionType):
            return ["or", *map(self.describe, found.types)]
        if isinstance(found, inspected.VarTupleType | inspected.ListType):
            return ["list", self.describe(found.item_type)]
        if isinstance(found, inspected.TupleType):
            return ["row", *map(self.describe, found.item_types)]
        if isinstance(found, inspected.DictType):
            return ["map", self.describe(found.value_type)]
        if isinstance(found, inspected.EnumType):
            return self._describe_words(found.cls)
        if isinstance(found, inspected.LiteralType):
            return ["word", *map(str, found.values)]
        raise TypeError(f"a dossier has no {found}")

    def _describe_record(self, found: inspected.DataclassType) -> str:
        if found.cls not in self._names:
            keys: dict[str, Shape] = {}
            self.records[self._name(found.cls)] = keys
            optional = _list_optional(found.cls)
            keys |= {
                each.encode_name + "?" * (each.encode_name in optional): self.describe(each.type)
                for each in found.fields
            }
        return self._names[found.cls]

    def _describe_words(self, words: type[Enum]) -> str:
        if words not in self._names:
            self.words[self._name(words)] = ["word", *(str(each.value) for each in words)]
        return self._names[words]

    def _name(self, cls: type) -> str:
        name = cls.__name__
        if name in self._names.values():
            name = cls.__module__.split(".")[1].title() + name
        self._names[cls] = name
        return name


def _list_optional(cls: type) -> set[str]:
    """Fields whose default is empty."""
    found = set()
    for each in fields(cls):
        default = each.default_factory() if each.default_factory is not MISSING else each.default
        if default is not MISSING and plain_from_record(default) in EMPTY:
            found.add(each.name)
    return found


def list_shapes() -> tuple[dict[str, dict[str, Shape]], dict[str, Shape], dict[str, str]]:
    """Records and enumerations by name; and the record of each document, by the name of its file, of `info` by kind of record."""
    shapes = Shapes()

    def name(cls: type) -> str:
        return str(shapes.describe(inspected.type_info(cls)))

    documents = {"request.json": name(DossierRequest), "verdict.json": name(VerdictRecord)}
    documents["manifest.json"] = name(Manifest)
    for each in DOCUMENTS.values():
        documents |= {file: name(cls) for file, cls in each.items()}
    documents |= {kind: name(cls) for kind, cls in BUILD_KINDS.items()}
    documents["run"] = name(RunInfo)
    return shapes.records, shapes.words, documents
