"""Records: the frozen dataclasses that are stored, printed as JSON, or shown in a report, read and written in one place.

msgspec does it: it takes plain dataclasses, checks every field's type while it decodes, and names the place of what is wrong
(`$.files[2].bytes`). A key that code misspells is a type error, and a file that lacks one is refused here and nowhere else.
"""

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Never, TypeVar

import msgspec

from optpipe.core.errors import BadInputError
from optpipe.core.files import Files

T = TypeVar("T")


def record_from_json(content: bytes | str, kind: type[T], where: object) -> T:
    """The record of type `kind` in a JSON text. Raises BadInputError that names `where`, the field, and what it should be."""
    try:
        return msgspec.json.decode(content, type=kind, dec_hook=_decode_path)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadInputError(f"{where}: {_explain(error)}") from error


def record_from_plain(value: object, kind: type[T], where: object) -> T:
    """The record of type `kind` in plain dicts, lists and scalars, such as TOML gives. Raises BadInputError likewise."""
    try:
        return msgspec.convert(value, kind, dec_hook=_decode_path)
    except (msgspec.ValidationError, RecursionError) as error:
        raise BadInputError(f"{where}: {_explain(error)}") from error


def read_record(path: Path, kind: type[T]) -> T:
    """The record of type `kind` in the JSON file at `path`. Raises BadInputError where it is missing or of another form."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BadInputError(f"cannot read {path}: {error.strerror}") from error
    return record_from_json(content, kind, path)


def record_from_files(files: Files, name: str, kind: type[T]) -> T:
    """The record of type `kind` in the JSON file `name`. Raises BadInputError likewise."""
    return record_from_json(files.read(name), kind, files.folder / name)


def read_versioned(files: Files, name: str, kind: type[T]) -> T:
    """`record_from_files` for a record with a `schema_version`, which is compared first. Raises BadInputError for another version."""
    expected = next(each.default for each in fields(kind) if each.name == "schema_version")  # type: ignore[arg-type]
    found = record_from_files(files, name, _Version).schema_version
    if found != expected:
        where = files.folder / name
        raise BadInputError(f"{where} has schema version {found}; this version of optpipe reads version {expected}")
    return record_from_files(files, name, kind)


@dataclass(frozen=True, slots=True)
class _Version:
    schema_version: int = 0


def json_from_record(record: object) -> bytes:
    """The JSON text of a record: keys in the order of its fields, numbers that are not finite as null, a newline at the end.

    A file name that is not UTF-8 is written as Python shows it.
    """
    return msgspec.json.format(_encode_record(record), indent=1) + b"\n"


def line_from_record(record: object) -> bytes:
    """The JSON text of a record in one line, with its end."""
    return msgspec.json.encode(record) + b"\n"


def plain_from_record(record: object) -> Any:
    """A record as plain dicts, lists and scalars, as its JSON text would be read back."""
    return msgspec.json.decode(_encode_record(record))


def _encode_record(record: object) -> bytes:
    try:
        return msgspec.json.encode(record, enc_hook=_encode_path)
    except UnicodeEncodeError:
        return msgspec.json.encode(_escape_surrogates(msgspec.to_builtins(record, enc_hook=_encode_path)))


def _escape_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {_escape_surrogates(key): _escape_surrogates(each) for key, each in value.items()}
    return [_escape_surrogates(each) for each in value] if isinstance(value, list | tuple) else value


def _encode_path(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"a record cannot hold a {type(value).__name__}")


def _decode_path(kind: type, value: object) -> Path:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise NotImplementedError(f"a record cannot hold a {kind.__name__}")


def _explain(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text if text.startswith("JSON") else text[0].lower() + text[1:]


PROSE = ("reason", "remedy", "limit", "about", "message", "note", "detail", "why", "advice", "why_not", "withheld")
"""Sentences about the figures beside them: another version of optpipe may word them differently."""


Recomputed = tuple[str, object, object]
"""The place of a document, the record in it, and the record that the raw files give."""


RELATIVE_TOLERANCE = 1e-9
"""Between two computations of one figure, on two machines, by the same formula."""


def list_read_errors() -> tuple[type[BaseException], ...]:
    """What reading a file can raise whose values are of the wrong kind, however intact its form."""
    import polars as pl

    wrong_kind = (AttributeError, ArithmeticError, IndexError, KeyError, TypeError, ValueError)
    return (BadInputError, pl.exceptions.PolarsError, pl.exceptions.PanicException, *wrong_kind)


def document_from_json(content: bytes, place: str) -> object:
    """The plain values of a JSON text. Raises BadInputError for a key that an object has twice, and for a bare NaN or infinity."""

    def refuse(what: str) -> Never:
        raise BadInputError(f"{place}: {what}")

    def join(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            refuse(f"key {next(name for name in names if names.count(name) > 1)!r} occurs twice")
        return found

    try:
        return json.loads(content, object_pairs_hook=join, parse_constant=lambda word: refuse(f"{word} is not JSON"))
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"{place}: not JSON ({error})") from error


def compare_recomputed(found: Iterable[Recomputed]) -> Iterator[str]:
    """Where stored records say something else than their raw files give, one line each."""
    for place, stored, computed in found:
        yield from find_disagreements(plain_from_record(stored), plain_from_record(computed), place)


def find_disagreements(
    stored: object,
    computed: object,
    place: str,
    leave_out: Collection[str] = PROSE,
    source: str = "the raw files give",
) -> list[str]:
    """Where a stored document says something else than what was computed, one line each; keys in `leave_out` are not compared."""
    if isinstance(computed, Mapping) and isinstance(stored, Mapping):
        pairs = [
            (f"{place}: {name}", stored.get(name, "nothing"), computed.get(name, "nothing"))
            for name in sorted((set(stored) | set(computed)) - set(leave_out))
        ]
    elif isinstance(computed, list) and isinstance(stored, list) and len(computed) == len(stored):
        pairs = [
            (f"{place}[{_common_name(one, other) or at}]", one, other)
            for at, (one, other) in enumerate(zip(stored, computed, strict=True))
        ]
    else:
        return (
            []
            if _are_equal(stored, computed)
            else [f"{place} says {_shorten(stored)}, but {source} {_shorten(computed)}"]
        )
    return [found for at, one, other in pairs for found in find_disagreements(one, other, at, leave_out, source)]


def _are_equal(stored: object, computed: object) -> bool:
    """Equal values, and of numbers those that differ in the last digits; neither of which is a bool where the other is not."""
    if isinstance(stored, bool) or isinstance(computed, bool):
        return stored is computed
    numbers = isinstance(stored, int | float) and isinstance(computed, int | float)
    return stored == computed or (numbers and math.isclose(stored, computed, rel_tol=RELATIVE_TOLERANCE))  # type: ignore[arg-type]


def _common_name(one: object, other: object) -> object:
    """What both call themselves, so that a line names a criterion or a measurement and not its place in a list."""
    names = [each.get("name") or each.get("id") if isinstance(each, Mapping) else None for each in (one, other)]
    return names[0] if names[0] == names[1] else None


def _shorten(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:79]}…"
