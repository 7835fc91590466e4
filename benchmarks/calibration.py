"""Calibrating ResNet-50: optpipe beside ONNX Runtime's quantizer and ModelOpt, same images, each in a process of its own.

usage: python benchmarks/calibration.py [--images 128,512] [--only NAME,…] [--ort-histograms]
       (ONNX Runtime's entropy and percentile keep every activation, 110 MB per image: --ort-histograms asks for them,
        on 64 images only)

`calibration s` is the calibrating alone; `process s` starts Python, imports and loads too; `peak` is the process's.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from photographs import main as make_photographs

INPUT, SHAPE = "images", (3, 224, 224)
BATCH = 4
OURS = {
    "optpipe max": ("max",),
    "optpipe percentile": ("percentile",),
    "optpipe entropy": ("entropy",),
    "optpipe mse": ("mse",),
    "optpipe all four": ("max", "percentile", "entropy", "mse"),
}
ORT = {"onnxruntime minmax": "MinMax", "onnxruntime entropy": "Entropy", "onnxruntime percentile": "Percentile"}
MODELOPT = {"modelopt max": "max", "modelopt entropy": "entropy"}
CONTENDERS = ("forward passes", *OURS, *ORT, *MODELOPT)


def rows(folder: Path, count: int) -> Iterator[dict[str, np.ndarray]]:
    """The preprocessed images from disk, BATCH at a time: nobody has to hold them all."""
    with (folder / "images.f32").open("rb") as file:
        for _ in range(0, count, BATCH):
            yield {INPUT: np.fromfile(file, np.float32, BATCH * 3 * 224 * 224).reshape(BATCH, *SHAPE)}


class Reader:
    """What the peers' quantizers read from."""

    def __init__(self, folder: Path, count: int) -> None:
        self._make = lambda: rows(folder, count)
        self._rows = self._make()

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._rows, None)

    def rewind(self) -> None:
        self._rows = self._make()

    def get_first(self) -> dict[str, np.ndarray]:
        return next(self._make())


def prepare(folder: Path, count: int) -> None:
    """The exported model, and `count` photographs through its own transform."""
    from optpipe.core.card import card_from_file
    from optpipe.core.events import Silent
    from optpipe.core.store import Store
    from optpipe.core.weights import weights_from_text
    from optpipe.inputs.images import batches
    from optpipe.sources.resolve import source_from_text
    from optpipe.stages.export import CARD, ONNX, exported_model
    from optpipe.stages.model import Model

    model = Model(source_from_text("resnet50", {}), weights_from_text("random", 0))
    entry, _ = exported_model(model, Store(folder / "workspace"), Silent())
    card = card_from_file(entry.file(CARD))
    (folder / "model.onnx").write_bytes(entry.file(ONNX).read_bytes())
    make_photographs(folder / "photographs", count)
    import onnx

    name = onnx.load(folder / "model.onnx").graph.input[0].name
    assert name == INPUT, name
    with (folder / "images.f32").open("wb") as file:
        for batch in batches(sorted((folder / "photographs").iterdir()), card.transform, 16, threads=2):
            batch.astype(np.float32).tofile(file)


def run(name: str, folder: Path, count: int) -> float:
    """One contender; seconds of the calibrating alone."""
    if name == "forward passes":
        return _forward(folder, count)
    if name in OURS:
        return _ours(folder, count, OURS[name])
    if name in ORT:
        return _onnxruntime(folder, count, ORT[name])
    return _modelopt(folder, count, MODELOPT[name])


def _forward(folder: Path, count: int) -> float:
    import onnxruntime as ort

    session = ort.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    started = time.perf_counter()
    for batch in rows(folder, count):
        session.run(None, batch)
    return time.perf_counter() - started


def _ours(folder: Path, count: int, methods: tuple[str, ...]) -> float:
    import onnx

    from optpipe.calibrators.collect import Collector, collected
    from optpipe.calibrators.methods import needs_histogram, ranges
    from optpipe.calibrators.placement import placement

    model = folder / "model.onnx"
    tensors = placement(onnx.load(model), "tensorrt").tensors
    collector = Collector(model, tensors, needs_histogram(methods))
    started = time.perf_counter()
    statistics = collected(collector, rows(folder, count))
    for method in methods:
        ranges(statistics, method)
    return time.perf_counter() - started


