"""Batch sizes and rates that are searched for, limits, and pairs, over simulated runtimes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.measurements import planted

from optpipe.core.errors import BadInputError, StageError
from optpipe.core.measurement import Reason, Subject, Validity
from optpipe.core.metrics.measured import PairMetric
from optpipe.core.params import sizes_from_text
from optpipe.measure.pair import PairedComparison, run_interleaved
from optpipe.measure.search import (
    Slo,
    find_highest_rate,
    find_largest_inside,
    judge_limit,
    slo_from_text,
    sweep_batch_sizes,
)
from optpipe.measure.validity import find_repeated_cause
from optpipe.stats.ratio import Change


def measurement(batch, latency_ms, *, name="m", reasons=(), rate=None):
    subject = Subject("a", "fake", "fp32", "cpu")
    invalid = [Reason(code, code, "remedy", invalidates=True) for code in reasons]
    return planted(subject, batch, latency_ms, reasons=invalid, id=name, rate=rate)


def runtime(fixed_ms, per_image_ms, memory=10**9):
    asked = []

    def measured(batch):
        asked.append(batch)
        found = measurement(batch, fixed_ms + batch * per_image_ms)
        if batch <= memory:
            return found
        out = Reason("out-of-memory", "no", "less", invalidates=True)
        return replace(
            found,
            latency_ns=None,
            throughput_images_per_s=None,
            verdict=Validity.INVALID,
            reasons=(out,),
        )

    return measured, asked


POWERS = sizes_from_text("1:1024", "--batch")


def test_out_of_memory_is_a_row_and_ends_the_sweep():
    measured, asked = runtime(10.0, 0.01, memory=20)
    found = sweep_batch_sizes(measured, POWERS)
    assert asked == [1, 2, 4, 8, 16, 32]
    assert found[-1].latency_ns is None


@given(st.floats(0.1, 5), st.floats(0.01, 2), st.floats(0.5, 100), st.integers(1, 600))
def test_the_largest_batch_inside_a_limit(fixed, per_image, limit, memory):
    slo = Slo(99.0, limit * 1e6)
    measured, _ = runtime(fixed, per_image, memory)
    found = sweep_batch_sizes(measured, POWERS, slo)
    best = find_largest_inside(found, slo)
    sizes = range(1, min(memory, 1024) + 1)
    truth = max(
        (batch for batch in sizes if 1.01 * (fixed + batch * per_image) <= limit), default=0
    )
    if truth == 0:
        assert best is None
        assert judge_limit("a", "ort", slo, found, None).batch_size == 1
    else:
        assert truth * 0.85 - 1 <= best.load.batch_size <= truth


def withholding(measured, sizes):
    """As `measured`, without the p99 of some sizes: their samples were too much alike."""

    def called(size):
        found = measured(size)
        if size not in sizes or found.latency_ns is None:
            return found
        latency = found.latency_ns
        kept = {name: each for name, each in latency.percentiles.items() if name != "p99"}
        return replace(
            found, latency_ns=replace(latency, percentiles=kept, withheld={"p99": "too alike"})
        )

    return called


def test_a_size_whose_percentile_was_withheld_neither_meets_nor_ends_the_search():
    slo = Slo(99.0, 10e6)
    found = sweep_batch_sizes(withholding(runtime(0.0, 0.5)[0], {1, 4}), POWERS, slo)
    best = find_largest_inside(found, slo)
    assert 17 <= best.load.batch_size <= 19  # 1 % of doubt beyond 0.5 ms each: 19 at most
    unknown = {each.load.batch_size: slo.explain_not_judged(each) for each in found}
    assert {size for size, why in unknown.items() if why} == {1, 4}
    assert unknown[4] == "p99 is not reported: too alike"


def test_a_percentile_below_the_withheld_one_can_show_that_the_limit_is_broken():
    slo = Slo(99.0, 10e6)
    found = sweep_batch_sizes(withholding(runtime(0.0, 0.5)[0], set(POWERS)), POWERS, slo)
    assert find_largest_inside(found, slo) is None
    assert found[-1].load.batch_size == 32  # p50 alone is over 10 ms there
    assert slo.explain_not_judged(found[-1]) is None
    assert slo.explain_not_judged(found[0]) is not None


def test_batch_sizes():
    assert sizes_from_text("8", "--batch") == (8,)
    assert sizes_from_text("8,1,32", "--batch") == (1, 8, 32)
    assert sizes_from_text("1:6", "--batch") == (1, 2, 4, 6)
    for text in ("0", "a", "4:2", "", "1,,2", "-1"):
        with pytest.raises(BadInputError, match="--batch"):
            sizes_from_text(text, "--batch")


def test_limits():
    assert slo_from_text("p99=15ms") == Slo(99.0, 15e6)
    assert slo_from_text("p99.9<=500us") == Slo(99.9, 500e3)
    assert slo_from_text("p50=1s") == Slo(50.0, 1e9)
    assert slo_from_text("p90 ≤ 2.5 ms") == Slo(90.0, 2.5e6)
    assert str(slo_from_text("p99=15ms")) == "p99 ≤ 15.0 ms"
    for text in ("p99=15", "15ms", "p0=1ms", "p97=1ms", "p100=1ms", "p99=0ms", "p99=-1ms"):
        with pytest.raises(BadInputError, match="--slo"):
            slo_from_text(text)


def test_an_interval_that_crosses_the_limit_does_not_meet_it():
    assert not Slo(99.0, 10.05e6).is_met_by(measurement(1, 10.0))
    assert Slo(99.0, 10.2e6).is_met_by(measurement(1, 10.0))


@pytest.mark.parametrize(
    ("latency_ms", "met"), [(9.0, True), (9.95, None), (10.05, None), (10.2, False)]
)
def test_a_limit_is_broken_only_if_the_whole_interval_is_beyond_it(latency_ms, met):
    slo, found = Slo(99.0, 10e6), [measurement(1, latency_ms)]
    assert judge_limit("a", "b", slo, found, find_largest_inside(found, slo)).met is met


@given(st.floats(0.5, 20.0), st.floats(1.5, 50.0))
def test_the_highest_rate(service_ms, limit_factor):
    """An M/D/1-like law: latency grows as 1 / (1 - load)."""

    def measured(rate):
        load = rate * service_ms / 1e3
        latency = service_ms * (1 + 0.5 * load / (1 - load)) if load < 0.999 else 1e9
        return measurement(1, latency, rate=rate)

    slo = Slo(99.0, service_ms * limit_factor * 1e6)
    _, best = find_highest_rate(measured, service_ms / 1e3, slo)
    excess = 2 * (limit_factor - 1)
    truth = excess / (1 + excess) / service_ms * 1e3
    assert truth * 0.9 <= best.load.rate_per_s <= truth
    assert slo.is_met_by(best)


def test_no_rate_is_inside_an_impossible_limit():
    found, best = find_highest_rate(
        lambda rate: measurement(1, 10.0, rate=rate), 0.01, Slo(99.0, 5e6)
    )
    assert best is None
    assert len(found) < 10


def pair(first, second, rounds=8, seed=0):
    return run_interleaved(
        lambda name: measurement(1, first(name), name=name),
        lambda name: measurement(1, second(name), name=name),
        rounds,
        PairMetric.P50,
        seed,
    )


def test_interleaving_draws_the_order_of_each_round_and_compares():
    found = pair(lambda name: 10 + int(name[1:]) * 0.01, lambda name: 11 + int(name[1:]) * 0.012)
    assert isinstance(found, PairedComparison)
    names = list(found.measurements)
    rounds = [tuple(names[at : at + 2]) for at in range(0, len(names), 2)]
    assert all(sorted(each) == [f"a{turn:03}", f"b{turn:03}"] for turn, each in enumerate(rounds))
    assert {each[0][0] for each in rounds} == {"a", "b"}
    orders = {pair(lambda _: 1.0, lambda _: 1.0, seed=seed).measurements for seed in range(5)}
    assert len(orders) == 5
    assert found.ratio.change is Change.SLOWER
    assert len(found.baseline_ns) == 8
    assert found.seed == 0


def test_a_comparison_is_not_made_of_wrong_answers():
    wrong = measurement(1, 1.0, reasons=("wrong-output",))
    with pytest.raises(StageError, match="wrong-output"):
        run_interleaved(lambda _: wrong, lambda _: wrong, 8, PairMetric("p50"), 0)
    with pytest.raises(BadInputError, match="--rounds"):
        pair(lambda _: 1.0, lambda _: 1.0, rounds=2)


def test_an_interrupted_comparison_is_none():
    stopped = replace(measurement(1, 1.0), interrupted=True)
    assert (
        run_interleaved(lambda _: measurement(1, 1.0), lambda _: stopped, 8, PairMetric.P50, 0)
        is None
    )


def test_invalid_processes_count_and_are_said():
    loaded = measurement(1, 1.0, reasons=("loaded-host",))
    found = run_interleaved(
        lambda name: replace(loaded, id=name),
        lambda name: measurement(1, 1.0, name=name),
        8,
        PairMetric.P50,
        0,
    )
    assert (found.invalid_processes, found.invalid) == (8, {"loaded-host": 8})
    assert len(found.baseline_ns) == 8


def test_a_comparison_stops_where_it_is_told_and_says_nothing_of_the_builds():
    seen = []

    def stops(measured):
        seen.append(len(measured))
        return find_repeated_cause(measured) is not None

    def run(reasons):
        seen.clear()
        measured = [replace(measurement(1, 1.0, reasons=reasons), process=at) for at in range(99)]

        def measure(name):
            return replace(measured.pop(), id=name)

        return run_interleaved(measure, measure, 8, PairMetric.P50, 0, stops)

    assert run(("loaded-host",)) is None
    assert seen == [1, 2]
    assert run(("drift",)).ratio.rounds == 8
    assert seen == list(range(1, 16)), "nothing is left to stop after the last process"


def without_p50(name, median):
    found = measurement(1, 1.0, name=name)
    latency = replace(
        found.latency_ns, percentiles={}, withheld={"p50": "too alike"}, median=median
    )
    return replace(found, latency_ns=latency)


def test_a_process_whose_samples_follow_each_other_closely_costs_no_comparison():
    def compare(median):
        return run_interleaved(
            lambda name: without_p50(name, median),
            lambda name: measurement(1, 1.0, name=name),
            8,
            PairMetric.P50,
            0,
        )

    assert set(compare(2e6).baseline_ns) == {2e6}
    with pytest.raises(BadInputError, match="p50 needs more samples per process"):
        compare(None)


SLO = Slo(99.0, 5e6)


def found(batch, latency_ms, *codes):
    return measurement(batch, latency_ms, name=f"m{batch}", reasons=codes)


@pytest.mark.parametrize(
    ("measurements", "inside", "met", "batch"),
    [
        ([found(1, 1.0), found(8, 4.0), found(64, 30.0)], True, True, 8),
        ([found(1, 1.0), found(8, 4.0, "drift"), found(64, 30.0)], True, True, 1),
        ([found(1, 1.0, "drift"), found(8, 4.0, "drift")], True, None, 8),
        ([found(1, 6.0)], False, False, 1),
        ([found(1, 6.0, "loaded-host")], False, None, 1),
        ([found(1, 6.0, "falling-behind")], False, False, 1),
        ([found(1, 6.0, "falling-behind", "loaded-host")], False, None, 1),
        ([], False, None, None),
    ],
)
def test_only_a_valid_measurement_says_whether_a_limit_is_met(measurements, inside, met, batch):
    limit = judge_limit("a", "ort", SLO, measurements, find_largest_inside(measurements, SLO))
    assert (limit.inside, limit.met, limit.batch_size) == (inside, met, batch)
