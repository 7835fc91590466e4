"""What a bench run tolerates, leaves behind and recovers; its texts."""

import os
from dataclasses import replace
from itertools import chain
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
from tests.fakes.console import assert_golden, text_of
from tests.fakes.entries import artifact_info, proof
from tests.fakes.measurements import planted

from optpipe.core.entries import Environment
from optpipe.core.errors import BadInputError
from optpipe.core.events import SilentListener
from optpipe.core.files import Files
from optpipe.core.load import LoadSpec
from optpipe.core.measurement import (
    MEASUREMENTS_FILE,
    InputPool,
    Reason,
    Subject,
    Validity,
    read_measurements,
)
from optpipe.core.metrics.measured import PairMetric
from optpipe.core.precision import Precision
from optpipe.core.quantity import Estimate
from optpipe.core.records import compare_recomputed, json_from_record
from optpipe.measure.bench import choose_exit_status, recover_run
from optpipe.measure.document import document_from_bench, document_from_pair
from optpipe.measure.figures import recompute_bench
from optpipe.measure.groups import RecordedMeasurement, group_processes, summarize_group
from optpipe.measure.measure import _find_coarsest_precision, offer_recovery, warn_about_threads
from optpipe.measure.pair import BenchRecord, PairedComparison
from optpipe.measure.plan import plan_bench
from optpipe.measure.search import ArtifactLimit
from optpipe.measure.validity import find_repeated_cause
from optpipe.stats.ratio import Change, Ratio
from optpipe.workspace.entry import MANIFEST, load_run
from optpipe.workspace.runs import begin_run


def test_an_affinity_that_changes_nothing_and_more_threads_than_processors_are_named(
    monkeypatch,
) -> None:
    def warn(device, threads, affinity):
        listener, info = SilentListener(), SimpleNamespace(device=device, backend="fake")
        build = SimpleNamespace(label="build", entry=SimpleNamespace(info=info))
        warn_about_threads(build, {"threads": threads}, affinity, listener)  # type: ignore[arg-type]
        return " ".join(listener.warnings)

    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert "changes nothing" in warn("cuda", 0, [0, 1])
    assert "use --option fake.threads=1" in warn("cpu", 0, [0])
    assert warn("cpu", 1, [0]) == ""


def test_a_model_that_came_quantized_has_the_tolerance_of_int8() -> None:
    plain = artifact_info(precision="fp32", precision_proof=proof("fp32", 1.0))
    quantized = artifact_info(precision="fp32", precision_proof=proof("int8", 0.2))
    assert _find_coarsest_precision(plain) is Precision.FP32
    assert _find_coarsest_precision(quantized) is Precision.INT8


def test_a_cause_on_the_host_stops_a_bench_only_where_the_last_two_processes_show_it_at_every_point() -> (
    None
):
    def cause(*processes: tuple[str, ...]) -> str | None:
        measured = [
            planted(
                Subject("a", "fake", "fp32", "cpu"),
                1,
                1.0,
                process=at,
                reasons=[Reason(code, "", "", True)],
            )
            for at, codes in enumerate(processes)
            for code in codes
        ]
        found = find_repeated_cause(measured)
        return None if found is None else found.code

    assert cause(("busy-gpu",), ("busy-gpu",)) == "busy-gpu"
    assert cause(("drift",), ("loaded-host",), ("loaded-host",)) == "loaded-host"
    for others in ((("loaded-host",),), (("drift",), ("drift",)), (("loaded-host",), ("hot",))):
        assert cause(*others) is None
    assert cause(("loaded-host",), ("loaded-host", "drift")) is None


def test_numbers_of_numpy_are_counts() -> None:
    plan = plan_bench({}, processes=np.int64(3), seed=np.uint8(7))  # type: ignore[arg-type]
    assert (plan.processes, plan.seed) == (3, 7)
    assert type(plan.processes) is int
    for given in (True, 2.0, "2", np.float32(2), np.array([2]), np.int64(0), np.bool_(True)):
        with pytest.raises(BadInputError, match="--processes"):
            plan_bench({}, processes=given)  # type: ignore[arg-type]


