"""Errors as data: what they name exists in the command line and in the library, and each door words it in its own way."""

import ast
import inspect
import pickle
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.syntax import parse_file
from typer.main import get_command

import optpipe as op
import optpipe.core
from optpipe.api.bench import BenchOptions
from optpipe.api.door import speak_of_arguments
from optpipe.cli.app import app
from optpipe.core.errors import BadInputError, OptpipeError
from optpipe.core.load import LoadSpec
from optpipe.core.message_wire import message_from_text, text_from_message
from optpipe.core.params import list_fields
from optpipe.core.wording import (
    ARGUMENTS,
    LIBRARY,
    Argument,
    Call,
    join_texts,
    suggest_for,
    word_for_python,
)

PACKAGE = Path(optpipe.core.__file__).parents[1]


@cache
def list_commands() -> dict[str, frozenset[str]]:
    """The options of each verb, and the names of its settings, read from the command line itself."""
    found: dict[str, frozenset[str]] = {}

    def walk(context: Any) -> None:
        options = set()
        for param in context.command.params:
            for flag in (*param.opts, *param.secondary_opts):
                options.add(flag)
            if "--set" in param.opts:
                names = param.help.partition(": ")[2].rstrip(".").split(", ")
                options |= {f"--set {name}" for name in names}
        found[context.command_path.removeprefix("optpipe").strip()] = frozenset(options)
        for name in getattr(context.command, "commands", {}):
            command = context.command.commands[name]
            walk(command.make_context(name, [], parent=context, resilient_parsing=True))

    walk(get_command(app).make_context("optpipe", [], resilient_parsing=True))
    found["signoff"] |= found["signoff judge"]
    return found


VERBS = sorted({name.split()[0] for name in list_commands() if name})
LITERAL = re.compile(rf"(?<![\w-])--[a-z]|\boptpipe (?:{'|'.join(VERBS)})\b")
RELEVANT = re.compile(rf"{LITERAL.pattern}|\b(?:Argument|Call)\(|\bargument=")


@cache
def list_named() -> list[tuple[str, ast.Call]]:
    """Every `Argument(...)`, `Call(...)`, and `argument="..."` outside of the command line, with its place."""
    named = []
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE)
        text = path.read_text()
        if room.parts[0] == "cli" or room.name == "wording.py" or not RELEVANT.search(text):
            continue
        nodes = ast.walk(parse_file(path))
        named += [(f"{room}:{each.lineno}", each) for each in nodes if isinstance(each, ast.Call)]
    return named


