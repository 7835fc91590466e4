"""Every public call refuses an argument of another type by its name, before anything runs."""

import inspect
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import pytest

import optpipe as op
from optpipe.api.arguments import _resolve, check_arguments, describe_type, is_of
from optpipe.api.bench import BenchOptions
from optpipe.core.errors import BadInputError

CALLS = (
    op.Bench.plot,
    op.Build.signoff,
    op.Build.time,
    op.Builds.evaluate,
    op.Data.__init__,
    op.Dossier.__init__,
    op.Dossier.deploy,
    op.Metric.__init__,
    op.Model.__init__,
    op.Model.build,
    op.Policy.__init__,
    op.Policy.save,
    op.Workspace.__init__,
    op.Workspace.builds,
    op.load,
)
NOTHING: Any = object()
REQUIRED: dict[str, Any] = {
    "dossier": "dossier",
    "figure": "p50_ns",
    "function": max,
    "model": "net",
    "output": "served",
    "path": "place",
    "policy": "policy.toml",
    "range": (0, 1),
    "source": "net",
}


def list_checked() -> list[Any]:
    """Every argument whose annotation says what it takes."""
    return [
        pytest.param(call, name, id=f"{call.__qualname__} {name}")
        for call in CALLS
        for name, each in inspect.signature(call).parameters.items()
        if name != "self" and not is_of(NOTHING, _resolve(each.annotation, call))
        if each.kind is not each.VAR_KEYWORD
    ]


@pytest.mark.parametrize(("call", "name"), list_checked())
def test_a_value_of_another_type_is_refused_by_the_arguments_name(call, name) -> None:
    parameters = inspect.signature(call).parameters
    given = {
        key: None if key == "self" else REQUIRED[key]
        for key, each in parameters.items()
        if each.default is each.empty and each.kind is not each.VAR_KEYWORD
    }
    with pytest.raises(BadInputError, match=rf"^{name}: expected .*, not <object object") as error:
        call(**given | {name: NOTHING})
    assert len(str(error.value).splitlines()) == 1


def test_most_arguments_of_public_calls_are_checked() -> None:
    assert len(list_checked()) > 55


@pytest.mark.parametrize("name", BenchOptions.__annotations__)
def test_each_argument_of_a_bench_is_checked(name) -> None:
    with pytest.raises(BadInputError, match=rf"^{name}: expected .*, not <object object"):
        op.Builds.bench(None, **{name: NOTHING})


def test_an_unknown_argument_of_a_bench_is_named_with_the_nearest() -> None:
    with pytest.raises(BadInputError, match="'batchh'; did you mean batch"):
        op.Builds.bench(None, **{"batchh": NOTHING})


@pytest.mark.parametrize(
    ("value", "hint", "fits"),
    [
        (1, int, True),
        (np.int64(1), int, True),
        (np.float32(1), float, True),
        (1, float, True),
        (True, int, False),
        (True, float, False),
        (1, bool, False),
        (1.0, int, False),
        ("ab", Sequence[str], False),
        ({"a": 1}, Collection[str], False),
        (["a"], Sequence[str], True),
        ([1], Sequence[str], False),
        ({1}, Collection[int], True),
        ([1, 2, 3], tuple[int, int, int], True),
        ((1, 2), tuple[int, int, int], False),
        ((), tuple[int, ...], True),
        ({"a": None}, Mapping[str, int | None], True),
        ({1: None}, Mapping[str, int | None], False),
        ("cpu", Literal["cpu", "cuda"], True),
        ("gpu", Literal["cpu", "cuda"], False),
        (None, str | None, True),
        (os.curdir, str | os.PathLike[str], True),
        (3, "unknown here", True),
    ],
)
def test_what_is_of_a_type(value, hint, fits) -> None:
    assert is_of(value, hint) is fits


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (str | None, "a string"),
        (str | Sequence[str] | os.PathLike[str], "a string, a list of strings, or a path"),
        (Literal["cpu", "cuda"] | None, "'cpu' or 'cuda'"),
        (Mapping[str, int | None], "a mapping of strings to whole numbers or None"),
        (Annotated[str, "a share such as '99.5%'"] | None, "a share such as '99.5%'"),
    ],
)
def test_the_words_of_a_type(hint, words) -> None:
    assert describe_type(hint) == words


def test_missing_and_unknown_arguments_are_pythons_own_error() -> None:
    @check_arguments
    def wait(seconds: float) -> float:
        return seconds

    assert wait(2) == 2
    with pytest.raises(TypeError, match=r"wait.*missing"):
        wait()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"wait.*minutes"):
        wait(seconds=1, minutes=2)  # type: ignore[call-arg]
