"""Makes modules exportable: tensors in, a flat tuple of tensors out."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any


def flatten_tensors(value: Any) -> tuple[Any, ...]:
    """The tensors of a nested output in order: a tensor, tuple, list, mapping, dataclass or transformers' ModelOutput.

    Raises TypeError for anything else.
    """
    return tuple(tensor for _, tensor in _walk_tensors(value, ()))


def name_tensors(value: Any) -> tuple[str, ...]:
    """Keys and fields of these tensors, such as `boxes` or `features.0`; empty if one has none."""
    paths = [path for path, _ in _walk_tensors(value, ())]
    while paths and all(path and not isinstance(path[0], str) for path in paths):
        paths = [path[1:] for path in paths]
    names = tuple(".".join(map(str, path)) for path in paths)
    return names if all(names) and len(set(names)) == len(names) else ()


def _walk_tensors(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    import torch

    if value is None:
        return
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    if isinstance(value, Mapping):
        parts = list(value.items())
    elif is_dataclass(value) and not isinstance(value, type):
        parts = [(each.name, getattr(value, each.name)) for each in fields(value)]
    elif isinstance(value, tuple | list):
        parts = list(zip(getattr(value, "_fields", range(len(value))), value, strict=True))
    else:
        raise TypeError(
            f"forward returns {type(value).__name__}, not tensors or tuples, mappings, or dataclasses of tensors"
        )
    for key, part in parts:
        yield from _walk_tensors(part, (*path, key))


def flatten_module(module: Any, *, keywords: tuple[str, ...] = ()) -> Any:
    """`module` with a flat tuple as output; positional inputs go to `keywords` if given.

    Its `output_names` are those of `name_tensors`, known after a run or a trace.
    """
    import torch

    said: tuple[str, ...] = ()  # not an attribute, which torch.export would restore

    class Flat(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = module

        def forward(self, *inputs: Any) -> Any:
            given = dict(zip(keywords, inputs, strict=True)) if keywords else {}
            found = self.model(**given) if keywords else self.model(*inputs)
            nonlocal said
            said = name_tensors(found)
            if outputs := flatten_tensors(found):
                return outputs
            raise TypeError("forward returns no tensor")

        @property
        def output_names(self) -> tuple[str, ...]:
            return said

    return Flat().eval()


def pool_tokens(module: Any, pooling: str) -> Any:
    """An encoder with one embedding per text: the mean of the last hidden states (n, tokens, values), or the first token's."""
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

    torchvision selects one of two ways of suppression per class by the number of boxes, which an exported graph cannot
    do; here boxes of different classes are always moved apart by more than the image's width and suppressed together.
    Both agree, since boxes are clipped to the image before.
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
                return self.model([images[0]])
            finally:
                operators.batched_nms = own

    return flatten_module(OneImage())
