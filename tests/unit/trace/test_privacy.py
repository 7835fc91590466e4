"""What is written holds nothing of the process environment."""

from pathlib import Path

from tests.golden import phenomena

from optpipe.trace.files import trace_from_folder, write_trace
from optpipe.trace.read import trace_from_sqlite, write_redacted_export

SECRET = "correct-horse-battery-staple"


def _raw(directory: Path) -> Path:
    recording = phenomena.copying()
    recording.environment["API_TOKEN"] = SECRET
    recording._string(f"/home/{SECRET}/bin/python")
    return recording.write(directory / "raw.sqlite")


def test_what_is_written_reads_the_same_and_holds_no_secret(tmp_path: Path) -> None:
    raw = _raw(tmp_path)
    assert SECRET.encode() in raw.read_bytes()
    trace, out, redacted = trace_from_sqlite(raw), tmp_path / "out", tmp_path / "redacted.sqlite"
    write_trace(trace, out)
    write_redacted_export(raw, redacted)
    written = [path for path in (*out.rglob("*"), redacted) if path.is_file()]
    assert {path.name for path in written} >= {"kernels.parquet", "api.parquet", "copies.parquet", "trace.json"}
    assert not [path for path in written if SECRET.encode() in path.read_bytes()]
    for again in (trace_from_folder(out), trace_from_sqlite(redacted)):
        for table, frame in trace.tables.items():
            assert frame.equals(again.tables[table]), table
        assert again.gpus == trace.gpus
