"""Comparing: exchanging the sides inverts the answer, a build equals itself, and nothing is compared that cannot be."""

from dataclasses import replace

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.console import text_of

from optpipe.core.comparison import Goal
from optpipe.core.entries import Environment
from optpipe.core.errors import BadInputError
from optpipe.core.load import LoadSpec, Mode, Scenario
from optpipe.core.measurement import LatencySummary, Measurement, Subject, Validity
from optpipe.core.quantity import Estimate
from optpipe.measure.best_rows import sort_by_goal
from optpipe.measure.compare import compare_measurements
from optpipe.measure.compare_workspace import compare_workspace, find_bench_runs
from optpipe.measure.document import (
    document_from_comparison,
    draw_measurements,
    frame_from_comparison,
)
from optpipe.measure.groups import RecordedMeasurement
from optpipe.measure.search import Slo
from optpipe.report.comparison_charts import draw_comparison
from optpipe.report.document import Figure
from optpipe.report.html import render_html
from optpipe.report.markdown import render_page
from optpipe.signoff.reports import page_from_comparison

BASELINE = "b"


def measured(
    name,
    p50,
    half,
    *,
    run="run-a",
    precision="fp16",
    batch=1,
    rate=100.0,
    valid=True,
    environment=None,
):
    scales = {"p50": 1e6, "p99": 1.2e6}
    percentiles = {
        name: Estimate(p50 * k, (p50 - half) * k, (p50 + half) * k) for name, k in scales.items()
    }
    latency = LatencySummary(1000, percentiles, p50 * 0.9e6, p50 * 2e6, p50 * 1e6, half * 1e6, {})
    subject = Subject(artifact=name, backend="torch", precision=precision, device="cpu", model="m")
    found = Measurement(
        id=name,
        subject=subject,
        load=LoadSpec(batch),
        verdict=Validity.VALID if valid else Validity.INVALID,
        reasons=(),
        samples=1000,
        latency_ns=latency,
        throughput_images_per_s=Estimate(rate, rate * 0.9, rate * 1.1),
    )
    return RecordedMeasurement(found, run, environment or Environment(cpu="one"))


def processes(name, p50, half, *, count=5, **more):
    """Processes whose medians lie evenly within `half` of `p50`."""
    found = [
        measured(name, p50 + half * (2 * at / (count - 1) - 1), half / 10, **more)
        for at in range(count)
    ]
    return tuple(
        replace(
            one,
            measurement=replace(one.measurement, id=f"{name}{at}", process=at, started_utc=str(at)),
        )
        for at, one in enumerate(found)
    )


def against(contender, baseline):
    return compare_measurements(contender, baseline=BASELINE, against=tuple(baseline)).rows[0]


INTERVALS = st.tuples(st.floats(0.1, 1e3), st.floats(0.001, 0.5)).map(
    lambda pair: (pair[0], pair[0] * pair[1])
)


@given(INTERVALS, INTERVALS)
def test_exchanging_the_sides_inverts_value_interval_and_answer(one, other):
    a, b = processes("a", *one), processes("b", *other)
    there, back = against(a, b), against(b, a)
    assert there.speedup.value == pytest.approx(1 / back.speedup.value)
    assert there.speedup.low == pytest.approx(1 / back.speedup.high)
    mirrored = {
        "faster": "slower",
        "slower": "faster",
        "no difference shown": "no difference shown",
    }
    assert there.change == mirrored[back.change]


@given(INTERVALS)
def test_a_build_against_itself_shows_no_difference(one):
    row = against(processes("a", *one), processes("a", *one))
    assert row.change == "no difference shown"
    assert row.speedup.low <= 1 <= row.speedup.high


@pytest.mark.parametrize("count", [1, 2])
def test_nothing_is_claimed_of_fewer_than_three_processes(count):
    one, other = (processes("a", ms, 0.01, count=5) for ms in (1.0, 9.0))
    found = compare_measurements(one, baseline=BASELINE, against=other[:count])
    assert found.rows[0].change == "not judged: too few processes"
    assert found.rows[0].speedup.low is None
    assert any("the scatter between processes is not known" in text for text in found.warnings)
    assert (
        compare_measurements(one, baseline=BASELINE, against=other[:3]).rows[0].change == "faster"
    )


