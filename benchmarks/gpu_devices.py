"""How nsys numbers the GPUs of its metrics, and CUDA those of its kernels, on each GPU of this machine in turn.

usage: PYTHONPATH=pipeline python benchmarks/gpu_devices.py OUT.json

A program multiplies matrices on one GPU, chosen by CUDA_VISIBLE_DEVICES, while nsys records the metrics of all. The tables of the
export that name devices are written, without process numbers, beside what `optpipe` reads: the GPU whose SMs were active.
"""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import polars as pl

from optpipe.trace.nsys import Capture, export_recording, record_program
from optpipe.trace.read import trace_from_sqlite
from optpipe.trace.sources import Source

PROGRAM = """
import torch
one = torch.rand(4096, 4096, device="cuda", dtype=torch.float16)
for _ in range(300):
    one @ one
torch.cuda.synchronize()
"""
QUERIES = {
    "gpus": "SELECT id, name, cuDevice, busLocation FROM TARGET_INFO_GPU",
    "cuda_devices": "SELECT DISTINCT gpuId, cudaId FROM TARGET_INFO_CUDA_DEVICE",
    "metric_types": "SELECT typeId, typeId & 255 AS low, count(*) FROM GPU_METRICS GROUP BY typeId",
    "kernel_devices": "SELECT deviceId, count(*) FROM CUPTI_ACTIVITY_KIND_KERNEL GROUP BY deviceId",
}


def record_on(visible: str) -> dict[str, Any]:
    os.environ["CUDA_VISIBLE_DEVICES"] = visible
    capture = Capture(on_gpu=True, whole=True, sources=(Source.GPU_METRICS,), timeout_s=60)
    found: dict[str, Any] = {"visible": visible}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        recorded = record_program([sys.executable, "-c", PROGRAM], scratch, capture)
        export = export_recording(recorded, scratch)
        with closing(sqlite3.connect(export)) as connection:
            for name, query in QUERIES.items():
                try:
                    found[name] = connection.execute(query).fetchall()
                except sqlite3.Error as error:
                    found[name] = str(error)
        metrics = trace_from_sqlite(export).metrics
    active = metrics.filter(metrics["name"].cast(pl.String).str.starts_with("SMs Active"))
    means = active.group_by("device").agg(pl.col("value").mean()).sort("device")
    found["read"] = means.rows()
    return found


def main() -> None:
    if shutil.which("nvidia-smi") is None:
        sys.exit("no NVIDIA GPU here")
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
    count = listed.stdout.count("UUID: GPU")
    rows = [record_on(str(at)) for at in range(min(count, 2))]
    Path(sys.argv[1]).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
