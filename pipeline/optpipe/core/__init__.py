"""Values, records, errors and parsers that all other rooms use. Imports nothing heavy."""

from importlib import import_module
from typing import Any


class LazyModule:
    """A library that is imported at its first use, since it takes seconds to import, or may be missing."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(import_module(self._name), attribute)