@given(st.lists(st.tuples(st.floats(1, 100), st.floats(1, 1000)), min_size=1, max_size=12))
def test_the_frontier_is_never_empty_and_nothing_on_it_is_dominated(points):
    tries = [
        processes(f"m{at}", ms, 0.01, batch=at + 1, rate=rate)
        for at, (ms, rate) in enumerate(points)
    ]
    rows = compare_measurements([one for each in tries for one in each]).rows
    frontier = [row for row in rows if row.on_frontier]
    assert frontier
    for row in rows:
        beaten = [
            other
            for other in rows
            if other.latency_ns["p99"].value <= row.latency_ns["p99"].value
            and other.throughput_images_per_s.value >= row.throughput_images_per_s.value
            and (
                other.latency_ns["p99"].value < row.latency_ns["p99"].value
                or other.throughput_images_per_s.value > row.throughput_images_per_s.value
            )
        ]
        assert beaten or row.on_frontier
        clear = [
            each
            for each in beaten
            if each.latency_ns["p99"].value < row.latency_ns["p99"].value / 1.5
        ]
        assert not clear or not row.on_frontier


def test_equal_builds_and_builds_of_different_runs_are_not_told_apart():
    equal = [*processes("a", 1.0, 0.02), *processes("b", 1.001, 0.02, batch=2)]
    found = compare_measurements(equal)
    assert found.best[Goal.LATENCY] is None
    assert "is not shown to be better than torch fp16, batch 2" in found.best_reason[Goal.LATENCY]
    assert all(row.on_frontier for row in found.rows)
    one, other = processes("a", 1.0, 0.01, run="run-a"), processes("b", 2.0, 0.01, run="run-b")
    row = against(one, other)
    assert (row.change, row.speedup.value, row.speedup.low) == (
        "not judged: different runs",
        pytest.approx(2),
        None,
    )
    again = [*other, *processes("b", 2.001, 0.01, run="run-c")]
    assert against(one, again).change == "faster", "how much runs differ is known now"
    assert against(one, [measured("b", 2.0, 0.01, valid=False)]).speedup is None


@pytest.mark.parametrize("gap", [0.05, 0.12])
def test_a_build_whose_processes_all_drew_the_slow_speed_of_the_machine_is_not_called_slower(gap):
    ones = []
    for build in range(10):
        slow = [build % 5 == 4] * 5 if gap == 0.05 else [build != 3, *[build == 4] * 4]
        for at, late in enumerate(slow):
            one = processes(f"build{build}", 10.0, 0.01)[at].measurement
            level = 1 + gap * late
            scaled = {
                name: Estimate(*(level * each for each in (found.value, found.low, found.high)))
                for name, found in one.latency_ns.percentiles.items()
            }
            latency = replace(one.latency_ns, percentiles=scaled)
            rate = Estimate(100 / level * (1 + 1e-4 * at))
            subject = replace(one.subject, backend=f"backend{build}", precision="fp32")
            one = replace(one, subject=subject, latency_ns=latency, throughput_images_per_s=rate)
            ones.append(RecordedMeasurement(one, "run-a", Environment(cpu="one")))
    table = compare_measurements(ones, baseline=BASELINE, against=tuple(ones[:5]))
    assert {row.change for row in table.rows} == {"no difference shown"}
    assert not any(row.dominated_by for row in table.rows)
    assert not any(table.best.values())


def test_a_build_that_is_farther_off_than_speeds_of_the_machine_is_told_apart():
    faster = processes("faster", 9.0, 0.02, rate=111.0)
    table = compare_measurements([*processes("other", 10.0, 0.02, precision="fp32"), *faster])
    assert table.row(table.best[Goal.LATENCY]).artifact == "faster"


