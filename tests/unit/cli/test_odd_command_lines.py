"""Every option and argument of every command, from Typer's own tree, with odd values: two lines and status 2, or the work begins.

The first step of progress ends a command here (`WorkBegan`): what is refused, is refused before it.
"""

import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import onnx
import pytest
from tests.command_line import COMMAND
from tests.fakes.graphs import onnx_model
from typer.core import TyperGroup

from optpipe.cli.app import app

POLICY = 'schema = 1\nname = "net"\nmodel = "net.onnx"\n[size]\nmaximum = "1 MiB"\n'
VALUES = MappingProxyType(
    {
        "empty": "",
        "long": "a" * 5000,
        "long with spaces": "ab " * 1700,
        "control characters": "\x1b[31mred\nnext\r\x07line",
        "large": "99999999999999999999",
        "negative": "-1",
        "zero": "0",
        "nan": "nan",
        "inf": "inf",
        "1e400": "1e400",
        "folder": "folder",
        "file": "file.txt",
        "pipe": "pipe",
        "missing": "nowhere/nothing",
        "below a file": "file.txt/x",
    }
)
BASE = MappingProxyType(
    {
        "build": ("net.onnx",),
        "calibrate": ("net.onnx", "--data", "data.npz"),
        "preprocess": ("net.onnx",),
        "bench": ("net.onnx",),
        "evaluate": ("net.onnx",),
        "profile": ("net.onnx",),
        "signoff judge": ("net.onnx", "--policy", "policy.toml"),
        "signoff approve": ("folder",),
        "signoff attest": ("folder",),
        "signoff stamp": ("folder",),
        "signoff recheck": ("folder", "--python", "folder"),
        "verify": ("folder",),
        "run": ("net.onnx", "--policy", "policy.toml"),
        "deploy": ("folder",),
        "sweep": ("net.onnx",),
    }
)
"""Words that a command needs to come to its options; an odd value of one of them takes its place."""
ENDS = (0, 1, 2, 3, 5)
"""The work failed (4) only where it began."""
LONGEST_S = 60


class WorkBegan(BaseException):
    """The command took the value: its first step began."""


@dataclass(frozen=True)
class Word:
    """An option or an argument of a command."""

    command: str
    name: str
    flag: str | None
    takes_value: bool

    def make_line(self, value: str | None, *, twice: bool = False) -> list[str]:
        words = [*self.command.split(), *BASE.get(self.command, ())]
        if self.flag is None:
            return [*self.command.split(), "--", *([] if value is None else [value])]
        given = [self.flag] if value is None else [f"{self.flag}={value}"]
        return [*words, *given, *(given if twice else [])]


def list_words(command: object = COMMAND, names: tuple[str, ...] = ()) -> Iterator[Word]:
    if isinstance(command, TyperGroup):
        for name in command.commands:
            yield from list_words(command.commands[name], (*names, name))
        return
    for param in command.params:  # type: ignore[attr-defined]
        option = param.param_type_name == "option"
        flag = max(param.opts, key=len) if option else None
        yield Word(" ".join(names), param.name, flag, not getattr(param, "is_flag", False))
    yield Word(" ".join(names), "workspace", "--workspace", takes_value=True)


WORDS = tuple(list_words())


def list_cases(word: Word) -> Iterator[tuple[str, list[str]]]:
    if word.takes_value:
        for name, value in VALUES.items():
            yield f"{word.command} {word.name}: {name}", word.make_line(value)
    if word.flag is not None:
        value = "8" if word.takes_value else None
        yield f"{word.command} {word.name}: twice", word.make_line(value, twice=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    weight = np.ones((4, 3), np.float32)
    graph = onnx_model(
        [("Gemm", "x v", "y", {"transB": 1})], {"x": ["n", 3]}, {"y": ["n", 4]}, v=weight
    )
    onnx.save(graph, tmp_path / "net.onnx")
    np.savez(tmp_path / "data.npz", x=np.ones((8, 3), np.float32))
    (tmp_path / "policy.toml").write_text(POLICY)
    (tmp_path / "file.txt").write_text("a file\n")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


@contextmanager
def end_within(seconds: int) -> Iterator[None]:
    """Fails where the block waits for what never comes, such as the other end of a pipe."""

    def fail(_number: int, _frame: object) -> None:
        raise AssertionError(f"runs for more than {seconds} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def list_files(folder: Path) -> set[tuple[str, int]]:
    return {
        (str(path.relative_to(folder)), path.lstat().st_size if path.is_file() else 0)
        for path in folder.rglob("*")
    }


@pytest.fixture
def find_faults(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, list[str]], list[str]]:
    """What is wrong with the answer to a command line."""

    def begin(*_given: object, **_options: object) -> None:
        raise WorkBegan

    monkeypatch.setattr("optpipe.report.progress.Terminal.step", begin)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "120")

    def run(name: str, line: list[str]) -> list[str]:
        before = list_files(folder)
        status: int | None = None
        try:
            with end_within(LONGEST_S):
                app(line)
        except SystemExit as ended:
            status = int(ended.code or 0)
        except WorkBegan:
            pass
        except BaseException as error:  # noqa: BLE001 - each is a fault to report
            capfd.readouterr()
            return [f"{name}: {type(error).__name__}: {str(error)[:200]}"]
        out, err = capfd.readouterr()
        faults = []
        if status is not None and status not in ENDS:
            faults.append(f"status {status}")
        if "Traceback" in err + out:
            faults.append("traceback")
        refused = status in (2, 3)
        told = [each for each in err.splitlines() if each.startswith("optpipe: ")] or [""]
        message = err[err.find("optpipe: ") :] if told != [""] else err
        if refused and (len(message.strip().split("\n")) > 2 or len(message) > 700):
            faults.append(f"{len(message.splitlines())} lines, {len(message)} characters")
        if not all(each.isprintable() for each in (err + out).split("\n")):
            faults.append("control characters")
        if refused and list_files(folder) != before:
            faults.append(f"wrote {sorted(list_files(folder) ^ before)[:3]}")
        return [f"{name}: {', '.join(faults)}: {err[:160]!r}"] if faults else []

    return run


@pytest.mark.slow
@pytest.mark.parametrize("command", dict.fromkeys(word.command for word in WORDS))
def test_odd_values_are_refused_in_two_lines_or_begin_the_work(command: str, find_faults) -> None:
    cases = [case for word in WORDS if word.command == command for case in list_cases(word)]
    faults = [fault for case in cases for fault in find_faults(*case)]
    assert not faults, "\n".join(faults)


def test_a_draw_of_odd_values_is_refused_in_two_lines(find_faults) -> None:
    words = [word for word in WORDS if word.command.startswith("store")]
    cases = [case for word in words for case in list_cases(word)]
    drawn = random.Random(len(cases)).sample(cases, 12)
    faults = [fault for case in drawn for fault in find_faults(*case)]
    assert not faults, "\n".join(faults)


def test_the_tree_has_all_commands_and_their_options() -> None:
    commands = {word.command for word in WORDS}
    assert BASE.keys() <= commands
    assert {"store gc", "compare", "doctor"} <= commands
    assert {word.flag for word in WORDS if word.command == "bench"} >= {"--batch", "--set", "--slo"}
