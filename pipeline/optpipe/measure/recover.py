"""Finishes a bench run whose process was killed, from the samples that it left."""

from pathlib import Path

from optpipe.core.bench_record import BenchRecord
from optpipe.core.errors import BadInputError
from optpipe.core.files import Files
from optpipe.core.measurement import MEASUREMENTS_FILE, read_measurements
from optpipe.measure.bench import record_from_run
from optpipe.measure.measure import recover_unfinished, write_measurements
from optpipe.workspace.runs import MANIFEST, OpenRun, finish_run


def recover_run(directory: Path) -> BenchRecord:
    """Summarizes what the cut-off run in `directory` measured and finishes it, marked as interrupted.

    Raises BadInputError for anything but the folder of a bench run that was cut off.
    """
    if (directory / MANIFEST).exists() or not (directory / "samples").is_dir():
        what = "is already finished" if (directory / MANIFEST).exists() else "is not an interrupted bench run"
        raise BadInputError(f"{directory} {what}; specify a run folder without {MANIFEST}")
    done = list(read_measurements(Files(directory))) if (directory / MEASUREMENTS_FILE).exists() else []
    done += recover_unfinished(directory, done)
    if not done:
        raise BadInputError(f"{directory} was interrupted before anything was measured; delete it")
    write_measurements(directory, done)
    started = done[0].started_utc
    parents = list(dict.fromkeys(each.subject.artifact for each in done))
    run = finish_run(OpenRun(directory, "bench", started), parents=parents, status="interrupted")
    return record_from_run(run, tuple(done), interrupted=True)
