"""One workspace with `digits` built in it, shared by the tests that only read."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Ran:
    """A finished command."""

    status: int
    stdout: str
    stderr: str

    @property
    def document(self) -> Any:
        return json.loads(self.stdout)


def optpipe(*arguments: object, cwd: Path, **environment: str) -> Ran:
    """Runs the command as a user does, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "optpipe", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    return Ran(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory whose `.optpipe` holds `digits` in FP32 and FP16 for TensorRT-RTX and ONNX Runtime."""
    folder = tmp_path_factory.mktemp("digits")
    ran = optpipe("build", "digits", "--precision", "fp32,fp16", "--json", cwd=folder)
    assert ran.status == 0, ran.stderr
    (folder / "build.json").write_text(ran.stdout)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Ran]:
    """`run("build", "digits")` in an empty directory."""
    return lambda *arguments, **environment: optpipe(*arguments, cwd=tmp_path, **environment)
