"""Runs a user's Python file as `python FILE` does, and records its modules and the files it reads."""

import importlib
import importlib.util
import os
import site
import sys
import sysconfig
import tokenize
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import optpipe
from optpipe.core.errors import BadInputError, first_line
from optpipe.core.files import hash_file
from optpipe.core.process import redirect_stdout_to_stderr_at_exit

_SYSTEM = ("/proc/", "/sys/")
_BROUGHT_IN: dict[str, ModuleType] = {}
"""Modules in `sys.modules` from users' files, which must be hidden from other files."""
_READING: list[set[str]] = []
"""Stack of sets that collect opened paths while a user's code runs."""


@dataclass
class UserCode:
    path: Path
    modules: dict[str, ModuleType] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)
    _definitions: ModuleType | None = None
    _defaults: tuple[Any, Any] | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within the block, imports search the file's folder, and reads are recorded.

        Path, arguments, working directory and torch's defaults are restored afterwards. The modules stay in
        `sys.modules`, for a forward that imports, until another file's code runs.
        """
        _listen()
        for name, module in list(_BROUGHT_IN.items()):
            if self.modules.get(name) is not module and sys.modules.get(name) is module:
                del sys.modules[name]
        displaced = {name: sys.modules[name] for name in self.modules if name in sys.modules}
        sys.modules.update(self.modules)
        before, path, argv, folder = set(sys.modules), list(sys.path), sys.argv, Path.cwd()
        sys.path.insert(0, str(self.path.resolve().parent))
        sys.argv = [str(self.path)]
        _READING.append(self.read)
        try:
            with self._use_own_defaults():
                yield
        finally:
            _READING.pop()
            sys.path[:], sys.argv = path, argv
            os.chdir(folder)
            for name in set(sys.modules) - before:
                if (origin := _find_origin(sys.modules[name])) is not None and not _is_installed(origin):
                    self.modules[name] = sys.modules[name]
            for name in [
                each for each in self.modules if _hides_installed(each)
            ]:  # optpipe may need the installed module
                sys.modules.pop(name, None)
                sys.modules.update({name: displaced[name]} if name in displaced else {})
            _BROUGHT_IN.clear()
            _BROUGHT_IN.update(self.modules)
            redirect_stdout_to_stderr_at_exit()

    @contextmanager
    def _use_own_defaults(self) -> Iterator[None]:
        """Uses torch's defaults as this file set them before, and restores the others afterwards."""
        import torch

        gradients, before = torch.is_grad_enabled(), _get_defaults()
        _set_defaults(self._defaults or before)
        try:
            yield
        finally:
            self._defaults = _get_defaults()
            _set_defaults(before)
            torch.set_grad_enabled(gradients)

    def import_definitions(self) -> ModuleType:
        """The imported module; to be called in `running`. Raises BadInputError if the file cannot be imported."""
        if self._definitions is None:
            self._definitions = self._import_file()
        return self._definitions

    def _import_file(self) -> ModuleType:
        name = self.path.stem
        if not name.isidentifier() or name in sys.modules or _hides_installed(name):
            name = f"optpipe_model_{name}"
        spec = importlib.util.spec_from_file_location(name, self.path)
        assert spec is not None  # the name ends in .py
        assert spec.loader is not None
        definitions = importlib.util.module_from_spec(spec)
        sys.modules[name] = definitions  # dataclasses look up their module here
        try:
            importlib.invalidate_caches()  # a folder may have changed within the resolution of its timestamp
            spec.loader.exec_module(definitions)
        except (Exception, SystemExit) as error:
            sys.modules.pop(name, None)
            raise BadInputError(f"{self.path} cannot be imported: {describe_user_error(error)}") from error
        return definitions

    def files(self, weights: Path | None) -> Mapping[str, str]:
        """Hashes of the file, its modules and the files it read, except installed ones, by path from its folder.

        `weights` that were read for it are left out: they count by their content.
        """
        folder, given = self.path.resolve().parent, str(weights and weights.absolute())
        origins = (_find_origin(module) for module in self.modules.values())
        paths = {
            str(self.path.resolve()),
            *map(_find_source, self.read),
            *(each for each in origins if each is not None),
        }
        return {
            os.path.relpath(each, folder): hash_file(Path(each))
            for each in sorted(paths)
            if not each.startswith(_SYSTEM) and not _is_installed(each) and Path(each).is_file() and each != given
        }


