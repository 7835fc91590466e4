"""Jobs that run DALI or what it is compared with, each kind in a child process, and why one failed in one line."""

from collections.abc import Generator, Sequence
from typing import TypeVar

from optpipe.core.errors import is_out_of_memory
from optpipe.measure.worker.jobs import JobFailure, run_jobs

Result = TypeVar("Result")

HARDWARE_QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
"""CUDA maps streams onto 8 hardware queues unless told otherwise, and what shares a queue waits in line. DALI's decoder has
26 streams: some stood behind a whole enqueued inference, and nothing overlapped (on an H200 0.67 of inference alone
with 8 queues, 0.90 with 32)."""

_IMAGE_CODEC = {
    "nvImageCodec failure: '#3'": "the decoder reports a damaged file (nvImageCodec status 3)",
    "nvImageCodec failure: '#4'": "the decoder does not support this format (nvImageCodec status 4)",
}
"""nvimgcodec.h: NVIMGCODEC_STATUS_BAD_CODESTREAM and NVIMGCODEC_STATUS_CODESTREAM_UNSUPPORTED."""


def run_dali_jobs(module: str, jobs: Sequence[object], kind: type[Result], limit_s: float) -> Generator[Result | str]:
    """`run_jobs`, with the reason of a failure in one line in place of the result."""
    for result in run_jobs(module, jobs, kind, limit_s, HARDWARE_QUEUES):
        yield explain_failure(result, limit_s) if isinstance(result, JobFailure) else result


def explain_operator_error(text: str) -> str | None:
    """What one of DALI's operators said itself, which DALI puts between a traceback and the pipeline's end."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if "encountered:" not in lines[:-1]:
        return None
    said = lines[lines.index("encountered:") + 1].rstrip(" :")
    return _IMAGE_CODEC.get(said, said)[:200]


def explain_failure(failure: JobFailure, limit_s: float) -> str:
    """The line of a failed process that says most, in one line."""
    stderr, status = failure.stderr, failure.exit_status
    if status is None:
        return f"timed out after {limit_s:.0f} s"
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