def read_text(node: ast.expr | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


@pytest.mark.slow
def test_every_named_argument_is_an_option():
    known = frozenset().union(*list_commands().values())
    wrong, count = [], 0
    for place, node in list_named():
        given = next((each.value for each in node.keywords if each.arg == "argument"), None)
        called = node.func.id if isinstance(node.func, ast.Name) else ""
        name = read_text(node.args[0]) if called == "Argument" and node.args else read_text(given)
        if name is None:
            continue
        count += 1
        setting = any(each.arg == "setting" for each in node.keywords)
        value = node.args[1] if called == "Argument" and len(node.args) > 1 else None
        switched_off = isinstance(value, ast.Constant) and value.value is False
        option = str(Argument(name, False if switched_off else None))
        flag = option.replace("--", "--set ", 1) if setting else option
        if flag not in known:
            wrong.append(f"{place}: {flag}")
    assert count > 50
    assert not wrong


PASS_ON = (
    "core/params.py",
    "core/message_wire.py",
    "models/artifacts/model_names.py",
    "quantize/recovery/torch_operators.py",
)
"""Files that pass on the verb of a call they are given, and the last, whose `Call` is that of an operator."""


@pytest.mark.slow
def test_every_named_call_is_a_command_with_these_options():
    commands, wrong, count = list_commands(), [], 0
    for place, node in list_named():
        if not isinstance(node.func, ast.Name) or node.func.id not in ("Call", "make_call"):
            continue
        if place.startswith(PASS_ON):
            continue
        verb = read_text(node.args[0]) if node.args else None
        count += 1
        if verb not in commands:
            wrong.append(f"{place}: {verb}")
            continue
        for each in node.keywords:
            named = (each.arg or "").replace("_", "-")
            flag = f"--set {named}" if "setting=True" in ast.unparse(each.value) else f"--{named}"
            if each.arg and flag not in commands[verb]:
                wrong.append(f"{place}: {verb} {flag}")
    assert count > 2
    assert not wrong


METHODS: dict[str, tuple[Any, Any]] = {
    "build": (op.Model.__init__, op.Model.build),
    "evaluate": (op.Workspace.builds, op.Builds.evaluate),
    "signoff": (None, op.Build.signoff),
    "verify": (None, op.Dossier.verify),
    "deploy": (None, op.Dossier.deploy),
}


@pytest.mark.parametrize("verb", METHODS)
def test_the_library_takes_the_arguments_that_its_table_lists(verb):
    _, selecting, passing = LIBRARY[verb]
    for method, names in zip(METHODS[verb], (selecting, passing), strict=True):
        taken = set() if method is None else set(inspect.signature(method).parameters)
        assert names <= taken


def test_the_library_takes_the_arguments_of_a_bench():
    loads = {each.flag.removeprefix("--").replace("-", "_") for each in list_fields(LoadSpec)}
    assert LIBRARY["bench"][2] == BenchOptions.__annotations__.keys() > loads
    assert LIBRARY["bench"][1] <= set(inspect.signature(op.Workspace.builds).parameters)


def test_an_argument_of_the_library_is_an_option_of_its_verb():
    commands = list_commands()
    for verb, (_, selecting, passing) in LIBRARY.items():
        for name in selecting | passing:
            flags = {f"--{name}".replace("_", "-"), f"--set {name}".replace("_", "-")}
            turned = {f"--no-{name}"}
            assert (flags | turned) & commands[verb], f"{verb} {name}"


ARGUMENT = [
    (Argument("max_cv"), "--max-cv", "max_cv"),
    (Argument("--max-cv", "25%"), "--max-cv 25%", 'max_cv="25%"'),
    (Argument("batch", 1), "--batch 1", "batch=1"),
    (Argument("batch", (1, 8, 64)), "--batch 1:8:64", "batch=(1, 8, 64)"),
    (Argument("batch", ("MIN", "OPT", "MAX")), "--batch MIN:OPT:MAX", "batch=(MIN, OPT, MAX)"),
    (
        Argument("precision", ["fp16", "int8"]),
        "--precision fp16,int8",
        'precision=["fp16", "int8"]',
    ),
    (Argument("calibration", "PATH"), "--calibration PATH", "calibration=PATH"),
    (Argument("ensemble", False), "--no-ensemble", "ensemble=False"),
    (Argument("energy", True), "--energy", "energy=True"),
    (Argument("max_warm_up", 20, setting=True), "--set max-warm-up=20", "max_warm_up=20"),
    (Argument("steps", 'a"b\\'), '--steps a"b\\', 'steps="a\\"b\\\\"'),
    (Argument("max_warm_up", setting=True), "max-warm-up (--set)", "max_warm_up"),
    (
        Argument("option", {"onnxruntime": {"threads": 4}}),
        "--option onnxruntime.threads=4",
        'option={"onnxruntime": {"threads": 4}}',
    ),
    (Argument("node", "LABEL=VALUE"), "--node LABEL=VALUE", "--node LABEL=VALUE"),
]


@pytest.mark.parametrize(("argument", "terminal", "python"), ARGUMENT)
def test_each_door_words_an_argument(argument, terminal, python):
    assert (str(argument), argument.in_python()) == (terminal, python)


CALL = [
    (
        Call("build", "net", precision="int8", batch=(1, 8, 64), budget=None),
        "optpipe build net --precision int8 --batch 1:8:64",
        'Model("net", batch=(1, 8, 64)).build(precision="int8")',
    ),
    (
        Call("build", "memory:Net", data="PATH"),
        "optpipe build memory:Net --data PATH",
        "Model(module, example=...).build(data=PATH)",
    ),
    (
        Call("bench", "a b", precision="fp16", processes=5),
        "optpipe bench 'a b' --precision fp16 --processes 5",
        'workspace.builds("a b", precision="fp16").bench(processes=5)',
    ),
    (
        Call("evaluate", "memory:Net", data="DIR"),
        "optpipe evaluate memory:Net --data DIR",
        'workspace.builds("Net").evaluate(data=DIR)',
    ),
    (
        Call("bench", "net", keep_going=Argument("keep_going", True, setting=True)),
        "optpipe bench net --set keep-going=true",
        'workspace.builds("net").bench(keep_going=True)',
    ),
    (Call("verify", "DOSSIER"), "optpipe verify DOSSIER", "dossier.verify()"),
    (Call("bench", "A", against="B"), "optpipe bench A --against B", "optpipe bench A --against B"),
    (Call("store ls"), "optpipe store ls", "optpipe store ls"),
]


@pytest.mark.parametrize(("call", "terminal", "python"), CALL)
def test_each_door_words_a_call(call, terminal, python):
    assert (str(call), call.in_python()) == (terminal, python)


SHAPES = {"images": ((1, 3), (8, 3), (64, 3)), "mask": (4,)}


def test_shapes_are_a_mapping_in_python_and_repeated_options_on_the_terminal():
    shape = Argument("shape", SHAPES)
    assert shape == "--shape images=1x3:8x3:64x3 --shape mask=4"
    assert shape.in_python() == f"shape={str(SHAPES).replace(chr(39), chr(34))}"


def test_options_of_several_backends_are_repeated():
    options = {"torch": {"a": 1}, "onnxruntime": {"threads": 2, "graph": "a b"}}
    command = Call("bench", "net", option=options)
    given = ["torch.a=1", "onnxruntime.threads=2", "onnxruntime.graph=a b"]
    assert shlex.split(command)[3:] == [word for each in given for word in ("--option", each)]


def test_joined_texts_stay_data():
    text = join_texts("; ", ["first", Argument("batch", 1), "x: " + Argument("slo")])
    assert (text, text.in_python()) == ("first; --batch 1; x: --slo", "first; batch=1; x: slo")


def test_a_command_names_the_workspace_but_a_document_does_not(tmp_path):
    way = "build it: " + Call("build", "net")
    with suggest_for(tmp_path):
        assert str(BadInputError("no build", remedy=way)).endswith(f"--workspace {tmp_path}")
        assert str(way) == "build it: optpipe build net"
        assert way.in_python() == 'build it: Model("net").build()'


def make_error() -> BadInputError:
    return BadInputError(
        "the batch is outside the profile 1:8:64",
        argument=Argument("batch", 100),
        remedy="widen it with "
        + Argument("batch", ("MIN", "OPT", "MAX"))
        + ", or use "
        + Argument("slo"),
    )


def test_an_error_is_data_in_both_doors():
    error = make_error()
    assert error.arguments == ("batch", "slo")
    assert str(error) == (
        "--batch 100: the batch is outside the profile 1:8:64\n"
        "widen it with --batch MIN:OPT:MAX, or use --slo"
    )
    with pytest.raises(BadInputError) as raised, speak_of_arguments():
        raise error
    assert str(raised.value) == (
        "batch=100: the batch is outside the profile 1:8:64\n"
        "widen it with batch=(MIN, OPT, MAX), or use slo"
    )


def test_an_error_inside_of_another_stays_data():
    outer = OptpipeError("net: " + make_error().message, place="models.toml")
    outer.word_for_python()
    assert str(outer).startswith("models.toml: net: batch=100: ")


def test_an_error_passes_to_another_process_as_data():
    copied = pickle.loads(pickle.dumps(make_error()))
    assert (str(copied), copied.arguments) == (str(make_error()), ("batch", "slo"))
    assert word_for_python(copied.remedy) == word_for_python(make_error().remedy or "")


@pytest.mark.parametrize(
    "message",
    [
        make_error().message,
        Argument("batch", (1, 8, 64)),
        Argument("shape", {"ids": ((1, 8), (1, 64))}),
        Argument("option", {"onnxruntime": {"threads": 2}}),
        Argument("max_cv", 0.1, setting=True),
        Argument("precision", ["fp16", "int8"]),
        Call("build", "net", precision="int8", calibration="PATH"),
        "give " + Call("bench", "net", batch=[1, 8], max_cv=Argument("max_cv", 0.1, setting=True)),
        "no data",
    ],
)
def test_a_message_passes_as_text_and_is_worded_by_the_door(message):
    read = message_from_text(text_from_message(message))
    assert (str(read), word_for_python(read)) == (str(message), word_for_python(message))


EXCEPTIONS = {
    "api/pytest_plugin.py": r"--optpipe-",  # options of pytest
    "deploy/trackers/model_card.py": r"`optpipe verify`",  # a card that is written
    "deploy/trackers/registry.py": r"--to",  # for a process that it starts
    "core/params.py": r"--set|--no-",  # makes the options of the command line
    "core/wording.py": r"--set|--no-|--workspace|\\(--set\\)",  # words them
    "signoff/junit.py": r"optpipe signoff $",  # the name of a suite in JUnit's XML
    "trace/nsys.py": r"--output|--version|--trace|--duration",  # options of nsys
    "trace/counters.py": r"--version",  # an option of ncu
    "build/doctor.py": r"--version",  # an option of nsys
}
"""By file, literals that are no options of optpipe in a message."""


def list_literals(tree: ast.Module) -> list[ast.Constant]:
    """Every text of a file but docstrings."""
    docstrings = {id(each.value) for each in ast.walk(tree) if isinstance(each, ast.Expr)}
    return [
        each
        for each in ast.walk(tree)
        if isinstance(each, ast.Constant)
        and isinstance(each.value, str)
        and id(each) not in docstrings
    ]


@pytest.mark.slow
def test_options_and_commands_are_no_text_outside_of_the_command_line():
    flags = frozenset().union(*list_commands().values())
    names = "|".join(sorted(re.escape(each) for each in flags if each.startswith("--")))
    named = re.compile(rf"(?<![\w-])(?:{names})(?![\w-])|\boptpipe (?:{'|'.join(VERBS)})\b")
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        room = str(path.relative_to(PACKAGE))
        text = path.read_text()
        if room.startswith("cli/") or not named.search(text):
            continue
        allowed = EXCEPTIONS.get(room)
        wrong += [
            f"{room}:{each.lineno}: {each.value!r}"
            for each in list_literals(parse_file(path))
            if named.search(str(each.value))
            and not (allowed and re.search(allowed, str(each.value)))
        ]
    assert not wrong


@pytest.mark.slow
def test_errors_and_warnings_are_not_worded_at_once():
    """An f-string would word an argument or a call for the terminal, whatever the door."""
    wrong = []
    for place, node in list_named():
        called = ast.unparse(node.func)
        if not called.endswith(("Error", ".warn", ".inform")) or called == "ValueError":
            continue
        for part in ast.walk(node):
            if isinstance(part, ast.FormattedValue):
                worded = ast.unparse(part.value)
                if worded.startswith(("Argument(", "Call(")):
                    wrong.append(f"{place}: an f-string words {worded} at once")
    assert not wrong


OURS = frozenset(
    {"OptpipeError", "BadInputError", "MissingError", "StageError", "GateError"}
    | {"InconclusiveError"}
)
QUOTED_AS_TEXT = {
    "backends/onnxruntime.py": "the runtime's own reason, kept in the build's record",
    "backends/rewrites.py": "a graph that cannot run here; the sentence names no argument",
    "build/build.py": "why a traceback could not be kept",
    "cli/app.py": "the terminal",
    "deploy/live.py": "a server's answer, in a criterion that is written",
    "deploy/proof.py": "a server's answer, in a criterion that is written",
    "deploy/session_process.py": "for the process of a server",
    "measure/measure.py": "the first line of a round's error",
    "evaluate/possible_answers.py": "a fault of a document",
    "models/inputs/task_data.py": "the part before the colon",
    "models/sources/onnx_file.py": "the runtime's own reason, about the user's file",
    "signoff/verify.py": "a fault of a document",
    "sweep/cluster.py": "for the job's record",
    "sweep/ledger.py": "for the job's record",
    "sweep/task.py": "is hashed",
    "trace/record.py": "for the process that started the profile",
    "workspace/files.py": "a fault of a file",
}
"""By file, why the text of an error of ours is the terminal's wherever it goes."""


@pytest.mark.slow
def test_an_error_that_is_quoted_stays_data():
    """`str(error)` would word it for the terminal; `error.message` is worded by the door."""
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).as_posix()
        for handler in ast.walk(parse_file(path)):
            if not isinstance(handler, ast.ExceptHandler) or handler.type is None:
                continue
            caught = {each.id for each in ast.walk(handler.type) if isinstance(each, ast.Name)}
            if caught & OURS and handler.name and room not in QUOTED_AS_TEXT:
                wrong += [f"{room}:{each}" for each in list_texts_of(handler)]
    assert not wrong


def list_texts_of(handler: ast.ExceptHandler) -> list[str]:
    """Where a handler makes a text of its error, but to look for words in it."""
    named = handler.name or ""
    texts = {named, f"str({named})", f"first_line({named})"}
    searched = {
        id(part)
        for each in ast.walk(handler)
        if isinstance(each, ast.Compare)
        or (isinstance(each, ast.Call) and ast.unparse(each.func).endswith(".search"))
        for part in ast.walk(each)
    }
    return [
        f"{each.lineno}: {ast.unparse(each)}"
        for each in ast.walk(handler)
        if id(each) not in searched
        and (
            (isinstance(each, ast.FormattedValue) and ast.unparse(each.value) in texts)
            or (isinstance(each, ast.Call) and ast.unparse(each) in texts)
        )
    ]


def test_arguments_of_the_library_have_no_hyphens():
    assert all(name.isidentifier() for name in ARGUMENTS)
