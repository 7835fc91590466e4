from dataclasses import replace

import pytest
from tests.fakes.console import text_of
from tests.fakes.measurements import planted

from optpipe.core.measurement import Reason, Subject
from optpipe.core.measurement_json import record_from_measurement
from optpipe.errors import BadInputError
from optpipe.measuring.tune import Trial, Tuning, record_from_trials
from optpipe.reporters.terminal_bench import render_bench, render_pair

SUBJECT = Subject("a", "onnxruntime", "fp16", "cuda:0", model="resnet50", cuda_graph=True)


def row(batch, latency_ms, *reasons):
    figures = {"samples": 700, "throughput_batches_per_s": 1e3 / latency_ms, "device_peak_bytes": 1 << 30}
    found = planted(SUBJECT, batch, latency_ms, reasons=reasons, percents=(50.0,), low=0.98, **figures)
    return record_from_measurement(
        found if latency_ms < 1e9 else replace(found, latency=None, throughput_images_per_s=None)
    )


def table_of(document, sort="given"):
    return text_of(render_bench({"run_dir": "r", **document}, sort))


DRIFT = Reason("drift", "it became slower", "wait", invalidates=True)
MEMORY = Reason("out-of-memory", "no memory", "a smaller batch", invalidates=True)


def test_what_is_shared_stands_above_and_figures_have_units_and_intervals():
    text = table_of({"measurements": [row(1, 0.5), row(64, 4.0)]})
    assert "resnet50: onnxruntime fp16, cuda:0, CUDA graph, single-stream, compute" in text
    assert "0.5 ±2.0%" in text
    assert "16,000" in text
    assert "1.00 GiB" in text
    assert "p99" not in text  # withheld percentiles have no column
    assert "J/image" not in text


def of(model, artifact, *reasons):
    one = row(1, 0.5, *reasons)
    return {**one, "model": model, "artifact": artifact}


def test_rows_of_several_models_or_builds_are_told_apart():
    two = table_of({"measurements": [of("digits", "a1"), of("resnet18", "b1", DRIFT)]})
    assert "digits onnxruntime fp16" in two
    assert "    resnet18 onnxruntime fp16 batch 1: it became slower" in two
    assert not two.startswith("digits:")
    builds = table_of({"measurements": [of("digits", "a1"), of("digits", "a2")]})
    assert builds.startswith("digits: cuda:0")
    assert "a1 onnxruntime fp16" in builds
    assert "a2 onnxruntime fp16" in builds


@pytest.mark.parametrize(("width", "gone"), [(60, "CV"), (160, None)])
def test_a_narrow_terminal_loses_columns_and_no_part_of_a_figure_or_verdict(width, gone):
    text = text_of(
        render_bench({"run_dir": "r", "measurements": [row(1, 0.5), row(64, 4.0, DRIFT)]}, "given"), width=width
    )
    assert "…" not in text
    assert "INVALID" in text
    assert "0.5 ±2.0%" in text
    assert ("hidden on this narrow terminal: memory, CV" in text) == (gone is not None)


def test_reasons_and_remedies_follow_and_failures_are_rows():
    text = table_of({"measurements": [row(1, 0.5, DRIFT), row(512, 1e12, MEMORY)]})
    assert "INVALID  drift" in text
    assert "→ wait" in text
    assert "onnxruntime fp16 batch 512: no memory" in text


@pytest.mark.parametrize(("sort", "first"), [("given", 64), ("latency", 1), ("throughput", 64)])
def test_the_table_sorts_by_what_was_asked_for(sort, first):
    lines = table_of({"measurements": [row(64, 4.0), row(1, 0.5)]}, sort).splitlines()
    assert lines[4].split()[0] == str(first)
    with pytest.raises(BadInputError, match="--sort"):
        table_of({"measurements": []}, "beauty")


