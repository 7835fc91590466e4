"""Runs jobs in a child process; a failed job yields its standard error.

A process runs its jobs in order; if one crashes it, the next job gets a fresh process. A failure thus costs only its
own result, and the start (torch and CUDA, seconds) is paid once. Jobs and results are files in a folder, which neither
output of libraries nor a profiler around the process can disturb.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TypeVar

from optpipe.core.process import end_with_parent, open_process_group
from optpipe.core.records import json_from_record, read_record

Job = TypeVar("Job")
Result = TypeVar("Result")

STDERR_LOG = "stderr.txt"
POLL_S = 0.05
"""Interval of the parent's polling, too long to affect a measurement."""


@dataclass(frozen=True, slots=True)
class JobFailure:
    stderr: str
    exit_status: int | None
    """Negative for a signal; None if the job exceeded its limit."""


def run_jobs(
    module: str, jobs: Sequence[object], kind: type[Result], limit_s: float, defaults: Mapping[str, str]
) -> Generator[Result | JobFailure]:
    """Runs `python -m module FOLDER` for the jobs; yields each result, of type `kind`, as it comes, or its failure.

    The module answers with `serve_jobs`. A job that exceeds `limit_s` is ended. `defaults` are environment variables
    for those that are not set.
    """
    begun = 0
    while begun < len(jobs):
        with tempfile.TemporaryDirectory(prefix="optpipe-") as name:
            folder = Path(name)
            for index, job in enumerate(jobs[begun:]):
                (folder / f"{index}.job").write_bytes(json_from_record(job))
            for result in _read_results(module, folder, len(jobs) - begun, kind, limit_s, {**defaults, **os.environ}):
                begun += 1
                yield result


def serve_jobs(folder: Path, kind: type[Job], measure: Callable[[Job], object]) -> None:
    """Answers the jobs in `folder`, records of type `kind`, in order, in the child process."""
    end_with_parent()
    for index in range(len(list(folder.glob("*.job")))):
        partial = folder / f"{index}.partial"
        partial.write_bytes(json_from_record(measure(read_record(folder / f"{index}.job", kind))))
        partial.replace(folder / f"{index}.json")


def _read_results(
    module: str, folder: Path, count: int, kind: type[Result], limit_s: float, environment: Mapping[str, str]
) -> Generator[Result | JobFailure]:
    """Yields results until the process ends or hangs; its failure is the last one."""
    command, log = [sys.executable, "-m", module, str(folder)], folder / STDERR_LOG
    with open_process_group(command, log, environment, errors_only=True) as process:
        for index in range(count):
            result = folder / f"{index}.json"
            if not _await_result(process, result, limit_s):
                yield JobFailure(log.read_text(encoding="utf-8", errors="replace"), process.poll())
                return
            yield read_record(result, kind)


def _await_result(process: "subprocess.Popen[bytes]", result: Path, limit_s: float) -> bool:
    """Whether the result came before the process ended and before the limit."""
    until = monotonic() + limit_s
    while not result.exists():
        try:
            process.wait(POLL_S)
        except subprocess.TimeoutExpired:
            if monotonic() > until:
                return False
        else:
            return result.exists()
    return True
