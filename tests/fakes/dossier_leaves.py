"""One leaf of a dossier's JSON changed at a time, with every hash put right."""

import copy
import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.fakes.dossiers import VERIFIER

from optpipe.core.files import hash_file
from optpipe.workspace.seal import seal_folder

_TABLES = runpy.run_path(str(VERIFIER))
SHAPES, DOCUMENTS = _TABLES["SHAPES"], _TABLES["DOCUMENTS"]
Place = tuple[str | int, ...]
ABSENT = object()
WORDS = {
    "PASS": "FAIL",
    "FAIL": "PASS",
    "INCONCLUSIVE": "PASS",
    "VALID": "INVALID",
    "INVALID": "VALID",
    "fp32": "fp16",
    "int8": "fp8",
    "complete": "interrupted",
}
"""Another word of the same enumeration."""


class Leaf(NamedTuple):
    """A value in a document of a dossier; `key` is RECORD.KEY of the nearest record that section 1.3 of the format defines."""

    file: str
    place: Place
    value: Any
    key: str


def list_leaves(folder: Path) -> list[Leaf]:
    found = []
    for path in sorted(folder.rglob("*.json")):
        name = path.relative_to(folder).as_posix()
        if name != "comparison.json":  # a rendering
            document = json.loads(path.read_text(encoding="utf-8"))
            record = DOCUMENTS.get(path.name, path.name)
            for place, value, key in _walk(document, record, record, ()):
                found.append(Leaf(name, place, value, key))
    return found


def _walk(value: Any, shape: Any, key: str, place: Place) -> Iterator[tuple[Place, Any, str]]:
    if isinstance(value, dict):
        record = SHAPES.get(shape) if isinstance(shape, str) else None
        for name, inner in value.items():
            within, its_key = _step_into(value, shape, record, key, name)
            yield from _walk(inner, within, its_key, (*place, name))
    elif isinstance(value, list):
        within = shape[1] if isinstance(shape, list) and shape[0] in ("list", "row") else shape
        for number, inner in enumerate(value):
            yield from _walk(inner, within, key, (*place, number))
    else:
        yield place, value, key


def _step_into(value: Any, shape: Any, record: Any, key: str, name: str) -> tuple[Any, str]:
    if isinstance(shape, list) and shape[0] == "map":
        return shape[1], key
    if record is None:
        return "any", key
    within, its_key = record.get(name, record.get(f"{name}?")), f"{shape}.{name}"
    if its_key == "Manifest.info":
        within = DOCUMENTS.get(value["kind"] if value["recipe"] is not None else "run", "any")
    if isinstance(within, list) and within[0] == "or":
        within = next((each for each in within[1:] if each != "null"), "any")
    return within, its_key


def change_value(value: Any) -> Any:
    """Another value of the same kind, as plausible as a small change can be; a null becomes a text."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value * 1.001 + 1e-6
    if value in WORDS:
        return WORDS[value]
    return "other" if value is None else f"{value}x"


def change_leaf(folder: Path, leaf: Leaf, value: Any) -> None:
    """Puts `value` in the place of the leaf (ABSENT removes its key), and every hash right."""
    path = folder / leaf.file
    document = json.loads(path.read_text(encoding="utf-8"))
    inner = document
    for step in leaf.place[:-1]:
        inner = inner[step]
    if value is ABSENT:
        del inner[leaf.place[-1]]
    else:
        inner[leaf.place[-1]] = copy.deepcopy(value)
    path.write_text(json.dumps(document), encoding="utf-8")
    run = next((each for each in path.parents if each.parent.name == "runs"), None)
    if run is not None and path.name != "manifest.json":
        manifest = json.loads((run / "manifest.json").read_text(encoding="utf-8"))
        stated = {"sha256": hash_file(path), "size_bytes": path.stat().st_size}
        manifest["files"][path.relative_to(run).as_posix()] = stated
        (run / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    seal_folder(folder)
