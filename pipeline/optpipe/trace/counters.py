"""Counters of Nsight Compute for the kernels that take longest: occupancy, DRAM bytes, Tensor pipe, waves, limiter.

The program runs once more under `ncu`, which repeats each launch until all counters are read, with the clocks as they are
(`--clock-control none`). Only launches of the first kernels' names inside the measured range are counted. Metrics and
sections: Nsight Compute documentation, "Kernel Profiling Guide". A counter that this GPU or version lacks is None.
"""

import csv
import io
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from optpipe.trace.kernels import find_function_name, make_comparable_name
from optpipe.trace.nsys import ITERATION_RANGE, MEASURED_RANGE
from optpipe.trace.tools import find_tool, run_to_end, run_tool

NCU_INSTALL_HINT = (
    "the nsight-compute package from NVIDIA's CUDA repository; it is also part of the CUDA Toolkit"
)
_PERMISSION_REMEDY = (
    "allow counters to all users (NVreg_RestrictProfilingToAdminUsers=0, see "
    "https://developer.nvidia.com/ERR_NVGPUCTRPERM), or run as root; in a container also --cap-add=SYS_ADMIN"
)
_SECTIONS = ("SpeedOfLight", "Occupancy", "LaunchStats", "ComputeWorkloadAnalysis")
_METRICS = (
    "gpu__time_duration.sum",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
)
_COLUMNS: Mapping[str, str] = {
    "duration_ns": r"^gpu__time_duration\.sum$",
    "dram_read_bytes": r"^dram__bytes_read\.sum$",
    "dram_written_bytes": r"^dram__bytes_write\.sum$",
    "dram_peak_percent": r"^(gpu__)?dram__throughput\.avg\.pct_of_peak_sustained_elapsed$|"
    r"^gpu__dram_throughput\.avg\.pct_of_peak_sustained_elapsed$",
    "sm_peak_percent": r"^sm__throughput\.avg\.pct_of_peak_sustained_elapsed$",
    "occupancy_percent": r"^sm__warps_active\.avg\.pct_of_peak_sustained_active$",
    "theoretical_occupancy_percent": r"^sm__maximum_warps_per_active_cycle_pct$",
    "tensor_pipe_percent": r"^sm__(inst_executed_)?pipe_tensor\w*?\.avg\.pct_of_peak_sustained_(active|elapsed)$",
    "waves": r"^launch__waves_per_multiprocessor$",
    "blocks": r"^launch__grid_size$",
    "threads_per_block": r"^launch__block_size$",
    "registers_per_thread": r"^launch__registers_per_thread$",
}
"""The columns of the raw page by field; the largest counts if several match."""
_LIMITS = {
    "registers": "launch__occupancy_limit_registers",
    "shared memory": "launch__occupancy_limit_shared_mem",
    "block size": "launch__occupancy_limit_warps",
    "blocks per multiprocessor": "launch__occupancy_limit_blocks",
    "barriers": "launch__occupancy_limit_barriers",
}
_FOLDERS = ("nvidia/nsight-compute/*/ncu", "../usr/local/cuda*/bin/ncu")
_FEWEST_LAUNCHES, _MOST_LAUNCHES = 40, 120
_MOST_OF_TIME = 0.5
_TIMEOUT_S = 600.0
_HIGH_PERCENT, _LOW_PERCENT = 60.0, 20.0
"""Nsight Compute calls a unit above 60% of its peak well used."""


