"""How long `optpipe profile --trace` takes beside `nsys stats`, on exports of a tenth, one and four million kernels.

usage: python benchmarks/trace_views.py [--nsys PATH] [KERNELS ...]
       PYTHONPATH=pipeline python benchmarks/trace_views.py --modules [KERNELS ...]

Each export has two API calls per kernel and three levels of NVTX ranges. The command under test reads it, makes every
view, judges it, and prints the JSON document; its time includes the start of the process. `nsys stats` makes its four
tables (kernels, API calls, ranges projected on the GPU, launch and queue times) in the same run, file in the page cache.
Modules are compiled once before, as in any installation after its first run, also where PYTHONDONTWRITEBYTECODE is set:
compiling 1,400 of them anew takes 0.8 s.

`--modules` names the innermost ranges after modules of two levels, and times the tree of modules alone, without the reading.
"""

import argparse
import os
import shutil
import sqlite3
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

PERIOD_NS = 9_000
PER_ITERATION = 282
PER_LAYER = 28
NAMES = 60
PROCESS = 281_486_418_771_968
REPORTS = {
    2022: "gpukernsum,cudaapisum,nvtxgpuproj,kernexecsum",
    2023: "cuda_gpu_kern_sum,cuda_api_sum,nvtx_gpu_proj_sum,cuda_kern_exec_sum",
}
SCHEMA = """
PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE META_DATA_EXPORT (name TEXT NOT NULL, value TEXT);
INSERT INTO META_DATA_EXPORT VALUES ('EXPORT_SCHEMA_VERSION', '3.20.3'), ('EXPORT_SCHEMA_VERSION_MAJOR', '3'),
    ('EXPORT_SCHEMA_VERSION_MINOR', '20'), ('EXPORT_SCHEMA_VERSION_MICRO', '3');
CREATE TABLE TARGET_INFO_GPU (vmId INTEGER NOT NULL, id INTEGER NOT NULL, name TEXT, smCount INTEGER, totalMemory INTEGER);
INSERT INTO TARGET_INFO_GPU VALUES (281474976710656, 0, 'NVIDIA H200', 132, 150109880320);
CREATE TABLE TARGET_INFO_CUDA_DEVICE (gpuId INTEGER, cudaId INTEGER NOT NULL, pid INTEGER NOT NULL);
INSERT INTO TARGET_INFO_CUDA_DEVICE VALUES (0, 0, 682);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, "end" INTEGER NOT NULL, eventClass INTEGER NOT NULL,
    globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL, callchainId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, "end" INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER NOT NULL, greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
    demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, mangledName INTEGER, launchType INTEGER, cacheConfig INTEGER,
    registersPerThread INTEGER NOT NULL, gridX INTEGER NOT NULL, gridY INTEGER NOT NULL, gridZ INTEGER NOT NULL,
    blockX INTEGER NOT NULL, blockY INTEGER NOT NULL, blockZ INTEGER NOT NULL, staticSharedMemory INTEGER NOT NULL,
    dynamicSharedMemory INTEGER NOT NULL, localMemoryPerThread INTEGER NOT NULL, localMemoryTotal INTEGER NOT NULL,
    gridId INTEGER NOT NULL, sharedMemoryExecuted INTEGER, graphNodeId INTEGER, sharedMemoryLimitConfig INTEGER);
CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, "end" INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER,
    category INTEGER, color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, domainId INTEGER,
    uint64Value INTEGER, int64Value INTEGER, doubleValue REAL, uint32Value INTEGER, int32Value INTEGER, floatValue REAL,
    jsonTextId INTEGER, jsonText TEXT, binaryData TEXT);
"""
_SERIES = "WITH RECURSIVE series(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM series WHERE i + 1 < {count}) "


LAYER = f"'layer' || i % {PER_ITERATION}"
PART = f"(i % {PER_ITERATION} / {{}})"
MODULE = (
    f"'optpipe.module:layer' || {PART.format(2 * PER_LAYER)} || '.' || {PART.format(PER_LAYER)}"
)


def make_export(path: Path, kernels: int, layer: str = LAYER) -> None:
    """Writes an export in which every launch of 1.5 to 4 µs starts a kernel of 1 to 5 µs half a microsecond later."""
    thread = PROCESS + 682
    begin, launch_end = f"i * {PERIOD_NS}", f"i * {PERIOD_NS} + 1500 + i * 31 % 2500"
    columns = 'start, "end", eventType, text, globalTid, domainId'
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(SCHEMA)
        names = [
            f"void library::kernel_{number}<{'float' if number % 2 else '__half'}, 128>(T1 *, int)"
            for number in range(NAMES)
        ]
        calls = ["cudaLaunchKernel_v7000", "cudaStreamIsCapturing_v10000"]
        connection.executemany(
            "INSERT INTO StringIds VALUES (?, ?)", list(enumerate([*names, *calls], 1))
        )
        series = _SERIES.format(count=kernels)
        connection.execute(
            f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL {series} SELECT {launch_end} + 500, {launch_end} + 1500 + i * 7919 % 4000, "
            f"0, 1, NULL, 7, 2 * i + 2, {PROCESS}, 1 + i % {PER_ITERATION} % {NAMES}, 1 + i % {NAMES}, NULL, 1, 1, 32, 1 + i % 300, "
            "1, 1, 128, 1, 1, 0, 0, 0, 0, i, 32768, NULL, 0 FROM series"
        )
        for offset, end, correlation, name in (
            (-1200, "i * 9000 - 400", 1, NAMES + 2),
            (0, launch_end, 2, NAMES + 1),
        ):
            connection.execute(
                f"INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME {series} SELECT {begin} + {offset}, {end}, 0, {thread}, "
                f"2 * i + {correlation}, {name}, 0, NULL FROM series"
            )
        for label, length in (
            ("'optpipe.measure'", kernels),
            ("'iter'", PER_ITERATION),
            (layer, PER_LAYER),
        ):
            inset = {"'optpipe.measure'": 1500, "'iter'": 1400}.get(label, 1300)
            connection.execute(
                f"INSERT INTO NVTX_EVENTS ({columns}) {series} SELECT {begin} - {inset}, MIN(i + {length}, {kernels}) * {PERIOD_NS} - "
                f"3000 + {inset}, 59, {label}, {thread}, 0 FROM series WHERE i % {length} = 0"
            )
        connection.commit()


