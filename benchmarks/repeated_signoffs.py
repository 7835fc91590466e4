"""Sign-offs of one unchanged build, again and again on a machine with other work: is any verdict wrong?

usage: python benchmarks/repeated_signoffs.py [--signoffs 20] [--margin 3] [--max-cv 900%] [--json FILE]
`digits` is built once. Each sign-off starts from a copy of the workspace without measurements, measures five processes, and is
judged against a limit MARGIN percent above the truth (right: PASS; wrong: FAIL) and one as far below (right: FAIL; wrong: PASS).
A machine that others use is another one every minute, so the truth is that of the minute: the limits are set by five processes
measured before, and a verdict is wrong that the mean of these, the sign-off's own and the five after it contradicts. The load is
defined: everything that is measured runs on the last core (before all others, where that is allowed) beside a process that wants
LOAD of it; a busy process of the lowest priority keeps every other core busy. Linux stops what runs before all others for 50 ms of
each second, which widens the scatter of single queries, hence MAX_CV, and leaves p50 alone. Exit status 1 where a verdict is wrong.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from math import isnan, nan
from pathlib import Path
from shutil import copytree
from statistics import mean

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
    return 1 if record["wrong"] else 0


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
    begun = time.perf_counter()
    before, trials = measure_truth(options), []
    for _ in range(given.signoffs):
        limits = {name: mean_of(before) * (1 + sign * given.margin / 100) for name, sign in LIMITS.items()}
        found, own = sign_off(folder, limits, given.max_cv)
        after = measure_truth(options)
        trials.append(Trial(limits, found, before, own, after))
        before = after
    return report(trials, (time.perf_counter() - begun) / given.signoffs)


def measure_truth(options: tuple[object, ...]) -> tuple[Measurement, ...]:
    """Five processes; again where none of them shows its p50."""
    while True:
        found = read_measurements(Path(optpipe("bench", "digits", *PLACE, *options)["run_dir"]))
        if not isnan(mean_of(found)):
            return found


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


def mean_of(measured: Sequence[Measurement]) -> float:
    """The mean p50 in ns of the VALID processes; of all, where none is; not a number, where none shows it."""
    shown = [one for one in measured if one.latency_ns and "p50" in one.latency_ns.percentiles]
    valid = [one for one in shown if one.is_valid] or shown
    return mean(one.latency_ns.percentiles["p50"].value for one in valid if one.latency_ns) if valid else nan


@dataclass(frozen=True)
class Trial:
    """One sign-off between two measurements of the truth."""

    limits: dict[str, float]
    found: dict[str, dict]
    """The criterion by the limit's name."""
    before: Sequence[Measurement]
    own: Sequence[Measurement]
    after: Sequence[Measurement]

    @property
    def truth(self) -> float:
        return mean_of([*self.before, *self.own, *self.after])

    def is_wrong(self, name: str) -> bool:
        return str(self.found[name]["verdict"]) == ("FAIL" if self.truth <= self.limits[name] else "PASS")

    def describe(self) -> dict:
        measured = {"before": self.before, "own": self.own, "after": self.after}
        return {
            "p50_ns": {name: mean_of(every) for name, every in measured.items()},
            "valid": {name: sum(one.is_valid for one in every) for name, every in measured.items()},
            "limits": {
                name: {
                    "of_truth": limit / self.truth,
                    "verdict": self.found[name]["verdict"],
                    "wrong": self.is_wrong(name),
                }
                for name, limit in self.limits.items()
            },
        }


def report(trials: list[Trial], seconds: float) -> dict:
    every = [one for trial in trials for one in (*trial.own, *trial.after)]
    codes = Counter(reason.code for one in every for reason in one.reasons if reason.invalidates)
    truths, valid = [trial.truth / 1e6 for trial in trials], sum(one.is_valid for one in every)
    print(
        f"{len(every)} processes, {valid} of them VALID {dict(codes)}; p50 of the minutes {min(truths):.4f} to {max(truths):.4f} ms"
    )
    print("| limit | of the truth | PASS | FAIL | INCONCLUSIVE | wrong |\n|---|---|---|---|---|---|")
    for name in LIMITS:
        counts = Counter(trial.found[name]["verdict"] for trial in trials)
        away = [trial.limits[name] / trial.truth - 1 for trial in trials]
        wrong = sum(trial.is_wrong(name) for trial in trials)
        cells = [
            name,
            f"{min(away):+.1%} to {max(away):+.1%}",
            counts["PASS"],
            counts["FAIL"],
            counts["INCONCLUSIVE"],
            wrong,
        ]
        print("| " + " | ".join(map(str, cells)) + " |")
    print(f"{seconds:.1f} s for each sign-off with its truth", flush=True)
    return {
        "processes": len(every), "valid": valid, "invalid": dict(codes), "seconds": seconds,
        "wrong": sum(trial.is_wrong(name) for trial in trials for name in LIMITS),
        "trials": [trial.describe() for trial in trials],
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
