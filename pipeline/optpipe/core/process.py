"""Child processes that end together with everything they start, and with their parent.

Each Python child of ours starts here. `python -m …` would put the current folder in front of everything that the child imports,
so that a `json.py` of the user would run in every worker; `-P` and PYTHONSAFEPATH leave it out, there and in whatever the child starts.
"""

import atexit
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from importlib.machinery import ExtensionFileLoader
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Any, TypeVar

from optpipe.core.records import json_from_record, read_record

Job = TypeVar("Job")
Result = TypeVar("Result")

_PR_SET_PDEATHSIG = 1
_PARENT = "OPTPIPE_PARENT"


def end_with_parent() -> None:
    """Kills this process when its parent ends."""
    _set_death_signal()
    parent = os.environ.pop(_PARENT, None)
    if parent is not None and os.getppid() != int(parent):  # the parent has already ended
        sys.exit(1)


def _set_death_signal() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def let_torch_threads_sleep() -> None:
    """Lets torch's threads on the CPU sleep while they wait for each other, in this process alone.

    OpenMP's threads wait in a loop, which takes the processors from whatever else runs: on two cores under a load of 9, 25
    batches of a small network took 13.3 s of processor time, and 2.05 s with threads that sleep. OpenMP reads the setting once,
    when it is loaded, so that it is loaded here, and no child gets the setting: what is measured keeps torch's default.

    Does nothing if the user chose a setting, torch is imported, or torch has no OpenMP beside it.
    """
    imported = sys.modules.get("torch")
    torch_spec = None if imported or _WAITING in os.environ else find_spec("torch")
    if torch_spec is None or torch_spec.origin is None:
        return
    os.environ[_WAITING] = "PASSIVE"
    try:
        for library in Path(torch_spec.origin).parent.glob("lib/libgomp*.so*"):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    finally:
        del os.environ[_WAITING]


_WAITING = "OMP_WAIT_POLICY"

NEUTRAL_FOLDER = Path("/")
"""Where programs run that import Python modules from the current folder, as nsys does: nobody but root writes there."""


def make_python_command(module: str, *words: str, program: str = "") -> list[str]:
    """The command `python -P -m MODULE WORDS`, which never imports from the current folder (Python 3.11).

    `program` defaults to this interpreter. Start it with `make_python_environment`.
    """
    return [program or sys.executable, "-P", "-m", module, *words]


def make_python_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """`environment`, by default this process's, in which no Python imports from the current folder.

    An empty part of PYTHONPATH, as in `PYTHONPATH=$PYTHONPATH:/srv`, means that folder and is left out; the others become absolute.
    """
    made = dict(os.environ if environment is None else environment)
    made["PYTHONSAFEPATH"] = "1"
    if "PYTHONPATH" in made:
        folders = filter(None, made["PYTHONPATH"].split(os.pathsep))
        made["PYTHONPATH"] = os.pathsep.join(str(Path(folder).absolute()) for folder in folders)
    return made


def start_python(
    module: str,
    *words: str,
    program: str = "",
    environment: Mapping[str, str] | None = None,
    **options: Any,
) -> "subprocess.Popen[bytes]":
    """Starts `make_python_command` in `make_python_environment`; `options` are those of Popen."""
    return subprocess.Popen(
        make_python_command(module, *words, program=program),
        env=make_python_environment(environment),
        **options,
    )


def run_python_code(
    code: str,
    *words: str,
    program: str = "",
    environment: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
) -> "subprocess.CompletedProcess[str]":
    """Runs `code` with the arguments `words` in an interpreter of any version, away from the current folder.

    Raises subprocess.TimeoutExpired after `timeout_s`.
    """
    return subprocess.run(
        [os.path.abspath(program or sys.executable), "-c", code, *words],  # noqa: PTH100 - a link to an interpreter stays one
        env=make_python_environment(environment),
        cwd=NEUTRAL_FOLDER,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@contextmanager
def open_process_group(
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str],
    *,
    errors_only: bool = False,
    ask_s: float | None = None,
    foreign: bool = False,
    folder: Path | None = None,
) -> Iterator["subprocess.Popen[bytes]"]:
    """Runs `command` in a new session, so that Ctrl+C is the parent's to handle; nothing of its group outlives the block.

    Output goes to the file `log`; `errors_only` drops standard output. With `ask_s` the process first gets SIGTERM and
    that many seconds to end. A `foreign` program does not call `end_with_parent` itself. It runs in `folder`, by default the current one.
    """
    environment = make_python_environment(environment)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if errors_only else output,
            stderr=output,
            cwd=folder,
            env=environment if foreign else {**environment, _PARENT: str(os.getpid())},
            start_new_session=True,
            preexec_fn=_set_death_signal if foreign else None,
        )
    try:
        yield process
    finally:
        if ask_s is not None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(ask_s)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


_AGAIN_S = 0.02


class _Interruption(KeyboardInterrupt):
    """Raised by a signal. If it is destroyed before `handle_interrupts` receives it, it is raised again."""

    def __init__(self, number: int, over: threading.Event) -> None:
        super().__init__()
        self.number, self.over = number, over
        self.taken = False

    def __del__(self) -> None:
        if not (
            self.taken or self.over.is_set()
        ):  # in a thread, because a destructor must not raise
            threading.Thread(
                target=_raise_again, args=(self.number, self.over), daemon=True
            ).start()


def _raise_again(number: int, over: threading.Event) -> None:
    if not over.wait(_AGAIN_S):
        signal.pthread_kill(threading.main_thread().ident or 0, number)


