from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe.core import measurement as m
from optpipe.core.errors import BadInputError
from optpipe.core.files import Files
from optpipe.core.quantity import Estimate
from optpipe.core.records import json_from_record, plain_from_record, record_from_plain

SUMMARY = m.LatencySummary(
    samples=100,
    percentiles={"p50": Estimate(1.5, 1.4, 1.6), "p99.9": Estimate(3.0, 2.9, 3.1)},
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
    load=m.LoadSpec(8, m.Scenario.OFFLINE),
    verdict=m.Validity.INVALID,
    reasons=(m.Reason("drift", "latency rose", "cool down", invalidates=True, evidence={"slope": 0.1}),),
    samples=100,
    latency_ns=SUMMARY,
    parts_ns={"enqueue": SUMMARY},
    throughput_images_per_s=Estimate(5000.0, 4900.0, 5100.0),
    throughput_batches_per_s=625.0,
    device_peak_bytes=7,
    energy_j_per_image=Estimate(0.02, 0.019, 0.021, "counter"),
    output_check=m.OutputCheck(8, passed=True, reference="cpu"),
)
NOTHING = m.Measurement(
    id="m001",
    subject=m.Subject("a", "onnxruntime", "fp32", "cpu", affinity=(0, 1)),
    load=m.LoadSpec(512, mode=m.Mode.END_TO_END),
    verdict=m.Validity.INVALID,
    reasons=(m.Reason("out-of-memory", "no", "less", invalidates=True),),
)


def write(folder, *measurements, **header):
    record = replace(m.MeasurementsRecord(tuple(measurements)), **header)
    (folder / m.MEASUREMENTS_FILE).write_bytes(json_from_record(record))


def test_json_keeps_everything(tmp_path):
    write(tmp_path, WHOLE, NOTHING)
    assert m.read_measurements(Files(tmp_path)) == (WHOLE, NOTHING)
    assert WHOLE.memory_bytes == 7


def test_another_version_is_refused_by_number(tmp_path):
    write(tmp_path, schema_version=2)
    with pytest.raises(BadInputError, match=r"version 2; .* version 1"):
        m.read_measurements(Files(tmp_path))


def test_a_maimed_measurement_is_refused():
    document = plain_from_record(WHOLE)
    del document["subject"]
    with pytest.raises(BadInputError, match="subject"):
        record_from_plain(document, m.Measurement, "a test")


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


def test_rates_count_samples_of_all_but_images():
    tensors, images, older = (m.LoadSpec(8, images=known) for known in (False, True, None))
    assert [each.sample for each in (tensors, images, older, m.LoadSpec(8, length=32))] == [
        "sample", "image", "image", "sample"
    ]  # fmt: skip
    assert tensors.key == images.key == older.key
    assert m.name_sample(each.sample for each in (images, tensors)) == "sample"


def test_two_lengths_are_two_loads_and_older_records_have_none():
    short, long = m.LoadSpec(8, length=32), m.LoadSpec(8, length=512)
    assert len({m.LoadSpec(8).key, short.key, long.key}) == 3
    assert str(long) == "batch 8, length 512, single-stream, compute"
    assert list(m.list_load_options(long)) == ["--batch", "8", "--length", "512"]
    older = plain_from_record(m.LoadSpec(8))
    del older["length"]
    assert record_from_plain(older, m.LoadSpec, "older") == m.LoadSpec(8)
