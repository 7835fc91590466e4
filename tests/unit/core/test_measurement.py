import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe.core import measurement as m
from optpipe.core import measurement_json as mj
from optpipe.errors import BadInputError

SUMMARY = m.LatencySummary(
    samples=100,
    percentiles=(m.Percentile(50.0, 1.5, (1.4, 1.6)), m.Percentile(99.9, 3.0, (2.9, 3.1))),
    minimum=1.0,
    maximum=3.0,
    mean=1.6,
    stddev=0.1,
    withheld={"p99.99": "needs 66,362 samples, has 100"},
)
WHOLE = m.Measurement(
    id="m000",
    subject=m.Subject(
        "onnxruntime-0123", "onnxruntime", "fp16", "cuda:0", options={"prefer_nhwc": True}, cuda_graph=True
    ),
    batch_size=8,
    scenario=m.Scenario.OFFLINE,
    mode=m.Mode.COMPUTE,
    verdict=m.Validity.INVALID,
    reasons=(m.Reason("drift", "latency rose", "cool down", invalidates=True, evidence={"slope": 0.1}),),
    samples=100,
    latency=SUMMARY,
    parts={"enqueue": SUMMARY},
    throughput_images_per_s=m.Estimate(5000.0, (4900.0, 5100.0)),
    throughput_batches_per_s=625.0,
    device_peak_bytes=7,
    energy_j_per_image=m.Estimate(0.02, (0.019, 0.021), "counter"),
    output_check=m.OutputCheck(8, passed=True, reference="cpu"),
)
NOTHING = m.Measurement(
    id="m001",
    subject=m.Subject("a", "onnxruntime", "fp32", "cpu", affinity=(0, 1)),
    batch_size=512,
    scenario=m.Scenario.SINGLE_STREAM,
    mode=m.Mode.END_TO_END,
    verdict=m.Validity.INVALID,
    reasons=(m.Reason("out-of-memory", "no", "less", invalidates=True),),
)


@pytest.mark.parametrize("measurement", [WHOLE, NOTHING])
def test_json_keeps_everything(measurement):
    document = json.loads(json.dumps(mj.document_from_measurements((measurement,)), allow_nan=False))
    assert mj.measurements_from_document(document) == (measurement,)


def test_json_has_the_keys_of_the_contract():
    document = mj.record_from_measurement(WHOLE)
    assert set(document) >= {
        "artifact", "backend", "precision", "batch_size", "scenario", "mode", "samples", "latency_ms",
        "throughput_images_per_s", "memory_bytes", "energy_j_per_image", "verdict", "reasons",
    }  # fmt: skip
    assert document["latency_ms"]["p50"] == {"value": 1.5, "ci": [1.4, 1.6]}
    assert document["latency_ms"]["p99.9"]["value"] == 3.0
    assert document["memory_bytes"] == 7


def test_another_version_is_refused_by_number():
    with pytest.raises(BadInputError, match="version 2"):
        mj.measurements_from_document({"schema": mj.MEASUREMENTS_SCHEMA, "schema_version": 2, "measurements": []})


def test_a_maimed_measurement_is_refused():
    document = mj.record_from_measurement(WHOLE)
    del document["subject"]
    with pytest.raises(BadInputError, match="subject"):
        mj.measurement_from_json(document)


@given(st.sets(st.integers(0, 40), min_size=1))
def test_processors_are_written_as_affinity_reads_them(cpus):
    spans = [part.partition("-") for part in m.format_cpus(cpus).split(",")]
    assert {cpu for low, _, high in spans for cpu in range(int(low), int(high or low) + 1)} == cpus
    assert len(spans) == sum(cpu - 1 not in cpus for cpu in cpus), "neighbours are one span"


SETTINGS = st.dictionaries(st.sampled_from("abc"), st.sampled_from(["1", "2", "true"]))


@given(st.lists(SETTINGS, min_size=1, max_size=5))
def test_what_differs_tells_settings_apart_and_nothing_else_is_said(settings):
    names = m.find_differing_settings(settings)
    texts = [m.format_settings(each, names) for each in settings]
    pairs = [(one, other) for one in range(len(settings)) for other in range(len(settings))]
    assert all((texts[one] == texts[other]) == (settings[one] == settings[other]) for one, other in pairs)
    assert bool(names) == any(settings[0] != each for each in settings)
