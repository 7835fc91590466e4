"""`digits` is exported once per session, whatever the number of workers; each module begins with a copy of that store."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from optpipe.cli import app


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever runs commands as a user does is of the slow tier."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)


@dataclass(frozen=True)
class Ran:
    """A finished command."""

    status: int
    stdout: str
    stderr: str

    @property
    def document(self) -> Any:
        return json.loads(self.stdout)


def optpipe(*arguments: object, cwd: Path | None = None, workspace: Path | None = None, **environment: str) -> Ran:
    """Runs the command as a user does, in a process of its own."""
    options = () if workspace is None else ("--workspace", workspace)
    done = subprocess.run(
        [sys.executable, "-m", "optpipe", *map(str, (*arguments, *options))],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    return Ran(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Callable[[Path], Path]:
    """`exported(workspace)`: a workspace that holds `digits` exported, and built in FP32 for ONNX Runtime on the CPU."""
    own = tmp_path_factory.getbasetemp()
    shared = own if worker_id == "master" else own.parent  # the workers' common folder
    with (shared / "exported.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "exported").exists():
            arguments = ("--precision", "fp32", "--backend", "onnxruntime", "--device", "cpu")
            ran = optpipe("build", "digits", *arguments, "--workspace", shared / "exporting", cwd=own)
            assert ran.status == 0, ran.stderr
            (shared / "exporting").rename(shared / "exported")
    return lambda workspace: shutil.copytree(shared / "exported", workspace)


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory, exported: Callable[[Path], Path]) -> Path:
    """A working directory whose `.optpipe` holds `digits` in FP32 and FP16 for TensorRT-RTX and ONNX Runtime."""
    folder = tmp_path_factory.mktemp("digits")
    exported(folder / ".optpipe")
    ran = optpipe("build", "digits", "--precision", "fp32,fp16", "--json", cwd=folder)
    assert ran.status == 0, ran.stderr
    (folder / "build.json").write_text(ran.stdout)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Ran]:
    """`run("build", "digits")` in an empty directory."""
    return lambda *arguments, **environment: optpipe(*arguments, cwd=tmp_path, **environment)


@pytest.fixture
def inside(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """`optpipe` without a process of its own, for what ends before any work begins: most of its time would be imports."""

    def run(*arguments: object, cwd: Path) -> Ran:
        monkeypatch.chdir(cwd)
        with pytest.raises(SystemExit) as ended:
            app([*map(str, arguments)])
        out, err = capfd.readouterr()
        return Ran(int(ended.value.code or 0), out, err)

    return run
