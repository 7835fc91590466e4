"""Inside the worker: when a measurement ends, what is sampled, and how answers are checked."""

import errno
import gc
import io
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes import sessions

from optpipe.core.errors import StageError
from optpipe.core.load import LoadSpec, Scenario
from optpipe.core.measurement import SAMPLE_COLUMNS
from optpipe.measure.worker import checks, loops
from optpipe.measure.worker.__main__ import Worker
from optpipe.measure.worker.checks import (
    MAX_ROTATED_BATCHES,
    MIN_ROTATED_BATCHES,
    Reservoir,
    check_outputs,
    compute_untimed_outputs,
    draw_rotation,
    limit_output_checks,
    make_unseen_batch,
    probe_cache,
)
from optpipe.measure.worker.loops import MAX_SAMPLE_FACTOR, PointRun, run_load
from optpipe.measure.worker.messages import (
    CHUNK_RECORDS,
    Point,
    SessionSpec,
    Spool,
    frame_from_spool,
    request_stop,
)
from optpipe.stats.percentiles import (
    count_queries_needed,
    count_samples_needed,
    count_transient_queries,
    summary_from_ns,
)
from optpipe.stats.ratio import SMALLEST_ROUNDS


def test_a_spool_is_read_while_it_is_written_and_keeps_every_sample(tmp_path):
    path = tmp_path / "s.spool"
    with Spool(path) as spool:
        write = spool.writer()
        for index in range(CHUNK_RECORDS + 10):  # over the first chunk's end
            write(1, 2, index % 8, 4, 0, index, index + 1, index + 5, 3, -1, 2, -1)
        assert not spool.stopped
        request_stop(path)
        assert spool.stopped
        frame = frame_from_spool(path)  # the writer still has it open, as after a kill
    assert {name: str(kind) for name, kind in frame.schema.items()} == dict(SAMPLE_COLUMNS)
    assert frame["end_ns"].to_list() == [index + 5 for index in range(CHUNK_RECORDS + 10)]
    assert frame["h2d_ns"].null_count() == len(frame)
    assert frame["compute_ns"].to_list()[:2] == [2, 2]


def test_another_file_is_no_spool(tmp_path):
    path = tmp_path / "s.spool"
    path.write_bytes(b"x" * 100)
    with pytest.raises(StageError, match="not a sample spool"):
        frame_from_spool(path)


@pytest.mark.parametrize("content", [b"", b"\0" * 5000])
def test_a_spool_whose_writer_was_killed_at_once_holds_nothing(tmp_path, content):
    path = tmp_path / "s.spool"
    path.write_bytes(content)
    assert frame_from_spool(path).is_empty()


def test_no_room_for_samples_is_said_and_leaves_no_spool(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StageError, match="no space for samples"):
        Spool(tmp_path / "s.spool")
    assert list(tmp_path.iterdir()) == []


@given(st.integers(1, 300), st.integers(1, 70))
def test_rotated_batches_differ_and_are_rows_of_the_pool(batch, size):
    pool = {"x": np.arange(size * 3, dtype=np.float32).reshape(size, 3)}
    turns = draw_rotation(pool, batch, seed=1)
    assert MIN_ROTATED_BATCHES <= len(turns.batches) <= MAX_ROTATED_BATCHES
    for rows, each in zip(turns.rows, turns.batches, strict=True):
        assert np.array_equal(each["x"], pool["x"][rows])
        assert len(each["x"]) == batch
    if size >= 2 * MAX_ROTATED_BATCHES * batch:
        assert len({each["x"].tobytes() for each in turns.batches}) == len(turns.batches)


def test_never_seen_inputs_keep_values_and_differ():
    batch = {"x": np.random.default_rng(0).standard_normal((2, 3, 5)).astype(np.float32)}
    made = [make_unseen_batch(batch, seed)["x"] for seed in range(8)]
    assert all(
        np.array_equal(np.sort(each, axis=None), np.sort(batch["x"], axis=None)) for each in made
    )
    assert all(not np.array_equal(each, batch["x"]) for each in made)


