"""Options in groups: a command takes one dataclass for options that belong together; Typer sees them one by one."""

from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, get_type_hints

from optpipe.cli.outcome import Outcome


def flatten_groups(command: Callable[..., Outcome]) -> Callable[..., Outcome]:
    """`command` with the fields of each dataclass that it takes as parameters of its own, all by keyword."""
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
