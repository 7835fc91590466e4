"""`profile -- COMMAND` with real nsys, on programs as odd as people have them; without a GPU."""

import sys
from pathlib import Path

import pytest

from optpipe.core.errors import ExitStatus
from tests.integration.conftest import optpipe
from tests.integration.test_profile_nsys import needs_nsys

pytestmark = needs_nsys
RANGES = "import os, sys, time, torch\nnvtx = torch.cuda.nvtx\n"
LOOP = (
    RANGES + "for i in range(3):\n    nvtx.range_push('iter'); time.sleep(.05); nvtx.range_pop()\n"
)


def profile(workspace: Path, code: str, *options: str, as_json: bool = True):
    words = ("profile", *options, *(["--json"] if as_json else []), "--workspace", workspace)
    return optpipe(*words, "--", sys.executable, "-c", code)


@pytest.mark.parametrize(
    ("code", "stages"),
    [
        (LOOP, ["iter"]),
        (RANGES + f"os.execv(sys.executable, [sys.executable, '-c', {LOOP!r}])", ["iter"]),
        (
            RANGES + "for i in range(3):\n    nvtx.range_push('iter')\n    pid = os.fork()\n"
            "    if not pid:\n        time.sleep(.05); os._exit(0)\n    os.waitpid(pid, 0); nvtx.range_pop()\n",
            ["iter"],
        ),
        (RANGES + "nvtx.range_push('open'); nvtx.range_push('also open'); time.sleep(.2)", None),
        (LOOP.replace("'iter'", r"'a\n\tb'"), [r"a\n\tb"]),
    ],
    ids=["a loop", "exec", "fork", "ranges that never close", "odd names"],
)
def test_a_program_is_recorded_and_judged(
    tmp_path: Path, code: str, stages: list[str] | None
) -> None:
    found = profile(tmp_path, code).expect(ExitStatus.DONE).document
    names = [stage["subject"]["name"] for stage in found["stages"]]
    assert found["program"]["exit_status"] == 0
    if stages is not None:
        assert names[: len(stages)] == stages
    assert found["program"]["energy"]["cpu_why_not"] or found["program"]["energy"]["cpu_j"] > 0


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("print('nothing to see')", "no NVTX range"),
        ("import os; os.write(1, os.urandom(100_000) + b'\\nlast line\\n'); raise SystemExit(7)", "last line"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "signal 9"),
    ],
    ids=["no ranges", "binary output", "killed"],
)  # fmt: skip
def test_a_recording_without_an_event_says_how_the_program_ended(
    tmp_path: Path, code: str, words: str
) -> None:
    finished = profile(tmp_path, code).expect(ExitStatus.STAGE_FAILED)
    error = finished.document["error"]
    assert words in error["message"]
    assert len(finished.stderr.splitlines()[-2:]) <= 2
    assert not list((tmp_path / "runs").glob("*"))


def test_a_failed_program_is_judged_up_to_there(tmp_path: Path) -> None:
    code = LOOP + "print('tail of it'); sys.stdout.buffer.write(bytes(range(256))); sys.exit(3)"
    finished = profile(tmp_path, code).expect(ExitStatus.STAGE_FAILED)
    assert finished.document["program"]["exit_status"] == 3
    assert "tail of it" in finished.document["program"]["output_tail"]
    assert finished.document["stages"][0]["profile"]["iterations"]["count"] == 3


def test_a_range_that_is_not_there_costs_no_recording(tmp_path: Path) -> None:
    finished = profile(tmp_path, LOOP, "--range", "nothing").expect(ExitStatus.BAD_INPUT)
    assert "the trace has: iter" in finished.document["error"]["message"]
    [kept] = (tmp_path / "runs").glob("*/program")
    again = optpipe("profile", "--trace", kept, "--range", "iter", "--json").expect(0)
    assert again.document["scope"] == "iter"


def test_a_server_ends_when_it_is_asked(tmp_path: Path) -> None:
    code = LOOP.replace("range(3)", "range(10**6)")
    found = profile(tmp_path, code, "--duration", "4").expect(ExitStatus.DONE).document
    assert found["stages"][0]["profile"]["iterations"]["count"] > 2


WAITING = """
import time, torch
from torch.utils.data import DataLoader, {kind}
class Slow({kind}):
    def __len__(self): return 60
    def __getitem__(self, at): time.sleep(.01); return torch.zeros(4)
    def __iter__(self): return (self[at] for at in range(60))
if __name__ == "__main__":
    for batch in DataLoader(Slow(), batch_size=2{options}): time.sleep(.03)
"""


def test_a_trial_names_the_workers_that_end_the_wait(tmp_path: Path) -> None:
    """Two samples of 10 ms wait 20 ms in the loop's own process, and none where two workers read while it sleeps 30 ms."""
    code = WAITING.format(kind="Dataset", options="")
    found = profile(tmp_path, code, "--workers", "0,2").expect(ExitStatus.DONE).document
    loops = {stage["folder"]: stage["loop"] for stage in found["stages"]}
    assert loops.keys() == {"program", "workers-0", "workers-2"}
    shares = {name: loop["data_wait_ns"]["median"] / loop["period_ns"]["median"] for name, loop in loops.items()}  # fmt: skip
    assert shares["program"] > 0.2
    assert shares["workers-0"] > 0.2
    assert shares["workers-2"] < 0.05
    shown = profile(tmp_path, code, "--workers", "2", as_json=False).expect(ExitStatus.DONE)
    assert "2 workers end the wait" in shown.stdout


def test_a_loader_whose_workers_cannot_be_tried_is_named(tmp_path: Path) -> None:
    code = WAITING.format(kind="IterableDataset", options=", num_workers=1")
    found = profile(tmp_path, code, "--workers", "2").expect(ExitStatus.DONE).document
    assert len(found["stages"]) == 1
    [failed] = found["failed"].values()
    assert "iterable" in failed


def test_a_program_without_a_loader_is_not_run_again(tmp_path: Path) -> None:
    code = LOOP + "open('starts', 'a').write('one')"
    words = ("profile", "--workers", "0,2", "--json", "--workspace", tmp_path)
    finished = optpipe(*words, "--", sys.executable, "-c", code, cwd=tmp_path)
    found = finished.expect(ExitStatus.DONE).document
    assert len(found["stages"]) == 1
    assert not found["failed"]
    assert "no DataLoader" in " ".join(found["warnings"])
    assert (tmp_path / "starts").read_text() == "one"
