"""Stages and the NVTX ranges that mark them; a program under `nsys profile`, bounded by one of these ranges; its export to SQLite.

`nsys profile` writes a .qdstrm and calls an importer to make the .nsys-rep. Debian installs the importer in another folder
than nsys searches, and a copy of nsys inside Nsight Compute may lack a library that the importer needs; both leave the
.qdstrm. This module then finds and calls `QdstrmImporter` itself.

The ranges use torch's NVTX binding because every nsys sees it, also without a GPU; 2022.4 and 2023.4 do not see the `nvtx`
package.
"""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NamedTuple

from optpipe.core import plan as params
from optpipe.core import torch
from optpipe.core.errors import BadInputError, MissingError, StageError
from optpipe.core.plan import Param
from optpipe.core.process import NEUTRAL_FOLDER, open_process_group
from optpipe.core.wording import Argument


class Stage(StrEnum):
    """A stage that can be profiled; one process records the first three, each in a range `optpipe.STAGE`."""

    EXPORT = "export"
    QUANTIZE = "quantize"
    BUILD = "build"
    PREPROCESS = "preprocess"
    INFERENCE = "inference"


BUILD_STAGES = (Stage.EXPORT, Stage.QUANTIZE, Stage.BUILD)
CAPTURE_RANGE = "optpipe.capture"
"""Bounds a recording. It opens some iterations before the measured range, because the start of a recording disturbs."""
MEASURED_RANGE = "optpipe.measure"
"""Bounds the judged part of optpipe's recordings."""
ITERATION_RANGE = "optpipe.iteration"
LIBRARY_RANGES = (
    r"^(cuBLAS|cuBLASLt|cuDNN|cuSOLVER|cuSPARSE|CUB|CCCL|NCCL|DALI|nvjpeg|nvJPEG|nvImageCodec|TensorRT internal|"
    r"GIL Trace|Python Periodic Sampling)[: ]"
)
"""Ranges that libraries, and nsys for `-t python-gil`, open in separate domains: not iterations or layers of the program."""


