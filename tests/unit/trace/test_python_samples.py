"""Python's stacks out of a JSON export, put together by hand after what nsys 2023.4 writes."""

import base64
import json
import struct
from pathlib import Path

import pytest

from optpipe.errors import StageError
from optpipe.trace.python_samples import samples_from_json

STRINGS = ["zero", "decode", "&lt;module&gt;", "/home/someone/secret/job.py"]


def _mark(at: int, domain: str, *frames: tuple[int, int, int], extra: bytes = b"") -> dict[str, object]:
    data = struct.pack("<IIQ", 1, 1, len(frames)) + b"".join(struct.pack("<QQQ", *frame) for frame in frames) + extra
    payload = {"BinaryData": [{"SchemaId": "4294967299", "Data": base64.b64encode(data).decode()}]}
    return {"NvtxEvent": {"Type": 34, "Timestamp": str(at), "Payload": payload, "GlobalTid": "77", "DomainId": domain}}


def _written(directory: Path, *events: dict[str, object]) -> Path:
    domain = {
        "NvtxEvent": {"Type": 75, "Text": "Python Backtrace", "Timestamp": "1", "GlobalTid": "77", "DomainId": "1"}
    }
    path = directory / "recording.json"
    path.write_text("\n".join(json.dumps(each) for each in ({"data": STRINGS}, domain, *events)))
    return path


def test_stacks_with_the_running_function_first_and_no_paths(tmp_path: Path) -> None:
    path = _written(tmp_path, _mark(10, "1", (1, 3, 12), (2, 3, 40)), _mark(20, "2", (1, 3, 12)))
    samples, unread = samples_from_json(path)
    assert unread == 0
    assert samples.select("time_ns", "thread", "depth", "name").rows() == [
        (10, 77, 0, "decode (job.py)"),
        (10, 77, 1, "<module> (job.py)"),
    ]


def test_a_payload_of_another_form_is_counted(tmp_path: Path) -> None:
    samples, unread = samples_from_json(_written(tmp_path, _mark(10, "1", (1, 3, 12), extra=b"more")))
    assert (samples.height, unread) == (0, 1)


@pytest.mark.parametrize("text", ["{", '{"NvtxEvent": 3}', "[1]"])
def test_what_is_no_export(tmp_path: Path, text: str) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(StageError, match="not a JSON export of nsys"):
        samples_from_json(tmp_path / "other.json")
