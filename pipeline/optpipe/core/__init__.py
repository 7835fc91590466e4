"""Values, records, errors and parsers that all other rooms use. Imports nothing heavy: see `LazyModule`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any


class LazyModule:
    """A library that is imported at its first use, since it takes seconds to import, or may be missing."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._module: Any = None

    def __getattr__(self, attribute: str) -> Any:
        if self._module is None:
            self._module = import_module(self._name)
        return getattr(self._module, attribute)


if TYPE_CHECKING:
    import numpy as np
    import onnx
    import polars as pl
    import torch
else:
    np, onnx, pl, torch = map(LazyModule, ("numpy", "onnx", "polars", "torch"))

__all__ = ["LazyModule", "np", "onnx", "pl", "torch"]
