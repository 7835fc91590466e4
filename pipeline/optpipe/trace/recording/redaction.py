"""What of a raw export may leave the machine: what the frames are made of, never the environment it was recorded in.

A raw export carries environment variables, command lines, host and user names, paths and the GPU's UUID in
TARGET_INFO_SYSTEM_ENV, META_DATA_CAPTURE, PROCESSES, ProcessStreams and StringIds. Everything here is an allow-list: a
table or string that is not needed for the frames is not copied.
"""

import sqlite3
from contextlib import closing
from pathlib import Path

from optpipe.core.errors import BadInputError, StageError
from optpipe.trace.recording.export import NsysExport, open_export

_TABLES = (
    "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET",
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", "CUPTI_ACTIVITY_KIND_GRAPH_TRACE", "NVTX_EVENTS", "OSRT_API", "PROFILER_OVERHEAD",
    "CUDA_GPU_MEMORY_USAGE_EVENTS", "GPU_METRICS", "TARGET_INFO_GPU_METRICS",
)  # fmt: skip
_LEFT_OUT = {"NVTX_EVENTS": {"jsonText", "jsonTextId", "binaryData"}}
"""Payloads of any content."""
_NAME_COLUMNS = ("demangledName", "shortName", "nameId", "textId")
_GPU_COLUMNS = ("name", "id", "smCount", "totalMemory", "memoryBandwidth", "computeMajor", "computeMinor")
_METADATA = ("EXPORT_PRODUCT_NAME", "EXPORT_PRODUCT_VERSION", "EXPORT_SCHEMA_VERSION")
KEEP_RAW_WARNING = "the raw trace contains the whole process environment, host name, and paths in clear text: never attach or commit it"


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
        for table in (name for name in _TABLES if name in export.columns):
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
