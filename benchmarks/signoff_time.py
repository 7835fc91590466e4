"""How long a sign-off takes with five processes for a load and with one, in turns; nothing is measured before it.

usage: python benchmarks/signoff_time.py [--rounds 5] [--batch 1] [--before PIPELINE] [--json FILE] [--judge DOSSIER...]
`digits` is built once; each sign-off starts from a copy of the store and judges one p50. Wall and processor seconds include all
processes. With one process the verdict is INCONCLUSIVE, for its scatter is not known; the time is what counts here. PIPELINE is
that folder of an earlier version (`git archive f6a645f^ pipeline models calibration`: the last with one process), measured too.
`--judge` only judges dossiers, each in a fresh process: `largest_dossier.py` makes the largest.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from shutil import copytree
from statistics import median

PLACE = ("--backend", "onnxruntime", "--precision", "fp32")
POLICY = """schema = 1
name = "time"
[build]
backend = "onnxruntime"
precision = "fp32"
options = {{ threads = 1 }}
[[latency]]
p50 = "{}"
batch_size = {}
"""
LAUNCH = """import sys
from optpipe.core import defaults
defaults.PROCESSES = int(sys.argv.pop(1))
from optpipe.__main__ import main
sys.exit(main())
"""


JUDGE = """import os, sys, time
from pathlib import Path
from optpipe.core.files import Files
from optpipe.signoff.dossier import read_dossier
from optpipe.signoff.judge import judge_dossier
folder = Path(sys.argv[1])
wall, busy = time.perf_counter(), time.process_time()
verdict = judge_dossier(read_dossier(Files(folder)))[0].verdict
wall, busy = time.perf_counter() - wall, time.process_time() - busy
print(f"{folder.name}: {verdict} in {busy:.2f} s of processor time, {wall:.1f} s, load average {os.getloadavg()[0]:.0f}")
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--judge", type=Path, nargs="+", default=[])
    given = parser.parse_args()
    if given.judge:
        for each in given.judge:
            subprocess.run([sys.executable, "-c", JUDGE, str(each)], check=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        policy = Path(folder) / "policy.toml"
        policy.write_text(POLICY.format("1 s", given.batch))
        now = Contender("one process", 1, Path(folder) / "now")
        contenders = [now, Contender("five processes", 5, now.built)]
        if given.before:
            contenders.insert(
                0,
                Contender(
                    "the earlier version", 1, Path(folder) / "before", given.before.resolve()
                ),
            )
        for each in contenders:
            each.build()
        for turn in range(given.rounds):
            for each in contenders if turn % 2 == 0 else reversed(contenders):
                each.sign_off(policy, Path(folder) / f"{turn}-{each.name}")
    report(contenders)
    if given.json:
        given.json.write_text(
            json.dumps({each.name: each.seconds for each in contenders}, indent=1) + "\n"
        )


@dataclass
class Contender:
    """A version of optpipe, and how many processes its sign-off measures."""

    name: str
    processes: int
    built: Path
    pipeline: Path | None = None
    seconds: list[tuple[float, float]] = field(default_factory=list)
    """Wall and processor seconds of each sign-off."""

    def build(self) -> None:
        if not self.built.exists():
            self._run(
                "-m", "optpipe", "build", "digits", *PLACE, "--workspace", str(self.built), "--json"
            )

    def sign_off(self, policy: Path, workspace: Path) -> None:
        copytree(self.built / "store", workspace / "store")
        words = (
            "signoff",
            "digits",
            "--policy",
            policy,
            "--max-cv",
            "900%",
            "--workspace",
            workspace,
            "--json",
        )
        before, begun = os.times(), time.perf_counter()
        self._run("-c", LAUNCH, str(self.processes), *map(str, words))
        wall, after = time.perf_counter() - begun, os.times()
        self.seconds.append(
            (
                wall,
                after.children_user
                + after.children_system
                - before.children_user
                - before.children_system,
            )
        )
        print(
            f"{self.name}: {self.seconds[-1][0]:.1f} s, {self.seconds[-1][1]:.1f} s",
            file=sys.stderr,
            flush=True,
        )
        measured = len(list(workspace.glob("runs/bench-*/samples/*.parquet")))
        if measured != self.processes:
            raise SystemExit(f"{self.name}: {measured} processes were measured")

    def _run(self, *words: str) -> None:
        environment = {
            **os.environ,
            **({"PYTHONPATH": str(self.pipeline)} if self.pipeline else {}),
        }
        ran = subprocess.run([sys.executable, *words], capture_output=True, env=environment)
        if ran.returncode not in (0, 5):
            raise SystemExit(f"{self.name}: status {ran.returncode}: {ran.stderr.decode()[-2000:]}")


def report(contenders: list[Contender]) -> None:
    print(f"load average {os.getloadavg()[0]:.1f}")
    print("| sign-off | wall s | processor s | of the first |\n|---|---|---|---|")
    first = [median(column) for column in zip(*contenders[0].seconds, strict=True)]
    for each in contenders:
        columns = list(zip(*each.seconds, strict=True))
        cells = [
            f"{median(column):.1f} ({min(column):.1f} to {max(column):.1f})" for column in columns
        ]
        ratios = ", ".join(
            f"{median(column) / one:.2f}" for column, one in zip(columns, first, strict=True)
        )
        print("| " + " | ".join((each.name, *cells, ratios)) + " |")


if __name__ == "__main__":
    main()
