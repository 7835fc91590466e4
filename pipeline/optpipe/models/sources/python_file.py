"""A factory in a Python file: `net.py:make`, which takes no arguments and returns a `torch.nn.Module`.

The file runs as under `python FILE`; its modules and the files it reads are recorded.

The file may define `INPUTS = [{"name": "x", "dtype": "float32", "min": [1, 3, 32, 32], "opt": [8, 3, 32, 32], "max":
[64, 3, 32, 32]}]`, or such lists by factory; `TRANSFORM = Compose([...])` of torchvision, from an RGB Pillow image to the
only input; `TASK = "classification"` and `LABELS = ["cat", "dog"]`. A model card may have the same values and takes precedence.
"""

import copy
import importlib
import importlib.util
import os
import re
import site
import sys
import sysconfig
import tokenize
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, ClassVar

import optpipe
from optpipe.core import torch
from optpipe.core.card import (
    InputSpec,
    ModelCard,
    Task,
    input_from_dict,
    name_from_factory,
    task_from_text,
)
from optpipe.core.entries import WeightsRecord, WeightsRequest
from optpipe.core.errors import BadInputError, first_line, require_file
from optpipe.core.files import hash_file, hash_text, hash_value
from optpipe.core.process import redirect_stdout_to_stderr_at_exit
from optpipe.core.wording import Argument
from optpipe.models.sources.modules import (
    LoadedModel,
    hash_tensors,
    make_with_factory_weights,
    remake_module,
)
from optpipe.models.sources.nesting import arrange_inputs
from optpipe.models.sources.own_type import (
    CONVERTED_TYPES,
    find_quantized_part,
    make_loaded_model,
)
from optpipe.models.sources.transform import transform_from_torchvision
from optpipe.workspace.environment import get_package_version

_SYSTEM = ("/proc/", "/sys/")
_BROUGHT_IN: dict[str, ModuleType] = {}
"""Modules in `sys.modules` from users' files, which must be hidden from other files."""
_READING: list[set[str]] = []
"""Stack of sets that collect opened paths while a user's code runs."""


class SourceLoader(SourceFileLoader):
    """Compiles a module from its source in any case.

    Python takes cached bytecode for current if the source has the same size and the same second of modification. A file that
    was rewritten within a second would then run as it was before, under the hash of what it is now.
    """

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)  # type: ignore[no-any-return, unused-ignore]


