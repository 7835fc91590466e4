"""Measurements in processes of their own: jobs as JSON in, results as JSON out, and why one failed in one line.

A process works through its jobs in order; where one brings it down, the next job gets a fresh process. So one
configuration that fails costs its own result only, and starting up (torch and CUDA, seconds) is paid once.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

JOBS, LOG = "jobs.json", "stderr.txt"
QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
"""CUDA maps streams onto 8 hardware queues unless told otherwise, and what shares a queue waits in line. DALI's decoder has
26 streams: some stood behind a whole enqueued inference, and nothing overlapped (on an H200 0.67 of inference alone
with 8 queues, 0.90 with 32)."""
LOOK_S = 0.05
"""How often the parent looks for the next result: too seldom to be felt by what is measured."""


def results_of(
    module: str, jobs: Sequence[Mapping[str, Any]], limit_s: float, defaults: Mapping[str, str] = QUEUES
) -> Iterator[dict[str, Any] | str]:
    """Runs `python -m module FOLDER` for the jobs; yields each result as it comes, or the reason why there is none.

    A job that takes longer than `limit_s` is ended. The module answers with `answer_jobs`. `defaults` are environment
    variables for those that are not set.
    """
    begun = 0
    while begun < len(jobs):
        with tempfile.TemporaryDirectory(prefix="optpipe-") as name:
            folder = Path(name)
            (folder / JOBS).write_text(json.dumps(list(jobs[begun:])), encoding="utf-8")
            for result in _results(module, folder, len(jobs) - begun, limit_s, {**defaults, **os.environ}):
                begun += 1
                yield result


def result_of(module: str, job: Mapping[str, Any], limit_s: float) -> dict[str, Any] | str:
    """The same for one job."""
    return next(results_of(module, [job], limit_s))


def answer_jobs(folder: Path, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """The process's side: answers the jobs in `folder` in order."""
    for index, job in enumerate(json.loads((folder / JOBS).read_text(encoding="utf-8"))):
        partial = folder / f"{index}.partial"
        partial.write_text(json.dumps(answer(job)), encoding="utf-8")
        partial.replace(_result_file(folder, index))


def _result_file(folder: Path, index: int) -> Path:
    return folder / f"{index}.json"


def _results(
    module: str, folder: Path, count: int, limit_s: float, environment: Mapping[str, str]
) -> Iterator[dict[str, Any] | str]:
    """Results until the process ends or hangs; its failure is the last one."""
    with (folder / LOG).open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            env=environment,
            start_new_session=True,  # so that what it forked ends with it
        )
        try:
            for index in range(count):
                failure = _awaited(process, _result_file(folder, index), limit_s)
                if failure is not None:
                    said = (folder / LOG).read_text(encoding="utf-8", errors="replace")
                    yield failure or failure_reason(said, process.returncode)
                    return
                yield json.loads(_result_file(folder, index).read_text(encoding="utf-8"))
        finally:
            _end(process)


def _awaited(process: "subprocess.Popen[bytes]", result: Path, limit_s: float) -> str | None:
    """None when the result is there; why not otherwise, empty where the process's own words say it."""
    until = monotonic() + limit_s
    while not result.exists():
        try:
            process.wait(LOOK_S)
        except subprocess.TimeoutExpired:
            if monotonic() > until:
                return f"no result after {limit_s:.0f} s"
            continue
        return None if result.exists() else ""
    return None


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Whatever it is still doing: all that was wanted of it lies in its folder."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def out_of_memory(text: str) -> bool:
    """Whether a message of torch, CUDA, DALI or C++ says that memory ran out."""
    lowered = text.lower()
    return any(sign in lowered for sign in ("out of memory", "cudaerrormemoryallocation", "bad_alloc", "badalloc"))


_IMAGE_CODEC = {
    "nvImageCodec failure: '#3'": "its decoders take the file for damaged (nvImageCodec status 3)",
    "nvImageCodec failure: '#4'": "a format that its decoders do not support (nvImageCodec status 4)",
}
"""nvimgcodec.h: NVIMGCODEC_STATUS_BAD_CODESTREAM and NVIMGCODEC_STATUS_CODESTREAM_UNSUPPORTED."""


def operator_reason(text: str) -> str | None:
    """What one of DALI's operators said itself, which DALI puts between a traceback and the pipeline's end."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if "encountered:" not in lines[:-1]:
        return None
    said = lines[lines.index("encountered:") + 1].rstrip(" :")
    return _IMAGE_CODEC.get(said, said)[:200]


def failure_reason(stderr: str, status: int) -> str:
    """The line of a failed process that says most, in one line."""
    if out_of_memory(stderr):
        return "out of memory; a smaller batch (--batch-size) or fewer threads need less"
    if status < 0:
        return f"ended by signal {-status}" + (" (out of host memory?)" if status == -9 else "")
    if said := operator_reason(stderr):
        refused = "fn.decoders" in stderr
        return f"DALI: {said}" + (
            "; `optpipe preprocess MODEL --images DIR` names the files it refuses" if refused else ""
        )
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line]
    return (named or lines or [f"exit status {status}"])[-1][:300]
