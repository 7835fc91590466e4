"""How a Ray cluster is reached; in place of Ray stands what it does when its process for a client starts too late."""

import sys
from types import SimpleNamespace

import pytest

from optpipe.core.errors import MissingError
from optpipe.sweep.cluster import connect


class AuthenticationError(Exception):
    """As Ray's."""


@pytest.fixture
def calls(monkeypatch):
    """The addresses that were asked for; the first answers are `calls.errors`."""
    found = SimpleNamespace(addresses=[], errors=[])

    def init(address, **_):
        found.addresses.append(address)
        if found.errors:
            raise found.errors.pop(0)

    exceptions = SimpleNamespace(RayError=AuthenticationError)
    ray = SimpleNamespace(is_initialized=lambda: False, init=init, exceptions=exceptions)
    monkeypatch.setitem(sys.modules, "ray", ray)
    return found


def test_an_aborted_connection_is_tried_once_more(calls):
    calls.errors = [ConnectionAbortedError("Starting Ray client server failed.")]
    connect("ray://host:1")
    assert calls.addresses == ["ray://host:1", "ray://host:1"]
    calls.errors = [ConnectionAbortedError("failed"), ConnectionAbortedError("failed again")]
    with pytest.raises(
        MissingError, match="no Ray cluster at ray://host:1: failed again\nstart one with `ray start --head`"
    ):
        connect("ray://host:1")


def test_no_cluster_is_said_at_once(calls):
    calls.errors = [ConnectionError("Could not find any running Ray instance.")]
    with pytest.raises(MissingError, match="no Ray cluster at ray: Could not find"):
        connect("ray")
    assert calls.addresses == ["auto"]


def test_a_token_that_is_missing_is_said_with_the_way_out(calls):
    calls.errors = [AuthenticationError("Token authentication is on but there is no token. Ensure that. For more.")]
    with pytest.raises(
        MissingError, match="--on ray: Token authentication is on but there is no token\nset RAY_AUTH_MODE"
    ):
        connect("ray")
