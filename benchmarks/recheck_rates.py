"""How often does `recheck` claim a change between an environment and itself, and how often does it find a planted 5 %?

usage: recheck_rates.py DOSSIER WORKSPACE COMPARISONS [--slower 1.05] [--python ENV] [--rounds 10] --output FILE
The new side is `--python`, or this interpreter again: a process of its own from the same environment. Appends one JSON line per
comparison to FILE, so that several short calls add up; prints the rates over all its lines.
"""

import argparse
import json
import sys
from pathlib import Path

from optpipe.core.events import SilentListener
from optpipe.core.records import line_from_record
from optpipe.deploy.recheck import RecheckPlan, recheck
from optpipe.deploy.signed_build import open_signed_build
from optpipe.stats.paired import compute_share_interval
from optpipe.workspace.store import Store


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("dossier", type=Path)
    parser.add_argument("workspace", type=Path)
    parser.add_argument("comparisons", type=int)
    parser.add_argument("--slower", type=float, default=1.0)
    parser.add_argument("--python", type=Path, default=Path(sys.executable))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    store = Store(given.workspace)
    build = open_signed_build(given.dossier, store, because="a trial")
    loader = ("slowed:slowed", {"factor": given.slower}) if given.slower != 1 else None
    plan = RecheckPlan(
        given.python, given.rounds, given.seconds, loader=loader, modules=Path(__file__).parent.resolve()
    )
    with given.output.open("a") as file:
        for _ in range(given.comparisons):
            found = recheck(build, plan, store, SilentListener())
            file.write(line_from_record(found).decode())
            file.flush()
            latency = found.latency
            print(f"{latency.ratio:.4f} [{latency.ci[0]:.4f}, {latency.ci[1]:.4f}] {latency.change}", flush=True)
    every = [json.loads(line) for line in given.output.read_text().splitlines()]
    for change in ("faster", "slower", "no difference shown"):
        count = sum(each["latency"]["change"] == change for each in every)
        low, high = compute_share_interval(count, len(every)).bounds
        print(f"{change}: {count} of {len(every)} ({low:.1%} to {high:.1%})")
    changed = {each["name"]: each["changed"] for one in every for each in one["outputs"]}
    print(f"output values changed: {changed}")


main()
