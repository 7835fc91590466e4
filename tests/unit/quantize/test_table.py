import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe.errors import BadInputError
from optpipe.quantize.table import (
    CalibrationTable,
    TensorRange,
    is_table,
    table_from_file,
    table_from_json,
)

finite = st.floats(-(2.0**90), 2.0**90, width=32)
ranges = st.builds(TensorRange, st.floats(2.0**-17, 2.0**90, width=32), finite, finite)


def table(**changes) -> CalibrationTable:
    values = {
        "method": "mse",
        "model": "digits",
        "graph_sha256": "a" * 64,
        "image_set": {"name": "digits/calibration", "sha256": "b" * 64, "count": 500, "seed": 0},
        "transform_sha256": None,
        "ranges": {"image": TensorRange(2.0, -1.0, 2.0)},
        "keep": ("head",),
    }
    return CalibrationTable(**{**values, **changes})


@given(st.dictionaries(st.text(min_size=1, max_size=9), ranges, max_size=4))
def test_reading_gives_what_was_written(values) -> None:
    written = table(ranges=values)
    read = table_from_json(written.to_json(), "t")
    assert read.to_json() == written.to_json()
    assert read.ranges.keys() == values.keys()
    assert all(read.ranges[name].amax == pytest.approx(each.amax, rel=1e-8) for name, each in values.items())


def test_one_line_per_tensor(tmp_path) -> None:
    path = tmp_path / "t.json"
    path.write_text(table().to_json())
    assert '    "image": {"amax": 2, "low": -1, "high": 2}\n' in path.read_text()
    assert is_table(path)
    assert not is_table(tmp_path)
    assert table_from_file(path) == table()


@pytest.mark.parametrize("amax", [0.0, -1.0, float("nan"), float("inf")])
def test_no_range_without_a_usable_bound(amax) -> None:
    with pytest.raises(BadInputError, match="finite positive amax"):
        TensorRange(amax, 0.0, 1.0)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "optpipe.calibration-table/1"}'])
def test_unreadable(text) -> None:
    with pytest.raises(BadInputError, match=r"my\.json is not a readable calibration table"):
        table_from_json(text, "my.json")


def test_other_version() -> None:
    with pytest.raises(BadInputError, match=r"this version of optpipe reads optpipe\.calibration-table/1"):
        table_from_json('{"format": "optpipe.calibration-table/9"}', "my.json")
