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


def profile(workspace: Path, code: str, *options: str):
    words = ("profile", *options, "--json", "--workspace", workspace)
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
