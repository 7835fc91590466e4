"""Reads a trace from nsys' SQLite export, an .nsys-rep, or a run folder; only this module uses nsys' table and column names.

Schema of the export: Nsight Systems user guide, "SQLite Schema Reference". Empty tables may be absent, and columns vary from
2022.4 to 2025.x, so every query uses only the columns that exist.
"""

import math
import sqlite3
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import quote

import polars as pl
from polars._typing import PolarsDataType

from optpipe.core.errors import (
    BadInputError,
    StageError,
    escape,
    read_as_user_file,
    require_file,
)
from optpipe.core.files import Files
from optpipe.core.parquet import read_parquet
from optpipe.core.records import json_from_record, record_from_files, record_from_plain
from optpipe.core.tables import require_columns
from optpipe.core.wording import Argument
from optpipe.trace.nsys import sqlite_from_recording

NAME_DTYPE = pl.Categorical
"""Names repeat a thousandfold; codes let a million rows be grouped by comparing integers."""
FrameSchema = Mapping[str, PolarsDataType]
_SPAN: FrameSchema = {"start_ns": pl.Int64, "end_ns": pl.Int64}
_OPERATION: FrameSchema = {
    **_SPAN,
    **dict.fromkeys(("device", "stream", "correlation_id", "pid"), pl.Int64),
}
SCHEMAS: Mapping[str, FrameSchema] = {
    "kernels": {**_OPERATION, "name": NAME_DTYPE, "blocks": pl.Int64, "graph_node": pl.Int64},
    "api": {**_SPAN, "thread": pl.Int64, "correlation_id": pl.Int64, "name": NAME_DTYPE},
    "copies": {  # and memsets (kind `Memset`)
        **_OPERATION,
        "bytes": pl.Int64,
        **dict.fromkeys(("kind", "source_memory", "target_memory"), pl.String),
        "graph_node": pl.Int64,
    },
    "ranges": {**_SPAN, "thread": pl.Int64, "name": NAME_DTYPE},
}

DETAIL_SCHEMAS: Mapping[str, FrameSchema] = {
    "metrics": {
        "time_ns": pl.Int64,
        "device": pl.Int64,
        "name": NAME_DTYPE,
        "value": pl.Float64,
    },
    "os_calls": {**_SPAN, "thread": pl.Int64, "name": NAME_DTYPE},
    "stacks": {  # a row for each frame of a stack; depth 0 is the running function
        **dict.fromkeys(("time_ns", "thread", "sample", "depth"), pl.Int64),
        **dict.fromkeys(("name", "place", "language"), NAME_DTYPE),
    },
    "switches": {"time_ns": pl.Int64, "thread": pl.Int64, "is_in": pl.Boolean},
}
"""Tables of the sources that are recorded on request."""
_ALL_SCHEMAS = {**SCHEMAS, **DETAIL_SCHEMAS}


def make_empty_frame(table: str) -> pl.DataFrame:
    return pl.DataFrame(schema=dict(_ALL_SCHEMAS[table]))


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as the trace describes it; None if the export does not say."""

    name: str
    multiprocessors: int | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    source: str
    tracer: str
    """The tool and its version: `nsys 2025.3.2.0`."""
    gpus: tuple[Gpu, ...] = ()
    diagnostics: tuple[str, ...] = ()
    """Defects: events that the profiler lost, and rows with missing or impossible times."""
    graph_launches_untraced: int = 0
    """CUDA graphs with one opaque row each (`--cuda-graph-trace=graph`)."""
    overhead_ns: int = 0
    """The profiler's own time, as it reports it."""
    kernels: pl.DataFrame = field(default_factory=lambda: make_empty_frame("kernels"))
    api: pl.DataFrame = field(default_factory=lambda: make_empty_frame("api"))
    copies: pl.DataFrame = field(default_factory=lambda: make_empty_frame("copies"))
    ranges: pl.DataFrame = field(default_factory=lambda: make_empty_frame("ranges"))
    metrics: pl.DataFrame = field(default_factory=lambda: make_empty_frame("metrics"))
    os_calls: pl.DataFrame = field(default_factory=lambda: make_empty_frame("os_calls"))
    stacks: pl.DataFrame = field(default_factory=lambda: make_empty_frame("stacks"))
    switches: pl.DataFrame = field(default_factory=lambda: make_empty_frame("switches"))

    @property
    def tables(self) -> dict[str, pl.DataFrame]:
        """The tables that bound the timeline."""
        return {table: getattr(self, table) for table in SCHEMAS}

    @property
    def details(self) -> dict[str, pl.DataFrame]:
        """The tables of sources that are recorded on request."""
        return {table: getattr(self, table) for table in DETAIL_SCHEMAS}