@contextmanager
def mark_range(name: str) -> Iterator[None]:
    torch.cuda.nvtx.range_push(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()


_TIMEOUT_S = 1800
_TERMINATION_TIMEOUT_S = 5.0
_REFUSALS = re.compile(
    r"(permission|not permitted|ptrace|unsupported|not supported|unrecogni[sz]ed|failed to (start|create|launch|initialize)|"
    r"unable to|driver|no space left|illegal)",
    re.IGNORECASE,
)
NSYS_INSTALL_HINT = "sudo .ci/install-nsys (Debian), or the nsight-systems-cli package from NVIDIA's CUDA repository"
_IMPORT_TIMEOUT_S = 600


@dataclass(frozen=True, slots=True)
class ProfilePlan:
    stage: Annotated[tuple[Stage, ...], Param("Stage to profile; repeatable. Default: all.")] = ()
    images: Annotated[
        Path | None,
        Param(
            "Images to preprocess, also used as in `build " + Argument("images") + "`.",
            metavar="DIR",
        ),
    ] = None
    batch_size: Annotated[
        tuple[int, ...],
        Param(
            "Batch sizes to run, comma-separated.", metavar="SIZES", parse=params.sizes_from_text
        ),
    ] = (1,)
    length: Annotated[tuple[int, ...] | None, params.LENGTHS] = None
    iterations: Annotated[int, Param("Recorded iterations of repeated stages.", minimum=2)] = 20
    warm_up: Annotated[
        int, Param("Warm-up iterations before recording.", minimum=0, setting=True)
    ] = 5
    keep_raw: Annotated[
        bool,
        Param(
            "Keep the raw recording, which contains the process environment in plain text.",
            setting=True,
        ),
    ] = False


class Recording(NamedTuple):
    """A finished run under nsys; `recording` is None if nsys wrote none."""

    recording: Path | None
    exit_status: int
    log: str
    """Output of nsys and the program, interleaved."""


def make_nsys_command(output: Path, *, on_gpu: bool, whole: bool) -> list[str]:
    """For nsys 2022.4 to 2025.x. `whole`: some drivers do not record CUDA graphs that were made before the range."""
    traced = "nvtx,cuda,cublas,cudnn" if on_gpu else "nvtx"
    command = ["profile", "--output", str(output), "--force-overwrite", "true", "--trace", traced]
    command += ["--sample", "none", "--cpuctxsw", "none", "--kill", "none"]
    if on_gpu:
        command += ["--cuda-graph-trace", "node"]
    if not whole:
        command += [
            "--capture-range",
            "nvtx",
            "--nvtx-capture",
            CAPTURE_RANGE,
            "--capture-range-end",
            "stop",
        ]
        # without it, ranges pushed with plain strings, as torch does, do not bound a capture
        command += ["--env-var", "NSYS_NVTX_PROFILER_REGISTER_ONLY=0"]
    return command


def record_program(
    program: Sequence[str], directory: Path, *, on_gpu: bool, whole: bool = False
) -> Recording:
    """Runs `program`, and ends all its processes with this one; the recording contains the whole environment.

    nsys and `program` run in NEUTRAL_FOLDER, since nsys imports a `sitecustomize.py` of the current folder.
    `directory` is among the program's arguments, as an absolute path.

    Raises StageError after half an hour, and MissingError if nsys cannot run.
    """
    directory = directory.resolve()
    output, log = directory / "recording", directory / "nsys.log"
    command = [str(find_nsys()), *make_nsys_command(output, on_gpu=on_gpu, whole=whole), *program]
    try:
        with open_process_group(
            command,
            log,
            os.environ,
            ask_s=_TERMINATION_TIMEOUT_S,
            foreign=True,
            folder=NEUTRAL_FOLDER,
        ) as process:
            status = process.wait(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise StageError(f"the profiled stage did not finish within {_TIMEOUT_S} s") from error
    except OSError as error:
        raise MissingError(f"cannot run {command[0]}: {error.strerror}") from error
    finally:
        _kill_others(directory)
    left = [output.with_suffix(suffix) for suffix in (".nsys-rep", ".qdrep", ".qdstrm")]
    found = next((path for path in left if path.is_file() and path.stat().st_size), None)
    return Recording(found, status, log.read_text(encoding="utf-8", errors="replace"))


def export_recording(recorded: Recording, directory: Path) -> Path:
    """Raises StageError if nsys reports a full disk, and MissingError if it did not record."""
    if "no space left" in recorded.log.lower():
        problem = f"the disk is full: no space for the recording in {directory}"
        raise StageError(f"{problem}; choose another location with " + Argument("workspace"))
    if recorded.recording is None:
        lines = [line.strip() for line in recorded.log.splitlines() if line.strip()] or [
            "no output"
        ]
        why = next(filter(_REFUSALS.search, lines), lines[0])[:300]
        raise MissingError(
            f"nsys recorded nothing: {why}\nsee what this machine allows: nsys status --environment"
        )
    return sqlite_from_recording(recorded.recording, directory)


def _kill_others(directory: Path) -> None:
    """Kills the process groups with `directory` on a command line, which only this recording uses.

    nsys starts the program and its helpers in other sessions and does not end them.
    """
    mark = os.fsencode(directory.resolve())
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (
                mark in (entry / "cmdline").read_bytes()
                and (group := os.getpgid(int(entry.name))) != os.getpgrp()
            ):
                os.killpg(group, signal.SIGKILL)


def find_nsys(otherwise: str = "") -> Path:
    """Searches `OPTPIPE_NSYS`, PATH, and the folders of nsys' packages; `otherwise` completes the message of MissingError."""
    if named := os.environ.get("OPTPIPE_NSYS"):
        if not Path(named).is_file():
            raise MissingError(f"OPTPIPE_NSYS={named}: no such file")
        return Path(named).absolute()
    if found := shutil.which("nsys"):
        return Path(found).absolute()
    for pattern in (
        "nvidia/nsight-systems/*/bin/nsys",
        "nvidia/nsight-systems/*/target-linux-x64/nsys",
        "nvidia/nsight-compute/*/host/target-linux-x64/nsys",
    ):
        if places := sorted(Path("/opt").glob(pattern)):
            return places[-1]
    missing = f"Nsight Systems (nsys) not found; install it: {NSYS_INSTALL_HINT}"
    raise MissingError(f"{missing}\n{otherwise}" if otherwise else missing)


def sqlite_from_recording(recording: Path, directory: Path) -> Path:
    """Exports a .nsys-rep or .qdstrm into `directory`.

    Raises MissingError without nsys or a .qdstrm's importer, BadInputError if nsys cannot read the recording, StageError otherwise.
    """
    if recording.stat().st_size == 0:
        raise BadInputError(f"{recording}: the file is empty")
    elsewhere = f"nsys export --type sqlite {recording.name}"
    find_nsys(otherwise=f"or export it where nsys is installed and pass the result: {elsewhere}")
    directory = directory.absolute()
    report = (
        _report_from_qdstrm(recording, directory) if recording.suffix == ".qdstrm" else recording
    )
    target = directory / f"{recording.stem}.sqlite"
    options = ["--type", "sqlite", "--force-overwrite", "true", "--output", str(target)]
    finished = _run([str(find_nsys()), "export", *options, str(report.absolute())])
    if finished.returncode != 0 or not target.is_file():
        problem = f"{recording}: nsys cannot export it: {_last_line(finished)}"
        raise BadInputError(
            f"{problem}\nit may come from a newer nsys than this one ({read_nsys_version()})"
        )
    return target


def _report_from_qdstrm(qdstrm: Path, directory: Path) -> Path:
    importers = list(_find_importers(find_nsys()))
    if not importers:
        problem = f"nsys left {qdstrm.name} unconverted because its importer (QdstrmImporter) is not installed"
        raise MissingError(f"{problem}; install it: {NSYS_INSTALL_HINT}")
    target = directory / f"{qdstrm.stem}.nsys-rep"
    said = ""
    for importer in importers:
        finished = _run([str(importer), "-i", str(qdstrm.absolute()), "-o", str(target)])
        if finished.returncode == 0 and target.is_file():
            return target
        said = _last_line(finished)
    message = f"the nsys importer failed on {qdstrm.name}: {said}"
    if "cannot open shared object" in said:
        raise MissingError(f"{message}\ninstall the library it names")
    raise StageError(message)


def read_nsys_version() -> str:
    """The version in the output of `nsys --version`, such as 2025.3.2.0."""
    text = _run([str(find_nsys()), "--version"]).stdout.strip()
    words = [word for word in text.replace("-", " ").split() if word[:1].isdigit()]
    return words[0] if words else text or "unknown"


def _find_importers(nsys: Path) -> Iterator[Path]:
    """Looks in the folders of this nsys, and in those of Debian's package, split between lib/TRIPLET and lib."""
    real = nsys.resolve()
    debian = [real.parents[3] / "nsight-systems"] if len(real.parents) > 3 else []
    roots = dict.fromkeys(
        [nsys.parent, real.parent, real.parent.parent, *nsys.parents[1:3], *debian]
    )
    seen = set()
    for root in roots:
        for candidate in (
            root / "QdstrmImporter",
            *sorted(root.glob("host-linux-*/QdstrmImporter")),
        ):
            if candidate.is_file() and candidate.resolve() not in seen:
                seen.add(candidate.resolve())
                yield candidate


def _run(command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    """Runs a program of nsys, whose arguments are absolute paths, away from the current folder."""
    try:
        return subprocess.run(
            command,
            cwd=NEUTRAL_FOLDER,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_IMPORT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise StageError(
            f"{Path(command[0]).name} did not finish within {_IMPORT_TIMEOUT_S} s"
        ) from error
    except OSError as error:
        raise MissingError(f"cannot run {command[0]}: {error.strerror}") from error


def _last_line(finished: "subprocess.CompletedProcess[str]") -> str:
    lines = [
        line.strip()
        for line in f"{finished.stdout}\n{finished.stderr}".splitlines()
        if line.strip()
    ]
    telling = [line for line in lines if "error" in line.lower() or "cannot" in line.lower()]
    return (telling or lines or [f"exit status {finished.returncode}"])[-1][:300]
