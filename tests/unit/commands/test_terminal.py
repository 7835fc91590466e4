import pytest

from optpipe.commands.terminal import Terminal


@pytest.mark.parametrize("said", ["uv pip install optpipe[hf]", "cannot read [/data/1.jpg]", "no [red] here"])
def test_brackets_in_a_warning_or_a_step_are_text(capfd, said):
    with Terminal() as terminal:
        terminal.warn(said)
        with terminal.step(said):
            pass
    assert terminal.warnings == [said]
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == f"warning: {said}"
    assert lines[1].startswith(f"{said}: ")