_FARTHEST_NS = 1 << 60
"""36 years from the clock's origin. Later timestamps are damage, and their sums overflow."""


def add_frames(empty: Trace, frames: Mapping[str, pl.DataFrame]) -> Trace:
    """Adds the rows with possible times; diagnostics count the rows that are left out."""
    kept, lost = {}, list(empty.diagnostics)
    for table, frame in frames.items():
        times = [column for column in ("start_ns", "end_ns", "time_ns") if column in frame.columns]
        timed = frame.drop_nulls(times).filter(
            *(pl.col(column).abs() < _FARTHEST_NS for column in times)
        )
        is_span = "end_ns" in times
        kept[table] = timed.filter(pl.col("end_ns") >= pl.col("start_ns")) if is_span else timed
        if timed.height < frame.height:
            lost.append(f"{frame.height - timed.height} rows of {table} have no possible timestamp")
        if kept[table].height < timed.height:
            lost.append(
                f"{timed.height - kept[table].height} rows of {table} end before they start"
            )
    return replace(empty, diagnostics=tuple(lost), **kept)  # type: ignore[arg-type]


BATCH_ROWS = 100_000
_EXPORT = "an export of Nsight Systems"
_WAY_OUT = "export it again: nsys export --type sqlite --force-overwrite true FILE.nsys-rep"
KEEP_RAW_WARNING = "the raw trace contains the whole process environment, host name, and paths in clear text: never attach or commit it"


Columns = Mapping[str, frozenset[str]]
"""The columns of each table of an export; a table without events may be absent."""


def read_columns(path: Path) -> Columns:
    """Raises BadInputError if `path` is not an export of Nsight Systems."""
    require_file(path, "; pass an .nsys-rep file or its .sqlite export")
    _check_size(path)
    with closing(_connect(path)) as connection:
        tables = [
            row[0]
            for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        ]
        info = "SELECT name FROM pragma_table_info(?)"
        columns = {
            table: frozenset(row[0] for row in connection.execute(info, (table,)))
            for table in tables
        }
    if "StringIds" not in columns:
        message = f"{path}: empty, or not an export of Nsight Systems (no StringIds table)"
        raise BadInputError(f"{message}\ncreate one with: nsys export --type sqlite FILE.nsys-rep")
    return columns


def _check_size(path: Path) -> None:
    """Refuses a file that ends inside its last page, which SQLite fills with zeros."""
    with path.open("rb") as file:
        header = file.read(100)
    # https://www.sqlite.org/fileformat.html, 1.3: page size at offset 16 (1 means 65536), page count at offset 28.
    page_bytes = int.from_bytes(header[16:18], "big")
    expected_bytes = (65536 if page_bytes == 1 else page_bytes) * int.from_bytes(
        header[28:32], "big"
    )
    if header.startswith(b"SQLite format 3\x00") and path.stat().st_size < expected_bytes:
        why = f"truncated: {path.stat().st_size} of {expected_bytes} bytes"
        raise BadInputError(f"{path}: the export is damaged ({why})\n{_WAY_OUT}")


def _fetch_rows(path: Path, sql: str) -> list[tuple[object, ...]]:
    """Runs a small query; for large tables use `_fetch_frame`."""
    with closing(_connect(path)) as connection:
        return connection.execute(sql).fetchall()


def _fetch_frame(path: Path, sql: str) -> pl.DataFrame:
    from adbc_driver_sqlite import dbapi

    with dbapi.connect(_uri(path)) as connection, connection.cursor() as cursor:
        cursor.adbc_statement.set_options(**{"adbc.sqlite.query.batch_rows": str(BATCH_ROWS)})
        cursor.execute(sql)
        # SQLite stores any bytes as text, and the driver does not check them
        raw = pl.DataFrame(cursor.fetch_arrow()).with_columns(pl.col(pl.String).cast(pl.Binary))
        return raw.with_columns(
            _decode(raw[name]) for name, dtype in raw.schema.items() if dtype == pl.Binary
        )


