"""ResNet-50 on ONNX Runtime CUDA: INT8 against FP16 against FP32, times by CUDA events, outputs by SNR; marked honestly.

usage: python benchmarks/gpu_int8_times.py OUTPUT_DIRECTORY
"""

import json
import os
import sys
from pathlib import Path

import numpy as np

from optpipe.backends.registry import BACKENDS
from optpipe.core.card import card_from_file
from optpipe.core.shipped import shipped
from optpipe.core.store import Store
from optpipe.inputs.images import batches, find_images
from optpipe.stages.export import CARD

BATCHES = (1, 16, 64)
WARM_UP, TIMED = 20, 60


def main(out: Path) -> None:
    """Prints a table and writes times.json."""
    import torch

    store = Store(Path(os.environ["OPTPIPE_WORKSPACE"]))
    artifacts = {
        entry.info["precision"]: entry
        for entry in store.entries()
        if entry.manifest.kind == "artifact" and entry.info["model"] == "resnet50" and entry.info["device"] == "cuda"
    }
    model = store.find(artifacts["fp32"].manifest.parents[0])
    card = card_from_file(model.file(CARD))
    images = next(batches(find_images(shipped("calibration") / "samples").paths, card.transform, 10, threads=4))
    rows, expected = [], {}
    for precision in ("fp32", "fp16", "int8"):
        entry = artifacts[precision]
        with BACKENDS["onnxruntime"].load(entry.path, entry.info, "cuda", {}) as session:
            for batch in [each for each in BATCHES if each <= card.inputs[0].max[0]]:
                rolled = np.concatenate([np.roll(images, index, axis=3) for index in range(-(-batch // 10))])[:batch]
                binding = session.bind({card.inputs[0].name: np.ascontiguousarray(rolled)})
                times = _times_ms(binding, torch)
                scores = next(iter(binding.outputs.values())).float().cpu().numpy().astype(np.float64)
                expected.setdefault(batch, scores)
                error = float(np.sum((scores - expected[batch]) ** 2))
                snr = None if error == 0 else float(10 * np.log10(np.sum(expected[batch] ** 2) / error))
                rows.append({"precision": precision, "batch": batch, "p50_ms": float(np.median(times)), "snr_db": snr})
    fp16 = {row["batch"]: row["p50_ms"] for row in rows if row["precision"] == "fp16"}
    for row in rows:
        row["against_fp16"] = row["p50_ms"] / fp16[row["batch"]]
    (out / "times.json").write_text(json.dumps(rows, indent=1))
    print("precision batch  p50 ms  time / FP16's   SNR to FP32")
    for row in rows:
        slower = "  INT8 does not pay here" if row["precision"] == "int8" and row["against_fp16"] >= 1 else ""
        snr = "reference" if row["snr_db"] is None else f"{row['snr_db']:.1f} dB"
        print(f"{row['precision']:9} {row['batch']:5} {row['p50_ms']:7.3f} {row['against_fp16']:14.2f}   {snr}{slower}")


def _times_ms(binding: object, torch: object) -> np.ndarray:
    for _ in range(WARM_UP):
        binding.launch()
    torch.cuda.synchronize()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(TIMED)]
    for start, end in marks:
        start.record()
        binding.launch()
        end.record()
    torch.cuda.synchronize()
    return np.array([start.elapsed_time(end) for start, end in marks])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
