"""Records a user's own program under nsys: `profile -- python train.py`, a server, a C++ binary.

The program runs in the current folder with the user's environment. Its outermost NVTX ranges are the stages. Python programs
find `trace/hook` first in PYTHONPATH, which marks the batches of torch's DataLoaders and, with `--record modules`, the
modules of networks.
"""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from signal import SIGTERM

import polars as pl

from optpipe.backends.torch_marks import LAYER_MARK
from optpipe.core.errors import BadInputError, MissingError, StageError, escape
from optpipe.core.events import Listener
from optpipe.core.wording import Argument, Message
from optpipe.trace.analysis import Analysis, project_ranges, timeline_from_trace
from optpipe.trace.nsys import (
    ITERATION_RANGE,
    LIBRARY_RANGES,
    SHELL_MARK,
    Capture,
    Recording,
    export_recording,
    find_nsys,
    list_program_lines,
    record_program,
)
from optpipe.trace.read import Trace, match_names, trace_from_sqlite
from optpipe.trace.record import add_crash, add_python_stacks
from optpipe.trace.report import ProgramRun
from optpipe.trace.sources import Source, SourceState
from optpipe.workspace.energy import compute_energy_use, read_energy

HOOK = Path(__file__).parent / "hook"
STEP_RANGE, DATA_RANGE = "optpipe.step", "optpipe.data"
_MOST_STAGES = 6
_LEAST_SHARE = 0.01
_OUTPUT_LINES = 5
_ASKED = (-SIGTERM, 128 + SIGTERM)
_START = f"""
{SHELL_MARK}
cd "$1" || exit 127
if [ -n "$2" ]; then export PYTHONPATH="$2"; else unset PYTHONPATH; fi
if [ -n "$3" ]; then export PYTHONSAFEPATH="$3"; else unset PYTHONSAFEPATH; fi
shift 3
exec "$@"
"""
"""nsys runs in another folder, where no Python module can be planted; the program runs in the user's."""


@dataclass(frozen=True, slots=True)
class RecordedProgram:
    trace: Trace
    run: ProgramRun
    sources: tuple[SourceState, ...]


def require_program(command: Sequence[str]) -> str:
    """The program's path. Raises BadInputError if there is no such executable."""
    find_nsys()
    named = command[0]
    path = shutil.which(named)
    if path is None:
        exists = Path(named).exists()
        why = "not executable" if exists else "no such program"
        hint = f"; run it by its interpreter: -- python {named}" if named.endswith(".py") else ""
        raise BadInputError(f"{named}: {why}{hint}")
    return str(Path(path).absolute())


def record_user_program(
    command: Sequence[str],
    scratch: Path,
    listener: Listener,
    granted: tuple[SourceState, ...],
    duration_s: float | None = None,
    workers: int | None = None,
) -> RecordedProgram:
    """Records the program, with `workers` for torch's DataLoaders if given.

    Raises MissingError if nsys recorded nothing, and StageError if the recording holds no event.
    """
    sources = tuple(state.name for state in granted if state.recorded)
    on_gpu = has_gpu()
    capture = Capture(
        on_gpu,
        whole=True,
        sources=sources,
        duration_s=duration_s,
        timeout_s=None,
        environment=make_marks(sources, workers),
    )
    begun = read_energy()
    came = record_program(make_program_command(command), scratch, capture)
    energy = compute_energy_use(begun, read_energy())
    run = ProgramRun(
        tuple(command),
        came.exit_status,
        energy.seconds,
        _find_last_lines(came) if came.exit_status else "",
        energy,
    )
    trace = _read_trace(came, run, scratch, sources, listener)
    return RecordedProgram(trace, run, tuple(_limit_source(state, trace) for state in granted))


def has_gpu() -> bool:
    """Whether this machine has a GPU of NVIDIA, without starting CUDA."""
    return any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg"))


def make_marks(sources: Sequence[Source], workers: int | None = None) -> Mapping[str, str]:
    words = ["loops", *(["modules"] if Source.MODULES in sources else [])]
    words += [] if workers is None else [f"workers={workers}"]
    return {"OPTPIPE_MARKS": ",".join(words)}


def make_program_command(command: Sequence[str]) -> list[str]:
    """The command that runs `command` in the current folder, with the user's own settings of Python and the marks."""
    user = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join(filter(None, (str(HOOK), user)))
    safe = os.environ.get("PYTHONSAFEPATH", "")
    program = require_program(command)
    return ["/bin/sh", "-c", _START, "sh", str(Path.cwd()), path, safe, program, *command[1:]]


