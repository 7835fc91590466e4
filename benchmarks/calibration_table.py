"""Makes the table of `calibration_of_intervals.py` in benchmarks/README.md from the rows that a run wrote.

usage: python -m benchmarks.calibration_table [ROWS.jsonl] [--check]     writes the table; with --check, exits with 1 if it differs

Each line shows the worst of its rows. A row that no line shows is an error, so that none is left out.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.calibration_of_intervals import PARTS, Row, read_rows

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "benchmarks" / "calibration_of_intervals.jsonl"
README = ROOT / "benchmarks" / "README.md"
BEGIN, END = "<!-- drawn by calibration_table.py -->", "<!-- end -->"


@dataclass(frozen=True)
class Line:
    """The rows of `part` whose words `pattern` finds."""

    part: str
    words: str
    pattern: str = ""
    before: str = ""
    """What an earlier rule, or the audit, gave."""


LINES = (
    Line("percentiles", "p50, p90, p99 inside a process, correlation 0 to 0.9", r"correlation 0(,|\.[579])"),
    Line("percentiles", "the same, correlation 0.99", r"correlation 0\.99,"),
    Line("processes", "p50 over 5 processes, scatter 0 to 2%", "p50 over"),
    Line("processes", "mean over 2, 3, 6 runs of 5 processes; processes scatter 0.2 to 2%, runs 0 to 2%", "runs of 5 proc"),
    Line("processes", "mean over runs of 20, 5, 5; 10, 1, 1; 40, 3, 3; 40, 3 processes", "mean over runs of", "80%"),
    Line("processes", "5 processes that scatter as Student's t3", "t3"),
    Line("processes", "memory of a sixth process above its bound", "memory"),
    Line("processes", "largest error of the next sample above its bound", "largest error"),
    Line("criteria", "ten criteria, all on their limits, or one of them"),
    Line("signoffs", "the same through the sign-off's functions, five processes of a load"),
    Line("two_speeds", "two speeds 5% apart, 10 to 90% of processes slow: interval", "interval of"),
    Line("two_speeds", "the same: on the limit, and 1 and 3% from it", r"5 % slower, \d%"),
    Line("two_speeds", "12% apart, 80% of the slow ones left out, 3% from the limit", "12 % slower"),
    Line("two_speeds", "power at one speed, 2 and 3% inside", "one speed"),
    Line("seen_speeds", "two speeds 5, 8, 12% apart, either drawn, 19 and 40 processes", "on its limit", "PASS 18%"),
    Line("seen_speeds", "the same: regressions to a build with one speed", "as slow as"),
    Line("looks", "judged after each of up to 10 and 20 runs until it is decided", "up to", "PASS 17%"),
    Line("looks", "power: 3% inside, scatter 0.5%, 1.3%, and 2%, 5 to 10 processes", "3 % inside"),
    Line("evaluations", "evaluated on up to 30 other sets of samples until it is decided (by enumeration)", "up to", "PASS 18%"),
    Line("evaluations", "the best of 1 to 16 builds that were evaluated together", "the best of", "PASS 17%"),
    Line("evaluations", "power: 0.8 points inside, 3,000 images, one of 1 and of 8 builds", "inside"),
    Line("chosen", "the fastest of 2, 8, 30 builds of one workspace, 5 to 20 processes, scatter 0.5-4%", r"builds, \d+ proc", "PASS 31%"),
    Line("chosen", "power: 3% inside, scatter 1.3%, 7 processes of one of 3 builds, 10 of one of 8", "inside"),
    Line("chosen", "*fails:* the fastest of 16 builds, measured in a workspace for each", "a workspace for each"),
    Line("tables", "any claim of `compare` among ten equal builds, also where 30% of processes are 5 and 12% slower", "some claim", "28%"),
    Line("tables", "power: the fastest of two and of ten builds is claimed", "the fastest"),
    Line("other_runs", "change claimed of an unchanged build in another run", "change claimed", "35%"),
    Line("other_runs", "the same: interval of the ratio", "interval"),
    Line("requests", "p99 of all requests, 3 to 10 processes", r"\d processes, scatter", "84%"),
    Line("requests", "the same, 3% of the requests have a Pareto tail", "Pareto"),
    Line("left_out", "20 to 75% of processes 12% slower and left out, for drift or as throttled", "left out", "PASS 100%"),
    Line("left_out", "p95 and p99, stalls of 30 requests and single slow requests, 3 to 20 processes", "in a row", "PASS 91%"),
    Line("energy", "energy over five processes, and of one, sensor ±5%", "", "covers 85%"),
    Line("accuracy", "top-1 of 90 to 99.5%, 100 and 800 images", "top-1"),
    Line("accuracy", "drop of 0 and 1, 30 to 1,000 samples (by enumeration)", r"drop of \d\.\d%, "),
    Line("accuracy", "macro F1 drop, 10 and 100 classes", "macro"),
    Line("accuracy", "SNR of outputs, errors that differ e^0.3-fold and e-fold", "SNR"),
    Line("tasks", "F1, Spearman, mIoU, AP and their drops; all or few of 30, 100, 300 samples differ", "", "PASS 64%"),
    Line("sampled", "scores of users: means, ratios, means over classes"),
    Line("rare", "mean over classes, a class of 0.5 to 3% of 100 to 1,000 images loses 5 to 30%", "a mean over", "PASS 64%"),
    Line("rare", "AP, a class of 1 and 2% of images loses 20%", "AP over"),
    Line("rare", "entity F1, entities in 3% of texts, 10 and 30% of them lost", "F1,", "PASS 41%"),
    Line("rare", "mean cosine, 0.5 to 2% of 20 to 1,000 samples lose 0.3 to 1", "cosine", "PASS 93%"),
    Line("clusters", "samples in groups of 5, 10, 30, correlation 0.3 and 0.8 inside", "", "PASS 39%"),
    Line("outputs", "SNR: errors spread, 0.5% of samples with 100 times the noise, or outputs of very different power", "", "PASS 60%"),
    Line("speedups", "DALI's speedup over four rounds, processes scatter 0 to 6%", "", "covers 58%"),
    Line("baselines", "a regression, judged with up to 20 baselines", "", "PASS 9%"),
    Line("throughput", "throughput, correlation 0 to 0.9", "throughput"),
    Line("throughput", "coefficient of variation, correlation 0 to 0.9", "variation"),
    Line("interleaving", "A/A, also with a disturbance every 1.33 to 8 processes", "equals"),
    Line("interleaving", "power: 3 and 5% slower is found in 10 rounds", "slower is found"),
    Line("validity", "clean data refused; clocks read with 0.6% noise", "refused"),
    Line("validity", "drift of 3%, there and back, and a second mode are found", "is found"),
    Line("validity", "falling behind at a utilization of 0.9 and 1.02", "falling behind"),
    Line("slow_noise", "slow noise of 1 and 2%, correlation 0.99 to 0.999: refused as drift", "refused as drift", "33%"),
    Line("slow_noise", "the same: p50 and p99, all judged", r"^(?!refused)"),
    Line("repeated_changes", "a step of 3% that all processes repeat", "slower after", "PASS 3.6%"),
    Line("repeated_changes", "noise taken for a repeated change", "repeated change in"),
    Line("inputs", "inputs of different cost: p50, p99", r"^(?!refused)", "all left out"),
    Line("inputs", "the same: refused as drift", "refused as drift"),
    Line("other_shapes", "a correlated tail, p50 and p99, 3 to 10 processes", "a tail"),
    Line("other_shapes", "stalls of 10 to 40 requests every 500 to 2,000", "stall"),
    Line("other_shapes", "a clock with 5 and 20 ticks for a request", "a clock"),
    Line("other_shapes", "inputs of different cost in processes at two speeds", "one input"),
    Line("other_shapes", "drift that reverses in every process", "a wave"),
    Line("other_shapes", "every process cools or heats by 5%, limit at the last level", "by 5% in"),
    Line("other_shapes", "looks after every process, up to 30", "looks after"),
    Line("other_shapes", "a regression, 3 processes against 20 and 20 against 3", "against"),
    Line("other_samples", "30 to 300 groups of very unequal sizes", "unequal sizes"),
    Line("other_samples", "mean over 5 to 20 classes, some of 1 to 5 samples", "mean over"),
    Line("other_samples", "30 to 1,000 paired scores of which 80 and 99% are equal", "paired"),
    Line("other_samples", "SNR, one of 100 to 3,000 samples has 10 and 100 times the noise", "SNR"),
    Line("other_samples", "evaluated after every 1 to 30 more samples, up to 30 times", "evaluated after"),
    Line("server", "p99 of a server at a utilization of 0.5, 0.8, 0.9", "p99 of a server"),
    Line("server", "the rate that the search finds breaks its limit", "rate found"),
    Line("live", "live check, 5 to 50% more than the server can answer", "more than the server", "no FAIL in 540"),
    Line("live", "live check on the limit, utilization 0.3 to 0.95; three limits", "on the limit", "PASS 5.3%"),
    Line("races", "the race: some of 2, 4, 6 equal builds is called slower", "called slower"),
    Line("races", "the race: ratio to the winner", "ratio to the winner"),
    Line("regressions", "regression, one run and several; runs scatter 0 to 4%, also as Student's t3", "^(?!.*one run in ten)"),
    Line("classes", "macro F1, a class of 1 to 3% of 300 to 3,000 samples loses 5 to 20%", "macro F1", "covers 86%"),
    Line("classes", "drops of 5 classes, all of them in their intervals", "drops of 5"),
    Line("regressions", "*fails:* one run in ten is slow", "one run in ten"),
    Line("fleet", "*fails:* a live check of one server, whose fleet differs by 2%"),
    Line("assumptions", "*fails:* one run, runs scatter 1 to 3% (noise slower than a run)", "slower than a run"),
    Line("assumptions", "*fails:* levels of processes lognormal, scatter 2 and 5%", "lognormal"),
    Line("assumptions", "*fails:* 20 and 30% of 5 to 40 processes 8 and 12% slower", "none left out"),
    Line("assumptions", "*fails:* 30% of runs 5 and 12% slower as a whole", "as a whole"),
    Line("assumptions", "*fails:* p99, stalls of 50 and 200 requests, or of 70 and 100 every 5,000, 50% slower", "stalls of"),
    Line("assumptions", "*fails:* 5 to 20% of labels wrong", "labels wrong"),
    Line("assumptions", "*fails:* samples calibrated the build, not known by their hash", "not known"),
    Line("assumptions", "samples calibrated the build, known by their hash", "known by their hash"),
    Line("assumed_samples", "*fails:* samples in groups of 5, 10, 30, no column `group`", "no column"),
    Line("assumed_samples", "*fails:* a class of 0.5% in 300 images without a name", "no name"),
    Line("assumed_samples", "*fails:* SNR, one in 1,000 samples with 1,000 times the noise; 1,000 to 4,000 samples", "SNR"),
    Line("assumed_samples", "*fails:* the best of 16 builds, each evaluated in another workspace", "another workspace"),
    Line("assumptions", "*fails:* a row of `compare` had a neighbor that slowed it by 3, 5, 8%: some claim", "neighbor"),
)  # fmt: skip


def main() -> int:
    words = [word for word in sys.argv[1:] if word != "--check"]
    about, found = read_rows(Path(words[0]) if words else ROWS)
    text = README.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    drawn = f"{before}{BEGIN}\n{make_table(about, found)}\n{END}{after}"
    if "--check" in sys.argv:
        return int(drawn != text)
    README.write_text(drawn, encoding="utf-8")
    return 0


def make_table(about: dict[str, Any], found: dict[str, list[Row]]) -> str:
    others = [f"{each:g} for `{name}`" for name, each in about.get("other_scales", {}).items()]
    scale = ", ".join([f"Scale {about['scale']:g}", *others])
    lines = [
        f"{scale}; {about['seconds']:,} s on {about['cores']} cores. {_count(found)}\n",
        "| simulated | part | rows | before | worst now (± 1 sd) | goal |",
        "|---|---|---|---|---|---|",
    ]
    shown = set()
    for line in LINES:
        rows = [row for row in found.get(line.part, []) if re.search(line.pattern, row.what)]
        shown |= {id(row) for row in rows}
        if rows:
            cells = (line.words, f"`{line.part}`", str(len(rows)), line.before, *_summarize(rows))
            lines.append("| " + " | ".join(cells) + " |")
    left = [row.what for rows in found.values() for row in rows if id(row) not in shown]
    if left:
        sys.exit(f"no line of calibration_table.py shows {len(left)} rows, such as: {left[0]}")
    absent = [name for name in PARTS if name not in found]
    if absent:
        lines.append(f"\nNot drawn: {', '.join(absent)}.")
    return "\n".join(lines)


def _count(found: dict[str, list[Row]]) -> str:
    every = [row for rows in found.values() for row in rows]
    goals = [row for row in every if row.least > 0 or row.most < 1]
    broken = sum(not row.kept for row in goals)
    return (
        f"{broken} of {len(goals)} rows with a goal miss it by more than two standard deviations."
    )


def _summarize(rows: Sequence[Row]) -> tuple[str, str]:
    """The worst figure of each kind, and the goals."""
    kinds: dict[tuple[str, bool, bool], list[Row]] = {}
    for row in rows:
        name = next((each for each in ("PASS", "FAIL") if re.search(rf"\b{each}\b", row.what)), "")
        kinds.setdefault((name, row.least > 0, row.most < 1), []).append(row)
    worst, goals = [], []
    for (name, has_least, has_most), alike in kinds.items():
        known = [row for row in alike if row.seen == row.seen]
        if not known:
            worst.append("withheld")
        elif has_least:
            worst.append(
                f"{name} {_describe(min(known, key=lambda row: row.seen - row.least))}".strip()
            )
            goals += [f"≥ {row.least:.0%}" for row in alike]
        elif has_most:
            worst.append(
                f"{name} {_describe(max(known, key=lambda row: row.seen - row.most))}".strip()
            )
            goals += [f"≤ {row.most:.1%}" for row in alike]
        else:
            low, high = (pick(known, key=lambda row: row.seen) for pick in (min, max))
            worst.append(f"{name} {low.seen:.1%} to {_describe(high)}".strip())
    return ", ".join(worst), "; ".join(dict.fromkeys(goals))


def _describe(row: Row) -> str:
    enumerated = not row.draws
    missed = "" if row.kept else " **missed**"
    return f"{row.seen:.2%}{missed}" if enumerated else f"{row.seen:.1%} ± {row.error:.1%}{missed}"


if __name__ == "__main__":
    sys.exit(main())
