"""The pages on how to add a backend, a metric, a score, and a task, followed in an empty folder as they are written."""

import re
import tomllib
from pathlib import Path

import pytest

from optpipe.core.plugins import VARIABLE
from tests.integration.test_readme import run_shell

ROOT = Path(__file__).parents[2]
PAGES = ("add-a-backend", "add-a-metric", "add-a-score", "add-a-task")
SHOWN = re.compile(r"^```\{literalinclude\} (\S+/(optpipe_\w+\.py))$", re.MULTILINE)
PROJECT = re.compile(r"^```toml\n(\[project\]\n.*?)^```", re.MULTILINE | re.DOTALL)
COMMANDS = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
INSTALL = "pip install ."
CHOSEN = {"add-a-backend": "toy fp32", "add-a-metric": "spread", "add-a-score": "top3"}
"""What the last command's answer has of it."""


def install(folder: Path) -> None:
    """What `pip install .` adds to the path, without a network."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    name = project["name"].replace("-", "_")
    described = folder / f"{name}-{project['version']}.dist-info"
    described.mkdir()
    head = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (described / "METADATA").write_text(head)
    lines = [
        line
        for group, entries in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{key} = {value}" for key, value in entries.items()))
    ]
    (described / "entry_points.txt").write_text("\n".join([*lines, ""]))


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_followed_in_an_empty_folder(page, tmp_path, monkeypatch) -> None:
    """A bench may be INVALID, for other work may disturb it; it shows the figure all the same."""
    monkeypatch.delenv(VARIABLE, raising=False)
    text = (ROOT / "docs" / "contributing" / f"{page}.md").read_text()
    (tmp_path / "pyproject.toml").write_text(*PROJECT.findall(text))
    (shown, name), *_ = SHOWN.findall(text)
    (tmp_path / name).write_text((ROOT / "docs" / "contributing" / shown).read_text())
    lines = "".join(COMMANDS.findall(text)).splitlines()
    assert lines.count(INSTALL) == 1
    for line in lines:
        if line == INSTALL:
            install(tmp_path)
            continue
        ran = run_shell(line, tmp_path, PYTHONPATH=str(tmp_path), COLUMNS="250")
        assert ran.returncode == 0, f"{line}\n{ran.stderr}"
    assert CHOSEN.get(page, "evenness") in ran.stdout
