"""Modules made exportable: tensors in, a flat tuple of tensors out."""

from collections.abc import Mapping
from typing import Any


def flat_tensors(value: Any) -> tuple[Any, ...]:
    """The tensors of a nested output in order: of a tensor, tuple, list, mapping or transformers' ModelOutput."""
    if value is None:
        return ()
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        return tuple(tensor for each in value for tensor in flat_tensors(each))
    return (value,)


def flat_module(module: Any, *, keywords: tuple[str, ...] = ()) -> Any:
    """`module` with a flat tuple as output; positional inputs go to `keywords` where those are given."""
    import torch

    class Flat(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = module

        def forward(self, *inputs: Any) -> Any:
            if keywords:
                return flat_tensors(self.model(**dict(zip(keywords, inputs, strict=True))))
            return flat_tensors(self.model(*inputs))

    return Flat().eval()


def detection_module(module: Any) -> Any:
    """A torchvision detector for one image: (1, 3, H, W) in; boxes, scores, labels (and masks) out."""
    import torch

    class OneImage(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = module

        def forward(self, images: Any) -> Any:
            return flat_tensors(self.model([images[0]]))

    return OneImage().eval()
