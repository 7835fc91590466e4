"""Processes side by side of which one at a time times on the GPU, and while it times a row the others stand still; for `gpu_auto.py`.

All of a run have its lock's path in GPU_ALONE, by which they find each other. Kernels that a compiler or a build compares are timed
under the lock alone: other processes may still run kernels that nobody times. Compile workers have no GPU context and are never stopped.
One that is stopped never has the lock, since who stops it has it.
"""

import fcntl
import functools
import inspect
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from pathlib import Path
from threading import RLock
from typing import IO, Any

LOCK = "GPU_ALONE"
"""The environment variable."""
WORKER = b"compile_worker"
FIRST = -10
"""How nice a thread is that holds the GPU."""
SETTLE_S = 0.3
"""Kernels that a stopped process has enqueued run on."""
KILL_S = 10.0
_THREADS = RLock()
_HELD: list[IO[str]] = []
Turn = Callable[[], AbstractContextManager[None]]


def make_environment(lock: Path) -> dict[str, str]:
    """What makes a process one of a run."""
    here = Path(__file__).resolve().parent
    path = [str(here / "alone"), str(here), os.environ.get("PYTHONPATH", "")]
    return {LOCK: str(lock), "PYTHONPATH": os.pathsep.join(filter(None, path))}


@contextmanager
def hold() -> Iterator[None]:
    """While the block runs no other process of the run holds the GPU; a block inside another waits for nothing."""
    with _THREADS:
        if _HELD:
            yield
            return
        with Path(os.environ[LOCK]).open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            _HELD.append(file)
            before = os.getpriority(os.PRIO_PROCESS, 0)
            set_priority(FIRST)
            try:
                yield
            finally:
                _HELD.clear()
                set_priority(before)
                fcntl.flock(
                    file, fcntl.LOCK_UN
                )  # a child that was forked meanwhile has the file open too


def set_priority(nice: int) -> None:
    """Of this thread, where that is allowed: while it holds the GPU compilers may fill all cores."""
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, nice)


@contextmanager
def alone() -> Iterator[None]:
    """Holds the GPU, and stops all processes of the run that may use it; they go on after the block."""
    begun = time.monotonic()
    with hold():
        waited, stopped = time.monotonic() - begun, set()
        try:
            while (
                found := set(list_users(Path(os.environ[LOCK]))) - stopped
            ):  # one may have started another meanwhile
                stopped |= found
                send(found, signal.SIGSTOP)
            time.sleep(SETTLE_S)
            yield
        finally:
            send(stopped, signal.SIGCONT)
            held = time.monotonic() - begun - waited
            print(
                f"alone for {held:.1f} s after {waited:.1f} s, stopped {len(stopped)}",
                file=sys.stderr,
                flush=True,
            )


def list_processes(lock: Path) -> list[int]:
    """All processes of the run but this one."""
    tag = f"{LOCK}={lock}".encode()
    pids = (int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit())
    return [pid for pid in pids if pid != os.getpid() and tag in _read_list(pid, "environ")]


def list_users(lock: Path) -> list[int]:
    """Those that may use the GPU: Python, without torch's compile workers and the compilers that these start."""
    found = []
    for pid in list_processes(lock):
        command = _read_list(pid, "cmdline")
        if Path(os.fsdecode(command[0])).name.startswith("python") and not any(
            WORKER in each for each in command
        ):
            found.append(pid)
    return found


def free_stopped(lock: Path) -> None:
    """Has those go on that another stopped and was killed before it could let them; does nothing while one holds the GPU."""
    with lock.open("a") as file, suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        send(list_processes(lock), signal.SIGCONT)


def kill_all(lock: Path) -> None:
    """Kills the run's processes, stopped ones too, until there are none."""
    begun = time.monotonic()
    while (found := list_processes(lock)) and time.monotonic() - begun < KILL_S:
        send(found, signal.SIGKILL)
        time.sleep(0.05)


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """A signal to those that still run."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def install_turns() -> None:
    """Has what times on the GPU wait for its turn, in each module as it is imported."""
    sys.meta_path.insert(0, _Finder())


def _read_list(pid: int, name: str) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().split(b"\0")
    except OSError:  # it has ended
        return [b""]


def _wrap(function: Any, turn: Turn) -> Any:
    @functools.wraps(function)
    def wait(*args: Any, **kwargs: Any) -> Any:
        with turn():
            return function(*args, **kwargs)

    return wait


def _change_functions(turn: Turn, *names: str) -> Callable[[Any], None]:
    def change(module: Any) -> None:
        for name in names:
            setattr(module, name, _wrap(getattr(module, name), turn))

    return change


def _change_benchmarkers(module: Any) -> None:
    for kind in [each for each in vars(module).values() if inspect.isclass(each)]:
        if kind.__module__ == module.__name__:
            for name, method in list(vars(kind).items()):
                if name.startswith("benchmark") and inspect.isfunction(method):
                    setattr(kind, name, _wrap(method, hold))


CHANGES: dict[str, Callable[[Any], None]] = {
    "torch._inductor.runtime.benchmarking": _change_benchmarkers,
    "optpipe.kernels.tuner": _change_functions(hold, "time_launch"),
    "optpipe.backends.torch_layers.tuning": _change_functions(hold, "compare_in_turns"),
    "gpu_turns": _change_functions(alone, "time_in_turns", "list_longest_kernels"),
}


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        change = CHANGES.get(name)
        spec: Any = PathFinder.find_spec(name, path, target) if change else None
        if change and spec:
            execute = spec.loader.exec_module

            def execute_and_change(module: Any) -> None:
                execute(module)
                change(module)

            spec.loader.exec_module = execute_and_change
        return spec
