"""Commands in messages mean the workspace of the command that gives them, and all are made in one place."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

import optpipe
from optpipe.cli import shown
from optpipe.commands.outcome import Outcome
from optpipe.core.advice import advised, advising_for
from optpipe.errors import BadInputError

WITH_WORKSPACE = "run|build|evaluate|calibrate|preprocess|bench|profile|compare|signoff|approve|ls|show|rm|gc"


def test_advice_names_the_workspace_that_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPTPIPE_WORKSPACE", raising=False)
    assert advised("ls") == "optpipe ls"
    assert advised("ls", Path(".optpipe")) == "optpipe ls"
    assert advised("ls", Path("my work")) == "optpipe ls --workspace 'my work'"
    with advising_for(Path("there")):
        assert advised("bench digits") == "optpipe bench digits --workspace there"
        assert advised("ls", Path("here")) == "optpipe ls --workspace here", "what is said of a store is of that one"
    assert advised("ls") == "optpipe ls"
    monkeypatch.setenv("OPTPIPE_WORKSPACE", str(tmp_path))
    assert advised("ls", tmp_path) == "optpipe ls"
    assert advised("ls", Path(".optpipe")) == "optpipe ls --workspace .optpipe"


def test_messages_and_texts_of_a_command_know_its_workspace(capsys: pytest.CaptureFixture[str]) -> None:
    def command(workspace: Path, works: bool) -> Outcome:
        if works:
            return Outcome({}, lambda: advised("gc"))
        raise BadInputError(advised("build digits"))

    for works in (True, False):
        with pytest.raises(typer.Exit):
            shown(command)(workspace=Path("mine"), works=works)
    said = capsys.readouterr()
    assert "optpipe gc --workspace mine" in said.out
    assert "optpipe build digits --workspace mine" in said.err


def texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The texts of a module that may be shown: no documentation, and no help of an option."""
    silent = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            silent.add(id(node.value))
        if isinstance(node, ast.keyword) and node.arg == "help":
            silent.add(id(node.value))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in silent:
            yield node.lineno, node.value


def test_no_command_is_quoted_past_the_one_place() -> None:
    root = Path(optpipe.__file__).parent
    quoted = re.compile(rf"`optpipe ({WITH_WORKSPACE})\b")
    found = [
        f"{path.relative_to(root)}:{line}: {text}"
        for path in sorted(root.rglob("*.py"))
        for line, text in texts(ast.parse(path.read_text(encoding="utf-8")))
        if quoted.search(text)
    ]
    assert found == []