def _decode(texts: pl.Series) -> pl.Series:
    """UTF-8; where one text is not, such as what a program printed, its bytes are replaced."""
    try:
        return texts.cast(pl.String)
    except pl.exceptions.ComputeError:
        decoded = [None if text is None else text.decode(errors="replace") for text in texts]
        return pl.Series(texts.name, decoded, dtype=pl.String)


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(_uri(path), uri=True)


def _uri(path: Path) -> str:
    return f"file:{quote(str(path.resolve()))}?mode=ro"


# CUPTI's enumerations (CUpti_ActivityMemcpyKind, CUpti_ActivityMemoryKind),
# with the labels and numbers of nsys' ENUM_ tables.
COPY_KINDS = {
    0: "Unknown", 1: "Host-to-Device", 2: "Device-to-Host", 3: "Host-to-Array", 4: "Array-to-Host", 5: "Array-to-Array",
    6: "Array-to-Device", 7: "Device-to-Array", 8: "Device-to-Device", 9: "Host-to-Host", 10: "Peer-to-Peer",
    11: "Unified Host-to-Device", 12: "Unified Device-to-Host", 13: "Unified Device-to-Device",
}  # fmt: skip
MEMORY_KINDS = {
    0: "Pageable", 1: "Pinned", 2: "Device", 3: "Array", 4: "Managed", 5: "Device Static", 6: "Managed Static", 7: "Unknown",
}  # fmt: skip
MEMSET = "Memset"
_MEMSET_KIND = -1  # not a number of CUPTI: memsets come from a separate table

_RANGE_EVENTS = (
    "(59, 60, 70, 71)"  # NvtxPushPopRange, NvtxStartEndRange, and both from text files (NVTXT)
)
_DOMAIN_EVENT = 75
_SEVERITY_WARNING = 2
TRACER_NOTE = "; "
"""Between the profiler's version and what happened to the recording."""
_UNKNOWN_VERSION = "of unknown version"
_LOSS_WORDS = (
    "lost",
    "dropped",
    "overflow",
    "not collected",
    "insufficient",
    "incomplete",
    "exceeded",
)

_ENDS = {"start_ns": "start", "end_ns": '"end"'}
_LAUNCHED = {
    **_ENDS, "device": "deviceId", "stream": "streamId", "correlation_id": "correlationId", "pid": "globalPid",
    "graph_node": "graphNodeId",
}  # fmt: skip
_CALLED = {**_ENDS, "thread": "globalTid", "name": "nameId"}
_SOURCES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "kernels": (
        "CUPTI_ACTIVITY_KIND_KERNEL",
        {**_LAUNCHED, "name": "demangledName", "blocks": "gridX * gridY * gridZ"},
    ),
    "api": ("CUPTI_ACTIVITY_KIND_RUNTIME", {**_CALLED, "correlation_id": "correlationId"}),
    "copies": (
        "CUPTI_ACTIVITY_KIND_MEMCPY",
        {
            **_LAUNCHED,
            "bytes": "bytes",
            "kind": "copyKind",
            "source_memory": "srcKind",
            "target_memory": "dstKind",
        },
    ),
    "memsets": (
        "CUPTI_ACTIVITY_KIND_MEMSET",
        {
            **_LAUNCHED,
            "bytes": "bytes",
            "kind": str(_MEMSET_KIND),
            "source_memory": "NULL",
            "target_memory": "memKind",
        },
    ),
}
"""The table of nsys and the expression of each column."""
_OPTIONAL = {
    "globalPid": "0",
    **dict.fromkeys(("graphNodeId", "srcKind", "dstKind", "memKind"), "NULL"),
}
"""The values of columns that a version of nsys may lack."""
_ESSENTIAL = {"start", "end", "demangledName", "nameId", "bytes", "copyKind"}
"""A table that lacks one of these columns counts as absent."""


