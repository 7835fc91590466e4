"""The README's commands exist as written: each `optpipe …` line of a `sh` block is checked against the command's own options.

A line that only shows a form ends in `# form` and is left out.
"""

import re
import shlex
from pathlib import Path

import pytest

from tests.command_line import parse_command

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```sh\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def commands():
    for line in "\n".join(BLOCKS).splitlines():
        if line.strip().endswith("# form"):
            continue
        words = shlex.split(line, comments=True)
        for position, word in enumerate(words):
            if word == "optpipe":
                yield shlex.join(words[position:])


COMMANDS = tuple(commands())


def test_the_walk_is_in_the_readme():
    named = {line.split()[1] for line in COMMANDS}
    assert {"build", "evaluate", "preprocess", "bench", "profile", "compare", "signoff", "verify", "run"} <= named


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_parses(line, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    parse_command(line)


def test_links_lead_somewhere():
    links = re.findall(r"\]\((?!https?:|#)([^)]+)\)", README)
    assert links
    assert not [link for link in links if not (ROOT / link.partition("#")[0]).exists()]


def test_short_enough_to_be_read():
    assert len(README.splitlines()) < 200
