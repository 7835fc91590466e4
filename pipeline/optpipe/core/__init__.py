"""Values, records, errors and parsers that all other rooms use. Imports nothing heavy: see `LazyModule`."""

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any


class LazyModule:
    """A library that is imported at its first use, since it takes seconds to import, or may be missing.

    `without` names optional packages that it would import too: jsonschema's rfc3987_syntax, which makes 39 parsers in seconds.
    """

    def __init__(self, name: str, without: Collection[str] = ()) -> None:
        self._name, self._without = name, without
        self._module: Any = None

    def __getattr__(self, attribute: str) -> Any:
        if self._module is None:
            with _hide_packages(self._without):
                self._module = import_module(self._name)
        return getattr(self._module, attribute)


@contextmanager
def _hide_packages(names: Collection[str]) -> Iterator[None]:
    """In the block an import of these packages is an ImportError, unless they are there already."""
    hidden = [name for name in names if name not in sys.modules]
    sys.modules |= dict.fromkeys(hidden)  # type: ignore[arg-type]  # None stops an import
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


if TYPE_CHECKING:
    import numpy as np
    import onnx
    import polars as pl
    import torch
else:
    np, onnx, pl, torch = map(LazyModule, ("numpy", "onnx", "polars", "torch"))

__all__ = ["LazyModule", "np", "onnx", "pl", "torch"]