def test_the_reservoir_is_uniform():
    counts = np.zeros(100)
    for seed in range(600):
        reservoir = Reservoir(10, seed)
        for item in range(100):
            if (slot := reservoir.slot()) is not None:
                reservoir.keep(slot, item, None)
        for item, _ in reservoir.kept:
            counts[item] += 1
    assert counts.sum() == 6000
    assert counts.std() < 3 * np.sqrt(60)
    assert abs(counts[:50].sum() - 3000) < 200


BEFORE = [{"y": np.array([[1.0, 0.0]])}, {"y": np.array([[1.0, 0.1]])}]
ROWS = [np.array([0]), np.array([1])]


def judged(kept, reference=None):
    return check_outputs(kept, BEFORE, reference or {}, ROWS, 0.2, "the source model")


@pytest.mark.parametrize(
    ("kept", "reference", "why_not"),
    [
        ([(0, BEFORE[0]), (1, BEFORE[1])], None, None),
        ([(0, BEFORE[1])], None, "belongs to another input"),  # even inside the tolerance
        (
            [(0, BEFORE[0])],
            {"y": np.array([[5.0, 5.0], [5.0, 5.0]])},
            "differs from the source model",
        ),
        ([(0, BEFORE[0])], {"z": np.array([[1.0, 0.0]])}, "differs from the source model by inf"),
        ([(0, {"y": np.array([[np.nan, 0.0]])})], None, "contains NaN or Inf"),
        ([(0, {"y": np.zeros((2, 2))})], None, ""),
        ([(0, {"y": np.zeros((1, 3))})], None, ""),
        ([], None, ""),
    ],
)
def test_only_right_answers_pass(kept, reference, why_not):
    found = judged(kept, reference)
    assert found.passed is (why_not is None)
    assert (why_not or "") in (found.why_not or "")
    assert not found.passed or found.tells_inputs_apart


def test_a_reference_for_some_of_the_pool_judges_those():
    wrong = {"y": np.array([[9.0, 9.0]])}
    assert not judged([(0, BEFORE[0]), (1, BEFORE[1])], wrong).passed
    unknown = judged([(1, BEFORE[1])], wrong)  # input 1 has no reference
    assert (unknown.passed, unknown.reference) == (True, "the untimed run"), (
        "what was not compared is not said to be"
    )
    assert judged([(0, BEFORE[0])], BEFORE[0]).reference == "the source model and the untimed run"


@given(st.integers(1, 16), st.integers(8, 64))
def test_every_batch_holds_an_input_with_a_reference_as_long_as_there_are(batch, known):
    pool = {"x": np.arange(64 * 3, dtype=np.float32).reshape(64, 3)}
    turns = draw_rotation(pool, batch, seed=0, known=known)
    used = {int(row) for rows in turns.rows for row in rows if row < known}
    assert all((rows < known).any() for rows in turns.rows) or len(used) == known
    assert len({each["x"].tobytes() for each in turns.batches}) == len(turns.batches)


class Answering:
    """A session whose answers have a size, and whose calls take their time on a clock of the test's own."""

    def __init__(self, clock, seconds=0.0, megabytes=0.0):
        self.clock, self.seconds, self.calls = clock, seconds, 0
        self.answer = {"y": np.broadcast_to(np.float32(1.0), (1, int(megabytes * (1 << 18)) or 1))}

    def run(self, _):
        self.calls += 1
        self.clock[0] += self.seconds
        return self.answer

    def query(self):
        self.run(None)
        end = int(self.clock[0] * 1e9)
        return end - max(1, int(self.seconds * 1e9)), end, 0, -1, -1, -1

    def replace(self, index, batch):
        pass

    def stage(self, index):
        pass

    def outputs(self):
        return self.answer

    def on_host(self, kept):
        return kept


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(checks, "perf_counter", lambda: now[0])
    return now


