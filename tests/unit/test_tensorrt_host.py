"""The kit for hosts with TensorRT: what it reads of trtexec, and when two times are not compared."""

import importlib.util
import sys
from pathlib import Path

import pytest

PLACE = Path(__file__).parents[2] / "examples" / "tensorrt-host" / "tensorrt_host.py"


@pytest.fixture(scope="module")
def kit():
    spec = importlib.util.spec_from_file_location("tensorrt_host", PLACE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["tensorrt_host"] = module  # for its dataclasses
    spec.loader.exec_module(module)
    yield module
    del sys.modules["tensorrt_host"]


LINES = """[I] Latency: min = 1.9 ms, max = 2.4 ms, mean = 2.0 ms, median = 1.98 ms, percentile(99%) = 2.3 ms
[I] GPU Compute Time: min = 1.10 ms, max = 1.31 ms, mean = 1.17 ms, median = 1.16 ms, percentile(99%) = 1.3 ms
"""
"""Of the form in NVIDIA's documentation; none was recorded by us."""


def test_the_compute_time_of_trtexec_is_read(kit):
    assert kit.parse_compute_ms(LINES) == 1.16
    assert kit.parse_compute_ms("&&&& FAILED TensorRT.trtexec") is None


@pytest.mark.parametrize(
    ("ours", "theirs", "ratio", "why_not"),
    [
        ([(1.0, 1500.0), (1.2, 1500.0), (1.1, 1500.0)], [(1.0, 1510.0)], 1.1, None),
        ([(1.0, 1500.0)], [(1.0, 1700.0)], None, "the SM clocks differ: 1500 and 1700 MHz"),
        ([(1.0, None)], [(1.0, 1700.0)], None, "could not be read"),
        ([], [(1.0, 1700.0)], None, "one side has no time"),
    ],
)
def test_times_at_other_clocks_are_not_compared(kit, ours, theirs, ratio, why_not):
    found = kit.compare(ours, theirs)
    assert found["ratio"] == (None if ratio is None else pytest.approx(ratio))
    assert (found["why_not"] or "").startswith(why_not or "") or why_not in found["why_not"]
