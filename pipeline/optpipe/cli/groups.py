"""Builds commands from their parameters and option records, command groups, and the sections of `optpipe --help`."""

from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import MISSING, dataclass, is_dataclass, replace
from functools import cache, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import msgspec
import typer
from typer.core import TyperCommand, TyperGroup

from optpipe.core.errors import ExitStatus
from optpipe.core.params import Field, list_annotated_fields, list_fields, settings_from_texts
from optpipe.core.process import let_torch_threads_sleep
from optpipe.core.wording import use_workspace

if TYPE_CHECKING:
    from typer._click import Command, Context, HelpFormatter

    from optpipe.report.document import Document


@dataclass(frozen=True, slots=True)
class Outcome:
    """`show` is not called with `--json`, which saves the rendering."""

    document: Any
    """A record or a mapping for `--json`. The terminal's warnings are added to the record's own."""
    show: "Callable[[Any], Document | str]"
    status: ExitStatus = ExitStatus.DONE


SHARED = ("workspace", "json", "store", "terminal", "program")
"""Parameters of commands that are not their options: global options, the workspace's store, the terminal, words after `--`."""
PROGRAM = "optpipe.program"


@cache
def _read_signature(
    command: Callable[..., Outcome],
) -> tuple[list[Parameter], dict[str, tuple[type | None, bool]], dict[str, tuple[Field, ...]]]:
    """The parameters that Typer reads; for each other one its record, None for a single option, and whether the command gets
    only the given fields; and the fields of each.
    """
    own: list[Parameter] = []
    records: dict[str, tuple[type | None, bool]] = {}
    single: dict[str, tuple[Field, ...]] = {}
    hints = get_type_hints(
        command, localns=dict.fromkeys(("Store", "Terminal"), object), include_extras=True
    )
    for parameter in signature(command).parameters.values():
        if parameter.name in SHARED:
            continue
        hint = hints[parameter.name]
        marks = [mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, type)]
        if annotated := list_annotated_fields(parameter.name, hint, parameter.default):
            records[parameter.name], single[parameter.name] = (None, False), annotated
        elif marks or (isinstance(hint, type) and _list_fields_of(hint)):
            records[parameter.name] = (marks[0] if marks else hint, bool(marks))
        else:
            own.append(parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hint))
    taken = {f"--{parameter.name.replace('_', '-')}" for parameter in own} | {
        field.flag for (field,) in single.values()
    }
    whole = {
        field.flag
        for kind, partial in records.values()
        if not partial
        for field in _list_fields_of(kind)
    }
    fields = {
        name: single.get(name)
        or tuple(
            field
            for field in _list_fields_of(kind)
            if field.flag not in (taken | whole if partial else taken)
        )
        for name, (kind, partial) in records.items()
    }
    return own, records, fields


def define_options(command: Callable[..., Outcome]) -> Callable[..., Outcome]:
    """`command` for Typer: each parameter with a Param, and each field of its records, becomes an option, or a setting of `--set`.

    A command gets the record, or only the given fields if its parameter is `Annotated[Mapping, kind]`. Of several
    options with one flag, that of the command precedes that of a whole record, and both precede that of a mapping.
    """
    own, records, fields = _read_signature(command)
    flat = {parameter.name: parameter for parameter in own}
    for name, (_, partial) in records.items():
        flat |= {
            field.name: _make_parameter(field, partial=partial)
            for field in fields[name]
            if not field.param.setting
        }
    if settings := [field for some in fields.values() for field in some if field.param.setting]:
        names = ", ".join(dict.fromkeys(field.flag[2:] for field in settings))
        option = typer.Option(
            "--set", metavar="NAME=VALUE", help=f"A setting that is rarely changed: {names}."
        )
        kind = Annotated[list[str] | None, option]
        flat["set"] = Parameter("set", Parameter.KEYWORD_ONLY, default=None, annotation=kind)
    flat["context"] = Parameter("context", Parameter.KEYWORD_ONLY, annotation=typer.Context)

    @wraps(command)
    def run(context: typer.Context, **given: Any) -> Outcome:
        use_workspace(context.find_root().params["workspace"])
        if command.__name__ in RUN_MODELS_HERE:
            let_torch_threads_sleep()
        try:
            given_to_all = {**context.find_root().params, "program": context.meta.get(PROGRAM)}
            with _open_shared(command, given_to_all) as shared:
                outcome = command(**read_arguments(command, given), **shared)
            return (
                _add_warnings(outcome, shared["terminal"].warnings)
                if "terminal" in shared
                else outcome
            )
        finally:
            use_workspace(None)

    run.__signature__ = Signature(list(flat.values()))  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in flat.values()}
    return run


