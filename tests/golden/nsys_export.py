"""A builder of small nsys exports, so that a golden trace reads like the timeline it stands for.

Times are microseconds (everything in an export is nanoseconds): golden cases are worked out by hand.
"""

import sqlite3
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

PROCESS = 0x1000000000000
THREAD = PROCESS + 7
US = 1_000

_SCHEMA = """
CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE META_DATA_EXPORT (name TEXT NOT NULL, value TEXT);
CREATE TABLE TARGET_INFO_GPU (id INTEGER, name TEXT, smCount INTEGER, totalMemory INTEGER, memoryBandwidth INTEGER,
    computeMajor INTEGER, computeMinor INTEGER);
CREATE TABLE TARGET_INFO_SYSTEM_ENV (name TEXT, value TEXT);
"""
_TABLES = {
    "kernels": """CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, "end" INTEGER, deviceId INTEGER, streamId INTEGER,
        correlationId INTEGER, globalPid INTEGER, demangledName INTEGER, gridX INTEGER, gridY INTEGER, gridZ INTEGER,
        blockX INTEGER, blockY INTEGER, blockZ INTEGER, graphNodeId INTEGER)""",
    "api": """CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, "end" INTEGER, globalTid INTEGER,
        correlationId INTEGER, nameId INTEGER, returnValue INTEGER)""",
    "copies": """CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER, "end" INTEGER, deviceId INTEGER, streamId INTEGER,
        correlationId INTEGER, globalPid INTEGER, bytes INTEGER, copyKind INTEGER, srcKind INTEGER, dstKind INTEGER,
        graphNodeId INTEGER)""",
    "ranges": """CREATE TABLE NVTX_EVENTS (start INTEGER, "end" INTEGER, eventType INTEGER, text TEXT, textId INTEGER,
        globalTid INTEGER, domainId INTEGER)""",
    "graphs": """CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start INTEGER, "end" INTEGER, graphId INTEGER,
        correlationId INTEGER)""",
    "metrics": "CREATE TABLE GPU_METRICS (timestamp INTEGER, typeId INTEGER, metricId INTEGER, value INTEGER)",
    "metric_names": """CREATE TABLE TARGET_INFO_GPU_METRICS (typeId INTEGER, sourceId INTEGER, typeName TEXT,
        metricId INTEGER, metricName TEXT)""",
    "os_calls": """CREATE TABLE OSRT_API (start INTEGER, "end" INTEGER, eventClass INTEGER, globalTid INTEGER,
        correlationId INTEGER, nameId INTEGER, returnValue INTEGER, nestingLevel INTEGER, callchainId INTEGER)""",
    "samples": """CREATE TABLE COMPOSITE_EVENTS (id INTEGER, start INTEGER, cpu INTEGER, threadState INTEGER,
        globalTid INTEGER, cpuCycles INTEGER)""",
    "frames": """CREATE TABLE SAMPLING_CALLCHAINS (id INTEGER, symbol INTEGER, module INTEGER, kernelMode INTEGER,
        thumbCode INTEGER, unresolved INTEGER, specialEntry INTEGER, originalIP INTEGER, unresolvedSymbol INTEGER,
        stackDepth INTEGER)""",
    "switches": """CREATE TABLE SCHED_EVENTS (start INTEGER, cpu INTEGER, isSchedIn INTEGER, globalTid INTEGER,
        threadState INTEGER, threadBlock INTEGER)""",
    "cuda_devices": "CREATE TABLE TARGET_INFO_CUDA_DEVICE (gpuId INTEGER, cudaId INTEGER, pid INTEGER)",
    "diagnostics": "CREATE TABLE DIAGNOSTIC_EVENT (timestamp INTEGER, severity INTEGER, text TEXT)",
}


