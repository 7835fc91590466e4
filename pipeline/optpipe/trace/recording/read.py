"""A trace from nsys' SQLite export: the one place that knows its table and column names.

Schema of the export: Nsight Systems user guide, "SQLite Schema Reference". Tables in which nothing was recorded may be
absent and columns vary from 2022.4 to 2025.x; every query is put together from the columns that are there.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import polars as pl

from optpipe.core.errors import BadInputError, first_line
from optpipe.trace.recording.export import NsysExport, fetch_frames, fetch_rows, open_export
from optpipe.trace.recording.frames import (
    NAME_DTYPE,
    SCHEMAS,
    Gpu,
    Trace,
    TraceHeader,
    make_empty_frame,
    trace_from_frames,
)

# CUPTI's enumerations (CUpti_ActivityMemcpyKind, CUpti_ActivityMemoryKind), with
# the labels and numbers that nsys gives them in its ENUM_ tables.
COPY_KINDS = {
    0: "Unknown", 1: "Host-to-Device", 2: "Device-to-Host", 3: "Host-to-Array", 4: "Array-to-Host", 5: "Array-to-Array",
    6: "Array-to-Device", 7: "Device-to-Array", 8: "Device-to-Device", 9: "Host-to-Host", 10: "Peer-to-Peer",
    11: "Unified Host-to-Device", 12: "Unified Device-to-Host", 13: "Unified Device-to-Device",
}  # fmt: skip
MEMORY_KINDS = {
    0: "Pageable", 1: "Pinned", 2: "Device", 3: "Array", 4: "Managed", 5: "Device Static", 6: "Managed Static", 7: "Unknown",
}  # fmt: skip
MEMSET = "Memset"
_MEMSET_KIND = -1  # no number of CUPTI's: memsets are read from a table of their own

_RANGE_EVENTS = "(59, 60, 70, 71)"  # NvtxPushPopRange, NvtxStartEndRange, and the same from text files (NVTXT)
_DOMAIN_EVENT = 75
_SEVERITY_WARNING = 2
_UNKNOWN_VERSION = "of unknown version"
_LOSS_WORDS = ("lost", "dropped", "overflow", "not collected", "insufficient", "incomplete", "exceeded")

_KERNEL, _API = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"
_MEMCPY, _MEMSET_TABLE = "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET"
_GRAPH = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"


def trace_from_sqlite(path: Path) -> Trace:
    """Reads the export at `path`.

    Raises:
        BadInputError: the file is not a whole export of nsys, or nothing at all was recorded in it.
    """
    export = open_export(path)
    raw = fetch_frames(export, {"strings": "SELECT id, value FROM StringIds", **_make_queries(export)})
    try:
        names = _Names(raw.pop("strings"))
        read = {table: _cast_frame(table, frame, names) for table, frame in raw.items() if table != "memsets"}
        if "memsets" in raw:
            read["copies"] = pl.concat(
                [read.get("copies", make_empty_frame("copies")), _cast_frame("copies", raw["memsets"], names)]
            )
    except pl.exceptions.PolarsError as error:
        raise BadInputError(
            f"{path}: the export is damaged: invalid values in a column ({first_line(error)[:120]})"
        ) from error
    header = TraceHeader(
        source=path.name,
        tracer=f"nsys {_read_version(export)}",
        gpus=_read_gpus(export),
        diagnostics=_read_losses(export),
        graph_launches_untraced=_read_number(export, _GRAPH, (), "COUNT(*)"),
        overhead_ns=_read_number(export, "PROFILER_OVERHEAD", ("start", "end"), 'SUM("end" - start)'),
    )
    trace = trace_from_frames(header, read)
    if not any(frame.height for frame in trace.tables.values()):
        raise BadInputError(f"{path}: the recording is empty: no kernels, API calls, NVTX ranges, or OS calls")
    return trace


class _Names:
    """String ids to names, by position in one shared list of categories instead of a join per table."""

    def __init__(self, strings: pl.DataFrame) -> None:
        self.strings = strings.select(pl.col("id").cast(pl.Int64), pl.col("value").cast(pl.String))

    def of(self, ids: pl.Series) -> pl.Series:
        """The names of `ids` as categories; an unknown id reads as its number."""
        used = ids.unique().drop_nulls().sort().rename("id").to_frame().cast(pl.Int64)
        known = used.join(self.strings, on="id", how="left", maintain_order="left")
        names = known.select(pl.coalesce("value", pl.format("[string {}]", "id")).cast(NAME_DTYPE)).to_series()
        return names.gather(known["id"].search_sorted(ids.cast(pl.Int64)))


def _make_queries(export: NsysExport) -> dict[str, str]:
    queries = {}
    if export.has(_KERNEL, "start", "end", "demangledName"):
        queries["kernels"] = (
            f"SELECT {_operation(export, _KERNEL)}, demangledName AS name, gridX * gridY * gridZ AS blocks, "
            f"{_column(export, _KERNEL, 'graphNodeId')} AS graph_node FROM {_KERNEL}"
        )
    if export.has(_API, "start", "end", "nameId"):
        queries["api"] = (
            'SELECT start AS start_ns, "end" AS end_ns, globalTid AS thread, correlationId AS correlation_id, '
            f"nameId AS name FROM {_API}"
        )
    if export.has(_MEMCPY, "start", "end", "bytes", "copyKind"):
        queries["copies"] = (
            f"SELECT {_operation(export, _MEMCPY)}, bytes, copyKind AS kind, "
            f"{_column(export, _MEMCPY, 'srcKind')} AS source_memory, "
            f"{_column(export, _MEMCPY, 'dstKind')} AS target_memory, "
            f"{_column(export, _MEMCPY, 'graphNodeId')} AS graph_node FROM {_MEMCPY}"
        )
    if export.has(_MEMSET_TABLE, "start", "end", "bytes"):
        queries["memsets"] = (
            f"SELECT {_operation(export, _MEMSET_TABLE)}, bytes, {_MEMSET_KIND} AS kind, NULL AS source_memory, "
            f"{_column(export, _MEMSET_TABLE, 'memKind')} AS target_memory, "
            f"{_column(export, _MEMSET_TABLE, 'graphNodeId')} AS graph_node FROM {_MEMSET_TABLE}"
        )
    if export.has("NVTX_EVENTS", "start", "end", "text", "globalTid"):
        queries["ranges"] = _ranges_query(export)
    if export.has("OSRT_API", "start", "end", "nameId", "globalTid"):
        queries["os_runtime"] = (
            'SELECT start AS start_ns, "end" AS end_ns, globalTid AS thread, nameId AS name FROM OSRT_API'
        )
    if export.has("GPU_METRICS", "timestamp", "typeId", "metricId", "value") and export.has(
        "TARGET_INFO_GPU_METRICS", "typeId", "metricId", "metricName"
    ):
        queries["metrics"] = (
            "SELECT m.timestamp AS time_ns, m.typeId & 255 AS device, i.metricName AS name, m.value AS value FROM GPU_METRICS m JOIN "
            "(SELECT DISTINCT typeId, metricId, metricName FROM TARGET_INFO_GPU_METRICS) i "
            "ON i.typeId = m.typeId AND i.metricId = m.metricId"
        )
    return queries


def _ranges_query(export: NsysExport) -> str:
    """Ranges that ended; `text` is never NULL, because a column's type is taken from its first rows."""
    registered = "textId" if export.has("NVTX_EVENTS", "textId") else "NULL"
    domain = "domainId" if export.has("NVTX_EVENTS", "domainId") else "0"
    return (
        f"SELECT e.start AS start_ns, e.\"end\" AS end_ns, e.globalTid AS thread, COALESCE(d.text || ':', '') || "
        f"COALESCE(e.text, s.value, '') AS name FROM (SELECT start, \"end\", globalTid, text, {registered} AS textId, {domain} AS "
        f'domainId FROM NVTX_EVENTS WHERE "end" IS NOT NULL AND eventType IN {_RANGE_EVENTS}) e '
        f"LEFT JOIN StringIds s ON s.id = e.textId LEFT JOIN (SELECT {domain} AS domainId, MIN(text) AS text FROM NVTX_EVENTS "
        f"WHERE eventType = {_DOMAIN_EVENT} GROUP BY 1) d ON d.domainId = e.domainId"
    )