@dataclass(frozen=True, slots=True)
class KernelCounters:
    """The mean over the counted launches of one kernel; None for what was not counted."""

    name: str
    launches: int
    duration_ns: float | None = None
    dram_read_bytes: float | None = None
    dram_written_bytes: float | None = None
    dram_peak_percent: float | None = None
    sm_peak_percent: float | None = None
    occupancy_percent: float | None = None
    """Warps that are active on average, of the most that fit."""
    theoretical_occupancy_percent: float | None = None
    tensor_pipe_percent: float | None = None
    waves: float | None = None
    """Blocks divided by those that the GPU runs at once."""
    blocks: float | None = None
    threads_per_block: float | None = None
    registers_per_thread: float | None = None
    occupancy_limit: str | None = None
    """The resource that allows the fewest blocks on a multiprocessor."""

    @property
    def dram_bytes(self) -> float | None:
        if self.dram_read_bytes is None or self.dram_written_bytes is None:
            return None
        return self.dram_read_bytes + self.dram_written_bytes

    @property
    def dram_bytes_per_s(self) -> float | None:
        return (
            self.dram_bytes / self.duration_ns * 1e9
            if self.dram_bytes and self.duration_ns
            else None
        )

    @property
    def tail_share(self) -> float | None:
        """Share of the last wave's places that stay empty, of all places: 0.5 for 1.0 to 2 waves half full."""
        return 1 - self.waves / math.ceil(self.waves) if self.waves else None

    @property
    def limiter(self) -> str:
        """What to look at first, by Nsight Compute's own rules of thumb."""
        dram, sm = self.dram_peak_percent, self.sm_peak_percent
        if dram is None or sm is None:
            return "unknown"
        if max(dram, sm) >= _HIGH_PERCENT:
            return "DRAM throughput" if dram >= sm else "arithmetic"
        if self.waves is not None and self.waves < 1:
            return "too few blocks to fill the GPU"
        if (self.tail_share or 0) > 0.25 and (self.waves or 0) < 4:
            return "last wave mostly empty"
        if self.occupancy_percent is not None and self.occupancy_percent < _LOW_PERCENT:
            return f"low occupancy ({self.occupancy_limit or 'unknown limit'})"
        return "latency"


@dataclass(frozen=True, slots=True)
class Counters:
    """Kernels of one stage, longest first; empty with the reason if ncu could not count."""

    tool: str
    kernels: tuple[KernelCounters, ...] = ()
    why: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class CountedWork:
    """The counted kernels of a stage together, weighted by their time in the recording."""

    share: float
    """Of all kernel time."""
    dram_bytes: float | None
    """Per iteration; None if not every launch was counted."""
    dram_peak_share: float
    """Of the sustained peak of DRAM."""
    sm_peak_share: float

    @property
    def representative(self) -> bool:
        """Whether most of the kernel time was counted."""
        return self.share >= _MOST_OF_TIME


def weigh_counters(
    counters: Counters | None, kernels: Iterable[tuple[str | None, int, int]], iterations: int
) -> CountedWork | None:
    """`kernels` are the name, time in ns, and launches of each kernel of the recording. None if nothing was counted.

    A kernel without a name, which a damaged recording may have, was not counted.
    """
    if counters is None:
        return None

    counted = {make_comparable_name(kernel.name): kernel for kernel in counters.kernels}
    total_ns, matched = 0, list[tuple[KernelCounters, int, int]]()
    for name, time_ns, launches in kernels:
        total_ns += time_ns
        kernel = None if name is None else counted.get(make_comparable_name(name))
        if kernel and kernel.dram_peak_percent is not None and kernel.sm_peak_percent is not None:
            matched.append((kernel, time_ns, launches))
    matched_ns = sum(time_ns for _, time_ns, _ in matched)
    if not matched_ns:
        return None
    dram, sm = (
        sum(time_ns * (getattr(kernel, percent) or 0.0) for kernel, time_ns, _ in matched)
        / matched_ns
        / 100
        for percent in ("dram_peak_percent", "sm_peak_percent")
    )
    complete = all(kernel.launches * iterations >= launches for kernel, _, launches in matched)
    moved = [(kernel.dram_bytes, launches / iterations) for kernel, _, launches in matched]
    dram_bytes = sum(size * count for size, count in moved if size is not None)
    is_known = complete and all(size is not None for size, _ in moved)
    return CountedWork(matched_ns / total_ns, dram_bytes if is_known else None, dram, sm)


def find_ncu() -> Path:
    """Searches `OPTPIPE_NCU`, PATH, and the folders of NVIDIA's packages. Raises MissingError."""
    missing = f"Nsight Compute (ncu) not found; install it: {NCU_INSTALL_HINT}"
    return find_tool("ncu", "OPTPIPE_NCU", _FOLDERS, missing)