TURNS = draw_rotation({"x": np.arange(64, dtype=np.float32).reshape(64, 1)}, 1, seed=0)


@pytest.mark.parametrize(
    ("seconds", "megabytes", "answers", "kept"),
    [
        (0.01, 0.1, MAX_ROTATED_BATCHES, 16),
        (20.0, 0.1, MIN_ROTATED_BATCHES, 16),
        (0.01, 1024.0, MIN_ROTATED_BATCHES, MIN_ROTATED_BATCHES),
        (0.01, 100.0, 2, 2),
    ],
)
def test_a_slow_artifact_or_one_with_huge_answers_is_asked_less_often(
    clock, seconds, megabytes, answers, kept
):
    session: Any = Answering(clock, seconds, megabytes)
    assert len(compute_untimed_outputs(session, TURNS)) == session.calls == answers
    assert limit_output_checks(16, session.answer) == kept


@pytest.mark.parametrize(("seconds", "rounds"), [(0.001, 12), (5.0, SMALLEST_ROUNDS)])
def test_the_cache_probe_of_a_slow_artifact_ends_soon_and_still_says_something(
    clock, seconds, rounds
):
    session: Any = Answering(clock, seconds)
    found = probe_cache(session, session, TURNS, 12, 0, 1e-3)
    assert session.calls == 2 * rounds + 1
    assert (len(found.known_ns), len(found.new_ns)) == (rounds, rounds)


MS = 1_000_000


def measured(folder, durations_ns, *, min_seconds=0.0, max_seconds=1000000000.0):
    """The durations that were taken until the load had enough for p99."""
    point = LoadSpec(1, min_seconds=min_seconds, max_seconds=max_seconds)
    taken: list[int] = []
    with Spool(folder / "s") as spool:
        load = PointRun(point, spool, [], 1, Reservoir(1, 0), lambda: None)
        for _ in range(50):  # the warm-up does not count
            load.write(0, 0, 0, 1, 0, 0, 0, 9 * MS, 0, -1, -1, -1)
        now = 0
        while not load.finished(0, now, len(taken)):
            duration = next(durations_ns)
            load.write(1, 0, 0, 1, 0, now, now, now + duration, 0, -1, -1, -1)
            now += duration
            taken.append(duration)
    return taken


def independent() -> Iterator[int]:
    generator = np.random.default_rng(0)
    while True:
        yield int(MS * generator.gamma(20, 0.05))


def waves(length: int) -> Iterator[int]:
    """Independent noise on a level that stays the same for `length` calls."""
    generator, noise = np.random.default_rng(1), independent()
    while True:
        level = generator.normal(5, 1)
        for _ in range(length):
            yield int(MS * level) + next(noise) // 10


def test_samples_are_as_many_as_the_percentile_needs_and_more_where_they_follow_each_other_closely(
    tmp_path,
) -> None:
    needed = count_samples_needed(99.0)
    assert len(measured(tmp_path, independent())) == needed
    for length in (3, 5):
        taken = measured(tmp_path, waves(length))
        assert needed < len(taken) <= MAX_SAMPLE_FACTOR * needed
        assert "p99" in summary_from_ns(np.array(taken)).percentiles
    assert len(measured(tmp_path, waves(400))) == MAX_SAMPLE_FACTOR * needed, (
        "it does not wait for ever"
    )


def test_the_least_and_the_most_time_hold(tmp_path: Path) -> None:
    assert sum(measured(tmp_path, independent(), min_seconds=3.0)) >= 3000 * MS
    assert sum(measured(tmp_path, waves(50), max_seconds=0.5)) < 520 * MS


