"""A server that sends too much, too slowly, or something else: an error in bounded time and memory."""

import gzip
import json
import socket
import threading
import time
from contextlib import suppress

import numpy as np
import pytest

from optpipe.core.errors import StageError
from optpipe.deploy import bounded, live
from optpipe.deploy.proof import ask, open_client
from optpipe.deploy.requests import Expected

pytest.importorskip("tritonclient.http")
LIMIT_S = 1.0
OK = b"HTTP/1.1 200 OK\r\n"
FACTS = json.dumps({"name": "server", "version": "1"}).encode()
MODEL = json.dumps({"model_name": "net", "model_version": "1", "outputs": []}).encode()


def send_endlessly(connection, head, block, pause_s=0.0):
    connection.sendall(head)
    while True:
        connection.sendall(block)
        time.sleep(pause_s)


BLOCK = b"[0,0,0,0]," * 6000
HOSTILE = {
    "10 GB": lambda to: send_endlessly(to, OK + b"Content-Length: 10000000000\r\n\r\n", BLOCK),
    "chunks without end": lambda to: send_endlessly(
        to, OK + b"Transfer-Encoding: chunked\r\n\r\n", b"8000\r\n" + b"1" * 0x8000 + b"\r\n"
    ),
    "headers without end": lambda to: send_endlessly(to, OK, b"A: " + b"b" * 1000 + b"\r\n"),
    "one header without end": lambda to: send_endlessly(to, OK + b"A: ", b"b" * 1000),
    "interim answers without end": lambda to: send_endlessly(
        to, b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100
    ),
    "byte after byte": lambda to: send_endlessly(
        to, OK + b"Content-Length: 1000\r\n\r\n", b"1", 0.02
    ),
    "header after header": lambda to: send_endlessly(to, OK, b"A: b\r\n", 0.02),
    "nothing": lambda _: time.sleep(5 * LIMIT_S),
    "a redirect": lambda to: to.sendall(
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"
    ),
    "less than it declares": lambda to: to.sendall(
        OK + b"Content-Length: 1000\r\nConnection: close\r\n\r\n" + FACTS
    ),
    "no HTTP": lambda to: to.sendall(b"\x00\xff\x01\r\n\r\n" * 100),
    "a length below zero": lambda to: to.sendall(OK + b"Content-Length: -1\r\n\r\n"),
    "JSON that is deep": lambda to: to.sendall(
        OK + b"Content-Length: 400000\r\n\r\n" + b"[" * 200_000 + b"]" * 200_000
    ),
}


@pytest.fixture
def serve():
    """Starts a server whose every connection is answered by a function; gives its address."""
    listeners = []

    def start(answer):
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def respond(connection):
            with connection, suppress(OSError):
                connection.settimeout(10)
                connection.recv(1 << 16)
                answer(connection)

        def accept():
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    threading.Thread(target=respond, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        return f"127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for each in listeners:
        each.close()


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(bounded, "FACT_LIMIT_S", LIMIT_S)
    monkeypatch.setattr("optpipe.deploy.proof.REQUEST_LIMIT_S", LIMIT_S)


def request(client):
    return ask(client, "net", {"x": np.zeros((1, 4), np.float32)}, ["y"])


@pytest.mark.slow
@pytest.mark.parametrize("how", HOSTILE)
def test_a_hostile_server_is_an_error_that_ends(serve, quick, how):
    place = serve(HOSTILE[how])
    for send in (lambda client: live._fetch(client, "server_metadata"), request):
        begun = time.monotonic()
        with pytest.raises(StageError):
            send(open_client("http", place, answer_bytes=2**22))
        assert time.monotonic() - begun < 30 * LIMIT_S, "bounded, also on a loaded machine"


@pytest.mark.slow
def test_a_bomb_is_not_inflated(serve, quick):
    bomb = gzip.compress(b" " * 10**8)
    head = OK + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(bomb)
    with pytest.raises(StageError, match="compresses"):
        request(open_client("http", serve(lambda to: to.sendall(head + bomb))))


@pytest.mark.slow
def test_an_honest_server_is_asked_twice_over_one_connection(serve, quick):
    def answer(connection):
        for body in (FACTS, MODEL):
            connection.sendall(OK + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            connection.recv(1 << 16)

    client = open_client("http", serve(answer), answer_bytes=2**20)
    assert live._fetch(client, "server_metadata")["name"] == "server"
    assert request(client).get_response()["model_name"] == "net"


def test_the_bound_follows_from_the_recorded_outputs():
    row, image = np.zeros((2, 4), np.float32), np.zeros((1, 8), np.uint8)
    known = Expected("net", {"x": row}, outputs={"y": np.zeros((2, 1000), np.float32)})
    assert live.bound_answer([known], 16) == bounded.FACT_BYTES + 8 * 4000 * 16
    unknown = Expected("net", {"x": image}, prediction=3)
    assert live.bound_answer([known, unknown], 16) == bounded.FACT_BYTES + 8 * live.UNKNOWN_BYTES
    assert live.bound_answer([known], 16, 1) == bounded.FACT_BYTES + 4000 * 16
    assert live.bound_answer([], 1) == bounded.FACT_BYTES
