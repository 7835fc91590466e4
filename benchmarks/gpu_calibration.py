"""Calibrates ResNet-50 on the GPU and on the CPU from the same images: time, and whether the tables are the same.

usage: python benchmarks/gpu_calibration.py OUTPUT_DIRECTORY [IMAGES]
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
from photographs import main as make_photographs

from optpipe.core.card import card_from_file
from optpipe.core.entries import Device, ModelInfo
from optpipe.models.inputs.images import preprocess_batches
from optpipe.quantize.qdq import place_qdq
from optpipe.quantize.ranges import METHODS, Collector, choose_batch_size, compute_range
from optpipe.workspace.file_names import CARD, ONNX
from optpipe.workspace.store import Store


def main(out: Path, count: int = 256) -> None:
    """Prints a table and writes calibration.json."""
    import torch

    store = Store(Path(os.environ["OPTPIPE_WORKSPACE"]))
    model = next(e for e in store.list_entries(ModelInfo) if e.info.name == "resnet50")
    card = card_from_file(model.file(CARD))
    graph = model.file(ONNX)
    tensors = place_qdq(onnx.load(graph), "tensorrt").tensors
    with tempfile.TemporaryDirectory() as folder:
        make_photographs(Path(folder), count)
        files = sorted(Path(folder).iterdir())
        images = np.concatenate(
            list(preprocess_batches(files, card.transform, 32, threads=os.cpu_count() or 1))
        )
    size = {
        device: choose_batch_size(graph, tensors, {card.inputs[0].name: images[:1]}, device)
        for device in ("cuda", "cpu")
    }
    rows, tables = [], {}
    turns: list[tuple[Device, bool]] = [("cuda", False), ("cuda", True), ("cpu", True)]
    for device, histograms in turns:
        largest = min(size[device], card.inputs[0].max[0])
        collector = Collector(graph, tensors, histograms, device)
        parts = [images[start : start + largest] for start in range(0, count, largest)]
        collector.add(
            {card.inputs[0].name: parts[0]}
        )  # warm-up: cuDNN's choice of algorithms, memory arenas
        collector = Collector(graph, tensors, histograms, device)
        torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        for part in parts:
            collector.add({card.inputs[0].name: part})
        statistics = collector.statistics()
        seconds = time.perf_counter() - started
        if histograms:
            tables[device] = {
                method: {name: compute_range(each, method) for name, each in statistics.items()}
                for method in METHODS
            }
        rows.append(
            {
                "device": device,
                "histograms": histograms,
                "images": count,
                "batch": largest,
                "seconds": seconds,
                "torch_peak_bytes": torch.cuda.max_memory_allocated(),
            }
        )
    differences = {
        method: max(abs(tables["cuda"][method][n] / tables["cpu"][method][n] - 1) for n in tensors)
        for method in METHODS
    }
    (out / "calibration.json").write_text(
        json.dumps({"rows": rows, "relative_differences": differences}, indent=1)
    )
    for row in rows:
        print(
            f"{row['device']:5} histograms={row['histograms']!s:5} {row['seconds']:7.2f} s for {count} images"
        )
    for method, difference in differences.items():
        print(
            f"{method:10} largest relative difference of a range between GPU and CPU: {difference:.2e}"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
