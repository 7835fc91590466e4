"""The command line of the verifier that shares no code with optpipe."""

import subprocess
import sys

import pytest
from tests.fakes.dossiers import VERIFIER


def run_verifier(*arguments):
    return subprocess.run(
        [sys.executable, str(VERIFIER), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["dossier", "--help"]])
def test_help_prints_the_usage(arguments) -> None:
    ran = run_verifier(*arguments)
    assert ran.returncode == 0
    assert "usage: " in ran.stdout
    assert "DOSSIER" in ran.stdout
    assert not ran.stderr


@pytest.mark.parametrize("arguments", [[], ["a", "b"], ["--quiet"]])
def test_wrong_use_is_said_in_a_line(arguments, tmp_path) -> None:
    ran = run_verifier(*(tmp_path / each if each != "--quiet" else each for each in arguments))
    assert ran.returncode == 2
    assert not ran.stdout
    assert len(ran.stderr.splitlines()) == 1
