"""How commands are put together: options in groups, commands in groups, and the sections of `optpipe --help`."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import TYPE_CHECKING, Any, get_type_hints

from typer.core import TyperGroup

from optpipe.core.errors import ExitStatus

if TYPE_CHECKING:
    from typer._click import Context, HelpFormatter


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished command. `text` is only called when people read it, so that `--json` pays for no rendering."""

    document: Any
    """A record or a mapping: what `--json` prints."""
    text: Callable[[], Any]
    """Makes the text or rich renderable for people; units and rounding belong in `optpipe.report`."""
    status: ExitStatus = ExitStatus.DONE


def flatten_groups(command: Callable[..., Outcome]) -> Callable[..., Outcome]:
    """`command` with the fields of each dataclass that it takes as its own parameters, all by keyword."""
    groups: dict[str, type] = {}
    flat: list[Parameter] = []
    hints = get_type_hints(command, include_extras=True)
    for parameter in signature(command).parameters.values():
        kind = hints[parameter.name]
        if is_dataclass(kind) and isinstance(kind, type):
            groups[parameter.name] = kind
            options = get_type_hints(kind, include_extras=True)
            for field in fields(kind):
                default = Parameter.empty if field.default is MISSING else field.default
                flat.append(
                    Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=options[field.name])
                )
        else:
            flat.append(parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=kind))

    @wraps(command)
    def run(**given: Any) -> Outcome:
        made = {
            name: kind(**{each.name: given.pop(each.name) for each in fields(kind)}) for name, kind in groups.items()
        }
        return command(**given, **made)

    run.__signature__ = Signature(flat)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in flat}
    return run


class SectionedGroup(TyperGroup):
    """Commands that the help lists in sections."""

    sections: Mapping[str, tuple[str, ...]] = {}

    def format_commands(self, ctx: "Context", formatter: "HelpFormatter") -> None:  # noqa: ARG002
        """Writes one section for each group, with one column of descriptions."""
        width = max(map(len, self.commands))
        for title, names in self.sections.items():
            with formatter.section(title):
                rows = [
                    (name.ljust(width), self.commands[name].get_short_help_str(formatter.width - width - 6))
                    for name in names
                ]
                formatter.write_dl(rows)


class DefaultGroup(TyperGroup):
    """A command that is also a group: the first word is one of its commands, or it belongs to the first of them."""

    def parse_args(self, ctx: "Context", args: list[str]) -> list[str]:
        """Puts the name of the default command in front where no command is named."""
        named = args[:1] == ["--help"] or (args and args[0] in self.commands)
        return super().parse_args(ctx, args if named else [next(iter(self.commands)), *args])

    def format_options(self, ctx: "Context", formatter: "HelpFormatter") -> None:
        """Writes the options of the default command, then the commands."""
        default = next(iter(self.commands.values()))
        inside = default.make_context(default.name, [], parent=ctx, resilient_parsing=True)
        default.format_options(inside, formatter)
        self.format_commands(ctx, formatter)
