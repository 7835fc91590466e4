"""What is written holds nothing of the process environment."""

from pathlib import Path

from tests.golden import phenomena

from optpipe.trace.analysis import analysis_from_trace
from optpipe.trace.files import trace_from_folder, write_trace
from optpipe.trace.read import trace_from_sqlite, write_redacted_export

SECRET = "correct-horse-battery-staple"


def _raw(directory: Path) -> Path:
    recording = phenomena.copying()
    recording.environment["API_TOKEN"] = SECRET
    recording._string(f"/home/{SECRET}/bin/python")
    return recording.write(directory / "raw.sqlite")


def test_parquet_and_json_do_not_hold_what_the_raw_export_does(tmp_path: Path) -> None:
    raw = _raw(tmp_path)
    assert SECRET.encode() in raw.read_bytes()
    trace = trace_from_sqlite(raw)
    write_trace(trace, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").rglob("*")} >= {
        "kernels.parquet",
        "api.parquet",
        "copies.parquet",
        "trace.json",
    }
    assert not [
        path for path in (tmp_path / "out").rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()
    ]


def test_the_redacted_export_does_not_and_reads_the_same(tmp_path: Path) -> None:
    raw = _raw(tmp_path)
    write_redacted_export(raw, tmp_path / "redacted.sqlite")
    assert SECRET.encode() not in (tmp_path / "redacted.sqlite").read_bytes()
    before, after = (analysis_from_trace(trace_from_sqlite(path)) for path in (raw, tmp_path / "redacted.sqlite"))
    assert before.split == after.split
    assert before.kernels.equals(after.kernels)


def test_frames_read_back_are_the_frames_written(tmp_path: Path) -> None:
    trace = trace_from_sqlite(_raw(tmp_path))
    write_trace(trace, tmp_path / "out")
    again = trace_from_folder(tmp_path / "out")
    for table, frame in trace.tables.items():
        assert frame.equals(again.tables[table]), table
    assert again.gpus == trace.gpus
