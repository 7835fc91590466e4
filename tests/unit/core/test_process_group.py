"""A child process ends with all that it started, and with its parent."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from time import monotonic

import pytest

from optpipe.core.process import open_process_group

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


@pytest.mark.parametrize("kind", ["foreign", "own"])
def test_a_killed_parent_leaves_nothing(tmp_path, kind):
    log = tmp_path / "log"
    command = ["sh", "-c", "echo 1; exec sleep 60"] if kind == "foreign" else [sys.executable, "-c", OWN]
    with subprocess.Popen([sys.executable, "-c", PARENT, log, kind, *command], stdout=subprocess.PIPE) as parent:
        child = int(parent.stdout.readline())
        until = monotonic() + 30
        while not (log.exists() and log.read_text()):
            assert monotonic() < until
        parent.send_signal(signal.SIGKILL)
        await_end(child)


def test_a_process_whose_parent_had_ended_before_ends_at_once(tmp_path):
    program = "from optpipe.core.process import end_with_parent; end_with_parent()"
    for parent, status in ((os.getpid(), 0), (os.getpid() + 1, 1)):
        environment = {**os.environ, "OPTPIPE_PARENT": str(parent)}
        assert subprocess.run([sys.executable, "-c", program], env=environment, check=False).returncode == status


def test_only_errors_are_kept(tmp_path):
    log = tmp_path / "log"
    with open_process_group([sys.executable, "-c", PROGRAM], log, dict(os.environ), errors_only=True) as process:
        assert read_lines(process, log, 1) == ["an error"]
