"""Texts for the records of a verdict's document; every reporter writes a figure the same way."""

from collections.abc import Mapping
from typing import Any

from optpipe.core.quantity import Dimension, quantity_text

DIMENSIONS = {
    "ns": Dimension.TIME,
    "images/s": Dimension.RATE,
    "fraction": Dimension.SHARE,
    "bytes": Dimension.SIZE,
    "J/image": Dimension.ENERGY,
    "dB": Dimension.DECIBEL,
}


def observed_text(one: Mapping[str, Any]) -> str:
    """The observed value of a criterion's record with its interval, or a dash."""
    value, unit = one["observed"], one["unit"]
    if value is None or unit is None:
        return "–" if value is None else str(value)
    text = quantity_text(value, DIMENSIONS[unit])
    if not one["ci"] or one["ci"][0] == one["ci"][1]:
        return text
    low, high = (quantity_text(bound, DIMENSIONS[unit]) for bound in one["ci"])
    return f"{text} [{low}, {high}]"