def trace_from_sqlite(path: Path) -> Trace:
    """Raises BadInputError if the file is not a complete export of nsys, or the recording is empty."""
    with read_as_user_file(path, _EXPORT, _WAY_OUT):
        columns = read_columns(path)
        queries = {"strings": "SELECT id, value FROM StringIds", **_make_queries(columns)}
        with ThreadPoolExecutor(max_workers=4) as pool:
            raw = dict(
                zip(queries, pool.map(partial(_fetch_frame, path), queries.values()), strict=True)
            )
        names = _Names(raw.pop("strings"))
        devices = columns.get("TARGET_INFO_CUDA_DEVICE", frozenset())
        cuda_numbers = _read_cuda_numbers(path, devices)
        read = {
            table: _cast_frame(table, frame, names)
            for table, frame in raw.items()
            if table != "memsets"
        }
        if "metrics" in read:
            read["metrics"] = _renumber_devices(read["metrics"], cuda_numbers)
        if "memsets" in raw:
            copies = read.get("copies", make_empty_frame("copies"))
            read["copies"] = pl.concat([copies, _cast_frame("copies", raw["memsets"], names)])
        empty = Trace(
            source=path.name,
            tracer=f"nsys {_read_version(path, columns)}",
            gpus=_order_gpus(
                _read_gpus(path, columns.get("TARGET_INFO_GPU", frozenset())), cuda_numbers
            ),
            diagnostics=_read_losses(path, columns.get("DIAGNOSTIC_EVENT", frozenset())),
            graph_launches_untraced=_read_number(
                path, columns, "CUPTI_ACTIVITY_KIND_GRAPH_TRACE", set(), "COUNT(*)"
            ),
            overhead_ns=_read_number(
                path, columns, "PROFILER_OVERHEAD", {"start", "end"}, 'SUM("end" - start)'
            ),
        )
    trace = add_frames(empty, read)
    if not any(frame.height for frame in (*trace.tables.values(), *trace.details.values())):
        raise BadInputError(
            f"{path}: the recording is empty: no kernels, API calls, or NVTX ranges"
        )
    return trace


class _Names:
    """Maps string ids to names by position in one list of categories, without a join per table."""

    def __init__(self, strings: pl.DataFrame) -> None:
        self.strings = strings.select(pl.col("id").cast(pl.Int64), pl.col("value").cast(pl.String))

    def of(self, ids: pl.Series) -> pl.Series:
        """Returns the names as categories; the name of an unknown id is its number."""
        used = ids.unique().drop_nulls().sort().rename("id").to_frame().cast(pl.Int64)
        known = used.join(self.strings, on="id", how="left", maintain_order="left")
        names = known.select(
            pl.coalesce("value", pl.format("[string {}]", "id")).cast(NAME_DTYPE)
        ).to_series()
        return names.gather(known["id"].search_sorted(ids.cast(pl.Int64)))


def _make_queries(columns: Columns) -> dict[str, str]:
    queries = {}
    for name, (table, expressions) in _SOURCES.items():
        known = columns.get(table, frozenset())
        if not known or {column.strip('"') for column in expressions.values()} & _ESSENTIAL - known:
            continue
        absent = _OPTIONAL.keys() - known
        selected = (
            f"{_OPTIONAL[column] if column in absent else column} AS {alias}"
            for alias, column in expressions.items()
        )
        queries[name] = f"SELECT {', '.join(selected)} FROM {table}"
    if columns.get("NVTX_EVENTS", frozenset()) >= {"start", "end", "text", "globalTid"}:
        queries["ranges"] = _make_ranges_query(columns["NVTX_EVENTS"])
    for name, (needed, query) in _DETAIL_QUERIES.items():
        if all(columns.get(table, frozenset()) >= known for table, known in needed.items()):
            queries[name] = query
    return queries


