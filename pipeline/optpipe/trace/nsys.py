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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGTERM
from typing import TYPE_CHECKING, Annotated, NamedTuple

from optpipe.core import params, torch
from optpipe.core.errors import BadInputError, MissingError, StageError
from optpipe.core.params import Param
from optpipe.core.wording import Argument
from optpipe.trace.sources import (
    Source,
    SourceState,
    find_known_refusal,
    list_source_options,
    list_traced,
    refuse_source,
    sources_from_text,
)
from optpipe.trace.tools import find_tool, run_to_end, run_tool

if TYPE_CHECKING:
    from subprocess import CompletedProcess


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


_TIMEOUT_S = 1800.0
_PROBE_TIMEOUT_S = 25.0
_LOG_BYTES = 1 << 20
_MARK = "OPTPIPE_RECORDING"
"""Environment variable of all processes of one recording: its folder."""
BEGUN = "begun"
"""A file in that folder, made by the program before it does anything."""
SHELL_MARK = f'[ -z "${_MARK}" ] || : > "${_MARK}/{BEGUN}"'
"""The line of a shell that makes it, in a recording."""
_ENDED_EARLY = re.compile(
    r"throw in function (?P<function>[^\s(]+)|terminate called|segmentation fault|core dumped",
    re.IGNORECASE,
)
"""How nsys says that it did not mean to end; 2022.4 loses a race for a semaphore in `ProcessWaiterImpl` in one of 30 starts."""
_PROBED = (Source.GPU_METRICS, Source.CPU)
"""Sources that a machine may refuse; nsys records the others in every process."""
_NAMES_OF_SOURCES = {
    Source.GPU_METRICS: re.compile(r"gpu.metrics|NVGPUCTRPERM|counters", re.IGNORECASE),
    Source.CPU: re.compile(r"sampl|perf_event|paranoid|context switch|backtrace", re.IGNORECASE),
}
_TERMINATION_TIMEOUT_S = 5.0
_ASKED = (SIGINT, SIGTERM, SIGKILL)
"""Signals by which a recording is ended, which are no crash."""
_REFUSALS = re.compile(
    r"(permission|not permitted|ptrace|unsupported|not supported|unrecogni[sz]ed|failed to (start|create|launch|initialize)|"
    r"unable to|driver|no space left|illegal)",
    re.IGNORECASE,
)
NSYS_INSTALL_HINT = "sudo .ci/install-nsys (Debian), or the nsight-systems-cli package from NVIDIA's CUDA repository"
_FOLDERS = (
    "nvidia/nsight-systems/*/bin/nsys",
    "nvidia/nsight-systems/*/target-linux-x64/nsys",
    "nvidia/nsight-compute/*/host/target-linux-x64/nsys",
)
_OWN_LINE = re.compile(
    r"^(generating '|generated:$|importer error|unable to retrieve|processing \d+ events|collecting data|capture range|"
    r"the target application|\[\d+/\d+\] )|/recording\.(qdstrm|qdrep|nsys-rep)$",
    re.IGNORECASE,
)
"""Lines that nsys itself prints beside the program's."""
_REPORTS, _STREAM = (".nsys-rep", ".qdrep"), ".qdstrm"


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
    record: Annotated[
        tuple[Source, ...] | None,
        Param(
            "Sources to record besides CUDA and NVTX: gpu-metrics, os-calls, cpu, python, modules, or all.",
            metavar="SOURCES",
            parse=sources_from_text,
        ),
    ] = None
    kernels: Annotated[
        int, Param("Also count the longest kernels with Nsight Compute (ncu).", minimum=0)
    ] = 0
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
    crash: str = ""
    """How nsys ended before the program began; it was then started a second time, of which the rest speaks."""


@dataclass(frozen=True, slots=True)
class Capture:
    """What nsys records, and from when to when."""

    on_gpu: bool
    whole: bool = False
    """The whole process, not only the range `optpipe.capture`: some drivers do not record graphs that were made before it."""
    sources: tuple[Source, ...] = ()
    duration_s: float | None = None
    """The program is asked to end after that time."""
    timeout_s: float | None = _TIMEOUT_S
    environment: Mapping[str, str] = field(default_factory=dict)


def make_nsys_command(output: Path, capture: Capture, version: str) -> list[str]:
    """For nsys 2022.4 to 2026.x."""
    traced = list_traced(capture.sources, on_gpu=capture.on_gpu)
    command = ["profile", "--output", str(output), "--force-overwrite", "true", "--trace", traced]
    command += list_source_options(capture.sources, version)
    if capture.on_gpu:
        command += ["--cuda-graph-trace", "node"]
    if capture.duration_s is not None:
        seconds = str(max(1, round(capture.duration_s)))
        command += ["--duration", seconds, "--kill", "sigterm"]
    else:
        command += ["--kill", "none"]
    if capture.whole:
        return [*command, "--wait", "primary"]
    command += ["--capture-range", "nvtx", "--nvtx-capture", CAPTURE_RANGE]
    command += ["--capture-range-end", "stop"]
    # without it, ranges pushed with plain strings, as torch does, do not bound a capture
    return [*command, "--env-var", "NSYS_NVTX_PROFILER_REGISTER_ONLY=0"]


