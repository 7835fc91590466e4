"""Parquet files that others may have written: their sizes are read before their rows.

A file of a few bytes can hold millions of equal values, or a page that expands a thousand times. Each page says how many values
and bytes it has (Apache Parquet format, `parquet.thrift`: FileMetaData and PageHeader, in Thrift's compact protocol), and a file
that says more than a dossier may have is refused unread.

>>> read_parquet(Files(Path("run")), "samples/m000.parquet").columns  # doctest: +SKIP
['phase', 'stream', 'input', 'images', 'scheduled_ns', 'start_ns', 'end_ns']
"""

import io
from collections import OrderedDict
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec

from optpipe.core import pl
from optpipe.core.errors import BadInputError, read_as_user_file
from optpipe.core.files import Files

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    import polars

MAX_ROWS = 2_000_000
MAX_COLUMNS = 1_000
"""Columns of all row groups together."""
MAX_VALUES = 50_000_000
MAX_UNCOMPRESSED_BYTES = 2**29
MAX_TEXT_BYTES = 2**28
"""Bytes of all texts, of which a dictionary repeats one many times."""
MAX_CLASS = 2**20 - 1
"""The largest number of a class; scores count by class."""
_MAGIC = b"PAR1"
_FOOTER_BYTES = 8


MAX_KEPT_BYTES = 2**27
"""The size limit of the rows that one function keeps, or so many files would be parsed each time that a figure needs them."""
_Arguments = ParamSpec("_Arguments")


def keep_frames(
    compute: "Callable[_Arguments, polars.DataFrame]",
) -> "Callable[_Arguments, polars.DataFrame]":
    """Keeps the last results of `compute`, whose arguments are hashable, up to MAX_KEPT_BYTES. Nobody may change a frame in place.

    A verification asks for the rows of each file ten times.
    """
    kept: OrderedDict[Hashable, tuple[polars.DataFrame, int]] = OrderedDict()
    lock, total = Lock(), [0]

    @wraps(compute)
    def ask(*arguments: _Arguments.args, **named: _Arguments.kwargs) -> "polars.DataFrame":
        key = (arguments, *sorted(named.items()))
        with lock:
            if key in kept:
                kept.move_to_end(key)
                return kept[key][0]
        frame = compute(*arguments, **named)
        size_bytes = int(frame.estimated_size())
        with lock:
            if key not in kept and size_bytes <= MAX_KEPT_BYTES:
                kept[key] = frame, size_bytes
                total[0] += size_bytes
            while total[0] > MAX_KEPT_BYTES:
                _, (_, freed) = kept.popitem(last=False)
                total[0] -= freed
        return frame

    return ask


class TooLargeError(BadInputError):
    """A file that says that it is larger than a dossier's."""


@dataclass(frozen=True, slots=True)
class ParquetSize:
    """What the headers of a file say; no row was read."""

    rows: int
    values: int
    """Values of all columns, and one for each page."""
    uncompressed_bytes: int


def read_parquet(files: Files, name: str, columns: list[str] | None = None) -> "polars.DataFrame":
    """The rows of a Parquet file in a folder that others may have written.

    Raises BadInputError that names the file if it cannot be read, or is larger than a dossier's.
    """
    return parse_parquet(files.read(name), files.folder / name, columns)


def parse_parquet(
    content: bytes, place: Path, columns: list[str] | None = None
) -> "polars.DataFrame":
    """As `read_parquet`, of the content of the file `place`."""
    return _parse(content, place, None if columns is None else tuple(columns))


@keep_frames
def _parse(content: bytes, place: Path, columns: tuple[str, ...] | None) -> "polars.DataFrame":
    measure_parquet(content, place)
    with read_as_user_file(place, "Parquet"):
        frame = pl.read_parquet(
            io.BytesIO(content), columns=None if columns is None else [*columns]
        )
        text_bytes = sum(_count_text_bytes(column) for column in frame.iter_columns())
    if text_bytes > MAX_TEXT_BYTES:
        raise TooLargeError(f"{place} is too large: its strings have {text_bytes:,} bytes")
    return frame


