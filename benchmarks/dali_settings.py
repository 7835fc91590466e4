"""What mixed decoding does to pixels and to speed, by every DALI setting that may matter.

usage: python benchmarks/dali_settings.py FOLDER_OF_JPEGS OUTPUT [--cpu]
Writes OUTPUT/parity.json and OUTPUT/throughput.json after every row, and prints both as tables.
"""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from optpipe.core.records import plain_from_record
from optpipe.core.transform import (
    CenterCrop,
    Decode,
    Normalize,
    Pack,
    Rescale,
    Resize,
    Transform,
)
from optpipe.models.inputs.images import decode_image, iterate_steps
from optpipe.preprocess.dali_pipeline import INPUT, DaliPlan, make_steps_pipeline
from optpipe.preprocess.throughput import (
    LoaderPlan,
    Throughput,
    ThroughputJob,
    make_job,
    measure_throughputs,
    warm_page_cache,
)

IMAGENET = Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
RESNET50 = Transform((Decode(), Resize((232,)), CenterCrop(224, 224), Rescale(), IMAGENET, Pack()))
BICUBIC = Transform(
    (Decode(), Resize((235,), interpolation="bicubic"), CenterCrop(224, 224), Rescale(), IMAGENET, Pack())
)
PARITY_IMAGES, BATCH = 192, 64


def parity_row(paths: list[Path], transform: Transform, plan: DaliPlan) -> dict[str, Any]:
    """Mean and largest difference after each step, in levels (8 bits), the last one in normalized units."""
    pipeline = make_steps_pipeline(transform, replace(plan, batch_size=BATCH))
    sums, largest, counts = None, None, 0
    for start in range(0, len(paths), BATCH):
        files = [path.read_bytes() for path in paths[start : start + BATCH]]
        pipeline.feed_input(INPUT, [np.frombuffer(data, np.uint8) for data in files])
        outputs = [output.as_cpu() for output in pipeline.run()]
        for row, data in enumerate(files):
            pixels = decode_image(data, transform.decode)
            steps = list(iterate_steps(transform, pixels))
            expected = [
                pixels,
                *(value for step, value in steps if isinstance(step, Resize | CenterCrop)),
                steps[-1][1],
            ]
            difference = [
                np.abs(np.asarray(output[row]).astype(float) - value)
                for output, value in zip(outputs, expected, strict=True)
            ]
            sums = np.array([each.mean() for each in difference]) + (0 if sums is None else sums)
            largest = np.maximum([each.max() for each in difference], 0 if largest is None else largest)
            counts += 1
    return {"mean": (sums / counts).tolist(), "max": largest.tolist(), "images": counts}


def main(folder: Path, out: Path, gpu: bool) -> None:
    """All rows; a row that fails is kept with its error."""
    out.mkdir(parents=True, exist_ok=True)
    paths = sorted(folder.glob("*.jpg"))
    print(f"{len(paths)} files, {warm_page_cache(paths) / 1e6:.0f} MB, page cache warm", flush=True)
    base = DaliPlan(
        decode="mixed" if gpu else "cpu",
        device="gpu" if gpu else "cpu",
        threads=8 if gpu else 2,
        batch_size=256 if gpu else 32,
    )
    variants: list[dict[str, Any]] = (
        [{"fancy_upsampling": fancy, "hw_decoder_load": load} for fancy in (True, False) for load in (0.0, 1.0)]
        if gpu
        else [{}]
    )
    rows = []
    for name, transform in (("resnet50", RESNET50), ("bicubic", BICUBIC)):
        for variant in variants:
            for resize in ("exact", "two-pass", "fused"):
                plan = replace(base, resize=resize, **variant)
                try:
                    row = parity_row(paths[:PARITY_IMAGES], transform, plan)
                except RuntimeError as error:
                    row = {"error": str(error)[-400:]}
                rows.append({"transform": name, "resize": resize, **variant, **row})
                (out / "parity.json").write_text(json.dumps(rows, indent=1))
                text = row.get("error") or "mean " + " ".join(f"{v:.4f}" for v in row["mean"]) + "  max " + " ".join(
                    f"{v:.2f}" for v in row["max"]
                )
                print(f"parity {name:9} {resize:9} {variant} {text}", flush=True)
    seconds = 3.0
    measured = []

    def keep(job: ThroughputJob) -> Throughput:
        (throughput,) = measure_throughputs([job])
        row = plain_from_record(throughput.summarize())
        measured.append(row)
        (out / "throughput.json").write_text(json.dumps(measured, indent=1))
        rate = f"{row['images_per_s']:9.0f} img/s" if row["images_per_s"] else f"failed: {row['error']}"
        print(
            f"{time.monotonic() - began:5.0f} s  {row['implementation']:11} {rate}  {row['plan'] or row['loader']}",
            flush=True,
        )
        return throughput

    began = time.monotonic()
    for workers in (8, 16) if gpu else (0, 1, 2):
        keep(make_job(paths, RESNET50, LoaderPlan(workers, 64, "cuda" if gpu else "cpu"), seconds))
    loads: list[dict[str, Any]] = [{"hw_decoder_load": load} for load in (0.0, 0.65, 0.85, 1.0)] if gpu else [{}]
    for load in loads:
        keep(make_job(paths, RESNET50, replace(base, **load), seconds))
    full = loads[-1]
    keep(make_job(paths, RESNET50, replace(base, **full), seconds, decode_only=True))
    changes: list[dict[str, Any]] = [
        {"edge_cases": False},
        {"resize": "two-pass"},
        {"resize": "fused"},
        {"resize": "fused", "edge_cases": False},
        *([{"fancy_upsampling": False}, {"threads": 16}, {"threads": 4}, {"prefetch": 4}] if gpu else [{"threads": 1}]),
    ]
    for change in changes:
        keep(make_job(paths, RESNET50, replace(base, **full, **change), seconds))
    keep(make_job(paths, RESNET50, replace(base, **full, edge_cases=False), seconds, decode_only=True))
    if gpu:
        changes = [{"batch_size": 64}, {"batch_size": 512}, {"fancy_upsampling": False}]
        for change in changes:
            keep(
                make_job(paths, RESNET50, replace(base, **full, edge_cases=False, **change), seconds, decode_only=True)
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), "--cpu" not in sys.argv)
