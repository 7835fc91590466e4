"""The columns of every Parquet file of a dossier: one table, from which the format document and the verifier have theirs.

`.ci/tables.py` writes both; a column or a type that is not here is refused by name.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from optpipe.core.errors import BadInputError
from optpipe.core.measurement import MACHINE_COLUMNS, SAMPLE_COLUMNS

if TYPE_CHECKING:
    import polars

_INT, _FLOAT, _TEXT, _TRUTH = "Int64", "Float64", "String", "Boolean"
_SUMS = {
    "values": _INT,
    "finite": _TRUTH,
    **dict.fromkeys(
        (
            *("reference_square", "output_square", "difference_square", "product"),
            *("difference_sum", "difference_max"),
        ),
        _FLOAT,
    ),
}
_TIMES = dict.fromkeys(("start_ns", "end_ns"), _INT)
_ON_DEVICE = {**_TIMES, **dict.fromkeys(("device", "stream", "correlation_id", "pid"), _INT)}
ANY = "any"
"""The task says what the values are (section 8.1 of the format)."""
COLUMNS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "samples": dict(SAMPLE_COLUMNS),
        "machine": dict(MACHINE_COLUMNS),
        "errors": {"output": _TEXT, **_SUMS, "reference_best": "UInt32", "output_best": "UInt32"},
        "images": {
            "image": _TEXT,
            **dict.fromkeys(("mean_levels", "max_levels"), _FLOAT),
            **dict.fromkeys(("class", "reference_class", "dali_class"), _INT),
            **_SUMS,
            **dict.fromkeys(("truth", "reference_prediction", "dali_prediction"), ANY),
        },
        "predictions": {
            **dict.fromkeys(("path", "sha256", "label", "group"), _TEXT),
            "class": _INT,
            "truth": ANY,
            "NAME:best": "List(Int64)",
            "NAME:prediction": ANY,
            "NAME:part.SCORE": "List(Float64)",
        },
        "api": {**_TIMES, "thread": _INT, "correlation_id": _INT, "name": _TEXT},
        "kernels": {**_ON_DEVICE, "name": _TEXT, "blocks": _INT, "graph_node": _INT},
        "copies": {
            **_ON_DEVICE,
            "bytes": _INT,
            **dict.fromkeys(("kind", "source_memory", "target_memory"), _TEXT),
            "graph_node": _INT,
        },
        "ranges": {**_TIMES, "thread": _INT, "name": _TEXT},
        "metrics": {"time_ns": _INT, "device": _INT, "name": _TEXT, "value": _FLOAT},
        "os_calls": {**_TIMES, "thread": _INT, "name": _TEXT},
        "stacks": {
            **dict.fromkeys(("time_ns", "thread", "sample", "depth"), _INT),
            **dict.fromkeys(("name", "place", "language"), _TEXT),
        },
        "switches": {"time_ns": _INT, "thread": _INT, "is_in": _TRUTH},
    }
)
"""Type by column, by the kind of table. NAME is `source` or the id of an artifact, SCORE the name of a plug-in's score."""
WHOLE = frozenset(
    {"errors", "api", "kernels", "copies", "ranges", "metrics", "os_calls", "stacks", "switches"}
)
"""Tables with all of their columns; others have some."""
WITHOUT_NULLS = frozenset({"errors", "images"})
"""Tables in which only columns of classes may lack a value."""
_NAMES = (
    (re.compile(r"^(source|[0-9a-f]{12})(?=:(best|prediction|part\.[a-z][a-z0-9_-]*)$)"), "NAME"),
    (re.compile(r"(?<=^NAME:part\.).+$"), "SCORE"),
)


def require_columns(frame: "polars.DataFrame", kind: str, place: Path) -> "polars.DataFrame":
    """The frame. Raises BadInputError for a column or a type that a table of this kind does not have."""
    types = COLUMNS[kind]
    for column in frame.iter_columns():
        wanted = types.get(_generalize(column.name))
        if wanted is None or (
            wanted not in (ANY, str(column.dtype)) and str(column.dtype) != "Null"
        ):
            raise BadInputError(
                f"{place}: {column.name!r} of type {column.dtype} is not a column of the format"
            )
        if kind in WITHOUT_NULLS and not column.name.endswith("class") and column.has_nulls():
            raise BadInputError(f"{place}: {column.name!r} lacks a value")
    if kind in WHOLE and (absent := types.keys() - frame.columns):
        raise BadInputError(f"{place}: has no column {', '.join(sorted(absent))}")
    return frame


def _generalize(column: str) -> str:
    """`NAME:part.SCORE` for `source:part.top3`."""
    for pattern, name in _NAMES:
        column = pattern.sub(name, column)
    return column
