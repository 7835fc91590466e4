"""torch.profiler's JSON in the same tables."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from optpipe.core.errors import BadInputError
from optpipe.trace.analysis import analysis_from_trace
from optpipe.trace.files import trace_from_path

EVENTS = [
    {"ph": "X", "cat": "user_annotation", "name": "iter", "ts": 0.0, "dur": 90.0, "tid": 7, "args": {}},
    {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 1.0, "dur": 4.0, "tid": 7, "args": {"correlation": 3}},
    {
        "ph": "X", "cat": "kernel", "name": "ampere_sgemm_128x64_tn", "ts": 10.5, "dur": 20.25, "tid": 0,
        "args": {"device": 0, "stream": 7, "correlation": 3, "grid": [2, 3, 1], "block": [128, 1, 1]},
    },
    {
        "ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD (Pageable -> Device)", "ts": 40.0, "dur": 5.0, "tid": 0,
        "args": {"device": 0, "stream": 7, "correlation": 4, "bytes": 1000},
    },
]  # fmt: skip


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_tables(tmp_path: Path, name: str) -> None:
    text = json.dumps({"traceEvents": EVENTS, "deviceProperties": [{"name": "NVIDIA H200", "numSms": 132}]})
    if name.endswith(".gz"):
        (tmp_path / name).write_bytes(gzip.compress(text.encode()))
    else:
        (tmp_path / name).write_text(text)
    analysis = analysis_from_trace(trace_from_path(tmp_path / name))
    assert analysis.trace.tracer == "torch.profiler"
    assert analysis.trace.gpus[0].multiprocessors == 132
    assert analysis.timeline.busy.total_ns == 20_250
    assert analysis.trace.kernels["blocks"].to_list() == [6]
    columns = ("kind", "source_memory", "target_memory", "bytes")
    assert analysis.copies.select(columns).row(0) == (
        "Host-to-Device",
        "Pageable",
        "Device",
        1000,
    )
    assert analysis.projection["kernels"].to_list() == [1]


CHANGES: tuple[dict[str, Any], ...] = (
    {"ts": None},
    {"ts": "a"},
    {"ts": float("nan")},
    {"dur": float("inf")},
    {"args": []},
    {"args": {"stream": "x"}},
)
BROKEN = [json.dumps({"traceEvents": [{**EVENTS[2], **change}]}) for change in CHANGES]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"traceEvents": 3}', '{"traceEvents": []}', *BROKEN])
def test_what_is_no_trace(tmp_path: Path, text: str) -> None:
    (tmp_path / "trace.json").write_text(text)
    with pytest.raises(BadInputError):
        trace_from_path(tmp_path / "trace.json")
