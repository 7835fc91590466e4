"""The container recipe, as far as it can be checked without a network or a daemon.

Nothing pulls the base image here. What is copied must be all that a wheel needs, each command must be one that exists, and each shell
line must parse.
"""

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.command_line import parse_command

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Containerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def list_instructions():
    """(keyword, rest) of each instruction, with continued lines joined."""
    lines = [each for each in TEXT.splitlines() if not each.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [tuple(each.split(None, 1)) for each in joined.splitlines() if each.strip()]


def list_copied():
    """The paths of the clone that the image gets."""
    rests = [shlex.split(rest) for keyword, rest in list_instructions() if keyword == "COPY"]
    return {source for *sources, _ in rests for source in sources}


def test_the_image_gets_what_the_package_is_built_from_and_nothing_that_is_not_there():
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {"pyproject.toml", PROJECT["project"]["readme"], *PROJECT["project"]["license-files"]}
    needed |= {Path(each).parts[0] for each in (*wheel["packages"], *wheel["force-include"])}
    assert list_copied() == needed
    assert [each for each in needed if not (ROOT / each).exists()] == []


def test_the_context_holds_what_is_copied():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored
    assert {each[1:] for each in ignored if each.startswith("!")} == list_copied()


def test_every_shell_line_parses_and_every_extra_exists():
    runs = [rest for keyword, rest in list_instructions() if keyword == "RUN"]
    assert runs
    for each in runs:
        checked = subprocess.run(
            ["bash", "-n", "-c", each], capture_output=True, text=True, check=False
        )
        assert checked.returncode == 0, checked.stderr
    extras = set(re.findall(r"--extra (\S+)", " ".join(runs)))
    assert extras <= set(PROJECT["project"]["optional-dependencies"])


def test_it_names_a_base_and_keeps_to_known_instructions():
    known = {"ARG", "FROM", "RUN", "ENV", "WORKDIR", "COPY", "ENTRYPOINT", "CMD"}
    assert {keyword for keyword, _ in list_instructions()} <= known
    assert re.search(r"(?m)^ARG BASE=nvidia/cuda:13\.\S+-base-\S+$", TEXT)
    assert "latest" not in TEXT


@pytest.mark.parametrize("line", ["optpipe doctor"])
def test_what_it_runs_is_a_command(line):
    rests = dict(list_instructions())
    assert rests["ENTRYPOINT"] == '["optpipe"]'
    assert rests["CMD"] == f'["{line.split()[1]}"]'
    parse_command(line)
