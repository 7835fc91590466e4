"""Schema of command parameters: each is one field of one record, with its flag, help, parser and default.

`min_seconds: Annotated[float, Param("Minimum measurement time.", flag="min-time")] = 1.0` makes the option `--min-time` of every
command that takes the record, the setting `--set min-time=2` of a command that keeps it among the rarely used ones, and the
words `--min-time 2` of a suggested command.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import EnumType
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec

from optpipe.core.errors import BadInputError
from optpipe.core.quantity import share_from_text, share_to_text
from optpipe.core.suggestions import suggest_names
from optpipe.core.wording import PYTHON, Argument, Call


@dataclass(frozen=True, slots=True)
class Param:
    help: str
    flag: str = ""
    """Without dashes; the field's name if empty."""
    alias: str = ""
    metavar: str | None = None
    parse: Callable[[str, str], Any] | None = None
    """From (text, flag) to the value; raises BadInputError. None if Typer reads it: numbers, choices, paths."""
    show: Callable[[Any], str] | None = None
    """Inverse of `parse`."""
    minimum: float | None = None
    maximum: float | None = None
    envvar: str | None = None
    setting: bool = False
    """Whether it is given by `--set NAME=VALUE` instead of an option."""


NAMES_OF_KINDS = {bool: "true or false", int: "a whole number", float: "a number"}


@dataclass(frozen=True, slots=True)
class Field:
    name: str
    kind: Any
    """The type without None."""
    param: Param
    default: Any
    """MISSING if required."""

    @property
    def flag(self) -> str:
        """`--min-time`."""
        return "--" + (self.param.flag or self.name.replace("_", "-"))

    @property
    def repeats(self) -> bool:
        """Whether each value has its own flag; the values of a tuple of fixed length share one."""
        is_tuple = get_origin(self.kind) is tuple and get_args(self.kind)[-1] is Ellipsis
        return self.param.parse is None and (is_tuple or get_origin(self.kind) is list)

    def show(self, value: Any) -> str:
        if self.param.show is not None:
            return self.param.show(value)
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, tuple):
            return ",".join(map(str, value))
        return f"{value:.15g}" if isinstance(value, float) else str(value)

    def read(self, text: str) -> Any:
        """Raises BadInputError if `text` has another type."""
        if self.param.parse is not None:
            return self.param.parse(text, self.flag)
        try:
            value = msgspec.convert(text, self.kind, strict=False)
        except msgspec.ValidationError as error:
            choices = get_args(self.kind) or (
                tuple(self.kind) if isinstance(self.kind, EnumType) else ()
            )
            listed = f"one of {', '.join(map(str, choices))}" if choices else error
            expected = f"expected {NAMES_OF_KINDS.get(self.kind, listed)}"
            raise BadInputError(f"{self.flag.removeprefix('--')}={text}: {expected}") from error
        if self.param.minimum is not None and value < self.param.minimum:
            raise BadInputError(
                f"{self.flag.removeprefix('--')}={text}: must be at least {self.param.minimum}"
            )
        return value

    def list_words(self, value: Any) -> Iterator[str]:
        """The words that set `value`."""
        if self.param.setting:
            yield from ("--set", f"{self.flag.removeprefix('--')}={self.show(value)}")
        elif value is True or value is False:
            yield self.flag if value else self.flag.replace("--", "--no-", 1)
        else:
            for item in value if self.repeats else (value,):
                yield from (self.flag, self.show(item))


def list_annotated_fields(name: str, hint: Any, default: Any) -> tuple[Field, ...]:
    """The parameter `name` if its `hint` is annotated with a Param; empty otherwise."""
    params = [param for param in getattr(hint, "__metadata__", ()) if isinstance(param, Param)]
    given = get_args(hint)[0] if params else None
    parts = get_args(given) if get_origin(given) in (Union, UnionType) else ()
    rest = [part for part in parts if part is not type(None)]
    return tuple(
        Field(name, rest[0] if len(rest) == 1 else given, param, default) for param in params[:1]
    )


