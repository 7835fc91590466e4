"""Recordings are read whole, without secrets, or refused in two lines."""

import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tests.command_line import call
from tests.fakes.console import text_of
from tests.fakes.mutations import mutate_bytes
from tests.golden import phenomena
from tests.golden.nsys_export import Recording
from tests.unit.trace.conftest import SAMPLE

from optpipe.cli.profile import profile
from optpipe.core.errors import BadInputError, ExitStatus, OptpipeError
from optpipe.core.records import json_from_record, record_from_json
from optpipe.core.verdict import Verdict
from optpipe.trace.document import document_from_profile
from optpipe.trace.read import trace_from_folder, trace_from_path, trace_from_sqlite, write_trace
from optpipe.trace.report import TraceProfile, profile_from_trace


def _write_foreign_database(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE songs (title TEXT)")
        connection.commit()


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (lambda _: None, "no such file"),
        (Path.touch, "empty, or not an export"),
        (lambda path: path.write_text("hello " * 100), "cannot be read as an export"),
        (_write_foreign_database, "or not an export of Nsight Systems"),
        (lambda path: Recording().write(path), "the recording is empty"),
        (
            lambda path: path.write_bytes(SAMPLE.read_bytes()[:-1]),
            "truncated: 282623 of 282624 bytes",
        ),
    ],
)
def test_what_is_no_recording(tmp_path: Path, write: Callable[[Path], object], said: str) -> None:
    write(tmp_path / "file.sqlite")
    with pytest.raises(BadInputError, match=said):
        trace_from_path(tmp_path / "file.sqlite")


def test_text_column_that_is_null_at_first(tmp_path: Path) -> None:
    """The type of a column is taken from its first rows: registered names first, plain ones later."""
    recording = Recording()
    for number in range(5):
        recording.range(f"plain{number}", number, number + 1)
    path = recording.write(tmp_path / "trace.sqlite")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("INSERT INTO StringIds VALUES (77, 'registered')")
        connection.execute("UPDATE NVTX_EVENTS SET text = NULL, textId = 77 WHERE rowid < 4")
        connection.commit()
    assert trace_from_path(path).ranges["name"].to_list() == ["registered"] * 3 + [
        "plain3",
        "plain4",
    ]


def test_what_the_command_refuses_and_how_far_it_judges_a_trace_without_gpu_rows(
    tmp_path: Path,
) -> None:
    options: Any
    for options in ({}, {"model": "resnet50", "trace": SAMPLE}):
        with pytest.raises(BadInputError, match="exactly one of"):
            call(profile, **options)
    path = phenomena.without_gpu().write(tmp_path / "cpu.sqlite")
    with pytest.raises(BadInputError, match=r"no NVTX range named 'nothing'.*optpipe.iteration"):
        call(profile, trace=path, range="nothing")
    outcome = call(profile, trace=path)
    assert outcome.status is ExitStatus.DONE
    assert outcome.document.trace_quality.withheld["kernels"].startswith("no GPU rows")


MUTATIONS = ("NULL", "'[bold]x'", "-5", "9223372036854775807", "0", "1.5", "x'ff00'")


@given(data=st.data())
@pytest.mark.slow
def test_an_export_with_anything_in_its_columns_is_judged_or_refused(data: st.DataObject) -> None:
    """Every other, third … row of a column replaced, a column or a table gone: an answer, or two lines; never a traceback."""
    with TemporaryDirectory() as directory:
        path = Path(directory) / "changed.sqlite"
        shutil.copyfile(SAMPLE, path)
        with closing(sqlite3.connect(path)) as connection:
            tables = [
                row[0]
                for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            ]
            for _ in range(data.draw(st.integers(1, 3))):
                table = data.draw(st.sampled_from(tables))
                columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
                column = data.draw(st.sampled_from(columns))
                change = data.draw(st.sampled_from((*MUTATIONS, "rename")))
                every = data.draw(st.integers(1, 7))
                statement = f'UPDATE {table} SET "{column}" = {change} WHERE rowid % {every} = 0'
                if change == "rename":
                    statement = (
                        f'ALTER TABLE {table} RENAME COLUMN "{column}" TO gone{len(columns)}'
                    )
                with suppress(sqlite3.IntegrityError, sqlite3.OperationalError):
                    connection.execute(statement)
            connection.commit()
        with suppress(OptpipeError):
            found = profile_from_trace(trace_from_path(path))
            assert record_from_json(json_from_record(found), TraceProfile, "profile") == found
            Console(file=StringIO()).print(document_from_profile(found))