def give_rates(name, rate, precision):
    """Five processes with rates around `rate`, and latencies that belong to them."""
    return [
        replace(
            one,
            measurement=replace(
                one.measurement, throughput_images_per_s=Estimate(rate * (1 + 0.002 * (at - 2)))
            ),
        )
        for at, one in enumerate(processes(name, 1000 / rate, 0.02, precision=precision))
    ]


@pytest.mark.parametrize(("rate", "says"), [(103.0, "1.03 times as fast ["), (150.0, "")])
def test_int8_is_called_no_faster_where_the_table_does_not_claim_it(rate, says):
    table = compare_measurements(
        [*give_rates("wide", 100.0, "fp32"), *give_rates("narrow", rate, "int8")]
    )
    notes = [each for each in table.warnings if "not shown to be faster" in each]
    assert len(notes) == bool(says)
    assert all(says in each for each in notes)


def test_int8_of_one_process_says_that_its_ratio_has_no_interval():
    found = [give_rates("wide", 100.0, "fp32")[0], give_rates("narrow", 150.0, "int8")[0]]
    (note,) = (
        each for each in compare_measurements(found).warnings if "not shown to be faster" in each
    )
    assert "1.50 times as fast, no interval" in note


def under(name, *precisions, **load):
    """Five processes of a build of each precision under `load`, the first build the fastest."""
    batch = load.get("batch_size", 1)
    every = [
        one
        for at, precision in enumerate(precisions)
        for one in processes(
            f"{name}-{precision}",
            1 + at,
            0.001,
            rate=500 / (1 + at),
            precision=precision,
            batch=batch,
        )
    ]
    return [
        replace(
            one, measurement=replace(one.measurement, load=replace(one.measurement.load, **load))
        )
        for one in every
    ]


SERVER = {"scenario": Scenario.SERVER, "rate_per_s": 100.0}


@pytest.mark.parametrize(
    "other",
    [SERVER, {"mode": Mode.END_TO_END}, {"scenario": Scenario.OFFLINE}],
    ids=lambda each: " ".join(map(str, each.values())),
)
@pytest.mark.parametrize("goal", [Goal.LATENCY, Goal.THROUGHPUT])
def test_the_best_is_the_best_of_one_kind_of_load(other, goal):
    one, another = under("x", "fp16", "fp32", batch_size=64), under("x", "fp16", "fp32", **other)
    alone, both = compare_measurements(one), compare_measurements([*one, *another])
    assert both.best[goal] is not None
    assert both.row(both.best[goal]).artifact == alone.row(alone.best[goal]).artifact
    assert "among 2 measurements of" in both.best_reason[goal]
    single = compare_measurements([*one, *under("x", "fp32", **other)])
    assert single.row(single.best[goal]).load.batch_size == 64, "the kind in which builds differ"


def test_rates_of_arrival_are_no_choice_between_builds():
    slow, fast = (
        under(str(rate), "fp16", scenario=Scenario.SERVER, rate_per_s=rate) for rate in (1.0, 9.0)
    )
    found = compare_measurements([*slow, *fast])
    assert not any(row.dominated_by for row in found.rows)
    assert all(
        "the only measurement of server at" in why for why in list(found.best_reason.values())[:2]
    )


def test_a_row_without_p99_is_compared_by_what_both_have():
    """Five processes with a p99 of 9 ms and a p50 of 1 ms lead those of which a p50 of 2 ms alone is known."""

    def keep(one, **percentiles):
        latency = one.measurement.latency_ns
        given = {"p50": latency.percentiles["p50"], **percentiles}
        return replace(
            one,
            measurement=replace(one.measurement, latency_ns=replace(latency, percentiles=given)),
        )

    every = under("x", "fp16", "fp32")
    late = [keep(one, p99=Estimate(9e6, 8.9e6, 9.1e6)) for one in every[:5]]
    found = compare_measurements([*late, *(keep(one) for one in every[5:])])
    assert found.row(found.best[Goal.LATENCY]).precision == "fp16"
    rows = sort_by_goal(found, Goal.LATENCY).rows
    assert [row.precision for row in rows] == ["fp16", "fp32"]
    assert [row.on_frontier for row in rows] == [True, False]