class AtOnce:
    """A lane that answers without doing anything."""

    def stage(self, index: int) -> None:
        pass

    def query(self) -> tuple[int, int, int, int, int, int]:
        now = perf_counter_ns()
        return now, perf_counter_ns(), 0, -1, -1, -1

    def outputs(self) -> None:
        pass


def server(tmp_path, monkeypatch, service_ns: float, seed: int = 0):
    """The samples of a server at 5,000 queries/s whose warm-up took `service_ns` per query."""
    path = tmp_path / "s"
    monkeypatch.setattr(loops, "_warm_up", lambda load: setattr(load, "service_ns", service_ns))
    point = LoadSpec(
        1,
        Scenario.SERVER,
        rate_per_s=5000.0,
        min_seconds=0.0,
        max_seconds=1e9,
        percentile=50.0,
        warm_up_seconds=0.0,
    )
    with Spool(path) as spool:
        lane: Any = AtOnce()
        run_load(PointRun(point, spool, [lane], 1, Reservoir(1, 0), lambda: None, seed))
    return frame_from_spool(path)


@pytest.mark.parametrize("utilization", [0.0, 0.5, 0.8, 1.2])
def test_a_queue_is_measured_from_when_it_has_relaxed_and_the_longer_the_closer_to_saturation(
    tmp_path, monkeypatch, utilization
) -> None:
    phases = server(tmp_path, monkeypatch, utilization * 200_000)["phase"].to_list()
    left_out = count_transient_queries(utilization, 50.0)
    assert phases == [0] * left_out + [1] * count_queries_needed(utilization, 50.0)
    assert count_queries_needed(0.0, 99.0) == 3 * count_samples_needed(99.0)
    assert count_queries_needed(0.8, 99.0) == 75 * count_samples_needed(99.0)


class Counted(sessions.PlantedSession):
    untimed = 0

    def run(self, inputs):
        Counted.untimed += 1
        return super().run(inputs)


@pytest.fixture
def measure(tmp_path, monkeypatch):
    """`measure(load)`: the report, and how many calls were made that nobody timed."""
    monkeypatch.setattr(
        "optpipe.measure.worker.__main__.session_from_loader", lambda *_: Counted(0.1, "none")
    )
    np.save(tmp_path / "x.npy", np.random.default_rng(0).random((40, 64)).astype("float32"))
    with ExitStack() as stack:
        worker = Worker(SessionSpec("", {}, {"x": str(tmp_path / "x.npy")}), stack)

        def run(load):
            Counted.untimed = 0
            return worker.measured(
                Point("short", str(tmp_path / "short.spool"), load), io.StringIO()
            ), Counted.untimed

        yield run
    gc.unfreeze()


SHORT = LoadSpec(
    4,
    min_seconds=0.002,
    max_seconds=0.002,
    warm_up_seconds=0.0,
    max_warm_up_seconds=0.0,
    cache_probes=0,
)


@pytest.mark.slow
def test_a_short_point_goes_on_with_the_buffers_of_the_one_before_and_its_outputs_are_checked(
    measure,
):
    report, untimed = measure(replace(SHORT, max_warm_up_seconds=0.01))
    assert untimed == 16, "eight inputs, to know their outputs and to bind them"
    for _ in range(3):
        report, untimed = measure(SHORT)
        assert (untimed, report.rotated) == (0, 8)
        assert report.output_check.checked > 0
        assert report.output_check.passed


@pytest.mark.parametrize(
    "change",
    [{"batch_size": 2}, pytest.param({"max_warm_up_seconds": 0.01}, marks=pytest.mark.slow)],
)
@pytest.mark.slow
def test_another_load_or_one_that_warms_up_begins_anew(measure, change):
    measure(SHORT)
    assert measure(replace(SHORT, **change))[1] == 16


@pytest.mark.slow
def test_inputs_that_a_probe_of_the_cache_overwrote_are_not_used_again(measure):
    measure(replace(SHORT, cache_probes=4))
    assert measure(SHORT)[1] == 16
