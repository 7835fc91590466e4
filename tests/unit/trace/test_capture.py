"""The nsys command for each version, and what becomes of a refusal."""

import os
from pathlib import Path

import pytest
from tests.unit.trace.conftest import SAMPLE

from optpipe.core.errors import MissingError, StageError
from optpipe.core.events import SilentListener
from optpipe.trace.layers.ncu import KernelCounters, counters_from_csv, record_counters
from optpipe.trace.recording.nsys import (
    Extra,
    Recording,
    export_recording,
    find_refusal,
    make_nsys_command,
)


def _command(version: str, *extras: Extra, on_gpu: bool = True, whole: bool = False) -> str:
    return " ".join(make_nsys_command(set(extras), version, Path("out"), on_gpu=on_gpu, whole=whole))


def test_graphs_are_traced_by_node_and_bounded_by_a_range() -> None:
    command = _command("2025.3.2.0")
    assert "--cuda-graph-trace node" in command
    assert "--capture-range nvtx --nvtx-capture optpipe.capture --capture-range-end stop" in command
    assert "--trace nvtx,cuda,cublas,cudnn" in command


def test_a_whole_recording_has_no_bounds() -> None:
    assert "capture-range" not in _command("2025.3.2.0", whole=True)


def test_without_a_gpu_nothing_of_cuda_is_asked_for() -> None:
    assert "cuda" not in _command("2022.4.2.1", on_gpu=False)


def test_options_that_versions_spell_differently() -> None:
    assert "--gpu-metrics-device all" in _command("2022.4.2.1", Extra.GPU_METRICS)
    assert "--gpu-metrics-devices all" in _command("2024.5.1", Extra.GPU_METRICS)


def test_what_is_recorded_on_request() -> None:
    assert "--trace nvtx,osrt" in _command("2022.4.2.1", Extra.OS_CALLS, on_gpu=False)


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="the disk is full"):
        export_recording(Recording(None, 1, "Generating...\nwrite failed: No space left on device\n"), tmp_path)


def test_a_refusal_is_given_in_nsys_own_words(tmp_path: Path) -> None:
    said = "Collecting data...\nUnable to create a session: operation not permitted\n"
    assert find_refusal(said) == "Unable to create a session: operation not permitted"
    with pytest.raises(MissingError, match="operation not permitted"):
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


def test_the_sample_is_small_enough_to_keep() -> None:
    assert SAMPLE.stat().st_size < 400_000


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
