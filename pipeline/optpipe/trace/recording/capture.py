"""Runs a program under `nsys profile`, bounded by the NVTX range that it opens after its warm-up."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from optpipe.core.errors import MissingError, StageError
from optpipe.trace.ranges import CAPTURE_RANGE
from optpipe.trace.recording.importer import find_nsys, read_nsys_version, sqlite_from_recording

_TIMEOUT_S = 1800
_TERMINATION_TIMEOUT_S = 5.0
_REFUSALS = re.compile(
    r"(permission|not permitted|ptrace|unsupported|not supported|unrecogni[sz]ed|failed to (start|create|launch|initialize)|"
    r"unable to|driver|no space left|illegal)",
    re.IGNORECASE,
)


class Extra(StrEnum):
    """What can be recorded beside NVTX, and CUDA where there is a GPU."""

    OS_CALLS = "os-calls"
    """Every call to the operating system over 1 µs: huge for torch, so only on request."""
    MEMORY = "memory"
    GPU_METRICS = "gpu-metrics"


@dataclass(frozen=True, slots=True)
class Recording:
    """What came of a run under nsys; `recording` is None where nsys left nothing."""

    recording: Path | None
    exit_status: int
    log: str
    """What nsys and the program wrote, interleaved."""


def make_nsys_command(extras: Set[Extra], version: str, output: Path, *, on_gpu: bool, whole: bool) -> list[str]:
    """The `nsys profile` command for `version` (2022.4 to 2025.x) ahead of the program's own.

    With `whole` the recording is not bounded: some drivers record no kernels of CUDA graphs that were made before it began.
    """
    traced = [
        "nvtx",
        *(("cuda", "cublas", "cudnn") if on_gpu else ()),
        *(("osrt",) if Extra.OS_CALLS in extras else ()),
    ]
    command = ["profile", "--output", str(output), "--force-overwrite", "true", "--trace", ",".join(traced)]
    command += ["--sample", "none", "--cpuctxsw", "none", "--kill", "none"]
    if on_gpu:
        command += ["--cuda-graph-trace", "node"]
    if not whole:
        command += ["--capture-range", "nvtx", "--nvtx-capture", CAPTURE_RANGE, "--capture-range-end", "stop"]
        # Ranges pushed with plain strings, as torch does, only bound a capture with this set.
        command += ["--env-var", "NSYS_NVTX_PROFILER_REGISTER_ONLY=0"]
    if Extra.MEMORY in extras and on_gpu:
        command += ["--cuda-memory-usage", "true"]
    if Extra.GPU_METRICS in extras and on_gpu:
        year = int(version[:4]) if version[:4].isdigit() else 2022
        command += ["--gpu-metrics-devices" if year >= 2024 else "--gpu-metrics-device", "all"]
    return command


def record_program(
    program: Sequence[str], directory: Path, extras: Set[Extra], *, on_gpu: bool, whole: bool = False
) -> Recording:
    """Runs `program` under nsys and returns what it left in `directory`, which holds the whole environment: keep it closed.

    Raises:
        MissingError: nsys is not here, or cannot be run.
    """
    output = directory / "recording"
    nsys = find_nsys()
    command = [str(nsys), *make_nsys_command(extras, read_nsys_version(), output, on_gpu=on_gpu, whole=whole), *program]
    status, said = run_recorded(command, directory)
    left = [output.with_suffix(suffix) for suffix in (".nsys-rep", ".qdrep", ".qdstrm")]
    found = next((path for path in left if path.is_file() and path.stat().st_size), None)
    return Recording(found, status, said)


def export_recording(recorded: Recording, directory: Path) -> Path:
    """The SQLite export of what was recorded.

    Raises:
        StageError: nsys says that the disk is full. MissingError: nsys refused to record, in its own words.
    """
    if "no space left" in recorded.log.lower():
        raise StageError(
            f"the disk is full: no space for the recording in {directory}; choose another location with --workspace"
        )
    if recorded.recording is None:
        raise MissingError(
            f"nsys recorded nothing: {find_refusal(recorded.log)}\nprofile with torch.profiler instead: --tracer torch"
        )
    return sqlite_from_recording(recorded.recording, directory)


def find_refusal(said: str) -> str:
    """The line in which nsys says why, as far as one can be told."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    telling = [line for line in lines if _REFUSALS.search(line)]
    return (telling or lines or ["no output"])[0][:300]


def _end(process: "subprocess.Popen[bytes]", directory: Path) -> None:
    """Ends nsys, its helpers and the program with all that it started: asked first, then killed.

    nsys puts the program into a session of its own and does not end it. All of them have `directory`, which is this
    recording's alone, on their command line, also before the program has come to say its id.
    """
    groups = {process.pid, *_groups_of(directory)}
    for number in (signal.SIGTERM, signal.SIGKILL):
        for group in groups:
            with suppress(ProcessLookupError):
                os.killpg(group, number)
        until = time.monotonic() + _TERMINATION_TIMEOUT_S
        while _groups_of(directory) and time.monotonic() < until:
            process.poll()
            time.sleep(0.05)
        groups |= _groups_of(directory)
    process.wait()


def _groups_of(directory: Path) -> set[int]:
    """The process groups of all processes with `directory` on their command line, this process's own apart."""
    mark, own = os.fsencode(directory.resolve()), os.getpgrp()
    groups = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if mark in (entry / "cmdline").read_bytes():
                    groups.add(os.getpgid(int(entry.name)))
    return groups - {own}


def run_recorded(command: Sequence[str], directory: Path, timeout_s: float = _TIMEOUT_S) -> tuple[int, str]:
    """Runs `command`, which has `directory` among its arguments, so that all it started ends with this process's wish.

    Raises:
        StageError: it did not end in time. MissingError: it cannot be run.
    """
    log = directory / "nsys.log"
    try:
        with log.open("wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                status = process.wait(timeout=timeout_s)
            except BaseException:
                _end(process, directory)
                raise
    except subprocess.TimeoutExpired as error:
        raise StageError(f"the profiled stage did not finish within {timeout_s:.0f} s") from error
    except OSError as error:
        raise MissingError(f"cannot run {command[0]}: {error.strerror}") from error
    return status, log.read_text(encoding="utf-8", errors="replace")
