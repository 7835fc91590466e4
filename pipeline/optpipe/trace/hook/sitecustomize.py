"""Marks a Python program for nsys: batches of torch's DataLoaders and, on request, the modules of torch networks.

Python imports it before the program. It uses nothing but the standard library and the program's own torch, never fails the
program, and imports the `sitecustomize` that it hides. `OPTPIPE_MARKS` lists `loops` and `modules`, and `workers=4` for a trial:
every DataLoader then has four workers, except those of iterable data sets, of which each worker would read everything.

- `optpipe.step`: from the request of one batch to the request of the next; inside it
- `optpipe.data`: the wait for the batch, the first one inside
- `optpipe.loader:4`, which names the number of workers;
- `optpipe.module:layer3.0.conv2`: the forward pass of a module.
"""

import importlib.abc
import importlib.util
import inspect
import os
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache, wraps
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

_OF_WORKERS = ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout")
_FOLDER = Path(__file__).resolve().parent
_MARKS = frozenset(os.environ.get("OPTPIPE_MARKS", "").split(","))
STEP, DATA, MODULE, LOADER = "optpipe.step", "optpipe.data", "optpipe.module:", "optpipe.loader:"


def mark_loader(module: Any) -> None:
    """Wraps the iterators of `torch.utils.data.dataloader`, and its loaders if a number of workers is tried."""
    for word in _MARKS:
        name, _, count = word.partition("=")
        if name == "workers" and count.isdecimal():
            give_workers(module, int(count))
    iterator_class = module._BaseDataLoaderIter
    fetch = iterator_class.__next__

    def fetch_in_range(self: Any) -> Any:
        nvtx = _load_nvtx()
        if nvtx is None:
            return fetch(self)
        _end_step(nvtx, self)
        if not _is_exhausted(self):
            self._optpipe_step = nvtx.range_start(STEP)
        is_first = not getattr(self, "_optpipe_named", False)
        if is_first:
            self._optpipe_named = True
            nvtx.range_push(f"{LOADER}{getattr(self, '_num_workers', 0)}")
        nvtx.range_push(DATA)
        try:
            return fetch(self)
        except BaseException:
            _end_step(nvtx, self)
            raise
        finally:
            nvtx.range_pop()
            if is_first:
                nvtx.range_pop()

    iterator_class.__next__ = fetch_in_range


def give_workers(module: Any, workers: int) -> None:
    """Gives the loaders of data sets that have an index `workers` processes, whatever the program asks for."""
    create = module.DataLoader.__init__
    parameters = inspect.signature(create)

    @wraps(create)
    def create_with_workers(*given: Any, **named: Any) -> None:
        bound = parameters.bind(*given, **named)
        if not isinstance(bound.arguments["dataset"], module.IterableDataset):
            bound.arguments["num_workers"] = workers
            if workers == 0:  # what only workers can have is refused without them
                for name in _OF_WORKERS:
                    bound.arguments.pop(name, None)
        create(*bound.args, **bound.kwargs)

    module.DataLoader.__init__ = create_with_workers


def _end_step(nvtx: Any, iterator: Any) -> None:
    started = getattr(iterator, "_optpipe_step", None)
    if started is not None:
        nvtx.range_end(started)
        iterator._optpipe_step = None


def _is_exhausted(iterator: Any) -> bool:
    """Whether the next request ends the loop, so that it opens no step; an iterable data set does not tell."""
    try:
        return bool(iterator._num_yielded >= len(iterator._index_sampler))
    except (AttributeError, TypeError):
        return False


def mark_modules(module: Any) -> None:
    """Opens a range around each module's forward pass, named by its path below the outermost one."""
    paths: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
    stack: list[str] = []

    def find_path(called: Any) -> str:
        if called in paths:
            return paths[called]
        if stack:
            return ".".join(filter(None, (stack[-1], type(called).__name__)))
        for path, part in called.named_modules():
            paths.setdefault(part, path)
        return paths.get(called, "")

    def open_range(called: Any, *_: Any) -> None:
        nvtx = _load_nvtx()
        if nvtx is not None and not _is_compiling():
            stack.append(find_path(called))
            nvtx.range_push(MODULE + stack[-1])

    def close_range(*_: Any) -> None:
        nvtx = _load_nvtx()
        if nvtx is not None and not _is_compiling() and stack:
            stack.pop()
            nvtx.range_pop()

    module.register_module_forward_pre_hook(open_range)
    try:
        module.register_module_forward_hook(close_range, always_call=True)
    except TypeError:  # before torch 2.1
        module.register_module_forward_hook(close_range)


@cache
def _load_nvtx() -> Any:
    """The ranges of the program's torch; None if it is built without NVTX."""
    try:
        from torch.cuda import nvtx

        nvtx.mark("optpipe.marks")
    except (ImportError, RuntimeError, AttributeError):
        return None
    return nvtx


def _is_compiling() -> bool:
    compiler = getattr(sys.modules.get("torch"), "compiler", None)
    is_compiling = getattr(compiler, "is_compiling", None)
    return bool(is_compiling and is_compiling())


class _Marker(importlib.abc.MetaPathFinder):
    """Calls a function of this file after a module of torch is imported."""

    def __init__(self, marks: dict[str, Callable[[Any], None]]) -> None:
        self._marks = marks

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        mark = self._marks.pop(name, None)
        spec = None if mark is None else importlib.util.find_spec(name)
        if mark is None or spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_mark(module: Any) -> None:
            execute(module)
            try:
                mark(module)
            except Exception as error:  # noqa: BLE001 - a mark never fails the program
                print(f"optpipe: cannot mark {name}: {error}", file=sys.stderr)

        vars(spec.loader)["exec_module"] = execute_and_mark
        return spec


def _import_hidden() -> None:
    """Imports the `sitecustomize` that Python would have found without this folder."""
    sys.path[:] = [folder for folder in sys.path if Path(folder or ".").resolve() != _FOLDER]
    own = sys.modules.pop("sitecustomize", None)
    with suppress(ImportError):
        __import__("sitecustomize")
    if own is not None:
        sys.modules.setdefault("sitecustomize", own)


_WANTED: dict[str, Callable[[Any], None]] = {
    name: mark
    for word, name, mark in (
        ("loops", "torch.utils.data.dataloader", mark_loader),
        ("modules", "torch.nn.modules.module", mark_modules),
    )
    if word in _MARKS
}
if _WANTED:
    sys.meta_path.insert(0, _Marker(_WANTED))
_import_hidden()
