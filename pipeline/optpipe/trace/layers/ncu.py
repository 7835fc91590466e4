"""Counters of Nsight Compute for the kernels that take the most time: bytes from and to DRAM, cycles, shares of peak."""

import csv
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from optpipe.core.errors import OptpipeError
from optpipe.core.events import Listener
from optpipe.trace.ranges import MEASURED_RANGE
from optpipe.trace.recording.nsys import run_recorded

_METRICS = {
    "dram__bytes.sum": "dram_bytes",
    "gpu__time_duration.sum": "duration_ns",
    "sm__cycles_elapsed.max": "cycles",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "compute_peak_percent",
}
_TOP = 5
_MOST_LAUNCHES = 150
_TIMEOUT_S = 600


@dataclass(frozen=True, slots=True)
class KernelCounters:
    """What ncu counted for one kernel name, the mean of its launches; None for what it did not count."""

    name: str
    launches: int
    dram_bytes: float | None = None
    duration_ns: float | None = None
    cycles: float | None = None
    compute_peak_percent: float | None = None

    @property
    def dram_bytes_per_s(self) -> float | None:
        return self.dram_bytes / self.duration_ns * 1e9 if self.dram_bytes and self.duration_ns else None


def record_counters(
    program: Sequence[str], directory: Path, kernels: Iterable[str], listener: Listener
) -> tuple[KernelCounters, ...]:
    """Runs `program` once more under ncu for the first of `kernels`; empty, with a warning, where that cannot be.

    Only launches inside the measured range count: the search for algorithms and the warm-up launch others.
    """
    ncu = shutil.which("ncu") or next(map(str, sorted(Path("/opt/nvidia/nsight-compute").glob("*/ncu"))), None)
    if ncu is None:
        listener.warn("ncu not found, so DRAM bytes were not counted; it ships with the CUDA Toolkit")
        return ()
    names = sorted({_base_name(name) for name in list(kernels)[:_TOP]})
    command = [ncu, "--csv", "--page", "raw", "--print-units", "base", "--metrics", ",".join(_METRICS)]
    command += ["--kernel-name", f"regex:^({'|'.join(map(re.escape, names))})$", "--launch-count", str(_MOST_LAUNCHES)]
    command += ["--target-processes", "all"]
    said = ""
    # A push/pop range is named with a slash behind it (Nsight Compute CLI, NVTX filtering).
    for bounds in (["--nvtx", "--nvtx-include", f"{MEASURED_RANGE}/"], []):
        try:
            said = _run_ncu([*command, *bounds], program, directory)
        except OptpipeError as error:
            said = str(error)
            break
        if "ERR_NVGPUCTRPERM" in said:
            said = "no permission to read this GPU's counters (ERR_NVGPUCTRPERM); ask an administrator to enable it"
            break
        if found := counters_from_csv(said):
            if not bounds:
                listener.warn("ncu found no launch inside the measured range; its counts include warm-up launches")
            return found
    listener.warn(f"ncu collected nothing: {' '.join(said.strip()[-200:].split())}")
    return ()


def _run_ncu(command: Sequence[str], program: Sequence[str], directory: Path) -> str:
    """What ncu wrote into its log, which the program's own output stays out of; else what either printed."""
    log = directory / "ncu.csv"
    log.unlink(missing_ok=True)
    _, printed = run_recorded([*command, "--log-file", str(log), *program], directory, _TIMEOUT_S)
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    return text if text.strip() else printed


def counters_from_csv(text: str) -> tuple[KernelCounters, ...]:
    """The kernels of ncu's raw page, what takes longest in sum first. The page's second line holds units."""
    lines = text.splitlines()
    head = next((number for number, line in enumerate(lines) if "Kernel Name" in line), len(lines))
    launches: dict[str, list[dict[str, float]]] = {}
    for row in csv.DictReader(lines[head:]):
        values = {
            _METRICS[metric]: float(text.replace(",", ""))
            for metric, text in row.items()
            if metric in _METRICS and isinstance(text, str) and re.fullmatch(r"[\d,]+(\.\d+)?", text)
        }
        if row["Kernel Name"] and values:
            launches.setdefault(row["Kernel Name"], []).append(values)
    found = [
        KernelCounters(name, len(rows), **{key: sum(row.get(key, 0.0) for row in rows) / len(rows) for key in rows[0]})
        for name, rows in launches.items()
    ]
    return tuple(sorted(found, key=lambda each: -each.launches * (each.duration_ns or 0.0)))


def _base_name(name: str) -> str:
    """The function's own name, which is what ncu matches by default."""
    flat = re.sub(r"\(.*\)$", "", name)
    while (shorter := re.sub(r"<[^<>]*>", "", flat)) != flat:
        flat = shorter
    return flat.removeprefix("void ").rsplit("::", 1)[-1].strip()
