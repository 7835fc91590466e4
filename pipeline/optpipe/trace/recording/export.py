"""An SQLite export of Nsight Systems, opened read-only and checked before anything is believed; and a copy that may leave the machine.

Reading was chosen by measuring (2 cores, one million kernels and two million API calls): ADBC with large batches hands
columns to Polars without a Python object per cell, one connection per table side by side; Python's own `sqlite3` takes
about four times as long. It reads the few rows of the small tables.

A raw export carries environment variables, command lines, host and user names, paths and the GPU's UUID in
TARGET_INFO_SYSTEM_ENV, META_DATA_CAPTURE, PROCESSES, ProcessStreams and StringIds. The copy is made by an allow-list: a
table or string that is not needed for the frames is not copied.
"""

import sqlite3
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import polars as pl

from optpipe.core.errors import BadInputError, StageError, first_line

BATCH_ROWS = 100_000
_MAGIC = b"SQLite format 3\x00"
_HEADER_BYTES = 100
_KEPT_TABLES = (
    "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET",
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", "CUPTI_ACTIVITY_KIND_GRAPH_TRACE", "NVTX_EVENTS", "OSRT_API", "PROFILER_OVERHEAD",
    "GPU_METRICS", "TARGET_INFO_GPU_METRICS",
)  # fmt: skip
_LEFT_OUT = {"NVTX_EVENTS": {"jsonText", "jsonTextId", "binaryData"}}
"""Payloads of any content."""
_NAME_COLUMNS = ("demangledName", "shortName", "nameId", "textId")
_GPU_COLUMNS = ("name", "id", "smCount", "totalMemory", "memoryBandwidth", "computeMajor", "computeMinor")
_METADATA = ("EXPORT_PRODUCT_NAME", "EXPORT_PRODUCT_VERSION", "EXPORT_SCHEMA_VERSION")
KEEP_RAW_WARNING = "the raw trace contains the whole process environment, host name, and paths in clear text: never attach or commit it"


@dataclass(frozen=True, slots=True)
class NsysExport:
    """An export file and what it holds: the columns of each of its tables."""

    path: Path
    columns: Mapping[str, frozenset[str]]

    def has(self, table: str, *columns: str) -> bool:
        """Whether `table` is there with all of `columns`; a table in which nothing happened may be absent."""
        return table in self.columns and self.columns[table].issuperset(columns)


def open_export(path: Path) -> NsysExport:
    """Checks that `path` is a whole export of Nsight Systems.

    Raises:
        BadInputError: the file is missing, empty, cut short, no SQLite database, or not an export of nsys.
    """
    _check_whole(path)
    try:
        with closing(_connect(path)) as connection:
            tables = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            columns = {
                table: frozenset(
                    row[0] for row in connection.execute("SELECT name FROM pragma_table_info(?)", (table,))
                )
                for table in tables
            }
    except sqlite3.DatabaseError as error:
        raise BadInputError(_format_damage(path, str(error))) from error
    if "StringIds" not in columns:
        message = f"{path}: an SQLite file, but not an export of Nsight Systems (no StringIds table)"
        raise BadInputError(f"{message}\ncreate one with: nsys export --type sqlite FILE.nsys-rep")
    return NsysExport(path, columns)


def fetch_rows(export: NsysExport, sql: str) -> list[tuple[object, ...]]:
    """The rows of a small query; for large tables use `frames`."""
    try:
        with closing(_connect(export.path)) as connection:
            return connection.execute(sql).fetchall()
    except sqlite3.DatabaseError as error:
        raise BadInputError(_format_damage(export.path, str(error))) from error


def fetch_frames(export: NsysExport, queries: Mapping[str, str]) -> dict[str, pl.DataFrame]:
    """Runs `queries` side by side, each on its own connection; the frames are keyed as the queries are."""
    with ThreadPoolExecutor(max_workers=4) as pool:
        results = pool.map(lambda sql: _fetch_frame(export.path, sql), queries.values())
        return dict(zip(queries, results, strict=True))


