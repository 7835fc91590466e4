"""Reads and writes records: frozen dataclasses that are stored, printed as JSON, or shown in a report.

msgspec checks every field's type while it decodes, and names the place of an error (`$.files[2].bytes`).
"""

import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import fields
from itertools import accumulate
from pathlib import Path
from typing import Any, Never, TypeVar

import msgspec

from optpipe.core import pl
from optpipe.core.errors import BadInputError, StageError
from optpipe.core.files import MAX_LIST_BYTES, Files, read_user_bytes

T = TypeVar("T")
Key = TypeVar("Key")


def group_pairs(pairs: Iterable[tuple[Key, T]]) -> dict[Key, list[T]]:
    """The values of each key, in order."""
    groups: dict[Key, list[T]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def record_from_json(content: bytes | str, kind: type[T], where: object) -> T:
    """Raises BadInputError that names `where`, the field, and the expected type."""
    try:
        return msgspec.json.decode(content, type=kind, dec_hook=_decode_path)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadInputError(f"{where}: {_explain(error)}") from error


def record_from_plain(value: object, kind: type[T], where: object) -> T:
    """The record in plain dicts, lists and scalars, such as TOML gives. Raises BadInputError as `record_from_json` does."""
    try:
        return msgspec.convert(value, kind, dec_hook=_decode_path)
    except (msgspec.ValidationError, RecursionError) as error:
        raise BadInputError(f"{where}: {_explain(error)}") from error


def read_record(path: Path, kind: type[T]) -> T:
    try:
        content = read_user_bytes(path, MAX_LIST_BYTES)
    except OSError as error:
        raise BadInputError(f"cannot read {path}: {error.strerror}") from error
    return record_from_json(content, kind, path)


def record_from_files(files: Files, name: str, kind: type[T]) -> T:
    return record_from_json(files.read(name), kind, files.folder / name)


class OtherSchemaError(BadInputError):
    """A record that another version of optpipe wrote."""


def read_versioned(files: Files, name: str, kind: type[T]) -> T:
    """Reads a record with a `schema_version`. Raises OtherSchemaError for another version, BadInputError for none."""
    expected = next(field.default for field in fields(kind) if field.name == "schema_version")  # type: ignore[arg-type]
    version = record_from_files(files, name, dict).get("schema_version", 0)
    if version != expected:
        where = files.folder / name
        error = OtherSchemaError if version else BadInputError
        raise error(
            f"{where} has schema version {version}; this version of optpipe reads version {expected}"
        )
    return record_from_files(files, name, kind)


def json_from_record(record: object) -> bytes:
    """JSON in field order with a final newline; numbers that are not finite become null, and file names that are not UTF-8 are escaped."""
    return msgspec.json.format(_encode_record(record), indent=1) + b"\n"


def line_from_record(record: object) -> bytes:
    return msgspec.json.encode(record, enc_hook=_encode_value) + b"\n"


def plain_from_record(record: object) -> Any:
    """The record as plain dicts, lists and scalars, as its JSON would be read back."""
    return msgspec.json.decode(_encode_record(record))


def _encode_record(record: object) -> bytes:
    try:
        return msgspec.json.encode(record, enc_hook=_encode_value)
    except UnicodeEncodeError:
        return msgspec.json.encode(
            _escape_surrogates(msgspec.to_builtins(record, enc_hook=_encode_value))
        )


def _escape_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {_escape_surrogates(key): _escape_surrogates(item) for key, item in value.items()}
    return (
        [_escape_surrogates(item) for item in value] if isinstance(value, list | tuple) else value
    )


def _encode_value(value: object) -> str:
    """Paths, and the messages of `core/wording`, as text."""
    if isinstance(value, Path | str):
        return str(value)
    raise NotImplementedError(f"a record cannot hold a {type(value).__name__}")


def _decode_path(kind: type, value: object) -> Path:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise NotImplementedError(f"a record cannot hold a {kind.__name__}")


def _explain(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text if text.startswith("JSON") else text[0].lower() + text[1:]


PROSE = (
    "reason",
    "remedy",
    "limit",
    "about",
    "message",
    "note",
    "detail",
    "why",
    "advice",
    "why_not",
    "withheld",
)
"""Fields with sentences, which another version of optpipe may word differently."""


Recomputed = tuple[str, object, object]
"""(place in a document, stored record, record recomputed from raw files)."""


RELATIVE_TOLERANCE = 1e-9
"""Between two computations of one figure by the same formula, on two machines."""


def list_read_errors() -> tuple[type[BaseException], ...]:
    """Errors that reading an intact file with values of the wrong kind, or too few, can raise."""
    wrong_kind = (AttributeError, ArithmeticError, IndexError, KeyError, TypeError, ValueError)
    return (
        BadInputError,
        StageError,
        pl.exceptions.PolarsError,
        pl.exceptions.PanicException,
        *wrong_kind,
    )


MAX_JSON_BYTES = 2**26
MAX_NESTING = 64
"""JSON objects and arrays inside of each other."""
_MARK = re.compile(rb'"(?:[^"\\]|\\.)*+"|[\[{\]}]', re.DOTALL)
_DEPTHS = {b"[": 1, b"{": 1, b"]": -1, b"}": -1}


def require_flat(content: bytes, place: object) -> None:
    """Raises BadInputError for JSON that is longer or deeper than any record."""
    if len(content) > MAX_JSON_BYTES:
        raise BadInputError(f"{place} is too large: {len(content):,} bytes of JSON")
    depths = accumulate(_DEPTHS.get(mark[0], 0) for mark in _MARK.finditer(content))
    if any(depth > MAX_NESTING for depth in depths):
        raise BadInputError(f"{place} is too deep: JSON of more than {MAX_NESTING} levels")


def _integer_from_json(text: str) -> int:
    if len(text) > 20 or not -(2**63) <= int(text) < 2**64:
        raise ValueError(f"{text[:24]} is not a number of 64 bits")
    return int(text)


def _float_from_json(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:24]} is not a finite number")
    return value


def document_from_json(content: bytes, place: str) -> object:
    """Plain values of a JSON text in UTF-8.

    Raises BadInputError for a key that occurs twice, a number that is not finite or not of 64 bits, and half of a surrogate pair.
    """

    def refuse(what: str) -> Never:
        raise BadInputError(f"{place}: {what}")

    def join(pairs: list[tuple[str, object]]) -> dict[str, object]:
        members = dict(pairs)
        if len(members) < len(pairs):
            names = [name for name, _ in pairs]
            refuse(f"key {next(name for name in names if names.count(name) > 1)!r} occurs twice")
        return members

    require_flat(content, place)
    try:
        document: object = json.loads(
            content.decode("utf-8"),
            object_pairs_hook=join,
            parse_constant=lambda word: refuse(f"{word} is not JSON"),
            parse_int=_integer_from_json,
            parse_float=_float_from_json,
        )
        json.dumps(document, ensure_ascii=False).encode("utf-8")  # no half of a surrogate pair
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"{place}: not JSON ({error})") from error
    return document


