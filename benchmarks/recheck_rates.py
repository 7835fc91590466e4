"""How often does `recheck` claim a change between an environment and itself, and how often does it find a planted slow-down?

usage: recheck_rates.py DOSSIER WORKSPACE COMPARISONS [--slower 1.05] [--python ENV] [--rounds 8] --output DIR
The new side is `--python`, or this interpreter again: a process of its own from the same environment. Each comparison with calls
held back is followed by one without, so that a run that was ended early counts; DIR/slower.jsonl and DIR/equal.jsonl get a line
of JSON for each, several calls add up. Prints the rates over all lines.
"""

import argparse
import json
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic
from unittest.mock import patch

from optpipe.core.events import SilentListener
from optpipe.core.records import line_from_record
from optpipe.deploy import recheck
from optpipe.deploy.recheck import open_interpreter
from optpipe.deploy.signed_build import open_signed_build
from optpipe.measure.pair import compare_environments
from optpipe.stats.paired import compute_share_interval
from optpipe.workspace.store import Store


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("dossier", type=Path)
    parser.add_argument("workspace", type=Path)
    parser.add_argument("comparisons", type=int)
    parser.add_argument("--slower", type=float, default=1.05)
    parser.add_argument("--python", type=Path, default=Path(sys.executable))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    store = Store(given.workspace)
    build = open_signed_build(given.dossier, store, because="a trial")
    for _ in range(given.comparisons):
        for name, factor in (("slower", given.slower), ("equal", 1.0)):
            with (
                patch.object(recheck, "open_interpreter", open_with_faults),
                patch.object(recheck, "compare_environments", partial(compare_slowed, factor)),
            ):
                compare(build, given, store, name, given.output / f"{name}.jsonl")
    for name in ("slower", "equal"):
        print_rates(name, given.output / f"{name}.jsonl")


def open_with_faults(*arguments):
    """The interpreter of an environment, which can import `slowed` too."""
    found = open_interpreter(*arguments)
    paths = os.pathsep.join([found.environment["PYTHONPATH"], str(Path(__file__).parent.resolve())])
    return replace(found, environment={**found.environment, "PYTHONPATH": paths})


def compare_slowed(factor, old, new, *more):
    """Compares two environments, the new one with every call `factor` times as slow."""
    if factor != 1:
        planted = {"factor": factor, "of": new.session.loader, "arguments": new.session.arguments}
        new = replace(new, session=replace(new.session, loader="slowed:slowed", arguments=planted))
    return compare_environments(old, new, *more)


def compare(build, given, store, name, path):
    begun = monotonic()
    found = recheck.recheck(build, given.python, given.rounds, 0.05, store, SilentListener())
    with path.open("a") as file:
        file.write(line_from_record(found).decode())
    one = found.latency
    text = f"{one} {one.change}, {one.rounds} rounds, {monotonic() - begun:.0f} s"
    print(f"{name}: {text}", flush=True)


def print_rates(name, path):
    every = [json.loads(line) for line in path.read_text().splitlines()]
    for change in ("faster", "slower", "no difference shown"):
        count = sum(each["latency"]["change"] == change for each in every)
        low, high = compute_share_interval(count, len(every))
        print(f"{name}: {change}: {count} of {len(every)} ({low:.1%} to {high:.1%})")
    changed = {each["name"]: each["changed"] for one in every for each in one["outputs"]}
    print(f"{name}: output values changed: {changed}")


main()
