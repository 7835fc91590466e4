"""How long a build takes to load: without the imports of its runtime, which a service pays once, whatever it loads."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter_ns
from typing import Any

from optpipe.measure.worker.messages import SessionSpec
from optpipe.models.inputs.rows import Arrays, lay_out


class LoadClock:
    """Adds the time of its blocks, less that of imports inside of them.

    Workers that stand by import in advance what an earlier one of their kind imported, and the first one has nobody to learn from:
    without the difference its build would take seconds longer to load.
    """

    def __init__(self) -> None:
        self.elapsed_ns = 0

    @contextmanager
    def run(self) -> Iterator[None]:
        with _time_imports() as imports:
            begun = perf_counter_ns()
            try:
                yield
            finally:
                self.elapsed_ns += perf_counter_ns() - begun - imports.elapsed_ns


class _Imports:
    def __init__(self, find_and_load: Callable[..., Any]) -> None:
        self._find_and_load = find_and_load
        self._is_inside = False
        self.elapsed_ns = 0

    def load(self, *arguments: Any) -> Any:
        if self._is_inside:
            return self._find_and_load(*arguments)
        self._is_inside, begun = True, perf_counter_ns()
        try:
            return self._find_and_load(*arguments)
        finally:
            self._is_inside = False
            self.elapsed_ns += perf_counter_ns() - begun


@contextmanager
def _time_imports() -> Iterator[_Imports]:
    """Times the outermost imports of modules that are not loaded yet.

    Both `import` and `importlib.import_module` look up `_find_and_load` for them at each call (CPython's import.c and
    importlib/_bootstrap.py); an interpreter without it has no imports that can be told apart.
    """
    bootstrap: Any = getattr(importlib, "_bootstrap", None)
    usual = getattr(bootstrap, "_find_and_load", None)
    imports = _Imports(usual)  # type: ignore[arg-type]
    if usual is None:
        yield imports
        return
    bootstrap._find_and_load = imports.load
    try:
        yield imports
    finally:
        bootstrap._find_and_load = usual


def draw_smallest_batch(pool: Arrays, spec: SessionSpec) -> Mapping[str, Any]:
    """The first inputs of the pool, as many as the profile's smallest batch; a pool of fewer is repeated."""
    rows = [number % min(map(len, pool.values())) for number in range(spec.smallest)]
    return {
        name: lay_out(array[rows], spec.input_axes.get(name, 0)) for name, array in pool.items()
    }
