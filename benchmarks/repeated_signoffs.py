"""Sign-offs of one unchanged build, again and again on a machine with other work: is any verdict wrong?

Twenty take about 16 minutes of two cores (47 s each); what is left is said after each.

usage: python benchmarks/repeated_signoffs.py [--signoffs 20] [--margin 3] [--control 30] [--batch 32] [--max-cv 900%] [--json FILE]
`digits` is built once. Each sign-off judges five fresh processes by a limit MARGIN percent above the truth (right: PASS; wrong: FAIL)
and one as far below (right: FAIL; wrong: PASS). CONTROL percent away, the same measurements must give PASS and FAIL wherever they
decide at all, so the trial can fail. A machine that others use is another one every minute, so the truth is that of the same
minute: processes that the sign-off does not see, in turn with its own, one before each and one after the last; their mean sets
the limits. The load is defined: everything that is measured runs on the last core (before all others, where that is allowed)
beside a process that wants LOAD of it; a busy process of the lowest priority keeps every other core busy. Linux stops what runs
before all others for 50 ms of each second, which widens the scatter of single queries, hence MAX_CV, and leaves p50 alone; a
query of a large BATCH takes long enough to average what the neighbor core does to it. Exit status 1 where a verdict is wrong.
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
from pathlib import Path
from shutil import copytree
from statistics import mean

from signoff_time import PLACE, POLICY

from optpipe.core.files import Files
from optpipe.core.measurement import Measurement, read_measurements

PROCESSES = 5
"""Of a sign-off."""
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
    parser.add_argument("--control", type=float, default=30.0)
    parser.add_argument("--batch", type=int, default=32)
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
        print(
            f"measured on core {cores[-1]} of {len(cores)}, {first} all others; load average {load:.1f}",
            flush=True,
        )
        record = repeat(Path(folder), given)
    if given.json:
        given.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 1 if record["wrong"] else 0


@contextmanager
def keep_busy(core: int, share: float, priority: int):
    """A process that wants `share` of a core."""
    words = [
        "taskset",
        "-c",
        str(core),
        "nice",
        "-n",
        str(priority),
        sys.executable,
        "-c",
        BUSY,
        str(share),
    ]
    process = subprocess.Popen(words)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def optpipe(*arguments: object):
    ran = subprocess.run(
        [sys.executable, "-m", "optpipe", *map(str, arguments), "--json"],
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(ran.stdout)


def repeat(folder: Path, given: argparse.Namespace) -> dict:
    optpipe("build", "digits", *PLACE, "--workspace", folder)
    load = (
        "--batch",
        given.batch,
        "--percentile",
        50,
        "--min-time",
        0.5,
        "--option",
        "onnxruntime.threads=1",
        "--max-cv",
        given.max_cv,
        "--processes",
        1,
    )
    begun, trials = time.perf_counter(), []
    for number in range(1, given.signoffs + 1):
        trials.append(sign_off(folder, load, given))
        left = (time.perf_counter() - begun) / number * (given.signoffs - number) / 60
        print(
            json.dumps(trials[-1].describe()),
            f"{left:.0f} minutes left",
            file=sys.stderr,
            flush=True,
        )
    return report(trials, (time.perf_counter() - begun) / given.signoffs)


def measure(workspace: Path, load: tuple[object, ...]) -> Measurement:
    """One process."""
    run = optpipe("bench", "digits", *PLACE, *load, "--workspace", workspace)
    return read_measurements(Files(Path(run["run_dir"])))[0]


def sign_off(stored: Path, load: tuple[object, ...], given: argparse.Namespace) -> "Trial":
    """Measures the truth and the sign-off's own processes in turn, then judges these by every limit."""
    with tempfile.TemporaryDirectory() as folder:
        workspace, found = Path(folder) / "work", {}
        copytree(stored / "store", workspace / "store")
        both: tuple[list[Measurement], list[Measurement]] = ([], [])
        for turn in range(2 * PROCESSES + 1):
            both[turn % 2].append(measure((stored, workspace)[turn % 2], load))
        truth = mean(read_p50_ns(one) for one in both[0])
        limits = {f"{share:+g} %": truth * (1 + share / 100) for share in list_shares(given)}
        for number, (name, limit) in enumerate(limits.items()):
            policy = Path(folder) / f"{number}.toml"
            policy.write_text(POLICY.format(f"{limit:.0f} ns", given.batch))
            place = (
                "--no-measure",
                "--workspace",
                workspace,
                "--output",
                Path(folder) / f"{number}",
            )
            verdict = optpipe("signoff", "digits", "--policy", policy, "--no-figures", *place)
            found[name] = next(
                one["verdict"] for one in verdict["criteria"] if one["name"].startswith("latency")
            )
    return Trial(found, truth, both[1])


def list_shares(given: argparse.Namespace) -> tuple[float, ...]:
    """How far the limits are from the truth, in percent."""
    return given.margin, -given.margin, given.control, -given.control


def read_p50_ns(found: Measurement) -> float:
    assert found.latency_ns is not None
    assert found.latency_ns.median is not None
    return found.latency_ns.median


@dataclass(frozen=True)
class Trial:
    """One sign-off and the truth of its minute."""

    found: dict[str, str]
    """Verdicts by how far the limit was from the truth."""
    truth: float
    """ns."""
    own: Sequence[Measurement]

    def is_wrong(self, name: str) -> bool:
        return self.found[name] == ("FAIL" if name.startswith("+") else "PASS")

    def describe(self) -> dict:
        own = [read_p50_ns(one) for one in self.own]
        return {
            "truth_ns": self.truth,
            "own_ns": own,
            "valid": [one.is_valid for one in self.own],
            "verdicts": self.found,
        }


def report(trials: list[Trial], seconds: float) -> dict:
    every = [one for trial in trials for one in trial.own]
    codes = Counter(reason.code for one in every for reason in one.reasons if reason.invalidates)
    truths, valid = [trial.truth / 1e6 for trial in trials], sum(one.is_valid for one in every)
    print(
        f"{valid} of {len(every)} processes VALID {dict(codes)}; truth {min(truths):.2f} to {max(truths):.2f} ms"
    )
    print("| limit, of the truth | PASS | FAIL | INCONCLUSIVE | wrong |\n|---|---|---|---|---|")
    for name in trials[0].found:
        counts = Counter(trial.found[name] for trial in trials)
        wrong = sum(trial.is_wrong(name) for trial in trials)
        print(
            "| "
            + " | ".join(
                map(str, (name, counts["PASS"], counts["FAIL"], counts["INCONCLUSIVE"], wrong))
            )
            + " |"
        )
    print(f"{seconds:.1f} s for each sign-off with its truth", flush=True)
    return {
        "processes": len(every),
        "valid": valid,
        "invalid": dict(codes),
        "seconds": seconds,
        "wrong": sum(trial.is_wrong(name) for trial in trials for name in trial.found),
        "trials": [trial.describe() for trial in trials],
    }


if __name__ == "__main__":
    sys.exit(main())
