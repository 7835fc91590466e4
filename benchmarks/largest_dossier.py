"""Time and memory of both verifiers on the largest dossier that optpipe makes, and on those of record.

usage: largest_dossier.py FOLDER [PROCESSES SAMPLES PREDICTIONS]     10 × 100,000 queries and 50,000 predictions by default

The queries drift and are correlated, so that the percentiles need long sums; the largest of three figures is the policy's.
"""

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
RECORDS = ("digits-cpu", "resnet50-h100", "resnet50-h200")
POLICY = b"""schema = 1
[build]
precision = "fp16"
[latency]
p50 = "50 ms"
p95 = "60 ms"
p99 = "70 ms"
[throughput]
minimum = "1 images/s"
[accuracy]
minimum_agreement = "90 %"
minimum_score = "10 points"
"""


def make_largest(folder, processes, samples, predictions):
    """A dossier of so many processes, queries in each, and predictions."""
    from tests.unit.conftest import Workspace, use_drawn_dates

    workspace = Workspace(folder / "workspace")
    with use_drawn_dates():
        fp16 = workspace.artifact("fp16")
        workspace.bench(fp16, count=samples, processes=processes, noise=0.01)
        workspace.evaluate(fp16, lost=predictions // 100, n=predictions)
        return workspace.release(POLICY, folder / "largest")


def measure(command):
    """Wall time in s, processor time in s, peak memory in MiB, exit status."""
    begun = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    wall, busy = time.monotonic() - begun, used.ru_utime + used.ru_stime
    return wall, busy, used.ru_maxrss / 1024, os.waitstatus_to_exitcode(status)


def main():
    folder = Path(sys.argv[1])
    sizes = [*map(int, sys.argv[2:5])] or [10, 100_000, 50_000]
    if not (folder / "largest").exists():
        folder.mkdir(parents=True, exist_ok=True)
        # in another process: a verifier's peak would count this one's memory from before its exec
        maker = multiprocessing.get_context("spawn").Process(
            target=make_largest, args=(folder, *sizes)
        )
        maker.start()
        maker.join()
        if maker.exitcode != 0:
            sys.exit("the dossier could not be made")
    verifiers = {
        "optpipe verify": (sys.executable, "-m", "optpipe", "verify"),
        "verify_dossier.py": (sys.executable, str(ROOT / "verifier" / "verify_dossier.py")),
    }
    for dossier in (*(ROOT / "reports" / name for name in RECORDS), folder / "largest"):
        for name, command in verifiers.items():
            wall, busy, peak, status = measure((*command, str(dossier)))
            print(
                f"{dossier.name:14} {name:18} {wall:6.1f} s, processor {busy:6.1f} s, "
                f"{peak:6.0f} MiB, status {status}",
                flush=True,
            )


if __name__ == "__main__":
    main()
