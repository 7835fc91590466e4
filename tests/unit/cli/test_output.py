"""What reaches the terminal, and where results may be written."""

import re
from contextlib import nullcontext
from pathlib import Path

import pytest
from tests.command_line import call

from optpipe.cli.bench import compare
from optpipe.cli.build import calibrate
from optpipe.cli.ship import deploy
from optpipe.cli.signoff import DossierOptions, attest, run, signoff, verify
from optpipe.core.errors import BadInputError, StageError
from optpipe.report import progress as terminal_module
from optpipe.report.progress import Terminal

NOWHERE = Path("/proc/x")
POLICY = Path("policy.toml")
COMMANDS = {
    "attest": lambda: call(attest, Path("none"), key=Path("none"), output=NOWHERE),
    "calibrate": lambda: call(calibrate, "digits", output=NOWHERE),
    "compare": lambda: call(compare, output=NOWHERE),
    "deploy": lambda: call(deploy, dossier=Path("none"), to="folder", output=NOWHERE),
    "run": lambda: call(run, "digits", POLICY, how=DossierOptions(output=NOWHERE)),
    "signoff": lambda: call(
        signoff, model="digits", policy=POLICY, how=DossierOptions(output=NOWHERE)
    ),
    "signoff --init": lambda: call(signoff, policy=NOWHERE, init=True),
    "verify --badge": lambda: call(verify, Path("none"), badge=NOWHERE),
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "policy.toml").write_text(
        'schema = 1\nname = "x"\n[[latency]]\np50 = "5 ms"\nbatch_size = 1\n'
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_a_place_that_cannot_be_written_is_refused_at_once(folder, command):
    option = command.partition(" ")[2].replace("--init", "--policy") or "--output"
    with pytest.raises(BadInputError, match=f"{option} /proc/x: /proc is not writable"):
        COMMANDS[command]()
    assert [each.name for each in folder.iterdir()] == ["policy.toml"]


def test_a_badge_does_not_lie_in_the_dossier_whose_seal_it_would_break():
    with pytest.raises(
        BadInputError, match=r"--badge out/badge\.svg: a file in the dossier would break its seal"
    ):
        call(verify, Path("out"), badge=Path("out/badge.svg"))


@pytest.mark.parametrize(
    "said", ["uv pip install optpipe[hf]", "cannot read [/data/1.jpg]", "no [red] here"]
)
def test_brackets_in_a_warning_or_a_step_are_text(capfd, said):
    with Terminal() as terminal:
        terminal.warn(said)
        with terminal.step(said):
            pass
    assert terminal.warnings == [said]
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == f"warning: {said}"
    assert lines[1].startswith(f"{said}: ")


def warn_and_raise(error, *, in_step):
    with Terminal() as terminal, terminal.step("read") if in_step else nullcontext():
        terminal.warn("one build cannot run here")
        raise error


@pytest.mark.parametrize(
    ("error", "in_step", "warned"),
    [(BadInputError(), False, 0), (BadInputError(), True, 1), (StageError(), False, 1)],
)
def test_what_is_refused_before_any_step_is_not_preceded_by_warnings(capfd, error, in_step, warned):
    with pytest.raises(type(error)):
        warn_and_raise(error, in_step=in_step)
    assert capfd.readouterr().err.count("one build cannot run here") == warned


def test_a_long_warning_is_one_line_in_a_log(capfd):
    with Terminal() as terminal:
        terminal.warn("word " * 60 + "end")
    assert capfd.readouterr().err.count("\n") == 1


def test_a_long_step_says_in_a_log_that_it_still_runs(capfd, monkeypatch):
    monkeypatch.setattr(terminal_module, "HEARTBEAT_S", 0.01)
    with Terminal() as terminal, terminal.step("export"):
        while "export: running for " not in (said := capfd.readouterr().err):
            pass
    assert "export: 0" not in said
    with Terminal() as terminal, terminal.step("measure", total=4) as step:
        step.advance()
        while not re.search(
            r"measure: running for \d+ s, 1 of 4, about \d+ s left", capfd.readouterr().err
        ):
            pass