def timed(command: Sequence[str], output: Path) -> tuple[float, float, int]:
    """Seconds, processor seconds and peak resident bytes of a command, which has to succeed."""
    with output.open("wb") as out:
        started = time.perf_counter()
        process = os.posix_spawnp(
            command[0],
            list(command),
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, out.fileno(), 1),
                (os.POSIX_SPAWN_DUP2, out.fileno(), 2),
            ],
        )
        _, status, usage = os.wait4(process, 0)
        seconds = time.perf_counter() - started
    if os.waitstatus_to_exitcode(status):
        sys.exit(
            f"{' '.join(command)}: exit {os.waitstatus_to_exitcode(status)}\n{output.read_text(errors='replace')[-500:]}"
        )
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def warm_up(scratch: Path) -> None:
    """Runs the command once on a small export, so that its modules are compiled."""
    make_export(scratch / "small.sqlite", 1000)
    timed(
        [
            sys.executable,
            "-m",
            "optpipe",
            "profile",
            "--trace",
            str(scratch / "small.sqlite"),
            "--json",
        ],
        scratch / "output",
    )


def nsys_year(nsys: str) -> int:
    """The year in what `nsys --version` says."""
    import subprocess

    text = subprocess.run([nsys, "--version"], capture_output=True, text=True, check=True).stdout
    return int(next(word for word in text.split() if word[:2] == "20")[:4])


def time_module_tree(export: Path) -> tuple[float, int]:
    """Seconds that the tree takes, of a recording that is already read, and its rows."""
    from optpipe.trace.analysis import analysis_from_trace, select_measured_part
    from optpipe.trace.modules import make_module_tree
    from optpipe.trace.read import trace_from_sqlite

    measured = select_measured_part(analysis_from_trace(trace_from_sqlite(export)))
    begun = time.perf_counter()
    tree = make_module_tree(measured)
    return time.perf_counter() - begun, len(tree.rows) if tree else 0


def main() -> None:
    """Prints one row per export; the ratio to `nsys stats` up to a million kernels."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nsys", default=shutil.which("nsys"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("kernels", type=float, nargs="*", default=[1e5, 1e6, 4e6])
    parser.add_argument("--modules", action="store_true")
    arguments = parser.parse_args()
    if arguments.modules:
        with TemporaryDirectory() as scratch:
            for kernels in map(int, arguments.kernels):
                export = Path(scratch) / f"{kernels}.sqlite"
                make_export(export, kernels, MODULE)
                seconds, rows = min(time_module_tree(export) for _ in range(arguments.repeats))
                print(f"{kernels:,} kernels: a tree of {rows} modules in {seconds:.2f} s")
        return
    head = [
        "kernels",
        "optpipe profile s (CPU s)",
        "µs per kernel",
        "peak MB",
        "nsys stats s (CPU s)",
        "ratio (of CPU s)",
    ]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with TemporaryDirectory() as scratch:
        os.environ["PYTHONPYCACHEPREFIX"] = f"{scratch}/bytecode"
        warm_up(Path(scratch))
        for kernels in map(int, arguments.kernels):
            export, output = Path(scratch) / f"{kernels}.sqlite", Path(scratch) / "output"
            make_export(export, kernels)
            command = [sys.executable, "-m", "optpipe", "profile", "--trace", str(export), "--json"]
            results = [timed(command, output) for _ in range(arguments.repeats)]
            seconds, busy, peak = min(results)
            other, ratio = "", ""
            if arguments.nsys and kernels <= 1_000_000:
                reports = REPORTS[2022 if nsys_year(arguments.nsys) < 2023 else 2023]
                stats = [
                    arguments.nsys,
                    "stats",
                    "--report",
                    reports,
                    "--format",
                    "csv",
                    str(export),
                ]
                of_nsys, busy_of_nsys, _ = min(
                    timed(stats, output) for _ in range(arguments.repeats)
                )
                other = f"{of_nsys:.2f} ({busy_of_nsys:.2f})"
                ratio = f"{seconds / of_nsys:.2f} ({busy / busy_of_nsys:.2f})"
            row = f"| {kernels:,} | {seconds:.2f} ({busy:.2f}) | {seconds / kernels * 1e6:.2f} | {peak / 1e6:.0f} | {other} | {ratio} |"
            print(row, flush=True)
            export.unlink()


main()
