"""Counters of Nsight Compute for the kernels that take the most time: bytes from and to DRAM, cycles, shares of peak."""

import csv
import io
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from optpipe.core.events import Listener
from optpipe.errors import OptpipeError
from optpipe.trace.ranges import MEASURED_RANGE
from optpipe.trace.recording.capture import run_recorded

_METRICS = {
    "dram__bytes.sum": "dram_bytes",
    "gpu__time_duration.sum": "duration_ns",
    "sm__cycles_elapsed.max": "cycles",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "compute_peak_percent",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "dram_peak_percent",
}
_TOP = 5
_MOST_LAUNCHES = 150
_TIMEOUT_S = 600


def record_counters(
    program: Sequence[str], directory: Path, kernels: Sequence[Mapping[str, Any]], listener: Listener
) -> list[dict[str, Any]]:
    """Runs `program` once more under ncu for the first kernels of `kernels`; empty, with a warning, where that cannot be.

    Only launches inside the measured range count: the search for algorithms and the warm-up launch others.
    """
    ncu = shutil.which("ncu") or next(
        (str(path) for path in sorted(Path("/opt/nvidia/nsight-compute").glob("*/ncu"))), None
    )
    if ncu is None:
        listener.warn("ncu not found, so DRAM bytes were not counted; it ships with the CUDA Toolkit")
        return []
    names = {_base_name(str(row["name"])) for row in kernels[:_TOP]}
    pattern = "|".join(re.escape(name) for name in sorted(names))
    command = [ncu, "--csv", "--page", "raw", "--print-units", "base", "--metrics", ",".join(_METRICS)]
    command += ["--kernel-name", f"regex:^({pattern})$", "--launch-count", str(_MOST_LAUNCHES)]
    command += ["--target-processes", "all"]
    said = ""
    # A push/pop range is named with a slash behind it (Nsight Compute CLI, NVTX filtering).
    for bounds in (["--nvtx", "--nvtx-include", f"{MEASURED_RANGE}/"], []):
        try:
            said = _run_ncu([*command, *bounds], program, directory)
        except OptpipeError as error:
            listener.warn(f"ncu collected nothing: {error}")
            return []
        if "ERR_NVGPUCTRPERM" in said:
            listener.warn(
                "no permission to read this GPU's counters (ERR_NVGPUCTRPERM); ask an administrator to enable it"
            )
            return []
        rows = rows_from_csv(said)
        if rows:
            if not bounds:
                listener.warn("ncu found no launch inside the measured range; its counts include warm-up launches")
            return rows
    listener.warn(f"ncu collected nothing: {' '.join(said.strip()[-200:].split())}")
    return []


def _run_ncu(command: Sequence[str], program: Sequence[str], directory: Path) -> str:
    """What ncu wrote into its log, which the program's own output stays out of; else what either printed."""
    log = directory / "ncu.csv"
    log.unlink(missing_ok=True)
    _, printed = run_recorded([*command, "--log-file", str(log), *program], directory, _TIMEOUT_S)
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    return text if text.strip() else printed


def rows_from_csv(text: str) -> list[dict[str, Any]]:
    """One row per kernel name from ncu's raw page: the mean of its launches. The second line holds units."""
    lines = text.splitlines()
    head = next((number for number, line in enumerate(lines) if "Kernel Name" in line), None)
    if head is None:
        return []
    by_name: dict[str, list[dict[str, float]]] = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines[head:]))):
        name = row.get("Kernel Name") or ""
        values = {
            field: number for metric, field in _METRICS.items() if (number := _number(row.get(metric))) is not None
        }
        if name and values:
            by_name.setdefault(name, []).append(values)
    rows = [
        {"name": name, "launches": len(launches), **{field: _mean(launches, field) for field in launches[0]}}
        for name, launches in by_name.items()
    ]
    return sorted(rows, key=lambda row: -row["launches"] * row.get("duration_ns", 0.0))


def add_peak_shares(rows: Sequence[Mapping[str, Any]], bytes_per_s: float) -> list[dict[str, Any]]:
    """`rows` with the rate of each kernel's DRAM traffic, and its share of the memory's peak as the roofline has it."""
    found = []
    for row in rows:
        rate = row["dram_bytes"] / row["duration_ns"] * 1e9 if row.get("duration_ns") and "dram_bytes" in row else None
        found.append({**row, "dram_bytes_per_s": rate, "memory_peak_share": rate / bytes_per_s if rate else None})
    return found


def _mean(launches: Sequence[Mapping[str, float]], field: str) -> float:
    values = [each[field] for each in launches if field in each]
    return sum(values) / len(values)


def _number(text: str | None) -> float | None:
    try:
        return float((text or "").replace(",", ""))
    except ValueError:
        return None


def _base_name(name: str) -> str:
    """The function's own name, which is what ncu matches by default."""
    flat = re.sub(r"\(.*\)$", "", name)
    while (shorter := re.sub(r"<[^<>]*>", "", flat)) != flat:
        flat = shorter
    return flat.removeprefix("void ").rsplit("::", 1)[-1].strip()
