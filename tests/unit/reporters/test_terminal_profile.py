"""A profile as people read it: every golden trace can be shown, and the answer comes first."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.fakes.console import text_of
from tests.golden import phenomena
from tests.golden.nsys_export import Recording

from optpipe.reporters.terminal_profile import render_diff, render_profile
from optpipe.trace.findings.diff import DiffSide, diff_profiles
from optpipe.trace.findings.report import document_from_profile, profile_from_trace
from optpipe.trace.layers.layer_cost import LayerCost
from optpipe.trace.layers.peaks import Peaks
from optpipe.trace.layers.roofline import GraphCosts
from optpipe.trace.recording.read import trace_from_sqlite
from optpipe.trace.timeline.analysis import analysis_from_trace
from optpipe.trace.timeline.kernels import shorten_name

BUILDERS = [value for value in vars(phenomena).values() if callable(value) and value.__module__ == phenomena.__name__]


@pytest.mark.parametrize("build", BUILDERS, ids=lambda build: build.__name__)
def test_the_answer_comes_first(build: Callable[[], Recording], tmp_path: Path) -> None:
    trace = trace_from_sqlite(build().write(tmp_path / "trace.sqlite"))
    text = text_of(render_profile(document_from_profile(profile_from_trace(trace)), shorten_name))
    assert text.startswith(("limited by ", "no verdict: "))


def test_names_with_brackets_are_no_markup(tmp_path: Path) -> None:
    recording = Recording()
    recording.range("[bold]layer[/bold]", 0, 10)
    trace = trace_from_sqlite(recording.write(tmp_path / "trace.sqlite"))
    assert "[bold]layer[/bold]" in text_of(
        render_profile(document_from_profile(profile_from_trace(trace)), shorten_name)
    )


def test_what_is_withheld_is_not_printed(tmp_path: Path) -> None:
    """Iterations of 100 µs under the profiler and 50 µs without: shares stay, times of the host go."""
    trace = trace_from_sqlite(phenomena.launch_bound().write(tmp_path / "trace.sqlite"))
    document = document_from_profile(profile_from_trace(trace, unprofiled_iteration_ns=50_000))
    assert document["iterations"]["period_ns"] is None
    assert "withheld" in document["gaps"]
    text = text_of(render_profile(document, shorten_name))
    assert text.startswith("limited by launch (")
    assert "3 iterations (iter): 50.0 µs each without the profiler, of which GPU 8.00 µs in 4 kernels" in text
    printed, _, quality = text.partition("quality, overhead")
    assert "100 µs under the profiler, 50.0 µs without (+100%)" in " ".join(quality.split())
    for time in ("290 µs", "100 µs", "90.0 µs", "270 µs"):  # span, period, wall time, ranges
        assert time not in printed
    assert "1. 8" in printed  # what it could gain, as a share only
    assert "launch-gaps; without the profiler, " in printed
    assert "without the profiler, which verdict and gains are corrected for; with it 8%" in " ".join(printed.split())


def test_a_gain_on_the_gpu_is_a_share_of_the_time_without_the_profiler(tmp_path: Path) -> None:
    """12 kernels of 2 µs with ten blocks each, for a GPU of 132: of 290 µs recorded, or 150 µs as it really takes."""
    recording = phenomena.launch_bound()
    recording.rows["kernels"] = [(*row[:7], 10, *row[8:]) for row in recording.rows["kernels"]]
    trace = trace_from_sqlite(recording.write(tmp_path / "trace.sqlite"))
    unused_ns = 12 * 2_000 * (1 - 10 / 132)
    for unprofiled_ns, time_ns in ((None, 290_000), (50_000, 150_000)):
        document = document_from_profile(profile_from_trace(trace, unprofiled_iteration_ns=unprofiled_ns))
        share = {each["rule"]: each["gain_share"] for each in document["findings"]}
        assert share["underfilled-gpu"] == pytest.approx(unused_ns / time_ns, rel=1e-3)
        assert share["launch-gaps"] < 0.9  # host times are a share of what was recorded


def test_the_tables_are_those_of_the_part_that_is_judged(tmp_path: Path) -> None:
    trace = trace_from_sqlite(phenomena.setup_ahead_of_numbered_iterations().write(tmp_path / "trace.sqlite"))
    text = text_of(render_profile(document_from_profile(profile_from_trace(trace)), shorten_name))
    assert "iterations 2 to 4 (iteration N), selectable with --range, of trace.sqlite" in " ".join(text.split())
    assert "launch_clamp_scalar" not in text  # ran in the setup
    kernel = next(line for line in text.splitlines() if line.startswith(" sm90_xmma"))
    assert kernel.split()[-7:] == ["2.00", "µs", "4.00", "µs", "1.00", "µs", "yes"]  # mean, launch, queue


def test_a_graphs_kernels_have_no_queue_of_their_own(tmp_path: Path) -> None:
    trace = trace_from_sqlite(phenomena.graph_replay().write(tmp_path / "trace.sqlite"))
    document = document_from_profile(profile_from_trace(trace))
    assert {row["queue_ns"] for row in document["measured_views"]["kernels"]} == {None}
    assert "queue" not in text_of(render_profile(document, shorten_name))


def test_copies_say_their_memory_and_what_ran_beside_kernels(tmp_path: Path) -> None:
    trace = trace_from_sqlite(phenomena.overlapping().write(tmp_path / "trace.sqlite"))
    text = text_of(render_profile(document_from_profile(profile_from_trace(trace)), shorten_name))
    assert "overlaps kernels" in text
    assert "2 streams run kernels; two or more run at once for" in text


def test_times_that_contradict_each_other_are_not_printed(tmp_path: Path) -> None:
    """Faster under the profiler than without: something else ran beside one of the two."""
    trace = trace_from_sqlite(phenomena.launch_bound().write(tmp_path / "trace.sqlite"))
    document = document_from_profile(profile_from_trace(trace, unprofiled_iteration_ns=200_000))
    assert document["trace_quality"]["verdict"] == "INCONCLUSIVE"
    text = text_of(render_profile(document, shorten_name))
    assert "3 iterations (iter), of which GPU 8.00 µs in 4 kernels" in text
    assert "other work disturbed one of the two runs" in " ".join(text.split())


def test_the_bound_stands_before_what_the_layers_take(tmp_path: Path) -> None:
    """20 µs of arithmetic in 100; 30 µs of memory where the ReLU is fused, 80 where it is not."""
    peaks = Peaks("a device", "measured", {"fp32": 1e12}, 1e9)
    conv = LayerCost("conv", "Conv", "fp32", macs=10_000_000, bytes=60_000, fused_bytes=30_000)
    relu = LayerCost("relu", "Relu", "fp32", macs=0, bytes=20_000, fused_bytes=0)
    trace = trace_from_sqlite(phenomena.gpu_bound().write(tmp_path / "trace.sqlite"))
    graph = GraphCosts((conv, relu), peaks, 1, edge_bytes=10_000)
    document = document_from_profile(profile_from_trace(trace, graph=graph, unprofiled_iteration_ns=100_000))
    text = " ".join(text_of(render_profile(document, shorten_name)).split())
    assert "limited by GPU below its peaks" in text
    assert "at least 20.0 µs; measured 100 µs, 5.0× the bound" in text
    assert "30.0 µs with elementwise operators fused (0% of it arithmetic), 80.0 µs node by node" in text


def test_what_ncu_counted_stands_below_the_roofline(tmp_path: Path) -> None:
    trace = trace_from_sqlite(phenomena.gpu_bound().write(tmp_path / "trace.sqlite"))
    document = document_from_profile(profile_from_trace(trace))
    row = {
        "name": "gemm",
        "launches": 3,
        "dram_bytes": 2e6,
        "duration_ns": 2e3,
        "cycles": 3e3,
        "compute_peak_percent": 40.0,
    }
    document["roofline"]["ncu"] = [{**row, "dram_bytes_per_s": 1e12, "memory_peak_share": 0.25}]
    text = text_of(render_profile(document, shorten_name))
    line = next(line for line in text.splitlines() if line.startswith(" gemm"))
    assert "25%" in line
    assert "3,000" in line


def test_a_diff_says_what_became_slower(tmp_path: Path) -> None:
    before, after = (
        DiffSide(analysis_from_trace(trace_from_sqlite(recording.write(tmp_path / f"{name}.sqlite"))))
        for name, recording in (("before", phenomena.launch_bound()), ("after", phenomena.gpu_bound()))
    )
    text = text_of(render_diff(diff_profiles(before, after).document(), shorten_name))
    assert "slower" in text
    assert "+1025%" in text  # four kernels of 2 µs per iteration against one of 90 µs
