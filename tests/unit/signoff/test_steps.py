"""The steps that `run` and `signoff` take."""

from pathlib import Path

import pytest

from optpipe.core.entries import Environment
from optpipe.core.events import SilentListener
from optpipe.measure.records import BenchRecord
from optpipe.signoff.steps import MeasurementBudget, run_bench_step
from optpipe.workspace.store import Store


def test_an_interrupted_bench_ends_the_walk_it_is_part_of(monkeypatch, tmp_path):
    def bench(*_):
        return BenchRecord("r", "r", (), (), Environment(), 0, interrupted=interrupted)

    monkeypatch.setattr("optpipe.measure.bench.bench_artifacts", bench)
    interrupted = False
    assert run_bench_step([], (), MeasurementBudget(), Store(tmp_path), SilentListener()) == [Path("r")]
    interrupted = True
    with pytest.raises(KeyboardInterrupt):
        run_bench_step([], (), MeasurementBudget(), Store(tmp_path), SilentListener())
