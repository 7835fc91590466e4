"""The calibration table: what range every tensor got, by which method, from which samples. Small, reviewable, diffable."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from optpipe.core.entries import SampleSetSummary
from optpipe.core.errors import BadInputError
from optpipe.core.hashing import hash_text
from optpipe.core.records import json_from_record, read_record

FORMAT = "optpipe.calibration-table/1"


class BadRangeError(BadInputError, ValueError):
    """A range that cannot be quantized; a ValueError, so that reading a table says where it stands."""


@dataclass(frozen=True, slots=True)
class TensorRange:
    """The bound `amax` of one tensor's symmetric range, and the smallest and largest value it has held."""

    amax: float
    low: float
    high: float

    def __post_init__(self) -> None:
        if not (0 < self.amax < math.inf and math.isfinite(self.low) and math.isfinite(self.high)):
            raise BadRangeError(
                f"a range needs a finite positive amax and finite extremes; got {self.amax}, {self.low}, {self.high}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationTable:
    """One method's ranges for one model from one set of samples."""

    format: str = FORMAT
    method: str
    model: str
    graph_sha256: str
    transform_sha256: str | None
    set: SampleSetSummary
    keep: tuple[str, ...] = ()
    """Names of layers that stay in floating point."""
    ranges: Mapping[str, TensorRange]
    """By tensor, in the graph's order."""

    @property
    def sha256(self) -> str:
        """The hash of its file."""
        return hash_text(json_from_record(self).decode())


def write_table(path: Path, table: CalibrationTable) -> None:
    """Writes a table's file."""
    path.write_bytes(json_from_record(table))


def read_table(path: Path) -> CalibrationTable:
    """Reads a table's file. Raises BadInputError where it is of another form or holds a range that cannot be quantized."""
    table = read_record(path, CalibrationTable)
    if table.format != FORMAT:
        raise BadInputError(f"{path} has format {table.format}; this version of optpipe reads {FORMAT}")
    return table


def is_table(path: Path) -> bool:
    """Whether a file says of itself that it is a calibration table."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return FORMAT.partition("/")[0].encode() in file.read(200)
