"""Jobs in processes of their own: results in order, failures in one line, nothing left running."""

import sys
from pathlib import Path
from time import monotonic

import pytest

from optpipe.preprocess.throughput.processes import explain_failure, run_job, run_jobs

MODULE = """
import os, sys, time
from pathlib import Path
from optpipe.preprocess.throughput.processes import serve_jobs

def answer(job):
    if job == "raise":
        raise ValueError("no such thing")
    if job == "die":
        os.kill(os.getpid(), 9)
    if job == "hang":
        time.sleep(60)
    return {"job": job, "pid": os.getpid(), "setting": os.environ.get("SETTING")}

serve_jobs(Path(sys.argv[1]), answer)
"""


REFUSED = """RuntimeError: Critical error in pipeline:
Error in CPU operator `nvidia.dali.fn.decoders.image`,
which was used in the pipeline definition with the following traceback:

encountered:

nvImageCodec failure: '#4'
Current pipeline object is no longer valid.
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "answers.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(sys.modules['optpipe'].__file__).parent.parent}")
    return "answers"


def test_jobs_share_a_process_until_one_fails(module):
    found = list(run_jobs(module, ["one", "two", "raise", "three", "die", "four"], 20))
    assert [each if isinstance(each, str) else each["job"] for each in found] == [
        "one",
        "two",
        "ValueError: no such thing",
        "three",
        "killed by signal 9 (out of host memory?)",
        "four",
    ]
    assert found[0]["pid"] == found[1]["pid"] != found[3]["pid"] != found[5]["pid"]


def test_one_that_hangs_is_ended_at_its_limit(module):
    begun = monotonic()
    assert run_job(module, "hang", 1.0) == "timed out after 1 s"
    assert monotonic() - begun < 10


def test_stopping_early_ends_the_process(module):
    found = run_jobs(module, ["one", "hang"], 60)
    pid = next(found)["pid"]
    found.close()
    assert not Path(f"/proc/{pid}").exists()


def test_defaults_of_the_environment_give_way_to_the_users(module, monkeypatch):
    monkeypatch.delenv("SETTING", raising=False)
    (found,) = run_jobs(module, ["one"], 20, {"SETTING": "32"})
    assert found["setting"] == "32"
    monkeypatch.setenv("SETTING", "8")
    (found,) = run_jobs(module, ["one"], 20, {"SETTING": "32"})
    assert found["setting"] == "8"


@pytest.mark.parametrize(
    ("stderr", "status", "said"),
    [
        ("RuntimeError: CUDA out of memory. Tried to allocate", 1, "out of memory; use a smaller"),
        ("CUDA runtime API error cudaErrorMemoryAllocation (2)", 1, "out of memory"),
        ("Traceback\n  x\nValueError: no such thing\n", 1, "ValueError: no such thing"),
        ("", -9, "signal 9"),
        (REFUSED, 1, "DALI: the decoder does not support this format (nvImageCodec status 4); `optpipe preprocess"),
    ],
)
def test_a_failed_process_gives_its_reason_in_one_line(stderr, status, said):
    assert said in explain_failure(stderr, status)
