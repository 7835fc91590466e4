"""The Hugging Face hub out of reach: said at once, in one line; a slow one is waited for."""

import socket

import pytest

from optpipe.core.entries import WeightsRequest
from optpipe.core.errors import MissingError
from optpipe.models.sources.base import NoWeightsError
from optpipe.models.sources.hub import HuggingFaceSource, TimmSource, explain_unreachable, use_hub

constants = pytest.importorskip("huggingface_hub.constants", reason="needs huggingface_hub: uv sync --extra hf")


@pytest.fixture
def port(monkeypatch, tmp_path):
    """Of this machine, where nobody listens; the hub's client takes it for the hub's."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = free.getsockname()[1]
    monkeypatch.setattr("urllib.request.getproxies", dict)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{number}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return number


def test_a_hub_that_refuses_is_not_asked_again(port):
    with use_hub() as unreachable:
        assert constants.is_offline_mode()
    assert unreachable == "127.0.0.1 cannot be reached (Connection refused)"
    assert not constants.is_offline_mode()


def test_a_hub_that_takes_its_time_is_waited_for(port):
    with socket.create_server(("127.0.0.1", port)), use_hub() as unreachable:  # it answers nothing
        assert (unreachable, constants.is_offline_mode()) == (None, False)


def test_behind_a_proxy_only_trying_tells(port, monkeypatch):
    assert explain_unreachable("https://no.invalid", 1.0) is not None
    monkeypatch.setattr("urllib.request.getproxies", lambda: {"https": "http://proxy:3128"})
    assert explain_unreachable("https://no.invalid", 1.0) is None


@pytest.mark.parametrize("offline", [False, True])
def test_a_model_that_is_not_cached_is_one_message_with_the_way_out(port, monkeypatch, offline, capfd):
    pytest.importorskip("transformers", reason="needs transformers: uv sync --extra hf")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    with pytest.raises(MissingError) as refused:
        HuggingFaceSource("org/none").load(WeightsRequest())
    what = "HF_HUB_OFFLINE is set" if offline else "127.0.0.1 cannot be reached (Connection refused)"
    assert str(refused.value).splitlines() == [
        f"hf:org/none: {what}, and the Hugging Face cache does not have this model",
        "use a local folder (hf:FOLDER), or fill the cache with `hf download org/none` where there is a network and HF_HUB_OFFLINE is "
        "not set",
    ]
    assert capfd.readouterr().err == ""


def test_weights_of_timm_are_given_up_at_once(port, capfd):
    pytest.importorskip("timm", reason="needs timm: uv sync --extra timm")
    with pytest.raises(
        NoWeightsError, match=r"cannot be reached .* and the Hugging Face cache does not have this model"
    ):
        TimmSource("resnet18").load(WeightsRequest())
    assert capfd.readouterr().err == ""