def _fetch_frame(path: Path, sql: str) -> pl.DataFrame:
    from adbc_driver_sqlite import dbapi

    try:
        with dbapi.connect(_uri(path)) as connection, connection.cursor() as cursor:
            cursor.adbc_statement.set_options(**{"adbc.sqlite.query.batch_rows": str(BATCH_ROWS)})
            cursor.execute(sql)
            # SQLite keeps any bytes as text, and the driver hands them over unchecked: the casts check them.
            text = pl.col(pl.String).cast(pl.Binary).cast(pl.String)
            return pl.DataFrame(cursor.fetch_arrow()).with_columns(text)
    except (dbapi.Error, OSError, pl.exceptions.PolarsError) as error:
        raise BadInputError(_format_damage(path, first_line(error))) from error


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(_uri(path), uri=True)


def _uri(path: Path) -> str:
    return f"file:{quote(str(path.resolve()))}?mode=ro"


def _check_whole(path: Path) -> None:
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER_BYTES)
        size_bytes = path.stat().st_size
    except FileNotFoundError:
        raise BadInputError(f"{path}: no such file; pass an .nsys-rep file or its .sqlite export") from None
    except OSError as error:
        raise BadInputError(f"{path}: cannot be read ({error.strerror})") from error
    if size_bytes == 0:
        raise BadInputError(f"{path}: the file is empty; export it again: nsys export --type sqlite FILE.nsys-rep")
    if not header.startswith(_MAGIC):
        raise BadInputError(
            f"{path}: not an SQLite export of Nsight Systems; create one with: nsys export --type sqlite"
        )
    # https://www.sqlite.org/fileformat.html, 1.3: page size at offset 16 (1 means 65536), page count at offset 28.
    page_bytes = int.from_bytes(header[16:18], "big")
    page_bytes = 65536 if page_bytes == 1 else page_bytes
    expected_bytes = page_bytes * int.from_bytes(header[28:32], "big")
    if len(header) < _HEADER_BYTES or size_bytes < expected_bytes:
        raise BadInputError(_format_damage(path, f"truncated: {size_bytes} of {expected_bytes} bytes"))


def _format_damage(path: Path, why: str) -> str:
    return f"{path}: the export is damaged ({why})\nexport it again: nsys export --type sqlite --force-overwrite true FILE.nsys-rep"


def write_redacted_export(source: Path, target: Path) -> None:
    """Copies from `source` what the frames are made of into a fresh export at `target`, which must not exist.

    Raises:
        BadInputError: `source` is not a whole export, or `target` is there already. StageError: it cannot be written.
    """
    export = open_export(source)
    if target.exists():
        raise BadInputError(f"{target} already exists; remove it or choose another name")
    try:
        _copy_allowed_tables(export, source, target)
    except sqlite3.Error as error:
        target.unlink(missing_ok=True)
        raise StageError(f"cannot write {target}: {error}") from error


def _copy_allowed_tables(export: NsysExport, source: Path, target: Path) -> None:
    with closing(sqlite3.connect(target)) as copy:
        copy.execute("ATTACH DATABASE ? AS raw", (str(source.resolve()),))
        used = []
        for table in (name for name in _KEPT_TABLES if name in export.columns):
            kept = sorted(export.columns[table] - _LEFT_OUT.get(table, set()))
            columns = ", ".join(f'"{column}"' for column in kept)
            copy.execute(f"CREATE TABLE {table} AS SELECT {columns} FROM raw.{table}")
            used += [f"SELECT {column} FROM {table}" for column in _NAME_COLUMNS if export.has(table, column)]
        wanted = " UNION ".join(used) or "SELECT NULL"
        copy.execute("CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL)")
        copy.execute(f"INSERT INTO StringIds SELECT id, value FROM raw.StringIds WHERE id IN ({wanted})")
        if export.has("TARGET_INFO_GPU", "name"):
            columns = ", ".join(column for column in _GPU_COLUMNS if export.has("TARGET_INFO_GPU", column))
            copy.execute(f"CREATE TABLE TARGET_INFO_GPU AS SELECT {columns} FROM raw.TARGET_INFO_GPU")
        for table in ("META_DATA_EXPORT", "EXPORT_META_DATA"):
            if export.has(table, "name", "value"):
                marks = ", ".join("?" for _ in _METADATA)
                copy.execute("CREATE TABLE META_DATA_EXPORT (name TEXT NOT NULL, value TEXT)")
                copy.execute(
                    f"INSERT INTO META_DATA_EXPORT SELECT name, value FROM raw.{table} WHERE name IN ({marks})",
                    _METADATA,
                )
                break
        copy.commit()
        copy.execute("DETACH DATABASE raw")
        copy.execute("VACUUM")
