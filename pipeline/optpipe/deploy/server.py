"""Finds a Triton server, runs it on a model repository, and always ends its processes.

The server is `tritonserver` (NVIDIA's container), or the one in nvidia-pytriton, which has only the Python backend and needs
libpython on LD_LIBRARY_PATH and a stub for its interpreter's version. With NumPy 2 in that interpreter the stub reads
[1, 2, 3, 4] as [1, 1, 1, 1] without an error, so such an environment is refused.
"""

import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any
from urllib.error import URLError
from urllib.request import urlopen

from optpipe.core.errors import BadInputError, MissingError, StageError, escape
from optpipe.core.process import open_process_group, run_python_code
from optpipe.core.wording import Argument

if TYPE_CHECKING:
    import subprocess

SERVER_VARIABLE = "OPTPIPE_TRITON"
READY_LIMIT_S = 120.0
POLL_S = 0.1
END_LIMIT_S = 15.0
INSTALL = (
    'uv venv -p 3.11 DIR && uv pip install -p DIR --no-deps nvidia-pytriton==0.7.0 "numpy<2"; then pass '
    + Argument("server", "DIR")
)


@dataclass(frozen=True, slots=True)
class ServerProgram:
    program: str
    environment: Mapping[str, str]
    about: str = ""
    """Versions of the bundled server's Python and NumPy."""
    stub: Path | None = None
    """The bundled server's stub for its interpreter, to be placed in the folder of the Python backend."""
    backends: Path | None = None


def find_server(wanted: str | None) -> ServerProgram:
    """Finds `--server`, or a server on PATH. Raises MissingError, or BadInputError if it would serve wrong tensors."""
    wanted = wanted or os.environ.get(SERVER_VARIABLE) or None
    if wanted is None:
        if (program := shutil.which("tritonserver")) is None:
            raise MissingError(
                "no tritonserver on PATH; use NVIDIA's container, or a bundled one: " + INSTALL
            )
        return ServerProgram(program, dict(os.environ))
    path = find_python(Path(wanted), "server")
    return (
        _describe_bundled(path)
        if path.name.startswith("python")
        else ServerProgram(str(path), dict(os.environ))
    )


def find_python(path: Path, name: str) -> Path:
    """The interpreter of an environment, or the program `path`, the argument `name`. Raises BadInputError if it is neither."""
    for file in (path / "bin" / "python", path):
        if file.is_file() and os.access(file, os.X_OK):
            return file.absolute()
    raise BadInputError("neither a program nor a Python environment", argument=Argument(name, path))


def ask_python(
    program: Path, source: str, environment: Mapping[str, str], name: str, *arguments: object
) -> Any:
    """Runs `source` in an interpreter with `arguments` as JSON, and parses its output as JSON. Raises BadInputError."""
    told = run_python_code(
        source, *map(json.dumps, arguments), program=str(program), environment=environment
    )
    if told.returncode != 0:
        raise BadInputError(
            f"the interpreter does not start: {escape(told.stderr.strip()[-200:])}",
            argument=Argument(name, program),
        )
    return json.loads(told.stdout)


_PROBE = """
import importlib.util as u, json, sys, sysconfig
spec = u.find_spec("pytriton")
try:
    import numpy; version = numpy.__version__
except ImportError:
    version = None
print(json.dumps({"root": spec and spec.submodule_search_locations[0], "numpy": version, "python": "%d.%d" % sys.version_info[:2],
  "libraries": sysconfig.get_config_var("LIBDIR"), "library": sysconfig.get_config_var("INSTSONAME")}))
"""


def _describe_bundled(python: Path) -> ServerProgram:
    plain = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONHOME")
    }
    facts = ask_python(python, _PROBE, plain, "server")
    if facts["root"] is None:
        raise MissingError(f"{python} has no nvidia-pytriton, whose server is needed: " + INSTALL)
    if facts["numpy"] is None or int(facts["numpy"].split(".")[0]) >= 2:
        state = f"has NumPy {facts['numpy']}" if facts["numpy"] else "has no NumPy"
        problem = "the bundled server's Python stub needs numpy<2 and silently serves wrong tensors with NumPy 2"
        raise BadInputError(
            f"{python} {state}: {problem}", remedy="create a separate environment: " + INSTALL
        )
    root = Path(facts["root"]) / "tritonserver"
    stub = root / "python_backend_stubs" / facts["python"] / "triton_python_backend_stub"
    if not stub.is_file():
        raise MissingError(f"nvidia-pytriton has no stub for Python {facts['python']}: {INSTALL}")
    libraries = Path(facts["libraries"])
    library = libraries / facts["library"]
    if not library.is_file():
        problem = (
            f"{python} has no shared libpython ({library}), which the bundled server's stub needs"
        )
        raise MissingError(
            f"{problem}: apt-get install libpython3-dev, or an interpreter of uv (uv python install)"
        )
    shared = f"{libraries}:{root.parent.parent / 'nvidia_pytriton.libs'}"
    environment = {
        **plain,
        "LD_LIBRARY_PATH": shared,
        "PATH": f"{python.parent}:{plain.get('PATH', '')}",
    }
    about = f", Python {facts['python']}, NumPy {facts['numpy']}"
    return ServerProgram(
        str(root / "bin" / "tritonserver"), environment, about, stub, root / "backends"
    )


