"""`CALIBRATION` of a Python file: the same samples in every form, and errors of the user's code on one line."""

import numpy as np
import pytest

from optpipe.api.data import Data
from optpipe.core.card import InputSpec, ModelCard, Task
from optpipe.core.errors import BadInputError
from optpipe.core.events import SilentListener
from optpipe.models.inputs.drawn import store_data
from optpipe.models.inputs.program_data import draw_data, draw_python_file
from optpipe.models.inputs.tensor_set import read_tensor_set
from optpipe.workspace.store import Store

ROWS = """
import numpy as np
ROWS = np.arange(18, dtype=np.float32).reshape(6, 3)
"""
FORMS = {
    "an array": "CALIBRATION = ROWS",
    "by name": "CALIBRATION = {'x': ROWS}",
    "batches": "CALIBRATION = [ROWS[:4], ROWS[4:]]",
    "a function": "def CALIBRATION():\n    return ROWS",
    "a generator": "def CALIBRATION():\n    yield {'x': ROWS[:4]}\n    yield {'x': ROWS[4:]}",
    "a loader": (
        "import torch\n"
        "CALIBRATION = torch.utils.data.DataLoader(torch.from_numpy(ROWS), batch_size=4)"
    ),
    "a module beside the file": "from beside import ROWS as CALIBRATION",
    "an import while it runs": "def CALIBRATION():\n    from beside import ROWS\n    yield ROWS",
}


def write(folder, text):
    (folder / "beside.py").write_text(ROWS)
    (folder / "net.py").write_text(ROWS + text + "\n")
    return folder / "net.py"


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_same_samples(tmp_path, form) -> None:
    (tmp_path / "plain").mkdir()
    plain = draw_python_file(write(tmp_path / "plain", FORMS["an array"]))
    drawn = draw_python_file(write(tmp_path, FORMS[form]))
    assert drawn.count == plain.count == 6
    if "{" not in FORMS[form]:
        assert drawn.sha256 == plain.sha256


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "has no CALIBRATION\ndefine it"),
        ("CALIBRATION = None", "has no CALIBRATION"),
        ("CALIBRATION = 3", "holds no samples"),
        ("CALIBRATION = []", "net.py:CALIBRATION"),
        ("CALIBRATION = ['a', 'b']", "net.py"),
        ("def CALIBRATION():\n    raise RuntimeError('no disk')", r"no disk \(net.py, line 5\)"),
        (
            "def CALIBRATION():\n    yield ROWS\n    raise RuntimeError('no disk')",
            r"no disk \(net.py, line 6\)",
        ),
        ("def CALIBRATION(loader):\n    yield ROWS", "loader"),
        ("CALIBRATION = undefined", r"undefined.*net.py, line 4"),
        ("import sys\ndef CALIBRATION():\n    sys.exit(3)", "CALIBRATION fails: SystemExit"),
        ("CALIBRATION = (", "cannot be imported"),
    ],
)
def test_what_is_no_data_is_refused_with_its_place(tmp_path, text, reason) -> None:
    with pytest.raises(BadInputError, match=reason) as refused:
        draw_python_file(write(tmp_path, text))
    assert len(str(refused.value).splitlines()) <= 2


def test_a_path_gives_the_samples_that_the_file_gives_itself(tmp_path) -> None:
    path = write(tmp_path, FORMS["a function"])
    drawn = draw_python_file(path)
    assert Data(path).sha256 == Data(str(path)).sha256 == drawn.sha256
    assert len(Data(path, count=2)) == 2
    with pytest.raises(BadInputError, match="has no CALIBRATION"):
        Data(write(tmp_path, ""))


def test_reports_name_the_program_and_not_the_file_in_the_store(tmp_path) -> None:
    card = ModelCard(
        "net", "net.onnx", Task.OTHER, (InputSpec("x", "float32", (1, 3), (2, 3), (8, 3)),)
    )
    drawn = draw_python_file(write(tmp_path, FORMS["an array"]))
    stored = store_data(drawn, card, Store(tmp_path / "ws"), SilentListener())
    assert read_tensor_set(stored.path, card.inputs).name == "net.py:CALIBRATION"
    (tmp_path / "tensors.npz").write_bytes(stored.path.read_bytes())
    assert read_tensor_set(tmp_path / "tensors.npz", card.inputs).name == "tensors.npz"


