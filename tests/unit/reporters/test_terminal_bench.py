import io

import pytest
from rich.console import Console

from optpipe.core.measurement import (
    Estimate,
    LatencySummary,
    Measurement,
    Mode,
    Percentile,
    Reason,
    Scenario,
    Subject,
    Validity,
)
from optpipe.core.measurement_json import as_json
from optpipe.errors import BadInputError
from optpipe.reporters.terminal_bench import bench_table, pair_table


def row(batch, latency_ms, *reasons, rate=None):
    percentiles = (Percentile(50.0, latency_ms, (latency_ms * 0.98, latency_ms * 1.01)),)
    return as_json(
        Measurement(
            id="m",
            subject=Subject("a", "onnxruntime", "fp16", "cuda:0", model="resnet50", cuda_graph=True),
            batch_size=batch,
            scenario=Scenario.SINGLE_STREAM,
            mode=Mode.COMPUTE,
            verdict=Validity.INVALID if reasons else Validity.VALID,
            reasons=reasons,
            samples=700,
            latency=LatencySummary(700, percentiles, 1, 1, latency_ms, 0.0, {}) if latency_ms < 1e9 else None,
            throughput_images_per_s=Estimate(batch / latency_ms * 1e3) if latency_ms < 1e9 else None,
            throughput_batches_per_s=1e3 / latency_ms,
            device_peak_bytes=1 << 30,
            offered_rate_per_s=rate,
        )
    )


def text_of(document, sort="given"):
    console = Console(file=io.StringIO(), width=160)
    console.print(bench_table({"run_dir": "r", **document}, sort))
    return console.file.getvalue()


DRIFT = Reason("drift", "it became slower", "wait", invalidates=True)
MEMORY = Reason("out-of-memory", "no memory", "a smaller batch", invalidates=True)


def test_what_is_shared_stands_above_and_figures_have_units_and_intervals():
    text = text_of({"measurements": [row(1, 0.5), row(64, 4.0)]})
    assert "resnet50: onnxruntime fp16, cuda:0, CUDA graph, single-stream, compute" in text
    assert "0.5 ±2.0%" in text
    assert "16,000" in text
    assert "1.00 GiB" in text
    assert "p99" not in text  # withheld percentiles have no column
    assert "J/image" not in text


def test_reasons_and_remedies_follow_and_failures_are_rows():
    text = text_of({"measurements": [row(1, 0.5, DRIFT), row(512, 1e12, MEMORY)]})
    assert "INVALID  drift" in text
    assert "→ wait" in text
    assert "onnxruntime fp16 batch 512: no memory" in text


@pytest.mark.parametrize(("sort", "first"), [("given", 64), ("latency", 1), ("throughput", 64)])
def test_the_table_sorts_by_what_was_asked_for(sort, first):
    lines = text_of({"measurements": [row(64, 4.0), row(1, 0.5)]}, sort).splitlines()
    assert lines[4].split()[0] == str(first)
    with pytest.raises(BadInputError, match="--sort"):
        text_of({"measurements": []}, "beauty")


def limit(met, verdict="VALID"):
    one = {"label": "ort", "slo": "p99=5ms", "met": met, "measurement": "m", "batch_size": 8, "rate_per_s": None}
    return {
        "slo": "p99=5ms",
        "met": met,
        "artifacts": [{**one, "value_ms": 4.0, "upper_bound_ms": 4.1, "verdict": verdict}],
    }


def test_a_limit_is_answered_and_a_doubtful_answer_says_so():
    rows = [row(8, 4.0)]
    assert "largest inside p99=5ms is batch 8 (4 ms)" in text_of({"measurements": rows, "limit": limit(True)})
    assert "by an INVALID measurement" in text_of({"measurements": rows, "limit": limit(True, "INVALID")})
    assert "nothing meets p99=5ms; nearest is batch 8" in text_of({"measurements": rows, "limit": limit(False)})


def test_a_pair_is_answered_in_words():
    ratio = {"value": 0.9, "ci": [0.89, 0.91], "confidence": 0.99, "rounds": 8, "smallest_visible": 0.01}
    found = {"verdict": "faster", "metric": "p50", "ratio": ratio}
    document = {"baseline": "a", "contender": "b", "comparison": found, "run_dir": "r"}
    console = Console(file=io.StringIO(), width=160)
    console.print(pair_table(document))
    console.print(pair_table({**document, "comparison": None}))
    text = console.file.getvalue()
    assert "b is faster" in text
    assert "p50 ratio 0.9000 (99% interval 0.8900 to 0.9100) over 8 rounds" in text
    assert "interrupted" in text
