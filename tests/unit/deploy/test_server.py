"""A server, its clients, and the frames and graphs between them."""

import io
import os
import sys
from itertools import islice, starmap
from threading import Lock
from time import perf_counter_ns, sleep
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from optpipe.core.errors import BadInputError, MissingError
from optpipe.core.load import LoadSpec, Scenario
from optpipe.core.metrics.sections import Sense
from optpipe.core.quantity import Dimension
from optpipe.deploy import tune
from optpipe.deploy.frames import SharedMemory, read_frame, write_frame
from optpipe.deploy.live import judge_latencies
from optpipe.deploy.proof import MAX_FAILED, Answer, send_requests
from optpipe.deploy.server import find_server
from optpipe.deploy.session_process import list_captured_sizes
from optpipe.signoff.policy import Criterion


def test_no_server_is_a_missing_tool_with_the_way_to_get_one(monkeypatch, tmp_path):
    monkeypatch.delenv("OPTPIPE_TRITON", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingError, match=r"nvidia-pytriton==0\.7\.0"):
        find_server(None)
    with pytest.raises(MissingError, match="has no nvidia-pytriton"):
        find_server(sys.executable)
    with pytest.raises(BadInputError, match="neither"):
        find_server(str(tmp_path / "nothing"))


MS = 1_000_000


class Client:
    """Answers each request after 5 ms, each one from the number `fails` on with an error."""

    def __init__(self, fails=None):
        self.sent, self.now, self.most, self.fails, self.lock = 0, 0, 0, fails, Lock()

    def infer(self, _model, _inputs):
        with self.lock:
            self.sent, self.now = self.sent + 1, self.now + 1
            self.most, number = max(self.most, self.now), self.sent
        sleep(0.005)
        with self.lock:
            self.now -= 1
        if self.fails is not None and number >= self.fails:
            raise OSError("no memory")


def send(client, arrivals, connections):
    pytest.importorskip(
        "tritonclient.http", reason="tritonclient is not installed: the extra `triton`"
    )
    return send_requests(
        lambda: (SimpleNamespace(__name__="http"), client), "net", {}, arrivals, connections
    )


@pytest.mark.parametrize("count", [1, 3])
def test_no_more_than_asked_for_are_in_flight_and_all_are_awaited(count):
    client = Client()
    found, failed = send(client, islice(iter(perf_counter_ns, None), 10), count)
    assert (client.most, client.now, len(found), failed) == (count, 0, 10, [])
    assert min(answer.latency_ns for answer in found) >= 5 * MS


def test_an_arrival_is_asked_for_when_there_is_room_and_its_latency_counts_from_when_it_was_due():
    client, asked = Client(), []

    def arrivals():
        for _ in range(4):
            asked.append(client.now)
            yield perf_counter_ns() - 1000 * MS

    assert min(answer.latency_ns for answer in send(client, arrivals(), 2)[0]) >= 1005 * MS
    assert max(asked) <= 1


@pytest.mark.parametrize("connections", [1, 4])
def test_a_load_ends_after_a_few_failed_requests(connections):
    latencies, failed = send(Client(fails=0), iter([perf_counter_ns()] * 1000), connections)
    assert latencies == []
    assert MAX_FAILED <= len(failed) < MAX_FAILED + connections
    assert "no memory" in failed[0]


TENSORS = st.lists(
    arrays.arrays(
        st.sampled_from(["float32", "float16", "int64", "uint8", "bool"]),
        arrays.array_shapes(min_dims=0, min_side=0),
    ),
    max_size=3,
)


@given(st.lists(TENSORS, min_size=1, max_size=4), st.booleans())
def test_frames_round_trip(batches, shared):
    """A batch of frames is read after all of it was written; the next one comes to the same memory."""
    descriptor = os.memfd_create("test")
    sent, received = (SharedMemory(descriptor) if shared else None for _ in range(2))
    try:
        for _ in range(2):
            pipe = io.BytesIO()
            if sent is not None:
                sent.rewind()
            for number, found in enumerate(batches):
                write_frame(
                    pipe,
                    {"number": number},
                    {f"name{at}": each for at, each in enumerate(found)},
                    sent,
                )
            pipe.seek(0)
            back = [read_frame(pipe, received) for _ in batches]
            assert read_frame(pipe, received) is None
            for number, (found, (header, arrived)) in enumerate(zip(batches, back, strict=True)):
                assert header["number"] == number
                for one, other in zip(found, arrived.values(), strict=True):
                    assert one.dtype == other.dtype
                    np.testing.assert_array_equal(one, other)
    finally:
        os.close(descriptor)


