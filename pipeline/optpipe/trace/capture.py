"""Runs a program under `nsys profile`, bounded by the NVTX range that it opens after its warm-up."""

import os
import re
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from optpipe.errors import MissingError, StageError
from optpipe.trace.annotate import CAPTURE_RANGE
from optpipe.trace.importer import nsys_path, nsys_version, sqlite_from_recording

PID_FILE = "program.pid"
"""Where a profiled program leaves its process id, beside its recording."""
_TIMEOUT_S = 1800
_REFUSALS = re.compile(
    r"(permission|not permitted|ptrace|unsupported|not supported|unrecogni[sz]ed|failed to (start|create|launch|initialize)|"
    r"unable to|driver|no space left|illegal)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """What to record beside NVTX, and CUDA where there is a GPU."""

    os_runtime: bool = False
    """Every call to the operating system over 1 µs: huge for torch, so only on request."""
    memory_use: bool = False
    gpu_metrics: bool = False
    python_sampling: bool = False
    """Python's stacks at 1 kHz; nsys 2023.1 and later."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """What came of a run under nsys; `recording` is None where nsys left nothing."""

    recording: Path | None
    exit_status: int
    said: str
    """What nsys and the program wrote, interleaved."""


def nsys_command(options: CaptureOptions, version: str, output: Path, *, on_gpu: bool, whole: bool) -> list[str]:
    """The `nsys profile` command for `version` (2022.4 to 2025.x) ahead of the program's own.

    With `whole` the recording is not bounded: some drivers record no kernels of CUDA graphs that were made before it began.
    """
    year = int(version.split(".")[0]) if version[:4].isdigit() else 2022
    traced = ["nvtx", *(("cuda", "cublas", "cudnn") if on_gpu else ()), *(("osrt",) if options.os_runtime else ())]
    command = ["profile", "--output", str(output), "--force-overwrite", "true", "--trace", ",".join(traced)]
    command += ["--sample", "none", "--cpuctxsw", "none", "--kill", "none"]
    if on_gpu:
        command += ["--cuda-graph-trace", "node"]
    if not whole:
        command += ["--capture-range", "nvtx", "--nvtx-capture", CAPTURE_RANGE, "--capture-range-end", "stop"]
        # Ranges pushed with plain strings, as torch does, only bound a capture with this set.
        command += ["--env-var", "NSYS_NVTX_PROFILER_REGISTER_ONLY=0"]
    if options.memory_use and on_gpu:
        command += ["--cuda-memory-usage", "true"]
    if options.gpu_metrics and on_gpu:
        command += ["--gpu-metrics-devices" if year >= 2024 else "--gpu-metrics-device", "all"]
    if options.python_sampling:
        if year < 2023:
            message = f"nsys {version} cannot sample Python's stacks; 2023.1 and later can"
            raise MissingError(message)
        command += ["--python-sampling", "true", "--python-sampling-frequency", "1000"]
    return command


def record(
    program: Sequence[str], directory: Path, options: CaptureOptions, *, on_gpu: bool, whole: bool = False
) -> Recorded:
    """Runs `program` under nsys and returns what it left in `directory`, which holds the whole environment: keep it closed.

    Raises:
        MissingError: nsys is not here, or cannot be run.
    """
    output = directory / "recording"
    nsys = nsys_path()
    command = [str(nsys), *nsys_command(options, nsys_version(), output, on_gpu=on_gpu, whole=whole), *program]
    status, said = _run(command, directory)
    left = [output.with_suffix(suffix) for suffix in (".nsys-rep", ".qdrep", ".qdstrm")]
    found = next((path for path in left if path.is_file() and path.stat().st_size), None)
    return Recorded(found, status, said)


def exported(recorded: Recorded, directory: Path) -> Path:
    """The SQLite export of what was recorded.

    Raises:
        StageError: the disk is full. MissingError: nsys refused to record, in its own words.
    """
    if "no space left" in recorded.said.lower():
        message = f"the disk is full: {directory} has no room for the recording; choose another place with --workspace"
        raise StageError(message)
    if recorded.recording is None:
        message = (
            f"nsys recorded nothing: {refusal(recorded.said)}\nprofile with torch.profiler instead: --tracer torch"
        )
        raise MissingError(message)
    return sqlite_from_recording(recorded.recording, directory)


def refusal(said: str) -> str:
    """The line in which nsys says why, as far as one can be told."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    telling = [line for line in lines if _REFUSALS.search(line)]
    return (telling or lines or ["it said nothing"])[0][:300]


def _end(process: "subprocess.Popen[bytes]", pid_file: Path) -> None:
    """Ends nsys and the program: nsys puts that into a session of its own, so it is told by the id that it left."""
    if pid_file.is_file():
        with suppress(ProcessLookupError, ValueError):
            os.kill(int(pid_file.read_text(encoding="ascii")), signal.SIGTERM)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    process.wait(timeout=30)


def _run(command: Sequence[str], directory: Path) -> tuple[int, str]:
    """Runs `command` in its own process group, so that what it started ends with it."""
    log = directory / "nsys.log"
    try:
        with log.open("wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                status = process.wait(timeout=_TIMEOUT_S)
            except BaseException:
                _end(process, directory / PID_FILE)
                raise
    except subprocess.TimeoutExpired as error:
        message = f"the profiled stage did not end within {_TIMEOUT_S} s"
        raise StageError(message) from error
    except OSError as error:
        message = f"{command[0]} cannot be run: {error.strerror}"
        raise MissingError(message) from error
    return status, log.read_text(encoding="utf-8", errors="replace")
