"""Signals, processes and errors."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from time import monotonic

import pytest

from optpipe.core.errors import BadInputError, StageError, first_line, read_as_user_file
from optpipe.core.process import handle_interrupts, open_process_group

SIGNALS = pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"]
)


@pytest.fixture(autouse=True)
def _handlers():
    """As a program begins, whatever the test runner does with SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@SIGNALS
def test_both_signals_interrupt_and_the_handlers_come_back(number):
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), handle_interrupts():
        signal.raise_signal(number)
    assert signal.getsignal(number) is before


class Panic(BaseException):
    """As pyo3 has it."""


@SIGNALS
@pytest.mark.parametrize(
    "error", [ImportError, Panic], ids=["an extension module", "a Rust library"]
)
def test_what_a_library_makes_of_it_is_an_interruption(number, error):
    def call():
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            raise error from None

    with pytest.raises(KeyboardInterrupt), handle_interrupts():
        call()


@SIGNALS
def test_it_is_not_lost_in_a_destructor(number, capsys):
    class Destroyed:
        def __del__(self):
            signal.raise_signal(number)

    def destroyed():
        Destroyed()
        assert threading.Event().wait(60), "it went on"

    with pytest.raises(KeyboardInterrupt), handle_interrupts():
        destroyed()
    assert capsys.readouterr().err == ""


def test_an_ignored_signal_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with handle_interrupts():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


PROGRAM = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid, flush=True)
print("an error", file=sys.stderr, flush=True)
time.sleep(60)
"""


def read_lines(process, log, count):
    while process.poll() is None and log.read_text().count("\n") < count:
        os.sched_yield()
    return log.read_text().splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("ask_s", [None, 5.0])
def test_nothing_of_the_group_is_left(tmp_path, ask_s):
    log = tmp_path / "log"
    with open_process_group(
        [sys.executable, "-c", PROGRAM], log, dict(os.environ), ask_s=ask_s
    ) as process:
        started = int(read_lines(process, log, 2)[0])
        os.kill(started, 0)
    assert process.returncode == (-9 if ask_s is None else -15)
    with pytest.raises(ChildProcessError):
        os.waitpid(process.pid, os.WNOHANG)
    await_end(started)


def await_end(number):
    state, until = Path(f"/proc/{number}/stat"), monotonic() + 30
    while state.exists() and state.read_text().split()[2] != "Z":  # until init takes it
        assert monotonic() < until


PARENT = """
import os, sys, time
from pathlib import Path
from optpipe.core.process import open_process_group
log, foreign, *command = sys.argv[1:]
with open_process_group(command, Path(log), dict(os.environ), foreign=foreign == "foreign") as process:
    print(process.pid, flush=True)
    time.sleep(60)
"""
OWN = "from optpipe.core.process import end_with_parent; end_with_parent(); print(1, flush=True); import time; time.sleep(60)"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["foreign", "own"])
def test_a_killed_parent_leaves_nothing(tmp_path, kind):
    log = tmp_path / "log"
    command = (
        ["sh", "-c", "echo 1; exec sleep 60"] if kind == "foreign" else [sys.executable, "-c", OWN]
    )
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, log, kind, *command], stdout=subprocess.PIPE
    ) as parent:
        child = int(parent.stdout.readline())
        until = monotonic() + 30
        while not (log.exists() and log.read_text()):
            assert monotonic() < until
        parent.send_signal(signal.SIGKILL)
        await_end(child)


@pytest.mark.slow
def test_a_process_whose_parent_had_ended_before_ends_at_once(tmp_path):
    program = "from optpipe.core.process import end_with_parent; end_with_parent()"
    for parent, status in ((os.getpid(), 0), (os.getpid() + 1, 1)):
        environment = {**os.environ, "OPTPIPE_PARENT": str(parent)}
        assert (
            subprocess.run([sys.executable, "-c", program], env=environment, check=False).returncode
            == status
        )


@pytest.mark.slow
def test_only_errors_are_kept(tmp_path):
    log = tmp_path / "log"
    with open_process_group(
        [sys.executable, "-c", PROGRAM], log, dict(os.environ), errors_only=True
    ) as process:
        assert read_lines(process, log, 1) == ["an error"]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("\n one \ntwo"), "one"),
        (MemoryError(), "MemoryError"),
        (OSError("x" * 999), "x" * 240),
    ],
)
def test_any_error_has_a_first_line(error, text):
    assert first_line(error).strip() == text


def test_a_file_to_read_that_is_not_there_or_is_a_folder_is_said_in_words(tmp_path):
    for path, said in (
        (tmp_path / "x.toml", "no such file"),
        (tmp_path, "is a folder; give a file"),
    ):
        with (
            pytest.raises(BadInputError) as refused,
            read_as_user_file(path, "a price list (TOML)"),
        ):
            path.read_text()
        assert str(refused.value) == f"{path}: {said}"


@pytest.mark.parametrize("kind", [BadInputError, StageError])
def test_a_user_s_string_is_repeated_in_part_and_the_way_out_stays(kind):
    for text in ("x" * 5000, "word " * 1000, "é/" * 2500):
        error = kind(f"{text}: no such model", remedy="list models with `optpipe store ls`")
        error.word_for_python()
        for said in (
            str(kind(f"{text}: no such model", remedy="see `optpipe store ls`")),
            str(error),
        ):
            assert len(said) < 600
            assert said.startswith(text[:40])
            assert said.endswith("`optpipe store ls`")
    path = "/" + "folder/" * 40
    assert path in str(kind(f"{path}: no such file")), "a path is whole"
