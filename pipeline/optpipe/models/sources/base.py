"""What every kind of MODEL can do: say cheaply what it is, and load itself."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from optpipe.core.card import ModelCard
from optpipe.core.entries import WeightsRecord, WeightsRequest
from optpipe.core.errors import OptpipeError

DEFAULT_BATCH_PROFILE = (1, 8, 64)
"""Profile of an open first dimension unless `--batch` says otherwise."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory: either a `torch.nn.Module` whose forward takes the card's inputs in order, or an ONNX file."""

    card: ModelCard
    weights: WeightsRecord
    module: Any = None
    onnx: Path | None = None
    tokenizer: str | None = None
    """A text model's `tokenizer.json`, whole."""
    calibration: Callable[[], Sequence[Mapping[str, Any]]] | None = None
    """Makes the inputs that INT8 is calibrated on, by name; of a Python file that says `CALIBRATION`."""
    code_identity: Mapping[str, Any] = field(default_factory=dict)
    """What decides it beside its source's `identity`, and shows only once it is made: of models that `runs_code` makes."""


class Source(Protocol):
    """One MODEL as the user named it."""

    @property
    def name(self) -> str:
        """Canonical text, such as `torchvision:resnet50`."""

    @property
    def has_module(self) -> bool:
        """Whether it loads as a torch module; an ONNX file does not."""

    @property
    def runs_code(self) -> bool:
        """Whether a user's code makes it: `LoadedModel.code_identity` then has what else decides it."""

    def collect_identity(self) -> Mapping[str, Any]:
        """What decides the model beside its weights: versions and file hashes. Imports no framework."""

    def load(self, weights: WeightsRequest) -> LoadedModel:
        """Loads it; raises `BadInputError` for a name or file that is not a model, `NoWeightsError` without a network."""


class NoWeightsError(OptpipeError):
    """The published weights cannot be had here; `host` is where they would come from."""

    def __init__(self, reason: str, host: str) -> None:
        super().__init__(reason)
        self.host = host