_DETAIL_QUERIES: Mapping[str, tuple[Mapping[str, frozenset[str]], str]] = {
    "metrics": (
        {
            "GPU_METRICS": frozenset({"timestamp", "typeId", "metricId", "value"}),
            "TARGET_INFO_GPU_METRICS": frozenset({"typeId", "metricId", "metricName"}),
        },
        "SELECT m.timestamp AS time_ns, m.typeId & 255 AS device, i.metricName AS name, "
        "CAST(m.value AS REAL) AS value FROM GPU_METRICS m JOIN (SELECT DISTINCT typeId, metricId, "
        "metricName FROM TARGET_INFO_GPU_METRICS) i ON i.typeId = m.typeId AND i.metricId = m.metricId",
    ),
    "os_calls": (
        {"OSRT_API": frozenset({"start", "end", "globalTid", "nameId"})},
        'SELECT start AS start_ns, "end" AS end_ns, globalTid AS thread, nameId AS name FROM OSRT_API',
    ),
    "stacks": (
        {
            "COMPOSITE_EVENTS": frozenset({"id", "start", "globalTid"}),
            "SAMPLING_CALLCHAINS": frozenset({"id", "symbol", "module", "stackDepth"}),
        },
        "SELECT e.start AS time_ns, e.globalTid AS thread, e.id AS sample, c.stackDepth AS depth, "
        "c.symbol AS name, c.module AS place, 'native' AS language FROM SAMPLING_CALLCHAINS c "
        "JOIN COMPOSITE_EVENTS e ON e.id = c.id",
    ),
    "switches": (
        {"SCHED_EVENTS": frozenset({"start", "isSchedIn", "globalTid"})},
        "SELECT start AS time_ns, globalTid AS thread, isSchedIn AS is_in FROM SCHED_EVENTS",
    ),
}
"""The tables and columns that a query needs, and the query, by table of a trace."""


def _make_ranges_query(known: frozenset[str]) -> str:
    """Selects ranges that ended; `text` is never NULL, because a column's type comes from its first rows."""
    registered = "textId" if "textId" in known else "NULL"
    domain = "domainId" if "domainId" in known else "0"
    return (
        f"SELECT e.start AS start_ns, e.\"end\" AS end_ns, e.globalTid AS thread, COALESCE(d.text || ':', '') || "
        f"COALESCE(e.text, s.value, '') AS name FROM (SELECT start, \"end\", globalTid, text, {registered} AS textId, {domain} AS "
        f'domainId FROM NVTX_EVENTS WHERE "end" IS NOT NULL AND eventType IN {_RANGE_EVENTS}) e '
        f"LEFT JOIN StringIds s ON s.id = e.textId LEFT JOIN (SELECT {domain} AS domainId, MIN(text) AS text FROM NVTX_EVENTS "
        f"WHERE eventType = {_DOMAIN_EVENT} GROUP BY 1) d ON d.domainId = e.domainId"
    )


def _cast_frame(table: str, frame: pl.DataFrame, names: _Names) -> pl.DataFrame:
    """Casts to the schema of `table`, and replaces ids and numbers by names."""
    named: list[pl.Series | pl.Expr] = []
    named += [
        names.of(frame[column]).alias(column)
        for column in ("name", "place")
        if column in frame.columns and frame[column].dtype.is_integer()
    ]
    if table == "stacks":  # the file's name, not its path
        frame, named = frame.with_columns(named), []
        named.append(rename_distinct(frame["place"], r"^.*/", "").alias("place"))
    if table == "ranges":  # a program names them as it likes
        named.append(_escape_names(frame["name"]))
    if table == "os_calls":  # nsys itself adds a call to report that it traces the operating system
        frame, named = _drop_reports(frame.with_columns(named)), []
    if table == "copies":
        named.append(_label("kind", {**COPY_KINDS, _MEMSET_KIND: MEMSET}))
        named += [_label(column, MEMORY_KINDS) for column in ("source_memory", "target_memory")]
    return frame.with_columns(named).select(
        pl.col(column).cast(dtype) for column, dtype in _ALL_SCHEMAS[table].items()
    )


def _escape_names(names: pl.Series) -> pl.Series:
    """Without line breaks and other control characters, which no table can show."""
    distinct = names.unique().drop_nulls().cast(pl.String)
    odd = {name: escape(name) for name in distinct if not name.isprintable()}
    plain = names.cast(pl.String)
    return plain.replace(odd) if odd else plain


def _drop_reports(calls: pl.DataFrame) -> pl.DataFrame:
    return calls.filter(~match_names(calls, "profiling started$"))