def record_program(program: Sequence[str], directory: Path, capture: Capture) -> Recording:
    """Runs `program`, and ends all its processes with this one; the recording contains the whole environment.

    nsys and `program` run in NEUTRAL_FOLDER, since nsys imports a `sitecustomize.py` of the current folder. nsys 2022.4 sometimes
    crashes at its start; if `program` has not begun by then (`mark_begin`), it is started once more.

    Raises StageError after `capture.timeout_s`, and MissingError if nsys cannot run.
    """
    directory = directory.resolve()
    came = _record_once(program, directory, capture)
    crash = _describe_crash(came, directory)
    if not crash:
        return came
    return _record_once(program, directory, capture)._replace(crash=crash)


def mark_begin() -> None:
    """Called by a program of optpipe in a recording: from now on, it is not started a second time."""
    if folder := os.environ.get(_MARK):
        (Path(folder) / BEGUN).touch()


def _record_once(program: Sequence[str], directory: Path, capture: Capture) -> Recording:
    output, log = directory / "recording", directory / "nsys.log"
    for stale in (*directory.glob("recording.*"), directory / BEGUN):  # of an earlier run
        stale.unlink(missing_ok=True)
    # without sources, the options are the same for all versions
    version = read_nsys_version() if capture.sources else ""
    command = [str(find_nsys()), *make_nsys_command(output, capture, version), *program]
    environment = {**os.environ, **capture.environment, _MARK: str(directory)}
    try:
        status = run_to_end(
            command,
            log,
            environment,
            timeout_s=capture.timeout_s,
            ask_s=_TERMINATION_TIMEOUT_S,
            name="the profiled program",
        )
    finally:
        _kill_others(directory)
    left = [output.with_suffix(suffix) for suffix in (*_REPORTS, _STREAM)]
    recording = next((path for path in left if path.is_file() and path.stat().st_size), None)
    return Recording(recording, status, _read_tail(log))


def _describe_crash(came: Recording, directory: Path) -> str:
    """How nsys crashed before the program began; empty if the program began, or nsys gave its reason and ended."""
    if came.recording is not None or came.exit_status == 0 or (directory / BEGUN).exists():
        return ""
    by_signal = -came.exit_status if came.exit_status < 0 else came.exit_status - 128
    if 0 < by_signal < 65 and by_signal not in _ASKED:
        return f"signal {by_signal}"
    for line in came.log.splitlines():
        if match := _ENDED_EARLY.search(line):
            return f"exception in {match['function']}" if match["function"] else line.strip()[:200]
    return ""


def list_program_lines(recorded: Recording) -> list[str]:
    """What the program printed, without empty lines and those of nsys."""
    lines = (line.strip() for line in recorded.log.splitlines())
    return [line for line in lines if line and not _OWN_LINE.search(line)]


def probe_sources(
    sources: Sequence[Source], directory: Path, *, on_gpu: bool
) -> tuple[SourceState, ...]:
    """Tries each source with a program that does nothing, so that a refusal costs no run of the program itself."""
    return tuple(_probe_source(source, directory, on_gpu=on_gpu) for source in sources)


def _probe_source(source: Source, directory: Path, *, on_gpu: bool) -> SourceState:
    known = find_known_refusal(source, read_nsys_version(), on_gpu=on_gpu)
    if known is not None:
        return known
    if source not in _PROBED:
        return SourceState(source, recorded=True)
    folder = directory / f"probe-{source}"
    folder.mkdir(parents=True, exist_ok=True)
    capture = Capture(on_gpu=False, whole=True, sources=(source,), timeout_s=_PROBE_TIMEOUT_S)
    try:
        came = record_program(["/bin/sleep", "0.2"], folder, capture)
    except StageError:
        late = f"nsys does not finish a recording with it ({_PROBE_TIMEOUT_S:.0f} s)"
        return refuse_source(source, late)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    said = [line.strip() for line in came.log.splitlines() if _REFUSALS.search(line)]
    named = [line for line in said if _NAMES_OF_SOURCES[source].search(line)]
    if came.recording is None or named:
        return refuse_source(source, (named or said or ["nsys recorded nothing"])[0][:300])
    return SourceState(source, recorded=True)