def test_invalid_measurements_are_shown_and_never_best():
    found = compare_measurements(
        [measured("bad", 1.0, 0.01, valid=False), measured("good", 9.0, 0.01, batch=2)]
    )
    assert found.row("run-a/bad").on_frontier is False
    assert found.best[Goal.LATENCY] == "run-a/good"
    assert [row.id for row in sort_by_goal(found, Goal.LATENCY).rows] == ["run-a/good", "run-a/bad"]


def test_no_build_is_the_best_of_several_models_and_each_row_says_its_own():
    small = measured("a", 1.0, 0.01)
    subject = replace(small.measurement.subject, artifact="b", model="large")
    large = replace(small, measurement=replace(small.measurement, id="b", subject=subject))
    found = compare_measurements([small, large])
    assert set(found.best.values()) == {None}
    assert (
        "2 models are compared (large, m); choose one with --model"
        in found.best_reason[Goal.LATENCY]
    )
    assert [row.build for row in found.rows] == ["large torch fp16", "m torch fp16"]
    assert compare_measurements([large]).rows[0].build == "torch fp16"
    text = text_of(document_from_comparison(found))
    assert "large torch fp16" in text
    assert "choose one with --model" in text


def with_options(one, affinity=None, **options):
    subject = replace(one.measurement.subject, options=options, affinity=affinity)
    name = "-".join(f"{key}{value}" for key, value in options.items()) or "plain"
    return replace(
        one,
        measurement=replace(one.measurement, id=f"{one.measurement.id}-{name}", subject=subject),
    )


def test_every_set_of_options_is_a_row_that_its_label_tells_apart():
    tried = [
        with_options(
            measured("a", 10.0 / threads, 0.01, batch=batch), threads=threads, spinning=True
        )
        for threads in (1, 2, 4)
        for batch in (1, 8)
    ]
    found = compare_measurements(tried)
    assert len(found.rows) == 6
    assert {row.configuration for row in found.rows} == {
        f"torch fp16 threads={threads}" for threads in (1, 2, 4)
    }
    assert len({row.label for row in found.rows}) == 6
    assert found.rows[0].settings == {"threads": "1", "spinning": "true"}
    assert "threads=4" in found.best_reason[Goal.LATENCY]
    assert "torch fp16 threads=4" in text_of(document_from_comparison(found))
    assert list(frame_from_comparison(found)["setting"][:1]) == ["threads=1"]


def test_all_processes_of_equal_settings_are_one_row_and_a_processor_more_is_another_setting():
    old, new = (
        with_options(measured("a", ms, 0.01, run=f"run-{ms}"), threads=2, affinity=(0, 1))
        for ms in (2.0, 3.0)
    )
    pinned = with_options(measured("a", 4.0, 0.01), threads=2, affinity=(0, 2, 3))
    rows = compare_measurements([new, old, pinned]).rows
    assert [(row.setting, row.latency_ns["p50"].value) for row in rows] == [
        ("affinity=0,2-3", 4e6),
        ("affinity=0-1", 3e6),  # the newest, as long as there are fewer than three
    ]


def test_a_speedup_is_over_the_same_options_else_over_the_fastest_which_is_said():
    slowest, fastest = (measured("w", ms, 0.01, precision="fp32") for ms in (8.0, 4.0))
    fp32 = [with_options(slowest, threads=1), with_options(fastest, threads=2)]
    slow = [with_options(measured("w", 3.0, 0.01, precision="fp32", valid=False), threads=8)]
    fp16 = [with_options(measured("h", 2.0, 0.01), threads=threads) for threads in (1, 4)]
    found = compare_measurements([*fp32, *slow, *fp16])
    rows = {row.configuration: row for row in found.rows}
    assert rows["torch fp16 threads=1"].speedup.value == pytest.approx(4.0)
    assert rows["torch fp16 threads=1"].held_against == "run-a/w-threads1: torch fp32 threads=1"
    assert rows["torch fp16 threads=4"].speedup.value == pytest.approx(2.0), (
        "an INVALID one is no baseline"
    )
    said = "torch fp16 threads=4 is compared with torch fp32 threads=2, the fastest of 3 settings (batch 1)"
    assert said in found.warnings
    assert sum("compared with" in one for one in found.warnings) == 1


