"""A factory in a Python file: `net.py:make`. The factory takes no arguments and returns a `torch.nn.Module`.

The file may say `INPUTS = [{"name": "x", "dtype": "float32", "min": [1, 3, 32, 32], "opt": [8, 3, 32, 32], "max": [64, 3, 32, 32]}]`;
`TRANSFORM = Compose([...])`, torchvision's, from an RGB Pillow image to the one input; `TASK = "classification"` and
`LABELS = ["cat", "dog"]`; `CALIBRATION`, a generator of the inputs that INT8 is calibrated on. A model card may say the same,
and goes before the file.
"""

import copy
import re
import sys
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from optpipe.core.card import InputSpec, ModelCard, Task, input_from_dict, name_from_factory
from optpipe.core.entries import WeightsRecord, WeightsRequest
from optpipe.core.errors import BadInputError
from optpipe.core.files import hash_file, hash_text, hash_value
from optpipe.models.sources.base import LoadedModel
from optpipe.models.sources.modules import flatten_module
from optpipe.models.sources.transform import transform_from_torchvision
from optpipe.models.sources.user_code import UserCode, describe_user_error
from optpipe.models.sources.weights import hash_tensors, make_with_factory_weights, remake_module
from optpipe.workspace.environment import get_package_version

CALIBRATION_BATCHES = 1000
"""As many as are taken of a file's generator."""


@dataclass(frozen=True)
class PythonFileSource:
    """A file and the name of a factory in it."""

    path: Path
    factory: str
    card: ModelCard | None = None
    """Where a model card describes the factory's model."""
    has_module: ClassVar[bool] = True
    runs_code: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return f"{self.path}:{self.factory}"

    def collect_identity(self) -> Mapping[str, Any]:
        """The file's hash, the factory's name and torch's version; `LoadedModel.code_identity` has what the two bring in."""
        self._require_file()
        return {"file": hash_file(self.path), "factory": self.factory, "torch": get_package_version("torch")}

    def load(self, weights: WeightsRequest) -> LoadedModel:
        """Calls the factory. `default` weights are those that the factory itself sets, or draws.

        Loaded once more it is another module with the same weights; the file is imported only once.
        """
        self._require_file()
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
            "card": hash_value(replace(card, data={}).to_dict()),
        }
        names = tuple(each.name for each in card.inputs)
        given = getattr(self._code.import_definitions(), "CALIBRATION", None)
        calibration = None if given is None else partial(_run_calibration, self._code, given, names)
        flat = flatten_module(module, keywords=_match_input_names(module, names))
        return LoadedModel(card, record, module=flat, calibration=calibration, code_identity=made)

    def _require_file(self) -> None:
        if not self.path.is_file():
            raise BadInputError(f"{self.path}: no such file")

    @cached_property
    def _code(self) -> UserCode:
        return UserCode(self.path)

    @cached_property
    def _records(self) -> dict[WeightsRequest, WeightsRecord]:
        """What was found out of the weights that were loaded."""
        return {}

    @cached_property
    def _returned_tensors(self) -> list["weakref.ref[Any]"]:
        """The tensors of the modules that were handed out."""
        return []

    def _make_module(self) -> Any:
        """What the factory returns, sharing no tensor with what it returned before. To be called in `_code.running`."""
        factory = self._find_factory()
        try:
            module = factory()
        except (Exception, SystemExit) as error:
            raise BadInputError(f"{self.name} raised {describe_user_error(error)}") from error
        _require_usable(module, self.name)
        module.cpu()
        tensors = [*module.parameters(), *module.buffers()]
        given = {id(tensor) for each in self._returned_tensors if (tensor := each()) is not None}
        if any(id(each) in given for each in tensors):  # made once and kept: what changes one must not change the other
            module = copy.deepcopy(module)
            tensors = [*module.parameters(), *module.buffers()]
        self._returned_tensors.extend(map(weakref.ref, tensors))
        return module

    def _find_factory(self) -> Any:
        import torch

        definitions = self._code.import_definitions()
        factory = getattr(definitions, self.factory, None)
        if isinstance(factory, torch.nn.Module):
            raise BadInputError(f"{self.name} is a module, not a factory: define a function that returns it")
        if not callable(factory):
            known = [name for name, value in vars(definitions).items() if callable(value) and not name.startswith("_")]
            raise BadInputError(f"{self.path} has no factory '{self.factory}'; it defines {', '.join(known) or 'none'}")
        return factory

    def _describe(self, definitions: ModuleType) -> ModelCard:
        """The model card's values, and those that the file says where the card does not."""
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

    def _make_own_card(self, definitions: ModuleType, instead: tuple[InputSpec, ...] | None = None) -> ModelCard:
        """What the file says; its inputs are not asked for where there are others `instead`."""
        inputs = getattr(definitions, "INPUTS", None) if instead is None else ()
        if not inputs and instead is None:
            raise BadInputError(
                f"{self.path} does not describe its inputs; define INPUTS in it or write a model card (models/README.md)"
            )
        described = getattr(definitions, "TRANSFORM", None)
        transform = None if described is None else transform_from_torchvision(described)
        if not isinstance(inputs, list | tuple):
            raise BadInputError(
                f"{self.path}: INPUTS must be a list, such as [{{'name': 'x', 'min': [1, 8], 'opt': [4, 8], 'max': [64, 8]}}]"
            )
        specs = tuple(input_from_dict(each) for each in inputs)
        return ModelCard(
            name_from_factory(self.name),
            self.name,
            self._read_task(getattr(definitions, "TASK", Task.OTHER)),
            specs,
            transform=transform,
            labels=self._read_labels(getattr(definitions, "LABELS", ())),
        )

    def _read_task(self, said: Any) -> Task:
        try:
            return Task(said)
        except ValueError as error:
            raise BadInputError(f"{self.path}: TASK is {said!r}; give one of {', '.join(Task)}") from error

    def _read_labels(self, said: Any) -> tuple[str, ...]:
        if isinstance(said, list | tuple) and all(isinstance(each, str) for each in said):
            return tuple(said)
        raise BadInputError(f"{self.path}: LABELS is not a list of the classes' names, in the order of the outputs")