def list_backends(program: ServerProgram) -> tuple[str, ...]:
    folder = program.backends or Path(program.program).resolve().parents[1] / "backends"
    return tuple(sorted(path.name for path in folder.glob("*/"))) if folder.is_dir() else ()


@contextmanager
def run_server(
    program: ServerProgram, repository: Path, scratch: Path, *, limit_s: float = READY_LIMIT_S
) -> Iterator[tuple[str, str, str]]:
    """Yields the HTTP and gRPC addresses of a ready server on `repository`, and its version; ends it with the block.

    Raises StageError with the server's reason if it dies, does not become ready, or refuses a model.
    """
    with ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        ports = [bound.getsockname()[1] for bound in sockets]
    command = [
        program.program,
        f"--model-repository={repository}",
        *(
            f"--{kind}-port={port}"
            for kind, port in zip(("http", "grpc", "metrics"), ports, strict=True)
        ),
        *(f"--{kind}-address=127.0.0.1" for kind in ("http", "grpc", "metrics")),
        "--exit-timeout-secs=5",
    ]
    if program.backends is not None:
        command.append(f"--backend-directory={_arrange_backends(program, scratch)}")
    environment = {**program.environment, "OPTPIPE_PYTHON": sys.executable}
    log = scratch / "tritonserver.log"
    with open_process_group(command, log, environment, ask_s=END_LIMIT_S, foreign=True) as process:
        http, grpc = (f"127.0.0.1:{port}" for port in ports[:2])
        _await_ready(process, http, log, limit_s)
        try:
            with urlopen(f"http://{http}/v2", timeout=5) as answer:
                version = str(json.load(answer).get("version", "unknown"))
            yield http, grpc, f"{Path(program.program).name} {version}{program.about}"
        except StageError as error:
            if process.poll() is None:
                raise
            raise StageError(
                f"tritonserver died (exit status {process.returncode}): {read_reason(log)}"
            ) from error


def _arrange_backends(program: ServerProgram, scratch: Path) -> Path:
    """Links a backend directory with the stub in the folder of the Python backend."""
    assert program.backends is not None
    assert program.stub is not None
    folder = scratch / "backends"
    for source in program.backends.glob("*/"):
        (folder / source.name).mkdir(parents=True)
        for file in source.iterdir():
            (folder / source.name / file.name).symlink_to(file)
    (folder / "python" / program.stub.name).symlink_to(program.stub)
    return folder


def _await_ready(process: "subprocess.Popen[bytes]", http: str, log: Path, limit_s: float) -> None:
    until = monotonic() + limit_s
    while monotonic() < until:
        if process.poll() is not None:
            raise StageError(
                f"tritonserver did not start (exit status {process.returncode}): {read_reason(log)}"
            )
        with (
            suppress(URLError, OSError),
            urlopen(f"http://{http}/v2/health/ready", timeout=2) as answer,
        ):
            if answer.status == 200:
                return
        sleep(POLL_S)
    raise StageError(f"tritonserver was not ready after {limit_s:g} s: {read_reason(log)}")


_ERROR_LINE = re.compile(r"^E\d{4} .*?\] \"?(.*?)\"?$")
_ABOUT_NO_GPU = re.compile("CUDA driver version|CudaDriverHelper")
"""Errors of every server without a GPU."""
_TABLE_LINE = re.compile(r"\| UNAVAILABLE: (.*?)\s*\|$")


def read_reason(log: Path) -> str:
    """One line from the log: why a model was not loaded, or why the server ended."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    for pattern in (_TABLE_LINE, _ERROR_LINE):
        reasons = [match[1] for line in lines if (match := pattern.search(line))]
        if reasons := [reason for reason in reasons if not _ABOUT_NO_GPU.search(reason)]:
            return escape(reasons[0].strip())[:300]
    last = (
        re.sub(r'^[IWE]\d{4} .*?\] "?(.*?)"?$', r"\1", lines[-1].strip())
        if lines
        else "it wrote nothing"
    )
    return escape(last)[:300]
