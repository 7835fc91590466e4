"""Python's sampled stacks out of nsys' JSON export: its SQLite export marks when they were taken and leaves them out.

Each sample is an NVTX mark of the domain `Python Backtrace` with a binary payload: two 32-bit words, the number of frames
(64 bits), then three 64-bit numbers per frame, the running function first: string ids of function and file, and the
line. Found by reading recordings of 2023.4; a payload of another length is not read, and counted.
"""

import base64
import html
import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import polars as pl

from optpipe.errors import StageError
from optpipe.trace.frames import SAMPLES

_DOMAIN = "Python Backtrace"
_DOMAIN_EVENT, _MARK = 75, 34
_HEADER, _FRAME = struct.Struct("<IIQ"), struct.Struct("<QQQ")


def samples_from_json(path: Path) -> tuple[pl.DataFrame, int]:
    """The samples in the export at `path`, as the frame `samples`, and how many could not be read.

    Raises:
        StageError: the file is no JSON export of nsys.
    """
    strings: list[str] = []
    domains: set[str] = set()
    rows: list[tuple[int, int, int, int, str]] = []
    unread = 0
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file):
                document = json.loads(line)
                if "data" in document:
                    strings = [html.unescape(str(text)) for text in document["data"]]
                event = document.get("NvtxEvent")
                if not event:
                    continue
                if event.get("Type") == _DOMAIN_EVENT and event.get("Text") == _DOMAIN:
                    domains.add(str(event["DomainId"]))
                elif event.get("Type") == _MARK and str(event.get("DomainId")) in domains:
                    stack = list(_stack(event, strings))
                    unread += not stack
                    at, thread = int(event["Timestamp"]), int(event["GlobalTid"])
                    rows += [(at, thread, number, depth, name) for depth, name in enumerate(stack)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        message = f"{path.name}: not a JSON export of nsys ({type(error).__name__}: {str(error)[:120]})"
        raise StageError(message) from error
    plain = pl.DataFrame(rows, schema={**SAMPLES, "name": pl.String}, orient="row")
    return plain.cast(dict(SAMPLES)), unread  # type: ignore[arg-type]


def _stack(event: Mapping[str, Any], strings: list[str]) -> Iterator[str]:
    """Functions with their file's name (never its path), the running one first; nothing for a payload of another kind."""
    for payload in event.get("Payload", {}).get("BinaryData", []):
        data = base64.b64decode(payload["Data"])
        if len(data) < _HEADER.size:
            continue
        _, _, count = _HEADER.unpack_from(data)
        if len(data) != _HEADER.size + count * _FRAME.size:
            continue
        for function, file, _ in _FRAME.iter_unpack(data[_HEADER.size :]):
            if function < len(strings) and file < len(strings):
                yield f"{strings[function]} ({PurePosixPath(strings[file]).name})"
