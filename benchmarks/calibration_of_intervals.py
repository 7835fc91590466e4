"""Do the intervals and verdicts err as rarely as they claim? Simulations with known truth through optpipe's own functions.

usage: calibration_of_intervals.py [--only NAME ...] [--scale 1.0] [--processes 1] [--seconds S] [--rows FILE]
Each row says what was simulated, what is claimed, what was seen, and whether it keeps its threshold; exit status 1 where one
does not. `--scale 0.1` draws a tenth as many, for a quick look. All seeds are fixed. A part is drawn in pieces of at most
PIECE, which `--processes` share; `--seconds` ends the run after that time, with the parts of which every piece is there.
`calibration_table.py` makes the table of benchmarks/README.md from FILE.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, exp, nan, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from scipy.signal import lfilter
from scipy.special import ndtri
from scipy.stats import binom

from optpipe.core.load import LoadSpec, Scenario
from optpipe.core.measurement import LatencySummary, Measurement, Reason, Subject, Validity
from optpipe.core.metrics.measured import ENERGY, THROUGHPUT, PairMetric
from optpipe.core.metrics.sampled import Rule
from optpipe.core.metrics.sections import Sense
from optpipe.core.percentile_names import format_percentile_name
from optpipe.core.quantity import Dimension, Estimate
from optpipe.core.verdict import Blocker, Observation, ScaledTail, Verdict
from optpipe.deploy.live import judge_latencies
from optpipe.deploy.proof import Answer
from optpipe.evaluate.result import ScoreRule
from optpipe.evaluate.tasks.contract import measure_scores
from optpipe.evaluate.tasks.detection import Detection
from optpipe.evaluate.tasks.masks import encode_mask
from optpipe.evaluate.tasks.sampled import make_sampled_score
from optpipe.evaluate.tasks.segmentation import Segmentation
from optpipe.evaluate.tasks.texts import Embedding, TokenClassification
from optpipe.evaluate.tasks.values import MultiLabel
from optpipe.measure.compare import compare_measurements
from optpipe.measure.figures import SampledWindow
from optpipe.measure.groups import (
    ProcessGroup,
    RecordedMeasurement,
    compare_groups,
    find_run_scatter,
    group_processes,
)
from optpipe.measure.pair import run_interleaved
from optpipe.measure.race import race_builds
from optpipe.measure.search import Slo, find_highest_rate
from optpipe.measure.validity import LIMITS, ValidityEvidence, find_reasons
from optpipe.measure.worker.loops import MAX_SAMPLE_FACTOR
from optpipe.models.artifacts.judged_build import JudgedBuild
from optpipe.preprocess.throughput import ROUNDS as DALI_ROUNDS
from optpipe.signoff.build_evidence import BuildEvidence
from optpipe.signoff.evidence import observe
from optpipe.signoff.judge import decide_overall_verdict, judge_criteria
from optpipe.signoff.policy import Criterion
from optpipe.stats.means import (
    Look,
    compute_look_confidence,
    estimate_run_scatter,
    mean_from_runs,
    mean_from_values,
    predict_next_upper_bound,
    reject_by_holm,
    subtract_across_runs,
)
from optpipe.stats.paired import (
    Groups,
    Share,
    bound_absent_effect,
    compare_macro_f1,
    compute_macro_f1,
    compute_share_interval,
    compute_snr_interval,
    figure_from_samples,
    find_largest_effect,
)
from optpipe.stats.percentiles import (
    choose_sample_count,
    count_queries_needed,
    count_samples_needed,
    count_transient_queries,
    summary_from_ns,
)
from optpipe.stats.ratio import Change, ratio_from_rounds
from optpipe.stats.stability import (
    bound_repeated_change,
    compute_end_change,
    compute_variation_interval,
)

SUBJECT = Subject("a", "simulated", "fp32", "cpu")
COVERAGE = 0.93
"""Least coverage of intervals at 95 %."""


@dataclass
class Row:
    """One line of the table."""

    what: str
    claimed: str
    seen: float
    draws: int
    """Repetitions of the simulation; 0 if the rate is enumerated."""
    least: float = 0.0
    most: float = 1.0
    note: str = ""

    @property
    def error(self) -> float:
        """Standard deviation of `seen` over repetitions of the simulation."""
        if not self.draws:
            return 0.0
        return sqrt(max(self.seen * (1 - self.seen), 1 / self.draws) / self.draws)

    @property
    def kept(self) -> bool:
        return (
            np.isnan(self.seen)
            or self.least - 2 * self.error <= self.seen <= self.most + 2 * self.error
        )

    @property
    def text(self) -> list[str]:
        seen = "withheld" if np.isnan(self.seen) else f"{self.seen:.1%} ± {self.error:.1%}"
        bound = (
            f"≥ {self.least:.0%}" if self.least else f"≤ {self.most:.1%}" if self.most < 1 else ""
        )
        return [self.what, self.claimed, seen, bound, "" if self.kept else "BROKEN", self.note]


def share(hits, least=0.0, most=1.0, what="", claimed="", note=""):
    hits = np.asarray(hits, dtype=float)
    seen = float(hits.mean()) if len(hits) else nan
    return Row(what, claimed, seen, len(hits), least, most, note)


def autoregressive(generator, phi, count):
    noise = generator.standard_normal(count + 1000) * sqrt(1 - phi * phi)
    return lfilter([1], [1, -phi], noise)[1000:]


# ---------------------------------------------------------------- percentiles


def percentiles(generator, scale) -> Iterator[Row]:
    """Intervals of p50, p90 and p99 inside one process; of a run that goes on until they can be shown."""
    for phi in (0.0, 0.5, 0.7, 0.9, 0.95, 0.99):
        for count in (100, 700, 5000):
            yield from percentile_rows(
                generator, phi, count, round((2000 if count == 100 else 500) * scale)
            )
        yield from percentile_rows(generator, phi, None, round(250 * scale))


def percentile_rows(generator, phi, count, repetitions):
    covered: dict[float, list[bool]] = {50.0: [], 90.0: [], 99.0: []}
    for _ in range(repetitions):
        values = np.exp(
            0.02 * autoregressive(generator, phi, count or 4 * count_samples_needed(99.0))
        )
        if count is None:
            first = count_samples_needed(99.0)
            values = values[: choose_sample_count(values[:first], 99.0, MAX_SAMPLE_FACTOR * first)]
        summary = summary_from_ns(values * 1e6, tuple(covered))
        for percent, hits in covered.items():
            if (found := summary.percentile(percent)) is not None:
                truth = 1e6 * float(np.exp(0.02 * ndtri(percent / 100)))
                hits.append(found.low <= truth <= found.high)
    length = "as many as p99 asks for" if count is None else f"{count} samples"
    for percent, hits in covered.items():
        if count is not None and count < count_samples_needed(percent):
            continue
        shown = len(hits) / repetitions
        least = COVERAGE if phi <= 0.9 and shown > 0.05 else 0.0
        yield share(
            hits,
            least,
            what=f"p{percent:g}, correlation {phi:g}, {length}",
            claimed="95 %",
            note=f"shown {shown:.0%}",
        )


# ------------------------------------------------------- processes and verdicts


def measured_process(generator, between, inside, level=10.0, count=700):
    """The p50 in ms of one process of `count` samples: its own level, and the noise inside it."""
    samples = level * np.exp(
        between * generator.standard_normal() + inside * generator.standard_normal(count)
    )
    return summary_from_ns(samples * 1e6, (50.0,)).percentiles["p50"].value / 1e6


def processes(generator, scale) -> Iterator[Row]:
    """The interval over fresh processes: of a fixed number, in several runs."""
    for between in (0.0, 0.005, 0.013, 0.02):
        hits = []
        for _ in range(round(600 * scale)):
            figures = [measured_process(generator, between, 0.01, count=200) for _ in range(5)]
            low, high = mean_from_values(figures).interval(0.95)
            hits.append(low <= 10.0 * np.exp(between**2 / 2) <= high)
        yield share(
            hits, COVERAGE, what=f"p50 over 5 processes, scatter {between:.1%}", claimed="95 %"
        )
    for runs in (2, 3, 6):
        for between_runs in (0.0, 0.005, 0.01, 0.02):
            for between in (0.002, 0.005, 0.01, 0.02):
                hits = []
                for _ in range(round(1000 * scale)):
                    groups = [
                        10
                        + generator.normal(0, 10 * between_runs)
                        + generator.normal(0, 10 * between, 5)
                        for _ in range(runs)
                    ]
                    low, high = mean_from_runs(groups).interval(0.95)
                    hits.append(low <= 10 <= high)
                what = f"mean over {runs} runs of 5 processes, processes scatter {between:.1%}, runs {between_runs:.1%}"
                yield share(hits, COVERAGE, what=what, claimed="95 %")

    for sizes in ((20, 5, 5), (10, 1, 1), (40, 3, 3), (40, 3)):
        for between_runs in (0.0, 0.5, 1.0, 2.0):
            hits = []
            for _ in range(round(1000 * scale)):
                groups = [
                    generator.normal(10, 0.1 * between_runs) + generator.normal(0, 0.1, size)
                    for size in sizes
                ]
                low, high = mean_from_runs(groups).interval(0.95)
                hits.append(low <= 10 <= high)
            what = f"mean over runs of {', '.join(map(str, sizes))} processes, runs scatter {between_runs:g} times as much"
            yield share(hits, COVERAGE, what=what, claimed="95 %")
    limit = latency_limit(50, 10e6)
    for between in (0.013, 0.02):
        verdicts = []
        for _ in range(round(600 * scale)):
            figures = 10 * (1 + between * generator.standard_t(3, 5) / sqrt(3))
            tries = (replace(planted(each), process=at) for at, each in enumerate(figures))
            verdicts.append(judge_tries(limit, tuple(tries)))
        yield from wrong_verdicts(
            verdicts, f"5 processes that scatter {between:.1%} as Student's t3, on the limit"
        )
    for between in (0.001, 0.02):
        peaks = generator.normal(500, 500 * between, (round(4000 * scale), 6))
        above = [
            row[-1] > max(max(row[:-1]), predict_next_upper_bound(list(row[:-1]), 0.95))
            for row in peaks
        ]
        yield share(
            above,
            most=0.03,
            what=f"memory of the sixth process above its bound, scatter {between:.1%}",
            claimed="≤ 2.5 %",
        )

    for spread in (0.3, 0.5):
        for n in (20, 60, 256):
            peaks = np.exp(spread * generator.standard_normal((round(2000 * scale), n + 1)))
            above = [
                row[-1] > max(max(row[:-1]), predict_next_upper_bound(list(row[:-1]), 0.975))
                for row in peaks
            ]
            what = f"largest error of the next sample above its bound, {n} samples, spread e^{spread:g}"
            yield share(above, most=0.05 if n < 60 else 0.025, what=what, claimed="≤ 2.5 % from 60")


def criteria(generator, scale) -> Iterator[Row]:
    """A policy of ten criteria, each judged by five processes: PASS needs all, FAIL is Holm's."""
    level = 0.025
    for name, inside in (
        ("all on their limits", 0),
        ("one on its limit, nine 10 errors inside", 9),
    ):
        wrong_pass, wrong_fail = [], []
        for _ in range(round(3000 * scale)):
            shifts = [0.0] * (10 - inside) + [-10.0] * inside
            means = [
                mean_from_values(list(shift * 0.2 / sqrt(5) + generator.normal(10, 0.2, 5)))
                for shift in shifts
            ]
            wrong_pass.append(all(each.interval(0.95)[1] <= 10 for each in means))
            wrong_fail.append(
                any(reject_by_holm([each.compute_p_value_above(10) for each in means], level))
            )
        yield share(
            wrong_pass, most=0.03, what=f"PASS, ten criteria, {name}", claimed="at most 2.5 %"
        )
        yield share(
            wrong_fail, most=0.03, what=f"FAIL, ten criteria, {name}", claimed="at most 2.5 %"
        )


def signoffs(generator, scale) -> Iterator[Row]:
    """The same policy through the sign-off's own functions, from measurements to verdict; processes scatter up to 2 %."""
    limit = Criterion("latency", "p50", Sense.AT_MOST, 10e6, Dimension.TIME)
    for between in (0.005, 0.013, 0.02):
        for name, shift, inside in (
            ("all on their limits", 1.0, 0),
            ("one on its limit, nine 20 % inside", 0.8, 9),
        ):
            verdicts = []
            for _ in range(round(400 * scale)):
                levels = [10.0] * (10 - inside) + [10.0 * shift] * inside
                observed = [
                    (limit, [observed_load(generator, limit, level, between)]) for level in levels
                ]
                verdicts.append(decide_overall_verdict(judge_criteria(observed, 0.95)))
            what = f"ten criteria, scatter {between:.1%}, {name}"
            yield share(
                [each == "PASS" for each in verdicts],
                most=0.025,
                what=f"sign-off: PASS, {what}",
                claimed="≤ 2.5 %",
            )
            yield share(
                [each == "FAIL" for each in verdicts],
                most=0.025,
                what=f"sign-off: FAIL, {what}",
                claimed="≤ 2.5 %",
            )


def two_speeds(generator, scale) -> Iterator[Row]:
    """Verdicts on processes that run at two speeds 5 % apart, scattering 0.3 % about each; and on those that do not."""
    limit = Criterion("latency", "p50", Sense.AT_MOST, 10e6, Dimension.TIME)
    for count in (5, 10):
        for slow in (0.1, 0.3, 0.5, 0.7, 0.9):
            at, held = f"{count} processes, {slow:.0%} of them 5 % slower", []
            for margin in (0.0, 0.01, 0.03):
                found = [
                    [
                        judged(generator, limit, 10 / (1 + side * margin), 0.003, count, slow)
                        for side in (1, -1)
                    ]
                    for _ in range(round(300 * scale))
                ]
                what = f"{at}, {margin:.0%}"
                wrong = [keeps.verdict == "FAIL" for keeps, _ in found]
                yield share(
                    wrong, most=0.03, what=f"FAIL of {what} inside the limit", claimed="≤ 2.5 %"
                )
                wrong = [breaks.verdict == "PASS" for _, breaks in found]
                yield share(
                    wrong, most=0.03, what=f"PASS of {what} beyond the limit", claimed="≤ 2.5 %"
                )
                truth = 10e6 / (1 + margin)
                held += [keeps.ci[0] <= truth <= keeps.ci[1] for keeps, _ in found]
            yield share(
                held,
                COVERAGE,
                what=f"interval of sign-off, bench and compare over {at}",
                claimed="95 %",
            )
    for slow in (0.1, 0.3, 0.5, 0.7):
        at = f"5 processes, {slow:.0%} of them 12 % slower, of which 80 % left out for drift"
        sides = [(10 / (1 + side * 0.03), 0.003, 5, slow, 0.12, 0.8) for side in (1, -1)]
        found = [
            [judged(generator, limit, *side) for side in sides] for _ in range(round(300 * scale))
        ]
        wrong = [keeps.verdict == "FAIL" for keeps, _ in found]
        yield share(wrong, most=0.03, what=f"FAIL of {at}, 3% inside the limit", claimed="≤ 2.5 %")
        wrong = [breaks.verdict == "PASS" for _, breaks in found]
        yield share(wrong, most=0.03, what=f"PASS of {at}, 3% beyond the limit", claimed="≤ 2.5 %")
    for between, margin, count in (
        (0.0009, 0.03, 5),
        (0.003, 0.03, 5),
        (0.0009, 0.02, 10),
        (0.003, 0.02, 10),
        (0.013, 0.03, 10),
    ):
        found = [
            judged(generator, limit, 10 / (1 + margin), between, count).verdict == "PASS"
            for _ in range(round(300 * scale))
        ]
        what = f"PASS of {count} processes at one speed, scatter {between:.2%}, {margin:.0%} inside the limit"
        yield share(found, 0.95, what=what, claimed="power")


