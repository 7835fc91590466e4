"""The Hugging Face hub, where `hf:` and most `timm:` models are: out of reach, its client goes straight to its cache."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit
from urllib.request import getproxies

from optpipe.core.errors import first_line

HUB = "huggingface.co"


@contextmanager
def use_hub() -> Iterator[str | None]:
    """Inside, the client of a hub that cannot be reached reads its cache alone: it would try every file for 20 s and longer.

    Yields why it does, None where it does not. A connection may take as long as the client's own requests, by default 10 s, so
    that a slow network is used.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        yield "HF_HUB_OFFLINE is set"
        return
    why = explain_unreachable(constants.ENDPOINT, constants.HF_HUB_ETAG_TIMEOUT)
    constants.HF_HUB_OFFLINE = why is not None
    try:
        yield None if why is None else f"{urlsplit(constants.ENDPOINT).hostname} cannot be reached ({why})"
    finally:
        constants.HF_HUB_OFFLINE = False


def explain_hub_error(error: Exception, unreachable: str | None) -> str:
    """An error of the client on one line; `unreachable` is what `use_hub` gave."""
    if unreachable is not None and is_not_cached(error):
        return f"{unreachable}, and the Hugging Face cache does not have this model"
    return first_line(error)


def is_not_cached(error: Exception) -> bool:
    """Whether the client, or transformers for it, says that neither the hub nor the cache has a file."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    return isinstance(error, LocalEntryNotFoundError) or isinstance(error.__cause__, LocalEntryNotFoundError)


def explain_unreachable(url: str, timeout_s: float) -> str | None:
    """Why no connection to the host of `url` can be made; None where one can, and behind a proxy, where only trying tells."""
    parts = urlsplit(url)
    if {parts.scheme, "all"} & set(getproxies()):
        return None
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port or parts.scheme, type=socket.SOCK_STREAM)
    except OSError as error:
        return error.strerror or str(error)
    reason = ""
    for family, address in {family: address for family, *_, address in found}.items():  # one of IPv6, one of IPv4
        try:
            with socket.socket(family) as connection:
                connection.settimeout(timeout_s)
                connection.connect(address)
                return None
        except OSError as error:
            reason = error.strerror or str(error)
    return reason