def _operation(export: NsysExport, table: str) -> str:
    """The columns that kernels, copies and memsets have in common."""
    pid = _column(export, table, "globalPid", "0")
    return f'start AS start_ns, "end" AS end_ns, deviceId AS device, streamId AS stream, correlationId AS correlation_id, {pid} AS pid'


def _column(export: NsysExport, table: str, column: str, otherwise: str = "NULL") -> str:
    return column if export.has(table, column) else otherwise


def _cast_frame(table: str, frame: pl.DataFrame, names: _Names) -> pl.DataFrame:
    """`frame` with the columns and types of `table`'s schema, ids and numbers turned into names."""
    named: list[pl.Series | pl.Expr] = []
    if "name" in frame.columns and frame["name"].dtype.is_integer():
        named.append(names.of(frame["name"]).alias("name"))
    if table == "copies":
        named.append(_label("kind", {**COPY_KINDS, _MEMSET_KIND: MEMSET}))
        named += [_label(column, MEMORY_KINDS) for column in ("source_memory", "target_memory")]
    columns = (pl.col(column).cast(dtype) for column, dtype in SCHEMAS[table].items())
    return frame.with_columns(named).select(columns)


def _label(column: str, labels: Mapping[int, str]) -> pl.Expr:
    return pl.col(column).cast(pl.Int64).replace_strict(labels, default=None, return_dtype=pl.String).alias(column)