def test_a_note_about_the_host_stops_nothing() -> None:
    note = Reason("clocks-moved", "at the power cap", "", invalidates=False)
    subject = Subject("a", "fake", "fp32", "cuda:0")
    measured = [planted(subject, 1, 1.0, process=at, reasons=[note]) for at in range(3)]
    assert find_repeated_cause(measured) is None


@pytest.mark.parametrize("left", [True, False])
def test_a_run_that_failed_before_it_wrote_anything_leaves_no_folder(tmp_path, left):
    run, listener = begin_run(tmp_path, "bench"), SilentListener()
    if left:
        (run.path / "samples").mkdir()
        (run.path / "samples" / "m000.spool").touch()
    with pytest.raises(BadInputError), offer_recovery(run, listener):
        raise BadInputError("no reference")
    assert run.path.exists() == bool(listener.warnings) == left


def test_what_is_recovered_follows_from_its_raw_files(workspace):
    """A dossier that holds it could never be verified."""
    folder = workspace.bench(workspace.artifact("fp16"), processes=1, max_cv=0.01).path
    (found,) = read_measurements(Files(folder))
    for name in (MANIFEST, MEASUREMENTS_FILE):
        (folder / name).unlink()
    begun = replace(found, samples_file=None, machine_file=None, reasons=(), energy_why_not=None)
    (folder / "samples" / f"{found.id}.json").write_bytes(json_from_record(begun))
    (row,) = recover_run(folder).measurements
    assert {"interrupted", "dispersion"} <= {reason.code for reason in row.reasons}
    assert list(compare_recomputed(recompute_bench(load_run(folder)))) == []


SUBJECT = Subject("a", "onnxruntime", "fp16", "cuda:0", model="resnet50", cuda_graph=True)
DRIFT = Reason("drift", "it became slower", "wait", invalidates=True)
MEMORY = Reason("out-of-memory", "no memory", "a smaller batch", invalidates=True)


def row(batch, latency_ms, *reasons, subject=SUBJECT, **more):
    figures = {
        "samples": 700,
        "throughput_batches_per_s": 1e3 / latency_ms,
        "device_peak_bytes": 1 << 30,
        **more,
    }
    return planted(
        subject, batch, latency_ms, reasons=reasons, percents=(50.0,), low=0.98, **figures
    )


def table_of(*rows, width=160, **more):
    groups = tuple(
        summarize_group(group)
        for group in group_processes(RecordedMeasurement(one, "r") for one in rows)
    )
    return text_of(
        document_from_bench(BenchRecord("r", "r", rows, Environment(), 0, groups, **more)),
        width=width,
    )


def test_causes_on_the_host_come_before_what_follows_from_them():
    loaded = Reason("loaded-host", "other processes ran", "stop them", invalidates=True)
    text = table_of(row(1, 1.0, DRIFT), row(1, 1.0, loaded, DRIFT))
    assert text.index("loaded-host") < text.index("drift")


def test_both_parts_of_the_scatter_are_shown():
    figures = (4.0, 4.1, 3.9, 4.05)
    rows = [
        replace(row(8, latency, samples=700 + at), process=at) for at, latency in enumerate(figures)
    ]
    rows.append(replace(row(8, 9.0, DRIFT), process=4))
    assert_golden(table_of(*rows), "bench-scatter.txt")


def test_the_memory_of_a_load_is_its_largest_peak():
    rows = [
        replace(row(8, 4.0, device_peak_bytes=gib << 30), process=at)
        for at, gib in enumerate((1, 3, 2))
    ]
    assert "3.00 GiB" in table_of(*rows)


