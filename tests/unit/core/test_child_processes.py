"""No Python process of ours imports from the user's folder, and one place starts them all."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.fakes.syntax import parse_file

import optpipe
from optpipe.core.process import make_python_environment, run_python_code, start_python

PACKAGE = Path(optpipe.__file__).parent
STARTS = {
    "core/process.py": "Python children, and process groups",
    "workspace/commit.py": "git",
    "workspace/seal.py": "ssh-keygen",
    "build/doctor.py": "nsys --version",
    "trace/tools.py": "nsys",
    "deploy/triton_model.py": "runs in a server without optpipe, with -P",
}
"""The files that start a process, and what."""
NAMES_INTERPRETER = {
    "core/process.py": "starts it",
    "deploy/proof.py": "writes it into a server's configuration",
    "deploy/recheck.py": "hands it to start_python",
    "deploy/server.py": "tells a server which one to start",
}
STARTERS = {"Popen", "run", "call", "check_call", "check_output", "getoutput", "getstatusoutput"}


def list_trees():
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), parse_file(path)


def is_start(node):
    """`subprocess.run(...)`, `os.system(...)`, `os.exec...`, `os.spawn...`, `pty.spawn(...)`."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    owner, name = getattr(node.func.value, "id", ""), node.func.attr
    if owner == "subprocess":
        return name in STARTERS
    return owner in ("os", "pty") and name.startswith(
        ("exec", "spawn", "system", "popen", "posix_spawn")
    )


@pytest.mark.slow
def test_only_one_place_starts_python() -> None:
    trees = dict(list_trees())
    starting = {name for name, tree in trees.items() if any(map(is_start, ast.walk(tree)))}
    assert starting == set(STARTS)
    naming = {
        name
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("executable", "_base_executable")
    }
    assert naming == set(NAMES_INTERPRETER)
    for name, tree in trees.items():
        imported = {
            each.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module in ("subprocess", "os")
            for each in node.names
        }
        assert not imported & (STARTERS | {"system", "execv", "posix_spawn"}), name


def plant(folder, marker):
    """Files that a child would import, if the folder were on its path; each leaves a line in `marker`."""
    for name in ("json", "random", "sitecustomize", "usercustomize", "nt", "typing", "numpy"):
        code = f"open({str(marker)!r}, 'a').write('{name} ' + __file__ + chr(10))\n"
        (folder / f"{name}.py").write_text(code)


@pytest.mark.slow
def test_a_child_imports_nothing_from_the_current_folder(tmp_path, monkeypatch) -> None:
    marker = tmp_path / "marker"
    folder = tmp_path / "user"
    folder.mkdir()
    plant(folder, marker)
    data = tmp_path / "data.json"
    data.write_text("{}")
    monkeypatch.chdir(folder)
    for path in (None, "", ":", f":{tmp_path}", f"{tmp_path}::"):
        if path is None:
            monkeypatch.delenv("PYTHONPATH", raising=False)
        else:
            monkeypatch.setenv("PYTHONPATH", path)
        process = start_python("json.tool", str(data), stderr=subprocess.PIPE)
        assert process.wait() == 0, process.stderr.read()
        process.stderr.close()
        again = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import json, random'], check=True)"
        assert run_python_code(again).returncode == 0
    assert not marker.exists(), marker.read_text()


def test_folders_that_the_user_named_stay_on_the_path(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "helper.py").write_text("print('helper')")
    assert make_python_environment({"PYTHONPATH": "own::"})["PYTHONPATH"] == str(tmp_path / "own")
    monkeypatch.setenv("PYTHONPATH", "own" + os.pathsep)
    assert run_python_code("import helper").stdout == "helper\n"


@pytest.mark.slow
def test_torch_threads_sleep_here_and_no_child_gets_the_setting():
    code = (
        "import os; from optpipe.core.process import let_torch_threads_sleep as let\n"
        "let(); import torch; print(os.environ.get('OMP_WAIT_POLICY'))"
    )
    ended = run_python_code(code, environment={**os.environ, "OMP_DISPLAY_ENV": "TRUE"})
    assert ended.stdout.split() == ["None"]
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in ended.stderr


@pytest.mark.slow
def test_a_build_imports_no_library_that_starts_threads() -> None:
    """Neither polars nor ONNX Runtime: a forked process, as in `tests/integration/fork_server.py`, would lose their threads."""
    program = (
        "import sys, optpipe.build.build; print({'polars', 'onnxruntime'} & sys.modules.keys())"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    assert ran.stdout.strip() == "set()"
