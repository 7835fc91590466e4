"""Python's stacks out of a JSON export, put together by hand after what nsys 2023.4, and later ones, write."""

import base64
import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.golden.nsys_export import THREAD
from tests.golden.phenomena import launch_bound

from optpipe.errors import StageError
from optpipe.trace.recording.files import trace_from_path
from optpipe.trace.recording.python_samples import samples_from_json

STRINGS = ["zero", "decode", "&lt;module&gt;", "/home/someone/secret/job.py"]


def _header_of_2023(count: int) -> bytes:
    return struct.pack("<IIQ", 1, 1, count)


def _later_header(count: int) -> bytes:
    return struct.pack("<QII", 1, 8, count)  # 8: the thread is in a call to the operating system


def _mark(
    at: int,
    domain: str,
    *frames: tuple[int, int, int],
    header: Callable[[int], bytes] = _header_of_2023,
    extra: bytes = b"",
) -> dict[str, object]:
    data = header(len(frames)) + b"".join(struct.pack("<QQQ", *frame) for frame in frames) + extra
    payload = {"BinaryData": [{"SchemaId": "4294967299", "Data": base64.b64encode(data).decode()}]}
    return {"NvtxEvent": {"Type": 34, "Timestamp": str(at), "Payload": payload, "GlobalTid": "77", "DomainId": domain}}


def _domain(name: str) -> dict[str, object]:
    return {"NvtxEvent": {"Type": 75, "Text": name, "Timestamp": "1", "GlobalTid": "77", "DomainId": "1"}}


def _written(directory: Path, *events: dict[str, object], domain: str = "Python Backtrace") -> Path:
    path = directory / "recording.json"
    path.write_text("\n".join(json.dumps(each) for each in ({"data": STRINGS}, _domain(domain), *events)))
    return path


def test_the_domain_and_the_header_of_later_versions(tmp_path: Path) -> None:
    frames = ((1, 3, 12), (2, 3, 40))
    path = _written(tmp_path, _mark(10, "1", *frames, header=_later_header), domain="Python Periodic Sampling")
    samples, unread = samples_from_json(path)
    assert unread == 0
    assert samples["name"].to_list() == ["decode (job.py)", "<module> (job.py)"]


def test_the_event_s_type_beside_it_and_its_domain_named_after_it(tmp_path: Path) -> None:
    mark = _mark(10, "1", (1, 3, 12), header=_later_header)
    event = {key: value for key, value in mark["NvtxEvent"].items() if key != "Type"}  # type: ignore[attr-defined]
    lines = ({"data": STRINGS}, {"Type": 34, "NvtxEvent": event}, _domain("Python Periodic Sampling"))
    (tmp_path / "recording.json").write_text("\n".join(json.dumps(each) for each in lines))
    samples, unread = samples_from_json(tmp_path / "recording.json")
    assert (samples["name"].to_list(), unread) == (["decode (job.py)"], 0)


def test_names_of_threads_that_follow_are_no_strings(tmp_path: Path) -> None:
    path = _written(tmp_path, _mark(10, "1", (1, 3, 12)))
    threads = {"data": [{"nameIdx": "1", "priority": "20", "globalTid": "77"}] * 4}
    path.write_text(path.read_text() + "\n" + json.dumps(threads))
    assert samples_from_json(path)[0]["name"].to_list() == ["decode (job.py)"]


def test_a_thread_without_a_python_frame_is_read(tmp_path: Path) -> None:
    samples, unread = samples_from_json(_written(tmp_path, _mark(10, "1", header=_later_header)))
    assert (samples.height, unread) == (0, 0)


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
    with pytest.raises(StageError, match="not an nsys JSON export"):
        samples_from_json(tmp_path / "other.json")


def test_somebodys_recording_with_stacks_is_read_with_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An nsys that exports what lies beside it: the stacks are in its JSON only."""
    _written(tmp_path, _mark(10, "1", (1, 3, 12), header=_later_header), domain="Python Periodic Sampling")
    trace = launch_bound()
    trace.rows["ranges"].append((1, None, 75, "Python Periodic Sampling", None, THREAD, 1))
    trace.write(tmp_path / "recording.sqlite")
    nsys = tmp_path / "nsys"
    nsys.write_text(
        '#!/bin/sh\nwhile [ "$1" != --type ]; do shift; done\n'
        f"case $2 in sqlite) from={tmp_path}/recording.sqlite;; jsonlines) from={tmp_path}/recording.json;; *) exit 1;; esac\n"
        'while [ "$1" != --output ]; do shift; done\ncp "$from" "$2"\n'
    )
    nsys.chmod(0o755)
    monkeypatch.setenv("OPTPIPE_NSYS", str(nsys))
    (tmp_path / "somebody.nsys-rep").write_bytes(b"a recording")
    warnings: list[str] = []
    read = trace_from_path(tmp_path / "somebody.nsys-rep", warnings.append)
    assert read.samples["name"].to_list() == ["decode (job.py)"]
    assert "samples" not in read.absent
    (tmp_path / "recording.json").write_text("{")
    assert trace_from_path(tmp_path / "somebody.nsys-rep", warnings.append).kernels.height == 12
    assert [each.partition(":")[0] for each in warnings] == ["cannot read the Python stacks"]
