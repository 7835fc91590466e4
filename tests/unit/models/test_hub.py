"""Hugging Face models: a hub out of reach, and checkpoints that lack a part."""

import json
import socket

import pytest
from tests.fakes.text_models import make_tokenizer

from optpipe.core.card import Task
from optpipe.core.entries import WeightsRequest
from optpipe.core.errors import BadInputError, MissingError
from optpipe.models.export.exported import Model
from optpipe.models.sources.libraries import HuggingFaceSource, use_hub

constants = pytest.importorskip(
    "huggingface_hub.constants", reason="needs huggingface_hub: uv sync --extra hf"
)


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


@pytest.mark.parametrize("offline", [False, True])
@pytest.mark.slow
def test_a_model_that_is_not_cached_is_one_message_with_the_way_out(
    port, monkeypatch, offline, capfd
):
    pytest.importorskip("transformers", reason="needs transformers: uv sync --extra hf")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    with pytest.raises(MissingError) as refused:
        HuggingFaceSource("org/none").load(WeightsRequest())
    what = (
        "HF_HUB_OFFLINE is set" if offline else "127.0.0.1 cannot be reached (Connection refused)"
    )
    assert str(refused.value).splitlines() == [
        f"hf:org/none: {what}, and the Hugging Face cache does not have this model",
        "use a local folder (hf:FOLDER), or fill the cache with `hf download org/none` where there is a network and HF_HUB_OFFLINE is "
        "not set",
    ]
    assert capfd.readouterr().err == ""


transformers = pytest.importorskip("transformers", reason="needs transformers: uv sync --extra hf")


def save_checkpoint(folder, kind, positions=16):
    config = transformers.BertConfig(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=positions,
    )
    getattr(transformers, kind)(config).save_pretrained(folder)
    return HuggingFaceSource(str(folder))


@pytest.mark.slow
def test_a_head_that_is_not_in_the_checkpoint_is_random(tmp_path) -> None:
    source = save_checkpoint(tmp_path, "BertModel")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "architectures": ["BertForSequenceClassification"]})
    )
    first, again, other = (source.load(WeightsRequest(seed=seed)).weights for seed in (0, 0, 1))
    assert (first.source, first.trained) == ("random", False)
    assert (
        first.drawn
        == f"2 of {first.drawn.split()[2]} tensors are not in the checkpoint, first classifier.bias"
    )
    assert first.sha256 == again.sha256 != other.sha256


@pytest.mark.slow
def test_an_encoder_without_a_head_is_an_embedding_with_its_own_weights(tmp_path) -> None:
    found = save_checkpoint(tmp_path, "BertModel").load(WeightsRequest())
    assert found.card.task is Task.EMBEDDING
    assert found.weights.trained


@pytest.mark.slow
@pytest.mark.parametrize(("stated", "allowed"), [(1024, 1024), (4096, 2048), (None, 512)])
def test_a_wider_shape_admits_texts_as_long_as_the_tokenizer_says(
    tmp_path, stated, allowed
) -> None:
    source = save_checkpoint(tmp_path, "BertForSequenceClassification", positions=2048)
    tokenizer = make_tokenizer(["good", "bad"], ends=True)
    if stated:
        tokenizer.model_max_length = stated
    tokenizer.save_pretrained(tmp_path)
    card = source.load(WeightsRequest()).card
    assert card.tokenization.max_length == allowed
    assert card.inputs[0].max == (64, 512)  # the default profile
    beyond = {each.name: ((1, 1), (1, 8), (1, allowed + 1)) for each in card.inputs}
    with pytest.raises(
        BadInputError, match=f"takes up to {allowed} tokens, not {allowed + 1}\n.*position table"
    ):
        Model(source, WeightsRequest(), shapes=beyond).load()


@pytest.mark.slow
def test_a_local_folder_is_named_without_its_place_and_its_pooling_is_part_of_it(
    tmp_path, monkeypatch
) -> None:
    (tmp_path / "topics").mkdir()
    source = save_checkpoint(tmp_path / "topics", "BertModel")
    plain = source.collect_identity()
    assert plain["source"] == "hf:topics"
    assert source.load(WeightsRequest()).weights.source == "default:topics"
    (tmp_path / "topics" / "1_Pooling").mkdir()
    (tmp_path / "topics" / "1_Pooling" / "config.json").write_text(
        '{"pooling_mode_cls_token": true}'
    )
    pooled = source.collect_identity()
    assert pooled != plain
    monkeypatch.chdir(tmp_path / "topics")
    assert HuggingFaceSource(".").collect_identity() == pooled
    assert HuggingFaceSource(".").load(WeightsRequest()).card.name == "topics"
    assert HuggingFaceSource("google/bert").collect_identity()["source"] == "hf:google/bert"
