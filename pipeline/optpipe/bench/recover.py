"""Finishes a bench run whose process was killed, from the samples that it left."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from optpipe.bench.bench import Bench, bench_record
from optpipe.core.measurement import MEASUREMENTS_FILE, Measurement
from optpipe.core.measurement_json import document_of, measurements_of
from optpipe.errors import BadInputError, ExitStatus
from optpipe.measuring.measure import cut_off
from optpipe.workspace.manifest import command_line
from optpipe.workspace.runs import (
    MANIFEST,
    OpenRun,
    finish_run,
    write_json,
)


def recover(directory: Path) -> Bench:
    """Summarizes what the cut-off run in `directory` measured and finishes it, marked as interrupted.

    Raises BadInputError for a folder that is no cut-off bench run.
    """
    if (directory / MANIFEST).exists() or not (directory / "samples").is_dir():
        what = "is finished already" if (directory / MANIFEST).exists() else "is no bench run that was cut off"
        raise BadInputError(f"{directory} {what}; give the folder of a run without {MANIFEST}")
    done = list(_done(directory))
    done += cut_off(directory, done)
    if not done:
        raise BadInputError(f"{directory} was cut off before anything was measured; delete it")
    write_json(directory / MEASUREMENTS_FILE, document_of(tuple(done)))
    started = done[0].started_utc or ""
    parents = list(dict.fromkeys(each.subject.artifact for each in done))
    run = finish_run(
        OpenRun(directory, "bench", started),
        command=command_line(),
        parents=parents,
        details={"recovered": True},
        status="interrupted",
    )
    return Bench(run, tuple(done), interrupted=True)


def recovered_record(result: Bench, warnings: Sequence[str]) -> dict[str, Any]:
    """The JSON document of `optpipe bench --recover`: as of `bench`, and DONE because recovering is what was asked."""
    return {**bench_record(result, warnings), "exit_status": int(ExitStatus.DONE)}


def _done(directory: Path) -> tuple[Measurement, ...]:
    path = directory / MEASUREMENTS_FILE
    return measurements_of(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else ()
