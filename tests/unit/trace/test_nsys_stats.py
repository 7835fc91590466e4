"""`--range all` has the totals of `nsys stats` itself, to the nanosecond: kernels, API calls, copies, ranges, projections, OS calls."""

import csv
import io
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from tests.golden import phenomena
from tests.golden.nsys_export import Recording
from tests.unit.trace.conftest import SAMPLE

from optpipe.core.errors import MissingError
from optpipe.trace.analysis import VERSION_SUFFIX
from optpipe.trace.nsys import find_nsys, read_nsys_version
from optpipe.trace.read import trace_from_sqlite
from optpipe.trace.report import profile_from_trace
from optpipe.trace.sources import read_release

try:
    YEAR = read_release(read_nsys_version())[0]
except MissingError:
    YEAR = 0
pytestmark = pytest.mark.skipif(not YEAR, reason="needs Nsight Systems (nsys): .ci/install-nsys")
REPORTS = {
    "kernels": ("gpukernsum", "cuda_gpu_kern_sum", "Name"),
    "api": ("cudaapisum", "cuda_api_sum", "Name"),
    "copies": ("gpumemtimesum", "cuda_gpu_mem_time_sum", "Operation"),
    "ranges": ("nvtxsum", "nvtx_sum", "Range"),
    "projections": ("nvtxgpuproj", "nvtx_gpu_proj_trace", "Name"),
}
"""The report until 2022 and after it, and the column of the name."""
COPIES = {"HtoD": "Host-to-Device", "DtoH": "Device-to-Host", "DtoD": "Device-to-Device"}
LIMIT_S = 120
Totals = Mapping[str, tuple[int, int]]


def read_stats(export: Path, report: str) -> Totals:
    """Nanoseconds and rows by name, as `nsys stats` prints them."""
    until_2022, later, column = REPORTS[report]
    name = until_2022 if YEAR < 2023 else later
    said = subprocess.run(
        [str(find_nsys()), "stats", "--report", name, "--format", "csv", str(export)],
        capture_output=True,
        text=True,
        check=True,
        timeout=LIMIT_S,
    ).stdout
    lines = said.splitlines()
    at = next((at for at, line in enumerate(lines) if column in line.split(",")), None)
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for row in [] if at is None else csv.DictReader(io.StringIO("\n".join(lines[at:]))):
        ns = next(row[key] for key in row if key in ("Total Time (ns)", "Projected Duration (ns)"))
        count = next((row[key] for key in ("Instances", "Num Calls", "Count") if key in row), "1")
        found[row[column].strip()][0] += int(ns)
        found[row[column].strip()][1] += int(count)
    return {name: (ns, count) for name, (ns, count) in found.items()}


def name_copy(operation: str) -> str:
    if operation == "[CUDA memset]":
        return "Memset"
    return COPIES[operation.removeprefix("[CUDA memcpy ").removesuffix("]")]


def add_up(totals: Totals, rename: Callable[[str], str]) -> Totals:
    found: dict[str, tuple[int, int]] = {}
    for name, (ns, count) in totals.items():
        known = found.get(rename(name), (0, 0))
        found[rename(name)] = known[0] + ns, known[1] + count
    return found


@pytest.mark.parametrize(
    "build",
    [None, phenomena.copying, phenomena.overlapping, phenomena.graph_replay, phenomena.two_threads],
    ids=lambda build: "the H200's" if build is None else build.__name__,
)
def test_totals_of_a_whole_recording_are_those_of_nsys_stats(
    build: Callable[[], Recording] | None, tmp_path: Path
) -> None:
    export = tmp_path / "trace.sqlite"
    if build is None:
        shutil.copy(SAMPLE, export)
    else:
        build().write(export)
    views = profile_from_trace(trace_from_sqlite(export), "all").measured
    assert {row.name: (row.total_ns, row.count) for row in views.kernels} == read_stats(
        export, "kernels"
    )
    calls = add_up(read_stats(export, "api"), lambda name: re.sub(VERSION_SUFFIX, "", name))
    assert {row.name: (row.total_ns, row.count) for row in views.api} == calls
    copies: Totals = {}
    for row in views.copies:
        copies = add_up({**copies, f"{row.kind} ": (row.total_ns, row.count)}, str.strip)
    assert copies == add_up(read_stats(export, "copies"), name_copy)
    ranges = {row.name: (row.wall_ns, row.count) for row in views.ranges}
    assert ranges == read_stats(export, "ranges")
    if build is None:  # the built exports lack columns that the projection needs
        projected = read_stats(export, "projections")
        assert {row.name: row.projected_ns for row in views.ranges if row.projected_ns} == {
            name: ns for name, (ns, _) in projected.items()
        }
