"""A user's file is run as Python would run it, and what it reads decides the model."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from optpipe.core.entries import WeightsRequest
from optpipe.core.errors import BadInputError
from optpipe.models.export.model import Model
from optpipe.models.sources.python_file import PythonFileSource

NET = """
import json
from pathlib import Path
import torch
import helper_beside
INPUTS = [{"name": "x", "dtype": "float32", "min": [1, 3], "opt": [2, 3], "max": [4, 3]}]
def make():
    import traceback
    import late_beside
    traceback.format_stack()  # reads the source of all that is on it, once per process
    layer = torch.nn.Linear(3, 2)
    layer.load_state_dict(torch.load(Path(__file__).parent / "ckpt.pt"))
    return torch.nn.Sequential(layer, helper_beside.activation(), late_beside.last())
def drawn():
    return torch.nn.Linear(3, 2)
kept = torch.nn.Linear(3, 2)
def same():
    return kept
"""


def trained(folder: Path, value: float) -> None:
    import torch

    torch.save({"weight": torch.full((2, 3), value), "bias": torch.zeros(2)}, folder / "ckpt.pt")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "helper_beside.py").write_text("import torch\nactivation = torch.nn.ReLU\n")
    (tmp_path / "late_beside").mkdir()
    (tmp_path / "late_beside" / "__init__.py").write_text("from .inner import last\n")
    (tmp_path / "late_beside" / "inner.py").write_text("import torch\nlast = torch.nn.Identity\n")
    trained(tmp_path, 1.0)
    return tmp_path


def made(folder: Path, factory: str = "make") -> Model:
    return Model(PythonFileSource(folder / "net.py", factory), WeightsRequest())


def test_what_lies_beside_the_file_is_found_and_the_path_is_left_as_it_was(folder: Path) -> None:
    path, argv = list(sys.path), sys.argv
    loaded = made(folder).load()
    assert (sys.path, sys.argv) == (path, argv)
    assert loaded.weights.source == "default:net.py:make"
    files = {"net.py", "ckpt.pt", "helper_beside.py", "late_beside/__init__.py", "late_beside/inner.py"}
    assert set(loaded.code_identity["files"]) == files


def retrain(folder: Path) -> None:
    trained(folder, 2.0)


def edit_module(folder: Path) -> None:
    (folder / "helper_beside.py").write_text("import torch\nactivation = torch.nn.GELU\n")


def edit_late_module(folder: Path) -> None:
    (folder / "late_beside" / "inner.py").write_text("import torch\nlast = torch.nn.Softplus\n")


@pytest.mark.parametrize("change", [retrain, edit_module, edit_late_module])
def test_what_the_model_is_made_of_decides_its_key(folder: Path, change: Callable[[Path], None]) -> None:
    before = made(folder).recipe()
    assert made(folder).recipe() == before
    change(folder)
    after = made(folder).recipe()
    assert after["source"] | {"made": None} == before["source"] | {"made": None}
    assert after != before


def test_a_module_of_another_folder_is_not_taken_for_ones_own(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    for each in ("net.py", "ckpt.pt", "late_beside"):
        (folder / each).rename(other / each)
    (other / "helper_beside.py").write_text("import torch\nactivation = torch.nn.Tanh\n")
    (folder / "net.py").write_text(
        "from helper_beside import activation as make\nINPUTS = [dict(name='x', min=[1], opt=[1], max=[1])]"
    )
    first, second = made(folder), made(other)
    assert type(first.load().module.model).__name__ == "ReLU"
    assert type(second.load().module.model[1]).__name__ == "Tanh"
    assert type(first.fresh_module().model).__name__ == "ReLU"


def test_a_module_named_like_an_installed_one_is_its_own_only_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "polygraphy", raising=False)
    (folder / "polygraphy.py").write_text("mine = True\n")
    (folder / "net.py").write_text("import polygraphy\nassert polygraphy.mine\n" + NET)
    model = made(folder)
    model.load()
    assert "polygraphy" not in sys.modules
    import polygraphy

    model.fresh_module()
    assert sys.modules["polygraphy"] is polygraphy
    (folder / "altair.py").write_text(NET)
    PythonFileSource(folder / "altair.py", "make").load(WeightsRequest())
    assert not hasattr(sys.modules.get("altair"), "kept")


def test_weights_that_are_given_count_by_their_content(folder: Path) -> None:
    (folder / "net.py").write_text(NET.replace("    import late_beside", "    return torch.nn.Linear(3, 2)"))
    recipes = []
    for name in ("a.pt", "b.pt"):
        (folder / name).write_bytes((folder / "ckpt.pt").read_bytes())
        recipes.append(
            Model(PythonFileSource(folder / "net.py", "make"), WeightsRequest("file", path=folder / name)).recipe()
        )
    assert recipes[0] == recipes[1]


def test_loaded_once_for_all_that_asks(folder: Path) -> None:
    model = made(folder)
    model.recipe()
    first = model.load()
    model.recipe()
    assert model.load() is first


@pytest.mark.parametrize("factory", ["make", "drawn", "same"])
def test_a_fresh_module_has_the_same_weights_and_shares_none(folder: Path, factory: str) -> None:
    from optpipe.models.sources.weights import hash_module_weights

    model = made(folder, factory)
    first = model.load()
    before = hash_module_weights(first.module)
    fresh = model.fresh_module()
    assert hash_module_weights(fresh) == before
    fresh.half()
    assert hash_module_weights(first.module) == before
    assert hash_module_weights(model.fresh_module()) == before


@pytest.mark.slow
def test_what_it_prints_never_reaches_the_document(folder: Path) -> None:
    import subprocess

    loud = "import atexit\nprint('imported')\natexit.register(print, 'at exit')\n" + NET
    (folder / "net.py").write_text(loud.replace("layer = ", "import os; os.system('echo called'); layer = "))
    code = (
        "import sys; from optpipe.core.process import redirect_stdout_to_stderr\n"
        "from optpipe.models.sources.python_file import PythonFileSource\nfrom optpipe.core.entries import WeightsRequest\n"
        "from pathlib import Path\n"
        "with redirect_stdout_to_stderr():\n    PythonFileSource(Path('net.py'), 'make').load(WeightsRequest())\n"
        "print('{}')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout == "{}\n"
    assert [word in done.stderr for word in ("imported", "called", "at exit")] == [True] * 3


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import sys\nsys.exit('usage')", r"cannot be imported: SystemExit: usage \(net.py, line 2\)\n.*__main__"),
        (
            "import nothing_has_this.inner",
            r"ModuleNotFoundError: .*\(net.py, line 1\)\n.*provides nothing_has_this",
        ),
        ("def make(:", r"SyntaxError: .*\(net.py, line 1\)"),
        ("from . import x", r"ImportError: .*\n.*outside the package"),
        ("def make():\n    open('ckpt.pt')", r"raised FileNotFoundError: .* \(net.py, line 2\)\n.*working directory"),
        ("import urllib.error as e\ndef make(): raise e.URLError('no')", r"raised URLError: .*\n.*out of reach"),
        ("def make(): exit(3)", r"raised SystemExit: 3"),
    ],
)
def test_what_goes_wrong_in_it_is_said_with_its_line(tmp_path: Path, code: str, said: str) -> None:
    (tmp_path / "net.py").write_text(f"{code}\nINPUTS = [dict(name='x', min=[1], opt=[1], max=[1])]\n")
    with pytest.raises(BadInputError, match=said):
        made(tmp_path).load()
