"""The nsys command for each version, and what becomes of a refusal."""

import os
from pathlib import Path

import pytest

from optpipe.core.errors import MissingError, StageError
from optpipe.core.events import SilentListener
from optpipe.trace.layers.ncu import KernelCounters, counters_from_csv, record_counters
from optpipe.trace.recording.nsys import (
    Extra,
    Recording,
    export_recording,
    make_nsys_command,
)


def _command(version: str, *extras: Extra, on_gpu: bool = True, whole: bool = False) -> str:
    return " ".join(make_nsys_command(set(extras), version, Path("out"), on_gpu=on_gpu, whole=whole))


@pytest.mark.parametrize(
    ("command", "has", "lacks"),
    [
        (_command("2025.3.2.0"), "--cuda-graph-trace node", "gpu-metrics"),
        (
            _command("2025.3.2.0"),
            "--capture-range nvtx --nvtx-capture optpipe.capture --capture-range-end stop",
            "osrt",
        ),
        (_command("2025.3.2.0", whole=True), "--trace nvtx,cuda,cublas,cudnn", "capture-range"),
        (_command("2022.4.2.1", on_gpu=False), "--trace nvtx", "cuda"),
        (_command("2022.4.2.1", Extra.GPU_METRICS), "--gpu-metrics-device all", "--gpu-metrics-devices"),
        (_command("2024.5.1", Extra.GPU_METRICS), "--gpu-metrics-devices all", "osrt"),
        (_command("2022.4.2.1", Extra.OS_CALLS, on_gpu=False), "--trace nvtx,osrt", "cuda"),
    ],
)
def test_the_command_of_each_version(command: str, has: str, lacks: str) -> None:
    assert has in command
    assert lacks not in command


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="the disk is full"):
        export_recording(Recording(None, 1, "Generating...\nwrite failed: No space left on device\n"), tmp_path)


def test_a_refusal_is_given_in_nsys_own_words(tmp_path: Path) -> None:
    said = "Collecting data...\nUnable to create a session: operation not permitted\n"
    with pytest.raises(MissingError, match="Unable to create a session: operation not permitted"):
        export_recording(Recording(None, 1, said), tmp_path)


def test_counters_of_ncu_are_means_per_kernel() -> None:
    text = (
        '==PROF== Connected to process 1\n"ID","Kernel Name","dram__bytes.sum","gpu__time_duration.sum","sm__cycles_elapsed.max"\n'
        '"","","byte","ns","cycle"\n"0","gemm","1,000","10","20"\n"1","gemm","3,000","30","40"\n"2","relu","5","6","7"\n'
    )
    gemm, relu = counters_from_csv(text)
    assert gemm == KernelCounters("gemm", 2, dram_bytes=2000.0, duration_ns=20.0, cycles=30.0)
    assert relu == KernelCounters("relu", 1, dram_bytes=5.0, duration_ns=6.0, cycles=7.0)
    assert gemm.dram_bytes_per_s == 1e11
    assert counters_from_csv("nothing of the kind") == ()


FAKE_NCU = """#!/bin/sh
log=
bounded=no
while [ $# -gt 0 ]; do
  [ "$1" = --log-file ] && log=$2
  [ "$1" = --nvtx-include ] && bounded=yes
  shift
done
echo "==PROF== Connected to process 1" > "$log"
[ "$bounded" = %s ] || { echo "==WARNING== No kernels were profiled." >> "$log"; exit 0; }
printf '"ID","Kernel Name","dram__bytes.sum"\\n"","","byte"\\n"0","gemm","1,000"\\n' >> "$log"
"""


@pytest.mark.parametrize(("bounded", "warns"), [("yes", False), ("no", True), ("never", True)])
def test_ncu_counts_the_measured_range_and_says_where_it_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bounded: str, warns: bool
) -> None:
    """A stand-in for ncu, which needs a GPU: it knows the range, or does not, or counts nothing at all."""
    (tmp_path / "ncu").write_text(FAKE_NCU % bounded)
    (tmp_path / "ncu").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    listener = SilentListener()
    found = record_counters(["true"], tmp_path, ["gemm"], listener)
    assert found == (() if bounded == "never" else (KernelCounters("gemm", 1, dram_bytes=1000.0),))
    assert bool(listener.warnings) is warns