def match_names(frame: pl.DataFrame, pattern: str) -> pl.Series:
    """Which rows have a `name` that contains `pattern`, tested once per distinct name."""
    distinct = frame["name"].unique().drop_nulls()
    matching = distinct.filter(distinct.cast(pl.String).str.contains(pattern))
    return frame["name"].is_in(matching.implode()).fill_null(value=False)


def rename_distinct(names: pl.Series, pattern: str, replacement: str) -> pl.Series:
    """Replaces `pattern` once per distinct name, not per row."""
    distinct = names.unique()
    if distinct.is_empty():
        return names.cast(pl.String)
    renamed = distinct.cast(pl.String).str.replace(pattern, replacement)
    return names.replace_strict(distinct, renamed, return_dtype=pl.String)


def _label(column: str, labels: Mapping[int, str]) -> pl.Expr:
    return (
        pl.col(column)
        .cast(pl.Int64)
        .replace_strict(labels, default=None, return_dtype=pl.String)
        .alias(column)
    )


def _read_number(path: Path, columns: Columns, table: str, needed: set[str], aggregate: str) -> int:
    """0 if the table or a column is absent."""
    present = table in columns and columns[table] >= needed
    return _integer(_fetch_rows(path, f"SELECT {aggregate} FROM {table}")[0][0]) if present else 0


def _integer(value: object) -> int:
    """0 if `value` is not a number: any cell of an export may hold anything."""
    return int(value) if isinstance(value, int | float) and math.isfinite(value) else 0


def _read_version(path: Path, columns: Columns) -> str:
    """The version of nsys that made the export; up to 2022, the table of metadata has another name."""
    for table in ("META_DATA_EXPORT", "EXPORT_META_DATA"):
        if columns.get(table, frozenset()) >= {"name", "value"}:
            rows = _fetch_rows(
                path, f"SELECT value FROM {table} WHERE name = 'EXPORT_PRODUCT_VERSION'"
            )
            return str(rows[-1][0]) if rows else _UNKNOWN_VERSION
    return _UNKNOWN_VERSION


def _read_gpus(path: Path, known: frozenset[str]) -> tuple[Gpu, ...]:
    if "name" not in known:
        return ()
    wanted = (column if column in known else "NULL" for column in ("name", "smCount"))
    rows = _fetch_rows(path, f"SELECT {', '.join(wanted)} FROM TARGET_INFO_GPU ORDER BY id")
    return tuple(
        Gpu(str(name), _integer(multiprocessors) or None) for name, multiprocessors in rows
    )


def _read_cuda_numbers(path: Path, known: frozenset[str]) -> dict[int, int]:
    """CUDA's number of each GPU that a recorded process used, by the number that nsys gives it."""
    if not known >= {"gpuId", "cudaId"}:
        return {}
    rows = _fetch_rows(
        path, "SELECT gpuId, MIN(cudaId) FROM TARGET_INFO_CUDA_DEVICE GROUP BY gpuId"
    )
    return {_integer(gpu): _integer(cuda) for gpu, cuda in rows}


def _order_gpus(gpus: tuple[Gpu, ...], cuda_numbers: Mapping[int, int]) -> tuple[Gpu, ...]:
    """The GPUs in the order of CUDA's numbers, which those of kernels are; GPUs that the program did not use follow."""
    placed = {
        cuda: gpus[at]
        for at, cuda in cuda_numbers.items()
        if 0 <= at < len(gpus) and 0 <= cuda < len(gpus)
    }
    others = (gpu for at, gpu in enumerate(gpus) if at not in cuda_numbers)
    return tuple(placed[at] if at in placed else next(others, gpus[at]) for at in range(len(gpus)))


def _renumber_devices(metrics: pl.DataFrame, cuda_numbers: Mapping[int, int]) -> pl.DataFrame:
    """Metrics under CUDA's numbers, as kernels have them, without those of GPUs that the program did not use.

    `CUDA_VISIBLE_DEVICES` makes the numbers differ. Where no metric is of a used GPU, they stay as nsys has them.
    """
    used = metrics.filter(pl.col("device").is_in(list(cuda_numbers)))
    if used.is_empty():
        return metrics
    return used.with_columns(pl.col("device").replace(cuda_numbers))


