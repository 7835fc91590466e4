"""Counters of Nsight Compute: what is asked, what is read, and what follows from it."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.golden.nsys_export import Recording
from tests.golden.phenomena import gpu_bound

from optpipe.core.records import record_from_json, record_from_plain
from optpipe.trace.bottleneck import LimitingFactor
from optpipe.trace.counters import (
    Counters,
    KernelCounters,
    counters_from_csv,
    make_ncu_command,
    weigh_counters,
)
from optpipe.trace.kernels import make_comparable_name
from optpipe.trace.read import Trace
from optpipe.trace.report import profile_from_trace

Read = Callable[[Recording], Trace]
GOLDEN = Path(__file__).parents[2] / "golden"
COUNTED = GOLDEN / "ncu-raw.csv"
REPORTS = Path(__file__).parents[3] / "reports"


def test_counters_of_a_raw_page() -> None:
    product, addition = counters_from_csv(COUNTED.read_text())
    assert product.name.startswith("nvjet_sm90")
    assert (product.launches, product.duration_ns, product.dram_bytes) == (2, 38_000, 94_000_000)
    assert product.dram_bytes_per_s == pytest.approx(94e6 / 38e-6)
    assert product.occupancy_percent == 16.5
    assert product.tensor_pipe_percent == 32
    assert product.occupancy_limit in ("registers", "shared memory")
    assert product.limiter.startswith("low occupancy")
    assert addition.tensor_pipe_percent is None
    assert addition.limiter == "DRAM throughput"
    assert addition.waves == 0.71
    assert addition.tail_share == pytest.approx(0.29)


def test_counters_that_ncu_2025_3_read_on_an_h200() -> None:
    """ResNet-50 in FP16 with eager torch, batch 8; two launches of each kernel are kept."""
    found = counters_from_csv((GOLDEN / "ncu-h200.csv").read_text())
    assert [each.launches for each in found] == [2] * 5
    for each in found:
        assert each.duration_ns is not None
        assert each.dram_bytes is not None
        assert 0 < each.occupancy_percent <= each.theoretical_occupancy_percent <= 100
        assert each.occupancy_limit is not None
        assert each.tensor_pipe_percent is not None
    addition = next(each for each in found if "CUDAFunctor_add" in each.name)
    images, channels, side = 8, 256, 56
    read = 2 * 2 * images * channels * side**2  # two operands of FP16
    assert addition.dram_read_bytes == pytest.approx(read, rel=0.05)


def test_counted_kernels_are_found_in_the_recording_and_weighted_by_their_time() -> None:
    """ncu and nsys name a kernel differently: names that an H200 gave."""
    found = record_from_json(
        (REPORTS / "h200" / "profile-counters.json").read_bytes(), dict, "the report"
    )
    [stage] = found["stages"]
    counters = record_from_plain(stage["counters"], Counters, "the counters")
    rows = [
        (row["name"], row["total_ns"], row["count"])
        for row in stage["profile"]["measured"]["kernels"]
    ]
    counted = weigh_counters(counters, rows, 10)
    assert counted is not None
    names = {make_comparable_name(each.name) for each in counters.kernels}
    timed = [row for row in rows if make_comparable_name(row[0]) in names]
    assert len(timed) == len(counters.kernels) == 5
    total_ns = sum(ns for _, ns, _ in rows)
    assert counted.share == pytest.approx(sum(ns for _, ns, _ in timed) / total_ns)
    assert 0.05 < counted.dram_peak_share < 0.52
    assert counted.dram_bytes is None, "10 of 53 launches of an iteration were counted"
    assert weigh_counters(counters, [("another", 1, 1)], 1) is None


@pytest.mark.parametrize(
    ("dram", "sm", "limit"),
    [
        (85.0, 40.0, LimitingFactor.MEMORY),
        (40.0, 85.0, LimitingFactor.MATH),
        (40.0, 50.0, LimitingFactor.BELOW_PEAKS),
    ],
)
def test_counters_of_most_kernel_time_decide_what_limits(
    read: Read, dram: float, sm: float, limit: LimitingFactor
) -> None:
    trace = read(gpu_bound())
    name = str(trace.kernels["name"][0])
    counted = KernelCounters(name, 400, 1e3, 6.0, 4.0, dram_peak_percent=dram, sm_peak_percent=sm)
    profile = profile_from_trace(trace, counters=Counters("ncu", (counted,)))
    assert profile.bottleneck.verdict is limit
    assert profile_from_trace(trace).bottleneck.verdict is LimitingFactor.GPU
    iterations = profile.iterations.count if profile.iterations else 1
    rows = [(row.name, row.total_ns, row.count) for row in profile.measured.kernels]
    work = weigh_counters(Counters("ncu", (counted,)), rows, iterations)
    assert work is not None
    launches = next(count for each, _, count in rows if each == name)
    assert work.dram_bytes == pytest.approx(10 * launches / iterations)


@pytest.mark.parametrize(
    "text", ["", "==ERROR== ERR_NVGPUCTRPERM", '"ID","Kernel Name"\n', "\x00\xff"]
)
def test_a_page_without_kernels(text: str) -> None:
    assert counters_from_csv(text) == ()


def test_ncu_leaves_the_clocks_alone_and_compares_the_functions_names(tmp_path: Path) -> None:
    names = ["void at::native::foo<int>(float)", "nvjet_sm90_hsh"]
    words = make_ncu_command(Path("/ncu"), tmp_path / "log", names, in_range=True)
    assert words[words.index("--clock-control") + 1] == "none"
    assert words[words.index("--kernel-name") + 1] == "regex:^(foo|nvjet_sm90_hsh)$"
    assert "optpipe.measure/optpipe.iteration/" in words