def _read_tail(log: Path) -> str:
    """The end of a log, which a program may fill with anything."""
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _LOG_BYTES))
        return file.read().decode("utf-8", errors="replace")


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
    """Kills the process groups with `directory` in their environment, which only this recording has.

    nsys starts the program and its helpers in other sessions and does not end them.
    """
    mark = os.fsencode(f"{_MARK}={directory.resolve()}") + b"\0"
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (
                mark in (entry / "environ").read_bytes()
                and (group := os.getpgid(int(entry.name))) != os.getpgrp()
            ):
                os.killpg(group, SIGKILL)


def find_nsys(otherwise: str = "") -> Path:
    """Searches `OPTPIPE_NSYS`, PATH, and the folders of nsys' packages; `otherwise` completes the message of MissingError."""
    missing = f"Nsight Systems (nsys) not found; install it: {NSYS_INSTALL_HINT}"
    missing += f"\n{otherwise}" if otherwise else ""
    return find_tool("nsys", "OPTPIPE_NSYS", _FOLDERS, missing)


def sqlite_from_recording(recording: Path, directory: Path) -> Path:
    """Exports a .nsys-rep or .qdstrm into `directory`.

    Raises MissingError without nsys or a .qdstrm's importer, BadInputError if nsys cannot read the recording, StageError otherwise.
    """
    if recording.stat().st_size == 0:
        raise BadInputError(f"{recording}: the file is empty")
    elsewhere = f"nsys export --type sqlite {recording.name}"
    find_nsys(otherwise=f"or export it where nsys is installed and pass the result: {elsewhere}")
    target = directory.absolute() / f"{recording.stem}.sqlite"
    finished = _export(_find_report(recording, directory), "sqlite", target)
    if finished.returncode != 0 or not target.is_file():
        problem = f"{recording}: nsys cannot export it: {_last_line(finished)}"
        raise BadInputError(
            f"{problem}\nit may come from a newer nsys than this one ({read_nsys_version()})"
        )
    return target


def json_from_recording(recording: Path, directory: Path) -> Path:
    """Exports a .nsys-rep or .qdstrm as JSON lines into `directory`. Raises as `sqlite_from_recording`."""
    report = _find_report(recording, directory)
    target = directory.absolute() / f"{recording.stem}.json"
    for form in ("jsonlines", "json"):
        finished = _export(report, form, target)
        made = (target, target.with_suffix(".jsonl"))  # newer versions choose the suffix
        written = next((path for path in made if path.is_file()), None)
        if finished.returncode == 0 and written is not None:
            return written
    raise StageError(f"nsys cannot export {recording.name} as JSON: {_last_line(finished)}")


def _export(report: Path, form: str, target: Path) -> "CompletedProcess[str]":
    options = ["--type", form, "--force-overwrite", "true", "--output", str(target)]
    return run_tool([str(find_nsys()), "export", *options, str(report)])


def _find_report(recording: Path, directory: Path) -> Path:
    """`recording`, or the report that the importer makes of a .qdstrm in `directory`, once."""
    if recording.suffix != _STREAM:
        return recording.absolute()
    target = directory.absolute() / f"{recording.stem}.nsys-rep"
    return target if target.is_file() else _report_from_qdstrm(recording, target)


def _report_from_qdstrm(qdstrm: Path, target: Path) -> Path:
    importers = list(_find_importers(find_nsys()))
    if not importers:
        problem = f"nsys left {qdstrm.name} unconverted because its importer (QdstrmImporter) is not installed"
        raise MissingError(f"{problem}; install it: {NSYS_INSTALL_HINT}")
    said = ""
    for importer in importers:
        finished = run_tool([str(importer), "-i", str(qdstrm.absolute()), "-o", str(target)])
        if finished.returncode == 0 and target.is_file():
            return target
        said = _last_line(finished)
        target.unlink(missing_ok=True)
    message = f"the nsys importer failed on {qdstrm.name}: {said}"
    if "cannot open shared object" in said:
        raise MissingError(f"{message}\ninstall the library it names")
    raise StageError(message)


def read_nsys_version() -> str:
    """The version in the output of `nsys --version`, such as 2025.3.2.0."""
    return _read_version_of(find_nsys())


@cache
def _read_version_of(nsys: Path) -> str:
    text = run_tool([str(nsys), "--version"]).stdout.strip()
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


def _last_line(finished: "CompletedProcess[str]") -> str:
    lines = [
        line.strip()
        for line in f"{finished.stdout}\n{finished.stderr}".splitlines()
        if line.strip()
    ]
    telling = [line for line in lines if "error" in line.lower() or "cannot" in line.lower()]
    return (telling or lines or [f"exit status {finished.returncode}"])[-1][:300]
