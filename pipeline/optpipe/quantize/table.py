"""The calibration table: what range every tensor got, by which method, from which images. Small, reviewable, diffable."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optpipe.errors import BadInputError

FORMAT = "optpipe.calibration-table/1"


@dataclass(frozen=True, slots=True)
class TensorRange:
    """The bound `amax` of one tensor's symmetric range, and the smallest and largest value it has held."""

    amax: float
    low: float
    high: float

    def __post_init__(self) -> None:
        if not (0 < self.amax < math.inf and math.isfinite(self.low) and math.isfinite(self.high)):
            raise BadInputError(
                f"a range needs a finite positive amax and finite extremes; got {self.amax}, {self.low}, {self.high}"
            )


@dataclass(frozen=True, slots=True)
class CalibrationTable:
    """One method's ranges for one model from one image set; `keep` names layers that stay in floating point."""

    method: str
    model: str
    graph_sha256: str
    image_set: Mapping[str, Any]
    """`name`, `sha256`, `count`, `seed`."""
    transform_sha256: str | None
    ranges: Mapping[str, TensorRange]
    keep: tuple[str, ...] = ()

    def to_json(self) -> str:
        """One line per tensor, in the graph's order."""
        head = {
            "format": FORMAT,
            "method": self.method,
            "model": self.model,
            "graph_sha256": self.graph_sha256,
            "transform_sha256": self.transform_sha256,
            "set": dict(self.image_set),
            "keep": list(self.keep),
        }
        rows = [
            f'    {json.dumps(name)}: {{"amax": {each.amax:.9g}, "low": {each.low + 0.0:.9g}, "high": {each.high + 0.0:.9g}}}'
            for name, each in self.ranges.items()
        ]
        return json.dumps(head, indent=2)[:-2] + ',\n  "ranges": {\n' + ",\n".join(rows) + "\n  }\n}\n"


def table_from_json(text: str, where: str) -> CalibrationTable:
    """Reads a table. Raises BadInputError that names `where` and what is wrong."""
    try:
        value = json.loads(text)
        if value["format"] != FORMAT:
            raise BadInputError(f"{where} has format {value['format']}; this version of optpipe reads {FORMAT}")
        return CalibrationTable(
            method=str(value["method"]),
            model=str(value["model"]),
            graph_sha256=str(value["graph_sha256"]),
            image_set=dict(value["set"]),
            transform_sha256=value["transform_sha256"],
            ranges={
                str(name): TensorRange(float(each["amax"]), float(each["low"]), float(each["high"]))
                for name, each in value["ranges"].items()
            },
            keep=tuple(map(str, value["keep"])),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInputError(f"{where} is not a readable calibration table ({type(error).__name__}: {error})") from error


def table_from_file(path: Path) -> CalibrationTable:
    """Reads a table's file."""
    try:
        return table_from_json(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"cannot read the calibration table {path}: {error}") from error


def is_table(path: Path) -> bool:
    """Whether a file says of itself that it is a calibration table."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return FORMAT.partition("/")[0].encode() in file.read(200)