def measure_parquet(content: bytes, place: Path) -> ParquetSize:
    """What the headers say. Raises TooLargeError for more than a dossier's, BadInputError for a file that is not Parquet."""
    try:
        return _measure(content, place)
    except (LookupError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise BadInputError(
            f"{place} cannot be read as Parquet: its headers are damaged"
        ) from error


def _measure(content: bytes, place: Path) -> ParquetSize:
    def refuse(what: str) -> NoReturn:
        raise TooLargeError(f"{place} is too large: {what}")

    length = int.from_bytes(content[-_FOOTER_BYTES:-4], "little")
    start = len(content) - _FOOTER_BYTES - length
    if not (content.startswith(_MAGIC) and content.endswith(_MAGIC)) or start < len(_MAGIC):
        raise BadInputError(f"{place} cannot be read as Parquet: it has no footer")
    footer = _Reader(content, start).read_struct()
    groups = footer.get(4, [])
    rows = max(footer[3], sum(group[3] for group in groups))
    if rows > MAX_ROWS:
        refuse(f"{rows:,} rows; at most {MAX_ROWS:,}")
    chunks = [chunk[3] for group in groups for chunk in group[1]]
    if len(chunks) > MAX_COLUMNS:
        refuse(f"{len(chunks):,} columns; at most {MAX_COLUMNS:,}")
    values = uncompressed_bytes = 0
    for chunk in chunks:
        reader = _Reader(content, min(chunk[9], chunk.get(11) or chunk[9]))
        end = reader.at + chunk[7]
        while reader.at < end:
            page = reader.read_struct()
            counts = page.get(5) or page.get(8) or page.get(7) or {}
            count, expanded, stored = counts.get(1, 0), page[2], page[3]
            if min(count, expanded, stored) < 0:
                raise BadInputError(f"{place} cannot be read as Parquet: a size is negative")
            values += count + 1
            uncompressed_bytes += expanded
            reader.at += stored
            if values > MAX_VALUES:
                refuse(f"more than {MAX_VALUES:,} values")
            if uncompressed_bytes > MAX_UNCOMPRESSED_BYTES:
                refuse(f"more than {MAX_UNCOMPRESSED_BYTES:,} bytes when uncompressed")
    return ParquetSize(rows, values, uncompressed_bytes)


def _count_text_bytes(column: "polars.Series") -> int:
    while isinstance(column.dtype, pl.List):
        column = column.explode()
    if isinstance(column.dtype, pl.Struct):
        fields = (column.struct.field(name) for name in column.struct.fields)
        return sum(map(_count_text_bytes, fields))
    if column.dtype == pl.Binary:
        return int(column.bin.size().cast(pl.Int64).sum())
    return int(column.str.len_bytes().cast(pl.Int64).sum()) if column.dtype == pl.String else 0


@dataclass(slots=True)
class _Reader:
    """Thrift's compact protocol: a structure is read as its fields by number; texts are skipped."""

    content: bytes
    at: int

    def read_struct(self) -> dict[int, Any]:
        fields: dict[int, Any] = {}
        number = 0
        while head := self._read_byte():
            number = number + (head >> 4) if head >> 4 else self._read_signed()
            fields[number] = self._read_value(head & 15)
        return fields

    def _read_value(self, kind: int) -> Any:
        match kind:
            case 1 | 2:
                return kind == 1
            case 3:
                return self._read_byte()
            case 4 | 5 | 6:
                return self._read_signed()
            case 7:
                self.at += 8
                return None
            case 8:
                size = self._read_unsigned()
                self.at += size
                return None
            case 9 | 10:
                return self._read_list()
            case 12:
                return self.read_struct()
        raise LookupError(kind)

    def _read_list(self) -> list[Any]:
        head = self._read_byte()
        size, kind = head >> 4, head & 15
        if size == 15:
            size = self._read_unsigned()
        kind = 3 if kind in (1, 2) else kind  # a truth value in a list has a byte
        return [self._read_value(kind) for _ in range(size)]

    def _read_byte(self) -> int:
        byte = self.content[self.at]
        self.at += 1
        return byte

    def _read_unsigned(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self._read_byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise LookupError(value)

    def _read_signed(self) -> int:
        value = self._read_unsigned()
        return value >> 1 ^ -(value & 1)
