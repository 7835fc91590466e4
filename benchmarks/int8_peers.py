"""INT8 by `build` compared with the four range methods of ONNX Runtime's `quantize_static`, on the models of `third_party_models.py`.

usage: int8_peers.py FOLDER [--only NAME,NAME] [--samples 16] [--types same] [--draws 8]

The same first samples calibrate all, the same last 16 give the lowest SNR of an output, one sample at a time. ONNX Runtime: QDQ, U8S8,
weights per channel; all operators that it quantizes, or with `--types same` only the types that optpipe quantizes. With `--draws`, samples
are drawn that many times at random to calibrate, and 16 of the others to verify; the means of all figures follow, and two differences with
their 95% intervals: from the method of the peer with the highest mean, and from the one that happens to be the best in each draw.
"""

import argparse
import contextlib
import io
import json
import logging
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from scipy import stats
from third_party_models import (
    COUNT,
    HELD_OUT,
    MODELS,
    Model,
    Tensors,
    cut,
    installed,
    optpipe,
    recomputed,
    saved,
)

from optpipe.quantize.qdq import OPSET, quantize_graph
from optpipe.quantize.ranges import METHODS, read_table

PEERS = ("MinMax", "Entropy", "Percentile", "Distribution")
STRIDE = 8
"""Samples whose activations the peer holds at a time."""


