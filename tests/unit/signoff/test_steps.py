"""The steps that `run` and `signoff` take."""

from pathlib import Path

import pytest

from optpipe.bench.bench import Bench
from optpipe.core.events import Silent
from optpipe.signoff.steps import Pace, bench_step
from optpipe.workspace.runs import Run
from optpipe.workspace.store import Store


def test_an_interrupted_bench_ends_the_walk_it_is_part_of(monkeypatch, tmp_path):
    def bench(*_):
        return Bench(Run(Path("r"), {}), (), interrupted=interrupted)

    monkeypatch.setattr("optpipe.bench.bench.bench", bench)
    interrupted = False
    assert bench_step([], (), Pace(), Store(tmp_path), Silent()) == [Path("r")]
    interrupted = True
    with pytest.raises(KeyboardInterrupt):
        bench_step([], (), Pace(), Store(tmp_path), Silent())