def test_what_is_shared_stands_above_and_reasons_with_remedies_below():
    nothing = replace(
        row(512, 4.0, MEMORY), latency_ns=None, throughput_images_per_s=None, samples=0
    )
    assert_golden(table_of(row(1, 0.5), row(64, 4.0, DRIFT), nothing), "bench.txt")


def test_rows_of_several_models_or_builds_are_told_apart():
    models = [
        row(1, 0.5, DRIFT, subject=replace(SUBJECT, model=name, artifact=name))
        for name in ("digits", "small")
    ]
    builds = [row(1, 0.5, subject=replace(SUBJECT, artifact=name)) for name in ("a1", "a2")]
    assert_golden(table_of(*models) + table_of(*builds), "bench-several.txt")


def test_a_narrow_terminal_loses_columns_and_no_part_of_a_figure_or_verdict():
    assert_golden(table_of(row(1, 0.5), row(64, 4.0, DRIFT), width=60), "bench-narrow.txt")


def limit(met, verdict=Validity.VALID, not_judged=MappingProxyType({})):
    return (
        ArtifactLimit(
            "a", "ort", "p99 ≤ 5 ms", met, bool(met), "m", 8, None, 4e6, 4.1e6, verdict, not_judged
        ),
    )


def test_a_limit_that_could_not_be_judged_is_not_called_broken():
    for answers, status in (((False, None, True), 0), ((False, False), 1), ((False, None), 5)):
        assert (
            choose_exit_status((row(8, 4.0),), [*chain.from_iterable(map(limit, answers))])
            == status
        )


def test_a_limit_is_answered_and_a_doubtful_answer_says_so():
    unknown = {f"batch {size}": "p99 is not reported: too alike" for size in (16, 32)}
    limits = (
        limit(True),
        limit(True, Validity.INVALID),
        limit(None, Validity.INVALID),
        limit(False),
        limit(True, not_judged=unknown),
    )
    assert_golden(
        "".join(table_of(row(8, 4.0), limits=each) for each in limits), "bench-limits.txt"
    )


def test_a_missing_percentile_is_explained_where_it_had_samples_enough():
    found = row(8, 4.0)
    why = {
        "p99": "samples follow each other too closely: 700 are worth 90",
        "p99.9": "needs 6,636 samples, has 700",
    }
    assert_golden(
        table_of(replace(found, latency_ns=replace(found.latency_ns, withheld=why))),
        "bench-withheld.txt",
    )


def test_rates_and_streams_are_named():
    assert_golden(table_of(*[row(4, 1.0, DRIFT, rate=250.0, streams=2)] * 2), "bench-server.txt")


def test_sequences_are_samples_beside_their_tokens():
    tokens = {"throughput_tokens_per_s": Estimate(900.0, None, None, "")}
    known = InputPool("texts", 64, 64, 0, "", lengths=(8, 32))
    rows = [
        row(4, 1.0, load=LoadSpec(4, length=length), inputs=known, **tokens) for length in (8, 32)
    ]
    shown = table_of(*rows)
    assert_golden(shown, "bench-lengths.txt")
    assert "images" not in shown


def test_a_pair_is_answered_in_words():
    ratio = Ratio(0.9, (0.89, 0.91), Change.FASTER, 8, 0.99, 0.001, 0.01)
    found = PairedComparison(
        PairMetric.P50, ratio, "a", "b", (1.0,), (0.9,), 8, 1, {"drift": 2}, 2, ("a000", "b000")
    )
    record = BenchRecord(
        "r", "r", (row(8, 4.0),), Environment(), 0, baseline="a", contender="b", comparison=found
    )
    equal = replace(
        found, ratio=replace(ratio, change=Change.NO_DIFFERENCE), invalid={}, invalid_processes=0
    )
    records = (
        record,
        replace(record, comparison=equal),
        replace(record, comparison=None, interrupted=True),
    )
    assert_golden(text_of(*(document_from_pair(each) for each in records)), "bench-against.txt")
