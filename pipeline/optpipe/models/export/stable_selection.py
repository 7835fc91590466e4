"""Selections among equal values in torch, made as ONNX defines them.

`torch.topk` and `torch.sort` promise no order among equal values, and of equal values at the edge of a selection
`torch.topk` takes any. ONNX's TopK takes the lower index first. A module under this mode gives one of the answers
that torch allows, and the same one as its exported graph, whatever the size of a batch.
"""

import sys
from typing import Any

from optpipe.core import torch


def open_stable_selection() -> Any:
    """A context in which `topk`, `sort`, and `argsort` take the lower index among equal values.

    It sees operators below Python (a scripted module's too) and changes no others.

        >>> with open_stable_selection():
        ...     torch.zeros(1000).topk(3).indices
        tensor([0, 1, 2])
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class StableSelection(TorchDispatchMode):
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            """Whether torch wraps the mode to keep its compiler out, which imports the compiler (4 s)."""
            return "torch._dynamo" in sys.modules

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.ops.aten.topk.default:
                return _select_stably(*args, **(kwargs or {}))
            if func is torch.ops.aten.sort.default:
                return _sort_stably(*args, **(kwargs or {}))
            return func(*args, **(kwargs or {}))

    return StableSelection()


def _sort_stably(values: Any, dim: int = -1, descending: bool = False) -> Any:
    return torch.sort(values, dim=dim, descending=descending, stable=True)


def _select_stably(
    values: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> Any:
    """`torch.topk`, always in order; its errors, such as for a `k` beyond the size, are torch's."""
    if values.ndim == 0 or k > values.shape[dim]:
        return torch.topk(values, k, dim, largest, sorted)
    ordered, places = torch.sort(values, dim=dim, descending=largest, stable=True)
    return ordered.narrow(dim, 0, k).contiguous(), places.narrow(dim, 0, k).contiguous()