@given(st.integers(1, 300))
def test_every_batch_has_a_graph_of_less_than_twice_its_size(largest):
    sizes = list_captured_sizes(largest)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == largest
    for count in range(1, largest + 1):
        assert count <= next(each for each in sizes if each >= count) < 2 * count or count == 1


@pytest.mark.parametrize(
    ("ms", "count", "rate", "verdicts"),
    [
        (10, 2000, 50, ["PASS", "PASS"]),
        (10, 2000, 70, ["PASS", "PASS"]),
        (10, 2000, 40, ["INCONCLUSIVE", "INCONCLUSIVE"]),
        (10, 100, 50, ["PASS", "INCONCLUSIVE"]),
        (40, 2000, 50, ["FAIL", "FAIL"]),
        (40, 2000, 40, ["FAIL", "FAIL"]),
        (40, 2000, 70, ["INCONCLUSIVE", "INCONCLUSIVE"]),
    ],
)
def test_a_lower_rate_than_the_policys_cannot_pass_and_a_higher_one_cannot_fail(
    ms, count, rate, verdicts
):
    limits = [
        Criterion("latency", name, Sense.AT_MOST, 20e6, Dimension.TIME) for name in ("p50", "p99")
    ]
    generator = np.random.default_rng(0)
    due = (np.cumsum(generator.exponential(1 / rate, count)) * 1e9).astype(int)
    latencies = (generator.uniform(0.9, 1.1, count) * ms * 1e6).astype(int)
    load = LoadSpec(1, Scenario.SERVER, rate_per_s=50.0)
    answers = list(starmap(Answer, zip(due.tolist(), (due + latencies).tolist(), strict=True)))
    assert [each.verdict for each in judge_latencies(answers, limits, load, rate)] == verdicts


def answer_by(servers, rate_per_s, count, service_s):
    """Requests that come at random to `servers` that share a queue; the service takes the same time, apart from noise of 2%."""
    generator = np.random.default_rng(1)
    free, answers = [0.0] * servers, []
    for due in np.cumsum(generator.exponential(1 / rate_per_s, count)):
        end = max(due, free[0]) + service_s * (1 + 0.02 * generator.standard_normal())
        free = sorted([end, *free[1:]])
        answers.append(Answer(int(due * 1e9), int(end * 1e9)))
    return answers


@pytest.mark.parametrize("servers", [1, 4])
@pytest.mark.parametrize("percent", [50, 99])
@pytest.mark.parametrize(
    ("utilization", "policy_share", "limit_services", "verdict"),
    [
        (1.1, 1.1, 5, "FAIL"),
        (1.5, 1.5, 5, "FAIL"),
        (1.5, 2.0, 5, "FAIL"),
        (1.1, 0.5, 5, "INCONCLUSIVE"),
        (1.1, 1.1, 500, "INCONCLUSIVE"),
        (0.5, 0.5, 50, "PASS"),
    ],
)
def test_a_server_that_falls_behind_fails_a_limit_that_it_exceeds(
    servers, percent, utilization, policy_share, limit_services, verdict
):
    service_s = 0.01
    rate, wanted = (servers * each / service_s for each in (utilization, policy_share))
    limit_ns = limit_services * service_s * 1e9
    limits = [Criterion("latency", f"p{percent}", Sense.AT_MOST, limit_ns, Dimension.TIME)]
    load = LoadSpec(1, Scenario.SERVER, rate_per_s=wanted)
    answers = answer_by(servers, rate, 2000, service_s)
    assert [each.verdict for each in judge_latencies(answers, limits, load, rate)] == [verdict]


@given(st.integers(1, 8), st.integers(0, 10_000), st.sampled_from([(), (8,), (4, 8)]))
def test_neighbors_of_a_setting_differ_in_one_value(instances, delay, preferred):
    config, setting = (
        SimpleNamespace(max_batch_size=8, HasField=lambda _: True),
        (instances, delay, preferred),
    )
    for each in tune._list_neighbors(setting, config):
        assert sum(one != other for one, other in zip(each, setting, strict=True)) <= 1
        assert each[0] >= 1
        assert each[1] >= 0