RUN_MODELS_HERE = frozenset({"build", "calibrate", "evaluate", "run", "signoff"})
"""Commands that run models in this process without timing them: other processes measure."""


@contextmanager
def _open_shared(
    command: Callable[..., Outcome], root: Mapping[str, Any]
) -> Iterator[Mapping[str, Any]]:
    """The members of SHARED that `command` takes; the terminal shows progress while the block runs."""
    taken = signature(command).parameters
    shared = {name: root[name] for name in SHARED if name in taken and name in root}
    with ExitStack() as stack:
        if "store" in taken:
            from optpipe.workspace.store import Store

            shared["store"] = Store(root["workspace"])
            shared["store"].require_folder()
        if "terminal" in taken:
            from optpipe.report.progress import Terminal

            shared["terminal"] = stack.enter_context(Terminal())
        yield shared


def _add_warnings(outcome: Outcome, warnings: Sequence[str]) -> Outcome:
    own = getattr(outcome.document, "warnings", None)
    if own is None:
        return outcome
    return replace(
        outcome,
        document=replace(outcome.document, warnings=tuple(dict.fromkeys([*own, *warnings]))),
    )


def read_arguments(command: Callable[..., Outcome], given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments of `command` from Typer's values. Raises BadInputError for a value that cannot be read."""
    own, records, fields = _read_signature(command)
    arguments = {parameter.name: given[parameter.name] for parameter in own}
    known = (field for some in fields.values() for field in some if field.param.setting)
    settings = settings_from_texts(given.get("set") or (), known)
    for name, (kind, partial) in records.items():
        values = {
            field.name: _read(field, given[field.name])
            for field in fields[name]
            if field.name in given
        }
        values |= {
            field.name: settings[field.name] for field in fields[name] if field.name in settings
        }
        if kind is None:
            arguments |= values
        else:
            given_alone = {key: value for key, value in values.items() if value not in (None, ())}
            arguments[name] = given_alone if partial else kind(**values)
    return arguments


def _list_fields_of(kind: type | None) -> tuple[Field, ...]:
    return (
        list_fields(kind)
        if kind and (is_dataclass(kind) or issubclass(kind, msgspec.Struct))
        else ()
    )


def _read(field: Field, value: Any) -> Any:
    if field.repeats:
        return tuple(value) if value else field.default
    return (
        value
        if field.param.parse is None or value is None
        else field.param.parse(value, field.flag)
    )


def word_from_text(text: str) -> str:
    """An argument of a command line. An empty one is refused: as a prefix of names it would mean all of them."""
    if not text.strip():
        raise typer.BadParameter("it is empty; give one, or leave it out")
    return text


def path_from_text(text: str | Path) -> Path:
    """A path of a command line, or its default. An empty one is refused: as a path it would be the working folder."""
    if not str(text).strip():
        raise typer.BadParameter("the path is empty; give one, or leave it out")
    return Path(text)


def _make_parameter(field: Field, *, partial: bool) -> Parameter:
    param, kind = field.param, field.kind
    required = field.default is MISSING and not partial
    default = (
        field.default
        if param.parse is None or field.default in (None, MISSING)
        else field.show(field.default)
    )
    if param.parse is not None:
        kind = str
    elif field.repeats:
        kind = list[get_args(kind)[0]]  # type: ignore[misc]
        default = None
    flags = [field.flag, *([f"--{param.alias}"] if param.alias else [])]
    if kind is bool and field.default is True:
        flags = [f"{field.flag}/--no-{field.flag[2:]}"]
    usual = (
        field.show(field.default)
        if partial and field.default not in (MISSING, None, False, ())
        else ""
    )
    option = typer.Option(
        *flags,
        parser=path_from_text if kind is Path else None,
        metavar=param.metavar,
        help=f"{param.help}  [default: {usual}]" if usual else param.help,
        min=param.minimum,
        max=param.maximum,
        envvar=param.envvar,
        show_default=not required,
    )
    if partial or default is None:
        kind, default = kind | None, None
    annotation = Annotated[kind, option]  # type: ignore[valid-type]
    given = Parameter.empty if required else default
    return Parameter(field.name, Parameter.KEYWORD_ONLY, default=given, annotation=annotation)


class ProgramCommand(TyperCommand):
    """A command that takes a program with its arguments after `--`, as its parameter `program`."""

    def parse_args(self, ctx: "Context", args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            ctx.meta[PROGRAM] = tuple(args[at + 1 :])
            args = args[:at]
        return super().parse_args(ctx, args)


def choose_command_class(command: Callable[..., Outcome]) -> type[TyperCommand]:
    return ProgramCommand if "program" in signature(command).parameters else TyperCommand


class LazyCommands(UserDict[str, Any]):
    """Makes each command when it is first used, so that one command does not import the libraries of another."""

    def __init__(self, makers: "Mapping[str, Callable[[], Command]]") -> None:
        super().__init__(makers)
        self._made: dict[str, Command] = {}

    def __getitem__(self, name: str) -> "Command":
        if name not in self._made:
            self._made[name] = self.data[name]()
        return self._made[name]


class SectionedGroup(TyperGroup):
    """Lists commands in sections; global options may follow any command."""

    sections: Mapping[str, Iterable[str]] = {}

    def parse_args(self, ctx: "Context", args: list[str]) -> list[str]:
        return super().parse_args(ctx, move_shared_options(args))

    def format_commands(self, ctx: "Context", formatter: "HelpFormatter") -> None:
        width = max(map(len, self.commands))
        for title, names in self.sections.items():
            with formatter.section(title):
                room = formatter.width - width - 6
                rows = [
                    (name.ljust(width), self.commands[name].get_short_help_str(room))
                    for name in names
                ]
                formatter.write_dl(rows)


def move_shared_options(words: Sequence[str]) -> list[str]:
    front: list[str] = []
    rest = list(words)
    at = 0
    while at < len(rest) and rest[at] != "--":
        name, inline, _ = rest[at].partition("=")
        if name == "--json" and not inline:
            front.append(rest.pop(at))
        elif name == "--workspace" and (inline or at + 1 < len(rest)):
            front += [rest.pop(at), *([] if inline else [rest.pop(at)])]
        elif name == "--workspace":
            return rest[at:]  # without its value: Typer rejects it
        else:
            at += 1
    return [*front, *rest]


class DefaultGroup(TyperGroup):
    """A group whose first command is the default: it runs unless the first word names another."""

    def parse_args(self, ctx: "Context", args: list[str]) -> list[str]:
        named = args[:1] == ["--help"] or (args and args[0] in self.commands)
        return super().parse_args(ctx, args if named else [next(iter(self.commands)), *args])

    def format_options(self, ctx: "Context", formatter: "HelpFormatter") -> None:
        default = next(iter(self.commands.values()))
        inside = default.make_context(default.name, [], parent=ctx, resilient_parsing=True)
        default.format_options(inside, formatter)
        self.format_commands(ctx, formatter)