def _get_defaults() -> tuple[Any, Any]:
    import torch

    return torch.get_default_dtype(), torch.get_default_device()


def _set_defaults(wanted: tuple[Any, Any]) -> None:
    import torch

    dtype, device = wanted
    torch.set_default_dtype(dtype)
    if device != torch.get_default_device():  # setting it adds a mode to every call
        torch.set_default_device(device)


def describe_user_error(error: BaseException) -> str:
    """A user's exception on one line, with its last line in the user's code, and a remedy if known."""
    text = f"{type(error).__name__}: {first_line(error)}" + _find_place(error)
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        return (
            text + f"\ninstall the package that provides {package} (`uv pip install`), or add its folder to PYTHONPATH"
        )
    if isinstance(error, ImportError) and "relative import" in str(error):
        return text + "\nit uses relative imports: give a file outside the package that imports the factory"
    if isinstance(error, FileNotFoundError) and error.filename and not Path(os.fsdecode(error.filename)).is_absolute():
        return text + "\nthe path is relative to the working directory; use Path(__file__).parent / ... instead"
    if type(error).__name__ == "URLError":
        return text + "\nit downloads something that is out of reach here; load it from a file instead"
    if isinstance(error, SystemExit):
        return text + "\nput code that is only for `python FILE` under `if __name__ == '__main__':`"
    return text


def _find_place(error: BaseException) -> str:
    """The last line of user code in the traceback; a syntax error names its own."""
    trace, place = error.__traceback__, ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file.startswith("/") and not _is_installed(file):
            place = f" ({Path(file).name}, line {trace.tb_lineno})"
        trace = trace.tb_next
    return place


@cache
def _listen() -> None:
    """Records every file opened for reading while `_READING` is not empty; Python cannot remove the hook."""
    sys.addaudithook(_note_read)


def _note_read(event: str, arguments: tuple[Any, ...]) -> None:
    if (
        event != "open" or not _READING or sys._getframe(1).f_code is tokenize.open.__code__
    ):  # a traceback reads source lines
        return
    path, _, flags = arguments
    if isinstance(path, str | bytes) and flags & os.O_ACCMODE == os.O_RDONLY:
        for found in _READING[-1:]:  # may be empty by now if another thread opens the file
            found.add(os.path.abspath(os.fsdecode(path)))  # noqa: PTH100 - Path.absolute() keeps its dots


def _find_source(path: str) -> str:
    try:
        return importlib.util.source_from_cache(path)
    except ValueError:
        return path


def _find_origin(module: Any) -> str | None:
    """The file of a module, or the folder of a package without one; None for modules made by code."""
    own = vars(module) if isinstance(module, ModuleType) else {}  # getattr would load a lazy module
    origin = own.get("__file__") or next(iter(own.get("__path__") or ()), None)
    return origin if isinstance(origin, str) and origin.startswith("/") else None


@cache
def _hides_installed(name: str) -> bool:
    """Whether a user's module of that name hides an installed package."""
    package = name.partition(".")[0]
    found = PathFinder.find_spec(package, [folder.rstrip("/") for folder in _list_package_folders()])
    return package in sys.stdlib_module_names or (found is not None and found.origin is not None)


def _is_installed(path: str) -> bool:
    return path.startswith((*_list_package_folders(), f"{Path(optpipe.__file__).parent}/"))


@cache
def _list_package_folders() -> tuple[str, ...]:
    own = sysconfig.get_paths()
    folders = [own[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [*site.getsitepackages(), site.getusersitepackages()]
    return tuple(f"{folder}/" for each in folders for folder in {each, os.path.realpath(each)})
