"""`python -m optpipe` in processes forked from one that has imported its libraries: imports are half of a command's time.

Nothing but imports happens in that process. That a command imports only what it needs is the fast tier's to test. Sources must
not change while tests run: a command has some modules from before and some from after.
"""

import atexit
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import Future
from functools import cache
from importlib import import_module
from pathlib import Path
from threading import Thread

IMPORTED = (  # not onnxruntime and polars, whose threads a fork would lose
    "torch", "torch._dynamo", "torch.export", "torch.onnx", "torchvision", "scipy.special", "scipy.stats", "onnx",
    "onnxscript", "onnxslim", "PIL.Image", "msgspec", "typer.main", "rich.console", "rich.table", "optpipe.cli",
    "optpipe.build.build",
)  # fmt: skip
LIMIT_S = 600
PYTHONPATH = os.environ.get("PYTHONPATH")
"""What the imports are found by; where a test changes it for all that starts, a command needs a fresh interpreter."""
WIDTH = "250"
"""Sentences of a command stay on one line, wherever the tests run."""
TAKEN = {"API_TOKEN", "DEPTH", "PATH", "PYTHONPATH"}
"""Variables that no import has read by then; PYTHONPATH is for a `sitecustomize`."""


def run_forked(arguments: list[str], folder: Path, more: dict[str, str]) -> tuple[int, str, str]:
    """The exit status, stdout and stderr of the command, whose variables are this process's and `more`."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        files = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in (out, err)]
        try:
            start_forked(arguments, folder, more, files)
            status = wait_for_forked()
        except (
            BaseException
        ):  # a test was ended before its command: the next one gets another server
            start_server().kill()
            start_server.cache_clear()
            raise
        out.seek(0)
        err.seek(0)
        return status, out.read(), err.read()


class ForkedCommand:
    """A command in a session of its own, which can be ended as a `subprocess.Popen` can. One at a time."""

    def __init__(self, arguments: list[str], folder: Path, stderr: Path) -> None:
        files = [os.devnull, str(stderr)]
        self.pid = start_forked(arguments, folder, {}, files, session=True)
        self._status: Future[int] = Future()
        Thread(target=lambda: self._status.set_result(wait_for_forked()), daemon=True).start()

    def poll(self) -> int | None:
        return self._status.result() if self._status.done() else None

    def wait(self, timeout: float) -> int:
        try:
            return self._status.result(timeout)
        except TimeoutError:
            raise subprocess.TimeoutExpired("optpipe", timeout) from None

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def start_forked(
    arguments: list[str],
    folder: Path,
    more: dict[str, str],
    files: list[str],
    *,
    session: bool = False,
) -> int:
    """Starts the command, with `files` for stdout and stderr; its process, to be waited for."""
    server = start_server()
    assert server.stdin is not None
    assert server.stdout is not None
    variables = {**os.environ, "COLUMNS": WIDTH, **more}
    call = {
        "arguments": arguments,
        "folder": str(folder),
        "files": files,
        "variables": variables,
        "session": session,
    }
    print(json.dumps(call), file=server.stdin, flush=True)
    return int(server.stdout.readline())


def wait_for_forked() -> int:
    """The exit status of the command that `start_forked` started last; the number of a signal is negative."""
    server = start_server()
    assert server.stdout is not None
    return int(server.stdout.readline())


@cache
def start_server() -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(server.communicate)  # it ends with its input
    return server


def serve() -> None:
    """Answers each call, one a line, with the process of its command, then its exit status; in the forked process it is the command."""
    for name in IMPORTED:
        import_module(name)
    gc.freeze()
    for line in iter(sys.stdin.readline, ""):
        if not (command := os.fork()):
            return become_command(**json.loads(line))
        print(command, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(command, 0)[1]), flush=True)
        assert len([*Path("/proc/self/task").iterdir()]) == 1, (
            "an import started a thread, which no forked process has"
        )
    return None


def become_command(
    arguments: list[str],
    folder: str,
    files: list[str],
    variables: dict[str, str],
    *,
    session: bool,
) -> None:
    if session:
        os.setsid()
    signal.alarm(LIMIT_S)
    for number, name in enumerate((os.devnull, *files)):
        opened = os.open(name, os.O_RDWR)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    sys.path[0] = folder
    if variables.get("PYTHONPATH") != PYTHONPATH:
        sys.path[1:1] = variables["PYTHONPATH"].split(":")
        sys.modules.pop("sitecustomize", None)
        import_module("sitecustomize")
    sys.argv[1:] = arguments
    runpy.run_module("optpipe", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    serve()
