"""TOML of users and strangers: cards, policies, matrices."""

import re
import tomllib
from typing import Any

MOST_PARTS = 64
"""Of a dotted key. `tomllib` keeps each beginning of it: 30,000 parts took 3.4 GiB, and four times as many sixteen times that."""
_PART = r"""(?:[A-Za-z0-9_-]++|"[^"\n]*+"|'[^'\n]*+')"""
_LONG_KEY = re.compile(
    rf"""(?<![A-Za-z0-9_"'-]){_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{{MOST_PARTS},}}+"""
)


def parse_toml(text: str) -> dict[str, Any]:
    """The document. Raises TOMLDecodeError, also for a key of more than MOST_PARTS parts."""
    if _LONG_KEY.search(text):
        raise tomllib.TOMLDecodeError(f"a key of more than {MOST_PARTS} parts")
    return tomllib.loads(text)
