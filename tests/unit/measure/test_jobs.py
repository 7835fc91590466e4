"""Jobs in processes of their own: results in order, failures with what they left behind, nothing left running."""

import sys
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import pytest

from optpipe.core.process import JobFailure, run_jobs

pytestmark = pytest.mark.slow

MODULE = """
import os, sys, time
from pathlib import Path
from optpipe.core.process import serve_jobs

def answer(job):
    if job == "raise":
        raise ValueError("no such thing")
    if job == "die":
        os.kill(os.getpid(), 9)
    if job == "hang":
        time.sleep(60)
    print("what a library prints")
    return {"job": job, "pid": os.getpid(), "setting": os.environ.get("SETTING")}

serve_jobs(Path(sys.argv[1]), str, answer)
"""


@dataclass(frozen=True)
class Answer:
    job: str
    pid: int
    setting: str | None


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "answers.py").write_text(MODULE)
    monkeypatch.setenv(
        "PYTHONPATH", f"{tmp_path}:{Path(sys.modules['optpipe'].__file__).parent.parent}"
    )
    return "answers"


def run(module, jobs, limit_s=100, defaults=None):
    return run_jobs(module, jobs, Answer, limit_s, defaults or {})


def test_jobs_share_a_process_until_one_fails(module):
    found = list(run(module, ["one", "two", "raise", "three", "die", "four"]))
    ended = [each.exit_status if isinstance(each, JobFailure) else each.job for each in found]
    assert ended == ["one", "two", 1, "three", -9, "four"]
    assert found[2].stderr.endswith("ValueError: no such thing\n")
    assert found[0].pid == found[1].pid != found[3].pid != found[5].pid


def test_one_that_hangs_is_ended_at_its_limit(module):
    begun = monotonic()
    assert list(run(module, ["hang"], 1.0)) == [JobFailure("", None)]
    assert monotonic() - begun < 50


def test_stopping_early_ends_the_process(module):
    found = run(module, ["one", "hang"], 60)
    pid = next(found).pid
    found.close()
    assert not Path(f"/proc/{pid}").exists()


def test_defaults_of_the_environment_give_way_to_the_users(module, monkeypatch):
    monkeypatch.delenv("SETTING", raising=False)
    (found,) = run(module, ["one"], defaults={"SETTING": "32"})
    assert found.setting == "32"
    monkeypatch.setenv("SETTING", "8")
    (found,) = run(module, ["one"], defaults={"SETTING": "32"})
    assert found.setting == "8"
