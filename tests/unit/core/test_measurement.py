from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe.core import measurement as m
from optpipe.core.errors import BadInputError
from optpipe.core.files import Files
from optpipe.core.records import json_from_record, plain_from_record, record_from_plain


def test_another_version_is_refused_by_number(tmp_path):
    record = replace(m.MeasurementsRecord(()), schema_version=2)
    (tmp_path / m.MEASUREMENTS_FILE).write_bytes(json_from_record(record))
    with pytest.raises(BadInputError, match=r"version 2; .* version 1"):
        m.read_measurements(Files(tmp_path))


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
