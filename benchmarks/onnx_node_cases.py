"""The node tests of the onnx package through optpipe, each against its own reference data.

usage: onnx_node_cases.py OUT.jsonl [--only NAME,NAME] [--share COUNT] [--table]

`onnx.backend.test.case.node` has a graph of one operator, or a few, with inputs and outputs for
each case. Each graph is loaded as a user's file, prepared, and built in FP32 by ONNX Runtime for
the CPU, and, if it computes in FP32, converted to FP16. Each result is

    right      the case's data, within the tolerance of the case (FP16: of the type)
    wrong      something else
    refused    an error of optpipe, of at most two lines
    traceback  any other error, or a longer one
    unlike     a conversion to FP16 that rounds an integer or a Boolean to another

Beside it stands what ONNX Runtime itself makes of the file, all optimizations off. Cases run in
processes of `CHUNK`; one that ends its process is a line too. Cases whose lines are in OUT are left
out, so that an interrupted run goes on. `--share` takes a seeded part; `--table` only counts OUT.
"""

import argparse
import json
import random
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

CHUNK = 1000
CHUNK_LIMIT_S = 280.0
"""Imports and the data of all cases take half a minute in each process, a case 0.14 s."""
SEED = 51
MOST_LINES = 2
TOLERATED_HALF = 2e-2
"""‖found - expected‖ / ‖expected‖ of FP16 outputs."""


@cache
def collect_cases() -> dict[str, Any]:
    """The cases by name, in the order of their names. Takes seconds: it computes their data."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            each.name: each for each in sorted(collect_testcases(None), key=lambda case: case.name)
        }


def choose_cases(count: int, seed: int = SEED) -> list[str]:
    """A part of the names, the same one each time."""
    return sorted(random.Random(seed).sample(sorted(collect_cases()), count))


def examine_case(case: Any, folder: Path) -> dict[str, Any]:
    """The record of one case: what ONNX Runtime, the FP32 build, and the FP16 graph make of it."""
    path = folder / "case.onnx"
    path.write_bytes(case.model.SerializeToString())
    inputs, outputs = case.data_sets[0]
    given = name_values(case.model.graph.input, inputs)
    expected = name_values(case.model.graph.output, outputs)

    started = time.monotonic()
    record: dict[str, Any] = {
        "case": case.name,
        "opset": max(
            (each.version for each in case.model.opset_import if not each.domain), default=0
        ),
        "runtime": run_runtime(case, path, given, expected),
    }
    record |= build_case(case, path, given, expected)
    return {**record, "seconds": round(time.monotonic() - started, 2)}


def name_values(declared: Iterable[Any], values: Iterable[Any]) -> dict[str, Any]:
    """The values by name; the cases give types that NumPy lacks as `TensorProto`."""
    from onnx import TensorProto, numpy_helper

    return {
        each.name: numpy_helper.to_array(value) if isinstance(value, TensorProto) else value
        for each, value in zip(declared, values, strict=False)
    }


def run_runtime(
    case: Any, path: Path, given: Mapping[str, Any], expected: Mapping[str, Any]
) -> str:
    """`right`, `wrong: ...` or `refused: ...` for ONNX Runtime alone."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
        names = [each.name for each in session.get_outputs()]
        feeds = {
            name: np.asarray(value) if isinstance(value, np.generic) else value
            for name, value in given.items()
        }
        found = dict(zip(names, session.run(None, feeds), strict=True))
    except Exception as error:  # noqa: BLE001 - what it raises is the result
        return f"refused: {str(error).splitlines()[0][:200]}"
    return judge(case, expected, found)


def judge(
    case: Any, expected: Mapping[str, Any], found: Mapping[str, Any], *, half: bool = False
) -> str:
    """`right`, or `wrong: OUTPUT ...` for the first output that differs; FP16 may say `unlike`."""
    for name, value in expected.items():
        if name not in found:
            return f"wrong: {name} is missing"
        if not isinstance(value, np.ndarray | np.generic) or not isinstance(
            found[name], np.ndarray | np.generic
        ):
            return f"wrong: {name} is no tensor"
        one: Any = np.asarray(value)
        two: Any = np.asarray(found[name])
        if one.shape != two.shape:
            return f"wrong: {name} has the shape {two.shape} instead of {one.shape}"
        if one.dtype.kind in "OSUT":
            if not np.array_equal(one.astype(str), two.astype(str)):
                return f"wrong: {name}"
            continue
        is_real = one.dtype.kind in "fcV"
        if one.dtype.kind != "c":
            one, two = one.astype(np.float64), two.astype(np.float64)
        if not half or not is_real:
            near = np.allclose(one, two, rtol=case.rtol, atol=case.atol, equal_nan=True)
            if not near:
                worst = np.nanmax(np.abs(one - two))
                return f"{'unlike' if half else 'wrong'}: {name} is off by {worst:.3g}"
            continue
        finite = np.isfinite(one) & np.isfinite(two)
        off = np.linalg.norm(two[finite] - one[finite])
        if not np.array_equal(one[~finite], two[~finite], equal_nan=True):
            return f"wrong: {name} is infinite or NaN at other places"
        if off > TOLERATED_HALF * np.linalg.norm(one[finite]) + 1e-3:
            return f"wrong: {name} is off by {off:.3g} of {np.linalg.norm(one[finite]):.3g}"
    return "right"


