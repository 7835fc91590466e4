"""Bounds for what a server answers over HTTP: in bytes and in time, whatever it sends.

The timeouts of tritonclient are for one read: a server that sends a byte a second, headers without end, or more than the memory
holds would never reach them.
"""

from collections.abc import Callable
from time import monotonic
from typing import Any

from optpipe.core.quantity import format_bytes

FACT_BYTES, FACT_LIMIT_S = 2**20, 10.0
"""The limits of an answer about the server itself, such as its metadata: two bytes of a message become an object of a hundred."""
JSON_BYTES = 2**26
"""The limit of an answer without binary tensors: parsed, it takes many times its bytes."""


class BoundedSocket:
    """A socket for one request, which takes at most `most_bytes` until `limit_s` seconds from now have passed.

    Raises OSError for more, and TimeoutError later.
    """

    def __init__(self, inner: Any, most_bytes: int, limit_s: float) -> None:
        self.inner, self.limit_s, self.most_bytes, self.taken = inner, limit_s, most_bytes, 0
        self.deadline = monotonic() + limit_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def recv(self, size: int) -> bytes:
        self.inner.settimeout(self._require_time())
        data: bytes = self.inner.recv(size)
        self.taken += len(data)
        if self.taken > self.most_bytes:
            raise OSError(f"the server sends more than {format_bytes(self.most_bytes)}")
        return data

    def sendall(self, data: bytes) -> None:
        self.inner.settimeout(self._require_time())
        self.inner.sendall(data)

    def _require_time(self) -> float:
        left_s = self.deadline - monotonic()
        if left_s <= 0:
            raise TimeoutError(f"the server has not answered within {self.limit_s:g} s")
        return left_s


def bound_answers(client: Any, answer_bytes: int, limit_s: float) -> None:
    """Bounds each answer to an HTTP client of tritonclient: to a POST by the arguments, to a GET by FACT_BYTES and FACT_LIMIT_S."""
    stub = client._client_stub
    pool = stub._connection_pool
    take, give, drop = pool.get_socket, pool.return_socket, pool.release_socket
    bounds: Any = (answer_bytes, limit_s)

    def bound(method: Callable[..., Any], *its_bounds: Any) -> Callable[..., Any]:
        def send(*arguments: Any, **options: Any) -> Any:
            nonlocal bounds
            bounds = its_bounds
            return _require_plain(method(*arguments, **options))

        return send

    pool.get_socket = lambda: BoundedSocket(take(), *bounds)
    pool.return_socket = lambda socket: give(socket.inner)
    pool.release_socket = lambda socket: drop(socket.inner)
    stub.get = bound(stub.get, FACT_BYTES, FACT_LIMIT_S)
    stub.post = bound(stub.post, answer_bytes, limit_s)


def _require_plain(response: Any) -> Any:
    """Raises OSError for a compressed answer: nobody asked for it, and it may inflate without end."""
    if (encoding := response.get("Content-Encoding")) not in (None, "identity"):
        response.release()
        raise OSError(f"the server compresses its answer ({encoding}), which was not requested")
    socket = response._sock
    if socket is not None and response.get("Inference-Header-Content-Length") is None:
        socket.most_bytes = min(socket.most_bytes, JSON_BYTES)
    return response
