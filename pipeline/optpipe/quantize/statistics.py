"""What a pass over calibration data leaves behind for each tensor: all that any method needs to choose a range."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optpipe.quantize.histogram import Magnitudes


@dataclass(frozen=True, eq=False)
class TensorStatistics:
    """One tensor's smallest and largest value and, for the histogram methods, its magnitudes."""

    low: float
    high: float
    magnitudes: "Magnitudes | None" = None

    @property
    def amax(self) -> float:
        """The largest magnitude seen."""
        return max(abs(self.low), abs(self.high))

    @property
    def unsigned(self) -> bool:
        """Whether no value was negative, as behind a ReLU."""
        return self.low >= 0