def limit(met, verdict="VALID", not_judged=()):
    one = {
        "label": "ort",
        "slo": "p99=5ms",
        "met": met,
        "inside": met,
        "measurement": "m",
        "batch_size": 8,
        "rate_per_s": None,
    }
    return {
        "slo": "p99=5ms",
        "met": met,
        "artifacts": [{**one, "value_ms": 4.0, "upper_bound_ms": 4.1, "verdict": verdict, "not_judged": not_judged}],
    }


def test_a_limit_is_answered_and_a_doubtful_answer_says_so():
    rows = [row(8, 4.0)]
    assert "largest within p99=5ms is batch 8 (4 ms)" in table_of({"measurements": rows, "limit": limit(True)})
    assert "from an INVALID measurement" in table_of({"measurements": rows, "limit": limit(True, "INVALID")})
    assert "nothing is proven to meet p99=5ms" in table_of({"measurements": rows, "limit": limit(None, "INVALID")})
    assert "nothing meets p99=5ms; closest is batch 8" in table_of({"measurements": rows, "limit": limit(False)})
    unknown = [{"batch_size": size, "rate_per_s": None, "why": "p99 is not reported: too alike"} for size in (16, 32)]
    text = table_of({"measurements": rows, "limit": limit(True, not_judged=unknown)})
    assert "ort: not judged at batch 16, batch 32: p99 is not reported: too alike; measure longer (--min-time)" in text


def test_a_missing_percentile_is_explained_where_it_had_samples_enough():
    found = row(8, 4.0)
    why = "samples follow each other too closely: 700 are worth 90 independent ones"
    found["latency_ms"]["withheld"] = {"p99": why, "p99.9": "needs 6,636 samples, has 700"}
    text = table_of({"measurements": [found]})
    assert f"onnxruntime fp16 batch 8: p99: {why}" in text
    assert "6,636" not in text


def test_rates_and_streams_are_named():
    found = [{**row(4, 1.0, DRIFT), "offered_rate_per_s": 250.0, "streams": 2} for _ in range(2)]
    text = table_of({"measurements": found})
    assert "onnxruntime fp16 batch 4 at 250/s: it became slower" in text
    assert "single-stream, compute, 2 streams" in text


def test_a_pair_is_answered_in_words():
    ratio = {"value": 0.9, "ci": [0.89, 0.91], "confidence": 0.99, "rounds": 8, "smallest_visible": 0.01}
    found = {"verdict": "faster", "metric": "p50", "ratio": ratio}
    document = {"baseline": "a", "contender": "b", "comparison": found, "run_dir": "r", "measurements": [row(8, 4.0)]}
    text = text_of(render_pair(document), render_pair({**document, "comparison": None}))
    assert "b is faster" in text
    assert "batch 8, single-stream, compute: p50 ratio 0.9000 (99% interval 0.8900 to 0.9100) over 8 rounds" in text
    assert "interrupted before the last round: no comparison; the measurements are kept in r" in text


def test_options_that_answer_wrongly_are_named():
    wrong = Reason("wrong-output", "a timed answer is wrong", "choose another", invalidates=True)
    trials = [
        Trial({"nhwc": nhwc}, tuple(planted(SUBJECT, size, 1.0, reasons=found) for size in (1, 64)))
        for nhwc, found in ((True, ()), (False, (wrong,)))
    ]
    tuning = Tuning(tuple(trials), {1: {"nhwc": True}, 64: {"nhwc": True}})
    record = record_from_trials("a", "onnxruntime fp16 (cuda)", tuning)
    assert [each["reasons"]["64"] for each in record["trials"]] == [[], ["wrong-output"]]
    text = " ".join(table_of({"measurements": [row(1, 0.5)], "tuning": [record]}).split())
    assert "batch 1, 64: --option onnxruntime.nhwc=true (of 2 tried)" in text
    assert "rejected for wrong outputs, batch 1, 64: --option onnxruntime.nhwc=false" in text
