"""Parquet files are measured by their headers before a row is read, and nothing of the package reads them otherwise."""

import ast
import io
from contextlib import suppress
from pathlib import Path

import polars as pl
import pytest
from tests.fakes.syntax import parse_file

import optpipe
from optpipe.core.errors import BadInputError
from optpipe.core.parquet import MAX_ROWS, TooLargeError, measure_parquet, parse_parquet

PACKAGE = Path(optpipe.__file__).parent
READERS = ("read_parquet", "scan_parquet", "read_parquet_schema")


def content_of(frame, **options):
    buffer = io.BytesIO()
    frame.write_parquet(buffer, **options)
    return buffer.getvalue()


def repeat(value, kind, count):
    return pl.DataFrame({"a": pl.Series([value], dtype=kind).new_from_index(0, count)})


@pytest.mark.parametrize("compression", ["zstd", "snappy", "gzip", "lz4", "brotli", "uncompressed"])
def test_headers_give_the_rows_and_values(compression):
    frame = pl.DataFrame({"n": range(5000), "t": [["a", "b"]] * 5000, "x": [None, 0.5] * 2500})
    content = content_of(frame, compression=compression, row_group_size=700)
    size = measure_parquet(content, Path("x"))
    assert size.rows == 5000
    assert 20_000 <= size.values < 26_000  # and dictionaries
    assert parse_parquet(content, Path("x")).equals(frame)


@pytest.mark.parametrize(
    "frame",
    [
        repeat(1, pl.Int64, MAX_ROWS + 1),
        repeat(None, pl.Int64, MAX_ROWS + 1),
        repeat("x" * 2000, pl.String, 200_000),
        repeat([1] * 100, pl.List(pl.Int8), 600_000),
    ],
    ids=["rows", "nulls", "texts", "lists"],
)
def test_what_expands_is_refused_by_its_headers(frame):
    content = content_of(frame)
    assert len(content) < 2**20
    with pytest.raises(TooLargeError, match="is too large"):
        parse_parquet(content, Path("x"))


@pytest.mark.parametrize("at", range(-200, 0, 7))
def test_damaged_headers_are_bad_input(at):
    content = bytearray(content_of(pl.DataFrame({"n": range(50)})))
    content[at] ^= 0x5A
    with suppress(BadInputError):
        parse_parquet(bytes(content), Path("x"))


@pytest.mark.slow
def test_nothing_else_reads_parquet():
    """Law over the source: every other reader would skip the check of sizes."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(parse_file(path)):
            if isinstance(node, ast.Attribute) and node.attr in READERS:
                assert path.name == "parquet.py", f"{path}:{node.lineno}"
