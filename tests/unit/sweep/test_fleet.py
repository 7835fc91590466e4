"""Answers across kinds of GPU: arithmetic that can be done by hand, and what is missing with its command."""

import json
import shlex
from dataclasses import replace
from math import exp, factorial, floor, inf

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.console import assert_golden, text_of
from tests.fakes.sweeps import H200, L4, make_cell, make_record, make_slot

from optpipe.cli.app import app
from optpipe.core.errors import BadInputError
from optpipe.core.measurement import LoadSpec, Mode, Scenario
from optpipe.core.quantity import Estimate
from optpipe.measure.search import slo_from_text
from optpipe.stats.percentiles import count_samples_needed
from optpipe.sweep import matrix
from optpipe.sweep.document import document_from_fleet
from optpipe.sweep.fleet import compare_fleet, count_gpus_needed, simulate_queue
from optpipe.sweep.job import Cell, JobState, command_from_cell


def jobs_of(*records):
    return {one.key: [one] for one in records}


def measured(kind, batch, p50_ms, **recipe):
    slot = make_slot(kind=kind, fingerprint=kind[-4:].rjust(16))
    return make_record(make_cell(kind, batch, **recipe), slot=slot, p50_ms=(0.99 * p50_ms, p50_ms, 1.01 * p50_ms))


FLEET = jobs_of(
    measured(H200, 1, 1.0), measured(H200, 8, 2.0), measured(H200, 64, 12.0), measured(H200, 8, 4.0, precision="fp32"),
    measured(L4, 1, 3.0), measured(L4, 8, 12.0),
)  # fmt: skip


def test_an_interval_that_reaches_zero_bounds_no_number():
    scattered = make_record(make_cell(H200, 8), p50_ms=(0.1, 2.0, 9.0))
    rate = Estimate(2000.0, 0.0, 9000.0)
    figures = scattered.group.figures | {
        "throughput": replace(scattered.group.figures["throughput"], estimate=rate),
        "p50": replace(scattered.group.figures["p50"], estimate=Estimate(4e6, 0.0, 9e6)),
    }
    jobs = jobs_of(replace(scattered, group=replace(scattered.group, figures=figures)))
    (row,) = compare_fleet(jobs, load_per_s=10_000).rows
    assert (row.gpus.value, row.gpus.low, row.gpus.high) == (5, 2, inf)
    assert "5 [2, inf]" in text_of(document_from_fleet(compare_fleet(jobs, load_per_s=10_000)))
    (limited,) = compare_fleet(jobs, slo=slo_from_text("p50=10ms"), load_per_s=1000).rows
    assert limited.gpus.low == 1


@pytest.mark.slow
def test_the_limit_decides_the_batch_size_and_the_load_the_number():
    found = compare_fleet(FLEET, slo=slo_from_text("p99=10ms"), load_per_s=20_000)
    chosen = {(row.kind, row.build): row.batch_size for row in found.rows}
    assert chosen == {(H200, "onnxruntime fp16"): 8, (H200, "onnxruntime fp32"): 8, (L4, "onnxruntime fp16"): 1}
    counts = {row.kind: row.gpus for row in found.rows if row.best}
    assert counts[H200].value >= 20_000 / 5334
    assert counts[H200].low <= counts[H200].value <= counts[H200].high
    assert counts[L4].value > counts[H200].value


def test_without_a_limit_the_number_is_by_throughput():
    (row,) = compare_fleet(jobs_of(measured(H200, 8, 2.0)), load_per_s=10_000).rows
    assert (row.gpus.value, row.gpus.low, row.gpus.high) == (3, 3, 3)


def test_what_is_missing_is_said_with_the_command_that_fills_it():
    found = compare_fleet(FLEET)
    missing = {(one.kind, one.label.split(",")[0], one.label.split(",")[1]) for one in found.missing}
    assert missing == {
        (L4, "digits onnxruntime fp16 (cuda)", " batch 64"), (L4, "digits onnxruntime fp32 (cuda)", " batch 8"),
    }  # fmt: skip
    assert all(
        one.command.startswith("optpipe sweep digits") and f"--gpu '{L4}'" in one.command for one in found.missing
    )


ODD_LOAD = LoadSpec(
    8, Scenario.SERVER, Mode.END_TO_END, rate_per_s=150.5, min_seconds=0.3, max_seconds=9.0, percentile=99.9,
    warm_up_seconds=0.2, max_warm_up_seconds=3.0, length=32,
)  # fmt: skip