def _initializes_native_code(frame: FrameType | None) -> bool:
    """Whether an extension module is being initialized. Some bindings (nanobind) abort on an exception at that time."""
    while frame is not None:
        loads = frame.f_code.co_name in ("create_module", "exec_module")
        if loads and isinstance(frame.f_locals.get("self"), ExtensionFileLoader):
            return True
        frame = frame.f_back
    return False


def acknowledge_interrupt(interruption: KeyboardInterrupt) -> None:
    """Tells `handle_interrupts` that the caller ends in order, so that `interruption` is not raised again."""
    if isinstance(interruption, _Interruption):
        interruption.taken = True


@contextmanager
def handle_interrupts() -> Iterator[None]:
    """Makes SIGTERM raise KeyboardInterrupt as SIGINT does while the block runs, and loses neither.

    A signal may arrive while a library imports a module, looks up an attribute or destroys an object. Extension modules
    turn it into an ImportError, which the importing library may take for a missing option; Python only prints what a
    destructor raises; and there is `except:`. An error that a signal caused becomes an interruption here, and a lost
    interruption is raised again, until the block ends or calls `acknowledge_interrupt`. Only on the main thread, where
    signals can be handled. An ignored SIGINT stays ignored (`nohup`).
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received, over = False, threading.Event()

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received = True
        if _initializes_native_code(frame):
            threading.Thread(target=_raise_again, args=(number, over), daemon=True).start()
            return
        raise _Interruption(number, over)

    def unraisable(lost: "sys.UnraisableHookArgs") -> None:
        if not isinstance(lost.exc_value, _Interruption):
            hook(lost)

    hook = sys.unraisablehook
    numbers = [
        signum
        for signum in (signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(signum) is not signal.SIG_IGN
    ]
    before = {number: signal.signal(number, interrupt) for number in numbers}
    sys.unraisablehook = unraisable
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of Polars is not an Exception
        if received:
            raise KeyboardInterrupt from error
        raise
    finally:
        over.set()
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)


def keep_descriptors() -> None:
    """Opens null devices in place of closed standard streams, so that no file opened later takes their descriptors.

    Reading stdin gives nothing; writing to stdout is an error, and to stderr none.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            _open_null_as(number, os.O_RDONLY if number < 2 else os.O_WRONLY)
            setattr(
                sys,
                name,
                os.fdopen(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False),
            )


def discard_output(descriptor: int) -> None:
    """Drops everything that is written to `descriptor` from now on, so that Python's exit does not fail at it."""
    _open_null_as(descriptor, os.O_WRONLY)


def _open_null_as(descriptor: int, flags: int) -> None:
    opened = os.open(os.devnull, flags)
    if opened != descriptor:
        os.dup2(opened, descriptor)
        os.close(opened)


@contextmanager
def redirect_output(log: Path) -> Iterator[None]:
    """Sends file descriptors 1 and 2 to `log`, including output of C++ code and child processes."""
    streams = (
        redirect_stdout(sys.__stdout__),
        redirect_stderr(sys.__stderr__),
    )  # a live display replaces both
    with (
        log.open("ab") as file,
        _redirect({1: file.fileno(), 2: file.fileno()}),
        streams[0],
        streams[1],
    ):
        yield


@contextmanager
def redirect_stdout_to_stderr() -> Iterator[None]:
    with _redirect({1: 2}):
        yield


def redirect_stdout_to_stderr_at_exit() -> None:
    """Sends to stderr what code prints to stdout at exit, after the result."""
    atexit.unregister(_send_stdout_to_stderr)
    atexit.register(_send_stdout_to_stderr)  # the last one registered runs first


def _send_stdout_to_stderr() -> None:
    with suppress(OSError, ValueError):  # closed by its reader or by the code
        sys.stdout.flush()
        os.dup2(2, 1)


@contextmanager
def _redirect(targets: Mapping[int, int]) -> Iterator[None]:
    sys.stdout.flush()
    sys.stderr.flush()
    kept = {descriptor: os.dup(descriptor) for descriptor in targets}
    for descriptor, target in targets.items():
        os.dup2(target, descriptor)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, copy in kept.items():
            os.dup2(copy, descriptor)
            os.close(copy)


# Jobs: a process runs its jobs in order; if one crashes it, the next job gets a fresh process. A failure thus costs only its own
# result, and the start (torch and CUDA, seconds) is paid once. Jobs and results are files in a folder, which neither output of
# libraries nor a profiler around the process can disturb.
STDERR_LOG = "stderr.txt"
POLL_S = 0.05
"""Interval of the parent's polling, too long to affect a measurement."""


@dataclass(frozen=True, slots=True)
class JobFailure:
    stderr: str
    exit_status: int | None
    """Negative for a signal; None if the job exceeded its limit."""


def run_jobs(
    module: str,
    jobs: Sequence[object],
    kind: type[Result],
    limit_s: float,
    defaults: Mapping[str, str],
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
            for result in _read_results(
                module, folder, len(jobs) - begun, kind, limit_s, {**defaults, **os.environ}
            ):
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
    module: str,
    folder: Path,
    count: int,
    kind: type[Result],
    limit_s: float,
    environment: Mapping[str, str],
) -> Generator[Result | JobFailure]:
    """Yields results until the process ends or hangs; its failure is the last one."""
    command, log = make_python_command(module, str(folder)), folder / STDERR_LOG
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
        with suppress(subprocess.TimeoutExpired):
            process.wait(POLL_S)
            return result.exists()
        if monotonic() > until:
            return False
    return True