@cache
def list_fields(kind: type) -> tuple[Field, ...]:
    """The parameters among the fields of a dataclass or Struct, in order."""
    hints = get_type_hints(kind, include_extras=True)
    described: list[Field] = []
    for member in fields(kind) if is_dataclass(kind) else msgspec.structs.fields(kind):
        missing = member.default in (MISSING, msgspec.NODEFAULT)
        default = (
            member.default_factory()
            if missing and callable(member.default_factory)
            else member.default
        )
        given = MISSING if default is msgspec.NODEFAULT else default
        described += list_annotated_fields(member.name, hints[member.name], given)
    return tuple(described)


def list_words(record: object, *left_out: str) -> Iterator[str]:
    """Command-line words for the fields of `record` that differ from their defaults, without `left_out`."""
    kind: Any = type(record)  # mypy: an object's type may not be hashable
    for option in list_fields(kind):
        value = getattr(record, option.name)
        if option.name not in left_out and value is not None and value != option.default:
            yield from option.list_words(value)


def settings_from_texts(texts: Iterable[str], settings: Iterable[Field]) -> dict[str, object]:
    """Reads repeated `--set NAME=VALUE`; returns values by field name."""
    known = {setting.flag.removeprefix("--"): setting for setting in settings}
    values: dict[str, object] = {}
    for text in texts:
        name, given, value = text.partition("=")
        if not given or name not in known:
            raise BadInputError(
                f"expected NAME=VALUE, where NAME is one of {', '.join(sorted(known))}",
                argument=Argument("set", text),
            )
        if known[name].name in values:
            raise BadInputError(f"{name} is given twice", argument=Argument("set", text))
        values[known[name].name] = known[name].read(value)
    return values


def list_options(record: object, *left_out: str) -> dict[str, object]:
    """Options of a Call for the fields of `record` that differ from their defaults, without `left_out`."""
    options: dict[str, object] = {}
    kind: Any = type(record)  # mypy: an object's type may not be hashable
    for option in list_fields(kind):
        value = getattr(record, option.name)
        if option.name in left_out or value is None or value == option.default:
            continue
        name = option.flag.removeprefix("--").replace("-", "_")
        shown = value if isinstance(value, bool | int) else option.show(value)
        options[name] = Argument(name, shown, setting=True) if option.param.setting else shown
    return options


def make_call(verb: str, *parts: object, **options: object) -> Call:
    """A call of `verb`. Text `parts` are its words; record `parts` give the options in which they differ from their defaults.

    `options` are further ones by name; None and False are omitted.
    """
    words = [part for part in parts if isinstance(part, str)]
    given: dict[str, object] = {}
    for part in parts:
        given |= {} if isinstance(part, str) else list_options(part)
    given |= {name: value for name, value in options.items() if value is not False}
    return Call(verb, *words, **given)


_ORIGIN: ContextVar[str | None] = ContextVar("origin", default=None)


@contextmanager
def record_origin(call: str) -> Iterator[None]:
    """Records `call`, such as `python: Model.build(precision=fp32)`, in manifests in place of the command line."""
    token = _ORIGIN.set(f"{PYTHON}{call}")
    try:
        yield
    finally:
        _ORIGIN.reset(token)


def read_origin() -> str | None:
    """The call that `record_origin` set; None in the command line."""
    return _ORIGIN.get()


def sizes_from_text(text: str, flag: str) -> tuple[int, ...]:
    """Reads batch sizes or lengths: `8`, a list `1,8,32`, or powers of two `1:256`."""
    with suppress(ValueError):
        if ":" in text:
            low, high = (int(part) for part in text.split(":"))
            sizes = [low]
            while low > 0 and sizes[-1] * 2 <= high:
                sizes.append(sizes[-1] * 2)
            chosen = tuple(sizes) if sizes[-1] == high else (*sizes, high)
        else:
            chosen = tuple(sorted({int(part) for part in text.split(",")}))
        if chosen[0] >= 1 and list(chosen) == sorted(chosen):
            return chosen
    raise BadInputError(
        "expected positive sizes, such as 8, 1,8,32, or 1:256 for powers of two",
        argument=Argument(flag, text),
    )


_MOST_WORKERS = 1024


def workers_from_text(text: str, flag: str) -> tuple[int, ...]:
    """Reads numbers of worker processes, such as `0,2,4`.

    >>> workers_from_text("4,0,2", "workers")
    (0, 2, 4)
    """
    with suppress(ValueError):
        counts = tuple(sorted({int(part) for part in text.split(",")}))
        if counts[0] >= 0 and counts[-1] <= _MOST_WORKERS:
            return counts
    raise BadInputError(
        f"expected numbers of workers from 0 to {_MOST_WORKERS}, such as 0,2,4",
        argument=Argument(flag, text),
    )


