"""Sign-offs of one unchanged build, again and again on a machine with other work: is any verdict wrong?

usage: python benchmarks/repeated_signoffs.py [--signoffs 20] [--margin 3] [--load 1] [--max-cv 50%]
`digits` is built once and measured by many processes, whose mean p50 stands for the truth. Then it is signed off against a limit
`margin` percent above the truth (right: PASS; wrong: FAIL) and one as far below (right: FAIL; wrong: PASS), each time in a copy of
the workspace without measurements. `load` processes keep cores busy meanwhile. Exit status 1 where a verdict is wrong.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from shutil import copytree

from optpipe.core.measurement import read_measurements

BACKEND = ("--backend", "onnxruntime")
POLICY = 'schema = 1\nname = "repeated"\n[build]\nbackend = "onnxruntime"\nprecision = "fp32"\n[[latency]]\np50 = "{} ns"\nbatch_size = 1\n'


def optpipe(*arguments):
    ran = subprocess.run([sys.executable, "-m", "optpipe", *arguments, "--json"], capture_output=True, text=True)
    return json.loads(ran.stdout)


def signed_off(stored, limit_ns, max_cv):
    with tempfile.TemporaryDirectory() as folder:
        workspace, policy = Path(folder) / "work", Path(folder) / "policy.toml"
        copytree(stored / "store", workspace / "store")
        policy.write_text(POLICY.format(round(limit_ns)))
        found = optpipe(
            "signoff",
            "digits",
            "--policy",
            str(policy),
            "--no-figures",
            "--max-cv",
            max_cv,
            "--workspace",
            str(workspace),
        )
        return next(one for one in found["criteria"] if one["name"].startswith("latency"))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--signoffs", type=int, default=20)
    parser.add_argument("--margin", type=float, default=3.0)
    parser.add_argument("--load", type=int, default=1)
    parser.add_argument("--max-cv", default="50%")
    parser.add_argument("--truth-processes", type=int, default=20)
    given = parser.parse_args()
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(given.load)]
    try:
        with tempfile.TemporaryDirectory() as folder:
            wrong = repeat(Path(folder), given)
    finally:
        for each in busy:
            each.kill()
    return 1 if wrong else 0


def repeat(folder: Path, given) -> int:
    optpipe("build", "digits", *BACKEND, "--precision", "fp32", "--workspace", str(folder))
    processes = ("--processes", str(given.truth_processes), "--max-cv", given.max_cv)
    run = optpipe("bench", "digits", *BACKEND, "--batch", "1", *processes, "--workspace", str(folder))
    medians = [
        one.latency_ns.percentiles["p50"].value
        for one in read_measurements(Path(run["run_dir"]))
        if one.latency_ns and "p50" in one.latency_ns.percentiles
    ]
    truth, wrong = sum(medians) / len(medians), 0
    print(
        f"truth: p50 {truth / 1e6:.4f} ms, mean of {len(medians)} processes, {min(medians) / 1e6:.4f} to {max(medians) / 1e6:.4f}"
    )
    for sign, bad in ((1, "FAIL"), (-1, "PASS")):
        limit = truth * (1 + sign * given.margin / 100)
        criteria = [signed_off(folder, limit, given.max_cv) for _ in range(given.signoffs)]
        counts = Counter(one["verdict"] for one in criteria)
        wrong += counts[bad]
        print(
            f"limit {sign * given.margin:+g} % of the truth: {dict(counts)}; wrong {counts[bad]} of {given.signoffs}",
            flush=True,
        )
        for one in criteria[:2]:
            print(f"    {one['verdict']}: {one['reason'][:200]}")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
