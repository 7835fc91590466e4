#!/usr/bin/env python3
"""Checks a dossier of `optpipe signoff` without optpipe: its hashes, every judged figure, and the verdict.

    python3 verify_dossier.py DOSSIER [--allowed-signers FILE]

Written from docs/dossier-format.md, version 1, whose sections are named below as §. Needs Python 3.11 and, to read Parquet,
`pyarrow` or `polars`. Prints a line for each finding. Exit status: 0 the dossier agrees with its raw files, 1 it differs,
5 nothing differs but a judged figure was not recomputed, 2 not a dossier, 3 no Parquet reader.
"""

import argparse
import hashlib
import json
import math
import re
import subprocess
import sys
import tempfile
import tomllib
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import accumulate, combinations, count
from operator import mul
from pathlib import Path, PurePosixPath
from statistics import NormalDist, fmean, median, stdev
from types import SimpleNamespace as Box

FORMAT = 1
PASS, FAIL, INCONCLUSIVE = "PASS", "FAIL", "INCONCLUSIVE"
REPORTS = {"report.html", "report.md", "junit.xml", "comparison.json"}
SEAL = ("SHA256SUMS", "SHA256SUMS.sha256", "SHA256SUMS.sig", "approval.json", "approval.json.sig")
LOAD = ("batch_size", "scenario", "mode", "streams", "rate_per_s", "length")
STATED = {"wrong-output", "stale-answer", "cached-answer", "interrupted", "too-few-samples", "not-steady", "out-of-memory", "died",
          "refused"}
OWN_SAMPLES = {"drift", "bimodal", "not-steady", "dispersion"}
LIMITS = {"max_cv": 0.025, "max_drift": 0.025, "max_other_cpu_share": 0.1, "max_clock_change": 0.03,
          "max_gpu_temperature_c": 85.0}