class SourceFinder:
    """Finds modules as Python does; those that are not installed get a SourceLoader."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or type(spec.loader) is not SourceFileLoader or spec.origin is None:
            return None
        if _is_installed(spec.origin):
            return None
        spec.loader = SourceLoader(name, spec.origin)
        return spec


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
        sys.meta_path.insert(0, SourceFinder)
        sys.argv = [str(self.path)]
        _READING.append(self.read)
        try:
            with self._use_own_defaults():
                yield
        finally:
            _READING.pop()
            sys.meta_path.remove(SourceFinder)
            sys.path[:], sys.argv = path, argv
            os.chdir(folder)
            for name in set(sys.modules) - before:
                if (origin := _find_origin(sys.modules[name])) is not None and not _is_installed(
                    origin
                ):
                    self.modules[name] = sys.modules[name]
            for name in filter(
                _hides_installed, self.modules
            ):  # optpipe may need the installed module
                sys.modules.pop(name, None)
                sys.modules.update({name: displaced[name]} if name in displaced else {})
            _BROUGHT_IN.clear()
            _BROUGHT_IN.update(self.modules)
            redirect_stdout_to_stderr_at_exit()

    @contextmanager
    def _use_own_defaults(self) -> Iterator[None]:
        """Uses torch's defaults as this file set them before, and restores the others afterwards."""

        def use(dtype: Any, device: Any) -> tuple[Any, Any]:
            before = torch.get_default_dtype(), torch.get_default_device()
            torch.set_default_dtype(dtype)
            if device != before[1]:  # setting it adds a mode to every call
                torch.set_default_device(device)
            return before

        gradients, now = (
            torch.is_grad_enabled(),
            (torch.get_default_dtype(), torch.get_default_device()),
        )
        before = use(*(self._defaults or now))
        try:
            yield
        finally:
            self._defaults = use(*before)
            torch.set_grad_enabled(gradients)

    def import_definitions(self) -> ModuleType:
        """The imported module; to be called in `running`. Raises BadInputError if the file cannot be imported."""
        if self._definitions is not None:
            return self._definitions
        name = self.path.stem
        if not name.isidentifier() or name in sys.modules or _hides_installed(name):
            name = f"optpipe_model_{name}"
        loader = SourceLoader(name, str(self.path))
        spec = importlib.util.spec_from_file_location(name, self.path, loader=loader)
        assert spec is not None  # the name ends in .py
        assert spec.loader is not None
        definitions = importlib.util.module_from_spec(spec)
        sys.modules[name] = definitions  # dataclasses look up their module here
        try:
            importlib.invalidate_caches()  # a folder may have changed within the resolution of its timestamp
            spec.loader.exec_module(definitions)
        except (Exception, SystemExit) as error:
            sys.modules.pop(name, None)
            raise BadInputError(
                f"{self.path} cannot be imported: {describe_user_error(error)}"
            ) from error
        self._definitions = definitions
        return definitions

    def files(self, weights: Path | None) -> Mapping[str, str]:
        """Hashes of the file, its modules and the files it read, except installed ones, by path from its folder.

        `weights` that were read for it are left out: they count by their content. So is the program that runs: an import of
        torch reads it, such as the script `optpipe` or a notebook's, and another program loads the same model.
        """
        folder, given = self.path.resolve().parent, str(weights and weights.absolute())
        program = os.path.realpath(getattr(sys.modules["__main__"], "__file__", None) or folder)
        origins = (_find_origin(module) for module in self.modules.values())
        return {
            os.path.relpath(path, folder): hash_file(Path(path))
            for path in sorted(
                {str(self.path.resolve()), *map(_find_source, self.read), *filter(None, origins)}
            )
            if path == str(self.path.resolve())
            or (
                not path.startswith(_SYSTEM)
                and not _is_installed(path)
                and Path(path).is_file()
                and path != given
                and os.path.realpath(path) != program
            )
        }


def describe_user_error(error: BaseException) -> str:
    """A user's exception on one line, with its last line in the user's code, and a remedy if known."""
    text = f"{type(error).__name__}: {first_line(error)}" + _find_place(error)
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = f"the package that provides {error.name.partition('.')[0]}"
        return f"{text}\ninstall {package} (`uv pip install`), or add its folder to PYTHONPATH"
    if isinstance(error, ImportError) and "relative import" in str(error):
        return (
            text
            + "\nit uses relative imports: give a file outside the package that imports the factory"
        )
    if (
        isinstance(error, FileNotFoundError)
        and error.filename
        and not Path(os.fsdecode(error.filename)).is_absolute()
    ):
        return (
            text
            + "\nthe path is relative to the working directory; use Path(__file__).parent / ... instead"
        )
    if type(error).__name__ == "URLError":
        return (
            text + "\nit downloads something that is out of reach here; load it from a file instead"
        )
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
    # a traceback reads source lines with tokenize.open
    if event != "open" or not _READING or sys._getframe(1).f_code is tokenize.open.__code__:
        return
    path, _, flags = arguments
    if isinstance(path, str | bytes) and flags & os.O_ACCMODE == os.O_RDONLY:
        for read in _READING[-1:]:  # may be empty by now if another thread opens the file
            read.add(os.path.abspath(os.fsdecode(path)))  # noqa: PTH100 - Path.absolute() keeps its dots


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
    spec = PathFinder.find_spec(package, [folder.rstrip("/") for folder in _list_package_folders()])
    return package in sys.stdlib_module_names or (spec is not None and spec.origin is not None)


def _is_installed(path: str) -> bool:
    return path.startswith((*_list_package_folders(), f"{Path(optpipe.__file__).parent}/"))


