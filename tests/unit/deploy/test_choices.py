"""What is served follows from what was measured: batches, instances, delays, and the lengths that a proof asks."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.entries import artifact_info
from tests.fakes.measurements import planted

from optpipe.core.card import InputSpec, ModelCard, Task, TensorSpec
from optpipe.core.measurement import Subject
from optpipe.deploy.server_settings import choose_settings
from optpipe.measure.groups import RecordedMeasurement
from optpipe.signoff.policy import policy_from_toml

PROCESSES = 40
SUBJECT = Subject("abc", "onnxruntime", "fp32", "cpu", options={"threads": 2})


def card(low=1, high=64):
    spec = InputSpec("image", "float32", (low, 3, 8, 8), (low, 3, 8, 8), (high, 3, 8, 8))
    return ModelCard(
        "net", "net.onnx", Task.OTHER, (spec,), (TensorSpec("logits", "float32", ("batch", 10)),)
    )


def settings(latencies_ms, limit_ms=None, known=None, more=(), limits="", processes=PROCESSES):
    limit = limits or (
        f'[[latency]]\np99 = "{limit_ms} ms"\n' if limit_ms else '[size]\nmaximum = "1 MiB"\n'
    )
    measured = [planted(SUBJECT, size, ms) for size, ms in latencies_ms.items()]
    recorded = tuple(
        RecordedMeasurement(replace(one, process=process), f"bench-{at}")
        for at, one in enumerate((*measured, *more))
        for process in range(processes)
    )
    build: Any = SimpleNamespace(
        card=known or card(),
        policy=policy_from_toml(f"schema = 1\n{limit}".encode()),
        measured=recorded,
        artifact=SimpleNamespace(info=artifact_info()),
    )
    return choose_settings(build)


def source(found, name):
    return next(each.source for each in found.choices if each.setting.endswith(name))


def test_the_largest_batch_keeps_the_limit_and_the_delay_leaves_room_for_two():
    found = settings({1: 2.0, 8: 6.0, 32: 20.0}, limit_ms=15)
    assert found.max_batch_size == 8
    assert 0 < found.delay_us < 3000, "less than 15 - 2 * 6 ms, by the upper bound"
    assert "run bench-1" in source(found, "max_batch_size")
    assert "15.0 ms" in source(found, "max_batch_size")


def without_p99(measurement):
    latency = measurement.latency_ns
    kept = {name: each for name, each in latency.percentiles.items() if name != "p99"}
    return replace(
        measurement,
        latency_ns=replace(latency, percentiles=kept, withheld={"p99": "too few samples"}),
    )


def test_a_batch_whose_limited_percentile_is_not_known_keeps_no_limit():
    large = without_p99(planted(SUBJECT, 32, 14.0))
    found = settings({1: 2.0, 8: 6.0}, limit_ms=15, more=[large])
    assert found.max_batch_size == 8
    found = settings({}, limit_ms=15, more=[large])
    assert (found.max_batch_size, found.delay_us) == (1, 0)
    assert "of p99" in source(found, "max_batch_size")
    assert settings({1: 2.0}, more=[large]).max_batch_size == 32


def test_one_process_shows_no_batch_within_a_limit():
    found = settings({1: 2.0, 8: 6.0}, limit_ms=15, processes=1)
    assert (found.max_batch_size, found.delay_us) == (1, 0)
    assert "none is shown to meet" in source(found, "max_batch_size")
    assert "no interval" in source(found, "delay_microseconds")


def test_without_a_limit_no_request_waits_for_others():
    found = settings({1: 2.0, 8: 6.0})
    assert (found.max_batch_size, found.delay_us) == (8, 0)
    assert "no latency limit" in source(found, "delay_microseconds")


@pytest.mark.parametrize(("low", "high"), [(8, 8), (4, 16)])
def test_a_fixed_batch_is_not_batched_by_the_server(low, high):
    found = settings({8: 6.0}, known=card(low, high))
    assert found.max_batch_size == 0


@given(
    st.dictionaries(st.sampled_from([1, 2, 4, 8, 16, 32]), st.floats(0.1, 100), min_size=1),
    st.floats(0.1, 500).map(lambda ms: round(ms, 2)),
)
def test_a_request_that_waits_and_follows_a_whole_batch_keeps_the_limit(latencies, limit):
    found = settings(latencies, limit_ms=limit)
    slowest = latencies[found.max_batch_size]
    if found.delay_us:
        assert found.delay_us / 1e3 + 2 * slowest <= limit * (1 + 1e-9)
    assert found.max_batch_size in latencies


def test_of_several_lengths_the_longest_decides_by_its_own_limit():
    def at(length, **latencies_ms):
        return [
            replace(one, load=replace(one.load, length=length))
            for size, ms in latencies_ms.items()
            for one in [planted(SUBJECT, int(size.removeprefix("b")), ms)]
        ]

    measured = [*at(32, b1=0.5, b8=1.0), *at(512, b1=8.0, b8=30.0)]
    limits = '[[latency]]\np99 = "2 ms"\nlength = 32\n[[latency]]\np99 = "40 ms"\nlength = 512\n'
    found = settings({}, more=measured, limits=limits)
    assert found.max_batch_size == 8, "30 ms at 512 tokens keeps its 40 ms; the 2 ms are for 32"
    assert "length 512" in source(found, "max_batch_size")
