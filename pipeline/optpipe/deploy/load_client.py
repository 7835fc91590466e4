"""`python -m optpipe.deploy.load_client URL MODEL`: a client process that keeps requests in flight.

One Python process sends fewer requests than a server answers, so a server's throughput needs several clients. The first frame
holds a request's inputs; each of the following requests a trial.
"""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import takewhile
from threading import Semaphore
from time import perf_counter_ns, sleep
from typing import TYPE_CHECKING, Any

from optpipe.core.errors import StageError, first_line
from optpipe.core.process import end_with_parent
from optpipe.deploy.frames import Arrays, read_frame, write_frame
from optpipe.deploy.session_process import FrameProcess
from optpipe.deploy.triton_config import TYPES

if TYPE_CHECKING:
    import numpy as np

CORES_PER_CLIENT = 4
MOST_CLIENTS = 8
START_AFTER_NS = 20_000_000
"""Delay after which a trial begins in all clients at once."""


class LoadClients:
    def __init__(self, clients: Sequence[FrameProcess]) -> None:
        self._clients = clients

    def run_trial(self, count: int, seconds: float) -> tuple[float, list[int]]:
        """Answers per second with `count` requests in flight, and latencies in ns. Raises StageError if the server fails."""
        chosen = self._clients[:count]
        begin, latencies = perf_counter_ns() + START_AFTER_NS, []
        for at, client in enumerate(chosen):
            share = (count - at + len(chosen) - 1) // len(chosen)
            client.send({"count": share, "begin": begin, "seconds": seconds}, {})
        end = begin
        for client in chosen:
            header, arrays = client.receive()
            end = max(end, header["end"])
            latencies += arrays["latencies"].tolist()
        return len(latencies) / (end - begin) * 1e9, latencies


@contextmanager
def open_load_clients(url: str, model: str, inputs: Arrays) -> Iterator[LoadClients]:
    """Opens clients for a gRPC address, as many as this machine's cores allow; `inputs` have the server's names."""
    count = min(MOST_CLIENTS, max(1, len(os.sched_getaffinity(0)) // CORES_PER_CLIENT))
    with ExitStack() as stack:
        clients = [stack.enter_context(FrameProcess("optpipe.deploy.load_client", url, model)) for _ in range(count)]
        for client in clients:
            client.send({}, inputs)
        yield LoadClients(clients)


def main() -> None:
    from tritonclient import grpc

    end_with_parent()
    first = read_frame(sys.stdin.buffer)
    assert first is not None
    client, given = grpc.InferenceServerClient(sys.argv[1]), prepare_inputs(grpc, first[1])
    while (frame := read_frame(sys.stdin.buffer)) is not None:
        write_frame(sys.stdout.buffer, *_run_trial(client, sys.argv[2], given, frame[0]))


def prepare_inputs(module: Any, arrays: Arrays) -> list[Any]:
    """The inputs of a request for `tritonclient.grpc` or `tritonclient.http`."""
    found = []
    for name, array in arrays.items():
        found.append(module.InferInput(name, list(array.shape), TYPES[str(array.dtype)].removeprefix("TYPE_")))
        found[-1].set_data_from_numpy(array)
    return found


def send_in_flight(client: Any, model: str, given: Sequence[Any], count: int, arrivals: Iterable[int]) -> list[int]:
    """Sends a request for each of `arrivals`, at most `count` in flight; returns the latencies since each was due, in ns.

    Takes the next arrival only when there is room for it. After all requests, raises StageError if the server failed.
    """
    room = Semaphore(count)
    found: list[int] = []
    problems: list[Any] = []

    def finish(due: int, result: Any, error: Any) -> None:  # noqa: ARG001 - called by tritonclient
        found.append(perf_counter_ns() - due)
        if error is not None:
            problems.append(error)
        room.release()

    room.acquire()
    for due in arrivals:
        client.async_infer(model, given, callback=partial(finish, due))
        room.acquire()
    for _ in range(count - 1):
        room.acquire()
    if problems:
        raise StageError(f"{model}: tritonserver failed under load: {first_line(problems[0])}")
    return found


def _run_trial(
    client: Any, model: str, given: Sequence[Any], asked: Mapping[str, Any]
) -> "tuple[dict[str, Any], dict[str, np.ndarray]]":
    """Counts requests that are still in flight at the end."""
    import numpy as np

    sleep(max(0, asked["begin"] - perf_counter_ns()) / 1e9)
    end = asked["begin"] + asked["seconds"] * 1e9
    try:
        arrivals = takewhile(lambda now: now < end, iter(perf_counter_ns, None))
        found = send_in_flight(client, model, given, asked["count"], arrivals)
    except StageError as error:
        return {"error": str(error)}, {}
    return {"end": perf_counter_ns()}, {"latencies": np.asarray(found, np.int64)}


if __name__ == "__main__":
    main()
