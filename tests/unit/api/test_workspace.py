"""A workspace is one place, wherever the program goes."""

from pathlib import Path

import pytest
import torch

import optpipe as op
from optpipe.core.errors import BadInputError
from optpipe.core.wording import Call, suggest_for


def test_a_relative_workspace_stays_where_it_was_made(tmp_path, monkeypatch) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "first")
    relative = op.Workspace("work")
    monkeypatch.chdir(tmp_path / "second")
    assert relative.store.workspace == tmp_path / "first" / "work"
    assert relative != op.Workspace("work")
    assert relative == op.Workspace(tmp_path / "first" / "work")
    assert repr(relative) == "Workspace('work')"


@pytest.mark.parametrize("path", [None, ".optpipe", Path.cwd() / ".optpipe"])
def test_no_command_names_the_usual_workspace(path, monkeypatch) -> None:
    monkeypatch.delenv("OPTPIPE_WORKSPACE", raising=False)
    with suggest_for(op.Workspace(path).store.workspace):
        assert Call("store ls").on_terminal() == "optpipe store ls"


def test_a_module_without_shapes_is_called_first(tmp_path) -> None:
    with pytest.raises(BadInputError, match=r"'0' \(LazyLinear\) has parameters without a shape"):
        op.Model(torch.nn.Sequential(torch.nn.LazyLinear(4)), torch.zeros(2, 8), workspace=tmp_path)


def test_an_iterator_that_was_used_up_is_named_as_one() -> None:
    samples = iter([torch.zeros(2, 8)])
    next(samples)
    with pytest.raises(
        BadInputError, match=r"yields nothing\n.*an iterator gives its samples once"
    ):
        op.Data(samples)
