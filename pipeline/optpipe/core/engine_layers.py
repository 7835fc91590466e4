"""The layers of a built engine with their types and tactics, or those of the network it was built from."""

from collections import Counter
from dataclasses import dataclass

ENGINE_LAYERS = "layers.json"
"""The record in an artifact."""


@dataclass(frozen=True, slots=True)
class EngineLayer:
    """One layer."""

    name: str
    op: str
    inputs: tuple[str, ...]
    """The type, and where known the format, of each input."""
    outputs: tuple[str, ...]
    tactic: str | None = None
    """The kernel that the builder chose; None where only the network is known."""


@dataclass(frozen=True, slots=True)
class EngineLayers:
    """All layers in their order."""

    origin: str
    """`engine inspector`, or why only the parsed network is known."""
    layers: tuple[EngineLayer, ...]

    def count_types(self) -> dict[str, int]:
        """How many layers there are by the type of their first input, the most frequent first."""
        counted = Counter(layer.inputs[0] for layer in self.layers if layer.inputs)
        return dict(counted.most_common())