@cache
def _list_package_folders() -> tuple[str, ...]:
    own = sysconfig.get_paths()
    folders = [own[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [*site.getsitepackages(), site.getusersitepackages()]
    folders += [
        folder for folder in sys.path if folder and any(Path(folder).glob("*.dist-info"))
    ]  # pip install --target
    return tuple(f"{folder}/" for path in folders for folder in {path, os.path.realpath(path)})


@dataclass(frozen=True)
class PythonFileSource:
    path: Path
    factory: str
    card: ModelCard | None = None
    has_module: ClassVar[bool] = True
    runs_code: ClassVar[bool] = True
    _records: dict[WeightsRequest, WeightsRecord] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _returned: list["weakref.ref[Any]"] = field(
        default_factory=list, init=False, repr=False, compare=False
    )
    """The tensors of all modules that were returned."""

    @property
    def name(self) -> str:
        return f"{self.path}:{self.factory}"

    def collect_identity(self) -> Mapping[str, Any]:
        """Hashes of the file, the factory's name and torch's version; `LoadedModel.code_identity` has the rest."""
        require_file(self.path)
        return {
            "file": hash_file(self.path),
            "factory": self.factory,
            "torch": get_package_version("torch"),
        }

    def load(self, weights: WeightsRequest) -> LoadedModel:
        """Calls the factory. `default` weights are those that the factory itself sets or draws.

        Loading again gives another module with the same weights; the file is imported only once.
        """
        require_file(self.path)
        import torch  # noqa: F401 - before the user's code, which so brings in only what is its own

        with self._code.running():
            self._find_factory()
            card = self._describe(self._code.import_definitions())
            name = f"{self.path.name}:{self.factory}"
            record = self._records.get(weights)
            if record is None:
                module, record = make_with_factory_weights(self._make_module, weights, name)
                self._records[weights] = record
            else:
                module = remake_module(self._make_module, weights, record, name)
        made = {
            **_describe_contents(module),
            "files": self._code.files(weights.path),
            "card": hash_value(replace(card, data={}, source=self.factory).to_dict()),
        }
        arrange = arrange_inputs(module, [spec.name for spec in card.inputs])
        return replace(make_loaded_model(module, card, record, arrange), code_identity=made)

    @cached_property
    def _code(self) -> UserCode:
        return UserCode(self.path)

    def _make_module(self) -> Any:
        """The factory's module, which shares no tensor with earlier ones. To be called in `_code.running`."""
        factory = self._find_factory()
        try:
            module = factory()
        except (Exception, SystemExit) as error:
            raise BadInputError(f"{self.name} raised {describe_user_error(error)}") from error
        _require_usable(module, self.name)
        module.cpu()
        tensors = [*module.parameters(), *module.buffers()]
        given = {id(tensor) for reference in self._returned if (tensor := reference()) is not None}
        if any(
            id(tensor) in given for tensor in tensors
        ):  # the factory reuses a module, so changes need a copy
            module = copy.deepcopy(module)
            tensors = [*module.parameters(), *module.buffers()]
        self._returned.extend(map(weakref.ref, tensors))
        return module

    def _find_factory(self) -> Any:
        definitions = self._code.import_definitions()
        factory = getattr(definitions, self.factory, None)
        if isinstance(factory, torch.nn.Module):
            raise BadInputError(
                f"{self.name} is a module, not a factory: define a function that returns it"
            )
        if not callable(factory):
            known = [
                name
                for name, value in vars(definitions).items()
                if callable(value) and not name.startswith("_")
            ]
            raise BadInputError(
                f"{self.path} has no factory '{self.factory}'; it defines {', '.join(known) or 'none'}"
            )
        return factory

    def _describe(self, definitions: ModuleType) -> ModelCard:
        """The model card's values, completed by the file's."""
        card = self.card
        if card is None:
            return self._make_own_card(definitions)
        own = self._make_own_card(definitions, () if card.inputs else None)
        return replace(
            card,
            inputs=card.inputs or own.inputs,
            transform=card.transform or own.transform,
            labels=card.labels or own.labels,
            task=own.task if card.task is Task.OTHER else card.task,
        )

    def _make_own_card(
        self, definitions: ModuleType, instead: tuple[InputSpec, ...] | None = None
    ) -> ModelCard:
        """The card from the file's values; its inputs are not required if `instead` is given."""
        inputs = getattr(definitions, "INPUTS", None) if instead is None else ()
        if isinstance(inputs, Mapping):
            factory = self.name.rpartition(":")[2]
            if factory not in inputs:
                problem = f"{self.path}: INPUTS describes {', '.join(map(str, inputs))}"
                raise BadInputError(f"{problem}, not the factory {factory}")
            inputs = inputs[factory]
        if not inputs and instead is None:
            problem = f"{self.path} does not describe its inputs"
            raise BadInputError(
                f"{problem}; define INPUTS in it or write a model card (models/README.md)"
            )
        described = getattr(definitions, "TRANSFORM", None)
        transform = None if described is None else transform_from_torchvision(described)
        if not isinstance(inputs, list | tuple):
            example = [{"name": "x", "min": [1, 8], "opt": [4, 8], "max": [64, 8]}]
            raise BadInputError(f"{self.path}: INPUTS must be a list, such as {example}")
        return ModelCard(
            name_from_factory(self.name),
            self.name,
            self._read_task(getattr(definitions, "TASK", Task.OTHER)),
            tuple(input_from_dict(_replace_double(described)) for described in inputs),
            transform=transform,
            labels=self._read_labels(getattr(definitions, "LABELS", ())),
        )

    def _read_task(self, said: Any) -> Task:
        try:
            return task_from_text(said)
        except BadInputError as error:
            raise BadInputError("TASK: " + error.message, place=self.path) from error

    def _read_labels(self, said: Any) -> tuple[str, ...]:
        if isinstance(said, list | tuple) and all(isinstance(label, str) for label in said):
            return tuple(said)
        raise BadInputError(
            f"{self.path}: LABELS is not a list of the classes' names, in the order of the outputs"
        )


def _replace_double(described: Any) -> Any:
    """float64 becomes float32, the type of the engines' inputs."""
    if isinstance(described, Mapping) and str(described.get("dtype")).endswith("float64"):
        return {**described, "dtype": "float32"}
    return described


def _require_usable(module: Any, name: str) -> None:
    """Raises BadInputError for anything but a module with floating-point values, and sets it to evaluation."""
    message = None
    if isinstance(module, type) and issubclass(module, torch.nn.Module):
        message = f"{name} returned the class {module.__name__}, not an instance of it: return {module.__name__}(...)"
    elif not isinstance(module, torch.nn.Module):
        message = f"{name} returned {type(module).__name__}, not a torch.nn.Module"
    else:
        try:
            module.eval()
        except NotImplementedError:
            message = f"{name} returned an exported program; return the module it was exported from"
        if not message and (part := find_quantized_part(module)) is not None:
            way = "return the float module that it was made from; "
            way += Argument("precision", "int8") + " " + Argument("calibration", "PATH")
            message = (
                f"{name} is quantized already: {part}, whose integer kernels only torch has\n"
                + way
                + " quantizes it"
            )
        wrong = (
            (name, _find_defect(tensor))
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]
        )
        message = message or next(
            (f"{name}: {defect} " + why for defect, why in wrong if why), None
        )
    if message:
        raise BadInputError(message)


def _find_defect(tensor: Any) -> str | None:
    if torch.nn.parameter.is_lazy(tensor):
        return "has no shape yet (lazy); call the module once on an example before returning it"
    if tensor.is_meta:
        return "is on the meta device and has no values; load them before returning it"
    if (
        isinstance(tensor, torch.nn.Parameter)
        and (tensor.is_floating_point() or tensor.is_complex())
        and (kind := str(tensor.dtype).removeprefix("torch.")) not in ("float32", *CONVERTED_TYPES)
    ):
        sets = Argument("precision") + " sets its precision"
        return f"is in {kind}; return the module in float32, " + sets
    return None


def _describe_contents(module: Any) -> dict[str, Any]:
    """Tensors, arrangement of parts, and versions of the packages that define them."""
    parts = list(module.modules())
    packages = sorted({type(part).__module__.partition(".")[0] for part in parts})
    code = [str(getattr(part, "code", "")) for part in parts]  # traced and scripted parts have code
    return {
        "tensors": hash_value(hash_tensors(module)),
        "parts": hash_text("\n".join([re.sub(" at 0x[0-9a-f]+", "", repr(module)), *code])),
        "packages": {
            name: str(getattr(sys.modules.get(name), "__version__", None)) for name in packages
        },
    }
