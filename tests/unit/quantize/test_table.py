import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe.core.entries import SampleSetSummary
from optpipe.core.errors import BadInputError
from optpipe.quantize.ranges import (
    CalibrationTable,
    TensorRange,
    is_table,
    read_table,
    write_table,
)

finite = st.floats(-(2.0**90), 2.0**90, width=32)
ranges = st.builds(TensorRange, st.floats(2.0**-17, 2.0**90, width=32), finite, finite)


def table(**changes) -> CalibrationTable:
    values = {
        "method": "mse",
        "model": "digits",
        "graph_sha256": "a" * 64,
        "set": SampleSetSummary("digits/calibration", "b" * 64, 500, 0),
        "transform_sha256": None,
        "ranges": {"image": TensorRange(2.0, -1.0, 2.0)},
        "keep": ("head",),
    }
    return CalibrationTable(**{**values, **changes})


@given(st.dictionaries(st.text(min_size=1, max_size=9), ranges, max_size=4))
def test_reading_gives_what_was_written(tmp_path_factory, values) -> None:
    path = tmp_path_factory.mktemp("table") / "t.json"
    write_table(path, table(ranges=values))
    assert read_table(path) == table(ranges=values)
    assert is_table(path)
    assert not is_table(path.parent)


@pytest.mark.parametrize("amax", [0.0, -1.0, float("nan"), float("inf")])
def test_no_range_without_a_usable_bound(amax) -> None:
    with pytest.raises(BadInputError, match="finite positive amax"):
        TensorRange(amax, 0.0, 1.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "truncated"),
        ("[]", "expected `object`"),
        ("{}", "missing required field `method`"),
        ('{"ranges": {"x": {"amax": 0, "low": 0, "high": 1}}}', r"finite positive amax.*\$\.ranges"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path, text, said) -> None:
    path = tmp_path / "my.json"
    path.write_text(text)
    with pytest.raises(BadInputError, match=rf"my\.json: .*{said}"):
        read_table(path)


def test_other_version(tmp_path) -> None:
    write_table(tmp_path / "my.json", table(format="optpipe.calibration-table/9"))
    with pytest.raises(BadInputError, match=r"this version of optpipe reads optpipe\.calibration-table/1"):
        read_table(tmp_path / "my.json")
