"""The walk's notes: an interrupted walk goes on after its last finished step, and never from notes of another one."""

import json

import pytest

from optpipe.build.build import BuildPlan
from optpipe.build.records import ModelBuild
from optpipe.core.card import ModelCard, Task
from optpipe.core.entries import ModelInfo, WeightsRecord
from optpipe.core.errors import MissingError, StageError
from optpipe.core.events import SilentListener
from optpipe.measure.figures import ENERGY_SECONDS
from optpipe.signoff.collect import SignoffRequest
from optpipe.signoff.policy import policy_from_toml
from optpipe.signoff.run import PipelinePlan, _Checkpoint, _run_step
from optpipe.signoff.steps import loads_from_criteria
from optpipe.workspace.entry import MANIFEST
from optpipe.workspace.file_names import CARD
from optpipe.workspace.store import Store


@pytest.fixture
def notes(tmp_path):
    return _Checkpoint(tmp_path / "walks" / "one.json")


def finished_run(notes, name):
    path = notes.path.parent.parent / "runs" / name
    path.mkdir(parents=True)
    (path / MANIFEST).write_text("{}")
    return path


def test_a_finished_step_is_not_done_again_until_the_walk_is_finished(notes):
    done = []

    def work():
        done.append(1)
        return [finished_run(notes, f"bench-{len(done)}")]

    assert _run_step("bench", work, notes, SilentListener()).status == "done"
    again = _run_step("bench", work, notes, SilentListener())
    assert (again.status, again.runs, len(done)) == ("resumed", ("bench-1",), 1)
    notes.clear()
    assert _run_step("bench", work, notes, SilentListener()).status == "done"
    assert len(done) == 2


def test_a_step_whose_run_is_gone_is_done_again(notes):
    run = finished_run(notes, "bench-1")
    notes.finish("bench", [run])
    assert notes.finished("bench") == [run]
    (run / MANIFEST).unlink()
    assert notes.finished("bench") is None


@pytest.mark.parametrize(("error", "status"), [(MissingError("no DALI"), "skipped"), (StageError("broke"), "failed")])
def test_what_cannot_be_done_is_said_and_stops_nothing(notes, error, status):
    def work():
        raise error

    listener = SilentListener()
    found = _run_step("preprocess", work, notes, listener)
    assert (found.status, found.reason) == (status, str(error))
    assert str(error) in listener.warnings[0]
    assert notes.finished("preprocess") is None


def test_an_interruption_leaves_the_notes(notes):
    notes.finish("evaluate", [finished_run(notes, "evaluate-1")])

    def work():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _run_step("bench", work, notes, SilentListener())
    assert notes.finished("evaluate")
    assert notes.finished("bench") is None


def test_damaged_notes_are_as_none(notes):
    notes.path.parent.mkdir()
    notes.path.write_text("{")
    assert notes.finished("bench") is None


def test_notes_are_those_of_data_with_the_same_content(tmp_path):
    policy = policy_from_toml(b'schema = 1\n[size]\nmaximum = "1 MiB"\n')
    store, data = Store(tmp_path / "work"), tmp_path / "data.jsonl"
    info = ModelInfo("reader", "reader.onnx", WeightsRecord("embedded", ""), simplified=True, own_precision=None)

    def make(directory):
        (directory / CARD).write_text(json.dumps(ModelCard("reader", "reader.onnx", Task.OTHER, ()).to_dict()))
        return info

    model, _ = store.produce(ModelInfo, {}, make, listener=SilentListener())
    build = BuildPlan((), (), named=True)
    plan = PipelinePlan(SignoffRequest("reader", policy), build, data=data)
    paths = []
    for content in ("1", "2", "1"):
        data.write_text(content)
        paths.append(_Checkpoint.of(plan, ModelBuild(model, None), store).path)
    assert paths[0] == paths[2] != paths[1]


def test_what_is_measured_follows_from_the_policy():
    text = """schema = 1
[[latency]]
p99 = "1 ms"
batch_size = 1
[[throughput]]
minimum = "1 images/s"
batch_size = 8
[[throughput]]
minimum = "1 images/s"
batch_size = 8
scenario = "offline"
mode = "end-to-end"
[size]
maximum = "1 MiB"
"""
    loads = [
        (str(load.scenario), str(load.mode), sizes)
        for load, sizes in loads_from_criteria(policy_from_toml(text.encode()).criteria, 0.6, 30.0)
    ]
    assert loads == [("offline", "end-to-end", (8,)), ("single-stream", "compute", (1, 8))]
    only_size = policy_from_toml(b'schema = 1\n[size]\nmaximum = "1 MiB"\n')
    assert [sizes for _, sizes in loads_from_criteria(only_size.criteria, 0.6, 30.0)] == [(1,)]


@pytest.mark.parametrize(("batch", "sizes"), [("", (1,)), ("[[memory]]\nmaximum = '1 GiB'\nbatch_size = 8", (8,))])
def test_a_percentile_of_every_load_decides_the_samples_of_each(batch, sizes):
    policy = policy_from_toml(f"schema = 1\n[[latency]]\n'p99.9' = '20 ms'\n{batch}".encode())
    ((load, found),) = loads_from_criteria(policy.criteria, 0.6, 30.0)
    assert (load.percentile, found) == (99.9, sizes)


def test_rates_streams_percentiles_and_energy_decide_the_load():
    text = """schema = 1
[[latency]]
p99 = "20 ms"
batch_size = 1
scenario = "server"
rate = "500 queries/s"
[[latency]]
"p99.9" = "20 ms"
batch_size = 4
scenario = "multi-stream"
streams = 3
[[energy]]
maximum = "1 J/image"
batch_size = 64
"""
    server, several, energy = sorted(
        (load for load, _ in loads_from_criteria(policy_from_toml(text.encode()).criteria, 0.6, 30.0)),
        key=lambda load: -(load.rate_per_s or 0),
    )
    assert (str(server.scenario), server.rate_per_s, server.percentile) == ("server", 500.0, 99.0)
    assert (several.streams, several.percentile, several.batch_size) == (3, 99.9, 4)
    assert (energy.min_seconds, energy.batch_size) == (12.0, 64)


def test_energy_takes_no_time_where_it_cannot_be_measured() -> None:
    policy = policy_from_toml(b'schema = 1\n[[energy]]\nmaximum = "50 mJ/image"\nbatch_size = 4\n')
    found = {
        energy: [
            (load.batch_size, load.min_seconds)
            for load, _ in loads_from_criteria(policy.criteria, 0.6, 30.0, energy=energy)
        ]
        for energy in (True, False)
    }
    assert found == {True: [(4, ENERGY_SECONDS)], False: [(4, 0.6)]}