def test_a_limit_that_nothing_meets_names_the_nearest():
    found = compare_measurements([measured("m", 10.0, 1.0)], slo=Slo(99.0, 1e6))
    assert found.best[Goal.LATENCY] is None
    assert (
        found.best_reason[Goal.LATENCY]
        == "no build meets p99 ≤ 1.00 ms; the closest has an upper bound of 13.2 ms"
    )


def test_different_machines_are_refused_unless_asked_for():
    here, there = (
        measured("a", 1.0, 0.1),
        measured("b", 1.0, 0.1, run="run-b", environment=Environment(cpu="two")),
    )
    with pytest.raises(BadInputError, match="cpu: one and two"):
        compare_measurements([here, there])
    assert "different machines" in compare_measurements([here, there], across=True).warnings[0]


def test_across_processors_each_has_its_rows_and_its_own_baseline():
    tries = [
        one
        for cpu, ms in (("one", 1.0), ("two", 3.0))
        for precision, times in (("fp32", 2.0), ("fp16", 1.0))
        for one in processes(
            precision,
            ms * times,
            0.01,
            precision=precision,
            run=f"run-{cpu}",
            environment=Environment(cpu=cpu),
        )
    ]
    found = compare_measurements(tries, across=True)
    assert {row.build: row.speedup and round(row.speedup.value, 1) for row in found.rows} == {
        "torch fp32 (one)": None,
        "torch fp32 (two)": None,
        "torch fp16 (one)": 2.0,
        "torch fp16 (two)": 2.0,
    }


@pytest.mark.slow
def test_another_workspace_is_the_baseline_of_its_own_builds(workspace, measured_workspace):
    workspace.bench(workspace.artifact("int8"), batches=(1, 8), processes=3)
    found, *_ = compare_workspace(workspace.store, baseline=str(measured_workspace.path))
    assert found.baseline == str(measured_workspace.path)
    assert len(found.unmatched) == 4  # batch 8, and three builds at batch 4
    assert [row.held_against is not None for row in found.rows] == [True, False]
    assert all("different runs" in str(row.change) for row in found.rows if row.held_against)


def test_what_has_no_counterpart_is_listed():
    one, other = measured("a", 1.0, 0.1, batch=2), measured("b", 1.0, 0.1)
    found = compare_measurements([one], baseline=BASELINE, against=(other,))
    assert list(found.unmatched.values()) == [
        "the baseline was not measured at batch 2, single-stream, compute",
        "only the baseline has a measurement at this load",
    ]


def test_a_workspace_is_compared_from_its_raw_samples(measured_workspace):
    found, *_ = compare_workspace(measured_workspace.store)
    rows = {(row.precision, row.load.batch_size): row for row in found.rows}
    assert len(rows) == 6
    assert rows["int8", 4].change == "not judged: different runs"
    assert rows["int8", 4].speedup.value == pytest.approx(1 / 0.6, rel=0.05)
    assert rows["fp32", 4].speedup is None, "it is the baseline"
    frame = frame_from_comparison(found)
    assert frame.height == 6
    assert frame.schema["latency_ns_p99_value"] == pl.Float64
    assert frame.write_csv().splitlines()[1].startswith(found.rows[0].id)


@pytest.mark.slow
def test_a_run_that_ended_while_it_warmed_up_has_no_distribution(workspace, tmp_path):
    entry = workspace.artifact()
    workspace.bench(entry)
    workspace.interrupted_bench(entry)
    found = compare_workspace(workspace.store)
    drawn = draw_measurements(*found, tmp_path)
    assert [
        len(each.files)
        for each in drawn
        if isinstance(each, Figure) and each.title == "Latency distribution"
    ] == [1]


