"""Drawings of comparisons: few points are a sentence, and labels of axes have all their digits."""

import re

import pytest

from optpipe.report.charts import Point, draw_or_state_points, draw_points, draw_processes
from optpipe.report.document import Figure, Sentence

AXES = "images per second", "p99 latency (ms)"


def points(*rates):
    return [Point("a", f"build {rate}; batch size: 8", rate, 2.5, "8") for rate in rates]


@pytest.mark.parametrize("count", range(1, 5))
def test_fewer_than_three_points_are_a_sentence_with_their_values(count):
    drawn = draw_or_state_points("Plot", "", points(*range(8020, 8020 + count)), *AXES, ())
    assert isinstance(drawn, Sentence if count < 3 else Figure)
    if isinstance(drawn, Sentence):
        for rate in range(8020, 8020 + count):
            assert f"build {rate}: p99 latency 2.5 ms at {rate:,} images per second" in drawn.text


@pytest.mark.parametrize(
    ("rates", "shown"),
    [((8020, 8024, 8030), "8,02"), ((100, 1000, 30000), "10k"), ((0.41, 0.42, 0.43), "0.42")],
)
def test_labels_of_an_axis_have_the_digits_that_tell_them_apart(rates, shown):
    svg = draw_points("Plot", "", points(*rates), *AXES).image
    labels = re.findall(r">([\d.,]+[km]?)</text>", svg)
    assert any(label.startswith(shown) for label in labels)
    assert not [label for label in labels if re.fullmatch(r"\d+\.\d{2,}[km]", label)]


def test_a_long_name_of_a_row_is_wrapped():
    name = "onnxruntime int8 threads=2, batch 16, server (rejected: bimodal, drift, loaded-host)"
    svg = draw_processes([Point(name, "p", each, 0.0) for each in (0.9, 1.0, 1.1)]).image
    texts = re.findall(r">([^<>]+)</text>", svg)
    lines = [text for text in texts if text.strip() and text.strip() in name]
    assert sorted(" ".join(lines).split()) == sorted(name.split())
    assert max(map(len, lines)) <= 44
    assert len(lines) >= 2


@pytest.mark.parametrize("gap", [0.0, 0.01, 1.0])
def test_points_that_meet_have_labels_apart(gap):
    """Up to four labels fit around equal points; the others stand in their tooltips alone."""
    given = [Point("a", f"p{at}", 10 + gap * at, 2.0, "64") for at in range(6)]
    svg = draw_points("Plot", "", given, *AXES).image
    labels = re.findall(r'transform="translate\(([\d.-]+),([\d.-]+)\)"[^>]*>64</text>', svg)
    places = [(float(x), float(y)) for x, y in labels]
    assert len(places) == (6 if gap == 1.0 else len(places))
    assert 1 <= len(places) <= 6
    for at, (x, y) in enumerate(places):
        assert all(
            abs(x - other_x) >= 14 or abs(y - other_y) >= 12
            for other_x, other_y in places[at + 1 :]
        )
