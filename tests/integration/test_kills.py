"""Commands killed at random moments: nothing finished is lost, nothing is half-written, no process stays behind, and the next
command goes on. benchmarks/kills.py is the long form; seeds are fixed, the moments are as even as the machine's load lets them be.
"""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from optpipe.signoff.verify import check_dossier
from optpipe.workspace.places import find_shipped_folder
from optpipe.workspace.runs import list_runs
from optpipe.workspace.store import Store
from tests.integration.conftest import optpipe
from tests.integration.fork_server import ForkedCommand

KILLS = 18
MOST_S = 2.5
"""A kill comes at most so late; most commands take longer, some shorter, which is a kill of nothing."""
AFTERWARDS = ("bench", "signoff", "compare", "gc")
"""What has to end by itself after the last kill."""
IMAGES = str(find_shipped_folder("calibration") / "digits" / "validation" / "0")
POLICY = """schema = 1
model = "digits"
[build]
precision = "fp32"
[[latency]]
p50 = "900 ms"
batch_size = 1
[size]
maximum = "1 MiB"
"""


def list_commands(case: int) -> list[tuple[str, ...]]:
    """The commands with work to do, whatever was done before: other seeds, other outputs."""
    return [
        (
            "build",
            "digits",
            "--precision",
            "fp32,int8",
            "--backend",
            "onnxruntime",
            "--device",
            "cpu",
            "--weights",
            f"random:{case}",
        ),
        ("calibrate", "digits", "--method", "max", "--set", f"seed={case}", "--count", "64"),
        ("evaluate", "digits"),
        ("preprocess", "digits", "--images", IMAGES, "--no-throughput"),
        (
            "bench",
            "digits",
            "--precision",
            "fp32",
            "--batch",
            "1",
            "--processes",
            "2",
            "--min-time",
            "0.2",
            "--max-cv",
            "90%",
        ),
        (
            "signoff",
            "digits",
            "--policy",
            "policy.toml",
            "--no-measure",
            "--no-figures",
            "--output",
            f"dossiers/{case}",
        ),
        (
            "run",
            "digits",
            "--policy",
            "policy.toml",
            "--backend",
            "onnxruntime",
            "--no-profile",
            "--max-cv",
            "90%",
            "--output",
            f"dossiers/run{case}",
        ),
        ("compare", "--model", "digits", "--output", f"compared/{case}"),
        ("store", "gc", "--yes"),
    ]


def require_whole_outputs(folder: Path, last: str) -> None:
    """What a killed command wrote elsewhere has all the files of `last`, whose command was not killed, or is not there."""
    for kind in ("attested", "served", "compared"):
        found = {
            path: frozenset(each.name for each in path.rglob("*"))
            for path in (folder / kind).glob("[0-9]*")
        }
        whole = found.get(folder / kind / last)
        assert whole is None or all(names == whole for names in found.values()), kind


def handles_signals(pid: int) -> bool:
    """Whether optpipe's first lines have run: before, a signal ends Python as any process."""
    caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)


def kill(
    command: tuple[str, ...], folder: Path, delay_s: float, number: signal.Signals
) -> tuple[int, bool]:
    """Starts `command` and sends the signal after `delay_s`; its status, and whether it could have handled the signal.

    Fails where something of it stays behind.
    """
    with (folder / "stderr.txt").open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "optpipe", *command],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            return process.wait(delay_s), True
        except subprocess.TimeoutExpired:
            begun = handles_signals(process.pid)
            process.send_signal(number)
        return wait_for_all(process, command, number), begun


def wait_for_all(
    process: subprocess.Popen[bytes] | ForkedCommand,
    command: tuple[str, ...],
    number: signal.Signals,
) -> int:
    """The status of a killed command. Fails where something of it stays behind."""
    status = process.wait(300)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return status
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    pytest.fail(f"{' '.join(command)}: processes stay behind after {number.name}")


def list_finished(folder: Path, known: frozenset[str] = frozenset()) -> frozenset[str]:
    """What is whole in the workspace. Fails for an entry that is damaged, a run that cannot be read, a dossier that is not intact.

    Dossiers that are `known` are not verified again.
    """
    store = Store(folder / ".optpipe")
    entries, damaged = store.scan_entries()
    assert not damaged
    for entry in entries:
        assert entry.find_damage() is None, entry.path
    runs = list_runs(store.workspace)
    dossiers = [
        path
        for path in (folder / "dossiers").glob("*")
        if path.is_dir() and not path.name.startswith(".")
    ]
    for path in dossiers:
        assert path.name in known or not check_dossier(path).problems, path
    stored = [each.path.name for each in entries]
    return frozenset((*stored, *(each.name for each in runs), *(each.name for each in dossiers)))


def test_kills_at_random_moments(tmp_path, exported) -> None:
    exported(tmp_path / ".optpipe")
    (tmp_path / "policy.toml").write_text(POLICY)
    commands = len(list_commands(0))
    rng, before, killed = random.Random(16), list_finished(tmp_path), 0
    for case in range(KILLS):
        command = list_commands(case)[case % commands]
        number = (
            signal.SIGKILL if rng.random() < 0.85 else rng.choice((signal.SIGTERM, signal.SIGINT))
        )
        delay_s = rng.uniform(0.05, MOST_S)
        status, begun = kill(command, tmp_path, delay_s, number)
        stderr = (tmp_path / "stderr.txt").read_text(encoding="utf-8", errors="replace")
        told = (
            f"case {case}, {number.name} of {' '.join(command)}: status {status}\n{stderr[-2000:]}"
        )
        assert "Traceback" not in stderr or not begun, told
        assert status in (0, 1, 2, 5, 130, -signal.SIGKILL) or not begun, told
        killed += status in (130, -signal.SIGKILL)
        after = list_finished(tmp_path, before)
        lost = before - after
        assert "gc" in command or not lost, f"{told}\nlost: {lost}"
        before = after
    print(f"{killed} of {KILLS} were killed at work")
    assert killed > KILLS / 3
    for command in (each for each in list_commands(KILLS) if each[0] in AFTERWARDS):
        ran = optpipe(*command, cwd=tmp_path)
        assert ran.status in (0, 1, 5), f"{' '.join(command)}: {ran.stderr}"
    list_finished(tmp_path)
    require_whole_outputs(tmp_path, str(KILLS))
    assert not list((tmp_path / ".optpipe" / "tmp").glob("*"))