@pytest.mark.parametrize(
    "cell",
    [
        make_cell("cpu", 8, precision="fp32"),
        replace(
            make_cell("cpu", precision="fp32", weights="random", seed=3, profile="1:8:64", truncate=True,
                      options=("onnxruntime.threads=2",)),
            load=ODD_LOAD, options=("onnxruntime.spinning=0",), max_cv=5.07,
        ),
        replace(make_cell("cpu", precision="int8"), load=LoadSpec(4, Scenario.MULTI_STREAM, streams=3)),
    ],
)  # fmt: skip
def test_the_command_of_a_cell_gives_that_cell(capfd, cell, monkeypatch):
    monkeypatch.setattr(matrix, "collect_contents_in_child", lambda recipes, _store: [{}] * len(recipes))
    with pytest.raises(SystemExit):
        app([*shlex.split(command_from_cell(cell))[1:], "--dry-run", "--json", "--workspace", "/tmp/optpipe-none"])
    (row,) = json.loads(capfd.readouterr().out)["rows"]
    assert msgspec.convert(row["cell"], Cell).key == cell.key


def test_an_impossible_cell_is_not_missing_and_a_failed_one_says_why():
    failed = replace(measured(L4, 64, 1.0), state=JobState.FAILED, reason="out of memory", group=None)
    found = compare_fleet(FLEET | jobs_of(failed))
    assert "failed: out of memory" in [one.why for one in found.missing]
    impossible = replace(failed, state=JobState.IMPOSSIBLE)
    assert not any("batch 64" in one.label for one in compare_fleet(FLEET | jobs_of(impossible)).missing)


def test_the_frontier_is_what_none_is_faster_and_quicker_than():
    found = compare_fleet(FLEET)
    for row in found.rows:
        rivals = [(-each.throughput.value, each.latency_ns.value) for each in found.rows if each is not row]
        mine = -row.throughput.value, row.latency_ns.value
        beaten = any(a <= mine[0] and b <= mine[1] and (a, b) != mine for a, b in rivals)
        assert row.on_frontier == (not beaten)


@pytest.mark.slow
def test_the_whole_text():
    found = compare_fleet(FLEET, slo=slo_from_text("p99=10ms"), load_per_s=20_000)
    assert_golden(text_of(document_from_fleet(found), width=150), "fleet.txt")


ONE = {1: 1.0}


def md1_wait_distribution(rate, wait):
    """P(W ≤ t) of M/D/1 with service time 1 (Erlang 1909; Franx, Operations Research Letters 29, 2001)."""
    terms = ((-rate * (wait - k)) ** k / factorial(k) * exp(rate * (wait - k)) for k in range(floor(wait) + 1))
    return (1 - rate) * sum(terms)


@pytest.mark.parametrize("wait", [0.0, 0.5, 1.5, 3.0])
def test_the_distribution_of_waits_is_erlangs(wait):
    rate, shares = 0.7, []
    for seed in range(10):
        waits = simulate_queue(rate, 1, ONE, requests=20_000, seed=100 + seed)[2_000:] - 1
        shares.append(float(np.mean(waits <= wait + 1e-9)))
    error = np.std(shares, ddof=1) / np.sqrt(len(shares))
    assert abs(np.mean(shares) - md1_wait_distribution(rate, wait)) < 4.5 * error


rates = st.floats(0.1, 6)


@given(rates, st.integers(1, 6), st.integers(0, 5))
def test_more_gpus_never_make_a_request_later(rate, gpus, seed):
    fewer = simulate_queue(rate, gpus, ONE, requests=300, seed=seed)
    more = simulate_queue(rate, gpus + 1, ONE, requests=300, seed=seed)
    assert (more <= fewer + 1e-9).all()


@given(rates, st.integers(0, 3))
def test_the_number_is_the_smallest_that_keeps_the_limit(rate, seed):
    need = count_gpus_needed(rate, ONE, 90, 2.0, seed=seed)
    assert need > rate
    assert need == count_gpus_needed(rate, ONE, 90, 2.0, seed=seed)
    looser = count_gpus_needed(rate, ONE, 90, 4.0, seed=seed)
    assert looser <= need


def test_no_number_of_gpus_makes_one_request_faster():
    assert count_gpus_needed(1.0, ONE, 99, 0.5) is None


def test_a_load_that_is_none_is_refused():
    for rate, gpus in ((0, 1), (-1, 1), (1, 0)):
        with pytest.raises(BadInputError):
            simulate_queue(rate, gpus, ONE, requests=count_samples_needed(90))
