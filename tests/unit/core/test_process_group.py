"""A child process ends with all that it started."""

import os
import sys
from pathlib import Path
from time import monotonic

import pytest

from optpipe.core.process_group import open_process_group

pytestmark = pytest.mark.slow

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


@pytest.mark.parametrize("ask_s", [None, 5.0])
def test_nothing_of_the_group_is_left(tmp_path, ask_s):
    log = tmp_path / "log"
    with open_process_group([sys.executable, "-c", PROGRAM], log, dict(os.environ), ask_s=ask_s) as process:
        started = int(read_lines(process, log, 2)[0])
        os.kill(started, 0)
    assert process.returncode == (-9 if ask_s is None else -15)
    with pytest.raises(ChildProcessError):
        os.waitpid(process.pid, os.WNOHANG)
    state, until = Path(f"/proc/{started}/stat"), monotonic() + 30
    while state.exists() and state.read_text().split()[2] != "Z":  # until init takes it
        assert monotonic() < until


def test_only_errors_are_kept(tmp_path):
    log = tmp_path / "log"
    with open_process_group([sys.executable, "-c", PROGRAM], log, dict(os.environ), errors_only=True) as process:
        assert read_lines(process, log, 1) == ["an error"]