class Reader:
    """Samples one at a time, in the ranges that `quantize_static` asks for."""

    def __init__(self, tensors: Tensors, count: int) -> None:
        axes = {
            name: value.shape.index(count) if count in value.shape[:2] else None
            for name, value in tensors.items()
        }
        self._rows = [
            {
                name: value if axes[name] is None else np.take(value, [at], axis=axes[name])
                for name, value in tensors.items()
            }
            for at in range(1 if set(axes.values()) == {None} else count)
        ]
        self._left = list(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def set_range(self, start_index: int, end_index: int) -> None:
        self._left = self._rows[start_index:end_index]

    def get_next(self) -> Any:
        return self._left.pop(0) if self._left else None


def prepare_for_peer(graph: Path, target: Path) -> Path:
    """The FP32 graph as ONNX Runtime recommends it: an opset with scales per channel, constants folded, shapes inferred."""
    from onnxruntime.quantization.shape_inference import quant_pre_process

    model = onnx.load(graph)
    if max(each.version for each in model.opset_import if each.domain in ("", "ai.onnx")) < OPSET:
        onnx.save(onnx.version_converter.convert_version(model, OPSET), target)
        graph = target
    quant_pre_process(graph, target, skip_symbolic_shape=True)
    return target


def quantize_by_peer(
    source: Path,
    target: Path,
    tensors: Tensors,
    count: int,
    method: str,
    types: list[str] | None,
    *,
    per_channel: bool,
) -> None:
    """Writes the graph of `quantize_static`; the histograms of parts add up."""
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

    reader = Reader(tensors, count)
    quantize_static(
        source,
        target,
        reader,
        quant_format=QuantFormat.QDQ,
        per_channel=per_channel,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        calibrate_method=CalibrationMethod[method],
        op_types_to_quantize=types,
        extra_options={"CalibStridedMinMax": min(STRIDE, len(reader))},
    )


def measure_peer(
    source: Path,
    graphs: Sequence[Path],
    target: Path,
    calibrated: Tensors,
    held_out: Tensors,
    count: int,
    method: str,
    types: list[str] | None,
) -> float | str:
    """The SNR of the first that the peer can make and run: prepared, as it is, with one scale for all weights of a layer."""
    for graph, per_channel in (
        (graphs[0], True),
        (graphs[1], True),
        (graphs[0], False),
        (graphs[1], False),
    ):
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                quantize_by_peer(
                    graph, target, calibrated, count, method, types, per_channel=per_channel
                )
            return float(recomputed(source, target, held_out))
        except Exception as error:  # noqa: BLE001 - whatever the peer raises, the next way is tried
            print(f"{graph.name} {method}: {error}"[:300], file=sys.stderr)
    return "fails"


def measure_theirs(
    source: Path,
    stored: Path,
    calibrated: Tensors,
    held_out: Tensors,
    count: int,
    types: list[str] | None,
) -> dict[str, float | str]:
    """The SNR of each method of the peer."""
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / "quantized.onnx"
        prepared = prepare_for_peer(stored, Path(scratch) / "prepared.onnx")
        return {
            method: measure_peer(
                source, (prepared, stored), target, calibrated, held_out, count, method, types
            )
            for method in PEERS
        }


def measure_ours(
    model: Model, source: Path, workspace: Path, calibrated: Tensors, held_out: Tensors
) -> tuple[dict[str, float], str]:
    """The SNR of the graph of each method, and the method that the build takes."""
    workspace.mkdir(parents=True, exist_ok=True)
    _, built = optpipe(
        "build",
        str(source),
        "--precision",
        "int8",
        "--backend",
        "onnxruntime",
        *model.options,
        "--min-snr",
        "0dB",
        "--images",
        str(saved(held_out, workspace / "held_out.npz")),
        "--calibration",
        str(saved(calibrated, workspace / "calibration.npz")),
        "--workspace",
        str(workspace),
    )
    if not built.get("artifacts"):
        return {}, ""
    store, found = workspace / "store", {}
    graph = onnx.load(newest(store, "model-*/model.onnx"))
    for method in METHODS:
        target = workspace / "quantized.onnx"
        onnx.save(
            quantize_graph(
                graph, read_table(newest(store, f"calibration-*/table-{method}.json")), "cpu"
            )[0],
            target,
        )
        found[method] = recomputed(source, target, held_out)
    return found, json.loads(newest(store, "graph-*/calibration-table.json").read_bytes())["method"]


def pick(tensors: Tensors, rows: Any) -> Tensors:
    """The samples `rows`; values that all samples share stay."""
    axes = {
        name: value.shape.index(COUNT) if COUNT in value.shape[:2] else None
        for name, value in tensors.items()
    }
    return {
        name: value if axes[name] is None else np.take(value, rows, axis=axes[name])
        for name, value in tensors.items()
    }


def with_interval(values: Sequence[float]) -> str:
    """The mean with its 95% interval by Student's t."""
    reach = stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5
    return (
        f"{np.mean(values):+.1f} [{np.mean(values) - reach:+.1f}, {np.mean(values) + reach:+.1f}]"
    )


def compare_draws(
    model: Model, folder: Path, count: int, draws: int, types: list[str] | None
) -> str:
    """A row of means over the draws."""
    source, tensors, rows = installed(model, folder), model.tensors(), []
    workspace = folder / "peers" / model.name
    for draw in range(draws):
        order = np.random.default_rng(draw).permutation(COUNT)
        calibrated, held_out = (
            pick(tensors, order[:count]),
            pick(tensors, order[COUNT - HELD_OUT :]),
        )
        ours, taken = measure_ours(model, source, workspace, calibrated, held_out)
        stored = newest(workspace / "store", "model-*/model.onnx")
        theirs = measure_theirs(source, stored, calibrated, held_out, count, types)
        rows.append(
            (taken, ours, {name: each for name, each in theirs.items() if isinstance(each, float)})
        )
        print(draw, *rows[-1], file=sys.stderr, flush=True)
    built = [ours[taken] for taken, ours, _ in rows]
    means = {
        name: np.mean([each[name] for *_, each in rows])
        for name in rows[0][2]
        if all(name in r for *_, r in rows)
    }
    best = max(means, key=lambda name: means[name])
    from_best = with_interval(
        [own - each[best] for own, (*_, each) in zip(built, rows, strict=True)]
    )
    from_luck = with_interval(
        [own - max(each.values()) for own, (*_, each) in zip(built, rows, strict=True)]
    )
    own = [f"{np.mean([ours[method] for _, ours, _ in rows]):.1f}" for method in METHODS]
    other = [f"{means[name]:.1f}" if name in means else "" for name in PEERS]
    cells = [
        f"{model.name}, {count}",
        str(draws),
        f"{np.mean(built):.1f}",
        *own,
        *other,
        from_best,
        from_luck,
    ]
    return f"| {' | '.join(cells)} |"


def newest(store: Path, pattern: str) -> Path:
    """The file that was written last."""
    return max(store.glob(pattern), key=lambda each: each.stat().st_mtime)


def main() -> None:
    """Prints the table, a row when it is done."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--types", choices=["all", "same"], default="all")
    parser.add_argument("--draws", type=int, default=0)
    asked = parser.parse_args()
    logging.disable(logging.WARNING)
    heads = ["model", "build takes", *METHODS, *PEERS, "ahead of the best by"]
    if asked.draws:
        heads = [
            "model",
            "draws",
            "build",
            *METHODS,
            *PEERS,
            "ahead of the best method by",
            "of the best in each draw by",
        ]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}", flush=True)
    types = (
        ["Conv", "ConvTranspose", "Gemm", "MatMul", "Add", "MaxPool"]
        if asked.types == "same"
        else None
    )
    for model in MODELS:
        if asked.only and model.name not in asked.only.split(","):
            continue
        if asked.draws:
            print(compare_draws(model, asked.folder, asked.samples, asked.draws, types), flush=True)
            continue
        source, tensors = installed(model, asked.folder), model.tensors()
        single = all(COUNT not in each.shape[:2] for each in tensors.values())
        held_out = tensors if single else cut(tensors, COUNT - HELD_OUT, COUNT)
        calibrated = tensors if single else cut(tensors, 0, asked.samples)
        ours, taken = measure_ours(
            model, source, asked.folder / "peers" / model.name, calibrated, held_out
        )
        if not ours:
            print(f"| {model.name} | not built |", flush=True)
            continue
        stored = newest(asked.folder / "peers" / model.name / "store", "model-*/model.onnx")
        theirs = measure_theirs(source, stored, calibrated, held_out, asked.samples, types)
        reached = [each for each in theirs.values() if isinstance(each, float)]
        figures = [
            f"{each:.1f}" if isinstance(each, float) else each
            for each in (*ours.values(), *theirs.values())
        ]
        ahead = f"{ours[taken] - max(reached):+.1f}" if reached else ""
        print(f"| {model.name} | {taken} | {' | '.join(figures)} | {ahead} |", flush=True)


if __name__ == "__main__":
    main()
