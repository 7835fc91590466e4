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
from functools import cache
from importlib import import_module
from pathlib import Path

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
    server = start_server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        files = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in (out, err)]
        variables = {**os.environ, "COLUMNS": WIDTH, **more}
        call = {
            "arguments": arguments,
            "folder": str(folder),
            "files": files,
            "variables": variables,
        }
        try:
            print(json.dumps(call), file=server.stdin, flush=True)
            status = int(server.stdout.readline())
        except (
            BaseException
        ):  # a test was ended before its command: the next one gets another server
            server.kill()
            start_server.cache_clear()
            raise
        out.seek(0)
        err.seek(0)
        return status, out.read(), err.read()


@cache
def start_server() -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(server.communicate)  # it ends with its input
    return server


def serve() -> None:
    """Answers each call, one a line, with the exit status of its command; in the forked process it is the command."""
    for name in IMPORTED:
        import_module(name)
    gc.freeze()
    for line in iter(sys.stdin.readline, ""):
        if not (command := os.fork()):
            return become_command(**json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(command, 0)[1]), flush=True)
        assert len([*Path("/proc/self/task").iterdir()]) == 1, (
            "an import started a thread, which no forked process has"
        )
    return None


def become_command(
    arguments: list[str], folder: str, files: list[str], variables: dict[str, str]
) -> None:
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
