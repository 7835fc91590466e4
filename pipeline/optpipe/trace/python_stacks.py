"""Python's sampled stacks from nsys' JSON export: its SQLite export has their times without their frames.

Each sample is an NVTX mark with a binary payload, in a domain of nsys: `Python Backtrace` in 2023.4, `Python Periodic
Sampling` in later versions. The payload is a header of 16 bytes, then three 64-bit numbers for each frame, the running
function first: the ids of the function's and the file's text, and the line. The header ends with the number of frames, in
64 bits in 2023.4 (read from recordings), in 32 bits after the thread's state in later versions. A payload whose length
does not fit its number of frames is counted and left out.
"""

import base64
import html
import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import polars as pl

from optpipe.core.errors import StageError
from optpipe.trace.read import DETAIL_SCHEMAS

DOMAINS = frozenset({"Python Backtrace", "Python Periodic Sampling"})
_DOMAIN_EVENT, _MARK_EVENT = 75, 34
_HEADER, _FRAME = struct.Struct("<QII"), struct.Struct("<QQI4x")
"""Of a frame: its function, its file, and its line, behind which nsys leaves four bytes of anything."""


class PythonStacks(NamedTuple):
    frames: pl.DataFrame
    """A frame of Python in each row, as the table `stacks` of a trace."""
    unread: int
    """Samples in an unknown format."""


def read_python_stacks(path: Path) -> PythonStacks:
    """Reads the JSON lines of `nsys export --type json`. Raises StageError for another file."""
    strings: list[str] = []
    domains: set[str] = set()
    marks: list[Mapping[str, Any]] = []
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if not line.strip().strip("[],"):
                    continue
                document = json.loads(line.strip().rstrip(","))
                texts = document.get("data")
                # the names of threads have that key too
                if texts and all(isinstance(text, str) for text in texts):
                    strings = [html.unescape(text) for text in texts]
                event = document.get("NvtxEvent")
                if not event:
                    continue
                kind = event.get("Type", document.get("Type"))
                if kind == _DOMAIN_EVENT and event.get("Text") in DOMAINS:
                    domains.add(str(event["DomainId"]))
                elif kind == _MARK_EVENT and "Payload" in event:
                    marks.append(event)
        ours = [event for event in marks if str(event.get("DomainId")) in domains]
        return _tabulate_stacks(ours, strings)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {str(error)[:120]}"
        raise StageError(f"{path.name}: not a JSON export of nsys ({why})") from error


def _tabulate_stacks(events: list[Mapping[str, Any]], strings: list[str]) -> PythonStacks:
    rows: list[tuple[int, int, int, int, str, str, str]] = []
    unread = 0
    for number, event in enumerate(events):
        stacks = [
            stack
            for data in _decode_payloads(event)
            if (stack := _decode_stack(data, strings)) is not None
        ]
        unread += not stacks
        at, thread = int(event["Timestamp"]), int(event["GlobalTid"])
        rows += [
            # negative numbers: the samples of CPU stacks have their own, from 1
            (at, thread, -1 - number, depth, function, place, "python")
            for stack in stacks
            for depth, (function, place) in enumerate(stack)
        ]
    plain = pl.DataFrame(
        rows,
        schema={
            name: pl.String if dtype == pl.Categorical else dtype
            for name, dtype in DETAIL_SCHEMAS["stacks"].items()
        },
        orient="row",
    )
    return PythonStacks(plain.cast(dict(DETAIL_SCHEMAS["stacks"])), unread)  # type: ignore[arg-type]


def _decode_payloads(event: Mapping[str, Any]) -> Iterator[bytes]:
    for payload in event["Payload"].get("BinaryData", []):
        yield base64.b64decode(payload["Data"])


def _decode_stack(data: bytes, strings: list[str]) -> list[tuple[str, str]] | None:
    """Each function with `file:line` (the file's name, never its path); None for a payload of another kind."""
    frames, rest = divmod(len(data) - _HEADER.size, _FRAME.size)
    if rest or frames < 0:
        return None
    _, low, high = _HEADER.unpack_from(data)
    if frames not in (high, low + (high << 32)):
        return None
    return [
        (strings[function], f"{PurePosixPath(strings[file]).name}:{line}")
        for function, file, line in _FRAME.iter_unpack(data[_HEADER.size :])
        if function < len(strings) and file < len(strings)
    ]