def build_case(
    case: Any, path: Path, given: Mapping[str, Any], expected: Mapping[str, Any]
) -> dict[str, Any]:
    """The results in FP32 and, if the graph computes in FP32, FP16; the remarks of the rewrites."""
    from optpipe.backends.base import BuildRequest
    from optpipe.backends.onnx_quantized import find_own_precision
    from optpipe.backends.onnxruntime import OnnxRuntime
    from optpipe.backends.onnxruntime_session import OnnxRuntimeSession
    from optpipe.backends.plain_session import PlainSession
    from optpipe.core import onnx
    from optpipe.core.entries import WeightsRequest
    from optpipe.core.errors import OptpipeError
    from optpipe.core.precision import Precision
    from optpipe.models.export.onnx_export import complete_card, save_graph
    from optpipe.models.export.source_graph import prepare_graph, require_raised_opset
    from optpipe.models.inputs.rows import to_rows
    from optpipe.models.sources.onnx_file import OnnxFileSource
    from optpipe.quantize.precision_graph import write_half_graph

    record: dict[str, Any] = {}
    stage = "fp32"
    try:
        card = OnnxFileSource(path).load(WeightsRequest("default")).card
        prepared = prepare_graph(onnx.load(path), card, own_file=True)
        graph = path.with_name("prepared.onnx")
        save_graph(prepared.graph, graph)
        card = complete_card(card, graph)
        if prepared.remarks:
            record["remarks"] = list(prepared.remarks)

        feeds = {each.name: np.asarray(given[each.name]) for each in card.inputs}
        folder = path.with_name("build")
        folder.mkdir()
        backend = OnnxRuntime()
        request = BuildRequest(card, Precision.FP32, graph, None, "cpu", {}, folder)
        made = backend.build(request)
        with OnnxRuntimeSession(folder / made.file, "cpu", made.options) as session:
            record["fp32"] = judge(case, expected, session.run(feeds))

        stage = "fp16"
        types = {each.dtype for each in card.inputs} | {each.dtype for each in card.outputs}
        if find_own_precision(prepared.graph) is not None or "float32" not in types:
            return record
        require_raised_opset(card.name, prepared.remarks, "fp16")
        count = max(
            (each.opt[each.batch] for each in card.inputs if each.batch is not None), default=1
        )
        rows = {each.name: to_rows(feeds[each.name], each.batch, count) for each in card.inputs}
        write_half_graph(Precision.FP16, onnx.load(graph), card, rows, path.parent)
        with PlainSession(path.with_name("model.onnx")) as session:
            record["fp16"] = judge(case, expected, session.run(feeds), half=True)
    except OptpipeError as error:
        lines = str(error).splitlines()
        kind = "refused" if len(lines) <= MOST_LINES else "traceback"
        record[stage] = f"{kind}: {error}"
    except Exception as error:  # noqa: BLE001 - a traceback is the worst result
        record[stage] = f"traceback: {type(error).__name__}: {str(error)[:300]}"
        record["trace"] = traceback.format_exc(limit=-5)
    return record


def run_cases(names: Iterable[str], out: Path | None = None) -> list[dict[str, Any]]:
    """The records of `names`, in this process, each appended to `out` as it ends."""
    records = []
    for name in names:
        with TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            record = examine_case(collect_cases()[name], Path(folder))
        records.append(record)
        if out is not None:
            append(out, record)
    return records


def append(out: Path, record: Mapping[str, Any]) -> None:
    with out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def read_records(out: Path) -> list[dict[str, Any]]:
    if not out.is_file():
        return []
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def run_in_processes(names: Sequence[str], out: Path) -> None:
    """Runs what OUT has not, `CHUNK` cases to a process; the case that ends one is recorded."""
    while True:
        done = {each["case"] for each in read_records(out)}
        left = [name for name in names if name not in done]
        if not left:
            return
        chunk = left[:CHUNK]
        command = [sys.executable, __file__, str(out), "--only", ",".join(chunk), "--here"]
        try:
            ran = subprocess.run(
                command, timeout=CHUNK_LIMIT_S, capture_output=True, text=True, check=False
            )
        except subprocess.TimeoutExpired:
            continue_after = {each["case"] for each in read_records(out)} - done
            if not continue_after:
                append(out, {"case": chunk[0], "fp32": "traceback: did not end in time"})
            continue
        if ran.returncode:
            done = {each["case"] for each in read_records(out)}
            ended = next(name for name in chunk if name not in done)
            why = ran.stderr.strip()[-300:] or f"signal {-ran.returncode}"
            append(out, {"case": ended, "fp32": f"traceback: its process ended: {why}"})


def read_result(record: Mapping[str, Any], part: str) -> str:
    """The first word of a result; `none` without one."""
    return str(record.get(part, "none")).split(":")[0]


def count_results(records: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str, str], int]:
    """How many cases have each result: of the runtime, in FP32, and in FP16."""
    return Counter(
        (read_result(each, "runtime"), read_result(each, "fp32"), read_result(each, "fp16"))
        for each in records
    )


def is_defect(record: Mapping[str, Any]) -> bool:
    """Whether a record shows a traceback, or a wrong result where ONNX Runtime itself is right."""
    results = [str(record.get(part, "")) for part in ("fp32", "fp16")]
    return any(each.startswith("traceback") for each in results) or (
        record.get("runtime") == "right" and any(each.startswith("wrong") for each in results)
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--share", type=int, default=0)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not given.table:
        names = given.only.split(",") if given.only else list(collect_cases())
        if given.share:
            names = choose_cases(given.share)
        if given.here:
            run_cases(names, given.out)
            return 0
        run_in_processes(names, given.out)
    records = read_records(given.out)
    for (runtime, fp32, fp16), count in sorted(count_results(records).items()):
        print(f"{count:5}  ONNX Runtime {runtime:8}  FP32 {fp32:10} FP16 {fp16}")
    defects = [each for each in records if is_defect(each)]
    for each in defects:
        print(json.dumps(each))
    return int(bool(defects))


if __name__ == "__main__":
    sys.exit(main())
