"""The most that a build may cost in accuracy, as users write it: `0.5points`, `30dB`."""

import re
from dataclasses import dataclass
from typing import Literal

from optpipe.errors import BadInputError


@dataclass(frozen=True, slots=True)
class Budget:
    """The largest drop of accuracy in percentage points, or the smallest SNR of the outputs in dB."""

    limit: float
    unit: Literal["points", "dB"]

    def __str__(self) -> str:
        return f"{self.limit:g} {self.unit}"


def budget_from_text(text: str, option: str) -> Budget:
    """Reads `0.5points`, `0.5%` or `30dB`. Raises BadInputError for anything else."""
    found = re.fullmatch(r"\s*(\d{1,3}(?:\.\d{0,9})?)\s*(points?|%|dB)\s*", text, re.IGNORECASE | re.ASCII)
    if found is None or (float(found[1]) > 100 and found[2].lower() != "db"):
        raise BadInputError(
            f"{option} {text}: expected the largest accuracy drop, such as 0.5points, or the smallest SNR of the outputs, such as 30dB"
        )
    return Budget(float(found[1]), "dB" if found[2].lower() == "db" else "points")
