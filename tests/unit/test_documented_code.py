"""The pages that lead through the code name files and functions that exist."""

import ast
import re
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
PAGES = [
    CHECKOUT / "pipeline" / "README.md",
    *sorted((CHECKOUT / "docs" / "contributing").glob("*.md")),
]
MENTION = re.compile(r"`((?:\w+/)+\w+\.py)(?::(\w+))?`")


def list_names(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_files_and_functions_that_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    mentions = MENTION.findall(text)
    assert mentions or "{literalinclude}" in text, "it names code, or shows it"
    for file, name in mentions:
        places = [CHECKOUT / "pipeline" / "optpipe" / file, CHECKOUT / file]
        path = next((place for place in places if place.exists()), None)
        assert path is not None, f"{page.name}: {file} does not exist"
        assert not name or name in list_names(path), f"{page.name}: {file} has no {name}"


def test_every_environment_variable_is_in_the_reference() -> None:
    page = (CHECKOUT / "docs" / "reference" / "environment.md").read_text(encoding="utf-8")
    code = [path.read_text() for path in (CHECKOUT / "pipeline" / "optpipe").rglob("*.py")]
    read = {name for text in code for name in re.findall(r"\bOPTPIPE_[A-Z_]*[A-Z]\b", text)}
    assert {"OPTPIPE_WORKSPACE", "OPTPIPE_LONGEST_RUN_S"} <= read
    internal = {"OPTPIPE_PARENT", "OPTPIPE_MARKS", "OPTPIPE_RECORDING"}
    assert set(re.findall(r"^\| `(OPTPIPE_\w+)`", page, re.MULTILINE)) == read - internal