def make_ncu_command(
    ncu: Path,
    log: Path,
    kernels: Iterable[str],
    *,
    in_range: bool,
    launches: int = _FEWEST_LAUNCHES,
) -> list[str]:
    """The command before the program. `kernels` are full names, of which ncu compares the function's."""
    names = sorted({find_function_name(name) for name in kernels})
    command = [str(ncu), "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log)]
    command += ["--clock-control", "none", "--target-processes", "all", "--graph-profiling", "node"]
    for section in _SECTIONS:
        command += ["--section", section]
    command += ["--metrics", ",".join(_METRICS)]
    command += ["--kernel-name", f"regex:^({'|'.join(map(re.escape, names))})$"]
    command += [
        "--launch-count",
        str(min(max(launches, _FEWEST_LAUNCHES), _MOST_LAUNCHES)),
        "--kill",
        "yes",
    ]
    if in_range:
        # a push/pop range is named with a slash behind it (Nsight Compute CLI, "NVTX Filtering")
        command += ["--nvtx", "--nvtx-include", f"{MEASURED_RANGE}/{ITERATION_RANGE}/"]
    return command


def count_kernels(
    program: Sequence[str],
    kernels: Sequence[str],
    directory: Path,
    *,
    in_range: bool = True,
    launches: int = _FEWEST_LAUNCHES,
) -> Counters:
    """Runs `program` once more under ncu. A refusal is in the result. Raises MissingError without ncu.

    The first `launches` of the kernels are counted, within bounds: those of one iteration give its bytes.
    """
    ncu = find_ncu()
    tool = _read_version(ncu)
    if not kernels:
        return Counters(tool, why="the stage runs no kernels")
    log, output = directory / "ncu.csv", directory / "ncu.log"
    command = [*make_ncu_command(ncu, log, kernels, in_range=in_range, launches=launches), *program]
    run_to_end(command, output, os.environ, timeout_s=_TIMEOUT_S, ask_s=5.0, name="ncu")
    said = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    counted = counters_from_csv(said)
    if counted:
        return Counters(tool, counted)
    whole = said + output.read_text(encoding="utf-8", errors="replace")[-20_000:]
    if "ERR_NVGPUCTRPERM" in whole:
        why = "no permission to read this GPU's counters (ERR_NVGPUCTRPERM)"
        return Counters(tool, why=why, remedy=_PERMISSION_REMEDY)
    lines = [line.strip() for line in whole.splitlines() if line.startswith("==")]
    errors = [line for line in lines if "ERROR" in line] or lines
    return Counters(tool, why=f"ncu counted nothing: {(errors or ['no output'])[0][:300]}")


def counters_from_csv(text: str) -> tuple[KernelCounters, ...]:
    """Reads `ncu --csv --page raw --print-units base`; the line below the head holds the units.

    Lines of ncu and of the program around the table are left out.
    """
    lines = text.splitlines()
    head = next((at for at, line in enumerate(lines) if '"Kernel Name"' in line), None)
    if head is None:
        return ()
    rows: dict[str, list[dict[str, float | str]]] = {}
    table = "\n".join(line for line in lines[head:] if line.startswith('"'))
    for row in csv.DictReader(io.StringIO(table)):
        name = row.get("Kernel Name")
        values = _read_row(row)
        if name and values:
            rows.setdefault(name, []).append(values)
    averages = [_average(name, launches) for name, launches in rows.items()]
    return tuple(
        sorted(averages, key=lambda kernel: -kernel.launches * (kernel.duration_ns or 0.0))
    )


def _read_row(row: Mapping[str, str | None]) -> dict[str, float | str]:
    numbers = {
        column: number for column, text in row.items() if (number := _number(text)) is not None
    }
    values: dict[str, float | str] = {}
    for name, pattern in _COLUMNS.items():
        matching = [
            number for column, number in numbers.items() if column and re.search(pattern, column)
        ]
        if matching:
            values[name] = max(matching)
    limits = {word: numbers[column] for word, column in _LIMITS.items() if numbers.get(column)}
    if values and limits:
        values["occupancy_limit"] = min(limits, key=lambda word: limits[word])
    return values


def _number(text: str | None) -> float | None:
    plain = (text or "").replace(",", "").strip()
    try:
        value = float(plain)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _average(name: str, launches: Sequence[Mapping[str, float | str]]) -> KernelCounters:
    values: dict[str, float] = {}
    for column in _COLUMNS:
        known = [float(launch[column]) for launch in launches if column in launch]
        if known:
            values[column] = sum(known) / len(known)
    limits = [str(launch["occupancy_limit"]) for launch in launches if "occupancy_limit" in launch]
    limit = max(sorted(set(limits)), key=limits.count) if limits else None
    assert values.keys() <= {field.name for field in fields(KernelCounters)}
    return KernelCounters(name, len(launches), **values, occupancy_limit=limit)


def _read_version(ncu: Path) -> str:
    matched = re.search(r"Version (\S+)", run_tool([str(ncu), "--version"]).stdout)
    return f"ncu {matched[1]}" if matched else "ncu"