def _read_number(export: NsysExport, table: str, columns: tuple[str, ...], aggregate: str) -> int:
    """`aggregate` over a table; 0 where it is absent."""
    return _integer(fetch_rows(export, f"SELECT {aggregate} FROM {table}")[0][0]) if export.has(table, *columns) else 0


def _integer(value: object) -> int:
    """0 for what is not a number: any cell of an export may hold anything."""
    return int(value) if isinstance(value, int | float) and math.isfinite(value) else 0


def _read_version(export: NsysExport) -> str:
    """The version of nsys that made the export; its table of metadata had another name up to 2022."""
    for table in ("META_DATA_EXPORT", "EXPORT_META_DATA"):
        if export.has(table, "name", "value"):
            found = fetch_rows(export, f"SELECT value FROM {table} WHERE name = 'EXPORT_PRODUCT_VERSION'")
            return str(found[-1][0]) if found else _UNKNOWN_VERSION
    return _UNKNOWN_VERSION


def _read_gpus(export: NsysExport) -> tuple[Gpu, ...]:
    table = "TARGET_INFO_GPU"
    if not export.has(table, "name"):
        return ()
    wanted = ("name", "computeMajor", "computeMinor", "smCount", "totalMemory", "memoryBandwidth")
    found = fetch_rows(
        export, f"SELECT {', '.join(_column(export, table, column) for column in wanted)} FROM {table} ORDER BY id"
    )
    return tuple(
        Gpu(
            name=str(name),
            compute_capability=None if major is None else f"{major}.{minor}",
            multiprocessors=_integer(multiprocessors) or None,
            memory_bytes=_integer(memory) or None,
            bandwidth_bytes_per_s=_integer(bandwidth) or None,
        )
        for name, major, minor, multiprocessors, memory, bandwidth in found
    )


def _read_losses(export: NsysExport) -> tuple[str, ...]:
    """The profiler's warnings and errors that speak of events it lost."""
    if not export.has("DIAGNOSTIC_EVENT", "text", "severity"):
        return ()
    found = fetch_rows(
        export, f"SELECT text FROM DIAGNOSTIC_EVENT WHERE severity IN ({_SEVERITY_WARNING}, {_SEVERITY_WARNING + 1})"
    )
    texts = (str(row[0]).strip() for row in found)
    lost = dict.fromkeys(text for text in texts if any(word in text.lower() for word in _LOSS_WORDS))
    return tuple(f"nsys reports: {text}" for text in lost)
