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

JOBS, STDERR_LOG = "jobs.json", "stderr.txt"
QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
"""CUDA maps streams onto 8 hardware queues unless told otherwise, and what shares a queue waits in line. DALI's decoder has
26 streams: some stood behind a whole enqueued inference, and nothing overlapped (on an H200 0.67 of inference alone
with 8 queues, 0.90 with 32)."""
POLL_S = 0.05
"""How often the parent looks for the next result: too seldom to be felt by what is measured."""


def run_jobs(
    module: str, jobs: Sequence[Mapping[str, Any]], limit_s: float, defaults: Mapping[str, str] = QUEUES
) -> Iterator[dict[str, Any] | str]:
    """Runs `python -m module FOLDER` for the jobs; yields each result as it comes, or the reason why there is none.

    A job that takes longer than `limit_s` is ended. The module answers with `serve_jobs`. `defaults` are environment
    variables for those that are not set.
    """
    begun = 0
    while begun < len(jobs):
        with tempfile.TemporaryDirectory(prefix="optpipe-") as name:
            folder = Path(name)
            (folder / JOBS).write_text(json.dumps(list(jobs[begun:])), encoding="utf-8")
            for result in _read_results(module, folder, len(jobs) - begun, limit_s, {**defaults, **os.environ}):
                begun += 1
                yield result


def run_job(module: str, job: Mapping[str, Any], limit_s: float) -> dict[str, Any] | str:
    """The same for one job."""
    return next(run_jobs(module, [job], limit_s))


def serve_jobs(folder: Path, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """The process's side: answers the jobs in `folder` in order."""
    for index, job in enumerate(json.loads((folder / JOBS).read_text(encoding="utf-8"))):
        partial = folder / f"{index}.partial"
        partial.write_text(json.dumps(answer(job)), encoding="utf-8")
        partial.replace(_result_file(folder, index))


def _result_file(folder: Path, index: int) -> Path:
    return folder / f"{index}.json"


def _read_results(
    module: str, folder: Path, count: int, limit_s: float, environment: Mapping[str, str]
) -> Iterator[dict[str, Any] | str]:
    """Results until the process ends or hangs; its failure is the last one."""
    with (folder / STDERR_LOG).open("wb") as log:
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
                failure = _await_result(process, _result_file(folder, index), limit_s)
                if failure is not None:
                    said = (folder / STDERR_LOG).read_text(encoding="utf-8", errors="replace")
                    yield failure or explain_failure(said, process.returncode)
                    return
                yield json.loads(_result_file(folder, index).read_text(encoding="utf-8"))
        finally:
            _end(process)


def _await_result(process: "subprocess.Popen[bytes]", result: Path, limit_s: float) -> str | None:
    """None when the result is there; why not otherwise, empty where the process's own words say it."""
    until = monotonic() + limit_s
    while not result.exists():
        try:
            process.wait(POLL_S)
        except subprocess.TimeoutExpired:
            if monotonic() > until:
                return f"timed out after {limit_s:.0f} s"
            continue
        return None if result.exists() else ""
    return None


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Whatever it is still doing: all that was wanted of it lies in its folder."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def is_out_of_memory(text: str) -> bool:
    """Whether a message of torch, CUDA, DALI or C++ says that memory ran out."""
    lowered = text.lower()
    return any(sign in lowered for sign in ("out of memory", "cudaerrormemoryallocation", "bad_alloc", "badalloc"))


_IMAGE_CODEC = {
    "nvImageCodec failure: '#3'": "the decoder reports a damaged file (nvImageCodec status 3)",
    "nvImageCodec failure: '#4'": "the decoder does not support this format (nvImageCodec status 4)",
}
"""nvimgcodec.h: NVIMGCODEC_STATUS_BAD_CODESTREAM and NVIMGCODEC_STATUS_CODESTREAM_UNSUPPORTED."""


def explain_operator_error(text: str) -> str | None:
    """What one of DALI's operators said itself, which DALI puts between a traceback and the pipeline's end."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if "encountered:" not in lines[:-1]:
        return None
    said = lines[lines.index("encountered:") + 1].rstrip(" :")
    return _IMAGE_CODEC.get(said, said)[:200]


def explain_failure(stderr: str, status: int) -> str:
    """The line of a failed process that says most, in one line."""
    if is_out_of_memory(stderr):
        return "out of memory; use a smaller --batch-size or fewer threads"
    if status < 0:
        return f"killed by signal {-status}" + (" (out of host memory?)" if status == -9 else "")
    if said := explain_operator_error(stderr):
        refused = "fn.decoders" in stderr
        return f"DALI: {said}" + (
            "; `optpipe preprocess MODEL --images DIR` lists the files it cannot decode" if refused else ""
        )
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line]
    return (named or lines or [f"exit status {status}"])[-1][:300]
