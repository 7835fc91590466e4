"""Python's sampled stacks out of nsys' JSON export: its SQLite export marks when they were taken and leaves them out.

Each sample is an NVTX mark with a binary payload, in a domain of nsys' own: `Python Backtrace` in 2023.4, `Python Periodic
Sampling` in later ones. The payload is a header of 16 bytes, then three 64-bit numbers per frame, the running function
first: string ids of function and file, and the line. The header ends with the number of frames, in 64 bits in 2023.4
(found by reading recordings), in 32 bits behind the thread's state in later ones (as public readers of such exports
decode it). A payload whose length is not that of its frames is not read, and counted.
"""

import base64
import html
import json
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import polars as pl

from optpipe.errors import StageError
from optpipe.trace.recording.export import NsysExport, fetch_rows
from optpipe.trace.recording.frames import SAMPLE_SCHEMA, Trace
from optpipe.trace.recording.importer import json_from_recording

_DOMAINS = frozenset({"Python Backtrace", "Python Periodic Sampling"})
_DOMAIN_EVENT, _MARK = 75, 34
_HEADER, _FRAME = struct.Struct("<QII"), struct.Struct("<QQQ")


def has_samples(export: NsysExport) -> bool:
    """Whether stacks of Python were sampled into the recording that `export` is of."""
    if not export.has("NVTX_EVENTS", "eventType", "text"):
        return False
    found = fetch_rows(export, f"SELECT text FROM NVTX_EVENTS WHERE eventType = {_DOMAIN_EVENT}")
    return any(row[0] in _DOMAINS for row in found)


def add_samples(trace: Trace, recording: Path, directory: Path, warn: Callable[[str], None]) -> Trace:
    """`trace` with the stacks in `recording`, which is exported into `directory`; as it is, with a warning, where that fails."""
    try:
        samples, unread = samples_from_json(json_from_recording(recording, directory))
    except StageError as error:
        warn(f"cannot read the Python stacks: {error}")
        return trace
    if unread:
        warn(f"skipped {unread} Python stacks in an unknown format")
    return replace(trace, samples=samples, absent=tuple(each for each in trace.absent if each != "samples"))


def samples_from_json(path: Path) -> tuple[pl.DataFrame, int]:
    """The samples in the export at `path`, as the frame `read_samples`, and how many could not be read.

    Raises:
        StageError: the file is no JSON export of nsys.
    """
    strings: list[str] = []
    domains: set[str] = set()
    marks: list[tuple[int, Mapping[str, Any]]] = []
    found: list[tuple[int, int, int, int, str]] = []
    unread = 0
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file):
                document = json.loads(line)
                texts = document.get("data")
                if texts and all(isinstance(text, str) for text in texts):  # the names of threads have that key too
                    strings = [html.unescape(text) for text in texts]
                if event := document.get("NvtxEvent"):
                    kind = event.get("Type", document.get("Type"))
                    if kind == _DOMAIN_EVENT and event.get("Text") in _DOMAINS:
                        domains.add(str(event["DomainId"]))
                    elif kind == _MARK and "Payload" in event:
                        marks.append((number, event))
        for number, event in marks:
            if str(event.get("DomainId")) in domains:
                stacks = [
                    stack for data in _decode_payloads(event) if (stack := _decode_stack(data, strings)) is not None
                ]
                unread += not stacks
                at, thread = int(event["Timestamp"]), int(event["GlobalTid"])
                found += [(at, thread, number, depth, name) for stack in stacks for depth, name in enumerate(stack)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StageError(
            f"{path.name}: not an nsys JSON export ({type(error).__name__}: {str(error)[:120]})"
        ) from error
    plain = pl.DataFrame(found, schema={**SAMPLE_SCHEMA, "name": pl.String}, orient="row")
    return plain.cast(dict(SAMPLE_SCHEMA)), unread  # type: ignore[arg-type]


def _decode_payloads(event: Mapping[str, Any]) -> Iterator[bytes]:
    for payload in event["Payload"].get("BinaryData", []):
        yield base64.b64decode(payload["Data"])


def _decode_stack(data: bytes, strings: list[str]) -> list[str] | None:
    """Functions with their file's name (never its path), the running one first; None for a payload of another kind."""
    frames, rest = divmod(len(data) - _HEADER.size, _FRAME.size)
    if rest or frames < 0:
        return None
    _, low, high = _HEADER.unpack_from(data)
    if frames not in (high, low + (high << 32)):
        return None
    return [
        f"{strings[function]} ({PurePosixPath(strings[file]).name})"
        for function, file, _ in _FRAME.iter_unpack(data[_HEADER.size :])
        if function < len(strings) and file < len(strings)
    ]