def _read_trace(
    came: Recording,
    run: ProgramRun,
    scratch: Path,
    sources: Sequence[Source],
    listener: Listener,
) -> Trace:
    """Raises StageError that names the program's status, because an empty recording is often that of a failed program."""
    ended = describe_end(run)
    try:
        exported = export_recording(came, scratch)
    except MissingError as error:
        raise type(error)(f"{ended}; " + error.message, remedy=error.remedy) from error
    try:
        trace = trace_from_sqlite(exported)
    except BadInputError as error:
        if "empty" not in str(error):
            raise
        problem = f"{ended}; nsys saw no CUDA call and no NVTX range in it"
        way = "record calls to the operating system too: " + Argument("record", "os-calls")
        if Source.OS_CALLS in sources:
            problem += ", nor an OS call of at least 1 µs"
            way = Message(
                "the recording ends with the program's first process: run what does the work in it"
            )
        *_, last = run.output_tail.splitlines() or [""]
        problem += f"; its last line: {last}" if last else ""
        raise StageError(problem, remedy=way) from error
    trace = add_crash(trace, came, listener)
    return add_python_stacks(drop_empty_step(trace), came, scratch, sources, listener)


def has_ended_well(run: ProgramRun, duration_s: float | None) -> bool:
    """With status 0, or by the signal that asks it to end after `duration_s`."""
    return run.exit_status == 0 or (duration_s is not None and run.exit_status in _ASKED)


def describe_end(run: ProgramRun) -> str:
    name = Path(run.command[0]).name
    if run.exit_status == 0:
        return f"{name} ended after {run.wall_s:.1f} s"
    number = -run.exit_status if run.exit_status < 0 else run.exit_status - 128
    if run.exit_status < 0 or 0 < number < 65:
        return f"{name} was killed by signal {number} after {run.wall_s:.1f} s"
    return f"{name} ended with status {run.exit_status} after {run.wall_s:.1f} s"


def _find_last_lines(came: Recording) -> str:
    return "\n".join(escape(line)[:300] for line in list_program_lines(came)[-_OUTPUT_LINES:])


def _limit_source(state: SourceState, trace: Trace) -> SourceState:
    wants_modules = state.name is Source.MODULES and state.recorded
    if wants_modules and not match_names(trace.ranges, f"^{LAYER_MARK}").any():
        return SourceState(state.name, False, "the program ran no torch module", state.remedy)
    return state


@dataclass(frozen=True, slots=True)
class ProgramStage:
    """`range` is None for the measured part: the iterations after the warm-up, or the whole recording."""

    name: str
    range: str | None


def list_program_stages(whole: Analysis, range_name: str | None) -> Iterator[ProgramStage]:
    """The measured part, and the outermost ranges that are not its iterations, longest first; or `range_name` alone.

    Raises BadInputError if no range has that name.
    """
    if range_name is not None:
        yield ProgramStage(range_name, range_name)
        return
    iterations = whole.iterations
    family = "" if iterations.is_empty() else str(iterations["family"][0])
    label = {STEP_RANGE: "steps of the DataLoader", ITERATION_RANGE: "iterations"}.get(
        family, family
    )
    yield ProgramStage(label or "whole program", None)
    name = pl.col("family")
    outer = (
        whole.projection.filter(
            pl.col("depth") == 0,
            name != family,
            ~name.str.contains(LIBRARY_RANGES),
            ~name.str.starts_with("optpipe."),
        )
        .group_by("family")
        .agg(pl.col("wall_ns").sum())
        .filter(pl.col("wall_ns") >= _LEAST_SHARE * max(whole.timeline.span_ns, 1))
        .sort("wall_ns", "family", descending=[True, False])
    )
    for name in outer["family"].head(_MOST_STAGES).to_list():
        yield ProgramStage(str(name), str(name))


def drop_empty_step(trace: Trace) -> Trace:
    """Without the step that torch's DataLoader opens before it finds that an iterable data set is exhausted."""
    steps = trace.ranges.filter(match_names(trace.ranges, f"^{STEP_RANGE}$")).sort("start_ns")
    if steps.height <= 2:
        return trace
    kernels = project_ranges(replace(trace, ranges=steps), timeline_from_trace(trace))["kernels"]
    if not kernels[-1] == 0 < kernels[0]:
        return trace
    is_last = pl.col("start_ns") == steps["start_ns"][-1]
    empty = match_names(trace.ranges, f"^{STEP_RANGE}$") & trace.ranges.select(is_last).to_series()
    return replace(trace, ranges=trace.ranges.filter(~empty))
