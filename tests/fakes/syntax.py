"""The syntax trees of Python files, each parsed once for all laws over the code."""

import ast
from functools import cache
from pathlib import Path


@cache
def parse_file(path: Path) -> ast.Module:
    """The tree of a file; nobody changes it."""
    return ast.parse(path.read_text(encoding="utf-8"))
