"""The trace of a real H200: ResNet-50 FP16, five eager iterations and one graph replay (tests/golden/traces/README.md)."""

import sqlite3
from contextlib import closing
from typing import Any

import polars as pl
import pytest
from tests.unit.trace.conftest import SAMPLE, Judged

from optpipe.core.records import json_from_record, record_from_json
from optpipe.core.verdict import Verdict
from optpipe.trace.bottleneck import LimitingFactor, find_range_bottleneck
from optpipe.trace.records import TraceProfile


def _query(sql: str) -> list[Any]:
    with closing(sqlite3.connect(SAMPLE)) as connection:
        return connection.execute(sql).fetchall()


def test_totals_are_the_exports_to_the_nanosecond(sample: Judged) -> None:
    expected = _query(
        'SELECT s.value, COUNT(*), SUM(k."end" - k.start) FROM CUPTI_ACTIVITY_KIND_KERNEL k JOIN StringIds s '
        "ON s.id = k.demangledName GROUP BY s.value"
    )
    assert sorted(sample.whole.kernels.select("name", "count", "total_ns").rows()) == sorted(expected)
    (total,) = _query('SELECT SUM("end" - start) FROM CUPTI_ACTIVITY_KIND_RUNTIME')[0]
    assert sample.whole.api["total_ns"].sum() == total
    assert {"cudaLaunchKernel", "cuLaunchKernelEx"} <= set(sample.whole.api["name"].to_list())


def test_eager_iterations_are_launch_bound_and_the_replay_is_not(sample: Judged) -> None:
    assert sample.bottleneck.verdict is LimitingFactor.LAUNCH
    graph = find_range_bottleneck(sample.measured, "graph")
    limits = {row.name: row.bottleneck for row in sample.profile.measured.ranges}
    assert limits["iter"] is LimitingFactor.LAUNCH
    assert graph is not None
    assert graph.verdict is limits["graph"] is LimitingFactor.GPU  # no graph of the model, no counters
    assert graph.share == pytest.approx(0.967, abs=0.001)
    assert sample.findings[0].rule == "launch-gaps"


def test_five_iterations_of_282_kernels_and_a_replay(sample: Judged) -> None:
    iterations = sample.measured.iterations
    assert iterations["kernels"].to_list() == [282] * 5
    assert iterations["name"].cast(pl.String).unique().to_list() == ["iter"]
    assert sample.trace_quality.verdict is Verdict.PASS
    row = sample.whole.ranges.filter(pl.col("name") == "graph").row(0, named=True)
    assert (row["wall_ns"], row["kernels"], row["kernel_ns"]) == (771395, 282, 1019734)


def test_tensor_core_kernels_are_those_of_the_named_schemes(sample: Judged) -> None:
    """By hand: nvjet, xmma and cutlass tensorop kernels are all matrix kernels of the trace, and all on Tensor Cores."""
    by_hand = sample.measured.kernels.filter(pl.col("name").str.contains("nvjet|xmma|tensorop"))
    cores = sample.tensor_cores
    assert cores is not None
    assert cores.used_ns == by_hand["total_ns"].sum()
    assert cores.eligible == cores.used == by_hand.height
    assert cores.time_share == pytest.approx(0.3826, abs=1e-4)


def test_the_record_adds_up_and_comes_back_from_its_json(sample: Judged) -> None:
    for totals in (sample.totals, sample.profile.measured.totals):
        assert totals.busy_ns + totals.idle_ns == totals.span_ns
        assert sum(totals.idle_by_cause.values()) == totals.idle_ns
    assert record_from_json(json_from_record(sample.profile), TraceProfile, "profile") == sample.profile