def seen_speeds(generator, scale) -> Iterator[Row]:
    """Verdicts on a build at two speeds that are farther apart than assumed, where some process shows either; and regressions to it."""
    limit = latency_limit(50, 10e6)
    loss = Criterion("regression", "p50", Sense.AT_MOST, 0.0, Dimension.SHARE)

    def draw(count, gap, slow, artifact="a"):
        late = generator.random(count) < slow
        figures = 10 * np.exp(0.003 * generator.standard_normal(count)) * (1 + gap * late)
        subject = replace(SUBJECT, artifact=artifact)
        return tuple(
            RecordedMeasurement(replace(planted(each), subject=subject, process=at), "r")
            for at, each in enumerate(figures / (1 + gap * slow))
        )

    for gap in (0.05, 0.08, 0.12):
        for count, slow in ((19, 0.2), (19, 0.3), (19, 0.8), (40, 0.1), (40, 0.2)):
            verdicts, losses = [], []
            for _ in range(round(600 * scale)):
                mine = draw(count, gap, slow)
                verdicts.append(judged_tries(limit, mine)[0])
                found = compare_groups(
                    ProcessGroup(mine), ProcessGroup(draw(count, 0.0, 0.0, "b")), "p50", None
                )
                losses.append(judge_loss(loss, found))
            what = f"{count} processes, {slow:.0%} of them {gap:.0%} slower, none left out"
            none = (1 - slow) ** count + slow**count
            note = f"one speed was drawn alone in {none:.1%}"
            yield from wrong_verdicts(verdicts, f"on its limit, {what}", note)
            yield from wrong_verdicts(losses, f"as slow as a build with one speed, {what}", note)


def judge_loss(limit, found, number=1):
    """The verdict on the ratio of a build's figure to its baseline's, at its look."""
    assert not isinstance(found, str), found
    look = Look(number)
    (low, high), _ = found.interval(look.compute_confidence(0.95), 0.95)
    seen = Observation(
        exp(found.change.value) - 1,
        low - 1,
        high - 1,
        tail=ScaledTail(found.change, of_logarithm=True),
        processes=found.speed.processes,
        left_out_gap=found.speed.gap,
    )
    return judge_criteria([(limit, [seen])], 0.95, {"regression": look})[0].verdict


def looks(generator, scale) -> Iterator[Row]:
    """A build on its limit, measured in runs of five processes and judged after each until a verdict is decided."""
    limit = Criterion("latency", "p50", Sense.AT_MOST, 10e6, Dimension.TIME)
    build = JudgedBuild("m", "a", "simulated", "fp32")
    for most, between_runs, slow, size in (
        (10, 0.0, 0.0, 5),
        (10, 0.01, 0.0, 5),
        (20, 0.0, 0.0, 5),
        (20, 0.01, 0.0, 5),
        (10, 0.0, 0.3, 5),
        (20, 0.0, 0.0, 2),
        (20, 0.02, 0.0, 2),
    ):
        verdicts = []
        for _ in range(round(300 * scale)):
            tries: list[RecordedMeasurement] = []
            for look in range(1, most + 1):
                own = np.exp(generator.normal(0, between_runs)) * 10
                is_slow = generator.random(size) < slow
                figures = (
                    own
                    * np.exp(0.013 * generator.standard_normal(size))
                    * (1 + 0.05 * is_slow)
                    / (1 + 0.05 * slow)
                )
                tries += [
                    RecordedMeasurement(replace(planted(each), process=at), f"r{look}")
                    for at, each in enumerate(figures)
                ]
                spent = {"bench": Look(look)}
                seen = observe(limit, BuildEvidence(build, tuple(tries), looks=spent))
                verdict = judge_criteria([(limit, seen)], 0.95, spent)[0].verdict
                if verdict != "INCONCLUSIVE":
                    break
            verdicts.append(verdict)
        what = f"on its limit, up to {most} looks at runs of {size}, which scatter {between_runs:.0%}, {slow:.0%} of processes slow"
        for wrong in ("PASS", "FAIL"):
            yield share(
                [each == wrong for each in verdicts],
                most=0.025,
                what=f"{wrong} {what}",
                claimed="≤ 2.5 %",
            )
    for between, count, least in (
        (0.005, 5, 0.9), (0.013, 5, 0.0), (0.013, 6, 0.0), (0.013, 7, 0.9), (0.013, 8, 0.9), (0.02, 8, 0.0), (0.02, 10, 0.9),
    ):  # fmt: skip
        found = [
            judged(generator, limit, 10 / 1.03, between, count).verdict == "PASS"
            for _ in range(round(400 * scale))
        ]
        yield share(
            found,
            least,
            what=f"PASS 3 % inside, scatter {between:.1%}, {count} processes, first look",
            claimed="power",
        )


def evaluations(generator, scale) -> Iterator[Row]:
    """A build that loses exactly as much as allowed: evaluated on other samples until it is decided, and the best of several."""
    for count, lost, won in ((300, 0.05, 0.03), (1000, 0.02, 0.01), (1000, 0.01, 0.01)):
        yield from enumerate_looks(count, lost, won, most=30 if scale >= 0.3 else 5)
    n, lost, won = 1000, 0.02, 0.01
    truth, shares = lost - won, [lost, won, 1 - lost - won]
    for builds in (1, 2, 4, 8, 16):
        ends = []
        for _ in range(round(2000 * scale)):
            drops = [
                paired_drop(*map(int, each)) for each in generator.multinomial(n, shares, builds)
            ]
            best = min(drops, key=lambda drop: drop.value)
            ends.append(judge_drop(best, truth, Look(builds=builds)))
        yield from wrong_verdicts(
            ends, f"the best of {builds} builds on their limit, one evaluation"
        )
    for builds, expected in ((1, 0.01), (8, 0.01)):
        ends = []
        for _ in range(round(500 * scale)):
            drop = paired_drop(*map(int, generator.multinomial(3000, [0.005, 0.003, 0.992])))
            ends.append(judge_drop(drop, expected, Look(builds=builds)) == "PASS")
        what = f"PASS 0.8 points inside, 3000 images, one of {builds} builds"
        yield share(ends, 0.9, what=what, claimed="power")


def chosen(generator, scale) -> Iterator[Row]:
    """The fastest of several builds, each exactly on the limit, that one workspace measured: signed off by the figures that chose it."""

    def judge_fastest(levels, between, count, looks):
        levels = np.asarray(levels)[:, None]
        noise = between * generator.standard_normal((len(levels), count)) - between**2 / 2
        figures = 10 * levels * np.exp(noise)
        best = figures[figures.mean(axis=1).argmin()]
        tries = [replace(planted(each), process=at) for at, each in enumerate(best)]
        return judge_tries(limit, tries, looks=looks)

    limit = latency_limit(50, 10e6)
    for builds in (2, 8, 30):
        for count in (5, 10, 20):
            for between in (0.005, 0.02, 0.04):
                looks = {"bench": Look(builds=builds)}
                ends = [
                    judge_fastest([1.0] * builds, between, count, looks)
                    for _ in range(round(400 * scale))
                ]
                what = (
                    f"the fastest of {builds} builds, {count} processes that scatter {between:.1%}"
                )
                yield from wrong_verdicts(ends, what)
    for builds, count, inside, least in ((3, 7, 0.03, 0.9), (8, 10, 0.03, 0.9)):
        levels = [1 / (1 + inside)] + [1.1] * (builds - 1)
        looks = {"bench": Look(builds=builds)}
        ends = [judge_fastest(levels, 0.013, count, looks) for _ in range(round(400 * scale))]
        what = f"PASS {inside:.0%} inside, scatter 1.3%, {count} processes, one of {builds} builds"
        yield share([each == "PASS" for each in ends], least, what=what, claimed="power")
    for between in (0.02, 0.04):
        ends = [
            judge_fastest([1.0] * 16, between, 10, {"bench": Look()})
            for _ in range(round(400 * scale))
        ]
        what = f"the fastest of 16 builds, measured in a workspace for each, 10 processes that scatter {between:.1%}"
        yield from wrong_verdicts(ends, what, most=1.0)


def judge_drop(drop, limit, look, hidden=0.0):
    """The verdict on one drop of accuracy at its look, as `judge_criteria` gives it; `hidden` is what calibration may hide."""
    criterion = Criterion("accuracy", "maximum_drop", Sense.AT_MOST, 100 * limit, Dimension.POINTS)
    low, high = (100 * each for each in drop.interval(look.compute_confidence(0.95)))
    seen = Observation(100 * drop.value, low, high + 100 * hidden, tail=ScaledTail(drop, 100))
    return judge_criteria([(criterion, [seen])], 0.95, {"evaluate": look})[0].verdict


