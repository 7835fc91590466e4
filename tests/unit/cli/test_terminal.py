import pytest

from optpipe.cli import terminal as terminal_module
from optpipe.cli.terminal import Terminal


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


def test_a_long_warning_is_one_line_in_a_log(capfd):
    with Terminal() as terminal:
        terminal.warn("word " * 60 + "end")
    assert capfd.readouterr().err.count("\n") == 1


def test_a_long_step_says_in_a_log_that_it_still_runs(capfd, monkeypatch):
    monkeypatch.setattr(terminal_module, "HEARTBEAT_S", 0.01)
    with Terminal() as terminal, terminal.step("export"):
        while "export: running for 0 s" not in (said := capfd.readouterr().err):
            pass
    assert "export: 0" not in said
