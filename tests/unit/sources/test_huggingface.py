"""A checkpoint without the head that a task needs: what it lacks is drawn, named, and never called trained."""

import pytest

from optpipe.core.weights import WeightsRequest
from optpipe.sources.huggingface import HuggingFaceSource

transformers = pytest.importorskip("transformers", reason="needs transformers: uv sync --extra hf")


def save_checkpoint(folder, kind):
    config = transformers.BertConfig(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
    )
    getattr(transformers, kind)(config).save_pretrained(folder)
    return HuggingFaceSource(str(folder))


def test_a_head_that_is_not_in_the_checkpoint_is_random(tmp_path) -> None:
    source = save_checkpoint(tmp_path, "BertModel")
    first, again, other = (source.load(WeightsRequest(seed=seed)).weights for seed in (0, 0, 1))
    assert (first.source, first.trained) == ("random", False)
    assert first.drawn == f"2 of {first.drawn.split()[2]} tensors are not in the checkpoint, first classifier.bias"
    assert first.sha256 == again.sha256 != other.sha256


def test_a_whole_checkpoint_is_trained(tmp_path) -> None:
    found = save_checkpoint(tmp_path, "BertForSequenceClassification").load(WeightsRequest()).weights
    assert (found.trained, found.drawn) == (True, None)
