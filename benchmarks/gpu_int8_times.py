"""ResNet-50 on ONNX Runtime CUDA: INT8 against FP16 against FP32 in turns, times by CUDA events, outputs by SNR; marked honestly.

usage: python benchmarks/gpu_int8_times.py OUTPUT_DIRECTORY       (the artifacts are those in OPTPIPE_WORKSPACE)
Every round times each contender once, so that clocks and temperature are the same for all. Graphs that are wrong or that
ONNX Runtime refuses are in the table too, with the reason: a fast wrong answer must not look like a result.
"""

import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import numpy as np

from optpipe.backends.registry import BACKENDS
from optpipe.core.card import card_from_file
from optpipe.core.entries import ArtifactInfo
from optpipe.core.errors import OptpipeError
from optpipe.core.precision import Precision
from optpipe.models.inputs.image_set import find_images
from optpipe.models.inputs.images import preprocess_batches
from optpipe.workspace.file_names import CARD
from optpipe.workspace.places import find_shipped_folder
from optpipe.workspace.store import Store

BATCHES = (1, 64, 256)
ROUNDS, WARM_UP, TIMED = 5, 5, 20
CONTENDERS = (("fp32", True), ("fp16", True), ("fp16", False), ("int8", False), ("int8", True))
"""Precision and NHWC layout. FP16 without NHWC is what INT8 without it is like-for-like compared with."""
WRONG_DB = 15.0
"""INT8 by a method that is worth anything stays above; a broken graph is near 0 dB."""


def main(out: Path) -> None:
    """Prints a table and writes times.json after every batch size."""
    import torch

    store = Store(Path(os.environ["OPTPIPE_WORKSPACE"]))
    artifacts = {
        entry.info.precision: entry
        for entry in store.list_entries(ArtifactInfo)
        if entry.info.model == "resnet50" and entry.info.device == "cuda"
    }
    card = card_from_file(store.find(artifacts[Precision.FP32].manifest.parents[0]).file(CARD))
    images = next(
        preprocess_batches(
            find_images(find_shipped_folder("calibration") / "samples"),
            card.transform,
            10,
            threads=4,
        )
    )
    rows = []
    # on torch's default stream ONNX Runtime would take one of its own, and events would time nothing
    with torch.cuda.stream(torch.cuda.Stream()), ExitStack() as stack:
        sessions, refused = _sessions(artifacts, stack)
        for batch in [each for each in BATCHES if each <= card.inputs[0].max[0]]:
            rolled = np.concatenate(
                [np.roll(images, index, axis=3) for index in range(-(-batch // 10))]
            )[:batch]
            rows += _rows(
                sessions,
                refused,
                artifacts,
                {card.inputs[0].name: np.ascontiguousarray(rolled)},
                batch,
            )
            (out / "times.json").write_text(json.dumps(rows, indent=1))
            print(f"batch {batch} done", file=sys.stderr, flush=True)
    print_table(rows)


def _sessions(artifacts, stack):
    sessions, refused = {}, {}
    for precision, nhwc in CONTENDERS:
        entry = artifacts.get(precision)
        try:
            if entry is None:
                refused[precision, nhwc] = "not built"
                continue
            options = {"nhwc": nhwc, "cuda_graph": True}
            session = BACKENDS["onnxruntime"].load(entry.path, entry.info, options)
            sessions[precision, nhwc] = stack.enter_context(session)
        except OptpipeError as error:
            refused[precision, nhwc] = str(error)
    return sessions, refused


def _rows(sessions, refused, artifacts, inputs, batch):
    """One row per contender: the median of its rounds' medians, and each round's time over FP16's in that round."""
    import torch

    bindings, reasons = {}, dict(refused)
    for key, session in sessions.items():
        try:
            bindings[key] = session.bind(inputs)
            for _ in range(WARM_UP):
                bindings[key].launch()
            torch.cuda.current_stream().synchronize()
        except OptpipeError as error:
            reasons[key] = str(error)
            bindings.pop(key, None)
    scores = {
        key: next(iter(each.outputs.values())).double().cpu().numpy()
        for key, each in bindings.items()
    }
    rounds = [{key: _p50_ms(binding) for key, binding in bindings.items()} for _ in range(ROUNDS)]
    rows = []
    for key in CONTENDERS:
        precision, nhwc = key
        row = {"precision": precision, "nhwc": nhwc, "batch": batch, "why_not": reasons.get(key)}
        if key in bindings:
            share = artifacts[precision].info.precision_proof.share.macs
            times = [each[key] for each in rounds]
            row |= {
                "p50_ms": median(times),
                "rounds_ms": times,
                "images_per_s": batch / median(times) * 1e3,
            }
            row |= {
                "int8_share": share.get("int8", 0.0),
                "snr_db": _snr_db(scores[key], scores.get(("fp32", True))),
            }
            if ("fp16", True) in bindings:
                row["over_fp16"] = sorted(each[key] / each["fp16", True] for each in rounds)
        rows.append(row)
    return rows


def _p50_ms(binding) -> float:
    import torch

    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(TIMED)]
    for _ in range(WARM_UP):
        binding.launch()
    for start, end in marks:
        start.record()
        binding.launch()
        end.record()
    torch.cuda.current_stream().synchronize()
    return float(median(start.elapsed_time(end) for start, end in marks))


def _snr_db(found: np.ndarray, expected: np.ndarray | None) -> float | None:
    if expected is None or found is expected:
        return None
    error = float(np.sum((found - expected) ** 2))
    return float(10 * np.log10(np.sum(expected**2) / error)) if error else float("inf")


def print_table(rows) -> None:
    """The table with what a reader must know beside each INT8 row."""
    print("weights are random: SNR to FP32 is given, agreement would prove nothing")
    print("precision layout batch   p50 ms  images/s  time / FP16 NHWC (5 rounds)   SNR to FP32")
    for row in rows:
        head = f"{row['precision']:9} {'NHWC' if row['nhwc'] else 'NCHW':6} {row['batch']:5}"
        if row["why_not"]:
            print(f"{head}  cannot run: {row['why_not'][:150]}")
            continue
        ratios = row.get("over_fp16", [])
        ratio = f"{median(ratios):.2f} ({ratios[0]:.2f} … {ratios[-1]:.2f})" if ratios else "–"
        snr = "reference" if row["snr_db"] is None else f"{row['snr_db']:.1f} dB"
        print(
            f"{head} {row['p50_ms']:8.3f} {row['images_per_s']:9.0f}  {ratio:26}  {snr}{_marks(row, ratios)}"
        )


def _marks(row, ratios) -> str:
    if row["precision"] != "int8":
        return ""
    marks = [f"  {row['int8_share']:.0%} of multiply-adds in INT8"]
    if row["snr_db"] is not None and row["snr_db"] < WRONG_DB:
        marks.append("WRONG ANSWERS: its time means nothing")
    elif ratios and ratios[0] >= 1:
        marks.append("INT8 DOES NOT PAY: slower than FP16 in every round")
    elif ratios and ratios[-1] >= 1:
        marks.append("not shown to be faster than FP16")
    return ", ".join(marks)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
