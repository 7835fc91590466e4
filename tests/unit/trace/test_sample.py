"""The trace of a real H200: ResNet-50 FP16, five eager iterations and one graph replay (tests/golden/traces/README.md)."""

import sqlite3
from contextlib import closing

import polars as pl
import pytest
from tests.unit.trace.conftest import SAMPLE

from optpipe.core.verdict import Verdict
from optpipe.trace.findings.bottleneck import LimitingFactor
from optpipe.trace.findings.report import Profile, document_from_profile


def _query(sql: str) -> list[tuple[str, int, int]]:
    with closing(sqlite3.connect(SAMPLE)) as connection:
        return connection.execute(sql).fetchall()


def test_kernel_totals_are_the_exports_to_the_nanosecond(sample: Profile) -> None:
    expected = _query(
        'SELECT s.value, COUNT(*), SUM(k."end" - k.start) FROM CUPTI_ACTIVITY_KIND_KERNEL k JOIN StringIds s '
        "ON s.id = k.demangledName GROUP BY s.value"
    )
    found = sample.whole.kernels.select("name", "count", "total_ns").rows()
    assert sorted(found) == sorted(expected)


def test_api_totals_are_the_exports_to_the_nanosecond(sample: Profile) -> None:
    (total,) = _query('SELECT SUM("end" - start) FROM CUPTI_ACTIVITY_KIND_RUNTIME')[0]
    assert sample.whole.api["total_ns"].sum() == total
    assert {"cudaLaunchKernel", "cuLaunchKernelEx"} <= set(sample.whole.api["name"].to_list())


def test_eager_iterations_are_launch_bound_and_the_replay_is_not(sample: Profile) -> None:
    assert sample.bottleneck.limit is LimitingFactor.LAUNCH
    assert sample.by_range["iter"].limit is LimitingFactor.LAUNCH
    assert sample.by_range["graph"].limit is LimitingFactor.GPU  # no graph of the model, no counters
    assert sample.by_range["graph"].share == pytest.approx(0.967, abs=0.001)
    assert sample.findings[0].rule == "launch-gaps"


def test_five_iterations_of_282_kernels(sample: Profile) -> None:
    iterations = sample.measured.iterations
    assert iterations["kernels"].to_list() == [282] * 5
    assert iterations["name"].cast(pl.String).unique().to_list() == ["iter"]
    assert sample.quality.verdict is Verdict.PASS


def test_projection_of_the_replay(sample: Profile) -> None:
    row = sample.whole.ranges.filter(pl.col("name") == "graph").row(0, named=True)
    assert (row["wall_ns"], row["kernels"], row["kernel_ns"]) == (771395, 282, 1019734)


def test_tensor_core_kernels_are_those_of_the_named_schemes(sample: Profile) -> None:
    """By hand: nvjet, xmma and cutlass tensorop kernels are all matrix kernels of the trace, and all on Tensor Cores."""
    by_hand = sample.measured.kernels.filter(pl.col("name").str.contains("nvjet|xmma|tensorop"))
    cores = sample.tensor_cores
    assert cores is not None
    assert cores.used_ns == by_hand["total_ns"].sum()
    assert cores.eligible == cores.used == by_hand.height
    assert cores.time_share == pytest.approx(0.3826, abs=1e-4)


def test_document_has_what_is_promised(sample: Profile) -> None:
    document = document_from_profile(sample)
    promised = {
        "trace_quality",
        "totals",
        "kernels",
        "api",
        "ranges",
        "tensor_cores",
        "roofline",
        "bottleneck",
        "findings",
    }
    assert promised <= set(document)
    totals = document["totals"]
    assert totals["busy_ns"] + totals["idle_ns"] == totals["span_ns"]
    assert sum(totals["idle_by_cause"].values()) == totals["idle_ns"]
    assert {"name", "count", "total_ns", "share", "tensor_core"} <= set(document["kernels"][0])
    assert {"rule", "evidence", "gain_ns", "advice"} <= set(document["findings"][0])