@dataclass
class Recording:
    """Rows by table, in the order in which they were added."""

    rows: dict[str, list[tuple[object, ...]]] = field(default_factory=dict)
    strings: dict[str, int] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    correlation: int = 0
    gpus: list[str] = field(default_factory=list)
    """Without any, there is one."""

    def call(self, name: str, start: float, end: float, thread: int = THREAD) -> int:
        """An API call; returns its correlation id."""
        self.correlation += 1
        self._add("api", (_ns(start), _ns(end), thread, self.correlation, self._string(name), 0))
        return self.correlation

    def kernel(
        self,
        name: str,
        start: float,
        end: float,
        launch: tuple[float, float] | int | None = None,
        *,
        stream: int = 7,
        blocks: int = 1000,
        node: int | None = None,
        thread: int = THREAD,
    ) -> None:
        """A kernel, launched by a call of its own from `launch[0]` to `launch[1]`, or by the call with that id."""
        correlation = (
            self.call("cudaLaunchKernel_v7000", *launch, thread=thread)
            if isinstance(launch, tuple)
            else launch or 0
        )
        row = (
            _ns(start),
            _ns(end),
            0,
            stream,
            correlation,
            PROCESS,
            self._string(name),
            blocks,
            1,
            1,
            128,
            1,
            1,
            node,
        )
        self._add("kernels", row)

    def copy(
        self,
        start: float,
        end: float,
        size: int,
        launch: tuple[float, float],
        *,
        kind: int = 1,
        source: int = 0,
        target: int = 2,
        stream: int = 7,
    ) -> None:
        """A copy: kind 1 host to device, 2 device to host; memory 0 pageable, 1 pinned, 2 device."""
        correlation = self.call("cudaMemcpyAsync_v3020", *launch)
        row = (
            _ns(start),
            _ns(end),
            0,
            stream,
            correlation,
            PROCESS,
            size,
            kind,
            source,
            target,
            None,
        )
        self._add("copies", row)

    def range(self, name: str, start: float, end: float, thread: int = THREAD) -> None:
        """A push/pop range."""
        self._add("ranges", (_ns(start), _ns(end), 59, name, None, thread, 0))

    def graph(self, start: float, end: float) -> None:
        """A CUDA graph recorded as one opaque row."""
        self._add(
            "graphs",
            (_ns(start), _ns(end), 1, self.call("cudaGraphLaunch_v10000", start - 5, start - 1)),
        )

    def gpu(self, name: str, cuda: int | None = None) -> None:
        """One more GPU, and the number that CUDA gives it in the recorded process; None if that does not use it."""
        self.gpus.append(name)
        if cuda is not None:
            self._add("cuda_devices", (len(self.gpus) - 1, cuda, 7))

    def metric(self, name: str, at: float, value: int, gpu: int = 0) -> None:
        """A sample of a metric of a GPU, under the number that nsys gives it."""
        kind = 1 << 8 | gpu
        known = [(row[0], row[4]) for row in self.rows.get("metric_names", [])]
        if (kind, name) not in known:
            self._add("metric_names", (kind, 0, "GPU Metrics", len(known), name))
            known.append((kind, name))
        self._add("metrics", (_ns(at), kind, known.index((kind, name)), value))

    def os_call(self, name: str, start: float, end: float, thread: int = THREAD) -> None:
        row = (_ns(start), _ns(end), 27, thread, 0, self._string(name), 0, 0, 0)
        self._add("os_calls", row)

    def stack(self, at: float, *frames: tuple[str, str], thread: int = THREAD) -> None:
        """A CPU sample: function and library of each frame, the running one first."""
        number = len(self.rows.get("samples", [])) + 1
        self._add("samples", (number, _ns(at), 0, 0, thread, 0))
        for depth, (function, library) in enumerate(frames):
            names = self._string(function), self._string(library)
            self._add("frames", (number, *names, 0, 0, 0, 0, 0, 0, depth))

    def switch(self, at: float, *, is_in: bool, thread: int = THREAD) -> None:
        self._add("switches", (_ns(at), 0, int(is_in), thread, 0, 0))

    def diagnostic(self, text: str, severity: int = 2) -> None:
        """What the profiler complains about."""
        self._add("diagnostics", (0, severity, text))

    def write(self, path: Path) -> Path:
        """Writes the export; like nsys, without the tables in which nothing was recorded."""
        with closing(sqlite3.connect(path)) as connection:
            connection.executescript(_SCHEMA)
            connection.executemany(
                "INSERT INTO META_DATA_EXPORT VALUES (?, ?)", [("EXPORT_SCHEMA_VERSION", "3.20.3")]
            )
            connection.executemany(
                "INSERT INTO TARGET_INFO_GPU VALUES (?, ?, 132, 150109880320, 4814304000000, 9, 0)",
                enumerate(self.gpus or ["NVIDIA H200"]),
            )
            connection.executemany(
                "INSERT INTO TARGET_INFO_SYSTEM_ENV VALUES (?, ?)", self.environment.items()
            )
            connection.executemany(
                "INSERT INTO StringIds VALUES (?, ?)",
                [(i, text) for text, i in self.strings.items()],
            )
            for table, rows in self.rows.items():
                connection.execute(_TABLES[table])
                name = _TABLES[table].split()[2]
                connection.executemany(
                    f"INSERT INTO {name} VALUES ({', '.join('?' * len(rows[0]))})", rows
                )
            connection.commit()
        return path

    def _add(self, table: str, row: tuple[object, ...]) -> None:
        self.rows.setdefault(table, []).append(row)

    def _string(self, text: str) -> int:
        return self.strings.setdefault(text, len(self.strings) + 1)


def _ns(microseconds: float) -> int:
    return round(microseconds * US)
