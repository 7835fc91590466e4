"""What a measurement's parent checks as it writes: a try whose raw data contradict themselves has no figures."""

from dataclasses import replace
from datetime import datetime, timedelta

import polars as pl
import pytest

from optpipe.core.errors import StageError
from optpipe.core.measurement import read_measurements
from optpipe.measure.measure import _leave_out_impossible, require_one_clock


@pytest.fixture
def measured(workspace):
    run = workspace.bench(workspace.artifact("fp16"), count=300, processes=2)
    return run.path, read_measurements(run.files)


FORGED = {
    "images": ("samples", {"images": pl.col("images") * 100}),
    "phases": ("samples", {"phase": pl.lit(2, pl.UInt8)}),
    "readings": ("machine", {"other_cpu_cores": -pl.col("other_cpu_cores") - 1}),
    "pace": ("machine", {"time_ns": pl.col("time_ns").first() + pl.int_range(pl.len())}),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_try_with_impossible_raw_data_has_no_figures(measured, name):
    folder, (one, other) = measured
    kind, columns = FORGED[name]
    path = folder / kind / f"{one.id}.parquet"
    pl.read_parquet(path).with_columns(**columns).write_parquet(path)
    blank = replace(one, latency_ns=None, samples_file=None, machine_file=None, reasons=())
    found = _leave_out_impossible(one, blank, folder)
    assert found.invalid_codes == ("impossible",)
    assert (found.samples_file, found.machine_file, found.latency_ns) == (None, None, None)
    assert not list(folder.glob(f"*/{one.id}.parquet"))
    assert _leave_out_impossible(other, blank, folder) == other


def test_a_date_that_was_set_during_a_run_ends_it(measured):
    folder, (one, other) = measured
    require_one_clock(folder, (one, other))
    later = datetime.fromisoformat(other.started_utc) - timedelta(seconds=30)
    with pytest.raises(StageError, match="the clock of the queries and that of the dates"):
        require_one_clock(folder, (one, replace(other, started_utc=later.isoformat())))


def test_readings_at_the_start_and_the_end_of_a_short_measurement_are_no_contradiction(measured):
    folder, (one, _) = measured
    path = folder / "machine" / f"{one.id}.parquet"
    rows = pl.read_parquet(path)
    read_ms = [200, 211, 411, 413]  # while warming up, at the start, after the interval, at the end
    times = pl.Series("time_ns", [at * 1_000_000 for at in read_ms])
    assert len(rows) >= len(times)
    rows.head(len(times)).with_columns(times).write_parquet(path)
    assert _leave_out_impossible(one, one, folder) == one