@pytest.mark.parametrize(
    "names", [("file",), ("allow_pickle",), ("x.npy", "x"), ("labels", "label"), ("group", "y")]
)
def test_inputs_of_any_names_keep_their_values_labels_and_groups(tmp_path, names) -> None:
    inputs = tuple(InputSpec(name, "float32", (1, 3), (2, 3), (8, 3)) for name in names)
    columns = {
        name: np.arange(18, dtype=np.float32).reshape(6, 3) + 100 * place
        for place, name in enumerate(names)
    }
    marks = {"target": np.array([0, 1, 2, 0, 1, 2]), "groups": np.array([7, 7, 8, 8, 9, 9])}
    drawn = draw_data({**columns, **marks})
    card = ModelCard("net", "net.onnx", Task.CLASSIFICATION, inputs)
    found = store_data(drawn, card, Store(tmp_path / "ws"), SilentListener())
    samples = read_tensor_set(found.path, inputs)
    (rows,) = samples.parts
    order = [int(value) // 3 for value in rows[names[0]][:, 0]]
    assert sorted(order) == list(range(6))
    for name in names:
        assert (rows[name] == columns[name][order]).all()
    assert [each.label for each in samples.files] == [str(marks["target"][at]) for at in order]
    assert len({each.group for each in samples.files}) == 3


def test_inputs_that_take_every_name_of_labels_are_refused(tmp_path) -> None:
    names = ("labels", "label", "targets", "target")
    inputs = tuple(InputSpec(name, "float32", (1, 3), (2, 3), (8, 3)) for name in names)
    columns = dict.fromkeys(names, np.ones((6, 3), np.float32))
    card = ModelCard("net", "net.onnx", Task.CLASSIFICATION, inputs)
    drawn = draw_data({**columns, "truth": np.arange(6) % 2})
    with pytest.raises(BadInputError, match="rename one of them"):
        store_data(drawn, card, Store(tmp_path / "ws"), SilentListener())


ROWS_OF_X = np.arange(18, dtype=np.float32).reshape(6, 3)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (np.ma.masked_array(ROWS_OF_X, ROWS_OF_X == 3), "has masked values\nfill them"),
        (
            {"x": ROWS_OF_X, "labels": np.arange(6), "label": np.arange(6)},
            "several columns of truths",
        ),
        ({"x": ROWS_OF_X, "labels": np.full(6, np.inf)}, "the truth of sample 0 is infinite"),
    ],
)
def test_values_that_would_be_lost_are_refused(tmp_path, given, said) -> None:
    inputs = (InputSpec("x", "float32", (1, 3), (2, 3), (8, 3)),)
    card = ModelCard("net", "net.onnx", Task.CLASSIFICATION, inputs)
    with pytest.raises(BadInputError, match=said):
        store_data(draw_data(given), card, Store(tmp_path / "ws"), SilentListener())


def test_labels_beside_an_input_called_labels_do_not_replace_it(tmp_path) -> None:
    inputs = (InputSpec("labels", "float32", (1, 3), (2, 3), (8, 3)),)
    card = ModelCard("net", "net.onnx", Task.CLASSIFICATION, inputs)
    drawn = draw_data([({"labels": ROWS_OF_X}, np.arange(6))])
    found = store_data(drawn, card, Store(tmp_path / "ws"), SilentListener())
    samples = read_tensor_set(found.path, inputs)
    order = [int(value) // 3 for value in samples.parts[0]["labels"][:, 0]]
    assert [each.label for each in samples.files] == [str(at) for at in order]


def test_an_array_that_could_be_masked_and_is_not_is_taken() -> None:
    assert draw_data(np.ma.masked_array(ROWS_OF_X)).sha256 == draw_data(ROWS_OF_X).sha256
