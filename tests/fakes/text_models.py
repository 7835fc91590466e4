"""Tiny text models: a word-level tokenizer and a one-layer BERT, some seconds of training, saved as anyone would."""

from collections.abc import Sequence
from typing import Any


def make_tokenizer(words: Sequence[str], *, ends: bool, types: bool = False) -> Any:
    """A fast tokenizer of whole words; with `ends`, [CLS] and [SEP] stand around a text, or a pair.

    With `types`, as BERT's, it tells the second text by token types.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    marks = ["[PAD]", "[UNK]", *(["[CLS]", "[SEP]"] if ends else [])]
    vocabulary = {word: index for index, word in enumerate([*marks, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if ends:
        special = [(mark, vocabulary[mark]) for mark in marks[2:]]
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=special
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        model_input_names=["input_ids", *(["token_type_ids"] if types else []), "attention_mask"],
    )


def train(folder, tokenizer, make, compute_loss, steps, **config):
    """Trains the model that `make` gives of a configuration by the loss of each step; saves it with its tokenizer."""
    import torch
    from transformers import BertConfig

    torch.manual_seed(0)
    shape = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        **config,
    )
    model = make(shape)
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    for _ in range(steps):
        loss = compute_loss(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