def compare_recomputed(records: Iterable[Recomputed]) -> Iterator[str]:
    """Lists where stored records differ from what their raw files give, one line each."""
    for place, stored, computed in records:
        yield from find_disagreements(plain_from_record(stored), plain_from_record(computed), place)


EMPTY: tuple[object, ...] = (None, "", [], {})
"""Values of a field that a record may leave out."""


def find_disagreements(
    stored: object,
    computed: object,
    place: str,
    leave_out: Collection[str] = PROSE,
    source: str = "the raw files give",
) -> list[str]:
    """Lists where a stored document differs from a computed one, one line each, except in keys of `leave_out`."""
    if isinstance(computed, Mapping) and isinstance(stored, Mapping):
        names = sorted((set(stored) | set(computed)) - set(leave_out))
        # a field that is newer than the record is absent there, which says as much as an empty one
        pairs = [
            (f"{place}: {name}", stored.get(name), computed.get(name, "nothing"))
            for name in names
            if name in stored or computed.get(name) not in EMPTY
        ]
    elif isinstance(computed, list) and isinstance(stored, list) and len(computed) == len(stored):
        pairs = [
            (f"{place}[{_common_name(left, right) or at}]", left, right)
            for at, (left, right) in enumerate(zip(stored, computed, strict=True))
        ]
    else:
        differ = not _are_equal(stored, computed)
        return (
            [f"{place} says {_shorten(stored)}, but {source} {_shorten(computed)}"]
            if differ
            else []
        )
    return [
        problem
        for at, left, right in pairs
        for problem in find_disagreements(left, right, at, leave_out, source)
    ]


def _are_equal(stored: object, computed: object) -> bool:
    """Numbers may differ in the last digits; a bool only equals a bool."""
    if isinstance(stored, bool) or isinstance(computed, bool):
        return stored is computed
    if isinstance(stored, int | float) and isinstance(computed, int | float):
        return math.isclose(stored, computed, rel_tol=RELATIVE_TOLERANCE)
    return stored == computed


def _common_name(left: object, right: object) -> object:
    """The name or id that both have, so that a line names a criterion or a measurement instead of an index."""
    names = [
        document.get("name") or document.get("id") if isinstance(document, Mapping) else None
        for document in (left, right)
    ]
    return names[0] if names[0] == names[1] else None


def _shorten(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:79]}…"
