"""Nothing is removed without a warning, and nothing warns longer than it says."""

from collections.abc import Iterable

import pytest
from packaging.version import Version

import optpipe
from optpipe.core.deprecation import DEPRECATIONS, Deprecation, warn_deprecated

OLD = Deprecation("Build.run", since="1.2", removed_in="1.4", instead="Build.__call__")


def list_due(version: str, known: Iterable[Deprecation]) -> list[str]:
    """The names whose code must be removed before this version is released, or that warn for less than a minor version."""
    now = Version(version)
    return [
        entry.name
        for entry in known
        if Version(entry.removed_in) <= now
        or Version(entry.removed_in).release[:2] <= Version(entry.since).release[:2]
    ]


def test_no_deprecation_is_due() -> None:
    assert not list_due(optpipe.__version__, DEPRECATIONS)


@pytest.mark.parametrize(
    ("version", "removed_in", "due"),
    [
        ("1.2.0", "1.4", False),
        ("1.3.9", "1.4", False),
        ("1.4.0", "1.4", True),
        ("2.0", "1.4", True),
        ("1.2.0", "1.2.1", True),
    ],
)
def test_a_deprecation_is_due_in_its_version(version: str, removed_in: str, due: bool) -> None:
    entry = Deprecation("Build.run", "1.2", removed_in, "Build.__call__")
    assert list_due(version, [entry]) == (["Build.run"] if due else [])


def test_a_use_warns_and_names_what_to_use() -> None:
    def use() -> None:
        warn_deprecated("Build.run", [OLD])

    with pytest.warns(DeprecationWarning, match="Build.__call__") as seen:
        use()
    assert seen[0].filename == __file__


def test_what_is_not_in_the_list_cannot_warn() -> None:
    with pytest.raises(LookupError, match="DEPRECATIONS"):
        warn_deprecated("Build.walk", [OLD])
