"""What `deploy --check` takes for an address, and for an answer: no secret is stored, and nothing ends in a traceback."""

import sys
from types import SimpleNamespace

import pytest

from optpipe.core.errors import BadInputError, StageError
from optpipe.deploy.live import _fetch, split_address

SECRETS = (
    "http://user:password@host:8000",
    "https://token@host:8000",
    "http://host:8000/?token=abc",
    "http://host:8000/v2#secret",
    "grpc://user@host:8001",
)
BAD = (
    "http://[::1:9",
    "http://host:99999",
    "http://host:port",
    "http://host:0",
    "http://host:-1",
    "http://",
    "http://:8000",
    "host:8000",
    "ftp://host:8000",
    "http://hést:8000",
    "http://ho st:8000",
    "http://host:8000/\x1b[31m",
    "",
)


@pytest.mark.parametrize("url", SECRETS)
def test_an_address_with_a_secret_is_refused_without_repeating_it(url):
    with pytest.raises(BadInputError) as raised:
        split_address(url)
    assert not {"password", "token=abc", "secret"} & set(str(raised.value).split("'"))
    assert url not in str(raised.value)


@pytest.mark.parametrize("url", BAD, ids=ascii)
def test_what_is_no_address_is_refused(url):
    with pytest.raises(BadInputError, match="expected http://"):
        split_address(url)


@pytest.mark.parametrize(
    "url", ["http://host:8000", "https://host/prefix", "grpc://[::1]:8001", "grpcs://10.0.0.1:1"]
)
def test_an_address_is_taken(url):
    assert split_address(url).netloc


def answer_with(value):
    def get(*_):
        if isinstance(value, Exception):
            raise value
        return value

    module = SimpleNamespace(__name__="tritonclient.http")
    return module, SimpleNamespace(get_server_metadata=get)


@pytest.mark.parametrize("value", [None, [], [1], "text", 7, RecursionError("too deep")], ids=str)
def test_an_answer_that_is_no_object_is_an_error_of_the_server(value, monkeypatch):
    for name, attribute in (
        ("geventhttpclient.response", "HTTPParseError"),
        ("tritonclient.utils", "InferenceServerException"),
    ):
        fake = SimpleNamespace(**{attribute: type(attribute, (Exception,), {})})
        monkeypatch.setitem(sys.modules, name, fake)
    with pytest.raises(StageError, match="no server metadata"):
        _fetch(answer_with(value), "server_metadata")