def test_rows_without_times_count_as_lost(tmp_path: Path) -> None:
    recording = phenomena.gpu_bound()
    recording.rows["kernels"].append((None, *recording.rows["kernels"][0][1:]))
    trace = trace_from_path(recording.write(tmp_path / "trace.sqlite"))
    assert trace.kernels.height == 3
    assert profile_from_trace(trace).trace_quality.verdict is Verdict.FAIL
    assert trace.diagnostics == ("1 rows of kernels have no possible timestamp",)


def refusal_of(call: Callable[[], object]) -> str | None:
    try:
        call()
    except BadInputError as error:
        return str(error)
    return None


@pytest.mark.parametrize("part", range(4))
def test_a_damaged_export_is_that_files_fault(tmp_path: Path, part: int) -> None:
    """200 exports with changed bytes: each is judged, or refused by its name."""
    whole = phenomena.copying().write(tmp_path / "whole.sqlite").read_bytes()
    path = tmp_path / "damaged.sqlite"

    def show() -> None:
        text = text_of(document_from_profile(profile_from_trace(trace_from_path(path))))
        assert all(each.isprintable() or each == "\n" for each in text)

    for seed in range(part, 200, 4):
        path.write_bytes(mutate_bytes(whole, random.Random(seed)))
        assert str(path) in (refusal_of(show) or str(path))


SECRET = "correct-horse-battery-staple"


def _raw(directory: Path) -> Path:
    recording = phenomena.copying()
    recording.environment["API_TOKEN"] = SECRET
    recording._string(f"/home/{SECRET}/bin/python")
    return recording.write(directory / "raw.sqlite")


def test_what_is_written_reads_the_same_and_holds_no_secret(tmp_path: Path) -> None:
    raw = _raw(tmp_path)
    assert SECRET.encode() in raw.read_bytes()
    trace, out = trace_from_sqlite(raw), tmp_path / "out"
    write_trace(trace, out)
    written = [path for path in out.rglob("*") if path.is_file()]
    assert {path.name for path in written} >= {
        "kernels.parquet",
        "api.parquet",
        "copies.parquet",
        "trace.json",
    }
    assert not [path for path in written if SECRET.encode() in path.read_bytes()]
    again = trace_from_folder(out)
    for table, frame in trace.tables.items():
        assert frame.equals(again.tables[table]), table
    assert again.gpus == trace.gpus


def test_what_a_program_prints_is_no_damage(tmp_path: Path) -> None:
    """nsys 2022.4 keeps the program's output among the names: any bytes."""
    recording = phenomena.copying()
    path = recording.write(tmp_path / "trace.sqlite")
    with sqlite3.connect(path) as base:
        base.execute("INSERT INTO StringIds VALUES (99999, CAST(x'ff00fe41' AS TEXT))")
    assert trace_from_sqlite(path).kernels.height == 2


def test_names_of_ranges_have_no_control_characters(tmp_path: Path) -> None:
    recording = Recording()
    for at in range(3):
        recording.range("step\n\t\x1b[31m", 10 * at, 10 * at + 5)
    trace = trace_from_sqlite(recording.write(tmp_path / "trace.sqlite"))
    assert trace.ranges["name"].unique().to_list() == [r"step\n\t\x1b[31m"]
    assert "step" in text_of(document_from_profile(profile_from_trace(trace)))