def tables(generator, scale) -> Iterator[Row]:
    """`compare` of ten equal builds, measured in one run or in ten: some false claim in the table."""
    for between, runs, between_runs, slow in (
        (0.005, 1, 0.0, 0.0),
        (0.02, 1, 0.0, 0.0),
        (0.01, 10, 0.01, 0.0),
        (0.01, 20, 0.01, 0.0),
        (0.005, 1, 0.0, 0.05),
        (0.005, 1, 0.0, 0.12),
    ):
        claims = []
        for _ in range(round(200 * scale)):
            measured = []
            for build in range(10):
                for run in range(max(1, runs // 10)):
                    own = 10 * np.exp(generator.normal(0, between_runs))
                    for process in range(5):
                        late = generator.random() < 0.3
                        figure = own * np.exp(between * generator.standard_normal())
                        found = planted(figure * (1 + slow * late))
                        subject = replace(
                            found.subject,
                            artifact=f"a{build}",
                            backend=f"b{build}",
                            model="m",
                            precision="fp32",
                        )
                        name = f"r{build}-{run}" if runs > 1 else "r"
                        measured.append(
                            RecordedMeasurement(
                                replace(found, subject=subject, process=process, id=f"m{build}"),
                                name,
                            )
                        )
            table = compare_measurements(measured, baseline="b", against=tuple(measured[:5]))
            claims.append(
                any(row.change in ("faster", "slower") or row.dominated_by for row in table.rows)
                or any(table.best.values())
            )
        where = (
            "one run"
            if runs == 1
            else f"{runs // 10} runs for each, which scatter {between_runs:.0%}"
        )
        if slow:
            where += f", 30 % of processes {slow:.0%} slower"
        what = f"some claim among ten equal builds, scatter {between:.1%}, {where}"
        yield share(claims, most=0.015, what=what, claimed="1 %")
    for builds, faster, between in ((10, 0.10, 0.005), (2, 0.06, 0.005), (2, 0.10, 0.013)):
        shown = []
        for _ in range(round(100 * scale)):
            measured = []
            for build in range(builds):
                level = 10 / (1 + faster * (build == 0))
                for process in range(5):
                    found = planted(level * np.exp(between * generator.standard_normal()))
                    subject = replace(found.subject, artifact=f"a{build}", backend=f"b{build}")
                    subject = replace(subject, model="m", precision="fp32")
                    one = replace(found, subject=subject, process=process, id=f"m{build}")
                    measured.append(RecordedMeasurement(one, "r"))
            shown.append(compare_measurements(measured).best["latency"] is not None)
        what = f"the fastest of {builds} is claimed: {faster:.0%} faster, scatter {between:.1%}"
        yield share(shown, 0.9, what=what, claimed="power")


def other_runs(generator, scale) -> Iterator[Row]:
    """`signoff recheck` and a regression: an unchanged build against a run of another day, runs' scatter known from five builds."""
    for between_runs in (0.0, 0.005, 0.01, 0.02):
        changed, covered = [], []
        for _ in range(round(1000 * scale)):

            def processes_of_a_run(count=5, sd=between_runs):
                return list(
                    10 * np.exp(generator.normal(0, sd) + generator.normal(0, 0.005, count))
                )

            scatter = estimate_run_scatter(
                [[processes_of_a_run(), processes_of_a_run()] for _ in range(5)]
            )
            sides = [mean_from_values(processes_of_a_run()).take_logarithm() for _ in range(2)]
            change = subtract_across_runs(sides[0], sides[1], (1, 1), scatter)
            low, high = change.interval(0.99)
            changed.append(low > 0 or high < 0)
            low, high = change.interval(0.95)
            covered.append(low <= 0 <= high)
        what = f"unchanged build in another run, processes scatter 0.5 %, runs {between_runs:.1%}"
        yield share(changed, most=0.015, what=f"change claimed: {what}", claimed="1 %")
        yield share(covered, COVERAGE, what=f"interval of the ratio: {what}", claimed="95 %")


def requests(generator, scale) -> Iterator[Row]:
    """p99 of all requests over the long run of processes, with its interval over a few of them."""
    for slow, between in ((0.0, 0.005), (0.0, 0.013), (0.0, 0.02), (0.2, 0.003), (0.2, 0.01)):
        levels = between * generator.standard_normal(400_000) + np.log1p(0.05) * (
            generator.random(400_000) < slow
        )
        truth = 10e6 * float(
            np.quantile(np.exp(levels + 0.01 * generator.standard_normal(400_000)), 0.99)
        )
        for count in (3, 5, 10):
            found = []
            for _ in range(round(300 * scale)):
                tries = []
                for process in range(count):
                    level = between * generator.standard_normal() + np.log1p(0.05) * (
                        generator.random() < slow
                    )
                    latencies = 10e6 * np.exp(level + 0.01 * generator.standard_normal(700))
                    one = replace(planted(10.0, percent=99.0), process=process)
                    tries.append(RecordedMeasurement(one, "r", latencies=latencies))
                found.append(ProcessGroup(tuple(tries)).estimate("p99"))
            at = f"{count} processes, scatter {between:.1%}" + (
                ", 20 % of them 5 % slower" if slow else ""
            )
            held = [one.low <= truth <= one.high for one in found]
            least = COVERAGE if count > 3 or between < 0.01 else 0.88
            yield share(held, least, what=f"p99 of all requests, {at}", claimed="95 %")

    def draw_tailed(count):
        tail = 1 + 0.1 * generator.pareto(2.5, count)
        late = generator.random(count) < 0.03
        return 10e6 * np.exp(0.01 * generator.standard_normal(count)) * np.where(late, tail, 1)

    truth = float(np.quantile(draw_tailed(4_000_000), 0.99))
    limit = latency_limit(99, truth)
    for count in (3, 5, 10):
        results = []
        for _ in range(round(300 * scale)):
            tries = []
            for process in range(count):
                one = replace(planted(10.0, percent=99.0), process=process, samples=700)
                level = np.exp(0.005 * generator.standard_normal())
                tries.append(RecordedMeasurement(one, "r", latencies=level * draw_tailed(700)))
            results.append(judged_tries(limit, tuple(tries)))
        at = f"{count} processes, 3 % of the requests have a Pareto tail"
        held = [low <= truth <= high for _, bounds in results if bounds for low, high in [bounds]]
        yield share(held, COVERAGE, what=f"p99 of all requests, {at}", claimed="95 %")
        yield from wrong_verdicts([verdict for verdict, _ in results], f"p99 on its limit, {at}")


def judged(generator, limit, *processes):
    """The criterion's result on processes as `observed_load` draws them."""
    return judge_criteria([(limit, [observed_load(generator, limit, *processes)])], 0.95)[0]


def left_out(generator, scale) -> Iterator[Row]:
    """A build on its limit over all of its processes, of which a share is slower and INVALID; and one whose requests stall."""
    limit = Criterion("latency", "p50", Sense.AT_MOST, 10e6, Dimension.TIME)
    for code in ("drift", "throttled"):
        reasons = [Reason(code, "", "", invalidates=True)]
        for slow, tries in ((0.2, 10), (0.4, 10), (0.6, 10), (0.75, 10), (0.75, 20), (0.5, 40)):
            verdicts = []
            for _ in range(round(300 * scale)):
                is_slow = generator.random(tries) < slow
                level = 10 / (1 + 0.12 * slow)
                figures = level * np.exp(0.005 * generator.standard_normal(tries))
                measured = tuple(
                    replace(
                        planted(each * (1 + 0.12 * late), reasons=reasons if late else ()),
                        process=at,
                    )
                    for at, (each, late) in enumerate(zip(figures, is_slow, strict=True))
                )
                verdicts.append(judge_tries(limit, measured))
            what = (
                f"on its limit, {slow:.0%} of {tries} processes 12 % slower and left out ({code})"
            )
            none = (
                1 - slow
            ) ** tries  # a speed 12 % away that no process had is outside the assumption
            note = f"none of them was drawn in {none:.1%}" if none > 0.005 else ""
            yield from wrong_verdicts(verdicts, what, note, most=max(0.025, none))
    limit = replace(limit, metric="p99")
    for share_of_requests, length, percent, slower in (
        (0.015, 30, 99.0, 0.12), (0.011, 1, 99.0, 0.12), (0.06, 1, 95.0, 0.3),
    ):  # fmt: skip
        many = stalled_requests(generator, 2_000_000, share_of_requests, length, slower)
        limit = latency_limit(f"{percent:g}", float(np.quantile(many, percent / 100)))
        for tries in (3, 5, 10, 20):
            verdicts, invalid = [], []
            for _ in range(round(200 * scale)):
                drawn, raw = [], []
                for process in range(tries):
                    raw.append(stalled_requests(generator, 700, share_of_requests, length, slower))
                    found = codes(np.log(raw[-1] / 1e6)) & {"drift", "bimodal", "dispersion"}
                    reasons = [Reason(code, "", "", invalidates=True) for code in found]
                    one = replace(planted(10.0, reasons=reasons), process=process)
                    one = replace(one, latency_ns=summary_from_ns(raw[-1], (50.0, percent)))
                    drawn.append(one)
                    invalid.append(bool(found))
                verdicts.append(judge_tries(limit, tuple(drawn), raw))
            what = f"{limit.metric} on its limit, {share_of_requests:.1%} of requests {slower:.0%} slower, {length} in a row, {tries} tries"
            note = f"{np.mean(invalid):.0%} left out"
            yield from wrong_verdicts(verdicts, what, note)


def energy(generator, scale) -> Iterator[Row]:
    """Energy over processes by a sensor that reads up to 5 % too low or too high in all of them."""
    for error in (-0.05, 0.0, 0.05):
        for between in (0.005, 0.013):
            held = []
            for _ in range(round(400 * scale)):
                readings = (1 + error) * (1 + between * generator.standard_normal(5))
                tries = tuple(
                    RecordedMeasurement(
                        replace(
                            planted(10.0), process=at, energy_j_per_image=Estimate(float(each))
                        ),
                        "r",
                    )
                    for at, each in enumerate(readings)
                )
                low, high = ProcessGroup(tries).estimate("energy").interval
                held.append(low <= 1 <= high)
            what = f"energy over 5 processes, scatter {between:.1%}, sensor {error:+.0%}"
            yield share(held, COVERAGE, what=what, claimed="95 %")

    for error in (-0.05, 0.0, 0.05):
        for noise in (0.005, 0.05):
            held = []
            for _ in range(round(400 * scale)):
                times_s = np.arange(0, 12, 0.2)
                watts = 400 * (1 + error) * (1 + noise * generator.standard_normal(len(times_s)))
                machine = pl.DataFrame(
                    {
                        "time_ns": (times_s * 1e9).astype(np.int64),
                        "gpu_energy_mj": np.cumsum(watts * 0.2 * 1e3).astype(np.int64),
                    }
                )
                queries = {"images": [4800], "start_ns": [0], "end_ns": [12_000_000_000]}
                window = SampledWindow(LoadSpec(1), pl.DataFrame(queries), machine)
                found = ENERGY.compute(window)
                assert isinstance(found, Estimate)
                low, high = found.interval
                held.append(low <= 1 <= high)
            what = f"energy of one process, power scatters {noise:.1%}, sensor {error:+.0%}"
            yield share(held, COVERAGE, what=what, claimed="95 %")


def stalled_requests(generator, count, slow, length, slower):
    """Latencies in ns around 10 ms; stalls of `length` requests make a share `slow` of them slower by a share `slower`."""
    begins = np.flatnonzero(generator.random(count + length) < slow / length)
    late = np.zeros(count + 2 * length, bool)
    for at in range(length):
        late[begins + at] = True
    return (
        10e6 * np.exp(0.01 * generator.standard_normal(count)) * (1 + slower * late[length:-length])
    )


def judge_tries(limit, measured, raw=None, looks=None):
    tries = tuple(
        RecordedMeasurement(one, "r", latencies=None if raw is None else raw[at])
        for at, one in enumerate(measured)
    )
    build = JudgedBuild("m", "a", "simulated", "fp32")
    seen = observe(limit, BuildEvidence(build, tries, looks=looks or {}))
    return judge_criteria([(limit, seen)], 0.95, looks)[0].verdict


def wrong_verdicts(verdicts, what, note="", most=0.025):
    """The rates of PASS and FAIL of a build that is exactly on its limit."""
    for wrong in ("PASS", "FAIL"):
        hits = [each == wrong for each in verdicts]
        claimed = "≤ 2.5 %" if most < 1 else "nothing: an assumption fails"
        yield share(hits, most=most, what=f"{wrong}: {what}", claimed=claimed, note=note)


DRIFT = [Reason("drift", "", "", invalidates=True)]


def observed_load(generator, limit, level, between, count=5, slow=0.0, gap=0.05, left_out=0.0):
    """What a sign-off sees of one load: processes of a build whose long run is `level` ms.

    A share `slow` of them is slower by `gap`, and a share `left_out` of these is INVALID for drift.
    """
    is_slow = generator.random(count) < slow
    figures = level * np.exp(between * generator.standard_normal(count) - between**2 / 2)
    figures *= (1 + gap * is_slow) / (1 + gap * slow)
    drifts = is_slow & (generator.random(count) < left_out)
    tries = tuple(
        RecordedMeasurement(
            replace(planted(each, reasons=DRIFT if drifts[at] else ()), process=at), "r"
        )
        for at, each in enumerate(figures)
    )
    build = JudgedBuild("m", "a", "simulated", "fp32")
    found = observe(limit, BuildEvidence(build, tries))
    assert not isinstance(found, Blocker)
    return found[0]


def baselines(generator, scale) -> Iterator[Row]:
    """A build that is exactly as much slower as allowed, judged again with each baseline that is approved, until it is decided."""
    limit = Criterion("regression", "p50", Sense.AT_MOST, 0.03, Dimension.SHARE)

    def measure(run, level, between_runs, artifact="a"):
        own = 10 * level * np.exp(generator.normal(0, between_runs))
        figures = own * np.exp(0.005 * generator.standard_normal(5))
        subject = replace(SUBJECT, artifact=artifact)
        return tuple(
            RecordedMeasurement(replace(planted(each), subject=subject, process=at), run)
            for at, each in enumerate(figures)
        )

    for between_runs in (0.005, 0.01, 0.02):
        for most in (1, 5, 20):
            verdicts = []
            for _ in range(round(200 * scale)):
                judged_build = measure("r", 1.03, between_runs)
                # two other builds were measured twice, which shows how runs differ
                known = tuple(
                    one
                    for name in "bc"
                    for run in "12"
                    for one in measure(name + run, 1.0, between_runs, name)
                )
                for look in range(1, most + 1):
                    approved = measure(f"b{look}", 1.0, between_runs)
                    scatter = find_run_scatter(group_processes(known), "p50")
                    found = compare_groups(
                        ProcessGroup(judged_build), ProcessGroup(approved), "p50", scatter
                    )
                    verdict = judge_loss(limit, found, look)
                    if verdict != "INCONCLUSIVE":
                        break
                verdicts.append(verdict)
            what = (
                f"regression on its limit, up to {most} baselines, runs scatter {between_runs:.1%}"
            )
            yield from wrong_verdicts(verdicts, what)


# -------------------------------------------------------------------- accuracy


def accuracy(generator, scale) -> Iterator[Row]:
    """Shares, differences of pairs, macro F1."""
    for n in (100, 800):
        for truth in (0.9, 0.99, 0.995):
            hits = generator.binomial(n, truth, round(2000 * scale))
            found = {int(each): compute_share_interval(int(each), n) for each in set(hits)}
            held = [found[int(each)][0] <= truth <= found[int(each)][1] for each in hits]
            yield share(held, COVERAGE, what=f"top-1 of {truth:.1%}, {n} images", claimed="95 %")
            wrong = [Share(int(each), n).compute_p_value_below(truth) <= 0.025 for each in hits]
            yield share(
                wrong,
                most=0.03,
                what=f"FAIL of a top-1 on its limit of {truth:.1%}, {n} images",
                claimed="at most 2.5 %",
            )
    for n in (30, 100, 300, 1000):
        for lost, won in ((0.02, 0.0), (0.01, 0.01), (0.02, 0.01), (0.002, 0.0)):
            yield from enumerate_drops(n, lost, won)
    for n, classes, loses in (
        (100, 10, 0.004),
        (100, 10, 0.034),
        (800, 10, 0.012),
        (800, 100, 0.034),
    ):
        labels, first, second = classifiers(generator, 1_000_000, classes, loses)
        truth = compute_macro_f1(labels, first, classes) - compute_macro_f1(labels, second, classes)
        drawn = (classifiers(generator, n, classes, loses) for _ in range(round(800 * scale)))
        differences = [
            compare_macro_f1(labels, first, second, classes).interval(0.95)
            for labels, first, second in drawn
        ]
        held = [low <= truth <= high for low, high in differences]
        yield share(
            held,
            COVERAGE,
            what=f"macro F1 drop of {truth:.2%}, {n} images, {classes} classes",
            claimed="95 %",
        )

    for spread, n in ((0.3, 100), (1.0, 100), (1.0, 800)):
        ratio = 40 + 10 * np.log10(np.exp((0.3**2 - spread**2) / 2))
        tries = [
            compute_snr_interval(output_errors(generator, spread, n), 0.95)
            for _ in range(round(2000 * scale))
        ]
        covered = [each[0] <= ratio <= each[1] for each in tries if each]
        least = COVERAGE if len(covered) > 0.05 * len(tries) else 0.0
        what, shown = (
            f"SNR of outputs, {n} images, errors spread e^{spread:g}",
            f"shown {len(covered) / len(tries):.0%}",
        )
        yield share(covered, least, what=what, claimed="95 %", note=shown)


def enumerate_outcomes(n, lost, won):
    """Every drop of 0 and 1 over `n` samples, with its probability."""
    counts = np.arange(n + 1)
    for gone, often in zip(counts, binom.pmf(counts, n, lost), strict=True):
        of_gained = binom.pmf(counts[: n - gone + 1], n - gone, won / (1 - lost))
        for gained, rarely in zip(counts, often * of_gained, strict=False):
            if rarely > NEVER:
                yield paired_drop(int(gone), int(gained), int(n - gone - gained)), rarely


def enumerate_drops(n, lost, won):
    """The exact rates of a drop on its limit."""
    truth, covered, passed, failed = lost - won, 0.0, 0.0, 0.0
    for drop, rarely in enumerate_outcomes(n, lost, won):
        low, high = drop.interval(0.95)
        covered += rarely * (low <= truth <= high)
        passed += rarely * (high <= truth)
        failed += rarely * (drop.compute_p_value_above(truth) <= 0.025)
    what = f"drop of {truth:.1%}, {lost:.1%} lost and {won:.1%} won of {n}"
    yield exact(what, covered, least=COVERAGE, claimed="95 %")
    yield exact(f"PASS on its limit: {what}", passed)
    yield exact(f"FAIL on its limit: {what}", failed)


def enumerate_looks(n, lost, won, most):
    """The exact rates of a drop on its limit that is evaluated on other samples until it is decided."""
    outcomes, undecided = list(enumerate_outcomes(n, lost, won)), 1.0
    rates = {"PASS": 0.0, "FAIL": 0.0}
    for number in range(1, most + 1):
        verdicts = [
            judge_drop(drop, lost - won, Look(number, sampled=True)) for drop, _ in outcomes
        ]
        ended = {
            wrong: sum(
                rarely
                for verdict, (_, rarely) in zip(verdicts, outcomes, strict=True)
                if verdict == wrong
            )
            for wrong in rates
        }
        rates = {wrong: rates[wrong] + undecided * ended[wrong] for wrong in rates}
        undecided *= 1 - sum(ended.values())
        if number in (1, 5, 20, 30):
            what = f"drop on its limit, up to {number} evaluations on others, {lost:.1%} lost and {won:.1%} won of {n}"
            for wrong, rate in rates.items():
                yield exact(f"{wrong}: {what}", rate)


def exact(what, rate, *, least=0.0, claimed="≤ 2.5 %"):
    """A rate that is not drawn but enumerated."""
    return Row(what, claimed, rate, 0, least, 1.0 if least else 0.025, "by enumeration")


NEVER = 1e-10
"""Outcomes that are rarer are not enumerated."""


def paired_drop(lost, won, same):
    n = lost + won + same
    return figure_from_samples(
        (lost - won) / n, np.repeat([1.0, -1.0, 0.0], [lost, won, same]), n, (-1.0, 1.0)
    )


def output_errors(generator, spread, n):
    """Sums of squares of each image's outputs: of an error at 40 dB, and of the reference."""
    return {
        "difference_square": 1e-4 * np.exp(spread * generator.standard_normal(n)),
        "reference_square": np.exp(0.3 * generator.standard_normal(n)),
    }


def classifiers(generator, n, classes, loses):
    labels = generator.integers(0, classes, n)
    first = np.where(generator.random(n) < 0.95, labels, generator.integers(0, classes, n))
    lost = (first == labels) & (generator.random(n) < loses)
    return labels, first, np.where(lost, generator.integers(0, classes, n), first)


# ------------------------------------------------------------- scores of tasks

TAGS = np.array(["O", "O", "O", "B-PER", "I-PER", "B-ORG", "I-ORG"])


def make_tagged(count, draw):
    """Texts of 5 to 20 words; some texts are harder than others."""
    truths, source, found = [], [], []
    for _ in range(count):
        words, hard = int(draw.integers(5, 21)), draw.beta(1, 9)
        true = draw.choice(TAGS, words)
        one = np.where(draw.random(words) < hard, draw.choice(TAGS, words), true)
        truths.append(true.tolist())
        source.append(one.tolist())
        found.append(np.where(draw.random(words) < 0.03, draw.choice(TAGS, words), one).tolist())
    return truths, source, found


def make_pairs(count, draw):
    """Two texts for each sample: embeddings whose cosine follows the stated similarity with noise."""
    truths, source, found = [], [], []
    for pair in range(count):
        stated = draw.random()
        angle = np.arccos(np.clip(stated + draw.normal(0, 0.15), -1, 1))
        other = angle + draw.normal(0, 0.05)
        truths += [[float(pair), float(stated)]] * 2
        source += [[1.0, 0.0], [float(np.cos(angle)), float(np.sin(angle))]]
        found += [[1.0, 0.0], [float(np.cos(other)), float(np.sin(other))]]
    return truths, source, found


def make_masks(count, draw):
    """Masks of 16 by 16 pixels with a rectangle of one of four classes; predictions have it moved."""
    truths, source, found = [], [], []
    for _ in range(count):
        label, (top, left), (high, wide) = (
            draw.integers(1, 5),
            draw.integers(1, 7, 2),
            draw.integers(4, 9, 2),
        )

        def paint(moved, label=label, top=top, left=left, high=high, wide=wide):
            mask = np.zeros((16, 16), np.uint8)
            mask[top : top + high, left + moved : left + moved + wide] = label
            return mask

        moved = int(draw.random() < 0.5)
        truths.append(encode_mask(paint(0)))
        source.append(encode_mask(paint(moved)))
        found.append(encode_mask(paint(moved + int(draw.random() < 0.2))))
    return truths, source, found


def make_boxes(count, draw):
    """Images of 100 by 100 pixels with up to four boxes of three classes; found boxes are moved, some are missed, some made up."""
    truths, source, found = [], [], []
    for _ in range(count):
        true, one, other = [], [], []
        for _ in range(int(draw.integers(0, 5))):
            left, top, wide, high = (
                draw.uniform(0, 60),
                draw.uniform(0, 60),
                draw.uniform(10, 40),
                draw.uniform(10, 40),
            )
            label = float(draw.integers(3))
            true.append([left, top, wide, high, label, wide * high, 0.0])
            if draw.random() < 0.9:
                shift = draw.normal(0, 0.08 * wide)
                row = [left + shift, top, wide, high, float(draw.beta(5, 2)), label]
                one.append(row)
                other.append([row[0] + draw.normal(0, 0.03 * wide), *row[1:]])
        for _ in range(int(draw.random() < 0.3)):
            row = [
                *draw.uniform(0, 60, 2),
                *draw.uniform(10, 40, 2),
                float(draw.beta(2, 5)),
                float(draw.integers(3)),
            ]
            one.append([float(each) for each in row])
            other.append(one[-1])
        truths.append(true)
        source.append(one)
        found.append(other)
    return truths, source, found


def rare(generator, scale) -> Iterator[Row]:
    """A build on its limit that loses samples of a rare class, texts with entities, or single outputs."""
    for classes, often, loses in (
        (5, 0.01, 0.2),
        (5, 0.005, 0.3),
        (5, 0.02, 0.1),
        (20, 0.03, 0.05),
    ):
        for n in (100, 300, 1000):
            truth, found = loses / classes, []
            shares = np.full(classes, (1 - often) / (classes - 1))
            shares[-1] = often
            for _ in range(round(400 * scale)):
                labels = generator.choice(classes, n, p=shares)
                lost = (labels == classes - 1) & (generator.random(n) < loses)
                found.append(mean_of_classes(labels, lost, classes))
            what = f"drop of a mean over {classes} classes, one in {often:.1%} of {n} images loses {loses:.0%}"
            yield from on_limit(found, truth, what)
    for often, n in ((0.01, 100), (0.01, 300), (0.02, 300)):
        found = []
        for _ in range(round(40 * scale)):
            images = [draw_boxes(generator, often) for _ in range(n)]
            truths, source = [each for each, _ in images], [each for _, each in images]
            worse = [
                [box for box in each if box[5] < 2 or generator.random() < 0.8] for each in source
            ]
            seen = Detection().observe(truths, source, worse, FIRST_LOOK, "", ("a", "b", "rare"))
            found.append(seen["drop"])
        # of 101 recalls, 0 to 80% are reached
        truth, what = (
            (1 - 81 / 101) / 3,
            f"AP over 3 classes, one in {often:.0%} of {n} images loses 20%",
        )
        for wrong, hits in (
            ("PASS", [one.high <= truth for one in found]),
            ("FAIL", [one.low > truth for one in found]),
        ):
            yield share(hits, most=0.025, what=f"{wrong} on its limit: {what}", claimed="≤ 2.5 %")
    for often, loses in ((0.03, 0.1), (0.03, 0.3)):
        for n in (100, 300, 1000):
            truth, found = 1 - 2 * (1 - loses) / (2 - loses), []
            for _ in range(round(400 * scale)):
                entities = (generator.random(n) < often).astype(float)
                lost = entities * (generator.random(n) < loses)
                if entities.any():
                    found.append(drop_of_f1(entities, lost))
            what = (
                f"drop of F1, entities in {often:.0%} of {n} texts, {loses:.0%} of these lose all"
            )
            yield from on_limit(found, truth, what)
    for often in (0.005, 0.01, 0.02):
        for n in (20, 60, 100, 300, 1000):
            found = []
            for _ in range(round(400 * scale)):
                lost = np.where(generator.random(n) < often, generator.uniform(0.3, 1, n), 1e-4)
                found.append(figure_from_samples(float(lost.mean()), lost, n, (0.0, 2.0)))
            truth = 0.65 * often + 1e-4 * (1 - often)
            yield from on_limit(
                found, truth, f"1 - cosine, {often:.1%} of {n} samples lose 0.3 to 1"
            )


def mean_of_classes(labels, lost, classes):
    """The drop of a mean over classes of the share of images that are right, which all were."""
    amounts = (labels == np.arange(classes)[:, None]).astype(float)
    totals = amounts.sum(axis=1)
    there = totals > 0
    shares = (amounts @ lost)[there] / totals[there]
    value, own = float(shares.mean()), np.zeros(classes)
    own[there] = shares
    parts = len(labels) / there.sum() * (lost - own[labels]) / totals[labels] + value
    unseen = bound_absent_effect(len(labels), int(there.sum()), int((~there).sum()))
    effect = max(find_largest_effect(amounts), unseen)
    return figure_from_samples(value, parts, len(labels), (-1.0, 1.0), effect)


FIRST_LOOK = compute_look_confidence(0.95, 1)


def draw_boxes(generator, often):
    """Truths and the same boxes as predictions: two common classes, and a third in a share `often` of images."""
    present = [0.0, 1.0] + [2.0] * (generator.random() < often)
    places = [[10.0, 30.0 * label, 20.0, 20.0] for label in present]
    truths = [[*place, label, 400.0, 0.0] for place, label in zip(places, present, strict=True)]
    score = generator.random
    return truths, [
        [*place, float(score()), label] for place, label in zip(places, present, strict=True)
    ]


def drop_of_f1(entities, lost):
    """The drop of the F1 of all texts, in some of which nothing is found any more."""
    right, total = entities.sum() - lost.sum(), entities.sum()
    value = 1 - 2 * right / (right + total)
    left, there = right - (entities - lost), total - entities
    without = 1 - 2 * left / np.maximum(left + there, 1e-9)
    parts = (len(entities) - 1) * (value - without)
    effect = find_largest_effect(entities[None])
    return figure_from_samples(float(value), parts, len(entities), (-1.0, 1.0), effect)


def on_limit(found, truth, what, most=0.025):
    """The rates of wrong verdicts at the confidence of a first sign-off."""
    bounds = [each.interval(compute_look_confidence(0.95, 1)) for each in found]
    for wrong, hits in (
        ("PASS", [high <= truth for _, high in bounds]),
        ("FAIL", [low > truth for low, _ in bounds]),
    ):
        yield share(hits, most=most, what=f"{wrong} on its limit: {what}", claimed="≤ 2.5 %")


def clusters(generator, scale) -> Iterator[Row]:
    """A build on its limit whose losses come by the clip, patient, or document: groups of samples that resemble each other."""
    for size in (5, 10, 30):
        for likeness in (0.3, 0.8):
            for n in (600, 3000):
                found, truth, members = [], 0.02, np.repeat(np.arange(n // size), size)
                alike = truth * (1 - likeness) / likeness, (1 - truth) * (1 - likeness) / likeness
                groups = Groups(members)
                for _ in range(round(300 * scale)):
                    lost = generator.random(n) < generator.beta(*alike, n // size)[members]
                    parts = groups.add_up(lost.astype(float))
                    found.append(
                        figure_from_samples(lost.mean(), parts, n, (-1.0, 1.0), groups.size)
                    )
                what = (
                    f"drop of 2 %, {n} samples in groups of {size}, correlation {likeness:g} inside"
                )
                yield from on_limit(found, truth, what)


def speedups(generator, scale) -> Iterator[Row]:
    """DALI's speedup over the DataLoader: rounds of two processes each, whose own speeds scatter."""
    for between in (0.0, 0.01, 0.03, 0.06):
        held = []
        for _ in range(round(500 * scale)):
            theirs, ours = (
                level
                * np.exp(
                    between * generator.standard_normal(DALI_ROUNDS)
                    + 0.005 * generator.standard_normal(DALI_ROUNDS)
                )
                for level in (1000.0, 2500.0)
            )
            low, high = ratio_from_rounds(list(theirs), list(ours)).ci
            held.append(low <= 2.5 <= high)
        yield share(
            held,
            COVERAGE,
            what=f"DALI's speedup, {DALI_ROUNDS} rounds, processes scatter {between:.0%}",
            claimed="95 %",
        )


def outputs(generator, scale) -> Iterator[Row]:
    """An SNR exactly on its limit: the noise of the samples is spread, or few samples have a hundred times as much."""
    cells = [(0.0, spread, n) for spread, n in ((0.3, 100), (1.0, 300), (1.5, 3000))]
    for often, spread, n in (*cells, *((0.005, 0.3, n) for n in (100, 300, 1000, 3000))):
        power = np.exp(spread**2 / 2 - 0.3**2 / 2) * (1 + 99 * often)
        truth, bounds = 40 - 10 * np.log10(power), []
        for _ in range(round(400 * scale)):
            errors = output_errors(generator, spread, n)
            errors["difference_square"] *= np.where(generator.random(n) < often, 100, 1)
            bounds.append(compute_snr_interval(errors, compute_look_confidence(0.95, 1)))
        shown = f"shown {np.mean([each is not None for each in bounds]):.0%}"
        few = f", {often:.1%} of them with 100 times the noise" if often else ""
        what = f"SNR on its limit, {n} samples, spread e^{spread:g}{few}"
        wrong = [each is not None and each[0] >= truth for each in bounds]
        yield share(wrong, most=0.025, what=f"PASS: {what}", claimed="≤ 2.5 %", note=shown)
        wrong = [each is not None and each[1] < truth for each in bounds]
        yield share(wrong, most=0.025, what=f"FAIL: {what}", claimed="≤ 2.5 %", note=shown)
    for spread in (1.0, 2.0):
        for n in (100, 1000):
            truth, bounds = 40 + 5 * spread**2 / np.log(10), []
            for _ in range(round(400 * scale)):
                errors = output_errors(generator, 0.3, n)
                errors["difference_square"] /= np.exp(0.3**2 / 2)
                errors["reference_square"] = np.exp(spread * generator.standard_normal(n))
                bounds.append(compute_snr_interval(errors, compute_look_confidence(0.95, 1)))
            what = f"SNR on its limit, {n} samples, powers of the outputs spread e^{spread:g}"
            known = [each for each in bounds if each is not None]
            passed, failed = [low >= truth for low, _ in known], [high < truth for _, high in known]
            yield share(passed, most=0.025, what=f"PASS: {what}", claimed="≤ 2.5 %")
            yield share(failed, most=0.025, what=f"FAIL: {what}", claimed="≤ 2.5 %")


def spoil(rows, name, draw):
    """The source model's predictions with few of them lost: 2 % of texts, 2 % of pairs, 1 % of masks, 0.3 % of boxes."""
    found = list(rows)
    if name == "AP":
        return [[row for row in boxes if draw.random() >= 0.003] for boxes in found]
    for place in np.flatnonzero(
        draw.random(len(found)) < {"F1": 0.02, "Spearman": 0.02, "mIoU": 0.01}[name]
    ):
        if name == "F1":
            found[place] = ["O"] * len(found[place])
        elif name == "mIoU":
            found[place] = encode_mask(np.zeros((16, 16), np.uint8))
        elif place % 2:
            angle = draw.uniform(0, np.pi / 2)
            found[place] = [float(np.cos(angle)), float(np.sin(angle))]
    return found


TASKS = {
    "F1": (TokenClassification(), make_tagged, 1),
    "Spearman": (Embedding(), make_pairs, 2),
    "mIoU": (Segmentation(), make_masks, 1),
    "AP": (Detection(), make_boxes, 1),
}


POPULATION = 1000
"""Samples of which each repetition draws some, with replacement."""


def tasks(generator, scale) -> Iterator[Row]:
    """Scores of tasks and their drops, where every sample changes a little and where few change at all."""
    for name, (task, make, each) in TASKS.items():
        truths, source, found = make(POPULATION, np.random.default_rng(1))
        for which, worse in (
            ("all", found),
            ("few", spoil(source, name, np.random.default_rng(3))),
        ):
            whole = task.score_predictions(truths, source, worse).scores[0]
            for n in (30, 100, 300):
                scores = []
                for _ in range(round((60 if name in ("AP", "mIoU") else 400) * scale)):
                    chosen = generator.integers(0, POPULATION, n)
                    rows = (chosen[:, None] * each + np.arange(each)).ravel().tolist()
                    drawn = [[values[row] for row in rows] for values in (truths, source, worse)]
                    if each == 2:  # a pair that is drawn twice is two pairs
                        drawn[0] = [
                            [float(place // 2), value[1]] for place, value in enumerate(drawn[0])
                        ]
                    scores.append(task.score_predictions(*drawn).scores[0])
                    measure_scores.cache_clear()
                at = f"{name}, {n} samples, {which} of them differ"
                held = [one.ci[0] <= whole.value <= one.ci[1] for one in scores]
                yield share(held, COVERAGE, what=f"score: {at}", claimed="95 %")
                held = [one.drop_ci[0] <= whole.drop <= one.drop_ci[1] for one in scores]
                yield share(held, COVERAGE, what=f"drop: {at}", claimed="95 %")
                passed = [one.drop_ci[1] <= whole.drop for one in scores]
                yield share(passed, most=0.03, what=f"PASS on its limit: {at}", claimed="≤ 2.5 %")
                failed = [one.drop_ci[0] > whole.drop for one in scores]
                yield share(failed, most=0.03, what=f"FAIL on its limit: {at}", claimed="≤ 2.5 %")


def sampled(generator, scale) -> Iterator[Row]:
    """Scores that a distribution or a Python program brings, one for each form that their two rules take."""
    for name, rule, is_error, draw in (
        ("a mean over samples, of which 1% are lost", Rule.RATIO, False, draw_hits),
        ("a word error rate, 1% more of the words wrong", Rule.RATIO, True, draw_words),
        ("a word error rate, 2% of texts lost", Rule.RATIO, True, partial(draw_words, lost=0.02)),
        ("a class mean, a class of 2% loses 10%", Rule.CLASS_MEAN, False, draw_classes),
    ):
        stated = ScoreRule("score", rule, is_error, "simulated")
        many = draw(generator, 1_000_000)
        source, truth = (join_parts(one, rule) for one in many)
        drop = (truth - source) if is_error else (source - truth)
        for n in (100, 300):
            seen = []
            for _ in range(round(200 * scale)):
                given = [one.tolist() for one in draw(generator, n)]
                task = make_sampled_score("score", stated, given[0], given[1])
                seen.append(task.observe(given[1], given[0], given[1], FIRST_LOOK, ""))
                measure_scores.cache_clear()
            what = f"{name}, {n} samples"
            for figure, known in (("score", truth), ("drop of score", drop)):
                held = [one[figure].low <= known <= one[figure].high for one in seen]
                yield share(held, COVERAGE, what=f"{figure}: {what}", claimed="97.5 %")
            passed = [one["drop of score"].high <= drop for one in seen]
            failed = [one["drop of score"].low > drop for one in seen]
            for wrong, hits in (("PASS", passed), ("FAIL", failed)):
                yield share(
                    hits, most=0.025, what=f"{wrong} on its limit: {what}", claimed="≤ 2.5 %"
                )


def join_parts(parts, rule):
    """The score of parts (samples, 3) by its rule."""
    value, weight, group = parts.T
    if rule is Rule.RATIO:
        return value.sum() / weight.sum()
    return np.mean([value[group == each].mean() for each in np.unique(group)])


def make_parts(value, weight=None, group=None):
    blank = np.zeros(len(value))
    return np.stack(
        [value, blank + 1 if weight is None else weight, blank if group is None else group], 1
    )


def draw_hits(generator, n):
    right = generator.random(n) < 0.95
    return make_parts(right * 1.0), make_parts(right & (generator.random(n) >= 0.01))


def draw_words(generator, n, lost=0.0):
    """Texts of 5 to 30 words, 5% of which are wrong; a lost text has three errors for two words."""
    words = generator.integers(5, 31, n)
    errors = generator.binomial(words, 0.05)
    worse = errors + (0 if lost else generator.binomial(words, 0.01))
    worse = np.where(generator.random(n) < lost, np.ceil(1.5 * words), worse)
    return make_parts(errors, words), make_parts(worse, words)


def draw_classes(generator, n):
    label = generator.choice(5, n, p=[0.245] * 4 + [0.02])
    right = generator.random(n) < 0.95
    still = right & ~((label == 4) & (generator.random(n) < 0.1))
    return make_parts(right, group=label), make_parts(still, group=label)


# --------------------------------------------------- throughput and stability


def frame(durations):
    ends = np.cumsum((durations * 1e6).astype(np.int64))
    starts = np.concatenate([[0], ends[:-1]])
    return pl.DataFrame(
        {"images": np.ones(len(ends), np.int64), "start_ns": starts, "end_ns": ends}
    )


def throughput(generator, scale) -> Iterator[Row]:
    """Throughput and coefficient of variation inside one process."""
    for phi in (0.0, 0.7, 0.9):
        for count in (700, 5000):
            rates, variations = [], []
            for _ in range(round((2000 if count == 700 else 1000) * scale)):
                values = np.exp(0.02 * autoregressive(generator, phi, count))
                window = SampledWindow(LoadSpec(1), frame(values), pl.DataFrame())
                low, high = THROUGHPUT.compute(window).interval
                rates.append(low <= 1e3 / np.exp(0.0002) <= high)
                interval = compute_variation_interval(values, 0.95)
                if interval is not None:
                    variations.append(interval[0] <= sqrt(np.expm1(0.0004)) <= interval[1])
            shown = f"shown {len(variations) / len(rates):.0%}"
            name = f"correlation {phi:g}, {count} samples"
            yield share(rates, COVERAGE, what=f"throughput, {name}", claimed="95 %")
            least = COVERAGE if len(variations) > 0.05 * len(rates) else 0.0
            yield share(
                variations,
                least,
                what=f"coefficient of variation, {name}",
                claimed="95 %",
                note=shown,
            )


# ------------------------------------------------------------------------- A/B


def planted(p50, *, percent=50.0, interval=None, reasons=(), batch=1, rate=None, options=None):
    """A measurement whose percentile is `p50`, in ms."""
    level = 1e6 * (1.0 if p50 is None else p50)
    low, high = interval or (level, level)
    found = {} if p50 is None else {format_percentile_name(percent): Estimate(level, low, high)}
    return Measurement(
        "m",
        Subject("a", "simulated", "fp32", "cpu", options=options or {}),
        LoadSpec(batch, rate_per_s=rate),
        Validity.INVALID if reasons else Validity.VALID,
        tuple(reasons),
        latency_ns=LatencySummary(700, found, level, level, level, 0.0, {}),
        throughput_images_per_s=Estimate(1e9 * batch / level),
    )


def compared(generator, rounds, noise, wave=0.0, period=4.0, truth=1.0):
    turn, phase = [0], generator.uniform(0, 2 * np.pi)

    def side(level):
        def measured(name):
            turn[0] += 1
            disturbed = wave * np.sin(2 * np.pi * turn[0] / period + phase)
            return replace(
                planted(level * np.exp(disturbed + noise * generator.standard_normal())), id=name
            )

        return measured

    seed = int(generator.integers(2**32))
    return run_interleaved(side(1.0), side(truth), rounds, PairMetric.P50, seed).ratio.change


def interleaving(generator, scale) -> Iterator[Row]:
    """`bench B --against A`: claims of a difference between equals, and of a planted one."""
    for rounds, noise, wave, period in (
        (10, 0.005, 0.0, 4),
        (10, 0.02, 0.0, 4),
        (10, 0.03, 0.0, 4),
        (8, 0.03, 0.0, 4),
        (10, 0.005, 0.01, 4),
        (10, 0.005, 0.02, 4),
        (10, 0.001, 0.02, 4),
        (10, 0.02, 0.02, 4),
        (8, 0.005, 0.02, 4),
        (10, 0.005, 0.02, 4.1),
        (10, 0.005, 0.02, 4 / 3),
        (10, 0.005, 0.02, 8),
    ):
        claims = [
            compared(generator, rounds, noise, wave, period) is not Change.NO_DIFFERENCE
            for _ in range(round(1000 * scale))
        ]
        disturbed = f", wave of {wave:.0%} every {period:.3g} processes" if wave else ""
        yield share(
            claims,
            most=0.015,
            what=f"equals, {rounds} rounds, scatter {noise:.1%}{disturbed}",
            claimed="1 %",
        )
    for noise, truth, least in ((0.005, 1.03, 0.99), (0.01, 1.03, 0.97), (0.02, 1.05, 0.9)):
        found = [
            compared(generator, 10, noise, truth=truth) is Change.SLOWER
            for _ in range(round(500 * scale))
        ]
        yield share(
            found,
            least,
            what=f"{truth - 1:.0%} slower is found, 10 rounds, scatter {noise:.1%}",
            claimed="power",
        )


# -------------------------------------------------------------------- validity


def validity(generator, scale) -> Iterator[Row]:
    """Which reasons are found where they are planted, and where nothing is."""
    repetitions = round(300 * scale)
    for count in (100, 700, 5000):
        for phi in (0.0, 0.9) if count > 100 else (0.0,):
            refused = [
                bool(
                    codes(0.01 * autoregressive(generator, phi, count))
                    & {"drift", "bimodal", "dispersion"}
                )
                for _ in range(repetitions)
            ]
            what = f"clean data refused, {count} samples, correlation {phi:g}"
            yield share(refused, most=0.02, what=what, claimed="at most 2 %")
    for count in (150, 700):
        refused = [
            bool(
                codes(0.01 * generator.standard_t(3, count) / sqrt(3))
                & {"drift", "bimodal", "dispersion"}
            )
            for _ in range(repetitions)
        ]
        what = f"clean data refused, {count} samples that scatter as Student's t3"
        yield share(refused, most=0.02, what=what, claimed="at most 2 %")
    time = np.linspace(0, 1, 700)
    for name, shape in (
        ("drift of 3 %", time),
        ("drift of 3 % there and back", 2 * abs(time - 0.5)),
    ):
        found = [
            "drift" in codes(np.log1p(0.03 * shape) + 0.01 * generator.standard_normal(700))
            for _ in range(repetitions)
        ]
        yield share(
            found, 0.8, what=f"{name} is found, 700 samples, cv 1 %", claimed="at least 80 %"
        )
    found = [
        "bimodal"
        in codes(
            np.log1p(0.05 * (generator.random(700) < 0.1)) + 0.01 * generator.standard_normal(700)
        )
        for _ in range(repetitions)
    ]
    yield share(
        found,
        0.8,
        what="second mode, 10 % at 5 %, is found, 700 samples, cv 1 %",
        claimed="at least 80 %",
    )
    for seconds in (3, 10, 60, 600):
        moved = []
        for _ in range(repetitions):
            clocks = (1980 * np.exp(0.006 * generator.standard_normal(5 * seconds))).astype(
                np.int64
            )
            moved.append("clocks-moved" in codes(np.zeros(50), {"gpu_sm_mhz": clocks}))
        yield share(
            moved,
            most=0.02,
            what=f"clocks read with 0.6 % noise for {seconds} s refused",
            claimed="at most 2 %",
        )
    for utilization, count, least, most in (
        (0.9, 662, 0.0, 0.02),
        (0.9, 2648, 0.0, 0.02),
        (1.02, 662, 0.95, 1.0),
    ):
        behind = []
        for _ in range(round(100 * scale)):
            due, start, end = queue(generator, utilization, count)
            behind.append("falling-behind" in codes_of(due, start, end, {}, utilization * 1e3))
        yield share(
            behind,
            least,
            most,
            f"falling behind at a utilization of {utilization:g}, {count} queries",
            "",
        )


def codes(logs, machine=None):
    ends = np.cumsum((1e6 * np.exp(logs)).astype(np.int64))
    starts = np.concatenate([[0], ends[:-1]])
    return codes_of(starts, starts, ends, machine or {}, None)


def codes_of(due, start, end, machine, rate, inputs=None):
    nulls = dict.fromkeys(
        ("compute_ns", "h2d_ns", "d2h_ns"), pl.Series([None] * len(end), dtype=pl.Int64)
    )
    samples = pl.DataFrame(
        {"scheduled_ns": due, "start_ns": start, "end_ns": end, "enqueue_ns": end - start, **nulls}
    )
    if inputs is not None:
        samples = samples.with_columns(input=pl.Series(inputs))
    load = LoadSpec(1, Scenario.SERVER if rate else Scenario.SINGLE_STREAM, rate_per_s=rate)
    subject = Subject("a", "fake", "fp32", "cpu", affinity=(0, 1))
    measurement = Measurement(
        "m", subject, load, Validity.VALID, (), limits=LIMITS, machine_file="m.parquet"
    )
    return {
        reason.code
        for reason in find_reasons(ValidityEvidence(measurement, samples, pl.DataFrame(machine)))
        if reason.invalidates
    }


def worked(latencies_ns, percents=(50.0, 99.0), inputs=None, process=0):
    """One try as the worker and `judge_measurement` make it: figures, percentiles, and the reasons found in the samples."""
    ends = np.cumsum(latencies_ns.astype(np.int64))
    starts = np.concatenate([[0], ends[:-1]])
    found = codes_of(starts, starts, ends, {}, None, inputs) & {"drift", "bimodal", "dispersion"}
    reasons = [Reason(code, "", "", invalidates=True) for code in found]
    one = replace(planted(10.0, reasons=reasons), process=process, samples=len(latencies_ns))
    one = replace(one, latency_ns=summary_from_ns(latencies_ns, percents))
    return RecordedMeasurement(one, "r", latencies=latencies_ns)


def judged_tries(limit, tries):
    """The verdict on tries of one build, and its interval, as a sign-off sees them; None for a figure that is withheld."""
    seen = observe(limit, BuildEvidence(JudgedBuild("m", "a", "simulated", "fp32"), tries))
    interval = ProcessGroup(tries).keep_requested(limit.metric).estimate(limit.metric)
    bounds = None if interval is None else interval.interval
    return judge_criteria([(limit, seen)], 0.95)[0].verdict, bounds


def judge_on_limits(limits, draw, tries, repetitions, what):
    """Rates of wrong verdicts, intervals that miss, and processes left out, for tries whose truths are the limits."""
    drawn = [tuple(draw(process) for process in range(tries)) for _ in range(repetitions)]
    every = [one.measurement for group in drawn for one in group]
    invalid = np.mean([not one.is_valid for one in every])
    for limit in limits:
        judged_groups = [judged_tries(limit, group) for group in drawn]
        bounds = [bound for _, bound in judged_groups if bound is not None]
        held = [low <= limit.threshold <= high for low, high in bounds]
        wide = np.median([high / low - 1 for low, high in bounds]) if bounds else nan
        note = f"{invalid:.1%} left out, judged {len(held) / repetitions:.0%}, {wide:.0%} wide"
        yield share(
            held, COVERAGE, what=f"{limit.metric}, {what}, {tries} processes", claimed="95 %"
        )
        known = [bound is not None for _, bound in judged_groups]
        yield share(known, 0.99, what=f"{limit.metric} is judged, {what}")
        verdicts = [verdict for verdict, _ in judged_groups]
        yield from wrong_verdicts(verdicts, f"{limit.metric} on its limit, {what}", note)
    drifts = ["drift" in one.invalid_codes for one in every]
    yield share(drifts, most=0.02, what=f"refused as drift: {what}", claimed="≤ 2 %", note=note)


def slow_noise(generator, scale) -> Iterator[Row]:
    """A busy but steady host: latencies with slow noise, in processes of 150 and 700 requests."""
    cells = [
        (correlation, spread, count, 5, 200)
        for correlation in (0.99, 0.997, 0.999)
        for spread in (0.01, 0.02)
        for count in (150, 700)
    ]
    for correlation, spread, count, tries, repetitions in (*cells, (0.99, 0.01, 5000, 20, 60)):
        start = partial(autoregressive, generator, correlation, count)

        def draw(process, start=start, spread=spread):
            return worked(10e6 * np.exp(spread * start()), process=process)

        limits = [
            latency_limit(percent, 10e6 * float(np.exp(spread * ndtri(percent / 100))))
            for percent in ((50, 99) if count >= 700 else (50,))
        ]
        what = f"noise of {spread:.0%} with correlation {correlation:g}, {count} requests"
        yield from judge_on_limits(limits, draw, tries, round(repetitions * scale), what)


def repeated_changes(generator, scale) -> Iterator[Row]:
    """A build that every process runs 3 % slower from some point on; and slow noise, which processes do not repeat."""
    for at in (0.25, 0.5, 0.75, 0.9):
        for correlation in (0.0, 0.99):
            for tries in (3, 5, 10):

                def draw(process, at=at, correlation=correlation):
                    level = 0.003 * generator.standard_normal()
                    late = np.arange(700) >= 700 * at
                    noise = 0.01 * autoregressive(generator, correlation, 700)
                    latencies = 10e6 * np.exp(level + noise) * np.where(late, 1.0, 1 / 1.03)
                    return worked(latencies, process=process)

                repetitions = round(100 * scale)
                groups = [tuple(map(draw, range(tries))) for _ in range(repetitions)]
                limit = latency_limit(50, 10e6)
                results = [judged_tries(limit, group) for group in groups]
                what = f"p50, 3 % slower after {at:.0%} of each process, noise of 1 % with correlation {correlation:g}, {tries} processes"
                held = [
                    low <= 10e6 <= high for _, bounds in results if bounds for low, high in [bounds]
                ]
                note = f"judged {len(held) / repetitions:.0%}"
                yield share(
                    held,
                    COVERAGE,
                    what=f"the end in the interval: {what}",
                    claimed="95 %",
                    note=note,
                )
                yield from wrong_verdicts(
                    [verdict for verdict, _ in results], f"on its limit, {what}"
                )
    for correlation, spread, count in (
        (0.0, 0.01, 700), (0.99, 0.02, 150), (0.99, 0.02, 700), (0.997, 0.02, 700), (0.999, 0.02, 700),
    ):  # fmt: skip
        for tries in (3, 5, 10):
            found = []
            for _ in range(round(400 * scale)):
                ends = [
                    compute_end_change(
                        np.exp(spread * autoregressive(generator, correlation, count))
                    )
                    for _ in range(tries)
                ]
                found.append(bound_repeated_change(ends) > 0)
            what = f"repeated change in noise of {spread:.0%} with correlation {correlation:g}, {count} requests, {tries} processes"
            yield share(found, most=0.03, what=what, claimed="2.5 %")


def assumptions(generator, scale) -> Iterator[Row]:
    """What happens where an assumption of `docs/explanation/verdicts.md` fails: rates without a threshold."""
    limit = latency_limit(50, 10e6)

    def judge_levels(draw, tries):
        verdicts = []
        for _ in range(round(400 * scale)):
            one = tuple(replace(planted(each), process=at) for at, each in enumerate(draw(tries)))
            verdicts.append(judge_tries(limit, one))
        return verdicts

    for tries in (5, 10, 20):
        for between_runs in (0.01, 0.02, 0.03):

            def draw_run(count, between_runs=between_runs):
                run = between_runs * generator.standard_normal()
                return 10 * np.exp(run + 0.005 * generator.standard_normal(count))

            what = f"one run of {tries} processes, runs scatter {between_runs:.0%} (noise slower than a run)"
            yield from wrong_verdicts(judge_levels(draw_run, tries), what, most=1.0)
        for spread in (0.02, 0.05):

            def draw_skewed(count, spread=spread):
                levels = np.exp(generator.standard_normal(count))
                apart = (levels - np.exp(0.5)) / np.sqrt((np.e - 1) * np.e)
                return 10 * (1 + spread * apart)

            what = f"{tries} processes, levels lognormal (skewness 6), scatter {spread:.0%}"
            yield from wrong_verdicts(judge_levels(draw_skewed, tries), what, most=1.0)
    for gap in (0.08, 0.12):
        for tries, slow in ((5, 0.3), (10, 0.2), (19, 0.2), (40, 0.2)):

            def draw_apart(count, gap=gap, slow=slow):
                late = generator.random(count) < slow
                figures = np.exp(0.003 * generator.standard_normal(count)) * (1 + gap * late)
                return 10 * figures / (1 + gap * slow)

            what = f"{tries} processes, {slow:.0%} of them {gap:.0%} slower, none left out"
            yield from wrong_verdicts(judge_levels(draw_apart, tries), what, most=1.0)
    for runs in (1, 2, 3, 5, 10):
        for gap in (0.05, 0.12):
            verdicts = []
            for _ in range(round(400 * scale)):
                slow = generator.random(runs) < 0.3
                levels = np.repeat(10 * (1 + gap * slow) / (1 + 0.3 * gap), 5)
                figures = levels * np.exp(0.003 * generator.standard_normal(5 * runs))
                of_runs = tuple(
                    RecordedMeasurement(replace(planted(each), process=at), f"r{at // 5}")
                    for at, each in enumerate(figures)
                )
                verdicts.append(judged_tries(limit, of_runs)[0])
            what = f"{runs} runs of 5 processes, 30% of the runs {gap:.0%} slower as a whole"
            yield from wrong_verdicts(verdicts, what, most=1.0)
    for count, length in ((700, 50), (700, 200), (3000, 50), (3000, 200)):
        many = stalled_requests(generator, 2_000_000, 0.012, length, 0.5)
        slow_limit = latency_limit(99, float(np.quantile(many, 0.99)))
        for tries in (5, 10):
            verdicts = []
            for _ in range(round(200 * scale)):
                drawn = tuple(
                    worked(stalled_requests(generator, count, 0.012, length, 0.5), process=at)
                    for at in range(tries)
                )
                verdicts.append(judged_tries(slow_limit, drawn)[0])
            none = exp(-0.012 * count * tries / length)
            what = f"p99, stalls of {length} requests, 50% slower, {tries} processes of {count}"
            note = f"none was drawn in {none:.1%}"
            yield from wrong_verdicts(verdicts, what, note, most=1.0)
    for period, length in ((5000, 70), (5000, 100)):

        def draw_periodic(process, period=period, length=length):
            place = (np.arange(700) + generator.integers(period)) % period
            noise = 0.01 * generator.standard_normal(700)
            return worked(10e6 * np.exp(noise) * (1 + 0.5 * (place < length)), process=process)

        for tries in (5, 10):
            groups = [tuple(map(draw_periodic, range(tries))) for _ in range(round(200 * scale))]
            verdicts = [judged_tries(latency_limit(99, 15e6), each)[0] for each in groups]
            what = f"p99, stalls of {length} requests every {period:,}, 50% slower, {tries} processes of 700"
            yield from wrong_verdicts(verdicts, what, most=1.0)
    for flipped in (0.05, 0.1, 0.2):
        # of two classes a wrong label turns a lost sample into a won one, of many into one that neither has right
        for classes, turned in (("two", flipped), ("many", 0.0)):
            lost, won = (
                one * (1 - flipped) + other * turned
                for one, other in ((0.02, 0.008), (0.008, 0.02))
            )
            drawn = generator.multinomial(10_000, [lost, won, 1 - lost - won], round(2000 * scale))
            ends = [judge_drop(paired_drop(*map(int, each)), 0.012, Look()) for each in drawn]
            what = f"drop on its limit, 10,000 samples, {flipped:.0%} of their labels wrong, {classes} classes"
            yield from wrong_verdicts(ends, what, most=1.0)
    for known, most in ((True, 0.025), (False, 1.0)):
        for leaked in (0.1, 0.3):
            ends, hidden = [], leaked if known else 0.0
            rates = [0.02 * (1 - leaked), 0.01 * (1 - leaked)]
            for _ in range(round(1000 * scale)):
                drawn = generator.multinomial(1000, [*rates, 1 - sum(rates)])
                drop = paired_drop(*map(int, drawn))
                ends.append(judge_drop(drop, 0.01, Look(), hidden))
            name = "known by their hash" if known else "re-encoded copies, not known"
            what = f"drop on its limit, {leaked:.0%} of 1000 samples calibrated the build ({name})"
            yield from wrong_verdicts(ends, what, most=most)
    for slower in (0.03, 0.05, 0.08):
        claims = []
        for _ in range(round(200 * scale)):
            measured = []
            for build in range(10):
                for process in range(5):
                    level = 10 * (1 + slower * (build == 0))
                    found = planted(level * np.exp(0.005 * generator.standard_normal()))
                    subject = replace(found.subject, artifact=f"a{build}", backend=f"b{build}")
                    subject = replace(subject, model="m", precision="fp32")
                    one = replace(found, subject=subject, process=process, id=f"m{build}")
                    measured.append(RecordedMeasurement(one, "r"))
            table = compare_measurements(measured)
            claims.append(any(row.dominated_by for row in table.rows))
        what = f"some claim among ten equal builds, one of which had a neighbor that slowed it by {slower:.0%}"
        yield share(claims, what=what)


def assumed_samples(generator, scale) -> Iterator[Row]:
    """Likewise of samples: where what is assumed of them fails."""
    for size in (5, 10, 30):
        found, truth, likeness, n = [], 0.02, 0.3, 3000
        members = np.repeat(np.arange(n // size), size)
        alike = truth * (1 - likeness) / likeness, (1 - truth) * (1 - likeness) / likeness
        for _ in range(round(400 * scale)):
            lost = generator.random(n) < generator.beta(*alike, n // size)[members]
            found.append(figure_from_samples(lost.mean(), lost.astype(float), n, (-1.0, 1.0)))
        what = f"samples in groups of {size}, correlation {likeness:g} inside, no column `group`"
        yield from on_limit(found, truth, what, most=1.0)

    found, classes, often, loses, n = [], 5, 0.005, 0.3, 300
    shares = np.array([*[(1 - often) / (classes - 1)] * (classes - 1), often])
    for _ in range(round(400 * scale)):
        labels = generator.choice(classes, n, p=shares)
        lost = (labels == classes - 1) & (generator.random(n) < loses)
        found.append(mean_of_classes(labels, lost, int(labels.max()) + 1))
    what = f"mean over classes, one of {often:.1%} in {n} images has no name and loses {loses:.0%}"
    yield from on_limit(found, loses / classes, what, most=1.0)

    for n in (1000, 3000, 4000):
        often, times = 0.001, 1000
        truth, bounds = 40 - 10 * np.log10(1 + (times - 1) * often), []
        for _ in range(round(400 * scale)):
            errors = output_errors(generator, 0.3, n)
            errors["difference_square"] *= np.where(generator.random(n) < often, times, 1)
            bounds.append(compute_snr_interval(errors, compute_look_confidence(0.95, 1)))
        none = f"none was drawn in {(1 - often) ** n:.1%}"
        what = f"SNR on its limit, {n} samples, one in 1,000 with 1,000 times the noise"
        passed = [each is not None and each[0] >= truth for each in bounds]
        yield share(passed, what=f"PASS: {what}", note=none)

    n, lost, won = 1000, 0.02, 0.01
    ends = []
    for _ in range(round(1000 * scale)):
        drawn = generator.multinomial(n, [lost, won, 1 - lost - won], 16)
        best = min((paired_drop(*map(int, each)) for each in drawn), key=lambda drop: drop.value)
        ends.append(judge_drop(best, lost - won, Look()))
    yield from wrong_verdicts(
        ends, "the best of 16 builds, each evaluated in another workspace", most=1.0
    )


def latency_limit(percent, limit_ns):
    return Criterion("latency", f"p{percent}", Sense.AT_MOST, limit_ns, Dimension.TIME)


def inputs(generator, scale) -> Iterator[Row]:
    """A build whose inputs differ in cost, measured in turn."""
    for costs in ((1.0,) * 7 + (1.06,), (1.0,) * 4 + (1.06,) * 4, (1.0, 1.3), tuple(range(1, 9))):
        for between in (0.003, 0.013):

            def measure(costs=costs, between=between):
                level = between * generator.standard_normal()
                noise = np.exp(level + 0.01 * generator.standard_normal(700))
                return 10e6 * np.resize(costs, 700) * noise

            def draw(process, costs=costs, measure=measure):
                which = np.arange(700) % len(costs)
                return worked(measure(), inputs=which, process=process)

            # where p50 lies at a jump of the costs, it is the mean of the processes' medians, as its definition says
            many = np.sort([measure() for _ in range(4000)], axis=1)
            limits = [
                latency_limit(50, float(many[:, 349].mean())),
                latency_limit(99, float(np.quantile(many, 0.99))),
            ]
            shown = " : ".join(f"{each:g}" for each in sorted(set(costs)))
            of = f"{costs.count(max(costs))} of {len(costs)}"
            what = f"inputs that cost {shown} ({of} the most), scatter {between:.1%}"
            yield from judge_on_limits(limits, draw, 5, round(100 * scale), what)


def other_shapes(generator, scale) -> Iterator[Row]:
    """Latencies of shapes that no rule was made for: p50 or p99 of a build on its limit."""
    order = np.arange(700)

    def scatter(count=700):
        return np.exp(0.003 * generator.standard_normal() + 0.01 * generator.standard_normal(count))

    def draw_tail(correlation):
        noise = autoregressive(generator, correlation, 700)
        return np.exp(0.01 * noise) * (1 + 0.2 * np.maximum(noise - 2, 0) ** 2)

    def draw_periodic(period, length, slower):
        late = (order + generator.integers(period)) % period < length
        return scatter() * (1 + slower * late)

    def draw_ticks(level, between):
        exact = np.exp(
            between * generator.standard_normal() + 0.02 * generator.standard_normal(700)
        )
        return np.round(level * exact) / level

    def draw_mixture(cost, slow):
        level = 1 + 0.05 * (generator.random() < slow)
        return scatter() * level * np.where(order % 8 == 7, cost, 1.0)

    def draw_wave(height, period):
        phase = generator.random() * 2 * np.pi
        return scatter() * np.exp(height * np.sin(2 * np.pi * order / (700 * period) + phase))

    shapes: list[tuple[str, Callable[..., np.ndarray], tuple[float, ...]]] = [
        *(("a tail with correlation {:g}", draw_tail, (each,)) for each in (0.5, 0.9, 0.99)),
        ("every {:g} requests {:g} stall, {:.0%} slower", draw_periodic, (500, 10, 0.1)),
        ("every {:g} requests {:g} stall, {:.0%} slower", draw_periodic, (1000, 20, 0.4)),
        ("every {:g} requests {:g} stall, {:.0%} slower", draw_periodic, (2000, 40, 0.15)),
        ("a clock with {:g} ticks for a request, processes scatter {:.1%}", draw_ticks, (20.4, 0.005)),
        ("a clock with {:g} ticks for a request, processes scatter {:.1%}", draw_ticks, (5.5, 0.02)),
        ("one input of 8 costs {:g}, {:.0%} of processes 5% slower", draw_mixture, (1.06, 0.3)),
        ("one input of 8 costs {:g}, {:.0%} of processes 5% slower", draw_mixture, (1.3, 0.1)),
        ("a wave of {:.0%} that lasts {:g} times a process", draw_wave, (0.05, 0.7)),
        ("a wave of {:.0%} that lasts {:g} times a process", draw_wave, (0.02, 1.5)),
    ]  # fmt: skip
    for words, draw, given in shapes:
        many = np.sort([draw(*given) for _ in range(3000)], axis=1)
        limits = {50: float(many[:, 349].mean()), 99: float(np.quantile(many, 0.99))}
        which = order % 8 if draw is draw_mixture else None
        for tries in (3, 5, 10):
            ends: dict[int, list[str]] = {50: [], 99: []}
            for _ in range(round(100 * scale)):
                drawn = [
                    worked(10e6 * draw(*given), inputs=which, process=at) for at in range(tries)
                ]
                for percent, level in limits.items():
                    limit = latency_limit(percent, 10e6 * level)
                    ends[percent].append(judged_tries(limit, tuple(drawn))[0])
            for percent, verdicts in ends.items():
                what = f"p{percent} on its limit, {words.format(*given)}, {tries} processes"
                yield from wrong_verdicts(verdicts, what)

    for name, slope in (("cools", 1.0), ("heats", -1.0)):
        shape = 1 + slope * 0.05 * (np.exp(-order / 150) - (slope < 0))
        limit = latency_limit(50, 10e6 * (1.05 if slope < 0 else 1.0))
        verdicts = [
            judged_tries(
                limit, tuple(worked(10e6 * shape * scatter(), process=at) for at in range(5))
            )[0]
            for _ in range(round(100 * scale))
        ]
        what = f"p50 with its limit at the last level, each process {name} by 5% in 150 requests and more"
        yield from wrong_verdicts(verdicts, what)

    limit = latency_limit(50, 10e6)
    build = JudgedBuild("m", "a", "simulated", "fp32")
    for between in (0.005, 0.013, 0.03):
        verdicts = []
        for _ in range(round(200 * scale)):
            runs: list[RecordedMeasurement] = []
            for look in range(1, 31):
                one = planted(10 * np.exp(between * generator.standard_normal()))
                runs.append(RecordedMeasurement(one, f"r{look}"))
                spent = {"bench": Look(look)}
                seen = observe(limit, BuildEvidence(build, tuple(runs), looks=spent))
                verdict = judge_criteria([(limit, seen)], 0.95, spent)[0].verdict
                if verdict != "INCONCLUSIVE":
                    break
            verdicts.append(verdict)
        what = f"looks after every process, up to 30, which scatter {between:.1%}"
        yield from wrong_verdicts(verdicts, what)

    loss = Criterion("regression", "p50", Sense.AT_MOST, 0.03, Dimension.SHARE)

    def draw_side(count, slow, artifact, level):
        late = generator.random(count) < slow
        figures = 10 * level * np.exp(0.02 * generator.standard_normal(count)) * (1 + 0.05 * late)
        subject = replace(SUBJECT, artifact=artifact)
        return ProcessGroup(
            tuple(
                RecordedMeasurement(replace(planted(each), subject=subject, process=at), "r")
                for at, each in enumerate(figures)
            )
        )

    for mine, theirs in ((3, 20), (20, 3)):
        for slow in (0.0, 0.2):
            ends_of_loss = []
            for _ in range(round(400 * scale)):
                sides = draw_side(mine, slow, "a", 1.03), draw_side(theirs, slow, "b", 1.0)
                ends_of_loss.append(judge_loss(loss, compare_groups(*sides, "p50", None)))
            what = f"regression on its limit, {mine} processes against {theirs}, {slow:.0%} of them 5% slower"
            yield from wrong_verdicts(ends_of_loss, what)


def other_samples(generator, scale) -> Iterator[Row]:
    """Samples of shapes that no rule was made for: a build that loses exactly as much as allowed."""

    def draw_sizes(name, count):
        if name == "Zipf":
            return np.minimum(generator.zipf(1.7, count), 200)
        if name == "one in 50 of 200, others 1 to 5":
            return np.where(generator.random(count) < 0.02, 200, generator.integers(1, 6, count))
        return np.ceil(np.exp(1 + 1.2 * generator.standard_normal(count))).astype(int)

    def lose(sizes, more):
        share = np.log1p(sizes) / np.log(201)
        return {"alike": 0.05 + 0 * share, "large ones more": 0.1 * share}[more]

    for name in ("Zipf", "one in 50 of 200, others 1 to 5", "lognormal"):
        for more in ("alike", "large ones more"):
            many = draw_sizes(name, 400_000)
            truth = float((many * lose(many, more)).sum() / many.sum())
            for count in (30, 100, 300):
                found = []
                for _ in range(round(400 * scale)):
                    sizes = draw_sizes(name, count)
                    members, rates = np.repeat(np.arange(count), sizes), lose(sizes, more)
                    lost = (
                        generator.random(len(members)) < generator.beta(rates, 1 - rates)[members]
                    )
                    parts, samples = lost.astype(float), len(members)
                    groups = Groups(members)
                    found.append(
                        figure_from_samples(
                            parts.mean(), parts, samples, (-1.0, 1.0), groups=groups
                        )
                    )
                what = f"{count} groups of very unequal sizes ({name}), which lose {more}"
                yield from on_limit(found, truth, what)

    for sizes in (
        (1, 2, 3, 4, 5),
        (1, 2, 3, 4, 5) * 4,
        (1,) * 5 + (50,) * 5,
        (3,) * 5 + (200,) * 5,
    ):
        for loses in (0.05, 0.3):
            found, classes, n = [], len(sizes), sum(sizes)
            for _ in range(round(400 * scale)):
                labels = generator.choice(classes, n, p=np.array(sizes) / n)
                found.append(mean_of_classes(labels, generator.random(n) < loses, classes))
            shown = f"{classes} classes of {min(sizes)} to {max(sizes)} samples"
            yield from on_limit(found, loses, f"mean over {shown}, each loses {loses:.0%}")

    for values, shares in (((-0.1, 0.1, 1.0), (0.3, 0.5, 0.2)), ((1.0, -0.02), (0.1, 0.9)), ((1.0, -1.0), (0.5, 0.5))):  # fmt: skip
        for n in (30, 300, 1000):
            for differ in (0.01, 0.2):
                truth, found = differ * float(np.dot(values, shares)), []
                for _ in range(round(1000 * scale)):
                    apart = np.where(
                        generator.random(n) < differ, generator.choice(values, n, p=shares), 0.0
                    )
                    found.append(figure_from_samples(apart.mean(), apart, n, (-1.0, 1.0)))
                shown = ", ".join(f"{each:g}" for each in values)
                what = f"{n} paired scores, all equal but {differ:.0%} that change by {shown}"
                yield from on_limit(found, truth, what)

    for n in (100, 1000, 3000):
        for times in (10, 100):
            truth, bounds = 40 - 10 * np.log10(1 + (times - 1) / n), []
            for _ in range(round(400 * scale)):
                errors = output_errors(generator, 0.3, n)
                errors["difference_square"] *= np.where(generator.random(n) < 1 / n, times, 1)
                bounds.append(compute_snr_interval(errors, compute_look_confidence(0.95, 1)))
            what = f"SNR on its limit, one of {n} samples has {times} times the noise"
            passed = [each is not None and each[0] >= truth for each in bounds]
            failed = [each is not None and each[1] < truth for each in bounds]
            yield share(passed, most=0.025, what=f"PASS: {what}", claimed="≤ 2.5 %")
            yield share(failed, most=0.025, what=f"FAIL: {what}", claimed="≤ 2.5 %")

    for first, step in ((30, 1), (100, 10), (300, 30)):
        verdicts = []
        for _ in range(round(600 * scale)):
            drawn = generator.choice([1.0, -1.0, 0.0], 1200, p=[0.03, 0.01, 0.96])
            for look in range(1, 31):
                apart = drawn[: first + (look - 1) * step]
                drop = figure_from_samples(apart.mean(), apart, len(apart), (-1.0, 1.0))
                verdict = judge_drop(drop, 0.02, Look(look, sampled=True))
                if verdict != "INCONCLUSIVE":
                    break
            verdicts.append(verdict)
        what = f"evaluated after every {step} more samples, from {first} on, up to 30 times"
        yield from wrong_verdicts(verdicts, what)


# ---------------------------------------------------------------------- server


def queue(generator, utilization, count, service_ms=1.0):
    """Due, start and end in ns of queries that come at random and are served one by one (M/G/1, Lindley's recursion)."""
    due = np.cumsum(generator.exponential(service_ms / utilization, count))
    service = service_ms * np.exp(0.02 * generator.standard_normal(count))
    done = np.cumsum(service)
    start = np.maximum.accumulate(due - (done - service)) + done - service
    return tuple((each * 1e6).astype(np.int64) for each in (due, start, start + service))


def served_at(generator, slo, rate):
    """One measurement of a server, as the worker makes it: the transient left out, as many queries as the utilization asks for."""
    utilization = rate / 1e3
    transient, needed = (
        count_transient_queries(utilization, slo.percent),
        count_queries_needed(utilization, slo.percent),
    )
    due, start, end = queue(generator, utilization, transient + needed)
    kept = slice(transient, None)
    summary = summary_from_ns((end - due)[kept], (50.0, 90.0, 95.0, slo.percent))
    behind = "falling-behind" in codes_of(due[kept], start[kept], end[kept], {}, rate)
    reasons = [Reason("falling-behind", "", "", invalidates=True)] if behind else []
    found = summary.percentile(slo.percent)
    value, interval = (None, None) if found is None else (found.value / 1e6, found.interval)
    return planted(value, percent=slo.percent, interval=interval, reasons=reasons, rate=rate)


def steady_p99(generator, utilization):
    due, _, end = queue(generator, utilization, 1_000_000)
    return float(np.quantile((end - due)[50_000:], 0.99)) / 1e6


def server(generator, scale) -> Iterator[Row]:
    """p99 of a server near saturation, and the rate that the search finds."""
    for utilization in (0.5, 0.8, 0.9):
        # one run of a million queries at 0.9 is off by 3%
        truth = float(np.mean([steady_p99(generator, utilization) for _ in range(20)]))
        hits, tries = [], round(100 * scale)
        for _ in range(tries):
            found = served_at(generator, Slo(99.0, 1e6), 1e3 * utilization).latency_ns.percentile(
                99.0
            )
            if found is not None:
                hits.append(found.low <= 1e6 * truth <= found.high)
        least, note = (
            COVERAGE if len(hits) > 0.05 * tries else 0.0,
            f"shown {len(hits) / tries:.0%}",
        )
        yield share(
            hits,
            least,
            what=f"p99 of a server at a utilization of {utilization:g}",
            claimed="95 %",
            note=note,
        )
    grid = np.arange(0.2, 0.96, 0.03)
    truths = [steady_p99(generator, each) for each in grid]
    for limit in (3.0, 6.0):
        beyond, rates = [], []
        measure = partial(served_at, generator, Slo(99.0, 1e6 * limit))
        for _ in range(round(25 * scale)):
            _, best = find_highest_rate(measure, 1e-3, Slo(99.0, 1e6 * limit))
            if best is not None:
                rates.append(best.load.rate_per_s / 1e3)
                beyond.append(np.interp(rates[-1], grid, truths) > limit)
        right = float(np.interp(limit, truths, grid))
        note = f"{np.median(rates):.2f} of the server, where {right:.2f} is right"
        yield share(
            beyond,
            most=0.05,
            what=f"rate found for p99 ≤ {limit:g} services breaks it",
            claimed="",
            note=note,
        )


def live(generator, scale) -> Iterator[Row]:
    """The live check of one server, whose limit is exceeded or exactly met."""

    def judge_live(utilization, count, limit_ms, name):
        due, _, end = queue(generator, utilization, count)
        limits = [Criterion("latency", name, Sense.AT_MOST, 1e6 * limit_ms, Dimension.TIME)]
        load = LoadSpec(1, Scenario.SERVER, rate_per_s=1e3 * utilization)
        answers = list(map(Answer, due.tolist(), end.tolist()))
        return next(judge_latencies(answers, limits, load, 1e3 * utilization)).verdict

    for utilization in (1.05, 1.2, 1.5):
        for count in (700, 2000):
            verdicts = [judge_live(utilization, count, 5, "p99") for _ in range(round(100 * scale))]
            yield share(
                [verdict is Verdict.FAIL for verdict in verdicts],
                0.95,
                what=f"live check, {utilization - 1:.0%} more than the server can answer, {count} requests: FAIL",
            )
    for utilization in (0.3, 0.5, 0.8, 0.95):
        due, _, end = queue(generator, utilization, 2_000_000)
        latencies_ms = (end - due)[100_000:] / 1e6
        for percent, count in ((99, 700), (99, 2000), (50, 700)):
            limit_ms = float(np.quantile(latencies_ms, percent / 100))
            tries = round(400 * scale)
            verdicts = [
                judge_live(utilization, count, limit_ms, f"p{percent}") for _ in range(tries)
            ]
            for wrong in (Verdict.PASS, Verdict.FAIL):
                yield share(
                    [verdict is wrong for verdict in verdicts],
                    most=0.025,
                    what=f"live check, p{percent} on the limit, utilization {utilization:g}, {count} requests: {wrong}",
                    claimed="at most 2.5 %",
                )
    due, _, end = queue(generator, 0.8, 2_000_000)
    latencies_ms = (end - due)[100_000:] / 1e6
    limits = [float(np.quantile(latencies_ms, percent / 100)) for percent in (50, 90, 99)]
    for count, percents in ((10_000, (99,)), (10_000, (50, 90, 99))):
        ends = []
        for _ in range(round(200 * scale)):
            due, _, end = queue(generator, 0.8, count)
            chosen = [
                latency_limit(percent, 1e6 * limits[(50, 90, 99).index(percent)])
                for percent in percents
            ]
            load = LoadSpec(1, Scenario.SERVER, rate_per_s=800.0)
            answers = list(map(Answer, due.tolist(), end.tolist()))
            judged_limits = judge_latencies(answers, chosen, load, 800.0)
            ends.append([each.verdict for each in judged_limits])
        named = " and ".join(f"p{percent}" for percent in percents)
        what = f"live check, {named} on the limit, utilization 0.8, {count} requests"
        for wrong, some in ((Verdict.PASS, all), (Verdict.FAIL, any)):
            hits = [some(verdict is wrong for verdict in each) for each in ends]
            yield share(hits, most=0.025, what=f"{what}: {wrong}", claimed="at most 2.5 %")


def fleet(generator, scale) -> Iterator[Row]:
    """A live check of one server of a fleet whose servers differ by 2 % between restarts: what it says of the others."""
    due, _, end = queue(generator, 0.5, 2_000_000)
    for percent in (50, 99):
        limit_ms = float(np.quantile((end - due)[100_000:] / 1e6, percent / 100))
        limits = [latency_limit(percent, 1e6 * limit_ms)]
        verdicts = []
        for _ in range(round(200 * scale)):
            service_ms = float(np.exp(0.02 * generator.standard_normal()))
            sent, _, done = queue(generator, 0.5 * service_ms, 4000, service_ms)
            answers = list(map(Answer, sent.tolist(), done.tolist()))
            load = LoadSpec(1, Scenario.SERVER, rate_per_s=500.0)
            verdicts.append(str(next(judge_latencies(answers, limits, load, 500.0)).verdict))
        what = (
            f"live check of one server, p{percent} on the limit of the fleet, servers scatter 2 %"
        )
        yield from wrong_verdicts(verdicts, what, most=1.0)


def races(generator, scale) -> Iterator[Row]:
    """The race of `auto`: some build called slower among equal ones, and the interval of a ratio to the winner."""
    for levels, between in (
        ((1.0,) * 2, 0.01), ((1.0,) * 4, 0.01), ((1.0,) * 6, 0.01), ((1.0,) * 6, 0.02),
        ((1.05, 1.03, 1.02, 1.0), 0.005), ((1.05, 1.03, 1.02, 1.0), 0.02),
    ):  # fmt: skip
        claimed, held = [], []
        for seed in range(round(400 * scale)):
            names = [str(at) for at in range(len(levels))]

            def measure(name, sizes, levels=levels, between=between):
                level = levels[int(name)] * np.exp(between * generator.standard_normal())
                return {size: 1e6 * float(level) for size in sizes}

            race = race_builds(names, [1], measure, seed)[1]
            slower = [each.change is Change.SLOWER for each in race.ratios.values()]
            claimed.append(any(slower))
            best = levels[int(str(race.winner))]
            held += [
                each.ci[0] <= levels[int(name)] / best <= each.ci[1]
                for name, each in race.ratios.items()
            ]
        shown = ", ".join(f"{each:g}" for each in levels)
        what = f"race of builds that take {shown}, processes scatter {between:.1%}"
        if len(set(levels)) == 1:
            yield share(claimed, most=0.05, what=f"some is called slower: {what}", claimed="5 %")
        yield share(held, COVERAGE, what=f"ratio to the winner: {what}", claimed="95 %")


def regressions(generator, scale) -> Iterator[Row]:
    """A build exactly as much slower than its baseline as allowed, each measured in one or more runs; others show how runs differ."""
    limit = Criterion("regression", "p50", Sense.AT_MOST, 0.03, Dimension.SHARE)

    def draw_normal():
        return generator.standard_normal()

    def draw_t3():
        return generator.standard_t(3) / sqrt(3)

    def draw_slow():
        return (float(generator.random() < 0.1) - 0.1) / 0.3

    def measure(level, between_runs, draw, runs, artifact):
        found = []
        for run in range(runs):
            own = 10 * level * (1 + between_runs * draw())
            subject = replace(SUBJECT, artifact=artifact)
            for at, each in enumerate(own * np.exp(0.005 * generator.standard_normal(5))):
                one = replace(planted(float(each)), subject=subject, process=at)
                found.append(RecordedMeasurement(one, f"{artifact}{run}"))
        return tuple(found)

    cells = [
        ((1, 1), builds, name, draw, between_runs)
        for builds in (1, 2, 5)
        for name, draw, spreads in (
            ("normal", draw_normal, (0.0, 0.01, 0.04)),
            ("as Student's t3", draw_t3, (0.02, 0.04)),
        )
        for between_runs in spreads
    ]
    cells += [(runs, 0, "normal", draw_normal, 0.02) for runs in ((2, 2), (3, 2), (5, 5))]
    cells += [
        ((1, 1), 2, "one run in ten slow", draw_slow, between_runs)
        for between_runs in (0.01, 0.02, 0.04)
    ]
    for runs, builds, name, draw, between_runs in cells:
        verdicts, held = [], []
        for _ in range(round(300 * scale)):
            mine = ProcessGroup(measure(1.03, between_runs, draw, runs[0], "a"))
            base = ProcessGroup(measure(1.0, between_runs, draw, runs[1], "z"))
            known = [
                one
                for build in range(builds)
                for one in measure(1.0, between_runs, draw, 2, f"b{build}")
            ]
            scatter = find_run_scatter(group_processes(known), "p50")
            found = compare_groups(mine, base, "p50", scatter)
            assert not isinstance(found, str), found
            (low, high), _ = found.interval(Look(1).compute_confidence(0.95), 0.95)
            held.append(low <= 1.03 <= high)
            verdicts.append(judge_loss(limit, found))
        by = f"scatter known from {builds} builds" if builds else "scatter from their own runs"
        what = f"{runs[0]} and {runs[1]} runs that scatter {between_runs:.0%} ({name}), {by}"
        fails = draw is draw_slow  # an assumption of docs/explanation/verdicts.md
        yield share(
            held,
            0.0 if fails else COVERAGE,
            what=f"ratio, {what}",
            claimed="" if fails else "97.5 %",
        )
        yield from wrong_verdicts(
            verdicts, f"regression on its limit, {what}", most=1.0 if fails else 0.025
        )


def classes(generator, scale) -> Iterator[Row]:
    """Macro F1 with a rare class that loses some of its samples, and the drops of all classes together."""
    for often, loses in ((0.01, 0.2), (0.02, 0.1), (0.03, 0.05)):
        shares = [(1 - often) / 4] * 4 + [often]

        def draw(n, shares=shares, loses=loses):
            labels = generator.choice(5, n, p=shares)
            lost = (labels == 4) & (generator.random(n) < loses)
            return labels, labels, np.where(lost, 0, labels)

        labels, first, second = draw(1_000_000)
        truth = compute_macro_f1(labels, first, 5) - compute_macro_f1(labels, second, 5)
        for n in (300, 1000, 3000):
            found = []
            for _ in range(round(400 * scale)):
                labels, first, second = draw(n)
                if (labels == 4).any():
                    found.append(compare_macro_f1(labels, first, second, 5))
            what = f"macro F1, a class of {often:.0%} of {n} samples loses {loses:.0%}"
            yield from on_limit(found, truth, what)
    rates = np.array([0.3, 0.2, 0.1, 0.05, 0.02])
    truth = 1 - 2 * 0.95 / 1.95  # F1 of a class of which 5% are not found
    for n in (100, 300, 1000):
        held, widths = [], []
        for _ in range(round(100 * scale)):
            has = generator.random((n, 5)) < rates
            lost = has & (generator.random((n, 5)) < 0.05)
            true, predicted = (
                [np.flatnonzero(row).tolist() for row in table] for table in (has, has & ~lost)
            )
            scored = MultiLabel().score_predictions(true, true, predicted).classes
            measure_scores.cache_clear()
            held.append(all(one.drop_ci[0] <= truth <= one.drop_ci[1] for one in scored))
            widths.append([one.drop_ci[1] - one.drop_ci[0] for one in scored])
        wide = np.median([max(each) for each in widths]) if widths else nan
        what = f"drops of 5 classes of 2 to 30 % of {n} samples, all of them in their intervals"
        yield share(held, COVERAGE, what=what, claimed="95 %", note=f"widest {wide:.2f}")


PARTS: dict[str, Callable[..., Iterator[Row]]] = {
    each.__name__: each
    for each in (
        percentiles,
        processes,
        criteria,
        signoffs,
        two_speeds,
        seen_speeds,
        looks,
        evaluations,
        chosen,
        tables,
        other_runs,
        requests,
        left_out,
        energy,
        accuracy,
        tasks,
        sampled,
        rare,
        clusters,
        outputs,
        speedups,
        baselines,
        throughput,
        interleaving,
        validity,
        slow_noise,
        repeated_changes,
        inputs,
        other_shapes,
        other_samples,
        assumptions,
        assumed_samples,
        server,
        live,
        fleet,
        races,
        regressions,
        classes,
    )
}


def table(rows: list[Row]) -> str:
    head = ["simulated", "claimed", "seen (± 1 sd)", "wanted", "", "note"]
    lines = [head, ["---"] * len(head), *(row.text for row in rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


PIECE = 0.5
"""Largest scale of one piece of a part."""


@dataclass(frozen=True)
class Piece:
    """Some of the draws of a part, from their own fixed seed."""

    part: str
    scale: float
    number: int

    def simulate(self) -> list[Row]:
        return list(PARTS[self.part](np.random.default_rng([2026, self.number]), self.scale))


def cut_into_pieces(part: str, scale: float) -> list[Piece]:
    count = max(1, ceil(scale / PIECE - 1e-9))
    return [Piece(part, scale / count, number) for number in range(count)]


def join_pieces(pieces: Sequence[list[Row]]) -> list[Row]:
    """The rows of a part: the same row of each piece, with all of their draws; text that depends on the draws is the first's."""
    return [join_rows(rows) for rows in zip(*pieces, strict=True)]


def join_rows(rows: Sequence[Row]) -> Row:
    draws = sum(row.draws for row in rows)
    if not draws:
        return rows[0]
    seen = sum(row.draws * row.seen for row in rows if row.draws) / draws
    return replace(rows[0], seen=seen, draws=draws)


def simulated(names=tuple(PARTS), scale=1.0) -> dict[str, list[Row]]:
    """The rows of each part."""
    return {
        name: join_pieces([piece.simulate() for piece in cut_into_pieces(name, scale)])
        for name in names
    }


def simulate_together(
    names: Sequence[str], scale: float, processes: int, seconds: float
) -> Iterator[tuple[str, list[Row]]]:
    """The rows of each part as soon as all of its pieces are drawn, until `seconds` are over."""
    pieces = {name: cut_into_pieces(name, scale) for name in names}
    drawn: dict[str, dict[int, list[Row]]] = {name: {} for name in names}
    ends = time.perf_counter() + seconds
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        every = [piece for each in pieces.values() for piece in each]
        answers = pool.imap_unordered(answer, every)
        for _ in every:
            try:
                piece, rows = answers.next(max(0.0, ends - time.perf_counter()))
            except multiprocessing.TimeoutError:
                return
            of_part = drawn[piece.part]
            of_part[piece.number] = rows
            if len(of_part) == len(pieces[piece.part]):
                yield piece.part, join_pieces([of_part[at] for at in sorted(of_part)])


def answer(piece: Piece) -> tuple[Piece, list[Row]]:
    return piece, piece.simulate()


ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1"}
"""In each process: their own threads would wait for each other."""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=86_400.0)
    parser.add_argument("--rows", type=Path)
    given = parser.parse_args()
    os.environ.update(ONE_THREAD)
    begun, found = time.perf_counter(), {}
    for name, rows in simulate_together(given.only, given.scale, given.processes, given.seconds):
        found[name] = rows
        print(f"## {name} ({time.perf_counter() - begun:.0f} s)\n{table(rows)}\n", flush=True)
    taken = time.perf_counter() - begun
    if given.rows:
        write_rows(given.rows, found, {"scale": given.scale, "seconds": round(taken)})
    every = [row for rows in found.values() for row in rows]
    broken = [row.what for row in every if not row.kept]
    missing = [name for name in given.only if name not in found]
    print(
        f"{len(broken)} of {len(every)} break their threshold"
        + "".join(f"\n  {each}" for each in broken)
        + "".join(f"\nnot drawn in time: {each}" for each in missing)
    )
    return 1 if broken or missing else 0


def write_rows(file: Path, found: dict[str, list[Row]], about: dict[str, float]) -> None:
    """JSON lines: what the run was, then part, words, rate, draws, and thresholds of each row; null for a withheld rate."""
    lines: list[object] = [about | {"cores": len(os.sched_getaffinity(0))}]
    for name in sorted(found):
        for row in found[name]:
            seen = None if np.isnan(row.seen) else round(row.seen, 6)
            lines.append([name, row.what, seen, row.draws, row.least, round(row.most, 4)])
    texts = (json.dumps(each, ensure_ascii=False) for each in lines)
    file.write_text("\n".join(texts) + "\n", encoding="utf-8")


def read_rows(file: Path) -> tuple[dict[str, Any], dict[str, list[Row]]]:
    """What `write_rows` wrote."""
    about, *lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    found: dict[str, list[Row]] = {}
    for name, what, seen, draws, least, most in lines:
        row = Row(what, "", nan if seen is None else seen, draws, least, most)
        found.setdefault(name, []).append(row)
    return about, found


if __name__ == "__main__":
    sys.exit(main())
