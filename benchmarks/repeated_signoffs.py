"""Sign-offs of one unchanged build, again and again on a machine with other work: is any verdict wrong?

usage: python benchmarks/repeated_signoffs.py [--signoffs 20] [--margin 3] [--max-cv 900%] [--json FILE]
`digits` is built once. Each sign-off starts from a copy of the workspace without measurements, measures five processes, and is
judged against a limit MARGIN percent above the truth (right: PASS; wrong: FAIL) and one as far below (right: FAIL; wrong: PASS).
The limits are set by what many processes measured before; whether a verdict is wrong is decided by the mean of all processes of the
whole trial. The load is defined: everything that is measured runs on the last core (before all others, where that is allowed)
beside a process that wants LOAD of it; a busy process of the lowest priority keeps every other core busy. Linux stops what runs
before all others for 50 ms of each second, which widens the scatter of single queries, hence MAX_CV, and leaves p50 alone.
Exit status 1 where a verdict is wrong.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from shutil import copytree

from optpipe.core.measurement import Measurement, read_measurements

PLACE = ("--backend", "onnxruntime", "--precision", "fp32")
LIMITS = {"above": 1, "below": -1}
POLICY = """schema = 1
name = "repeated"
[build]
backend = "onnxruntime"
precision = "fp32"
options = {{ threads = 1 }}
[[latency]]
p50 = "{} ns"
batch_size = 1
"""
BUSY = """import sys, time
share = float(sys.argv[1])
while True:
    end = time.perf_counter() + 0.1 * share
    while time.perf_counter() < end:
        pass
    time.sleep(0.1 * (1 - share))
"""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--signoffs", type=int, default=20)
    parser.add_argument("--margin", type=float, default=3.0)
    parser.add_argument("--load", type=float, default=0.03)
    parser.add_argument("--max-cv", default="900%")
    parser.add_argument("--truth-processes", type=int, default=30)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        cores = sorted(os.sched_getaffinity(0))
        for core in cores[:-1]:
            stack.enter_context(keep_busy(core, 1.0, 19))
        stack.enter_context(keep_busy(cores[-1], given.load, 0))
        os.sched_setaffinity(0, cores[-1:])
        with suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(10))
        first = "before" if os.sched_getscheduler(0) == os.SCHED_RR else "beside"
        load = os.getloadavg()[0]
        print(f"measured on core {cores[-1]} of {len(cores)}, {first} all others; load average {load:.1f}", flush=True)
        record = repeat(Path(folder), given)
    if given.json:
        given.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 1 if any(one["wrong"] for one in record["limits"].values()) else 0


@contextmanager
def keep_busy(core: int, share: float, priority: int):
    """A process that wants `share` of a core."""
    words = ["taskset", "-c", str(core), "nice", "-n", str(priority), sys.executable, "-c", BUSY, str(share)]
    process = subprocess.Popen(words)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def optpipe(*arguments: object):
    ran = subprocess.run(
        [sys.executable, "-m", "optpipe", *map(str, arguments), "--json"], stdout=subprocess.PIPE, text=True
    )
    return json.loads(ran.stdout)


def repeat(folder: Path, given: argparse.Namespace) -> dict:
    optpipe("build", "digits", *PLACE, "--workspace", folder)
    options = ("--batch", 1, "--option", "onnxruntime.threads=1", "--max-cv", given.max_cv, "--workspace", folder)
    run = optpipe("bench", "digits", *PLACE, "--processes", given.truth_processes, *options)
    first = read_measurements(Path(run["run_dir"]))
    before = mean_of(first)
    limits = {name: before * (1 + sign * given.margin / 100) for name, sign in LIMITS.items()}
    verdicts, every, begun = [], list(first), time.perf_counter()
    for _ in range(given.signoffs):
        found, measured = sign_off(folder, limits, given.max_cv)
        verdicts.append(found)
        every += measured
    seconds = (time.perf_counter() - begun) / given.signoffs
    return report(before, mean_of(every), limits, verdicts, every, seconds)


def sign_off(stored: Path, limits: dict[str, float], max_cv: str) -> tuple[dict[str, dict], list[Measurement]]:
    """Measures once and judges by either limit."""
    with tempfile.TemporaryDirectory() as folder:
        workspace, found = Path(folder) / "work", {}
        copytree(stored / "store", workspace / "store")
        for name, limit in limits.items():
            measure = "--no-measure" if found else "--measure"
            policy = Path(folder) / f"{name}.toml"
            policy.write_text(POLICY.format(round(limit)))
            place = (measure, "--max-cv", max_cv, "--workspace", workspace, "--output", Path(folder) / name)
            verdict = optpipe("signoff", "digits", "--policy", policy, "--no-figures", *place)
            found[name] = next(one for one in verdict["criteria"] if one["name"].startswith("latency"))
        measured = [one for run in sorted((workspace / "runs").glob("bench-*")) for one in read_measurements(run)]
        return found, measured


def mean_of(measured: list[Measurement] | tuple[Measurement, ...]) -> float:
    """The mean p50 in ns of the VALID processes; of all, where none is."""
    valid = [one for one in measured if one.is_valid] or list(measured)
    p50 = [
        one.latency_ns.percentiles["p50"].value
        for one in valid
        if one.latency_ns and "p50" in one.latency_ns.percentiles
    ]
    return sum(p50) / len(p50)


def report(before: float, truth: float, limits: dict, verdicts: list, every: list, seconds: float) -> dict:
    codes = Counter(reason.code for one in every for reason in one.reasons if reason.invalidates)
    valid = sum(one.is_valid for one in every)
    print(
        f"p50: {before / 1e6:.4f} ms before, {truth / 1e6:.4f} ms of all {len(every)} processes, {valid} of them VALID {dict(codes)}"
    )
    record = {
        "p50_ns_before": before, "p50_ns": truth, "processes": len(every), "valid": valid, "invalid": dict(codes),
        "seconds_per_signoff": seconds, "limits": {},
    }  # fmt: skip
    print("| limit | of the truth | PASS | FAIL | INCONCLUSIVE | wrong |\n|---|---|---|---|---|---|")
    for name, limit in limits.items():
        counts = Counter(one[name]["verdict"] for one in verdicts)
        wrong = counts["FAIL" if truth <= limit else "PASS"]
        print(
            f"| {name} | {limit / truth - 1:+.1%} | {counts['PASS']} | {counts['FAIL']} | {counts['INCONCLUSIVE']} | {wrong} |"
        )
        record["limits"][name] = {
            "of_truth": limit / truth,
            **counts,
            "wrong": wrong,
            "reasons": [one[name]["reason"] for one in verdicts],
        }
    print(f"{seconds:.1f} s for each sign-off and its second verdict", flush=True)
    return record


if __name__ == "__main__":
    sys.exit(main())