def test_a_run_that_was_changed_is_refused(workspace):
    run = workspace.bench(workspace.artifact())
    path = min(run.path.glob("samples/*"))
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(BadInputError, match=r"was modified: samples/m1\.parquet: changed"):
        compare_workspace(workspace.store)


def test_runs_are_named_by_their_beginning_and_must_exist(workspace):
    with pytest.raises(BadInputError, match="no measurements"):
        find_bench_runs(workspace.path)
    first, second = workspace.bench(workspace.artifact()), workspace.bench(workspace.artifact())
    assert find_bench_runs(workspace.path, [first.name])[0].name == first.name
    assert find_bench_runs(workspace.path, [str(second.path)])[0].name == second.name
    with pytest.raises(BadInputError, match="matches 2 bench runs"):
        find_bench_runs(workspace.path, ["bench-"])
    with pytest.raises(BadInputError, match=r"no bench run in .* has the name 'bench-1999'"):
        find_bench_runs(workspace.path, ["bench-1999"])


def test_a_model_that_was_not_measured_is_named_with_those_that_were(workspace):
    workspace.bench(workspace.artifact("fp16"))
    with pytest.raises(BadInputError, match=r"no measurements of nope .*; measured models: digits"):
        compare_workspace(workspace.store, model="nope")
    assert len(compare_workspace(workspace.store, names=["digits"])[0].rows) == 1, (
        "a model's name does for --model"
    )
    with pytest.raises(BadInputError, match=r"has the name 'nope'(.|\n)*models \(digits\)"):
        compare_workspace(workspace.store, names=["nope"])


@pytest.mark.slow
def test_a_baseline_run_is_held_against_and_not_listed(workspace):
    entry = workspace.artifact()
    baseline = workspace.bench(entry, mean_ms=10.0)
    with pytest.raises(BadInputError, match="the only run is the baseline"):
        compare_workspace(workspace.store, baseline=baseline.name)
    workspace.bench(entry, mean_ms=20.0)
    rows = compare_workspace(workspace.store, baseline=baseline.name)[0].rows
    assert [row.change for row in rows] == ["not judged: different runs"]
    workspace.bench(entry, mean_ms=20.0)
    rows = compare_workspace(workspace.store, baseline=baseline.name)[0].rows
    assert [row.change for row in rows] == ["slower"]
    with pytest.raises(BadInputError, match="no approved baseline"):
        compare_workspace(workspace.store, model="digits", baseline="approved")


def test_different_clocks_are_not_compared():
    fast, slow = (
        replace(measured(name, 1.0, 0.1, run=f"run-{name}"), clock_mhz=mhz)
        for name, mhz in (("a", 1980), ("b", 1200))
    )
    found = compare_measurements([fast], baseline=BASELINE, against=(slow,))
    assert found.rows[0].speedup is None
    assert "GPU clocks differ: 1980 MHz and 1200 MHz" in next(iter(found.unmatched.values()))
    assert (
        compare_measurements([fast], baseline=BASELINE, against=(slow,), across=True)
        .rows[0]
        .speedup
        is not None
    )


@pytest.mark.slow
def test_every_form_of_a_report_counts_samples_of_a_text_model():
    def at(length):
        one = measured("a", 1.0, 0.1, batch=8 * (length or 1))
        load = replace(one.measurement.load, length=length)
        more = {"load": load, "energy_j_per_image": Estimate(0.05, 0.04, 0.06)}
        return replace(one, measurement=replace(one.measurement, id=f"a{length}", **more))

    for lengths, sample, other in ((8, 32), "sample", "image"), ((None,), "image", "sample"):
        found = compare_measurements([at(length) for length in lengths], across=True)
        report = page_from_comparison(found, draw_comparison(found), ())
        page = render_html(report)
        forms = text_of(document_from_comparison(found), width=200), render_page(report), page
        assert f"{sample}s per second" in page
        for form in forms:
            assert f"{sample}s/s" in form
            assert f"{other}s/s" not in form
            assert f"{other}s/J" not in form.lower()
