"""GPU time by module, groups of equal blocks, the comparison of two profiles, loops, and the file for Perfetto."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
from jsonschema import Draft202012Validator
from tests.golden.nsys_export import Recording
from tests.golden.phenomena import GEMM, RELU, SGEMM, launch_bound
from tests.unit.trace.conftest import SAMPLE

from optpipe.trace.against import ComparedStage, compare_stages
from optpipe.trace.analysis import Analysis, analysis_from_trace, select_measured_part
from optpipe.trace.chrome import write_chrome_trace
from optpipe.trace.differences import Change
from optpipe.trace.loops import describe_loop
from optpipe.trace.modules import (
    group_paths,
    locate_kernels,
    make_module_tree,
    path_from_layer,
)
from optpipe.trace.read import Trace
from optpipe.trace.report import StageSubject, profile_from_trace

Read = Callable[[Recording], Trace]


def blocks(marks: bool = True, fused: bool = False, slow: int = 0) -> Recording:
    """Three iterations of three equal blocks, each a product and an activation, and a head on the FMA units."""
    trace = Recording()
    prefix = "optpipe.module:" if marks else ""
    for iteration in range(3):
        begin = 1000 * iteration
        trace.range("iter", begin, begin + 900)
        trace.range(prefix, begin + 1, begin + 880) if marks else None
        for block in range(3):
            at = begin + 100 * block + 10
            trace.range(f"{prefix}layer1.{block}", at, at + 90)
            trace.range(f"{prefix}layer1.{block}.conv", at + 1, at + 40)
            trace.kernel(GEMM, at + 6, at + 26 + slow + iteration % 2, launch=(at + 2, at + 4))
            if not fused:
                trace.range(f"{prefix}layer1.{block}.relu", at + 41, at + 80)
                trace.kernel(RELU, at + 60, at + 65, launch=(at + 50, at + 55))
        trace.range(f"{prefix}head", begin + 400, begin + 500)
        trace.kernel(SGEMM, begin + 410, begin + 430, launch=(begin + 402, begin + 405))
        trace.kernel(RELU, begin + 600, begin + 610, launch=(begin + 590, begin + 595))
    return trace


def analyze(trace: Trace) -> Analysis:
    return select_measured_part(analysis_from_trace(trace))


@pytest.mark.parametrize("marks", [True, False])
def test_every_kernel_belongs_to_the_innermost_module(read: Read, marks: bool) -> None:
    tree = make_module_tree(analyze(read(blocks(marks=marks))))
    assert tree is not None
    rows = {row.path: row for row in tree.rows}
    assert list(rows)[:4] == ["layer1", "layer1.0", "layer1.0.conv", "layer1.0.relu"]
    conv = rows["layer1.0.conv"]
    assert (conv.kernels, conv.time_ns, conv.self_ns) == (3, 61_000, 61_000)
    assert conv.tensor_core_ns == conv.matrix_ns == conv.time_ns
    assert conv.precisions == ("fp16",)
    assert rows["layer1"].time_ns == 3 * (61_000 + 15_000)
    assert rows["layer1"].self_ns == 0
    assert (rows["head"].matrix_ns, rows["head"].tensor_core_ns) == (60_000, 0)
    assert tree.named_ns == rows["layer1"].time_ns + rows["head"].time_ns
    assert tree.kernel_ns == tree.named_ns + 30_000
    [group] = tree.groups
    assert group.paths == ("layer1.0", "layer1.1", "layer1.2")
    assert (group.kernels, group.time_ns) == (6, 3 * 76_000)


def test_blocks_with_other_kernels_are_not_equal(read: Read) -> None:
    trace = blocks()
    trace.kernel(RELU, 190, 192, launch=(151, 152))  # inside layer1.1 of the first iteration
    tree = make_module_tree(analyze(read(trace)))
    assert tree is not None
    assert [group.paths for group in tree.groups] == [("layer1.0", "layer1.2")]


def test_without_names_there_is_no_tree(read: Read) -> None:
    assert make_module_tree(analyze(read(launch_bound()))) is None


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("/layer3/layer3.0/conv2/Conv", ("layer3", "0", "conv2", "Conv")),
        ("/conv1/Conv + /relu/Relu", ("conv1", "Conv")),
        ("node_conv_12", ("node_conv_12",)),
        ("", ()),
    ],
)
def test_paths_of_layers(name: str, path: tuple[str, ...]) -> None:
    assert path_from_layer(name) == path


def test_names_of_groups() -> None:
    assert group_paths(["layer3.1", "layer3.2", "layer3.3"]) == "layer3.[1-3]"
    assert group_paths(["a.0", "a.2"]) == "a.0 and 1 more"
    assert group_paths(["0", "1"]) == "[0-1]"


@pytest.mark.slow
def test_a_tree_of_100_000_kernels(read: Read) -> None:
    trace = Recording()
    for iteration in range(10):
        begin = 1_000_000 * iteration
        trace.range("iter", begin, begin + 990_000)
        for layer in range(1000):
            at = begin + 900 * layer + 1
            trace.range(f"net.{layer % 50}.{layer}", at, at + 800)
            for kernel in range(10):
                trace.kernel(
                    GEMM,
                    at + 30 * kernel + 6,
                    at + 30 * kernel + 20,
                    launch=(at + 30 * kernel + 1, at + 30 * kernel + 5),
                )
    measured = analyze(read(trace))
    begun = time.process_time()
    tree = make_module_tree(measured)
    print(f"{time.process_time() - begun:.2f} s")
    assert tree is not None
    assert sum(row.self_ns for row in tree.rows) == measured.kernel_ns == 100_000 * 14_000


def compare(before: Recording, after: Recording, read: Read) -> dict[str, dict[str, Change]]:
    sides = [
        ComparedStage(StageSubject(name, "inference", batch_size=size), analyze(read(recording)))
        for name, size, recording in (("one", 1, before), ("two", 8, after))
    ]
    found = compare_stages(*sides)
    assert any("batch size: 1 before, 8 after" in note for note in found.notes)
    tables = {"totals": found.totals, "modules": found.modules, "kernels": found.kernels}
    return {name: {row.name: row.change for row in rows} for name, rows in tables.items()}


def test_a_profile_against_itself_has_no_change(read: Read) -> None:
    found = compare(blocks(), blocks(), read)
    assert {change for rows in found.values() for change in rows.values()} == {Change.SAME}


def test_what_became_slower_appeared_vanished_and_was_fused(read: Read) -> None:
    slower = compare(blocks(), blocks(slow=9), read)
    assert slower["kernels"][GEMM] is Change.SLOWER
    assert slower["kernels"][RELU] is Change.SAME
    assert compare(blocks(slow=9), blocks(), read)["kernels"][GEMM] is Change.FASTER
    gone = compare(blocks(), launch_bound(), read)
    assert gone["kernels"][SGEMM] is Change.VANISHED
    assert compare(launch_bound(), blocks(), read)["kernels"][SGEMM] is Change.APPEARED
    fused, separate = Recording(), Recording()
    for iteration in range(3):
        begin = 1000 * iteration
        for trace in (fused, separate):
            trace.range("iter", begin, begin + 900)
            trace.range("conv", begin + 1, begin + 800)
        separate.kernel(GEMM, begin + 10, begin + 20, launch=(begin + 2, begin + 4))
        separate.kernel(RELU, begin + 30, begin + 40, launch=(begin + 22, begin + 24))
        fused.kernel(
            "triton_tem_fused_conv_relu", begin + 10, begin + 22, launch=(begin + 2, begin + 4)
        )
    assert compare(separate, fused, read)["modules"]["conv"] is Change.FUSED


def test_modules_that_one_recording_does_not_name_did_not_appear(read: Read) -> None:
    named, plain = Recording(), Recording()
    for trace in (named, plain):
        for begin in (0, 1000, 2000):
            trace.range("iter", begin, begin + 900)
            if trace is named:
                trace.range("conv", begin + 1, begin + 800)
            trace.kernel(GEMM, begin + 10, begin + 20, launch=(begin + 2, begin + 4))
    for before, after, where in ((plain, named, "after"), (named, plain, "before")):
        subject = StageSubject("stage", "inference")
        sides = [
            ComparedStage(subject, select_measured_part(analysis_from_trace(read(each))))
            for each in (before, after)
        ]
        found = compare_stages(*sides)
        assert not found.modules
        assert [note for note in found.notes if f"named only {where}" in note]


def test_a_change_within_the_scatter_is_none(read: Read) -> None:
    noisy = [Recording(), Recording()]
    for trace, delays in zip(noisy, ((0, 30, 60, 90), (10, 40, 70, 100)), strict=True):
        for iteration, delay in enumerate(delays):
            begin = 1000 * iteration
            trace.range("iter", begin, begin + 900)
            trace.kernel(GEMM, begin + 10, begin + 100 + delay, launch=(begin + 2, begin + 4))
    assert compare(noisy[0], noisy[1], read)["kernels"][GEMM] is Change.SAME


def test_a_loop_that_waits_for_its_data(read: Read) -> None:
    trace = Recording()
    for iteration in range(4):
        begin = 1000 * iteration
        trace.range("step", begin, begin + 990)
        trace.range("load_batch", begin, begin + 600)
        trace.kernel(GEMM, begin + 700, begin + 900, launch=(begin + 650, begin + 660))
    trace_read = read(trace)
    loop = describe_loop(analyze(trace_read))
    assert loop is not None
    assert loop.data_range == "load_batch"
    assert loop.data_wait_ns is not None
    assert loop.data_wait_ns.median == 600_000
    assert loop.gpu_busy_ns is not None
    assert loop.gpu_busy_ns.median == 200_000
    assert loop.iterations_per_s == pytest.approx(4 / 3.99e-3)
    findings = {each.rule: each for each in profile_from_trace(trace_read).findings}
    assert findings["input-wait"].gain_share == pytest.approx(600 * 4 / 3990, rel=0.01)


@pytest.mark.parametrize("name", ["database", "metadata", "upload", "compute"])
def test_names_that_are_no_wait_for_data(read: Read, name: str) -> None:
    trace = Recording()
    for iteration in range(3):
        trace.range("step", 100 * iteration, 100 * iteration + 90)
        trace.range(name, 100 * iteration, 100 * iteration + 50)
    loop = describe_loop(analyze(read(trace)))
    assert loop is not None
    assert loop.data_wait_ns is None


EVENT = {
    "type": "object",
    "required": ["ph", "name", "pid", "tid"],
    "properties": {
        "ph": {"enum": ["X", "M", "C", "b", "e"]},
        "id": {"type": "integer"},
        "name": {"type": "string"},
        "cat": {"type": "string"},
        "ts": {"type": "number", "minimum": 0},
        "dur": {"type": "number", "minimum": 0},
        "pid": {"type": "integer"},
        "tid": {"type": "integer"},
        "args": {"type": "object"},
    },
    "allOf": [
        {"if": {"properties": {"ph": {"const": "X"}}}, "then": {"required": ["ts", "dur", "cat"]}},
        {"if": {"properties": {"ph": {"const": "C"}}}, "then": {"required": ["ts", "args"]}},
        {"if": {"properties": {"ph": {"const": "M"}}}, "then": {"required": ["args"]}},
        {
            "if": {"properties": {"ph": {"enum": ["b", "e"]}}},
            "then": {"required": ["ts", "cat", "id"]},
        },
    ],
    "additionalProperties": False,
}
TRACE_FORMAT = {
    "type": "object",
    "required": ["traceEvents"],
    "properties": {
        "traceEvents": {"type": "array", "items": EVENT},
        "displayTimeUnit": {"enum": ["ms", "ns"]},
    },
}
"""The parts of the Trace Event Format that are written."""


def test_the_file_for_perfetto(read: Read, tmp_path: Path) -> None:
    recording = blocks()
    recording.metric("SMs Active [Throughput %]", 20, 80)
    recording.os_call("read", 15, 45)
    whole = analysis_from_trace(read(recording))
    count = write_chrome_trace(whole, tmp_path / "trace.json")
    document = json.loads((tmp_path / "trace.json").read_text())
    Draft202012Validator(TRACE_FORMAT).validate(document)
    events = document["traceEvents"]
    assert len(events) == count
    kernels = [event for event in events if event.get("cat") == "kernel"]
    assert len(kernels) == whole.trace.kernels.height
    assert {event["args"].get("module") for event in kernels} >= {"layer1.0.conv", "head", None}
    assert sum(event["dur"] for event in kernels) * 1e3 == pytest.approx(whole.kernel_ns)
    assert [event["name"] for event in events if event["ph"] == "C"] == [
        "SMs Active [Throughput %]"
    ]
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"} == named


def test_events_of_a_thread_nest_for_perfetto(read: Read, tmp_path: Path) -> None:
    """A range that is started and ended, not pushed and popped, may outlast the one that it begins in."""
    recording = launch_bound()
    recording.range("crossing", 100, 5000)
    recording.range("request", 200, 6000)
    whole = analysis_from_trace(read(recording))
    write_chrome_trace(whole, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    Draft202012Validator(TRACE_FORMAT).validate({"traceEvents": events})
    assert [event["ph"] for event in events if event["name"] == "request"] == ["b", "e"]
    spans = sorted(
        (event["tid"], event["ts"], -event["dur"])
        for event in events
        if event["ph"] == "X" and event["cat"] != "kernel"
    )
    ends: dict[int, list[float]] = {}
    for thread, begin, minus in spans:
        around = ends.setdefault(thread, [])
        while around and around[-1] <= begin:
            around.pop()
        assert not around or begin - minus <= around[-1]
        around.append(begin - minus)


def test_the_whole_recording_equals_its_tables_to_the_nanosecond() -> None:
    import sqlite3

    from optpipe.trace.read import trace_from_sqlite

    profile = profile_from_trace(trace_from_sqlite(SAMPLE), "all")
    base = sqlite3.connect(SAMPLE)

    def totals(sql: str) -> dict[str, tuple[int, int]]:
        return {str(name): (count, ns) for name, count, ns in base.execute(sql)}

    columns = 'COUNT(*), SUM(e."end" - e.start)'
    assert {row.name: (row.count, row.total_ns) for row in profile.measured.kernels} == totals(
        f"SELECT s.value, {columns} FROM CUPTI_ACTIVITY_KIND_KERNEL e JOIN StringIds s ON s.id = demangledName GROUP BY 1"
    )
    calls = totals(
        f"SELECT s.value, {columns} FROM CUPTI_ACTIVITY_KIND_RUNTIME e JOIN StringIds s ON s.id = nameId GROUP BY 1"
    )
    assert sum(row.total_ns for row in profile.measured.api) == sum(ns for _, ns in calls.values())
    ranges = totals(
        "SELECT COALESCE(d.text || ':', '') || COALESCE(e.text, s.value, ''), COUNT(*), SUM(e.\"end\" - e.start) "
        "FROM NVTX_EVENTS e LEFT JOIN StringIds s ON s.id = e.textId LEFT JOIN (SELECT domainId, MIN(text) AS text FROM "
        "NVTX_EVENTS WHERE eventType = 75 GROUP BY 1) d ON d.domainId = e.domainId "
        'WHERE e."end" IS NOT NULL AND e.eventType IN (59, 60) GROUP BY 1'
    )
    assert {row.name: (row.count, row.wall_ns) for row in profile.measured.ranges} == ranges
    assert profile.scope == "trace"


def test_kernels_without_a_path_are_located_nowhere(read: Read) -> None:
    located = locate_kernels(analyze(read(blocks())))
    assert located.filter(pl.col("path") == "").height == 3
