"""Calibrating ResNet-50: optpipe beside ONNX Runtime's quantizer and ModelOpt, same images, each in a process of its own.

usage: python benchmarks/calibration.py [--images 128,512] [--only NAME,…] [--folder FOLDER] [--interleaved]
       (FOLDER keeps the model and the images from call to call)

`wall s` and `CPU s` are of the calibrating alone, the ratios are to the forward passes of the same call and count; `peak` is
the whole process's resident memory. ONNX Runtime's entropy and percentile keep every activation: what they need is measured
on 8 and 24 images first, and where that says that they do not fit into free memory they are not run.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from photographs import main as make_photographs

INPUT, SHAPE = "images", (3, 224, 224)
BATCH = 4
OURS = {
    "optpipe max": ("max",),
    "optpipe percentile": ("percentile",),
    "optpipe mse": ("mse",),
    "optpipe all four": ("max", "percentile", "percentile-99.999", "mse"),
}
ORT = {
    "onnxruntime minmax": "MinMax",
    "onnxruntime entropy": "Entropy",
    "onnxruntime percentile": "Percentile",
}
MODELOPT = {"modelopt max": "max", "modelopt entropy": "entropy"}
CONTENDERS = ("forward passes", *OURS, *ORT, *MODELOPT)


def rows(folder: Path, count: int) -> Iterator[dict[str, np.ndarray]]:
    """The preprocessed images from disk, BATCH at a time: nobody has to hold them all."""
    with (folder / "images.f32").open("rb") as file:
        for _ in range(0, count, BATCH):
            yield {
                INPUT: np.fromfile(file, np.float32, BATCH * 3 * 224 * 224).reshape(BATCH, *SHAPE)
            }


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
    from optpipe.core.entries import weights_from_text
    from optpipe.core.events import SilentListener
    from optpipe.models.export.exported import Model, export_model
    from optpipe.models.inputs.images import preprocess_batches
    from optpipe.models.sources.resolve import source_from_text
    from optpipe.workspace.file_names import CARD, ONNX
    from optpipe.workspace.store import Store

    model = Model(source_from_text("resnet50", {}), weights_from_text("random", 0))
    entry, _ = export_model(model, Store(folder / "workspace"), SilentListener())
    card = card_from_file(entry.file(CARD))
    (folder / "model.onnx").write_bytes(entry.file(ONNX).read_bytes())
    make_photographs(folder / "photographs", count)
    import onnx

    name = onnx.load(folder / "model.onnx").graph.input[0].name
    assert name == INPUT, name
    with (folder / "images.f32").open("wb") as file:
        for batch in preprocess_batches(
            sorted((folder / "photographs").iterdir()), card.transform, 16, threads=2
        ):
            batch.astype(np.float32).tofile(file)


def run(name: str, folder: Path, count: int) -> None:
    """One contender; `calibrating` is timed inside, without imports and loading. Prints the process's peak memory last."""
    if name == "forward passes":
        _forward(folder, count)
    elif name in OURS:
        _ours(folder, count, OURS[name])
    elif name in ORT:
        _onnxruntime(folder, count, ORT[name])
    else:
        _modelopt(folder, count, MODELOPT[name])
    # of this program alone: what the parent had resident when it forked counts in ru_maxrss
    status = Path("/proc/self/status").read_text().splitlines()
    print("peak", next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM")))


@contextmanager
def calibrating() -> Iterator[None]:
    """Prints wall and processor seconds of what is inside, all threads together."""
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    print("seconds", time.perf_counter() - wall, time.process_time() - cpu)


def _forward(folder: Path, count: int) -> None:
    import onnxruntime as ort

    session = ort.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    with calibrating():
        for batch in rows(folder, count):
            session.run(None, batch)


def _ours(folder: Path, count: int, methods: tuple[str, ...]) -> None:
    import onnx

    from optpipe.quantize.qdq import place_qdq
    from optpipe.quantize.ranges import Collector, compute_range

    model = folder / "model.onnx"
    tensors = place_qdq(onnx.load(model), "tensorrt").tensors
    collector = Collector(model, tensors, set(methods) != {"max"})
    with calibrating():
        for batch in rows(folder, count):
            collector.add(batch)
        statistics = collector.statistics()
        for method in methods:
            for each in statistics.values():
                compute_range(each, method)


def interleaved(folder: Path, count: int) -> None:
    """Forward passes and calibration in turn on each batch, so that a busy machine slows both alike."""
    import onnx
    import onnxruntime as ort

    from optpipe.quantize.qdq import place_qdq
    from optpipe.quantize.ranges import Collector

    model = folder / "model.onnx"
    tensors = place_qdq(onnx.load(model), "tensorrt").tensors
    session = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    work = {
        "forward passes": lambda batch: session.run(None, batch),
        "optpipe max": Collector(model, tensors, histograms=False).add,
        "optpipe, any histogram method": Collector(model, tensors, histograms=True).add,
    }
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for batch in rows(folder, count):
        for name, step in work.items():
            time.sleep(0.05)  # the threads of the session before spin for a while
            started = time.perf_counter()
            step(batch)
            seconds[name].append(time.perf_counter() - started)
    print(
        "| work | median ms per image | × forward | fastest tenth, ms | × forward |\n|---|---|---|---|---|"
    )
    for name, each in seconds.items():
        cells = []
        for quantile in (0.5, 0.1):  # what other work delays is not in the fastest tenth
            value, base = (
                float(np.quantile(times[2:], quantile))
                for times in (each, seconds["forward passes"])
            )
            cells.append(f"{1000 * value / BATCH:.1f} | {value / base:.2f}")
        print(f"| {name} | {' | '.join(cells)} |")


def _onnxruntime(folder: Path, count: int, method: str) -> None:
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
        with calibrating():
            calibrator.collect_data(Reader(folder, count))
            calibrator.compute_data()


def _modelopt(folder: Path, count: int, method: str) -> None:
    from modelopt.onnx.quantization import quantize

    with tempfile.TemporaryDirectory() as scratch, calibrating():
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


def measured(name: str, folder: Path, count: int) -> dict[str, Any]:
    """Runs `name` in a process of its own: wall and processor seconds, and its peak resident memory."""
    command = [
        sys.executable,
        __file__,
        "--run",
        name,
        "--folder",
        str(folder),
        "--images",
        str(count),
    ]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    output = child.stdout.read() if child.stdout else ""
    _, status, usage = os.wait4(child.pid, 0)
    said = {
        words[0]: words[1:]
        for words in map(str.split, output.splitlines())
        if words and words[0] in ("seconds", "peak")
    }
    wall, cpu = map(float, said["seconds"]) if status == 0 else (None, None)
    return {
        "name": name,
        "images": count,
        "seconds": wall,
        "cpu_seconds": cpu,
        "process_cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_bytes": int(said["peak"][0]) if status == 0 else None,
    }


def where_it_fits(name: str, folder: Path, count: int) -> dict[str, Any]:
    """`measured`, unless the memory that 8 and 24 images took says that `count` would not fit."""
    few, more = measured(name, folder, 8), measured(name, folder, 24)
    per_image = (more["peak_bytes"] - few["peak_bytes"]) / 16
    needed = few["peak_bytes"] + (count - 8) * per_image
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    if needed < 0.9 * free:
        return measured(name, folder, count) | {"bytes_per_image": per_image}
    return {
        "name": name,
        "images": count,
        "seconds": None,
        "needed_bytes": needed,
        "bytes_per_image": per_image,
    }


def main() -> None:
    """Prints the table, and the rows as JSON lines before it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", default="128")
    parser.add_argument("--only", default="")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--run")
    parser.add_argument(
        "--interleaved",
        action="store_true",
        help="only the ratios of ours, on the first of --images",
    )
    asked = parser.parse_args()
    counts = [int(count) for count in asked.images.split(",")]
    if unknown := sorted(set(filter(None, asked.only.split(","))) - set(CONTENDERS)):
        parser.error(f"unknown {unknown[0]!r}; known are {', '.join(CONTENDERS)}")
    if asked.run:
        run(asked.run, asked.folder, counts[0])
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
            found.append((where_it_fits if huge else measured)(name, folder, count))
            print(json.dumps(found[-1]), flush=True)
    table(found)


def table(found: list[dict[str, Any]]) -> None:
    """Ratios are to the forward passes of the same call and count."""
    bare = {row["images"]: row for row in found if row["name"] == "forward passes"}
    print("| contender | images | wall s | × forward | CPU s | × forward | peak |")
    print("|---|---|---|---|---|---|---|")
    for row in found:
        head = f"| {row['name']} | {row['images']} |"
        if "needed_bytes" in row:
            needed, each = row["needed_bytes"] / 1e9, row["bytes_per_image"] / 1e6
            print(f"{head} does not fit | | | | {needed:.0f} GB ({each:.0f} MB per image) |")
            continue
        base = bare.get(row["images"])
        cells = []
        for key in ("seconds", "cpu_seconds"):
            value = row[key]
            cells.append(f"{value:.1f}" if value else "failed")
            cells.append(f"{value / base[key]:.2f}" if value and base and base[key] else "")
        peak = f"{row['peak_bytes'] / 1e9:.2f} GB" if row["peak_bytes"] else ""
        print(f"{head} {' | '.join(cells)} | {peak} |")


if __name__ == "__main__":
    main()