def interleaved(folder: Path, count: int) -> None:
    """Forward passes and calibration in turn on each batch, so that a busy machine slows both: ratios of the medians."""
    import onnx
    import onnxruntime as ort

    from optpipe.calibrators.collect import Collector
    from optpipe.calibrators.placement import placement

    model = folder / "model.onnx"
    tensors = placement(onnx.load(model), "tensorrt").tensors
    session = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    work = {
        "forward passes": lambda batch: session.run(None, batch),
        "optpipe max": Collector(model, tensors, histograms=False).add,
        "optpipe, any histogram method": Collector(model, tensors, histograms=True).add,
    }
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for batch in rows(folder, count):
        for name, step in work.items():
            started = time.perf_counter()
            step(batch)
            seconds[name].append(time.perf_counter() - started)
    medians = {name: float(np.median(each[2:])) for name, each in seconds.items()}
    for name, median in medians.items():
        ratio = median / medians["forward passes"]
        print(f"| {name} | {1000 * median / BATCH:.1f} ms per image | {ratio:.2f} |")


def _onnxruntime(folder: Path, count: int, method: str) -> float:
    from onnxruntime.quantization.calibrate import CalibrationMethod, create_calibrator

    with tempfile.TemporaryDirectory() as scratch:
        augmented = Path(scratch) / "augmented.onnx"
        calibrator = create_calibrator(
            folder / "model.onnx",
            ["Conv", "Gemm", "Add", "MaxPool"],
            augmented_model_path=str(augmented),
            calibrate_method=CalibrationMethod[method],
        )
        calibrator.set_execution_providers(["CPUExecutionProvider"])
        started = time.perf_counter()
        calibrator.collect_data(Reader(folder, count))
        calibrator.compute_data()
        return time.perf_counter() - started


def _modelopt(folder: Path, count: int, method: str) -> float:
    from modelopt.onnx.quantization import quantize

    with tempfile.TemporaryDirectory() as scratch:
        started = time.perf_counter()
        quantize(
            onnx_path=str(folder / "model.onnx"),
            quantize_mode="int8",
            calibration_method=method,
            calibration_data_reader=Reader(folder, count),
            calibration_eps=["cpu"],
            high_precision_dtype="fp32",
            output_path=str(Path(scratch) / "out.onnx"),
            log_level="ERROR",
        )
        return time.perf_counter() - started


def measured(name: str, folder: Path, count: int) -> dict[str, object]:
    """Runs `name` in a process of its own: its seconds, the process's seconds and its peak resident memory."""
    started = time.perf_counter()
    command = [sys.executable, __file__, "--run", name, "--folder", str(folder), "--images", str(count)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    output = child.stdout.read() if child.stdout else ""
    _, status, usage = os.wait4(child.pid, 0)
    lines = [line for line in output.splitlines() if line.startswith("seconds ")]
    return {
        "name": name,
        "images": count,
        "seconds": float(lines[-1].split()[1]) if lines and status == 0 else None,
        "process_seconds": time.perf_counter() - started,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_bytes": usage.ru_maxrss * 1024,
    }


def main() -> None:
    """Prints the table, and the rows as JSON lines before it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", default="128")
    parser.add_argument("--only", default="")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--run")
    parser.add_argument("--ort-histograms", action="store_true")
    parser.add_argument("--interleaved", action="store_true", help="only the ratios of ours, on the first of --images")
    asked = parser.parse_args()
    counts = [int(count) for count in asked.images.split(",")]
    if asked.run:
        print("seconds", run(asked.run, asked.folder, counts[0]))
        return
    folder = asked.folder or Path(tempfile.mkdtemp())
    if not (folder / "images.f32").exists():
        folder.mkdir(parents=True, exist_ok=True)
        prepare(folder, max(counts))
    if asked.interleaved:
        interleaved(folder, counts[0])
        return
    found = []
    for count in counts:
        for name in asked.only.split(",") if asked.only else CONTENDERS:
            huge = name in ("onnxruntime entropy", "onnxruntime percentile")
            if not huge or asked.ort_histograms:
                found.append(measured(name, folder, min(count, 64) if huge else count))
                print(json.dumps(found[-1]), flush=True)
    table(found)


def table(found: list[dict[str, object]]) -> None:
    """Ratios are to the forward passes of the same run and count."""
    bare = {row["images"]: row["seconds"] for row in found if row["name"] == "forward passes"}
    print("| contender | images | calibration s | × forward passes | process s | CPU s | peak |")
    print("|---|---|---|---|---|---|---|")
    for row in found:
        seconds, base = row["seconds"], bare.get(row["images"])
        ratio = f"{seconds / base:.2f}" if seconds and base else ""
        text = f"{seconds:.1f}" if seconds else "failed"
        peak = f"{row['peak_bytes'] / 1e9:.2f} GB"
        print(
            f"| {row['name']} | {row['images']} | {text} | {ratio} | {row['process_seconds']:.1f} | {row['cpu_seconds']:.0f} | {peak} |"
        )


if __name__ == "__main__":
    main()
