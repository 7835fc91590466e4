"""Counts the size of the package and compares it with the limits of [tool.house] in pyproject.toml.

`uv run python .ci/house.py` prints the table and exits with 1 if a count is over its limit. A limit only goes down.

lines       of the package's .py files, with blank lines and docstrings
files       of the package, .py only
rooms       folders directly in the package
imports     pairs (room, other room) with an import, also under TYPE_CHECKING
circles     pairs of rooms that import each other
verbs       top-level commands
parameters  options and arguments of all commands; --help is left out
records     dataclasses and msgspec Structs
single      functions of a module that are named exactly once
dicts       occurrences of dict[str, Any]
test-lines  of the .py files in tests/
"""

import ast
import sys
import tomllib
from collections import Counter
from pathlib import Path

import click
import typer

from optpipe.cli.app import app

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "pipeline" / "optpipe"


def count_house() -> dict[str, int]:
    """Every count by its name in [tool.house]."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
    functions: list[str] = []
    uses: Counter[str] = Counter()
    pairs: set[tuple[str, str]] = set()
    records = 0
    for path, text in texts.items():
        tree = ast.parse(text)
        functions += [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        room = path.relative_to(PACKAGE).with_suffix("").parts[0]
        for node in ast.walk(tree):
            match node:
                case ast.Name(id=name) | ast.Attribute(attr=name):
                    uses[name] += 1
                case ast.ImportFrom(module=str(module)) if module.startswith("optpipe."):
                    pairs.add((room, module.split(".")[1]))
                case ast.ClassDef():
                    marks = [ast.unparse(mark) for mark in (*node.decorator_list, *node.bases)]
                    records += any("dataclass" in mark or mark.endswith("Struct") or "Record" in mark for mark in marks)
    pairs = {(one, other) for one, other in pairs if one != other}
    command = typer.main.get_command(app)
    return {
        "lines": sum(len(text.splitlines()) for text in texts.values()),
        "files": len(texts),
        "rooms": sum(each.is_dir() and any(each.rglob("*.py")) for each in PACKAGE.iterdir()),
        "imports": len(pairs),
        "circles": sum((other, one) in pairs for one, other in pairs) // 2,
        "verbs": len(command.commands),  # type: ignore[attr-defined] # app is a group
        "parameters": count_parameters(command),
        "records": records,
        "single": sum(uses[name] == 1 for name in functions),
        "dicts": sum(text.count("dict[str, Any]") for text in texts.values()),
        "test-lines": sum(
            len(each.read_text(encoding="utf-8").splitlines()) for each in (ROOT / "tests").rglob("*.py")
        ),
    }


def count_parameters(command: click.Command, *, top: bool = True) -> int:
    """Visible options and arguments of a command and of all commands below it; a group's are those of the whole tool."""
    own = 0 if top else sum(not getattr(each, "hidden", False) and each.name != "help" for each in command.params)
    below = getattr(command, "commands", {}).values()
    return own + sum(count_parameters(each, top=False) for each in below)


def check_limits(table: str, counts: dict[str, int]) -> bool:
    """Prints each count with its limit in [tool.TABLE] of pyproject.toml; returns whether one is over."""
    limits = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][table]
    for name, count in counts.items():
        print(f"{name:12}{count:>8}   limit {limits[name]:>6}{'   over' if count > limits[name] else ''}")
    return any(count > limits[name] for name, count in counts.items())


if __name__ == "__main__":
    sys.exit(check_limits("house", count_house()))
