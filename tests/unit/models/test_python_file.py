"""A user's file is run as Python would run it, and what it reads decides the model."""

import compileall
import os
import sys
from pathlib import Path

import pytest

from optpipe.core.entries import WeightsRequest, weights_from_text
from optpipe.core.errors import BadInputError
from optpipe.core.transform import CenterCrop, Resize
from optpipe.models.export.exported import Model
from optpipe.models.sources import python_file
from optpipe.models.sources.python_file import PythonFileSource
from optpipe.models.sources.resolve import source_from_text
from optpipe.preprocess.preprocess import require_image_transform

FILE = """
import torch
from torchvision.transforms import v2
INPUTS = [{"name": "x", "dtype": "float32", "min": [1, 3, 16, 16], "opt": [2, 3, 16, 16], "max": [4, 3, 16, 16]}]
TRANSFORM = v2.Compose([v2.Resize(20), STEP, v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)])
make = lambda: torch.nn.Flatten()
"""


def test_its_compose_is_the_preprocessing(tmp_path):
    transform = require_image_transform(
        load(tmp_path, FILE.replace("STEP", "v2.CenterCrop(16)")).card
    )
    assert transform.geometry == (Resize((20,)), CenterCrop(16, 16))


def test_pictures_of_another_size_than_the_input_are_refused(tmp_path):
    with pytest.raises(
        BadInputError,
        match=r"produces float32 of shape 3×12×12 .CHW., but input x expects float32, 1x3x16x16",
    ):
        require_image_transform(load(tmp_path, FILE.replace("STEP", "v2.CenterCrop(12)")).card)


@pytest.mark.parametrize(("factory", "said"), [
    ("def make(): raise RuntimeError('boom')", "net.py:make raised RuntimeError: boom"),
    ("def make(): return 1", "net.py:make returned int, not a torch.nn.Module"),
    ("def make(): return nn.ReLU", "the class ReLU, not an instance"),
    ("make = nn.ReLU()", "is a module, not a factory"),
    ("def make(): return nn.Linear(8, 4).to(torch.complex64)", "weight is in complex64; return the module in float32"),
    ("def make(): return nn.LazyLinear(4)", "weight has no shape yet"),
    ("def make(): return nn.Linear(8, 4, device='meta')", "weight is on the meta device"),
    ("def make(): return torch.export.export(nn.ReLU(), (torch.ones(1),)).module()", "returned an exported program"),
])  # fmt: skip
def test_a_factory_that_gives_no_model_is_one_line(tmp_path, factory, said):
    imports = "import torch\nfrom torch import nn\n"
    with pytest.raises(BadInputError, match=said):
        load(tmp_path, f"{imports}INPUTS = [dict(name='x', min=[1], opt=[1], max=[1])]\n{factory}")


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ("3", "INPUTS must be a list"),
        ("dict(other=[])", "INPUTS describes other, not the factory make"),
        ("[('x', 'float32')]", "invalid input description"),
        ("[{'name': 'x', 'shape': [1, 8]}]", "lists of sizes for min, opt and max"),
        (
            "[dict(name='x', dtyp='int64', min=[1], opt=[1], max=[1])]",
            "input 'x': unknown field 'dtyp'",
        ),
        (
            "[dict(name='x', min=[1], opt=[1], max=[1], batch=1)]",
            "batch 1 is not one of its 1 axes",
        ),
        (
            "[dict(name='x', dtype='float', min=[1], opt=[2], max=[4])]",
            "unknown dtype float; choose from float32",
        ),
        ("[dict(name='x', min=[1], opt=[2], max=[4])] * 2", "two inputs have the same name 'x'"),
    ],
)
def test_inputs_that_are_none_are_one_line(tmp_path, inputs, said):
    with pytest.raises(BadInputError, match=said):
        load(tmp_path, f"import torch\nmake = torch.nn.ReLU\nINPUTS = {inputs}\n")


