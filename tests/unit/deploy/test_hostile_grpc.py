"""A gRPC server that sends too much, too slowly, or something else: an error in bounded time and memory."""

import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest

from optpipe.core.errors import GateError, StageError
from optpipe.deploy import live
from optpipe.deploy.proof import ask, open_client, read_output

grpc = pytest.importorskip("grpc")
messages = pytest.importorskip("tritonclient.grpc").service_pb2
LIMIT_S, ANSWER_BYTES = 1.0, 2**22


def close(_call, context):
    context.abort(grpc.StatusCode.UNAVAILABLE, "closed")


def fail_at_length(_call, context):
    context.abort(grpc.StatusCode.INTERNAL, "x" * 6000)


def wait(_call, _context):
    time.sleep(5 * LIMIT_S)
    return b""


def send_metadata(_call, context):
    context.send_initial_metadata([(f"key{at}", "x" * 1000) for at in range(2000)])
    return b""


HOSTILE = {
    "64 MiB": lambda *_: bytes(2**26),
    "no protobuf": lambda *_: b"\xff" * 1000,
    "a length beyond the end": lambda *_: b"\x2a\xff\xff\xff\xff\x07",
    "groups in groups": lambda *_: b"\x7b" * 2**20,
    "nothing": wait,
    "a closed stream": close,
    "a long error": fail_at_length,
    "headers of 2 MB": send_metadata,
    "an exception": lambda *_: 1 / 0,
}


MANY = {
    "names of a server": ("facts", b"\x1a\x00"),
    "inputs of a configuration": ("configuration", b"\x0a\x02\x2a\x00"),
    "fields that nobody knows": ("facts", b"\x7a\x00"),
}
"""Messages below the limit of an answer, and above that of a fact."""


class Anything:
    """Answers every call by the bytes that `answer` returns."""

    def __init__(self, answer):
        self.answer = answer

    def service(self, _call):
        return grpc.unary_unary_rpc_method_handler(self.answer)


@pytest.fixture
def serve():
    """Starts a gRPC server whose every answer is made by a function; gives its address."""
    servers = []

    def start(answer, **options):
        server = grpc.server(
            ThreadPoolExecutor(2),
            handlers=[Anything(answer)],
            options=[("grpc.max_send_message_length", -1)],
            **options,
        )
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        servers.append(server)
        return f"127.0.0.1:{port}"

    yield start
    for each in servers:
        each.stop(None)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("optpipe.deploy.live.FACT_LIMIT_S", LIMIT_S)
    monkeypatch.setattr("optpipe.deploy.proof.REQUEST_LIMIT_S", LIMIT_S)


def request(client):
    return ask(client, "net", {"x": np.zeros((1, 4), np.float32)}, ["y"])


SENT = {
    "facts": lambda client: live._fetch(client, "server_metadata"),
    "configuration": lambda client: live._fetch(client, "model_config", "net"),
    "a request": request,
}


@pytest.mark.slow
@pytest.mark.parametrize("how", HOSTILE)
def test_a_hostile_server_is_an_error_that_ends(serve, how):
    place = serve(HOSTILE[how])
    for send in SENT.values():
        begun = time.monotonic()
        with pytest.raises(StageError):
            send(open_client("grpc", place, answer_bytes=ANSWER_BYTES))
        assert time.monotonic() - begun < 30 * LIMIT_S, "bounded, also on a loaded machine"


@pytest.mark.slow
@pytest.mark.parametrize("what", MANY)
def test_a_fact_of_many_small_messages_is_an_error(serve, what):
    sent, message = MANY[what]
    place = serve(lambda *_: message * (2**21 // len(message)))
    with pytest.raises(StageError, match="the answer has"):
        SENT[sent](open_client("grpc", place, answer_bytes=ANSWER_BYTES))


@pytest.mark.slow
@pytest.mark.parametrize("send", SENT)
def test_a_bomb_is_not_inflated(serve, send, monkeypatch):
    for limit in ("optpipe.deploy.live.FACT_LIMIT_S", "optpipe.deploy.proof.REQUEST_LIMIT_S"):
        monkeypatch.setattr(limit, 60.0)
    unknown = b"\x7a\x80\x80\x80\x08" + bytes(2**24)  # field 15, which any message may have
    place = serve(lambda *_: unknown, compression=grpc.Compression.Gzip)
    with pytest.raises(StageError, match="larger than max"):
        SENT[send](open_client("grpc", place, answer_bytes=ANSWER_BYTES))


RAW = {
    "HTTP": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
    "no HTTP": b"\x00\xff\x01" * 1000,
    "nothing": b"",
    "settings without end": (b"\x00\x00\x06\x04" + bytes(5) + struct.pack(">HI", 4, 1)) * 10**5,
    "a frame of 16 MiB": b"\x00\x00\x00\x04" + bytes(5) + b"\xff\xff\xff\x00" + bytes(2**20),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", RAW)
def test_what_is_no_grpc_is_an_error_that_ends(how):
    listener = socket.create_server(("127.0.0.1", 0))

    def answer():
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, suppress(OSError):
                    connection.sendall(RAW[how])
                    time.sleep(0.2)

    threading.Thread(target=answer, daemon=True).start()
    place = f"127.0.0.1:{listener.getsockname()[1]}"
    for send in SENT.values():
        begun = time.monotonic()
        with pytest.raises(StageError):
            send(open_client("grpc", place, answer_bytes=ANSWER_BYTES))
        assert time.monotonic() - begun < 30 * LIMIT_S
    listener.close()


WRONG = {
    "another type": {"datatype": "INT64", "shape": [1, 4]},
    "another shape": {"datatype": "FP32", "shape": [1, 2**40]},
    "a negative shape": {"datatype": "FP32", "shape": [-7, 5]},
    "no type": {"datatype": "FP9", "shape": [1, 4]},
    "texts": {"datatype": "BYTES", "shape": [1, 4]},
}


@pytest.mark.parametrize("how", WRONG)
def test_a_tensor_that_its_bytes_are_not_is_an_error(serve, how):
    def answer(*_):
        tensor = messages.ModelInferResponse.InferOutputTensor(name="y", **WRONG[how])
        raw = [b"\xff" * 12]
        found = messages.ModelInferResponse(outputs=[tensor], raw_output_contents=raw)
        return found.SerializeToString()

    told = request(open_client("grpc", serve(answer), answer_bytes=ANSWER_BYTES))
    with pytest.raises(GateError, match="output 'y' is not a tensor"):
        read_output(told, "y", "net")
