"""Every command that writes where a user says refuses a place that cannot be written before it does anything else."""

from pathlib import Path

import pytest

from optpipe.cli.build import calibrate
from optpipe.cli.compare import compare
from optpipe.cli.deploy import deploy
from optpipe.cli.dossier import attest
from optpipe.cli.profile import RecordingOptions, profile
from optpipe.cli.signoff import run, signoff
from optpipe.cli.sweep import RunOptions, sweep
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
