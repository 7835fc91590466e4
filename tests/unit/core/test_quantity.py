"""Quantities as text and back, and what tells loads and settings apart."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe.core.load import LoadSpec, list_load_options, name_sample
from optpipe.core.quantity import (
    Dimension,
    format_bytes,
    format_count,
    format_duration,
    format_quantity,
    format_snr,
    quantity_from_text,
)
from optpipe.core.records import plain_from_record, record_from_plain
from optpipe.core.settings import find_differing_settings, format_cpus, format_settings


@pytest.mark.parametrize(
    ("text", "dimension", "value"),
    [
        ("15 ms", Dimension.TIME, 15e6),
        ("15ms", Dimension.TIME, 15e6),
        ("50 mJ/image", Dimension.ENERGY, 0.05),
        ("2000 samples/s", Dimension.RATE, 2000),
        ("50 mJ/sample", Dimension.ENERGY, 0.05),
    ],
)
def test_a_quantity_is_read_in_its_base_unit(text, dimension, value):
    assert quantity_from_text(text, dimension) == pytest.approx(value)


@pytest.mark.parametrize(
    "text", [15, 15.0, "15", "15 GB", "-1 ms", "nan ms", "1e999 ms", "ms", "", None, True, [1]]
)
def test_what_is_no_time_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match=r'for example "15 ms"|must be finite'):
        quantity_from_text(text, Dimension.TIME)


@given(st.sampled_from([Dimension.TIME, Dimension.SIZE, Dimension.SHARE]), st.floats(1e-3, 1e6))
def test_text_and_value_round_trip_to_three_digits(dimension, number):
    unit = next(iter(dimension.units))
    value = quantity_from_text(f"{number} {unit}", dimension)
    assert quantity_from_text(
        format_quantity(value, dimension).replace(",", ""), dimension
    ) == pytest.approx(value, rel=0.06, abs=1)


@pytest.mark.parametrize("dimension", list(Dimension))
def test_the_examples_in_messages_are_right(dimension):
    assert quantity_from_text(dimension.example, dimension) > 0


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0 ns"), (7, "7.00 ns"), (999.4, "999 ns"), (999.6, "1.00 µs"), (9_996, "10.0 µs"), (999_700, "1.00 ms"),
        (1_234_567, "1.23 ms"), (-999.6, "-1.00 µs"),
    ],
)  # fmt: skip
def test_durations(ns: float, text: str) -> None:
    assert format_duration(ns) == text


def test_sizes_and_counts() -> None:
    assert format_bytes(51_603_628) == "49.2 MiB"
    assert format_count(4_089_184_256) == "4.09 G"
    assert format_count(999_600) == "1.00 M"


def test_an_snr_of_outputs_that_are_not_finite_is_no_number() -> None:
    assert format_snr(62.6) == "63 dB"
    assert format_snr(-1e30) == "-inf dB (NaN or Inf in the outputs, or other sizes)"


@given(st.sets(st.integers(0, 40), min_size=1))
def test_processors_are_written_as_affinity_reads_them(cpus):
    spans = [part.partition("-") for part in format_cpus(cpus).split(",")]
    assert {cpu for low, _, high in spans for cpu in range(int(low), int(high or low) + 1)} == cpus
    assert len(spans) == sum(cpu - 1 not in cpus for cpu in cpus), "neighbors are one span"


SETTINGS = st.dictionaries(st.sampled_from("abc"), st.sampled_from(["1", "2", "true"]))


@given(st.lists(SETTINGS, min_size=1, max_size=5))
def test_what_differs_tells_settings_apart_and_nothing_else_is_said(settings):
    names = find_differing_settings(settings)
    texts = [format_settings(each, names) for each in settings]
    pairs = [(one, other) for one in range(len(settings)) for other in range(len(settings))]
    assert all(
        (texts[one] == texts[other]) == (settings[one] == settings[other]) for one, other in pairs
    )
    assert bool(names) == any(settings[0] != each for each in settings)


def test_rates_count_samples_of_all_but_images():
    tensors, images, older = (LoadSpec(8, images=known) for known in (False, True, None))
    assert [each.sample for each in (tensors, images, older, LoadSpec(8, length=32))] == [
        "sample",
        "image",
        "image",
        "sample",
    ]
    assert tensors.key == images.key == older.key
    assert name_sample(each.sample for each in (images, tensors)) == "sample"


def test_two_lengths_are_two_loads_and_older_records_have_none():
    short, long = LoadSpec(8, length=32), LoadSpec(8, length=512)
    assert len({LoadSpec(8).key, short.key, long.key}) == 3
    assert str(long) == "batch 8, length 512, single-stream, compute"
    assert list_load_options(long) == {"batch": 8, "length": 512}
    older = plain_from_record(LoadSpec(8))
    del older["length"]
    assert record_from_plain(older, LoadSpec, "older") == LoadSpec(8)
