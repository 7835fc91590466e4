"""A factory in a Python file: `net.py:make`. The factory takes no arguments and returns a `torch.nn.Module`.

The file may say `INPUTS = [{"name": "x", "dtype": "float32", "min": [1, 3, 32, 32], "opt": [8, 3, 32, 32], "max": [64, 3, 32, 32]}]`;
and `TRANSFORM = Compose([...])`, torchvision's, from an RGB picture of Pillow to the one input. A model card says that, and
the task and labels, for files that do not.
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from optpipe.core.card import ModelCard, Task
from optpipe.core.environment import package_version
from optpipe.core.hashing import file_sha256
from optpipe.core.tensors import input_from_dict
from optpipe.core.weights import WeightsRequest
from optpipe.errors import BadInputError, first_line
from optpipe.sources.base import Loaded
from optpipe.sources.modules import flat_module
from optpipe.sources.transform import transform_from_torchvision
from optpipe.sources.weights import with_weights


@dataclass(frozen=True, slots=True)
class PythonFileSource:
    """A file and the name of a factory in it."""

    path: Path
    factory: str
    card: ModelCard | None = None
    """Where a model card describes the factory's model."""

    @property
    def name(self) -> str:
        """`FILE.py:FACTORY`."""
        return f"{self.path}:{self.factory}"

    @property
    def has_module(self) -> bool:
        """Whether it loads as a torch module."""
        return True

    def identity(self) -> Mapping[str, Any]:
        """The file's hash (not that of what it imports), the factory's name and torch's version."""
        return {"file": file_sha256(self.path), "factory": self.factory, "torch": package_version("torch")}

    def load(self, weights: WeightsRequest) -> Loaded:
        """Calls the factory. `default` weights are those that the factory itself sets, seeded."""
        import torch

        definitions = _imported(self.path)
        factory = getattr(definitions, self.factory, None)
        if not callable(factory):
            known = [name for name, value in vars(definitions).items() if callable(value) and not name.startswith("_")]
            message = f"{self.path} has no factory '{self.factory}'; it defines {', '.join(known) or 'none'}"
            raise BadInputError(message)

        def made() -> torch.nn.Module:
            try:
                module = factory()
            except Exception as error:
                message = f"{self.name} raised {type(error).__name__}: {first_line(error)}"
                raise BadInputError(message) from error
            if not isinstance(module, torch.nn.Module):
                message = f"{self.name} returned {type(module).__name__}, not a torch.nn.Module"
                raise BadInputError(message)
            return module

        module, record = with_weights(made, weights)
        return Loaded(self.card or self._own_card(definitions), record, module=flat_module(module))

    def _own_card(self, definitions: ModuleType) -> ModelCard:
        inputs = getattr(definitions, "INPUTS", None)
        if not inputs:
            message = f"{self.path} does not say what its inputs are; define INPUTS in it or write a model card (models/README.md)"
            raise BadInputError(message)
        described = getattr(definitions, "TRANSFORM", None)
        transform = None if described is None else transform_from_torchvision(described)
        specs = tuple(input_from_dict(each) for each in inputs)
        return ModelCard(self.factory, self.name, Task.OTHER, specs, transform=transform)


def _imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"optpipe_model_{path.stem}", path)
    if spec is None or spec.loader is None:
        message = f"{path} is not a Python file"
        raise BadInputError(message)
    definitions = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(definitions)
    except Exception as error:
        message = f"{path} cannot be imported: {type(error).__name__}: {error}"
        raise BadInputError(message) from error
    return definitions
