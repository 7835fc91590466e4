"""The way out of an error in Python is Python."""

import pytest

import optpipe as op
from optpipe.core.errors import BadInputError
from optpipe.core.wording import Call

ERRORS = {
    "a dossier that is none": lambda folder: op.load(folder / "none"),
    "a folder that is no dossier": lambda folder: op.load(folder),
    "a dossier to verify": lambda folder: op.Dossier(folder / "none").verify(),
    "a policy that is none": lambda folder: op.Policy(folder / "none.toml"),
    "a policy without limits": lambda _: op.Policy(),
    "a model that is not built": lambda folder: op.Workspace(folder).builds("nothing"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_an_error_names_no_command(tmp_path, case):
    with pytest.raises(BadInputError) as caught:
        ERRORS[case](tmp_path)
    said = str(caught.value)
    assert "optpipe " not in said
    assert "--" not in said
    assert "(" in said  # a call


@pytest.mark.parametrize(
    ("call", "python"),
    [
        (Call("bench", "0123", "4567"), "builds.bench()"),
        (Call("deploy", "folder"), 'dossier.deploy("served")'),
        (Call("signoff"), "build.signoff(policy)"),
        (Call("signoff", init=True), "Policy("),
    ],
)
def test_a_next_step_is_a_call_of_the_library(call, python):
    assert call.in_python().startswith(python)


@pytest.mark.parametrize("kind", ["a file", "below a file", "a link to nothing"])
def test_a_workspace_that_is_no_folder_is_refused(tmp_path, kind):
    place = tmp_path / "place"
    if kind == "a link to nothing":
        place.symlink_to(tmp_path / "nothing")
    else:
        place.touch()
    with pytest.raises(BadInputError, match=r"workspace=.*place is .*\n"):
        op.Workspace(place / "sub" if kind == "below a file" else place).builds("digits")


def test_a_name_that_no_file_can_have_is_refused():
    with pytest.raises(BadInputError, match="too long for a file"):
        op.Model("n" * 5000)
