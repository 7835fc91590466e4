"""Requests in flight, against a client that answers from threads of its own."""

from itertools import islice
from threading import Lock, Timer
from time import perf_counter_ns

import pytest

from optpipe.core.errors import StageError
from optpipe.deploy.load_client import send_in_flight

MS = 1_000_000


class Client:
    """Answers each request after 5 ms, the one at `fails` with an error."""

    def __init__(self, fails=None):
        self.sent, self.now, self.most, self.fails, self.lock = 0, 0, 0, fails, Lock()

    def async_infer(self, _model, _inputs, callback):
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
            error = "no memory" if self.sent == self.fails else None
            self.sent += 1

        def answer():
            with self.lock:
                self.now -= 1
            callback(None, error)

        Timer(0.005, answer).start()


@pytest.mark.parametrize("count", [1, 3])
def test_no_more_than_asked_for_are_in_flight_and_all_are_awaited(count):
    client = Client()
    found = send_in_flight(client, "net", [], count, islice(iter(perf_counter_ns, None), 10))
    assert (client.most, client.now, len(found)) == (count, 0, 10)
    assert min(found) >= 5 * MS


def test_an_arrival_is_asked_for_when_there_is_room_and_its_latency_counts_from_when_it_was_due():
    client, asked = Client(), []

    def arrivals():
        for _ in range(4):
            asked.append(client.now)
            yield perf_counter_ns() - 1000 * MS

    assert min(send_in_flight(client, "net", [], 2, arrivals())) >= 1005 * MS
    assert max(asked) <= 1  # with two in flight the next is not yet due by its own clock


def test_a_server_that_fails_says_why_when_all_have_ended():
    client = Client(fails=2)
    with pytest.raises(StageError, match="net: tritonserver failed under load: no memory"):
        send_in_flight(client, "net", [], 2, iter([perf_counter_ns()] * 6))
    assert (client.sent, client.now) == (6, 0)
