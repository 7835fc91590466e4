"""Plug-ins: objects that other distributions register by entry points.

A distribution names them in its `pyproject.toml`:

    [project.entry-points."optpipe.backends"]
    openvino = "optpipe_openvino:OpenVino"

The registry of their group loads them in every process that uses it, so their modules must be cheap
to import and free of side effects. The variable `OPTPIPE_PLUGINS` limits them to the names that it
lists (comma-separated; empty: none), also in the processes that optpipe starts.
"""

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any, Literal, TypeVar, get_args

from optpipe.core.errors import MissingError, first_line

Group = Literal[
    "optpipe.backends", "optpipe.tasks", "optpipe.metrics", "optpipe.scores", "optpipe.trackers"
]
GROUPS: tuple[Group, ...] = get_args(Group)
VARIABLE = "OPTPIPE_PLUGINS"
"""Names of the plug-ins to load; if it is not set, all are."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FailedPlugin:
    """A plug-in that could not be loaded; everything else works without it."""

    group: Group
    name: str
    distribution: str
    reason: str

    def __str__(self) -> str:
        return f"plug-in {self.name} of {self.distribution} failed to load: {self.reason}"


FAILURES: list[FailedPlugin] = []
"""The plug-ins that this process could not load."""


class Registry(dict[str, T]):
    """Objects by name; looking up a name that nobody brings raises MissingError instead of KeyError."""

    def __init__(self, kind: str, own: Mapping[str, T]) -> None:
        super().__init__(own)
        self.kind = kind

    def __missing__(self, name: str) -> T:
        way_out = self.explain_missing(name)
        raise MissingError(f"this installation has no {self.kind} '{name}'; {way_out}")

    def explain_missing(self, name: str) -> str:
        """Why a plug-in called `name` could not be loaded, or how to get it."""
        failed = next((str(failure) for failure in FAILURES if failure.name == name), None)
        return failed or f"install the distribution that brings it, or name it in {VARIABLE}"


def load_plugins(
    group: Group, taken: Collection[str], check: Callable[[str, Any], T]
) -> dict[str, T]:
    """The plug-ins of `group` by name, each as `check` returns it.

    `check` raises an exception for an object that does not satisfy the group's contract. A plug-in that fails, or whose name is
    already `taken`, is left out and added to FAILURES.
    """
    loaded: dict[str, T] = {}
    for entry in list_entry_points(group):
        distribution = entry.dist.name if entry.dist else "an unknown distribution"
        reason = None
        if entry.name in taken or entry.name in loaded:
            reason = f"the name '{entry.name}' is already taken"
        else:
            try:
                loaded[entry.name] = check(entry.name, entry.load())
            except Exception as error:  # noqa: BLE001, a stranger's code may raise anything
                reason = f"{type(error).__name__}: {first_line(error)}"
        if reason is not None:
            FAILURES.append(FailedPlugin(group, entry.name, distribution, reason))
    return loaded


@cache
def list_entry_points(group: Group) -> tuple[metadata.EntryPoint, ...]:
    """The entry points of `group` that `OPTPIPE_PLUGINS` allows, sorted by name."""
    allowed = read_allowed_names()
    entries = sorted(metadata.entry_points(group=group), key=lambda entry: entry.name)
    return tuple(entry for entry in entries if allowed is None or entry.name in allowed)


def read_allowed_names() -> frozenset[str] | None:
    """The names in `OPTPIPE_PLUGINS`; None if it is not set, which allows all."""
    text = os.environ.get(VARIABLE)
    if text is None:
        return None
    return frozenset(word.strip() for word in text.split(",") if word.strip())


@cache
def list_distributions() -> tuple[metadata.Distribution, ...]:
    """The distributions whose plug-ins are allowed, each once, sorted by name."""
    distributions = {
        entry.dist.name: entry.dist
        for group in GROUPS
        for entry in list_entry_points(group)
        if entry.dist is not None
    }
    return tuple(distributions[name] for name in sorted(distributions))
