"""Finishes a bench run whose process was killed, from the samples that it left."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from optpipe.bench.bench import BenchResult, document_from_bench
from optpipe.core.measurement import MEASUREMENTS_FILE, Measurement
from optpipe.core.measurement_json import document_from_measurements, measurements_from_document
from optpipe.errors import BadInputError, ExitStatus
from optpipe.measuring.measure import recover_unfinished
from optpipe.workspace.manifest import get_command_line
from optpipe.workspace.runs import (
    MANIFEST,
    OpenRun,
    finish_run,
    write_json,
)


def recover_run(directory: Path) -> BenchResult:
    """Summarizes what the cut-off run in `directory` measured and finishes it, marked as interrupted.

    Raises BadInputError for a folder that is no cut-off bench run.
    """
    if (directory / MANIFEST).exists() or not (directory / "samples").is_dir():
        what = "is already finished" if (directory / MANIFEST).exists() else "is not an interrupted bench run"
        raise BadInputError(f"{directory} {what}; specify a run folder without {MANIFEST}")
    done = list(_read_done(directory))
    done += recover_unfinished(directory, done)
    if not done:
        raise BadInputError(f"{directory} was interrupted before anything was measured; delete it")
    write_json(directory / MEASUREMENTS_FILE, document_from_measurements(tuple(done)))
    started = done[0].started_utc or ""
    parents = list(dict.fromkeys(each.subject.artifact for each in done))
    run = finish_run(
        OpenRun(directory, "bench", started),
        command=get_command_line(),
        parents=parents,
        details={"recovered": True},
        status="interrupted",
    )
    return BenchResult(run, tuple(done), interrupted=True)


def document_from_recovered_run(result: BenchResult, warnings: Sequence[str]) -> dict[str, Any]:
    """The JSON document of `optpipe bench --recover`: as of `bench`, and DONE because recovering is what was asked."""
    return {**document_from_bench(result, warnings), "exit_status": int(ExitStatus.DONE)}


def _read_done(directory: Path) -> tuple[Measurement, ...]:
    path = directory / MEASUREMENTS_FILE
    return measurements_from_document(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else ()
