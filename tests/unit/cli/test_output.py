"""What reaches the terminal, and where results may be written."""

from pathlib import Path

import pytest

from optpipe.cli import terminal as terminal_module
from optpipe.cli.build import calibrate
from optpipe.cli.compare import compare
from optpipe.cli.deploy import deploy
from optpipe.cli.dossier import attest
from optpipe.cli.profile import RecordingOptions, profile
from optpipe.cli.signoff import run, signoff
from optpipe.cli.sweep import RunOptions, sweep
from optpipe.cli.terminal import Terminal
from optpipe.core.errors import BadInputError

NOWHERE = Path("/proc/x")
COMMANDS = {
    "attest": lambda: attest(Path("none"), Path("none"), NOWHERE),
    "calibrate": lambda: calibrate("digits", output=NOWHERE),
    "compare": lambda: compare(output=NOWHERE),
    "deploy": lambda: deploy(Path("none"), "folder", NOWHERE),
    "profile --redacted": lambda: profile(recording=RecordingOptions(trace=Path("none"), redacted=NOWHERE)),
    "run": lambda: run("digits", Path("policy.toml"), output=NOWHERE),
    "run --junit": lambda: run("digits", Path("policy.toml"), junit=NOWHERE),
    "signoff": lambda: signoff("digits", Path("policy.toml"), output=NOWHERE),
    "signoff --junit": lambda: signoff("digits", Path("policy.toml"), junit=NOWHERE),
    "signoff --init": lambda: signoff(policy=NOWHERE, init=True),
    "sweep": lambda: sweep(["digits"], how=RunOptions(output=NOWHERE)),
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "policy.toml").write_text('schema = 1\nname = "x"\n[[latency]]\np50 = "5 ms"\nbatch_size = 1\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_a_place_that_cannot_be_written_is_refused_at_once(folder, command):
    option = command.partition(" ")[2].replace("--init", "--policy") or "--output"
    with pytest.raises(BadInputError, match=f"{option} /proc/x: /proc is not writable"):
        COMMANDS[command]()
    assert [each.name for each in folder.iterdir()] == ["policy.toml"]


@pytest.mark.parametrize("command", [run, signoff])
def test_a_step_summary_that_cannot_be_written_is_refused_at_once(command, monkeypatch):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "/proc/x")
    with pytest.raises(BadInputError, match="GITHUB_STEP_SUMMARY /proc/x: /proc is not writable"):
        command("digits", Path("policy.toml"))


def test_junit_does_not_lie_in_the_dossier_whose_seal_it_would_break():
    with pytest.raises(BadInputError, match=r"--junit out/junit\.xml: out is sealed when it is written"):
        signoff("digits", Path("policy.toml"), output=Path("out"), junit=Path("out/junit.xml"))


def test_reports_of_a_fleet_are_not_silently_left_out():
    with pytest.raises(BadInputError, match="--fleet writes no reports"):
        compare(fleet=True, output=Path("reports"))


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
