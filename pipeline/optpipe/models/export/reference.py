"""The reference file of an exported model: inputs, the source model's outputs, labels."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class Reference:
    """Inputs, the source model's outputs on them, and the true classes where they are known."""

    inputs: Mapping[str, "np.ndarray"]
    outputs: Mapping[str, "np.ndarray"]
    labels: "np.ndarray | None" = None


def reference_from_file(path: Path) -> Reference:
    """Reads a reference file."""
    import numpy as np

    with np.load(path, allow_pickle=False) as stored:
        inputs = {name.removeprefix("input:"): stored[name] for name in stored.files if name.startswith("input:")}
        outputs = {name.removeprefix("output:"): stored[name] for name in stored.files if name.startswith("output:")}
        return Reference(inputs, outputs, stored["labels"] if "labels" in stored.files else None)
