"""The GPU lane's order of operations, on a stand-in for torch.cuda that keeps a log; tests/gpu has the real thing."""

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from optpipe.core.load import LoadSpec, Mode, Scenario
from optpipe.measure.worker.checks import Reservoir, draw_rotation, probe_cache
from optpipe.measure.worker.loops import CudaLane, PointRun, run_load
from optpipe.measure.worker.messages import Spool, frame_from_spool

LOG: list[str] = []
CLOCK_MS = [0.0]


class Stream:
    current = None

    def synchronize(self):
        LOG.append("synchronize")


class Event:
    def __init__(self, enable_timing=False):
        assert enable_timing
        self.at = None

    def record(self, stream):
        assert stream is Stream.current, "an event on another stream than the launch"
        CLOCK_MS[0] += 0.001
        self.at = CLOCK_MS[0]
        LOG.append("record")

    def synchronize(self):
        assert self.at is not None
        LOG.append("wait")

    def elapsed_time(self, later):
        return later.at - self.at


class Binding:
    def __init__(self, inputs):
        self.inputs = {name: torch.from_numpy(array).clone() for name, array in inputs.items()}
        self.outputs = {"y": torch.zeros(len(inputs["x"]), 1)}
        self.stream = Stream.current

    def launch(self):
        assert Stream.current is self.stream, "launched on another stream than it was bound on"
        self.outputs["y"][:] = self.inputs["x"].sum(dim=1, keepdim=True)
        CLOCK_MS[0] += 1.0
        LOG.append("launch")


class Session:
    def run(self, inputs):
        return {"y": inputs["x"].sum(axis=1, keepdims=True)}

    def bind(self, inputs):
        return Binding(inputs)


@pytest.fixture(autouse=True)
def cuda(monkeypatch):
    class Current(nullcontext):
        def __init__(self, stream):
            super().__init__()
            self.stream = stream

        def __enter__(self):
            self.before, Stream.current = Stream.current, self.stream

        def __exit__(self, *error):
            Stream.current = self.before

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", Current)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(Stream, "current", stream))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self.clone())
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self.clone())
    monkeypatch.setattr(
        torch, "empty_like", lambda tensor, **_: torch.zeros(tensor.shape, dtype=tensor.dtype)
    )
    monkeypatch.setattr(CudaLane, "_current", None)
    LOG.clear()


POOL = {"x": np.random.default_rng(0).standard_normal((32, 6)).astype(np.float32)}


def run(tmp_path, scenario, mode, streams=1):
    turns = draw_rotation(POOL, 4, seed=0)
    session: Any = Session()
    lanes = [CudaLane(session, turns, mode, Stream()) for _ in range(streams)]
    point = LoadSpec(
        4,
        scenario,
        mode,
        streams,
        2000.0,
        min_seconds=0.02,
        max_seconds=1.0,
        percentile=90.0,
        warm_up_seconds=0.01,
        max_warm_up_seconds=0.2,
    )
    kept = Reservoir(8, 0)
    with Spool(tmp_path / "s") as spool:
        run_load(PointRun(point, spool, lanes, len(turns.batches), kept, lambda: None))
    answers = [(index, lanes[0].on_host(outputs)) for index, outputs in kept.kept]
    for index, got in answers:
        assert np.allclose(got["y"], session.run(turns.batches[index])["y"], atol=1e-5)
    probe = probe_cache(session, lanes[0], turns, 4, 0, 1e-3)
    assert not probe.stale
    return frame_from_spool(tmp_path / "s").filter(phase=1)


@pytest.mark.parametrize("scenario", list(Scenario))
@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("streams", [1, 3])
def test_every_scenario_and_mode_answers_rightly_on_its_own_streams(
    tmp_path, scenario, mode, streams
):
    used = streams if scenario in (Scenario.MULTI_STREAM, Scenario.OFFLINE) else 1
    frame = run(tmp_path, scenario, mode, used)
    assert len(frame) >= 64
    if scenario is Scenario.MULTI_STREAM:
        assert set(frame["images"]) == {4 * used}
        return
    assert frame["compute_ns"].min() > 1_000_000
    assert frame["h2d_ns"].null_count() == (len(frame) if mode is Mode.COMPUTE else 0)
    assert frame["stream"].n_unique() == used


def test_the_input_is_in_place_before_the_first_event_in_compute_mode(tmp_path):
    turns = draw_rotation(POOL, 4, seed=0)
    session: Any = Session()
    lane = CudaLane(session, turns, Mode.COMPUTE, Stream())
    LOG.clear()
    lane.stage(1)
    lane.query()
    assert LOG == ["synchronize", "record", "launch", "record", "record", "wait"]
