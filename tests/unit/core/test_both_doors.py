"""Every error, warning, and note of the package is made as its place makes it, and worded for the terminal and for Python.

What only a run knows (a path, a number, another text) is an X; a choice between two texts gives both. So the sentences are those
that a user reads, from every place that can give one.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from itertools import islice, product
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.syntax import parse_file

import optpipe.core
from optpipe.core import errors
from optpipe.core.errors import OptpipeError, make_message
from optpipe.core.wording import ARGUMENTS, Argument, Call, Message, join_texts

PACKAGE = Path(optpipe.core.__file__).parents[1]
ERRORS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, OptpipeError)
}
UNKNOWN, MOST_FORMS = "X", 16
OF_PYTHON = re.compile(
    r"\b(?:builds|workspace|dossier|build|model|Model|Policy)\.\w+\(|\w+\(\.\.\.|\b(?:True|False|None)\b|(?<![-\w])\w+=[\[({\"]"
)
"""What only Python's door says."""
LIBRARY_ONLY = ("api/",)
"""Rooms whose sentences the terminal never shows."""


def evaluate(node: ast.expr | None, names: dict[str, ast.expr]) -> Iterator[Any]:
    """The values that an expression of texts can have."""
    match node:
        case None:
            yield None
        case ast.Constant():
            yield node.value
        case ast.JoinedStr():
            parts = [
                [each.value] if isinstance(each, ast.Constant) else [UNKNOWN]
                for each in node.values
            ]
            yield "".join(str(each[0]) for each in parts)
        case ast.BinOp(op=ast.Add()):
            for left, right in product(
                evaluate(node.left, names), list(evaluate(node.right, names))
            ):
                yield join_texts("", (text_of(left), text_of(right)))
        case ast.IfExp():
            yield from evaluate(node.body, names)
            yield from evaluate(node.orelse, names)
        case ast.Name() if node.id in names:
            yield from evaluate(
                names[node.id], {key: each for key, each in names.items() if key != node.id}
            )
        case ast.Tuple() | ast.List():
            made = [next(evaluate(each, names)) for each in node.elts]
            yield tuple(made) if isinstance(node, ast.Tuple) else made
        case ast.Call(func=ast.Name(id="Argument" | "Call" | "make_call" as called)):
            yield make_named(called, node, names)
        case _:
            yield UNKNOWN


def text_of(value: Any) -> str:
    return value if isinstance(value, str) else UNKNOWN


def make_named(called: str, node: ast.Call, names: dict[str, ast.expr]) -> Any:
    words = [next(evaluate(each, names)) for each in node.args if not isinstance(each, ast.Starred)]
    options = {each.arg: next(evaluate(each.value, names)) for each in node.keywords if each.arg}
    if called == "Argument":
        return Argument(*words, **options)
    return Call(*words, **options) if words else UNKNOWN


@cache
def list_messages() -> list[tuple[str, Message]]:
    """Each text that the package can give its user, and the place that makes it."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).as_posix()
        for function in ast.walk(parse_file(path)):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                names = list_assigned(function)
                for node in ast.walk(function):
                    if isinstance(node, ast.Call):
                        place = f"{room}:{node.lineno}"
                        found += [(place, each) for each in make_messages(node, names)]
    return found


def list_assigned(function: ast.AST) -> dict[str, ast.expr]:
    """The names that a function assigns once, with what it assigns."""
    assigned: dict[str, list[ast.expr]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            assigned.setdefault(node.targets[0].id, []).append(node.value)
    return {name: values[0] for name, values in assigned.items() if len(values) == 1}


def make_messages(node: ast.Call, names: dict[str, ast.expr]) -> Iterator[Message]:
    called = ast.unparse(node.func)
    if called in ERRORS:
        keywords = {each.arg: each.value for each in node.keywords if each.arg}
        given = [node.args[0] if node.args else None, *map(keywords.get, ("argument", "remedy"))]
        forms = product(*(list(islice(evaluate(each, names), MOST_FORMS)) for each in given))
        for problem, argument, remedy in islice(forms, MOST_FORMS):
            place = UNKNOWN if "place" in keywords else None
            yield ERRORS[called](
                text_of(problem or ""), place=place, argument=argument, remedy=remedy
            ).message
    elif called.endswith(("listener.warn", "listener.inform")) and node.args:
        for value in islice(evaluate(node.args[0], names), MOST_FORMS):
            yield Message(text_of(value))


def test_most_places_give_a_sentence() -> None:
    messages = list_messages()
    told = [each for each in messages if str(each[1]).strip("X\n: ")]
    assert len(told) > 900
    assert len({place.partition("/")[0] for place, _ in told}) >= 14  # rooms


def test_python_is_told_of_no_option_that_is_an_argument() -> None:
    flags = "|".join(sorted(re.escape(each.replace("_", "-")) for each in ARGUMENTS))
    option = re.compile(rf"--(?:no-)?(?:{flags})(?![\w-])")
    wrong = [
        f"{place}: {message.in_python()!r}"
        for place, message in list_messages()
        if not place.startswith("cli/")
        for text in [leave_out_commands(message)]
        if option.search(text)
    ]
    assert not wrong


def leave_out_commands(message: Message) -> str:
    """What Python is told, without the commands that the library lacks."""
    parts = [
        ""
        if isinstance(part, Call) and part.find_library_call() is None
        else leave_out_commands(part)
        if isinstance(part, Message) and part.parts
        else part.in_python()
        if isinstance(part, Message)
        else part
        for part in message.parts
    ]
    return "".join(parts)


def test_the_terminal_is_told_nothing_of_python() -> None:
    wrong = [
        f"{place}: {message.on_terminal()!r}"
        for place, message in list_messages()
        if not place.startswith(LIBRARY_ONLY) and OF_PYTHON.search(message.on_terminal())
    ]
    assert not wrong


@pytest.mark.parametrize("door", [Message.on_terminal, Message.in_python])
def test_a_message_is_a_problem_and_at_most_a_way_out(door) -> None:
    wrong = [
        f"{place}: {door(message)!r}"
        for place, message in list_messages()
        for lines in [door(message).split("\n")]
        if len(lines) > 2
        or not all(line.strip() for line in lines)
        or make_message(door(message)) == ""
    ]
    assert not wrong
