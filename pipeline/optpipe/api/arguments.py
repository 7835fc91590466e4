"""The types of public calls' arguments, held to what their signatures declare before anything runs.

beartype 0.23 and typeguard 4.6 hold other rules: to both a bool is an integer, a string a list of strings, a mapping a collection of
its keys, a list no tuple, and NumPy's numbers no numbers; beartype looks at one entry of a list. Their words do not say what to give,
and they take 183 and 109 ms to import, where `import optpipe` may take 50.
"""

import inspect
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache, wraps
from numbers import Real
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
)

from optpipe.core.errors import BadInputError
from optpipe.core.values import is_integer

F = TypeVar("F", bound=Callable[..., Any])

LISTS = (Sequence, Collection)
SHOWN_LENGTH = 40


def check_arguments(function: F) -> F:
    """Decorates a public call, which then raises BadInputError for an argument of another type than its annotation
    declares.

    An annotation `Annotated[type, "words"]` brings the words that say what is expected. Annotations that can only be resolved by a
    type checker are left to the function, and so are missing and unknown arguments, which are Python's own TypeError.

    >>> @check_arguments
    ... def wait(seconds: float) -> None: ...
    >>> wait("long")
    Traceback (most recent call last):
    ...
    optpipe.core.errors.BadInputError: seconds: expected a number, not 'long'
    """
    signature = inspect.signature(function)

    @wraps(function)
    def call(*positional: Any, **named: Any) -> Any:
        try:
            given = signature.bind(*positional, **named).arguments
        except TypeError:
            return function(*positional, **named)  # Python's own words, which name the function
        for name, value in given.items():
            parameter = signature.parameters[name]
            hint = _resolve(parameter.annotation, function)
            if parameter.kind is parameter.VAR_KEYWORD:
                for option, of_option in value.items():
                    if of_option is not None:  # an option that is not given
                        require_type(option, of_option, hint)
            else:
                require_type(name, value, hint)
        return function(*positional, **named)

    return cast("F", call)


def require_type(name: str, value: Any, hint: Any) -> None:
    """Raises BadInputError if `value` is not of the type `hint`, with what is expected and what was given."""
    if not is_of(value, hint):
        raise BadInputError(f"{name}: expected {describe_type(hint)}, not {describe_value(value)}")


def is_of(value: Any, hint: Any) -> bool:
    """Whether a value has a type, with the types inside of mappings and sequences. A list passes for a tuple, and an integer for a
    float; a bool is no number, and a string no sequence. An annotation that cannot be resolved takes everything."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint in (Any, inspect.Parameter.empty) or isinstance(hint, str):
        return True
    if origin is Annotated:
        return is_of(value, inner[0])
    if origin in (Union, UnionType):
        return any(is_of(value, option) for option in inner)
    if origin is Literal:
        return isinstance(value, str) and str(value) in inner
    if hint in (None, NoneType):
        return value is None
    if hint is float:
        return isinstance(value, Real) and not isinstance(value, bool)
    if hint is int:
        return is_integer(value)
    kind = origin or hint
    if kind is tuple:
        return isinstance(value, tuple | list) and _fit_tuple(value, inner)
    if not isinstance(kind, type):
        return True
    if kind is Mapping:
        return isinstance(value, Mapping) and all(
            is_of(key, inner[0]) and is_of(item, inner[1]) for key, item in value.items()
        )
    if kind in LISTS:
        listed = isinstance(value, kind) and not isinstance(value, str | bytes | Mapping)
        return listed and all(is_of(item, inner[0]) for item in value)
    return isinstance(value, kind)


def _fit_tuple(values: Sequence[Any], inner: tuple[Any, ...]) -> bool:
    if not inner:
        return True
    if inner[-1] is Ellipsis:
        return all(is_of(item, inner[0]) for item in values)
    return len(values) == len(inner) and all(map(is_of, values, inner))


WORDS: dict[Any, tuple[str, str]] = {
    str: ("a string", "strings"),
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    bool: ("True or False", "True or False"),
    os.PathLike: ("a path", "paths"),
    NoneType: ("None", "None"),
}
"""The words for one value of a type, and for several."""


def describe_type(hint: Any) -> str:
    """`a string, a path, or a list of strings`; None, which stands for an argument that is not given, is left out."""
    words = [word for word in dict.fromkeys(_list_words(hint)) if word != "None"] or ["None"]
    joined = ", ".join(words[:-1]) + (", or " if len(words) > 2 else " or ")
    return words[0] if len(words) == 1 else joined + words[-1]


def _list_words(hint: Any) -> Iterator[str]:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        for option in inner:
            yield from _list_words(option)
    elif origin is Literal:
        yield from (repr(str(option)) for option in inner)
    else:
        yield _name_type(hint, several=False)


def _name_type(hint: Any, *, several: bool) -> str:
    origin, inner = get_origin(hint), get_args(hint)
    kind = origin or hint
    if kind in WORDS:
        return WORDS[kind][several]
    if origin is Annotated:
        return str(inner[1])
    if kind is tuple or kind in LISTS:
        things = _name_type(inner[0], several=True) if inner else "values"
        return f"lists of {things}" if several else f"a list of {things}"
    if kind is Mapping:
        pair = " to ".join(_name_several(part) for part in inner)
        return f"{'mappings' if several else 'a mapping'} of {pair}"
    name = getattr(kind, "__name__", str(kind))
    return name if several else f"a {name}"


def _name_several(hint: Any) -> str:
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return " or ".join(dict.fromkeys(_name_type(part, several=True) for part in parts))


def describe_value(value: Any) -> str:
    """A short value as it is written, the kind of any other."""
    shown = repr(value)
    if "\n" not in shown and len(shown) <= SHOWN_LENGTH:
        return shown
    return f"a {type(value).__name__}"


def _resolve(annotation: Any, function: Callable[..., Any]) -> Any:
    """The annotation, evaluated if it is a text whose names exist at run time."""
    if not isinstance(annotation, str):
        return annotation
    return _evaluate(annotation, function.__module__)


@cache
def _evaluate(annotation: str, module: str) -> Any:
    try:
        return eval(annotation, vars(sys.modules[module]))
    except NameError:
        return annotation
