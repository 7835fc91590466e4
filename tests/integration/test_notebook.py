"""The tutorial notebook runs in a real kernel, as a reader runs it."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.slow
NOTEBOOK = Path(__file__).parents[2] / "docs" / "tutorials" / "library.ipynb"


def test_the_notebook_is_stored_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    code = [each for each in notebook.cells if each.cell_type == "code"]
    assert not any(each.outputs or each.execution_count for each in code)


def test_the_notebook_runs_and_prints_no_noise(tmp_path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert not [each for each in outputs if each.output_type == "stream" and each.name == "stderr"]
    shown = [each.data["text/plain"] for each in outputs if "data" in each]
    assert any(each.startswith("Verdict(PASS") for each in shown)
    assert "'PASS'" in shown
    assert not any(" object at 0x" in each for each in shown)
    assert (tmp_path / "served").is_dir()