def read_calibration(path: Path, names: tuple[str, ...]) -> list[Mapping[str, Any]]:
    """The batches that CALIBRATION of the Python file `path` gives, by the inputs' `names`. The file's code runs.

    Raises `BadInputError` for a file that cannot be imported, says no CALIBRATION, or whose CALIBRATION raises.
    """
    if not path.is_file():
        raise BadInputError(f"{path}: no such file")
    code = UserCode(path)
    with code.running():
        given = getattr(code.import_definitions(), "CALIBRATION", None)
    if given is None:
        raise BadInputError(f"{path} does not define CALIBRATION, a generator of mappings with {', '.join(names)}")
    return _run_calibration(code, given, names)


def _run_calibration(code: UserCode, given: Any, names: tuple[str, ...]) -> list[Mapping[str, Any]]:
    """What CALIBRATION gives, at most CALIBRATION_BATCHES: mappings from inputs to arrays, or tensors of the only input."""
    with code.running():
        try:
            found = list(islice(given() if callable(given) else given, CALIBRATION_BATCHES))
            return [_to_arrays(each, names) for each in found]
        except (Exception, SystemExit) as error:
            raise BadInputError(
                f"{code.path}: CALIBRATION raised {describe_user_error(error)}\nexpected mappings with {', '.join(names)}"
            ) from error


def _to_arrays(given: Any, names: tuple[str, ...]) -> Mapping[str, Any]:
    """One batch as arrays by input; `TypeError` for what is none."""
    import numpy as np
    import torch

    if not isinstance(given, Mapping):
        values = given if isinstance(given, tuple | list) else (given,)
        given = dict(zip(names, values, strict=True))
    return {
        str(name): value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
        for name, value in given.items()
    }


def _match_input_names(module: Any, names: tuple[str, ...]) -> tuple[str, ...]:
    """`names` where they all are parameters of its forward, which then takes them by name; else it takes them in order."""
    import inspect

    try:
        known = inspect.signature(module.forward).parameters
    except (TypeError, ValueError):  # of a scripted module
        return ()
    named = {name for name, each in known.items() if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    return names if named.issuperset(names) else ()


def _require_usable(module: Any, name: str) -> None:
    """Raises `BadInputError` for anything but a module in FP32 with values, and sets it to evaluation."""
    import torch

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
        wrong = ((each, _find_defect(tensor)) for each, tensor in [*module.named_parameters(), *module.named_buffers()])
        message = message or next((f"{name}: {each} {why}" for each, why in wrong if why), None)
    if message:
        raise BadInputError(message)


def _find_defect(tensor: Any) -> str | None:
    """What keeps a parameter or buffer from being taken as it is."""
    import torch

    if torch.nn.parameter.is_lazy(tensor):
        return "has no shape yet (lazy); call the module once on an example before returning it"
    if tensor.is_meta:
        return "is on the meta device and has no values; load them before returning it"
    if isinstance(tensor, torch.nn.Parameter) and tensor.is_floating_point() and tensor.dtype != torch.float32:
        kind = str(tensor.dtype).removeprefix("torch.")
        return f"is in {kind}; return the module in float32 (.float()), --precision sets its precision"
    return None


def _describe_contents(module: Any) -> dict[str, Any]:
    """What a module is: its tensors, how its parts are arranged, and the versions of the packages that define them."""
    parts = list(module.modules())
    packages = sorted({type(part).__module__.partition(".")[0] for part in parts})
    code = [str(getattr(part, "code", "")) for part in parts]  # of traced and scripted parts
    return {
        "tensors": hash_value(hash_tensors(module)),
        "parts": hash_text("\n".join([re.sub(" at 0x[0-9a-f]+", "", repr(module)), *code])),
        "packages": {name: str(getattr(sys.modules.get(name), "__version__", None)) for name in packages},
    }