def numbers_from_text(text: str, flag: str) -> tuple[float, ...]:
    """Reads a list of positive numbers, such as `100,200`."""
    with suppress(ValueError):
        numbers = tuple(float(part) for part in text.split(","))
        if all(0 < number < math.inf for number in numbers):
            return numbers
    raise BadInputError(
        "expected positive numbers, such as 100 or 100,200", argument=Argument(flag, text)
    )


def words_from_text(text: str, flag: str) -> tuple[str, ...]:
    words = tuple(word.strip() for word in text.split(",") if word.strip())
    if not words:
        raise BadInputError(
            "expected one or more names, separated by commas", argument=Argument(flag, text)
        )
    return words


def text_from_text(text: str, flag: str) -> str:
    """Reads any text that is not empty: an unset variable of a script is no name, and no reason."""
    if not text.strip():
        raise BadInputError(
            "is empty; give a value, or leave the option out", argument=Argument(flag)
        )
    return text


BATCH = Param("Batch size.", flag="batch")
LENGTH = Param("Sequence length.", flag="length", metavar="TOKENS")
SCENARIO = Param("MLPerf scenario.")
MODE = Param("compute: inputs already on the device; end-to-end: with copies.")
STREAMS = Param("Number of concurrent streams (multi-stream, offline).", minimum=1)
RATE = Param("Mean queries per second (server).", flag="rate")
PERCENTILE = Param("Highest percentile to report; determines the sample count.")
MIN_TIME = Param(
    "Minimum measurement time of a load in each process.", flag="min-time", metavar="SECONDS"
)
MAX_TIME = Param(
    "Maximum measurement time of a load in each process.", flag="max-time", metavar="SECONDS"
)
WARM_UP = Param("Minimum warm-up time.", flag="warm-up", metavar="SECONDS", setting=True)
MAX_WARM_UP = Param("Maximum warm-up time.", flag="max-warm-up", metavar="SECONDS", setting=True)
MAX_CV = Param(
    "Maximum coefficient of variation of a VALID measurement, such as 2.5%.",
    metavar="SHARE",
    parse=share_from_text,
    show=share_to_text,
)
MOST_PROCESSES = 1000
PROCESSES = Param(
    "Fresh processes; fewer than three give no interval over processes.",
    minimum=1,
    maximum=MOST_PROCESSES,
)
PRECISIONS = Param("Precisions, comma-separated.", flag="precision", parse=words_from_text)
BACKENDS = Param("Backends, comma-separated.", flag="backend", parse=words_from_text)
GPU = Param(
    "Kinds of GPU by full name, comma-separated, or cpu; default: those of this host.",
    flag="gpu",
    parse=words_from_text,
)
PROFILE = Param("Batch range of the builds.", metavar="MIN:OPT:MAX")
WEIGHTS_SEED = Param("Seed of random weights.", flag="seed", minimum=0, setting=True)
WEIGHTS = Param("default, random (random:SEED), or a .safetensors/.pt file.")
CALIBRATION = Param("INT8 calibration data.", metavar="PATH", parse=text_from_text)
LENGTHS = Param(
    "Sequence lengths: 128, or a list 32,128,512. Default: that of the texts the build was verified on.",
    metavar="TOKENS",
    parse=sizes_from_text,
)
TRUNCATE = Param(
    "Cut texts that exceed the model's maximum input length; otherwise they are rejected."
)
BUILD_OPTION = Param("Build option.", flag="build-option", metavar="BACKEND.KEY=VALUE")


def choices_from_text(text: str, choices: Collection[str], flag: str) -> tuple[str, ...]:
    """Reads a list of `choices` in order, without repetitions. Raises BadInputError that names the closest choice."""
    words = [word.strip().lower() for word in text.split(",") if word.strip()]
    known = ", ".join(choices)
    for word in words:
        if word not in choices:
            hint = suggest_names(word, choices, similarity=0.5)
            raise BadInputError(
                f"{hint} choose from {known}".lstrip(), argument=Argument(flag, word)
            )
    if not words:
        raise BadInputError(Argument(flag) + f" is empty; choose from {known}")
    return tuple(dict.fromkeys(words))