def test_defaults_that_the_file_sets_hold_for_its_own_code_only(tmp_path):
    import os

    import torch

    (tmp_path / "net.py").write_text(
        "import os\nimport torch\nos.chdir('/')\ntorch.set_grad_enabled(False)\ntorch.set_default_dtype(torch.float64)\n"
        "INPUTS = [dict(name='x', dtype=torch.float32, min=[1, 8], opt=[4, 8], max=[16, 8])]\n"
        "def make(): return torch.nn.Linear(8, 4).float()\n"
    )
    before = (os.getcwd(), torch.is_grad_enabled(), torch.get_default_dtype())  # noqa: PTH109
    source = PythonFileSource(tmp_path / "net.py", "make")
    first, again = (source.load(weights_from_text("default", 0)) for _ in range(2))
    assert before == (os.getcwd(), torch.is_grad_enabled(), torch.get_default_dtype())  # noqa: PTH109
    assert first.weights == again.weights


SAID = """
import torch
INPUTS = [dict(name="x", min=[1, 8], opt=[2, 8], max=[4, 8])]
TASK, LABELS = "classification", ["a", "b", "c"]
make = lambda: torch.nn.Linear(8, 3)
"""


def load(folder, text, card=None):
    (folder / "net.py").write_text(text)
    if card is None:
        return PythonFileSource(folder / "net.py", "make").load(weights_from_text("default", 0))
    (folder / "card.toml").write_text(f'name = "net"\nsource = "net.py:make"\n{card}')
    return source_from_text(str(folder / "card.toml")).load(weights_from_text("default", 0))


def test_a_file_says_its_task_and_labels(tmp_path):
    found = load(tmp_path, SAID)
    assert (found.card.task, found.card.labels) == ("classification", ("a", "b", "c"))


def test_a_card_takes_from_the_file_what_it_leaves_out(tmp_path):
    found = load(tmp_path, SAID, 'labels = ["x", "y", "z"]').card
    assert (found.name, found.task, found.labels) == ("net", "classification", ("x", "y", "z"))
    assert found.inputs[0].max == (4, 8)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            SAID.replace('"classification"', '"sorting"'),
            "TASK: unknown task 'sorting': .*tasks are classification",
        ),
        (SAID.replace('["a", "b", "c"]', "3"), "LABELS is not a list"),
        (SAID.replace("INPUTS", "INPUT"), "define INPUTS in it or write a model card"),
    ],
)
def test_what_it_says_wrongly_is_one_line(tmp_path, text, said):
    with pytest.raises(BadInputError, match=said):
        load(tmp_path, text)


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
    files = {
        "net.py",
        "ckpt.pt",
        "helper_beside.py",
        "late_beside/__init__.py",
        "late_beside/inner.py",
    }
    assert set(loaded.code_identity["files"]) == files


