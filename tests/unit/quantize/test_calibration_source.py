"""What is given to calibrate on is checked against the model's inputs before anything runs."""

import numpy as np
import pytest

from optpipe.core.card import InputSpec, ModelCard, Task
from optpipe.core.errors import BadInputError
from optpipe.models.inputs.tensor_set import read_tensor_set
from optpipe.quantize.calibrate import resolve_calibration_source
from optpipe.workspace.store import Store

CARD = ModelCard("net", "net.onnx", Task.OTHER, (InputSpec("x", "float32", (1, 3), (2, 3), (8, 3)),))
GENERATOR = "import numpy as np\nCALIBRATION = ({'x': np.ones((2, 3), np.float32)} for _ in range(4))\n"


def test_a_python_file_gives_tensors(tmp_path) -> None:
    (tmp_path / "data.py").write_text(GENERATOR)
    found = resolve_calibration_source(tmp_path / "data.py", CARD, None, Store(tmp_path / "workspace"))
    assert len(read_tensor_set(found, CARD.inputs).files) == 8


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("data.py", GENERATOR.replace("'x'", "'y'"), r"data\.py, batch 0 lacks input 'x'"),
        ("data.py", GENERATOR.replace("3)", "4)"), "2x4"),
        ("data.py", GENERATOR.replace("float32", "int64"), "int64"),
        ("data.py", "CALIBRATION = []", "holds no inputs of net"),
        ("data.json", '{"a": [1', "holds no inputs of net"),
        ("nan.npz", np.full((2, 3), np.nan, np.float32), "'x' contains NaN or Inf"),
    ],
)
def test_what_does_not_fit_is_said(tmp_path, name, content, said) -> None:
    if isinstance(content, str):
        (tmp_path / name).write_text(content)
    else:
        np.savez(tmp_path / name, x=content)
    with pytest.raises(BadInputError, match=said):
        resolve_calibration_source(tmp_path / name, CARD, None, Store(tmp_path / "workspace"))