GAP = math.log1p(0.05)
SIZES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "kB": 1e3, "MB": 1e6, "GB": 1e9}
SCORES = ("top1", "mIoU", "pixel-accuracy", "AP", "AP50", "AP75", "Spearman", "F1", "EM", "recall")
UNITS = {
    "ns": {"ns": 1, "us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9}, "images/s": {"images/s": 1, "samples/s": 1}, "fraction": {"%": 0.01},
    "points": dict.fromkeys(("points", "point", "pt", *SCORES), 1), "bytes": SIZES, "dB": {"dB": 1}, "1": {"": 1},
    "J/image": {f"{prefix}J/{of}": factor for of in ("image", "sample") for prefix, factor in (("", 1), ("m", 1e-3))},
}
TAILS = ("p50", "p90", "p95", "p99", "p99.9")
SECTIONS = {  # §4: of each key, whether it is a lower limit, and its base unit
    "latency": dict.fromkeys((*TAILS, "mean_p90", "mean_p95", "mean_p99"), (False, "ns")), "throughput": {"minimum": (True, "images/s")},
    "regression": dict.fromkeys((*TAILS, "throughput"), (False, "fraction")), "memory": {"maximum": (False, "bytes")},
    "energy": {"maximum": (False, "J/image")}, "stability": {"maximum_cv": (False, "fraction")},
    "accuracy": {"maximum_drop": (False, "points"), "minimum_score": (True, "points"), "minimum_top1": (True, "fraction"),
                 "minimum_agreement": (True, "fraction"), "maximum_f1_drop": (False, "points")},
    "preprocessing": {"minimum_agreement": (True, "fraction"), "minimum_snr": (True, "dB")},
    "outputs": {"minimum_snr": (True, "dB"), "minimum_cosine": (True, "1"), "minimum_agreement": (True, "fraction"),
                "maximum_abs_error": (False, "1")},
    "precision": dict.fromkeys(("fp32", "tf32", "fp16", "bf16", "int8", "fp8"), (True, "fraction")),
    "size": {"maximum": (False, "bytes")}, "tensor_cores": {"minimum_share": (True, "fraction")},
}
TIMED = ("latency", "throughput", "regression", "memory", "energy", "stability", "environment")
REQUEST = {"model", "artifact", "waivers", "baseline", "baseline_artifact", "optpipe", "created_utc", "drawn_with", "measurements",
           "removed", "other_file", "network", "baseline_network", "since", "policy_utc", "verifier",
           "schema_version"}
VERDICT = {"verdict", "dossier_name", "model", "artifact", "policy", "criteria", "notes", "baseline", "expires_if", "runs",
           "created_utc", "optpipe", "groups", "since", "runs_left_out"}

class Damaged(Exception):
    """A file that cannot be read as the format requires."""

# ---- distributions

@lru_cache(None)
def beta(a, b, x):
    """The regularized incomplete beta function, by Lentz's continued fraction."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - beta(b, a, 1 - x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    value, c, d = 1.0, 1.0, 0.0
    for step in range(2000):
        m = step // 2
        at = a + 2 * m
        factor = -(a + m) * (a + b + m) / (at * (at + 1)) if step % 2 else m * (b - m) / ((at - 1) * at) if m else 1 / x
        term = x * factor
        d, c = 1 / (1 + term * d or 1e-300), 1 + term / c or 1e-300
        value *= c * d
        if abs(1 - c * d) < 1e-15 and step:
            break
    return front * (value - 1)

def solve(function, low, high):
    """Where the increasing `function` is 0."""
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < 0 else (low, middle)
    return (low + high) / 2

def t_tail(value, freedom):
    """P(T > value) of Student's T."""
    if freedom == math.inf:
        return NormalDist().cdf(-value)
    half = beta(freedom / 2, 0.5, freedom / (freedom + value * value)) / 2
    return half if value > 0 else 1 - half

@lru_cache(None)
def t_quantile(level, freedom):
    if freedom == math.inf:
        return NormalDist().inv_cdf(level)
    high = next(2.0**power for power in count() if t_tail(2.0**power, freedom) < 1 - level)
    return solve(lambda value: 1 - level - t_tail(value, freedom), 0.0, high)

def binomial_cdf(hits, trials, share):
    return 1.0 if hits >= trials else beta(trials - hits, hits + 1, 1 - share)

# ---- estimates: `mean` is (value, standard error, freedom) of Student's t

def interval(mean, confidence):
    half = t_quantile(0.5 + confidence / 2, mean[2]) * mean[1]
    return mean[0] - half, mean[0] + half

def tail_above(mean, limit):
    """The probability of a value at least this far above `limit` if that is the truth."""
    return float(mean[0] <= limit) if mean[1] == 0 else t_tail((mean[0] - limit) / mean[1], mean[2])

def mean_from_values(values, first=None):
    known = values if first is None else first
    return None if len(known) < 3 else (fmean(values), stdev(known) / math.sqrt(len(values)), len(known) - 1)

def mean_from_runs(runs, first=None):
    """§6, rules 1 and 2."""
    first = first or [len(run) for run in runs]
    every, number = [value for run in runs for value in run], len(runs)
    pooled = mean_from_values(every, [value for run, known in zip(runs, first) for value in run[:known]])
    inside_freedom = len(every) - number
    if pooled is None or number < 2 or inside_freedom < 1:
        return pooled
    means = [fmean(run) for run in runs]
    between = sum(len(run) * (mean - pooled[0]) ** 2 for run, mean in zip(runs, means)) / (number - 1)
    inside = sum((value - mean) ** 2 for run, mean in zip(runs, means) for value in run) / inside_freedom
    ratio = between / inside if inside > 0 else math.inf if between > 0 else 0.0
    chance = beta(inside_freedom / 2, (number - 1) / 2, inside_freedom / (inside_freedom + (number - 1) * ratio))
    if chance >= 0.25:
        error = pooled[1] * math.sqrt(len(every) * sum(1 / len(run) for run in runs)) / number
        return fmean(means), error, min(pooled[2], 1.5 * (number - 1))
    return fmean(means), stdev(means) / math.sqrt(number), number - 1

def widen(value, low, high, processes, confidence, gap=0.0, percent=0.0):
    """§6: allows for a speed that no process had."""
    gap, share = max(gap, GAP), 1 - math.exp(math.log((1 - confidence) / 2) / processes)
    wide = min(low, value * math.exp(-gap * share)), max(high, value * math.exp(gap * share))
    return (wide[0], value * math.exp(math.hypot(gap, math.log(high / value)))) if percent > 50 and share >= 1 - percent / 100 else wide

class Share:
    """§8.1: hits of n."""

    def __init__(self, hits, n):
        self.value, self.hits, self.n = hits / n, hits, n

    def interval(self, confidence):
        tail, hits, n = (1 - confidence) / 2, self.hits, self.n
        low = solve(lambda x: beta(hits, n - hits + 1, x) - tail, 0.0, 1.0) if hits else 0.0
        return low, solve(lambda x: beta(hits + 1, n - hits, x) - 1 + tail, 0.0, 1.0) if hits < n else 1.0

    def above(self, limit):
        return binomial_cdf(self.n - self.hits, self.n, 1 - limit)

    def below(self, limit):
        return binomial_cdf(self.hits, self.n, limit)

class Difference:
    """§8.1: the mean difference of paired samples, with skewness and three pseudo-samples."""

    def __init__(self, value, parts):
        mean = fmean(parts)
        self.value, self.n = value, len(parts)
        self.squares, self.cubes = (sum((part - mean) ** power for part in parts) for power in (2, 3))

    def spread(self, side):
        return math.sqrt(self.squares * self.n / (self.n - 1) + 3), (side * self.cubes + 1) / (self.squares + 1) / 3

    def interval(self, confidence):
        if self.n < 20:
            return -1.0, 1.0
        quantile, bounds = t_quantile(0.5 + confidence / 2, self.n - 1), []
        for side in (-1, 1):
            error, lean = self.spread(side)
            used = min(quantile, error / (-2 * lean)) if lean < 0 else quantile
            bounds.append(self.value + side * (used * error + used**2 * lean) / self.n)
        return max(-1.0, bounds[0]), min(1.0, bounds[1])

    def chance(self, side, distance):
        if self.n < 20:
            return 0.5
        (error, lean), gap = self.spread(side), self.n * distance
        root = math.sqrt(max(error**2 + 4 * lean * gap, 0.0)) if gap > 0 else error
        return t_tail(2 * gap / (error + root), self.n - 1)

    def above(self, limit):
        return self.chance(-1, self.value - limit)

    def below(self, limit):
        return self.chance(1, limit - self.value)

def scaled(figure, factor):
    return Box(above=lambda limit: figure.above(limit / factor), below=lambda limit: figure.below(limit / factor))

def of_mean(mean, convert=lambda limit: limit):
    return Box(above=lambda limit: tail_above(mean, convert(limit)), below=lambda limit: tail_above((-mean[0], *mean[1:]), -convert(limit)))

# ---- one measurement (§5)

def correlate(series):
    """(n, (2Γ − γ₀)/γ₀, m) of §5.1; the second is None for a constant series."""
    n, mean = len(series), fmean(series)
    y = [value - mean for value in series]
    variance = math.fsum(map(mul, y, y)) / n
    if n < 4 or variance <= 1e-18 * math.fsum(map(mul, series, series)) / n:
        return n, None, 0
    total, smallest, m = 0.0, math.inf, 0
    for lag in range(0, n // 2 * 2, 2):
        pair = (sum(map(mul, y, y[lag:])) + sum(map(mul, y, y[lag + 1 :]))) / n
        if pair <= 0:
            break
        smallest, m = min(smallest, pair), m + 1
        total += smallest
    return n, (2 * total - variance) / variance, m

def worth(found, caution=0.0):
    n, excess, m = found
    return float(n) if excess is None else n / max(1.0, excess * (1 + caution * math.sqrt(2 * (4 * m + 1) / n)))

@lru_cache(None)
def fewest(percent):
    """The smallest number of samples of which two or more lie above with 99 %."""
    p = percent / 100
    return next(n for n in count(2) if p**n + n * (1 - p) * p ** (n - 1) <= 0.01)

def percentile(ordered, percent):
    return float(ordered[min(max(math.ceil(len(ordered) * percent / 100 - 1e-9), 1), len(ordered)) - 1])

def shown_percentiles(x, percents, confidence):
    """The percentiles that the samples support, by name."""
    ordered, n, found = sorted(x), len(x), {}
    ranks = correlate([float(bisect_left(ordered, value) + bisect_right(ordered, value)) for value in x])
    for percent in sorted(percents):
        rarer, value = min(percent / 100, 1 - percent / 100), percentile(ordered, percent)
        if n < fewest(percent) or worth(ranks) < min(25, n / 2):
            break
        bound = worth(ranks, 1.0) if percent <= 50 else 5 / 3 * worth(ranks)
        effective = min(worth(correlate([float(each <= value) for each in x]), 1.0), bound)
        if math.floor(effective) < max(2, math.ceil(math.log((1 - confidence) / 2) / math.log(1 - rarer) - 1e-9)):
            break
        found[f"p{percent:g}"] = value
    return found

def quantile(values, level):
    ordered, at = sorted(values), level * (len(values) - 1)
    low = math.floor(at)
    return ordered[low] + (at - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])

def find_drift(s):
    """§5.3: (change, p)."""
    blocks = min(20, len(s) // 4) // 2 * 2
    if blocks < 8:
        return 0.0, 1.0
    size, longer = divmod(len(s), blocks)
    edges = [at * size + min(at, longer) for at in range(blocks + 1)]
    medians = [median(s[low:high]) for low, high in zip(edges, edges[1:])]
    half, level, found = blocks // 2, median(medians), []
    for series in (medians, [(medians[half - 1 - at] + medians[half + at]) / 2 for at in range(half)]):
        k, pairs = len(series), list(combinations(enumerate(series), 2))
        score = sum((b > a) - (b < a) for (_, a), (_, b) in pairs)
        p = math.erfc(max(0, abs(score) - 1) / math.sqrt(k * (k - 1) * (2 * k + 5) / 18) / math.sqrt(2))
        slope = median((b - a) / (j - i) for (i, a), (j, b) in pairs)
        found.append((p, slope * (k - 1) / level if level else 0.0))
    p, change = min(found, key=lambda each: each[0])
    return change, min(1.0, 2 * p)

def is_bimodal(s):
    """§5.4."""
    n = len(s)
    if n < 40 or min(s) <= 0:
        return False
    v, h = sorted(map(math.log, s)), n // 2
    scale = max(min(b - a for a, b in zip(v, v[h:])) / 1.349, 1e-4)
    start, end = v[0] - 3 * scale, v[-1] + 3 * scale
    cell = max(scale / 8, (end - start) / 25600)
    edges = [start + at * cell for at in range(math.ceil((end + cell - start) / cell))]
    places = [bisect_left(v, edge) for edge in edges]
    counts = [b - a for a, b in zip(places, places[1:])]
    width = 0.3 * scale / cell
    reach = int(4 * width) + 1
    kernel = [math.exp(-((j / width) ** 2) / 2) for j in range(-reach, reach + 1)]
    weight, density = sum(kernel), [0.0] * len(counts)
    for at, number in enumerate(counts):
        if number:
            for j, share in enumerate(kernel, at - reach):
                if 0 <= j < len(density):
                    density[j] += number * share / weight
    peaks = [at for at in range(1, len(density) - 1) if density[at - 1] < density[at] >= density[at + 1]]
    highest = density.index(max(density))
    for other in sorted((at for at in peaks if at != highest), key=lambda at: -density[at]):
        low, high = sorted((highest, other))
        valley = min(range(low, high + 1), key=density.__getitem__)
        slow = n - bisect_left(v, edges[valley])
        if density[valley] >= density[other] / 2 or min(slow, n - slow) < 0.05 * n:
            continue
        lower = min((highest, other), key=density.__getitem__) if density[highest] != density[other] else other
        centers = [edges[at] + cell / 2 for at in (lower, valley)]
        b, a = (bisect_left(v, center + 0.6 * scale) - bisect_left(v, center - 0.6 * scale) for center in centers)
        if abs(edges[highest] - edges[other]) >= math.log1p(0.04) and (binomial_cdf(a, a + b, 0.5) if a + b else 1.0) < 0.03:
            return True
    return False

def find_codes(record, rows, machine):
    """§5.2: the invalidating reasons."""
    limits, device = {**LIMITS, **record["limits"]}, record["subject"]["device"]
    codes = {each["code"] for each in record["reasons"] if each["invalidates"] and each["code"] in STATED}
    read = lambda name: [float(value) for value in machine.get(name, ()) if value is not None]
    mean = lambda values: sum(values) / max(len(values), 1)
    found = {"not-watched": record["machine_file"] is None}
    other, share = mean(read("other_cpu_cores")), limits["max_other_cpu_share"]
    cpus = len(record["subject"]["affinity"] or (0,))
    found["loaded-host"] = other > share * cpus if device == "cpu" else mean(read("worker_waited_cores")) > share / 2
    found["busy-gpu"] = max(read("gpu_other_processes"), default=0) > 0
    found["throttled"] = any(int(mask) & 0xE8 for mask in read("gpu_throttle_reasons"))
    for name in ("gpu_sm_mhz", "gpu_mem_mhz", "cpu_mhz"):
        inner = read(name)[1:-1]
        if len(inner) >= 3 and max(inner) > 0 and 1 - quantile(inner, 0.05) / quantile(inner, 0.95) > limits["max_clock_change"]:
            found["clocks-moved"] = True
    found["hot"] = max(read("gpu_temperature_c"), default=0) > limits["max_gpu_temperature_c"]
    on_device = None not in rows["compute_ns"]
    s = [float(each) for each in (rows["compute_ns"] if on_device else map(lambda a, b: b - a, rows["start_ns"], rows["end_ns"]))]
    change, p = find_drift(s)
    found["drift"] = p <= 0.01 and abs(change) > limits["max_drift"]
    found["bimodal"] = is_bimodal(s)
    found["dispersion"] = len(s) > 1 and stdev(s) / fmean(s) > limits["max_cv"]
    rate = record["load"]["rate_per_s"]
    if record["load"]["scenario"] == "server" and rate is not None and len(s) >= 40:
        due, start, end = rows["scheduled_ns"], rows["start_ns"], rows["end_ns"]
        waited = [at for at in range(1, len(s)) if due[at] <= end[at - 1]]
        if len(waited) >= 20:
            busy = fmean(end[at] - start[at] for at in waited) + median(start[at] - end[at - 1] for at in waited)
            found["falling-behind"] = 1e9 / max(busy, 1.0) <= rate
    return codes | {code for code, hit in found.items() if hit}

def measure(record, rows, machine, confidence, percents):
    """§5.1: the figures of one measurement; `rows` are those of phase 1, or None."""
    load, inputs = record["load"], record["inputs"] or {}
    told = [each["code"] for each in record["reasons"] if each["invalidates"]]
    if not rows or not rows["end_ns"]:
        return Box(codes=set(told) or {"no-samples"}, figures={}, median=None, latencies=None, samples=0, duration=0.0, device_peak=None)
    start, end = min(rows["start_ns"]), max(rows["end_ns"])
    inside = [at for at, time in enumerate(machine.get("time_ns", ())) if start <= time <= end]
    during = {name: [column[at] for at in (inside[1:] if len(inside) > 2 else inside)] for name, column in machine.items()}
    x = [float(b - a) for a, b in zip(rows["scheduled_ns"], rows["end_ns"])]
    closed = load["scenario"] in ("single-stream", "multi-stream")
    busy = sum(rows["end_ns"]) - sum(rows["start_ns"]) if closed else end - start
    images, seconds, figures = sum(rows["images"]), (end - start) / 1e9, shown_percentiles(x, percents, confidence)
    figures["throughput"] = images / max(busy, 1) * 1e9
    if tokens := (load["length"] or 0) * (1 - inputs.get("padding", 0.0)):
        figures["tokens"] = figures["throughput"] * tokens
    if len(x) > 1 and fmean(x):
        figures["cv"] = stdev(x) / fmean(x)
    energy = [(time, joules) for time, joules in zip(during.get("time_ns", ()), during.get("gpu_energy_mj", ())) if joules is not None]
    if len(energy) >= 12 and images and (window := (energy[-1][0] - energy[0][0]) / 1e9) >= 8.0:
        figures["energy"] = (energy[-1][1] - energy[0][1]) / 1e3 / window * seconds / images
    owned = max((each for each in machine.get("gpu_worker_bytes", ()) if each is not None), default=0)
    peak = max(0, owned - inputs.get("rotated_bytes", 0)) if owned > 0 and inputs else record["device_peak_bytes"]
    memory = record["host_peak_bytes"] if record["subject"]["device"] == "cpu" else peak
    if memory is not None:
        figures["memory"] = float(memory)
    middle = percentile(sorted(x), 50.0) if len(x) >= fewest(50.0) else None
    return Box(codes=find_codes(record, rows, during), figures=figures, median=middle, latencies=x, samples=len(x),
               duration=seconds, device_peak=peak)

# ---- groups of processes (§6)

def pooled_percent(name):
    """The percentile if it is over all requests; 0 for a figure that is a mean over processes."""
    return float(name[1:]) if name in TAILS[1:] else 0.0

class Group:
    def __init__(self, tries):
        self.tries, self.newest = tries, tries[-1]
        self.valid = [one for one in tries if not one.codes]

    def showing(self, of):
        """What `of` gives of each process, by run: first stage first."""
        runs = defaultdict(lambda: defaultdict(list))
        for one in sorted(self.valid, key=lambda one: one.record["second_stage"]):
            if (value := of(one)) is not None:
                runs[one.run][one.record["second_stage"], one.record["process"]].append(value)
        return runs

    def value_of(self, name):
        medians = name == "p50" and len({(one.run, one.record["process"]) for one in self.valid}) >= 3
        return lambda one: one.figures.get(name.removeprefix("mean_"), one.median if medians else None)

    def values(self, name):
        return [[fmean(each) for each in run.values()] for run in self.showing(self.value_of(name)).values()]

    def parts(self, name):
        if not (percent := pooled_percent(name)):
            return self.values(name)
        runs = self.showing(lambda one: one.latencies if name in one.figures else None)
        samples = [[value for part in each for value in part] for run in runs.values() for each in run.values()]
        parts = iter(jackknife(samples, percent / 100) if samples else ())
        return [[next(parts) for _ in run] for run in runs.values()]

    def first(self, name):
        return [sum(not second for second, _ in run) for run in self.showing(self.value_of(name)).values()]

    def requested(self, name):
        name = name.removeprefix("mean_")
        percent = float(name[1:]) if name in TAILS else 0.0
        asked = [one for one in self.tries if one.record["load"]["percentile"] >= percent]
        return Group(asked) if asked and any(one not in asked and name not in one.figures for one in self.valid) else self

    def gap(self, name):
        values = [value for run in self.values(name) for value in run]
        if not values or min(values) <= 0:
            return 0.0
        spoilt = [one for one in self.tries if one.codes and one.codes <= OWN_SAMPLES]
        others = [one.figures.get(name.removeprefix("mean_"), one.median if name == "p50" else None) for one in spoilt]
        return max((abs(math.log(each / fmean(values))) for each in others if each is not None and each > 0), default=0.0)

    def mean(self, name):
        parts = self.parts(name)
        return mean_from_runs(parts, self.first(name)) if parts else None

    def estimate(self, name, confidence, unseen):
        values = [value for run in self.parts(name) for value in run]
        if not values:
            return None
        if (mean := self.mean(name)) is None:
            return fmean(values), None, None
        low, high = interval(mean, confidence)
        if name == "energy":
            low, high = low - 0.05 * mean[0], high + 0.05 * mean[0]
        if name not in ("cv", "memory"):
            low, high = widen(mean[0], low, high, len(values), unseen, self.gap(name), pooled_percent(name))
        return mean[0], max(low, 0.0), high

def jackknife(processes, share):
    """Each process's contribution to the percentile of all requests."""
    number = len(processes)
    ordered = sorted((value, owner, 1 / len(each)) for owner, each in enumerate(processes) for value in each)

    def find(without=None):
        totals = list(accumulate(0.0 if owner == without else weight for _, owner, weight in ordered))
        return ordered[bisect_left(totals, totals[-1] * share * (1 - 1e-12))][0]

    whole = find()
    if number < 2:
        return [whole]
    left = [find(each) for each in range(number)]
    return [whole + (number - 1) * (fmean(left) - each) for each in left]

def as_text(value):
    return str(value).lower() if isinstance(value, bool) else str(value)

def settings_of(subject):
    options = {name: as_text(value) for name, value in sorted(subject["options"].items())}
    return options | ({} if subject["affinity"] is None else {"affinity": str(sorted(subject["affinity"]))})

def group_up(measured):
    groups = {}
    for one in sorted(measured, key=lambda one: (one.record["started_utc"], one.run)):
        key = one.record["subject"]["artifact"], str(settings_of(one.record["subject"])), one.load
        groups[key] = [*groups.pop(key, []), one]
    return [Group(tries) for tries in groups.values()]

def select(where, measured):
    newest = {}
    for group in group_up(measured):
        if all(wanted is None or wanted == has for wanted, has in zip(where, group.newest.load)):
            newest[group.newest.load] = group
    return list(newest.values())

# ---- files (§1, §2)

class Dossier:
    def __init__(self, folder):
        self.folder, self.differs, self.open, self.stated = folder, [], [], []

    def check(self, holds, line):
        if not holds:
            self.differs.append(line)

    def compare(self, place, stated, computed):
        numbers = [isinstance(each, (int, float)) and not isinstance(each, bool) for each in (stated, computed)]
        same = math.isclose(stated, computed, rel_tol=1e-6, abs_tol=1e-12) if all(numbers) else stated == computed
        self.check(same and isinstance(stated, bool) == isinstance(computed, bool), f"{place} is {stated!r}, recomputed {computed!r}")

    def path(self, name):
        steps = PurePosixPath(str(name)).parts
        paths = [self.folder.joinpath(*steps[:at]) for at in range(1, len(steps) + 1)]
        if not steps or ".." in steps or steps[0] == "/" or any(each.is_symlink() for each in paths):
            raise Damaged(f"{name}: not the name of a file in the dossier")
        return paths[-1]

    def has(self, name):
        return self.path(name).is_file()

    def read(self, name):
        try:
            return self.path(name).read_bytes()
        except OSError as error:
            raise Damaged(f"{name}: {error.strerror}") from error

    def json(self, name):
        def unique(pairs):
            if len({key for key, _ in pairs}) != len(pairs):
                raise Damaged(f"{name}: a key occurs twice")
            return dict(pairs)

        def refuse(text):
            raise Damaged(f"{name}: {text} is not JSON")

        return json.loads(self.read(name).decode(), object_pairs_hook=unique, parse_constant=refuse)

    def table(self, name):
        return read_parquet(self.read(name))

def read_parquet(content):
    """The columns as lists, with the one package that is not in the standard library."""
    try:
        from io import BytesIO

        try:
            from pyarrow.parquet import read_table
        except ImportError:
            import polars

            return polars.read_parquet(BytesIO(content)).to_dict(as_series=False)
        return read_table(BytesIO(content)).to_pydict()
    except ImportError:
        print("reading Parquet needs a package: pip install pyarrow", file=sys.stderr)
        sys.exit(3)
    except Exception as error:
        raise Damaged(f"a Parquet file cannot be read: {str(error).splitlines()[0]}") from error

def check_seal(dossier, signers):
    listed, folder = dossier.read("SHA256SUMS"), dossier.folder
    seal = f"{hashlib.sha256(listed).hexdigest()}  SHA256SUMS\n"
    dossier.check(dossier.read(SEAL[1]).decode() == seal, f"{SEAL[1]}: not the hash of SHA256SUMS")
    lines = [re.fullmatch(r"([0-9a-f]{64})  (\S(?:.*\S)?)", line) for line in listed.decode().splitlines()]
    if not all(lines) or not lines:
        raise Damaged("SHA256SUMS: not a list of hashes")
    sums = {line[2]: line[1] for line in lines}
    dossier.check("".join(f"{sums[name]}  {name}\n" for name in sorted(sums)).encode() == listed, "SHA256SUMS: not sorted, or a path twice")
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        known = name in SEAL or name in REPORTS or name in ("request.json", "policy.toml", "verdict.json") or re.fullmatch(
            r"(builds/[^/]+/(manifest\.json|errors\.parquet)|(baseline/)?runs/[^/]+/.+)", name)
        if path.is_symlink() or not (path.is_file() or (path.is_dir() and any(path.iterdir()))):
            dossier.differs.append(f"{name}: neither a regular file nor a folder with files")
        elif path.is_file():
            dossier.check(known, f"{name}: not part of a dossier")
            dossier.check(name in sums or name in SEAL, f"{name}: not in SHA256SUMS")
            if name.endswith(".json"):
                dossier.json(name)
    for name, digest in sums.items():
        dossier.check(dossier.has(name) and hashlib.sha256(dossier.read(name)).hexdigest() == digest, f"{name}: changed or missing")
    if dossier.has(SEAL[3]):
        approval = dossier.json(SEAL[3])
        dossier.compare("approval.json: dossier", approval["dossier"], hashlib.sha256(listed).hexdigest())
        dossier.stated.append(f"approved by {approval['by']} ({approval['role']}) on {approval['approved_utc']}")
    if not dossier.has(SEAL[2]):
        dossier.check(signers is None, f"{SEAL[2]}: missing")
        dossier.stated.append("not signed")
        return
    with tempfile.NamedTemporaryFile() as copy:
        copy.write(dossier.read(SEAL[2])), copy.flush()
        run = lambda *words: subprocess.run(["ssh-keygen", "-Y", *words, "-s", copy.name], input=listed, capture_output=True)
        who = run("find-principals", "-f", str(signers)).stdout.decode().split("\n")[0] if signers else ""
        how = ("verify", "-f", str(signers), "-I", who) if signers else ("check-novalidate",)
        found = run(*how, "-n", "optpipe-dossier")
        dossier.check(found.returncode == 0, f"{SEAL[2]}: {found.stderr.decode().strip() or 'signed by nobody of the allowed signers'}")
        dossier.stated.append(f"signed by {who or 'a key that only --allowed-signers can tell'}")

def canonical_hash(value):
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()).hexdigest()

def hash_engine(manifest):
    names = [manifest["info"]["file"], *manifest["info"].get("more_files", ())]
    hashes = {name: manifest["files"][name]["sha256"] for name in names}
    return hashes[names[0]] if len(names) == 1 else canonical_hash(hashes)

def list_texts(value):
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [value] if isinstance(value, str) else [text for each in inner for text in list_texts(each)]

def check_builds(dossier):
    builds = {}
    for path in sorted((dossier.folder / "builds").glob("*/")):
        place = f"builds/{path.name}"
        manifest = builds[path.name.rpartition("-")[2]] = dossier.json(f"{place}/manifest.json")
        computed = canonical_hash({"kind": manifest["kind"], "recipe": manifest["recipe"]})[:12]
        dossier.check(manifest["id"] == computed, f"{place}: id is {manifest['id']}, its recipe gives {computed}")
        dossier.check(path.name == f"{manifest['kind']}-{manifest['id']}", f"{place}: describes another record")
        dossier.check(manifest["schema_version"] == 1, f"{place}: another schema version")
    for name, manifest in builds.items():
        place, info, recipe = f"builds/{manifest['kind']}-{name}", manifest["info"], manifest["recipe"]
        absent = {text for text in list_texts(recipe) if text in builds} - {name, *manifest["parents"]}
        dossier.check(not absent, f"{place}: its recipe names {sorted(absent)}, which are no parents")
        if weights := info.get("weights"):
            dossier.check(weights["trained"] == (weights["source"] != "random"), f"{place}: trained contradicts the weights")
        if manifest["kind"] == "artifact":
            for key in ("backend", "precision", "device"):
                dossier.compare(f"{place}: {key}", info[key], recipe.get(key, info[key]))
            for parent in manifest["parents"]:
                if parent in builds and builds[parent]["kind"] == "model":
                    dossier.compare(f"{place}: weights", weights, builds[parent]["info"]["weights"])
        if manifest["kind"] == "model":
            asked = recipe.get("model", {}).get("weights", {})
            drawn = ("random" in asked) == (weights["source"] == "random") or "default" in asked
            dossier.check(drawn, f"{place}: weights contradict its recipe")
    return builds

def check_run(dossier, place, builds, needed, confidence):
    """Reads a run, checks it by itself, and returns it; a bench run with its measurements at `confidence`."""
    manifest = dossier.json(f"{place}/manifest.json")
    kind, files, parents = manifest["kind"], manifest["files"], set(manifest["parents"])
    run = Box(name=place.rpartition("/")[2], place=place, kind=kind, manifest=manifest, measured=[], records=[])
    dossier.check(run.name == f"{kind}-{manifest['id']}" and manifest["schema_version"] == 1, f"{place}: describes {kind}-{manifest['id']}")
    for path in sorted((dossier.folder / place).rglob("*")):
        name = path.relative_to(dossier.folder / place).as_posix()
        if path.is_file() and name != "manifest.json":
            there = hashlib.sha256(dossier.read(f"{place}/{name}")).hexdigest()
            dossier.check(name in files and there == files[name]["sha256"], f"{place}/{name}: not the file of its manifest")
    if kind == "evaluate":
        run.record = dossier.json(f"{place}/evaluate.json")
        dossier.compare(f"{place}: trained", manifest["info"]["trained"], run.record["weights"]["source"] != "random")
        for row in run.record["results"]:
            dossier.check(row["artifact"] in (None, *parents), f"{place}: {row['artifact']} was evaluated and is no parent")
            if row["artifact"] in builds:
                dossier.compare(f"{place}: weights", run.record["weights"], builds[row["artifact"]]["info"]["weights"])
    elif kind in ("preprocess", "profile"):
        run.record = dossier.json(f"{place}/{kind}.json")
    elif kind == "bench":
        document = dossier.json(f"{place}/measurements.json")
        dossier.check(document == {"measurements": document["measurements"], "schema_version": 1}, f"{place}: other keys")
        run.records = document["measurements"]
        dossier.compare(f"{place}: measurements", manifest["info"]["measurements"], len(run.records))
        subjects = {record["subject"]["artifact"] for record in run.records}
        whole = subjects == parents or (subjects < parents and manifest["status"] == "interrupted")
        dossier.check(whole, f"{place}: parents are {sorted(parents)}, measured were {sorted(subjects)}")
        for record in run.records:
            check_measurement(dossier, run, record, builds, needed, confidence)
    return run

def check_measurement(dossier, run, record, builds, needed, confidence):
    place, subject = f"{run.place}: {record['id']}", record["subject"]
    if build := builds.get(subject["artifact"]):
        stated = {key: subject[key].partition(":")[0] for key in ("backend", "precision", "device")}
        expected = {key: build["info"][key] for key in stated} | {"sha256": hash_engine(build)}
        for key, value in (stated | {"sha256": subject["sha256"] or expected["sha256"]}).items():
            dossier.compare(f"{place}: {key}", value, expected[key])
    names = [record[key] and f"{run.place}/{record[key]}" for key in ("samples_file", "machine_file")]
    for name in filter(None, names):
        dossier.check(dossier.has(name) or subject["artifact"] not in needed, f"{place}: {name} is missing")
    if names[0] and not dossier.has(names[0]):
        return
    table = dossier.table(names[0]) if names[0] else {}
    order = sorted((at for at, phase in enumerate(table.get("phase", ())) if phase == 1), key=lambda at: table["end_ns"][at])
    rows = {name: [column[at] for at in order] for name, column in table.items()}
    machine = dossier.table(names[1]) if names[1] and dossier.has(names[1]) else {}
    stored = record["latency_ns"] or {"percentiles": {}, "withheld": {}, "confidence": 0.95, "median": None}
    asked, usual = {float(name[1:]) for name in (*stored["percentiles"], *stored["withheld"])}, {50.0, 90.0, 95.0, 99.0, 99.9}
    judged = measure(record, rows, machine, confidence, usual)
    own = judged if confidence == stored["confidence"] and asked <= usual else measure(record, rows, machine, stored["confidence"], asked)
    invalid = {each["code"] for each in record["reasons"] if each["invalidates"]}
    computed = {"verdict": "INVALID" if own.codes else "VALID", "samples": own.samples, "duration_s": own.duration}
    computed["device_peak_bytes"] = own.device_peak
    computed |= {"warm_up_samples": table["phase"].count(0)} if own.samples else {"host_peak_bytes": None, "latency_ns": None}
    for key, value in computed.items():
        dossier.compare(f"{place}: {key}", record[key], value)
    if own.samples:
        dossier.compare(f"{place}: INVALID by", sorted(invalid), sorted(own.codes))
    shown = {name: each["value"] for name, each in stored["percentiles"].items()}
    shown |= {"median": stored["median"], "cv": (stored.get("cv") or {}).get("value")}
    keys = {"throughput": "throughput_images_per_s", "tokens": "throughput_tokens_per_s", "energy": "energy_j_per_image"}
    shown |= {name: (record[key] or {}).get("value") for name, key in keys.items()}
    for name in shown.keys() | {f"p{percent:g}" for percent in asked}:
        dossier.compare(f"{place}: {name}", shown.get(name), own.median if name == "median" else own.figures.get(name))
    times = str([b - a for a, b in zip(rows["start_ns"], rows["end_ns"])]) if own.samples else None
    run.measured.append(Box(**vars(judged), record=record, run=run.name, load=tuple(record["load"][key] for key in LOAD), times=times,
                            environment=run.manifest["environment"]))

# ---- the policy (§4) and what is observed for it (§7, §8)

def parse(text, unit):
    text = text.replace("sample", "image") if isinstance(text, str) else text
    if isinstance(text, (int, float)) and unit == "1":
        return float(text)
    found = re.fullmatch(r"\s*([+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?)\s*(\S*)\s*", str(text).replace(",", ""))
    if not found or found[2] not in UNITS[unit]:
        raise Damaged(f"policy.toml: {text!r} is not in {unit}")
    return float(found[1]) * UNITS[unit][found[2]]

def read_policy(content):
    document = tomllib.loads(content.decode("utf-8-sig"))
    wanted, criteria = dict(document.get("environment", {})), []
    packages = {f"packages.{name}": value for name, value in wanted.pop("packages", {}).items()}
    places = {key: wanted[key] for key in ("gpu", "driver", "cpu", "python") if key in wanted} | packages
    for key, value in places.items():
        criteria += [Box(name=f"environment.{key}", section="environment", key=key, least=None, limit=value, unit=None)]
    for section, limits in SECTIONS.items():
        tables = document.get(section, [])
        for table in tables if isinstance(tables, list) else [tables]:
            get = table.get
            rate = parse(get("rate").replace("queries/s", "images/s"), "images/s") if "rate" in table else None
            where = get("batch_size"), get("scenario"), get("mode"), get("streams"), rate, get("length")
            batch, scenario, mode, streams, _, length = where
            slug = [batch and f"b{batch}", length and f"l{length}", scenario, streams and f"{streams}x", rate and f"{rate:g}qps", mode]
            for key in (key for key in limits if key in table):
                least, unit = limits[key]
                of = str(table[key]).split()[-1]
                score = of if unit == "points" and of in SCORES else None
                score = f"F1@{parse(get('at_threshold', '25%'), 'fraction'):.0%}" if key == "maximum_f1_drop" else score
                name = ".".join(filter(None, (section, key, *(slug if section in TIMED else ()), score, get("output"))))
                limit, shown = parse(table[key], unit), unit.replace("image", "sample") if "sample" in str(table[key]) else unit
                criteria.append(Box(name=name, section=section, key=key, least=least, limit=limit, unit=shown, where=where, score=score))
    return document, parse(document.get("confidence", "95 %"), "fraction"), criteria

def fact(environment, key):
    facts = {"cpu": environment["cpu"], "python": environment["python"]}
    facts |= {name: environment["gpus"][0][field] for name, field in (("gpu", "name"), ("driver", "driver")) if environment.get("gpus")}
    return environment["packages"].get(key.removeprefix("packages."), "none") if "." in key else facts.get(key, "none")

def see(value, low=None, high=None, blocked=False, source="", tail=None, processes=0, gap=0.0):
    return Box(value=value, low=low, high=high, blocked=blocked, source=source, tail=tail, processes=processes, gap=gap)

def blocks(group, engine):
    tries = group.valid or group.tries
    return not group.valid or any(one.record["caveats"] or one.record["subject"]["sha256"] not in (None, engine) for one in tries)

def observe_group(group, name, at, engine):
    group = group.requested(name)
    found, source = group.estimate(name, at.confidence, at.policy), group.newest.run
    if found is None:
        return see(math.nan, blocked=True, source=source)
    values = [value for run in group.values(name) for value in run]
    processes = len({(one.run, one.record["process"]) for one in group.valid})
    blocked = blocks(group, engine) or found[1] is None or (name not in ("energy", "memory") and len(values) != processes)
    mean = group.mean(name)
    if name == "memory":
        bound = None
        if len(values) > 2:
            factor = t_quantile(0.5 + at.confidence / 2, len(values) - 1) * math.sqrt(1 + 1 / len(values))
            bound = fmean(values) + factor * stdev(values)
        return see(max(values), max(values), max(max(values), bound) if bound else None, blocked, source)
    tail = mean and (scaled(of_mean(mean), 0.95) if name == "energy" else of_mean(mean))
    return see(*found, blocked, source, tail, 0 if name == "cv" else len(values), group.gap(name))

def observe_accuracy(dossier, runs, judged, at):
    """§8.1 by name; checks the rows of every evaluation on the way."""
    found, newest = {}, sorted((run for run in runs if run.kind == "evaluate"), key=lambda run: run.manifest["started_utc"], reverse=True)
    whole = [run.record["dataset"] for run in newest if judged.id in run.manifest["parents"] and run.name not in at.early]
    best = next((data["sha256"] for data in whole if data.get("validation")), None)
    for run in sorted(newest, key=lambda run: run.record["dataset"]["sha256"] != best):
        table, task = dossier.table(f"{run.place}/predictions.parquet"), run.record.get("task", "classification")
        other = any(row["artifact"] == judged.id and row["sha256"] not in (None, judged.sha256) for row in run.record["results"])
        counts = not (found or other or run.name in at.early) and judged.id in run.manifest["parents"]
        if task not in ("classification", "text-classification"):
            found |= {"task": task} if counts else {}
            continue
        source = [best[0] for best in table["source:best"]]
        dossier.compare(f"{run.place}: dataset: count", run.record["dataset"]["count"], len(source))
        for row in run.record["results"]:
            name = row["artifact"] or "source"
            if (mine := table.get(f"{name}:best")) is None:
                continue
            mine, truth, n = [best[0] for best in mine], table["class"], len(source)
            figures = {"agreement": Share(sum(map(int.__eq__, mine, source)), n)} if len(set(source)) > 1 else {}
            if None not in truth:
                was, now = ([int(one == true) for one, true in zip(each, truth)] for each in (source, mine))
                figures |= {"top1": Share(sum(now), n), "drop": Difference((sum(was) - sum(now)) / n, [a - b for a, b in zip(was, now)])}
            dossier.compare(f"{run.place}: {name}: samples", row["samples"], n)
            scored = ("top1", "drop") if run.manifest["info"]["trained"] else ()
            stated = {"agreement": (row["agreement"] or {}).get("share")} | {key: (row["accuracy"] or {}).get(key) for key in scored}
            for key, value in stated.items():
                dossier.compare(f"{run.place}: {name}: {key}", value, figures[key].value if key in figures else None)
            if counts and name == judged.id:
                hidden = row["calibrated_on"] / max(row["samples"], 1)
                for key, figure in figures.items():
                    low, high = figure.interval(at.confidence)
                    low, high = (low, min(1.0, high + hidden)) if key == "drop" else (max(0.0, low - hidden) if hidden else low, high)
                    found[key] = see(figure.value, low, high, not run.manifest["info"]["trained"], run.name, figure)
    return found

def observe_preprocessing(dossier, runs, judged, at):
    """§8.2 by name; checks the figures of every proof on the way."""
    found = {}
    for run in sorted((run for run in runs if run.kind == "preprocess"), key=lambda run: run.manifest["started_utc"], reverse=True):
        rows, record = dossier.table(f"{run.place}/images.parquet"), run.record
        for picture in record["parity"]["worst"]:
            dossier.path(f"{run.place}/{picture['file']}")
        n, refused, proof = len(rows["finite"]), bool(record["parity"]["refused"]), record["parity"]["proof"]
        noise, signal, classes = rows["difference_square"], rows["reference_square"], rows["reference_class"]
        share = Share(sum(map(int.__eq__, classes, rows["dali_class"])), n) if record["classifies"] and len(set(classes)) > 1 else None
        snr = None if not sum(noise) else -10 * math.log10(sum(noise) / sum(signal)) if all(rows["finite"]) else -1e30
        dossier.compare(f"{run.place}: images", record["parity"]["images"], n)
        dossier.compare(f"{run.place}: snr_db", proof["output"]["snr_db"], snr)
        dossier.compare(f"{run.place}: equal", (proof["top1_agreement"] or {}).get("equal"), share and share.hits)
        fits = record["model"] == judged.model and record.get("model_sha256") in (None, judged.model_sha256)
        if not found and run.name not in at.early and fits:
            blocked = refused or not record["trained"]
            found = {"agreement": share and see(share.value, *share.interval(at.confidence), blocked, run.name, share)}
            found |= {"task": record.get("task")} if proof["prediction_agreement"] else {}
            if snr is not None:
                spread = sum(noise) ** 2 >= 60 * sum(map(mul, noise, noise))
                ratio, half = sum(noise) / sum(signal), None
                error = math.sqrt(n / (n - 1) * sum((a - ratio * b) ** 2 for a, b in zip(noise, signal))) / sum(noise)
                half = 10 / math.log(10) * t_quantile(0.5 + at.confidence / 2, n - 1) * error
                found["snr"] = see(snr, *((snr - half, snr + half) if spread else (None, None)), refused or not spread, run.name)
    return found

# ---- verdicts (§9)

def judge(observed, confidence, look):
    """(verdict, worst observation) of each criterion."""
    tests = []
    for criterion, found in observed:
        for one in found:
            low, high = bounds(one)
            if one.blocked or criterion.least is None or not low < high:
                continue
            if one.tail:
                p = one.tail.below(criterion.limit) if criterion.least else one.tail.above(criterion.limit)
            else:
                spread = (high - one.value if criterion.least else one.value - low) / NormalDist().inv_cdf(0.5 + confidence / 2)
                distance = (criterion.limit - one.value) if criterion.least else one.value - criterion.limit
                p = NormalDist().cdf(-distance / spread) if spread > 0 else float(distance <= 0)
            base = float(criterion.section == "regression")
            if one.processes and base + one.value > 0 < base + criterion.limit:
                far = abs(math.log(base + one.value) - math.log(base + criterion.limit))
                p += max(0.0, 1 - far / max(GAP, one.gap)) ** one.processes / (look * (look + 1))
            tests.append((p, id(one)))
    rejected, left = set(), len(tests)
    for p, one in sorted(tests, key=lambda test: test[0]):
        if p > (1 - confidence) / 2 / left:
            break
        rejected.add(one)
        left -= 1
    for criterion, found in observed:
        ranked = []
        for one in found:
            (low, high), limit = bounds(one), criterion.limit
            if one.blocked or (criterion.least is not None and not low <= high):
                verdict = INCONCLUSIVE
            elif criterion.least is None:
                verdict = PASS if one.value == limit else INCONCLUSIVE
            elif (high < limit if criterion.least else low > limit) and (low == high or id(one) in rejected):
                verdict = FAIL
            else:
                verdict = PASS if (low >= limit if criterion.least else high <= limit) else INCONCLUSIVE
            number = isinstance(one.value, float)
            margin = 0.0 if not number else -math.inf if math.isnan(one.value) else low - limit if criterion.least else limit - high
            ranked.append(((FAIL, INCONCLUSIVE, PASS).index(verdict), not one.blocked, margin, one.source, verdict, one))
        worst = min(ranked, key=lambda each: each[:4], default=(0, 0, 0, 0, INCONCLUSIVE, None))
        yield worst[4], worst[5]

def bounds(one):
    return (one.value if one.low is None else one.low), (one.value if one.high is None else one.high)

def judge_trust(builds, judged, measured, timed):
    info, verifications = builds[judged.id]["info"], [each for each in builds.values() if each["kind"] == "verification"]
    checked = next((each for each in verifications if judged.id in each["parents"]), None)
    yield "trust.weights", PASS if info["weights"]["source"] != "random" else INCONCLUSIVE
    yield "trust.precision", PASS if info["precision_proof"]["proven"] else FAIL
    same = checked and checked["recipe"].get("artifact", {}).get("sha256") == judged.sha256
    yield "trust.outputs", {True: PASS, False: FAIL, None: INCONCLUSIVE}[checked["info"]["passed"]] if same else INCONCLUSIVE
    machines = {tuple(fact(one.environment, key) for key in ("gpu", "driver", "cpu")) for one in measured}
    yield "trust.environment", PASS if len(machines) == 1 and (not timed or any(not one.codes for one in measured)) else INCONCLUSIVE

def observe(criterion, at, judged, seen):
    """The observations of a criterion; None if this program does not recompute them."""
    section, key, info = criterion.section, criterion.key, judged.info
    if section == "environment":
        facts = {fact(one.environment, key): one.run for group in select((), at.measured) for one in group.valid or group.tries}
        return [see(value, source=run) for value, run in facts.items()]
    if section == "precision":
        share = info["precision_proof"]["share"]
        return [see(float((share["macs"] or share["layers"]).get(key, 0.0)), source=judged.place)]
    if section == "size":
        return [see(float(judged.size), source=judged.place)]
    if section in ("accuracy", "preprocessing"):
        found = seen[section]
        if found.get("task") or criterion.score not in (None, "top1"):
            return None
        name = key.partition("_")[2]
        one = found.get("top1" if name == "score" else name)
        if one and criterion.unit == "points":
            one = see(100 * one.value, 100 * one.low, 100 * one.high, one.blocked, one.source, scaled(one.tail, 100))
        return [one] if one else []
    if section in ("tensor_cores", "outputs") or (section == "regression" and at.baseline):
        return None
    if section == "regression":
        return []
    name = {"throughput": "throughput", "memory": "memory", "energy": "energy", "stability": "cv"}.get(section, key)
    return [observe_group(group, name, at, judged.sha256) for group in select(criterion.where, at.measured)]

def check_verdict(dossier, document, request, builds, runs, baseline):
    """Judges the evidence and compares the result with verdict.json."""
    policy, confidence, criteria = document
    verdict, artifact = dossier.json("verdict.json"), builds[request["artifact"]]
    files = [artifact["info"]["file"], *artifact["info"].get("more_files", ())]
    model = builds.get(artifact["parents"][0] if artifact["parents"] else None, {}).get("recipe")
    judged = Box(id=artifact["id"], sha256=hash_engine(artifact), info=artifact["info"], model=artifact["info"]["model"],
                 place=f"builds/artifact-{artifact['id']}/manifest.json", size=sum(artifact["files"][name]["size_bytes"] for name in files),
                 model_sha256=model and canonical_hash({**model.get("model", {}), "batch": None, "shapes": None}))
    registered = (request["policy_utc"] or request["created_utc"]) if policy.get("evidence", {}).get("preregistered") else None
    early = {run.name for run in runs for first in (registered, request["since"] if run.kind == "bench" else None)
             if first and datetime.fromisoformat(run.manifest["started_utc"]) < datetime.fromisoformat(first)}
    mine = [one for run in runs for one in run.measured if one.record["subject"]["artifact"] == judged.id]
    left_out = [one for one in mine if one.run in early]
    kept = [one for one in mine if one not in left_out]
    looks = Counter(load for load, _ in {(one.load, one.run) for one in mine})
    look = max(looks.values(), default=1) + len(request["removed"])
    options = {key: as_text(value) for key, value in policy.get("build", {}).get("options", {}).items()}
    measured = [one for one in kept if options.items() <= settings_of(one.record["subject"]).items()]
    at = Box(confidence=1 - (1 - confidence) / (look * (look + 1)), policy=confidence, measured=measured, baseline=baseline, early=early)
    seen = {"accuracy": observe_accuracy(dossier, runs, judged, at), "preprocessing": observe_preprocessing(dossier, runs, judged, at)}
    observed = [(criterion, observe(criterion, at, judged, seen)) for criterion in criteria]
    skipped = {criterion.name for criterion, found in observed if found is None}
    dossier.open += [f"{name}: not recomputed by this program" for name in sorted(skipped)]
    timed = any(criterion.section in TIMED[:-1] or criterion.section == "environment" for criterion in criteria)
    expected = dict(judge_trust(builds, judged, measured, timed))
    results = judge([(criterion, found or []) for criterion, found in observed], at.confidence, look)
    stated = {one["name"]: one for one in verdict["criteria"]}
    names = [*expected, *(criterion.name for criterion in criteria)]
    dossier.compare("verdict.json: criteria", [one["name"] for one in verdict["criteria"]], names)
    for (criterion, _), (result, one) in zip(observed, results):
        expected[criterion.name] = stated.get(criterion.name, {}).get("verdict") if criterion.name in skipped else result
        if (mine := stated.get(criterion.name)) is None or criterion.name in skipped:
            continue
        place, number = f"verdict.json: {criterion.name}", one is not None and isinstance(one.value, float)
        finite = one is not None and (not number or math.isfinite(one.value))
        dossier.compare(f"{place}: observed", mine["observed"], one.value if finite else None)
        bound = bounds(one) if finite and number and one.low is not None and math.isfinite(one.low) else (None, None)
        for name, value, computed in zip(("low", "high"), mine["ci"] or (None, None), bound):
            dossier.compare(f"{place}: {name}", value, computed)
        dossier.compare(f"{place}: source", mine["source"], one.source if one else "")
        dossier.compare(f"{place}: threshold", mine["threshold"], criterion.limit)
        dossier.compare(f"{place}: unit", mine["unit"], criterion.unit)
        limit = mine["limit"].removeprefix("at most ").removeprefix("at least ")
        if criterion.unit:
            unit = criterion.unit.replace("sample", "image")
            dossier.check(math.isclose(parse(limit, unit), criterion.limit, rel_tol=0.01), f"{place}: limit is {limit}")
    for name, result in expected.items():
        dossier.compare(f"verdict.json: {name}", stated.get(name, {}).get("verdict"), result)
        dossier.compare(f"verdict.json: {name}: waived", stated.get(name, {}).get("waived"), request["waivers"].get(name))
    dossier.check(set(request["waivers"]) <= set(expected), "request.json: waives criteria that do not exist")
    counted = {result for name, result in expected.items() if name not in request["waivers"]}
    overall = FAIL if FAIL in counted else INCONCLUSIVE if INCONCLUSIVE in counted or not counted else PASS
    info = artifact["info"]
    facts = {
        "verdict": overall, "model": judged.model, "runs": sorted({one.run for one in measured}),
        "runs_left_out": sorted({one.run for one in left_out}),
        "artifact": {"id": judged.id, "backend": info["backend"], "precision": info["precision"], "sha256": judged.sha256,
                     "size_bytes": judged.size, "weights": info["weights"]["source"]},
        "policy": {"name": policy.get("name", "unnamed policy"), "sha256": hashlib.sha256(dossier.read("policy.toml")).hexdigest()},
    } | {key: request[key] for key in ("baseline", "created_utc", "optpipe", "since")}
    dossier.check(set(verdict) == VERDICT, f"verdict.json: keys {sorted(set(verdict) ^ VERDICT)}")
    for key, value in facts.items():
        dossier.compare(f"verdict.json: {key}", verdict.get(key), value)
    groups = select((), measured)
    dossier.compare("verdict.json: groups", len(verdict["groups"]), len(groups))
    for group, one in zip(groups, verdict["groups"]):
        processes = len({(each.run, each.record["process"]) for each in group.valid})
        dossier.compare("verdict.json: groups: processes", one["processes"], processes)
        left = [[each.run, each.record["id"], sorted(each.codes)] for each in group.tries if each.codes]
        stated_left = [[each["run"], each["measurement"], sorted(each["codes"])] for each in one["left_out"]]
        dossier.compare("verdict.json: groups: left_out", stated_left, left)
        for name, figure in one["figures"].items() if group.valid else ():
            for key, value in zip(("value", "low", "high"), group.estimate(name, at.confidence, confidence) or (None,) * 3):
                dossier.compare(f"verdict.json: groups: {name}: {key}", figure["estimate"][key], value)
    if dossier.has("report.md"):
        heading = dossier.read("report.md").decode().split("\n")[0]
        dossier.check(f" {overall}: " in heading, f"report.md: its heading does not say {overall}")
    dossier.stated.append("prose and renderings are not compared, and §11")
    return overall

def check_dates(dossier, request, builds, runs):
    now = datetime.now(UTC).isoformat()
    rows = [("request.json: policy_utc", request["policy_utc"] or request["created_utc"])]
    rows += [(f"builds/{name}", each["started_utc"], each["finished_utc"]) for name, each in builds.items()]
    for run in runs:
        start, end = run.manifest["started_utc"], run.manifest["finished_utc"]
        rows += [(run.place, start, end), *((run.place, start, record["started_utc"], end) for record in run.records)]
    for place, *times in rows:
        every = [datetime.fromisoformat(each) for each in (*times, request["created_utc"], now)]
        late = any(a > b + timedelta(minutes=1) for a, b in zip(every, every[1:]))
        dossier.check(not late, f"{place}: its dates are not in order: {', '.join(map(str, every))}")

def verify(dossier, signers):
    check_seal(dossier, signers)
    own = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    if dossier.differs:
        return None
    request = dossier.json("request.json")
    dossier.check(set(request) == REQUEST and request["schema_version"] == 1, "request.json: other keys, or another schema version")
    if request["verifier"] != own:
        dossier.stated.append(f"the dossier names another version of this program: {request['verifier'] or 'none'}")
    document = read_policy(dossier.read("policy.toml"))
    builds = check_builds(dossier)
    if request["artifact"] not in builds:
        raise Damaged(f"builds/artifact-{request['artifact']}: missing")
    runs, baseline, others = [], [], {name: each for name, each in builds.items() if name != request["artifact"]}
    sides = (runs, "runs", builds, "artifact"), (baseline, "baseline/runs", others, "baseline_artifact")
    for found, folder, known, key in sides:
        for path in sorted((dossier.folder / folder).glob("*/")):
            found.append(check_run(dossier, f"{folder}/{path.name}", known, {request[key]}, document[1]))
        copies = Counter(one.times for run in found for one in run.measured if one.times)
        copies += Counter((run.name, record["id"]) for run in found for record in run.records)
        dossier.check(max(copies.values(), default=1) < 2, f"{folder}: a measurement occurs twice")
    about = {run.name: len(run.records) for run in runs if run.kind == "bench" and request["artifact"] in run.manifest["parents"]}
    dossier.compare("request.json: measurements", request["measurements"], about)
    check_dates(dossier, request, builds, [*runs, *baseline])
    return check_verdict(dossier, document, request, builds, runs, baseline)

def examine(folder, signers=None):
    """The findings about a dossier, and its recomputed verdict; None if it is too damaged."""
    dossier, verdict = Dossier(folder), None
    try:
        verdict = verify(dossier, signers)
    except Damaged as error:
        dossier.differs.append(str(error))
    except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        dossier.differs.append(f"not in the format: {type(error).__name__}: {error}")
    return dossier, verdict

def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("dossier", type=Path)
    parser.add_argument("--allowed-signers", type=Path, help="of ssh-keygen; the signature must be by one of them")
    given = parser.parse_args()
    if not (given.dossier / "SHA256SUMS").is_file():
        print(f"{given.dossier}: not a dossier (no SHA256SUMS)", file=sys.stderr)
        return 2
    dossier, verdict = examine(given.dossier, given.allowed_signers)
    for word, lines in (("differs", dossier.differs), ("open", dossier.open), ("stated", dossier.stated)):
        for line in lines:
            print(f"{word}: {''.join(each if each.isprintable() else ascii(each)[1:-1] for each in line)}")
    state = "DIFFERS" if dossier.differs else "AGREED in part" if dossier.open else "AGREED"
    print(f"{state}: {given.dossier.name}, verdict {verdict or 'not recomputed'} (format {FORMAT})")
    return 1 if dossier.differs else 5 if dossier.open else 0

if __name__ == "__main__":
    sys.exit(main())