def _read_losses(path: Path, known: frozenset[str]) -> tuple[str, ...]:
    """The profiler's warnings and errors about lost events."""
    if not known >= {"text", "severity"}:
        return ()
    severities = f"({_SEVERITY_WARNING}, {_SEVERITY_WARNING + 1})"
    rows = _fetch_rows(path, f"SELECT text FROM DIAGNOSTIC_EVENT WHERE severity IN {severities}")
    texts = (str(row[0]).strip() for row in rows)
    lost = dict.fromkeys(
        text for text in texts if any(word in text.lower() for word in _LOSS_WORDS)
    )
    return tuple(f"nsys reports: {text}" for text in lost)


TABLES = "tables"
TRACE_JSON = "trace.json"
_RECORDINGS = (".nsys-rep", ".qdrep", ".qdstrm")


def trace_from_path(path: Path) -> Trace:
    """Reads any kind of recording. Raises BadInputError if it is damaged, and MissingError if only nsys could read it."""
    if path.is_dir():
        return trace_from_folder(path)
    if path.suffix not in _RECORDINGS:
        return trace_from_sqlite(path)
    require_file(path)
    with TemporaryDirectory(prefix="optpipe-") as scratch:
        return trace_from_sqlite(sqlite_from_recording(path, Path(scratch)))


MOST_DETAIL_ROWS = 1_500_000
"""Of each table of a source on request; Parquet files of more than 2,000,000 rows are not read."""


def write_trace(trace: Trace, directory: Path, most_rows: int = MOST_DETAIL_ROWS) -> None:
    """Writes each frame with rows as Parquet, and `trace.json`; neither contains the process environment.

    Of metrics and stacks that have more than `most_rows` rows, every n-th sample is written; of OS calls, the longest.
    """
    header = {
        table.name: getattr(trace, table.name)
        for table in fields(trace)
        if table.name not in _ALL_SCHEMAS
    }
    try:
        (directory / TABLES).mkdir(parents=True, exist_ok=True)
        details = {name: _thin(frame, most_rows) for name, frame in trace.details.items()}
        for table, frame in (trace.tables | details).items():
            if frame.height:
                plain = frame.with_columns(pl.col(pl.Categorical).cast(pl.String))
                plain.write_parquet(directory / TABLES / f"{table}.parquet", compression="zstd")
        (directory / TRACE_JSON).write_bytes(json_from_record(header))
    except OSError as error:
        problem = f"cannot write {directory}: {error.strerror or error}"
        raise StageError(
            f"{problem}; free some space or choose another " + Argument("workspace")
        ) from error


def _thin(frame: pl.DataFrame, most_rows: int) -> pl.DataFrame:
    if frame.height <= most_rows:
        return frame
    if "end_ns" in frame.columns:
        longest = frame.sort(pl.col("end_ns") - pl.col("start_ns"), descending=True)
        return longest.head(most_rows).sort("start_ns")
    step = -(-frame.height // most_rows)
    by = "sample" if "sample" in frame.columns else "time_ns"
    return frame.filter((pl.col(by).rank("dense") % step) == 0)


def trace_from_folder(directory: Path) -> Trace:
    """Reads the output of `write_trace`. Raises BadInputError if there is none, or it is damaged."""
    if not (directory / TRACE_JSON).is_file():
        inner = sorted(path.parent.name for path in directory.glob(f"*/{TRACE_JSON}"))
        hint = f"; pass one of its stages: {', '.join(inner)}" if inner else ""
        raise BadInputError(f"{directory}: no trace found{hint or ' (no trace.json)'}")
    return trace_from_files(Files(directory))


def trace_from_files(files: Files) -> Trace:
    header = {
        name: value
        for name, value in record_from_files(files, TRACE_JSON, dict).items()
        if name not in _ALL_SCHEMAS
    }
    empty = record_from_plain(header, Trace, files.folder / TRACE_JSON)
    with read_as_user_file(files.folder, "a recorded trace"):
        frames = {
            table: require_columns(read_parquet(files, name), table, files.folder / name)
            .select(*schema)
            .cast(dict(schema))  # type: ignore[arg-type]
            for table, schema in _ALL_SCHEMAS.items()
            if files.has(name := f"{TABLES}/{table}.parquet")
        }
    return add_frames(empty, frames)
