"""Arguments and calls that a message names, as data: worded with flags for the terminal, with arguments for Python.

An error has a problem, and, where they say more than it, a place, the argument at fault, and a remedy:

    raise BadInputError(
        "the batch is outside the profile 1:8:64",
        argument=Argument("batch", 100),
        remedy="widen it with " + Argument("batch", ("MIN", "OPT", "MAX")),
    )

The terminal shows the first form, Python the second:

    --batch 100: the batch is outside the profile 1:8:64
    widen it with --batch MIN:OPT:MAX

    batch=100: the batch is outside the profile 1:8:64
    widen it with batch=(MIN, OPT, MAX)

`Argument` and `Call` are strings that `+` joins with other text; what they name stays data until a door words it. As strings, and so
in an f-string, they have the terminal's wording, which is also that of every document that is written. An argument has the library's
name; its option on the command line has the same name with hyphens. What the library lacks is worded as an option or a command there
too.

A call names a verb of the command line with its arguments: `Call("build", "resnet50", precision="int8", calibration="PATH")` is
`optpipe build resnet50 --precision int8 --calibration PATH`, and `Model("resnet50").build(precision="int8", calibration=PATH)`.
"""

import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

DEFAULT_WORKSPACE = Path(".optpipe")


class Message(str):
    """Text in which arguments and calls are data.

    As a string it has the terminal's wording, without the workspace of this process, which a document does not name.
    """

    parts: tuple[str, ...]

    def __new__(cls, *parts: str) -> "Message":
        message = super().__new__(cls, "".join(map(str, parts)))
        message.parts = parts
        return message

    def __getnewargs_ex__(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self.parts, {}

    def __add__(self, more: str) -> "Message":
        return Message(self, more)

    def __radd__(self, before: str) -> "Message":
        return Message(before, self)

    def on_terminal(self) -> str:
        """The terminal's wording; each command names the workspace of this process, unless it is the default one."""
        return "".join(map(word_for_terminal, self.parts))

    def in_python(self) -> str:
        return "".join(map(word_for_python, self.parts))

    def list_arguments(self) -> "Iterator[Argument]":
        """The arguments that it names, in order."""
        for part in self.parts:
            if isinstance(part, Message):
                yield from part.list_arguments()


def join_texts(separator: str, texts: Iterable[str]) -> Message:
    """`separator.join(texts)`, in which arguments and calls stay data."""
    parts: list[str] = []
    for text in texts:
        parts += [separator, text] if parts else [text]
    return Message(*parts)


def word_for_terminal(text: str) -> str:
    return text.on_terminal() if isinstance(text, Message) else text


def word_for_python(text: str) -> str:
    return text.in_python() if isinstance(text, Message) else text


class Argument(Message):
    """An argument by its name in the library, with a value if one is given or proposed.

    A value in capitals, such as PATH, is a place to fill. A tuple is a range (`1:8:64`), a list has commas, a mapping holds options by
    backend or shapes by input, and True or False turn a switch on or off.
    """

    name: str
    value: object
    setting: bool

    def __new__(cls, name: str, value: object = None, *, setting: bool = False) -> "Argument":
        """`name` may also be its option, `--max-cv`. A `setting` is given by `--set NAME=VALUE`."""
        name = name.removeprefix("--").replace("-", "_")
        words = list(_list_words(name, value, setting=setting))
        text = shlex.join(words) if isinstance(value, Mapping) else " ".join(words)
        if setting and value is None:
            text = f"{name.replace('_', '-')} (--set)"
        argument = str.__new__(cls, text)
        argument.parts, argument.name = (), name
        argument.value, argument.setting = value, setting
        return argument

    def __getnewargs_ex__(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (self.name, self.value), {"setting": self.setting}

    def on_terminal(self) -> str:
        return str(self)

    def in_python(self) -> str:
        if self.name not in ARGUMENTS:
            return str(self)
        return self.name if self.value is None else f"{self.name}={show_in_python(self.value)}"

    def list_arguments(self) -> "Iterator[Argument]":
        yield self


def _list_words(name: str, value: object, *, setting: bool) -> Iterator[str]:
    """The words of the command line that give the argument."""
    option = name.replace("_", "-")
    if setting:
        yield from ("--set", f"{option}={show_on_terminal(value)}")
    elif value is False:
        yield f"--no-{option}"
    elif value is None or value is True:
        yield f"--{option}"
    elif isinstance(value, Mapping):
        for key, chosen in value.items():
            if isinstance(chosen, Mapping):
                for setting_name, setting_value in chosen.items():
                    yield from (f"--{option}", f"{key}.{setting_name}={setting_value}")
            else:
                yield from (f"--{option}", f"{key}={_show_shapes(chosen)}")
    else:
        yield from (f"--{option}", show_on_terminal(value))


class Call(Message):
    """A call of a verb: `words` are its positional arguments, `options` the others; None is left out.

    The name of an option may be an Argument's, which then says how it is given.
    """

    verb: str
    words: tuple[str, ...]
    options: dict[str, object]

    def __new__(cls, verb: str, *words: object, **options: object) -> "Call":
        given = {name: value for name, value in options.items() if value is not None}
        positional = tuple(map(str, words))
        command = ["optpipe", *verb.split(), *positional]
        for name, value in given.items():
            setting = isinstance(value, Argument) and value.setting
            command += _list_words(name, _take_value(value), setting=setting)
        call = str.__new__(cls, shlex.join(command))
        call.parts, call.verb, call.words, call.options = (), verb, positional, given
        return call

    def __getnewargs_ex__(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (self.verb, *self.words), self.options

    def with_options(self, **options: object) -> "Call":
        """The call with further options."""
        return Call(self.verb, *self.words, **self.options | options)

    def on_terminal(self) -> str:
        return for_workspace(str(self))

    def in_python(self) -> str:
        """The library's call; the command if the library lacks the verb or one of the arguments."""
        return self.find_library_call() or self.on_terminal()

    def find_library_call(self) -> str | None:
        if (whole := WHOLE_CALLS.get((self.verb, *self.options))) is not None:
            return whole
        if len(self.words) > 1 and self.verb in OF_SEVERAL and not self.options:
            return f"builds.{self.verb}()"
        if self.verb not in LIBRARY or len(self.words) > 1:
            return None
        receiver, selecting, passing = LIBRARY[self.verb]
        if not self.options.keys() <= selecting | passing:
            return None
        made = _list_in_python(self.options, selecting)
        given = _list_in_python(self.options, passing)
        if self.words:
            made.insert(0, self._show_subject())
        return f"{receiver.format(', '.join(made))}.{self.verb}({', '.join(given)})"

    def _show_subject(self) -> str:
        """The model or build; a module in memory is made again, and found by its name once it is built."""
        subject = self.words[0]
        if self.verb == "build" and subject.startswith(IN_MEMORY):
            return "module, example=..."
        return show_in_python(subject.removeprefix(IN_MEMORY))


IN_MEMORY = "memory:"
"""Begins the source of a module in memory, which no command can name."""


def _take_value(given: object) -> object:
    return given.value if isinstance(given, Argument) else given


def _list_in_python(options: Mapping[str, object], names: frozenset[str]) -> list[str]:
    return [
        f"{name}={show_in_python(_take_value(options[name]))}" for name in options if name in names
    ]


def _show_shapes(shapes: Any) -> str:
    """`1x3x224x224:8x3x224x224:64x3x224x224`, or one shape."""
    if not isinstance(shapes, tuple):
        return str(shapes)
    several = shapes if shapes and isinstance(shapes[0], tuple) else (shapes,)
    return ":".join("x".join(map(str, shape)) for shape in several)


def show_on_terminal(value: Any) -> str:
    if isinstance(value, tuple):
        return ":".join(map(str, value))
    if isinstance(value, list):
        return ",".join(map(str, value))
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.15g}" if isinstance(value, float) else str(value) or "''"


def show_in_python(value: Any) -> str:
    """A literal; a word in capitals stays as it is."""
    if isinstance(value, tuple):
        inner = ", ".join(map(show_in_python, value))
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, list):
        return f"[{', '.join(map(show_in_python, value))}]"
    if isinstance(value, Mapping):
        pairs = (f"{show_in_python(key)}: {show_in_python(item)}" for key, item in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, bool | int | float):
        return str(value)
    text = str(value)
    is_placeholder = text == "..." or (text.isupper() and text.replace("_", "").isalpha())
    return text if is_placeholder else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


_MODEL = frozenset({"weights", "batch", "shape"})
_BUILD = frozenset(
    {"precision", "backend", "device", "calibration", "data", "budget", "option", "truncate"}
    | {"min_snr", "recover", "require_share", "steps"}
)
_CHOICE = frozenset({"precision", "backend", "device"})
_BENCH = frozenset(
    {"batch", "length", "slo", "processes", "energy", "max_cv", "images", "affinity", "keep_going"}
    | {"seed", "option", "scenario", "mode", "streams", "rate", "percentile", "min_time"}
    | {"max_time", "warm_up", "max_warm_up"}
)
_EVALUATE = frozenset({"data", "accuracy_budget", "truncate"})
_SIGNOFF = frozenset({"policy", "waive", "output", "figures"})
_DEPLOY = frozenset(
    {"output", "to", "because", "ensemble", "storage_uri", "image", "prove", "tune", "server"}
)

LIBRARY: dict[str, tuple[str, frozenset[str], frozenset[str]]] = {
    "build": ("Model({})", _MODEL, _BUILD),
    "bench": ("workspace.builds({})", _CHOICE, _BENCH),
    "evaluate": ("workspace.builds({})", frozenset(), _EVALUATE),
    "signoff": ("build", frozenset(), _SIGNOFF),
    "verify": ("dossier", frozenset(), frozenset()),
    "deploy": ("dossier", frozenset(), _DEPLOY),
}
"""By verb: the object whose method it is, the options that are arguments of that object, and those of the method."""

OF_SEVERAL = frozenset({"bench", "evaluate"})
"""Verbs of several builds, which Python holds as one object."""
WHOLE_CALLS: dict[tuple[str, ...], str] = {
    ("deploy",): 'dossier.deploy("served")',
    ("signoff",): "build.signoff(policy)",
    ("signoff", "init"): 'Policy(latency={"p99": "10 ms", "batch_size": 1}).save("policy.toml")',
}
"""By verb and the names of the options: calls that need in Python what the command line makes by itself."""

ARGUMENTS = frozenset().union(
    *(selecting | passing for _, selecting, passing in LIBRARY.values()), {"workspace"}
)
"""Options of the command line that are arguments of the library."""


_CURRENT: list[str] = []
"""The words that name this process's workspace; empty for the default."""


def use_workspace(path: Path | None) -> None:
    _CURRENT[:] = _name_workspace(path)


@contextmanager
def suggest_for(path: Path) -> Iterator[None]:
    """Names the workspace `path` in suggested commands while the block runs."""
    before = list(_CURRENT)
    use_workspace(path)
    try:
        yield
    finally:
        _CURRENT[:] = before


def _name_workspace(path: Path | None) -> list[str]:
    usual = Path(os.environ.get("OPTPIPE_WORKSPACE") or DEFAULT_WORKSPACE)
    if path is None or path.absolute() == usual.absolute():
        return []
    return ["--workspace", str(path)]


PYTHON = "python: "
"""Begins the origin of what a Python program made."""


def describe_remake(command: str, workspace: Path) -> str:
    """How to make an entry again, by the command or the call of Python that made it."""
    if command.startswith(PYTHON):
        return f"make it again in Python, as by {command.removeprefix(PYTHON)}"
    return f"rebuild it with `{for_workspace(command, workspace)}`"


def for_workspace(command: str, workspace: Path | None = None) -> str:
    """`command` with the `--workspace` option for `workspace`, by default the command line's; used in suggestions to the user."""
    named = _CURRENT if workspace is None else _name_workspace(workspace)
    if command.startswith(PYTHON):
        return command.removeprefix(PYTHON)
    try:
        words = shlex.split(command)
    except ValueError:  # a recorded command with truncated quotes
        return command
    rest = [
        word
        for before, word in pairwise(["", *words])
        if "--workspace" not in (before, word) and not word.startswith("--workspace=")
    ]
    return command if rest == words and not named else shlex.join([*rest, *named])
