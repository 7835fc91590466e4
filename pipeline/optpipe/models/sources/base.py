from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from optpipe.core.card import ModelCard
from optpipe.core.entries import WeightsRecord, WeightsRequest
from optpipe.core.errors import OptpipeError

DEFAULT_BATCH_PROFILE = (1, 8, 64)
"""Profile of an open first dimension without `--batch`."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory: a `torch.nn.Module` whose forward takes the card's inputs in order, or an ONNX file."""

    card: ModelCard
    weights: WeightsRecord
    module: Any = None
    onnx: Path | None = None
    tokenizer: str | None = None
    calibration: Callable[[], Sequence[Mapping[str, Any]]] | None = None
    """Makes the inputs for INT8 calibration, by name; from `CALIBRATION` of a Python file."""
    code_identity: Mapping[str, Any] = field(default_factory=dict)
    """Identity besides the source's, known only after loading; for models with `runs_code`."""


class Source(Protocol):
    @property
    def name(self) -> str:
        """Canonical text, such as `torchvision:resnet50`."""

    @property
    def has_module(self) -> bool:
        """Whether it loads as a torch module; an ONNX file does not."""

    @property
    def runs_code(self) -> bool:
        """Whether a user's code makes it; `LoadedModel.code_identity` then has the rest of its identity."""

    def collect_identity(self) -> Mapping[str, Any]:
        """Versions and file hashes that determine the model besides its weights. Imports no framework."""

    def load(self, weights: WeightsRequest) -> LoadedModel:
        """Raises BadInputError for a name or file that is not a model, NoWeightsError without a network."""


class NoWeightsError(OptpipeError):
    """The published weights are not available; `host` would serve them."""

    def __init__(self, reason: str, host: str) -> None:
        super().__init__(reason)
        self.host = host
