"""Modules made exportable: tensors in, a flat tuple of tensors out."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any


def flatten_tensors(value: Any) -> tuple[Any, ...]:
    """The tensors of a nested output in order: of a tensor, tuple, list, mapping, dataclass or transformers' ModelOutput.

    Raises `TypeError` for what holds anything else.
    """
    import torch

    if value is None:
        return ()
    if isinstance(value, Mapping):
        value = tuple(value.values())
    elif is_dataclass(value) and not isinstance(value, type):
        value = tuple(getattr(value, each.name) for each in fields(value))
    if isinstance(value, tuple | list):
        return tuple(tensor for each in value for tensor in flatten_tensors(each))
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"forward returns {type(value).__name__}, not tensors or tuples, mappings, or dataclasses of tensors"
        )
    return (value,)


def flatten_module(module: Any, *, keywords: tuple[str, ...] = ()) -> Any:
    """`module` with a flat tuple as output; positional inputs go to `keywords` where those are given."""
    import torch

    class Flat(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = module

        def forward(self, *inputs: Any) -> Any:
            given = dict(zip(keywords, inputs, strict=True)) if keywords else {}
            if outputs := flatten_tensors(self.model(**given) if keywords else self.model(*inputs)):
                return outputs
            raise TypeError("forward returns no tensor")

    return Flat().eval()


def pool_tokens(module: Any, pooling: str) -> Any:
    """An encoder with one embedding per text: the mean of its tokens' last hidden states (n, tokens, values), or the first token's."""
    import torch

    class Pooled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = module

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            if pooling == "cls":
                return hidden[:, 0]
            mask = attention_mask.to(hidden.dtype)[:, :, None]
            return (hidden * mask).sum(1) / mask.sum(1).clamp(min=1.0)

    return Pooled().eval()


def wrap_detector(module: Any, size: tuple[int, int]) -> Any:
    """A torchvision detector for one image: (1, 3, H, W) in; boxes, scores, labels (and masks) out.

    torchvision chooses between two ways of suppressing per class by the number of boxes, which an exported graph cannot
    do; here the classes are always moved apart by more than the image is wide and suppressed together. The two agree,
    since boxes are clipped to the image before.
    """
    import torch
    from torchvision.ops import boxes as operators

    apart = 2.0 * max(size)

    def moved_apart(boxes: Any, scores: Any, classes: Any, overlap: float) -> Any:
        return torch.ops.torchvision.nms(boxes + (classes.to(boxes) * apart)[:, None], scores, overlap)

    class OneImage(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = module

        def forward(self, images: Any) -> Any:
            own, operators.batched_nms = operators.batched_nms, moved_apart
            try:
                return flatten_tensors(self.model([images[0]]))
            finally:
                operators.batched_nms = own

    return OneImage().eval()