def test_the_files_of_a_package_elsewhere_are_not_the_model_s(tmp_path, monkeypatch) -> None:
    info = tmp_path / "site" / "thing-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: thing\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[x]\ny = thing:y\n")
    (info.parent / "thing.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "site")
    python_file._list_package_folders.cache_clear()
    text = "import importlib.metadata, torch, thing\ndef make():\n    importlib.metadata.entry_points()\n    return torch.nn.Linear(2, 2)"
    (tmp_path / "net.py").write_text(
        f"{text}\nINPUTS = [dict(name='x', dtype='float32', min=[1, 2], opt=[1, 2], max=[1, 2])]\n"
    )
    loaded = made(tmp_path).load()
    assert set(loaded.code_identity["files"]) <= {"net.py"}
    python_file._list_package_folders.cache_clear()


@pytest.mark.parametrize("name", ["ckpt.pt", "helper_beside.py", "late_beside/inner.py"])
def test_what_the_model_is_made_of_decides_its_key(folder: Path, name: str) -> None:
    before = made(folder).recipe()
    assert made(folder).recipe() == before
    if name == "ckpt.pt":
        trained(folder, 2.0)
    else:
        (folder / name).write_text((folder / name).read_text() + "\n")
    after = made(folder).recipe()
    assert after["source"] | {"made": None} == before["source"] | {"made": None}
    assert after != before


def test_a_module_of_another_folder_is_not_taken_for_ones_own(folder, tmp_path_factory):
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


def test_a_module_named_like_an_installed_one_is_its_own_only_there(folder, monkeypatch):
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
    (folder / "net.py").write_text(
        NET.replace("    import late_beside", "    return torch.nn.Linear(3, 2)")
    )
    recipes = []
    for name in ("a.pt", "b.pt"):
        (folder / name).write_bytes((folder / "ckpt.pt").read_bytes())
        weights = WeightsRequest("file", path=folder / name)
        recipes.append(Model(PythonFileSource(folder / "net.py", "make"), weights).recipe())
    assert recipes[0] == recipes[1]


@pytest.mark.parametrize("factory", ["make", "drawn", "same"])
def test_a_fresh_module_has_the_same_weights_and_shares_none(folder: Path, factory: str) -> None:
    from optpipe.models.sources.modules import hash_module_weights

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
    (folder / "net.py").write_text(
        loud.replace("layer = ", "import os; os.system('echo called'); layer = ")
    )
    code = (
        "import sys; from optpipe.core.process import redirect_stdout_to_stderr\n"
        "from optpipe.models.sources.python_file import PythonFileSource\nfrom optpipe.core.entries import WeightsRequest\n"
        "from pathlib import Path\n"
        "with redirect_stdout_to_stderr():\n    PythonFileSource(Path('net.py'), 'make').load(WeightsRequest())\n"
        "print('{}')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True
    )
    assert done.stdout == "{}\n"
    assert [word in done.stderr for word in ("imported", "called", "at exit")] == [True] * 3


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "import sys\nsys.exit('usage')",
            r"cannot be imported: SystemExit: usage \(net.py, line 2\)\n.*__main__",
        ),
        (
            "import nothing_has_this.inner",
            r"ModuleNotFoundError: .*\(net.py, line 1\)\n.*provides nothing_has_this",
        ),
        ("def make(:", r"SyntaxError: .*\(net.py, line 1\)"),
        ("from . import x", r"ImportError: .*\n.*outside the package"),
        (
            "def make():\n    open('ckpt.pt')",
            r"raised FileNotFoundError: .* \(net.py, line 2\)\n.*working directory",
        ),
        (
            "import urllib.error as e\ndef make(): raise e.URLError('no')",
            r"raised URLError: .*\n.*out of reach",
        ),
        ("def make(): exit(3)", r"raised SystemExit: 3"),
    ],
)
def test_what_goes_wrong_in_it_is_said_with_its_line(tmp_path: Path, code: str, said: str) -> None:
    (tmp_path / "net.py").write_text(
        f"{code}\nINPUTS = [dict(name='x', min=[1], opt=[1], max=[1])]\n"
    )
    with pytest.raises(BadInputError, match=said):
        made(tmp_path).load()


@pytest.mark.parametrize("name", ["net.py", "helper_beside.py", "late_beside/inner.py"])
def test_a_file_rewritten_within_a_second_runs_as_it_is_now(folder: Path, name: str) -> None:
    """Python's cached bytecode is current for it: same size, same second."""
    (folder / "net.py").write_text(
        "import torch, helper_beside\nfrom late_beside.inner import last\nown = 1\n"
        "INPUTS = [dict(name='x', dtype='float32', min=[1, 1], opt=[1, 1], max=[1, 1])]\n"
        "def make():\n    return torch.nn.Linear(own, helper_beside.own, bias=bool(last))\n"
    )
    (folder / "helper_beside.py").write_text("own = 1\n")
    (folder / "late_beside" / "inner.py").write_text("last = 1\nown = 1\n")
    for path in folder.rglob("*.py"):
        compileall.compile_file(path, quiet=1)
    changed = folder / name
    before = changed.stat()
    changed.write_text(
        changed.read_text().replace("own = 1", "own = 7").replace("last = 1", "last = 0")
    )
    os.utime(changed, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert changed.stat().st_size == before.st_size

    shapes = [tuple(each.shape) for each in made(folder).load().module.parameters()]
    expected = {"net.py": [(1, 7), (1,)], "helper_beside.py": [(7, 1), (7,)]}
    assert shapes == expected.get(name, [(1, 1)])
