#!/usr/bin/env python3
"""Checks a dossier of `optpipe signoff` without optpipe: its hashes, every judged figure, and the verdict.

    python3 verify_dossier.py DOSSIER [--allowed-signers FILE]

Written from docs/dossier-format.md, version 1, whose sections are named below as §. Needs Python 3.11 and `polars`,
which reads Parquet. Prints a line for each finding. Exit status: 0 the dossier agrees with its raw files, 1 it differs,
5 nothing differs but a judged figure was not recomputed (an `open` line names it), 2 not a dossier, 3 no polars.
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tomllib
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict, namedtuple
from datetime import UTC, datetime, timedelta
from functools import cache, lru_cache
from itertools import accumulate, combinations, pairwise, takewhile
from math import ceil, erfc, exp, expm1, hypot, inf, isclose, isfinite, isnan, lgamma, log, log1p, log10, nan, sqrt
from operator import eq, itemgetter, mul, sub
from pathlib import Path, PurePosixPath
from random import Random
from statistics import NormalDist, fmean, median, median_low, quantiles, stdev
from types import SimpleNamespace as Box

try:
    import polars
except ImportError:
    sys.exit(print("reading Parquet needs a package: pip install polars", file=sys.stderr) or 3)

ORDER = FAIL, INCONCLUSIVE, PASS = "FAIL", "INCONCLUSIVE", "PASS"
SUMS, SEAL = "SHA256SUMS", ("SHA256SUMS", "SHA256SUMS.sha256", "SHA256SUMS.sig", "approval.json", "approval.json.sig")
FILES = re.compile(r"(request|verdict|comparison)\.json|policy\.toml|report\.(html|md)|junit\.xml|"
                   r"builds/[^/]+/(manifest\.json|errors\.parquet)|(baseline/)?runs/[^/]+/.+")
REQUEST = {"model", "artifact", "waivers", "baseline", "baseline_artifact", "optpipe", "created_utc", "drawn_with",
           "measurements", "removed", "other_file", "network", "baseline_network", "since", "policy_utc", "verifier",
           "schema_version"}
VERDICT = {"verdict", "dossier_name", "model", "artifact", "policy", "criteria", "notes", "baseline", "expires_if",
           "runs", "created_utc", "optpipe", "groups", "since", "runs_left_out"}
STATED = {"wrong-output", "stale-answer", "cached-answer", "interrupted", "too-few-samples", "not-steady",
          "out-of-memory", "died", "refused"}
OWN_SAMPLES = {"drift", "bimodal", "not-steady", "dispersion"}
LIMITS = {"max_cv": 0.025, "max_drift": 0.025, "max_other_cpu_share": 0.1, "max_clock_change": 0.03,
          "max_gpu_temperature_c": 85}
LOAD = {"batch_size": "b{}", "length": "l{}", "scenario": "{}", "streams": "{}x", "rate_per_s": "{:g}qps", "mode": "{}"}
GAP, TAILS = log1p(0.05), ("p50", "p90", "p95", "p99", "p99.9")
SCORES = ("top1", "mIoU", "pixel-accuracy", "AP", "AP50", "AP75", "Spearman", "F1", "EM", "recall")
UNITS = {
    "ns": {"ns": 1, "us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9}, "images/s": {"images/s": 1}, "dB": {"dB": 1},
    "bytes": {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "kB": 1e3, "MB": 1e6, "GB": 1e9},
    "points": dict.fromkeys(("points", "point", "pt", *SCORES), 1), "J/image": {"J/image": 1, "mJ/image": 1e-3},
    "fraction": {"%": 0.01}, "1": {"": 1},
}
SECTIONS = {  # §4: the unit of each limit; one called `minimum…`, and that of a precision, is a lower limit
    "latency": dict.fromkeys((*TAILS, "mean_p90", "mean_p95", "mean_p99"), "ns"), "throughput": {"minimum": "images/s"},
    "regression": dict.fromkeys((*TAILS, "throughput"), "fraction"), "memory": {"maximum": "bytes"},
    "energy": {"maximum": "J/image"}, "stability": {"maximum_cv": "fraction"},
    "accuracy": {"maximum_drop": "points", "minimum_score": "points", "minimum_top1": "fraction",
                 "minimum_agreement": "fraction", "maximum_f1_drop": "points"},
    "preprocessing": {"minimum_agreement": "fraction", "minimum_snr": "dB"},
    "outputs": {"minimum_snr": "dB", "minimum_cosine": "1", "minimum_agreement": "fraction", "maximum_abs_error": "1"},
    "precision": dict.fromkeys(("fp32", "tf32", "fp16", "bf16", "int8", "fp8"), "fraction"),
    "size": {"maximum": "bytes"}, "tensor_cores": {"minimum_share": "fraction"},
}
TIMED = ("environment", "latency", "throughput", "regression", "memory", "energy", "stability")
FIGURES = {"throughput": "throughput", "memory": "memory", "energy": "energy", "stability": "cv"}  # others: the key
PACKAGES = {"torch": "torch", "inductor": "torch", "torch-tensorrt": "torch-tensorrt", "tensorrt": "tensorrt-cu13",
            "tensorrt-rtx": "tensorrt-rtx-cu13", "onnxruntime": "onnxruntime-gpu"}
KEYS = {"throughput": "throughput_images_per_s", "tokens": "throughput_tokens_per_s", "energy": "energy_j_per_image"}

def flatten(lists):
    return [each for inner in lists for each in inner]

# ---- distributions and estimates (§6, §8.1)

@cache
def beta(a, b, x):
    """The regularized incomplete beta function, by its continued fraction."""
    if min(a, b) <= 0 or not 0 < x < 1:
        return float(a <= 0 or (b > 0 and x >= 1))
    if x > (a + 1) / (a + b + 2):
        return 1 - beta(b, a, 1 - x)
    rest = 1.0
    for m in range(200 + int(10 * sqrt(a + b)), 0, -1):
        odd = (a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        rest = 1 + m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)) / (1 - odd / rest)
    scale = lgamma(a + b) - lgamma(a) - lgamma(b) + a * log(x) + b * log1p(-x)
    return exp(scale) / a / (1 - (a + b) * x / (a + 1) / rest)

@cache
def invert_beta(a, b, share):
    return bisect_left(range(2**60), share, key=lambda step: beta(a, b, step / 2**60)) / 2**60

def t_quantile(confidence, freedom):
    """The value that |T| exceeds with the probability 1 − confidence."""
    return sqrt(freedom * (1 / invert_beta(freedom / 2, 0.5, 1 - confidence) - 1))

class Mean(namedtuple("Mean", "value error freedom")):
    def interval(self, confidence):
        half = t_quantile(confidence, self.freedom) * self.error
        return self.value - half, self.value + half

class Share:
    def __init__(self, hits):
        self.value, self.hits, self.missed = fmean(hits), sum(hits), len(hits) - sum(hits)

    def interval(self, confidence):
        rest = (1 - confidence) / 2
        return invert_beta(self.hits, self.missed + 1, rest), invert_beta(self.hits + 1, self.missed, 1 - rest)

class Difference:
    def __init__(self, parts):
        self.value, self.n = fmean(parts), len(parts)
        self.squares, self.cubes = (sum((part - self.value) ** power for part in parts) for power in (2, 3))

    def interval(self, confidence):
        if self.n < 20:
            return -1.0, 1.0
        t, error, bounds = t_quantile(confidence, self.n - 1), sqrt(self.squares * self.n / (self.n - 1) + 3), []
        for side in (-1, 1):
            lean = (side * self.cubes + 1) / (self.squares + 1) / 3
            used = min(t, error / (-2 * lean)) if lean < 0 else t
            bounds.append(self.value + side * (used * error + used**2 * lean) / self.n)
        return max(-1.0, bounds[0]), min(1.0, bounds[1])

def mean_from_runs(runs, first=None):
    """Rules 1 and 2; `first` counts the values of the first stage, which begin each run."""
    every, means, number = flatten(runs), [fmean(run) for run in runs], len(runs)
    known = [value for run, size in zip(runs, first or map(len, runs)) for value in run[:size]]
    if len(known) < 3:
        return None
    pooled, freedom = Mean(fmean(every), stdev(known) / sqrt(len(every)), len(known) - 1), len(every) - number
    if number < 2 or freedom < 1:
        return pooled
    between = sum(len(run) * (mean - pooled.value) ** 2 for run, mean in zip(runs, means))
    within = sum((value - mean) ** 2 for run, mean in zip(runs, means) for value in run)
    if between + within == 0 or beta(freedom / 2, (number - 1) / 2, within / (within + between)) >= 0.25:
        error = pooled.error * sqrt(len(every) * sum(1 / len(run) for run in runs)) / number
        return Mean(fmean(means), error, min(pooled.freedom, 1.5 * (number - 1)))
    return Mean(fmean(means), stdev(means) / sqrt(number), number - 1)

def widen(value, low, high, processes, confidence, gap=0.0, percent=0.0):
    """Allows for a speed that no process had."""
    gap, share = max(gap, GAP), 1 - exp(log((1 - confidence) / 2) / processes)
    most = hypot(gap, log(high / value)) if percent > 50 and share >= 1 - percent / 100 else gap * share
    return min(low, value * exp(-gap * share)), max(high, value * exp(most))

def bound_next(values, confidence):
    if len(values) < 3:
        return inf
    return fmean(values) + t_quantile(confidence, len(values) - 1) * stdev(values) * sqrt(1 + 1 / len(values))

# ---- one measurement (§5)

@lru_cache(16)
def correlate(series):  # §5.1
    """(2Γ − γ₀)/γ₀ and m; 0 for a constant series."""
    n, mean = len(series), fmean(series)
    y = [value - mean for value in series]
    spread = sum(map(mul, y, y))
    if n < 4 or spread <= 1e-18 * sum(map(mul, series, series)):
        return 0.0, 0
    pairs = (sum(map(mul, y, y[lag:])) + sum(map(mul, y, y[lag + 1 :])) for lag in range(0, n // 2 * 2, 2))
    kept = list(takewhile(lambda pair: pair > 0, pairs))
    return 2 * sum(accumulate(kept, min)) / spread - 1, len(kept)

def count_effective(series, caution=0.0):
    excess, m = correlate(series)
    return len(series) / max(1.0, excess * (1 + caution * sqrt(2 * (4 * m + 1) / len(series))))

def show_percentiles(x, percents, confidence):  # §5.1
    """Those that are not withheld, by name."""
    ordered, n, found = sorted(x), len(x), {}
    ranks = tuple(bisect_left(ordered, value) + bisect_right(ordered, value) for value in x)
    for percent in sorted(percents) if x else ():
        p, q = percent / 100, ordered[max(ceil(n * percent / 100 - 1e-9), 1) - 1]
        bound = count_effective(ranks, 1.0) if p <= 0.5 else 5 / 3 * count_effective(ranks)
        enough = max(2, ceil(log((1 - confidence) / 2) / log(1 - min(p, 1 - p)) - 1e-9))
        few = p**n + n * (1 - p) * p ** (n - 1) > 0.01 or count_effective(ranks) < min(25, n / 2)
        if few or int(min(count_effective(tuple(value <= q for value in x), 1.0), bound)) < enough:
            break
        found[f"p{percent:g}"] = float(q)
    return found

def find_drift(s):  # §5.3
    """(p, change)."""
    b, found = min(20, len(s) // 4) // 2 * 2, [(1.0, 0.0)]
    size, longer = divmod(len(s), max(b, 1))
    m = [median(s[low:high]) for low, high in pairwise(at * size + min(at, longer) for at in range(b + 1))]
    folded = [(m[b // 2 - 1 - at] + m[b // 2 + at]) / 2 for at in range(b // 2)]
    for series in (m, folded) if b >= 8 else ():
        k, pairs = len(series), list(combinations(enumerate(series), 2))
        score = sum((late > early) - (late < early) for (_, early), (_, late) in pairs)
        p = erfc(max(0, abs(score) - 1) / sqrt(k * (k - 1) * (2 * k + 5) / 18) / sqrt(2))
        slope = median((late - early) / (j - i) for (i, early), (j, late) in pairs)
        found.append((p, slope * (k - 1) / (median(m) or inf)))
    p, change = min(found, key=itemgetter(0))
    return min(1.0, 2 * p), change

def is_bimodal(s):  # §5.4
    n, v = len(s), sorted(map(log, s)) if min(s) > 0 else []
    if len(v) < 40:
        return False
    scale = max(min(map(sub, v[n // 2 :], v)) / 1.349, 1e-4)
    start, end = v[0] - 3 * scale, v[-1] + 3 * scale
    cell = max(scale / 8, (end - start) / 25600)
    edges = [start + at * cell for at in range(ceil((end + cell - start) / cell))]
    below, reach = [bisect_left(v, edge) for edge in edges], int(1.2 * scale / cell) + 1
    kernel = [exp(-((j * cell / (0.3 * scale)) ** 2) / 2) for j in range(-reach, reach + 1)]
    counts = [0] * reach + list(map(sub, below[1:], below)) + [0] * reach
    density = [sum(map(mul, kernel, counts[at : at + len(kernel)])) for at in range(len(edges) - 1)]
    peaks = [at for at in range(1, len(density) - 1) if density[at - 1] < density[at] >= density[at + 1]]
    highest = density.index(max(density))
    for other in sorted(set(peaks) - {highest}, key=lambda at: (-density[at], at)):
        valley = min(range(min(highest, other), max(highest, other) + 1), key=density.__getitem__)
        centers = [edges[at] + cell / 2 for at in (other, valley)]
        b, a = (bisect_left(v, center + 0.6 * scale) - bisect_left(v, center - 0.6 * scale) for center in centers)
        deep, both = density[valley] < density[other] / 2, min(below[valley], n - below[valley]) >= 0.05 * n
        apart = abs(edges[highest] - edges[other]) >= log1p(0.04)
        if deep and both and apart and a + b and beta(b, a + 1, 0.5) < 0.03:
            return True
    return False

def find_codes(record, rows, machine, s):  # §5.2
    """`machine` has the columns during the measurement, `s` the service times."""
    limits, load, subject = LIMITS | record["limits"], record["load"], record["subject"]
    other, waited = (fmean(machine[name] or [0]) for name in ("other_cpu_cores", "worker_waited_cores"))
    (p, change), share = find_drift(s), limits["max_other_cpu_share"]
    clocks = [machine[name][1:-1] for name in ("gpu_sm_mhz", "gpu_mem_mhz", "cpu_mhz")]
    spans = [quantiles(clock, n=20, method="inclusive") for clock in clocks if len(clock) >= 3 and max(clock) > 0]
    due, start, end = (rows[name] for name in ("scheduled_ns", "start_ns", "end_ns"))
    late = [at for at in range(1, len(s)) if due[at] <= end[at - 1]]
    paced = load["scenario"] == "server" and load["rate_per_s"] is not None and len(s) >= 40 and len(late) >= 20
    busy = paced and fmean(end[at] - start[at] for at in late) + median(start[at] - end[at - 1] for at in late)
    on_cpu = subject["device"] == "cpu"
    rules = {
        "not-watched": record["machine_file"] is None,
        "loaded-host": other > share * len(subject["affinity"] or "1") if on_cpu else waited > share / 2,
        "busy-gpu": max(machine["gpu_other_processes"], default=0) > 0,
        "throttled": any(int(mask) & 0xE8 for mask in machine["gpu_throttle_reasons"]),
        "clocks-moved": any(1 - span[0] / span[-1] > limits["max_clock_change"] for span in spans),
        "hot": max(machine["gpu_temperature_c"], default=0) > limits["max_gpu_temperature_c"],
        "drift": p <= 0.01 and abs(change) > limits["max_drift"],
        "bimodal": is_bimodal(s),
        "dispersion": len(s) > 1 and stdev(s) / fmean(s) > limits["max_cv"],
        "falling-behind": paced and 1e9 / max(busy, 1.0) <= load["rate_per_s"],
    }
    return {code for code in list_codes(record) if code in STATED} | {code for code, holds in rules.items() if holds}

def list_codes(record):
    return [each["code"] for each in record["reasons"] if each["invalidates"]]

def measure(record, rows, machine):  # §5.1
    """The figures of one measurement without percentiles; `rows` are those of phase 1."""
    if not rows.get("end_ns"):
        codes = {*list_codes(record)} or {"no-samples"}
        return Box(codes=codes, figures={}, median=None, x=(), seconds=0.0, peak=None, times=(), clock=None)
    start, end, inputs = min(rows["start_ns"]), max(rows["end_ns"]), record["inputs"] or {}
    inside = [at for at, time in enumerate(machine.get("time_ns", ())) if start <= time <= end]
    inside, during = inside[1:] if len(inside) > 2 else inside, defaultdict(list)
    for name, column in machine.items():
        during[name] = [column[at] for at in inside if column[at] is not None]
    x, times = (tuple(map(sub, rows["end_ns"], rows[since])) for since in ("scheduled_ns", "start_ns"))
    busy = sum(times) if record["load"]["scenario"] in ("single-stream", "multi-stream") else end - start
    images, seconds, tokens = sum(rows["images"]), (end - start) / 1e9, record["load"]["length"] or 0
    figures = {"throughput": images / max(busy, 1) * 1e9}
    figures["cv"] = stdev(x) / fmean(x) if len(x) > 1 and fmean(x) else None
    figures["tokens"] = figures["throughput"] * tokens * (1 - inputs.get("padding", 0.0)) or None
    counter = [(machine["time_ns"][at], machine["gpu_energy_mj"][at]) for at in inside]
    counter = [reading for reading in counter if reading[1] is not None]
    window, used = map(sub, counter[-1], counter[0]) if counter else (0, 0)
    long = len(counter) >= 12 and window >= 8e9 and images
    figures["energy"] = used * 1e6 / window * seconds / images if long else None
    owned = max((each for each in machine.get("gpu_worker_bytes", ()) if each is not None), default=0)
    peak = max(0, owned - inputs.get("rotated_bytes", 0)) if owned > 0 and inputs else record["device_peak_bytes"]
    figures["memory"] = record["host_peak_bytes"] if record["subject"]["device"] == "cpu" else peak
    clock = [each for each in machine.get("gpu_sm_mhz", ()) if each is not None]
    service = list(map(float, times if None in rows["compute_ns"] else rows["compute_ns"]))
    middle = float(median_low(x)) if 0.5 ** len(x) * (1 + len(x)) <= 0.01 else None
    return Box(codes=find_codes(record, rows, during, service), figures=figures, median=middle, x=x, seconds=seconds,
               peak=peak, times=times, clock=median(clock) if clock else None)

# ---- groups (§6): lists of tries of one build with the same settings under one load, sorted by time

def keep_valid(tries):
    return [one for one in tries if not one.codes]

def count_processes(tries):
    return len({(one.run, one.record["process"]) for one in keep_valid(tries)})

def read_figure(one, name, medians=True):
    found = one.figures.get(name.removeprefix("mean_"))
    return one.median if found is None and name == "p50" and medians else found

def is_requested(one, name):
    percent = float(name.removeprefix("mean_")[1:]) if name.removeprefix("mean_") in TAILS else 0.0
    return one.record["load"]["percentile"] >= percent

def keep_requested(tries, name):
    asked = [one for one in tries if is_requested(one, name)]
    lacking = [one for one in keep_valid(tries) if one not in asked and read_figure(one, name, medians=False) is None]
    return asked if asked and lacking else tries

def summarize(tries, name, at):
    """The figure over processes: their values, its mean, interval, and left-out gap."""
    medians, runs = count_processes(tries) >= 3, defaultdict(lambda: defaultdict(list))
    for one in sorted(keep_valid(tries), key=lambda one: one.record["second_stage"]):
        if read_figure(one, name, medians) is not None:
            runs[one.run][one.record["second_stage"], one.record["process"]].append(one)
    runs, percent = list(runs.values()), float(name[1:]) if name in TAILS[1:] else 0.0
    parts = [[fmean(read_figure(one, name) for one in process) for process in run.values()] for run in runs]
    values, mean, low, high = flatten(parts), None, None, None
    if percent:
        every = [flatten(one.x for one in process) for run in runs for process in run.values()]
        found = iter(jackknife(every, percent / 100))
        parts = [[next(found) for _ in run] for run in runs]
    spoilt = [read_figure(one, name) for one in tries if one.codes and one.codes <= OWN_SAMPLES]
    gap = max((abs(log(each / fmean(values))) for each in spoilt if each and min(values, default=0) > 0), default=0.0)
    if mean := mean_from_runs(parts, [sum(not second for second, _ in run) for run in runs]):
        low, high = mean.interval(at.confidence)
        if name == "energy":
            low, high = low - 0.05 * mean.value, high + 0.05 * mean.value
        if name not in ("cv", "memory"):
            low, high = widen(mean.value, low, high, len(values), at.policy, gap, percent)
        low = max(low, 0.0)
    value = mean.value if mean else fmean(flatten(parts)) if values else None
    return Box(values=values, parts=parts, mean=mean, value=value, low=low, high=high, gap=gap)

def jackknife(processes, share):
    """Each process's contribution to the percentile of all requests."""
    ordered = sorted((value, owner, 1 / len(each)) for owner, each in enumerate(processes) for value in each)

    def find(without):
        totals = list(accumulate(0.0 if owner == without else weight for _, owner, weight in ordered))
        return ordered[bisect_left(totals, totals[-1] * share * (1 - 1e-12))][0]

    left, number = [find(each) for each in range(len(processes)) if len(processes) > 1], len(processes)
    return [find(None) + (number - 1) * (fmean(left) - each) for each in left] or [find(None) for _ in processes]

def as_text(value):
    return str(value).lower() if isinstance(value, bool) else str(value)

def settings_of(one):
    options, affinity = one.record["subject"]["options"], one.record["subject"]["affinity"]
    return {name: as_text(options[name]) for name in sorted(options)} | {"affinity": affinity and sorted(affinity)}

def group_up(measured):
    groups = defaultdict(list)
    for one in sorted(measured, key=lambda one: (one.record["started_utc"], one.run)):
        groups[one.artifact, one.load, str(settings_of(one))].append(one)
    return sorted(groups.values(), key=lambda tries: (tries[-1].record["started_utc"], tries[-1].run))

def select(measured, where=None):
    """The group with the newest measurement by load key, for the loads that `where` selects."""
    newest = {tries[-1].load: tries for tries in group_up(measured)}
    return {load: tries for load, tries in newest.items() if all(a in (None, b) for a, b in zip(where or (), load))}

# ---- files (§1, §2)

class Dossier:
    def __init__(self, folder):
        self.folder, self.differs, self.open, self.stated = folder, [], [], []

    def check(self, holds, line):
        self.differs += [] if holds else [line]

    def compare(self, place, stated, computed):
        """Compares every part of `computed` with what is stated."""
        if isinstance(stated, dict) and isinstance(computed, dict):
            for key, value in computed.items():
                self.compare(f"{place}: {key}", stated.get(key), value)
        elif isinstance(stated, list) and isinstance(computed, list) and len(stated) == len(computed):
            self.compare(place, dict(enumerate(stated)), dict(enumerate(computed)))
        else:
            numbers = {type(stated), type(computed)} <= {int, float}
            same = isclose(stated, computed, rel_tol=1e-6, abs_tol=1e-12) if numbers else stated == computed
            alike = isinstance(stated, bool) == isinstance(computed, bool)
            self.check(same and alike, f"{place} is {stated!r}, recomputed {computed!r}")

    def path(self, name):
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ValueError(f"{name}: not the name of a file in the dossier")
        return self.folder / name

    def json(self, name):
        def unique(pairs):
            if len(dict(pairs)) < len(pairs):
                raise ValueError(f"{name}: a key occurs twice")
            return dict(pairs)

        text = self.path(name).read_text("utf-8")
        return json.loads(text, object_pairs_hook=unique, parse_constant=int)  # refuses NaN

    def table(self, name):
        path = self.path(name)
        return polars.read_parquet(path, glob=False).to_dict(as_series=False) if path.is_file() else {}

def digest(content):
    return hashlib.sha256(content).hexdigest()

def digest_json(value):
    return digest(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode())

def check_seal(dossier, signers):
    listed, lines = (dossier.folder / SUMS).read_bytes(), []
    for name in sorted(path.relative_to(dossier.folder).as_posix() for path in dossier.folder.rglob("*")):
        path = dossier.folder / name
        if path.is_symlink() or not (path.is_file() or (path.is_dir() and any(path.iterdir()))):
            dossier.differs.append(f"{name}: neither a regular file nor a folder with files")
        elif path.is_file() and name not in SEAL:
            dossier.check(FILES.fullmatch(name), f"{name}: not part of a dossier")
            lines.append(f"{digest(path.read_bytes())}  {name}\n")
            if path.suffix == ".json":
                dossier.json(name)
    for line in sorted({*lines} ^ {*listed.decode().splitlines(keepends=True)}):
        dossier.differs.append(f"{SUMS}: changed, missing, or added: {line}")
    dossier.check(dossier.differs or "".join(lines).encode() == listed, f"{SUMS}: not sorted, or a path twice")
    dossier.compare(SEAL[1], (dossier.folder / SEAL[1]).read_text(), f"{digest(listed)}  {SUMS}\n")
    if (dossier.folder / SEAL[3]).exists():
        dossier.compare(SEAL[3], dossier.json(SEAL[3]), {"dossier": digest(listed)})
        dossier.stated.append(f"{SEAL[3]}: its signature is not checked")
    if (dossier.folder / SEAL[2]).exists() or signers:
        check_signature(dossier, listed, signers)
    else:
        dossier.stated.append("not signed")

def check_signature(dossier, listed, signers):
    def run(*words):
        command = ["ssh-keygen", "-Y", *words, "-s", dossier.folder / SEAL[2]]
        return subprocess.run(command, input=listed, capture_output=True)

    who = run("find-principals", "-f", signers).stdout.decode().partition("\n")[0] if signers else ""
    how = ("verify", "-f", signers, "-I", who) if signers else ("check-novalidate",)
    found = run(*how, "-n", "optpipe-dossier")
    why = found.stderr.decode().strip() or "signed by none of the allowed signers"
    dossier.check(found.returncode == 0, f"{SEAL[2]}: {why}")
    dossier.stated.append(f"signed by {who or 'a key that only --allowed-signers can tell'}")

def list_engine_files(build):
    return {name: build["files"][name] for name in (build["info"]["file"], *build["info"].get("more_files", ()))}

def digest_engine(build):
    hashes = {name: each["sha256"] for name, each in list_engine_files(build).items()}
    return digest_json(hashes) if len(hashes) > 1 else hashes[build["info"]["file"]]

def list_texts(value):
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [value] if isinstance(value, str) else [text for each in inner for text in list_texts(each)]

def read_builds(dossier):
    builds = {}
    for path in sorted((dossier.folder / "builds").glob("*/")):
        build = builds[path.name.rpartition("-")[2]] = dossier.json(f"builds/{path.name}/manifest.json")
        ident = digest_json({"kind": build["kind"], "recipe": build["recipe"]})[:12]
        expected = {"id": ident, "schema_version": 1, "folder": f"{build['kind']}-{ident}"}
        dossier.compare(f"builds/{path.name}", build | {"folder": path.name}, expected)
    for name, build in builds.items():
        place, info, recipe = f"builds/{build['kind']}-{name}", build["info"], build["recipe"]
        absent = {text for text in list_texts(recipe) if text in builds} - {name, *build["parents"]}
        dossier.check(not absent, f"{place}: its recipe names {sorted(absent)}, which are no parents")
        if "weights" in info:
            dossier.compare(f"{place}: trained", info["weights"]["trained"], info["weights"]["source"] != "random")
        if build["kind"] == "artifact":
            parents = [builds[each] for each in build["parents"] if each in builds]
            expected = {key: recipe[key] for key in ("backend", "precision", "device") if key in recipe}
            models = [each["info"]["weights"] for each in parents if each["kind"] == "model"]
            dossier.compare(place, info, expected | ({"weights": models[0]} if models else {}))
        elif build["kind"] == "model" and "default" not in (asked := recipe.get("model", {}).get("weights", {})):
            dossier.compare(f"{place}: random", info["weights"]["source"] == "random", "random" in asked)
    return builds

def read_run(dossier, place, side):
    """A run, checked by itself; of a bench run its measurements."""
    manifest, there = dossier.json(f"{place}/manifest.json"), {}
    kind, parents, name = manifest["kind"], {*manifest["parents"]}, place.rpartition("/")[2]
    for path in (dossier.folder / place).rglob("*"):
        if path.is_file() and path.name != "manifest.json":
            there[path.relative_to(dossier.folder / place).as_posix()] = {"sha256": digest(path.read_bytes())}
    file, expected = "measurements.json" if kind == "bench" else f"{kind}.json", {"files": there, "schema_version": 1}
    record = dossier.json(f"{place}/{file}") if kind in ("bench", "evaluate", "preprocess") else {}
    run = Box(name=name, place=place, kind=kind, manifest=manifest, record=record, parents=parents, measured=[],
              comparison=dossier.json(f"{place}/comparison.json") if "comparison.json" in there else None)
    if kind == "evaluate":
        expected["info"] = {"trained": record["weights"]["source"] != "random"}
        artifacts = {row["artifact"] for row in record["results"]} - {None}
        dossier.check(artifacts <= parents, f"{place}: {sorted(artifacts)} were evaluated, not all are parents")
        for artifact in artifacts & {*side.builds}:
            dossier.compare(f"{place}: weights", record["weights"], side.builds[artifact]["info"]["weights"])
    elif kind == "bench":
        expected["info"] = {"measurements": len(record["measurements"])}
        subjects = {each["subject"]["artifact"] for each in record["measurements"]}
        whole = subjects == parents or (subjects < parents and manifest["status"] == "interrupted")
        dossier.check(whole, f"{place}: parents are {sorted(parents)}, measured were {sorted(subjects)}")
        dossier.check({*record} == {"measurements", "schema_version"}, f"{place}: other keys")
        run.measured = [one for each in record["measurements"] for one in read_measurement(dossier, run, each, side)]
        if run.comparison:
            check_comparison(dossier, run)
    dossier.compare(place, manifest | {"folder": name}, expected | {"folder": f"{kind}-{manifest['id']}"})
    return run

def read_measurement(dossier, run, record, side):
    """Yields nothing if the dossier does not contain its samples."""
    place, subject, latency = f"{run.place}: {record['id']}", record["subject"], record["latency_ns"]
    if build := side.builds.get(subject["artifact"]):
        expected = {key: build["info"][key] for key in ("backend", "precision", "device")}
        expected["sha256"] = subject["sha256"] and digest_engine(build)
        dossier.compare(place, subject | {"device": subject["device"].partition(":")[0]}, expected)
    names = [record[key] and f"{run.place}/{record[key]}" for key in ("samples_file", "machine_file")]
    needed = side.paired if run.comparison else side.needed
    missing = [name for name in names if name and not dossier.path(name).is_file()]
    dossier.check(not missing or subject["artifact"] not in needed, f"{place}: {missing} are missing")
    if names[0] in missing and names[0]:
        return
    table, machine = (dossier.table(name) if name else {} for name in names)
    order = [at for at, phase in enumerate(table.get("phase", ())) if phase == 1]
    order.sort(key=lambda at: table["end_ns"][at])
    one = measure(record, {name: [column[at] for at in order] for name, column in table.items()}, machine)
    expected = {key: wrap(one.figures.get(name)) for name, key in KEYS.items()}
    expected |= {"verdict": "INVALID" if one.codes else "VALID", "samples": len(one.x), "duration_s": one.seconds,
                 "device_peak_bytes": one.peak, "host_peak_bytes": record["host_peak_bytes"] if one.x else None}
    if one.x:
        names = (*latency["percentiles"], *latency["withheld"])
        shown = show_percentiles(one.x, {float(name[1:]) for name in names}, latency["confidence"])
        percentiles = {name: wrap(shown.get(name)) for name in names}
        expected["latency_ns"] = {"percentiles": percentiles, "median": one.median, "cv": wrap(one.figures["cv"])}
        expected |= {"warm_up_samples": table["phase"].count(0), "codes": sorted(one.codes)}
    dossier.compare(place, record | {"codes": sorted(list_codes(record))}, {"latency_ns": None} | expected)
    one.figures |= show_percentiles(one.x, {50.0, 90.0, 95.0, 99.0, 99.9}, side.confidence)
    yield Box(**vars(one), record=record, run=run.name, artifact=subject["artifact"], place=place,
              load=tuple(record["load"][key] for key in LOAD), environment=run.manifest["environment"])

def check_comparison(dossier, run):  # §8.4
    """The rounds of an interleaved comparison: their order, figures, and ratio."""
    stated, by_id = run.comparison, {one.record["id"]: one for one in run.measured}
    order, turns = Random(f"order {stated['seed']}"), range(len(stated["baseline_ns"]))
    names = flatten([f"{side}{turn:03}" for side in order.sample("ab", 2)] for turn in turns)
    computed = {"measurements": names}
    if by_id.keys() >= {*names} and stated["metric"] in (*TAILS, "throughput"):
        figures = {name: read_figure(by_id[name], stated["metric"]) for name in names}
        sides = [[figures[f"{side}{turn:03}"] for turn in turns] for side in "ab"]
        sides = [[1e9 / each for each in side] for side in sides] if stated["metric"] == "throughput" else sides
        mean = mean_from_runs([[log(new) - log(old) for old, new in zip(*sides)]], [stated["first_rounds"]])
        invalid = sum(bool(by_id[name].codes) for name in names)
        ratio = {"value": exp(mean.value), "ci": [exp(bound) for bound in mean.interval(0.99)]}
        computed |= {"baseline_ns": sides[0], "contender_ns": sides[1], "ratio": ratio, "invalid_processes": invalid}
    dossier.compare(f"{run.place}/comparison.json", stated, computed)

def wrap(value):
    return None if value is None else {"value": value}

# ---- the policy (§4) and what is observed for it (§7, §8)

def parse(text, unit):
    if unit == "1" and not isinstance(text, str):
        return float(text)
    found = re.fullmatch(r"\s*([+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?)\s*(\S*)\s*", str(text).replace(",", ""))
    return float(found[1]) * UNITS[unit][re.sub("sample|querie", "image", found[2])]

def read_policy(document):
    """The criteria in their order."""
    wanted = document.get("environment", {})
    facts = {key: wanted[key] for key in ("gpu", "driver", "cpu", "python") if key in wanted}
    facts |= {f"packages.{name}": version for name, version in wanted.get("packages", {}).items()}
    for key, value in facts.items():
        yield Box(name=f"environment.{key}", section="environment", key=key, least=None, limit=value, unit=None)
    for section, units in SECTIONS.items():
        tables = document.get(section, [])
        for table in tables if isinstance(tables, list) else [tables]:
            load = table | ({"rate_per_s": parse(table["rate"], "images/s")} if "rate" in table else {})
            slug, where = [form.format(load[key]) for key, form in LOAD.items() if key in load], [*map(load.get, LOAD)]
            for key, unit in ((key, unit) for key, unit in units.items() if key in table):
                text, least = str(table[key]), key.startswith("minimum") or section == "precision"
                score = text.split()[-1] if text.split()[-1] in SCORES else None
                if key == "maximum_f1_drop":
                    score = f"F1@{parse(table.get('at_threshold', '25%'), 'fraction'):.0%}"
                steps = f"{table['steps']}-steps" if "steps" in table else None
                name = ".".join(filter(None, (section, key, *slug, score, table.get("output"), steps)))
                yield Box(name=name, section=section, key=key, least=least, limit=parse(table[key], unit), score=score,
                          unit=unit.replace("image", "sample") if "sample" in text else unit, where=where,
                          output=table.get("output"), steps=table.get("steps"))

def get_fact(one, key):
    gpu = (*(one.environment.get("gpus") or ()), {})[0]
    facts = {"gpu": gpu.get("name", "none"), "driver": gpu.get("driver", "none")}
    facts |= {f"packages.{name}": version for name, version in one.environment["packages"].items()}
    return (one.environment | facts).get(key, "none")

def get_machine(one):
    return [get_fact(one, key) for key in ("gpu", "driver", "cpu")]

def see(value=nan, low=None, high=None, blocked=False, source="", interval=None, processes=0, gap=0.0):
    """An observation; without bounds it is exact. `interval` gives that of its own distribution at any confidence."""
    return Box(value=value, low=value if low is None else low, high=value if high is None else high, exact=low is None,
               blocked=blocked, source=source, interval=interval, processes=processes, gap=gap)

def see_figure(figure, factor, at, blocked, source, hidden=(0.0, 0.0)):
    def scale(confidence):
        return [factor * bound for bound in figure.interval(confidence)]

    (low, high), least = figure.interval(at.confidence), -1.0 if isinstance(figure, Difference) else 0.0
    if not isinstance(figure, Mean):
        low, high = max(low + hidden[0], least), min(high + hidden[1], 1.0)
    return see(factor * figure.value, factor * low, factor * high, blocked, source, scale)

def find_blockers(tries, at):
    counted = keep_valid(tries) or tries
    other = any(one.record["caveats"] or one.record["subject"]["sha256"] not in (None, at.engine) for one in counted)
    return other or not keep_valid(tries)

def observe_group(tries, name, at):
    tries = keep_requested(tries, name)
    found, source = summarize(tries, name, at), tries[-1].run
    if found.value is None:
        return see(blocked=True, source=source)
    lacks = name not in ("energy", "memory") and len(found.values) != count_processes(tries)
    blocked = find_blockers(tries, at) or found.low is None or lacks
    if name == "memory":
        peak, bound = max(found.values), bound_next(found.values, at.confidence)
        return see(peak, peak, max(peak, bound) if isfinite(bound) else peak, blocked, source)
    scaled = found.mean
    if scaled and name == "energy":
        scaled = Mean(0.95 * scaled.value, 0.95 * scaled.error, scaled.freedom)
    processes = 0 if name == "cv" else len(found.values)
    return see(found.value, found.low, found.high, blocked, source, scaled and scaled.interval, processes, found.gap)

def observe_accuracy(dossier, at):  # §8.1
    """By name; every evaluation of classes is recomputed on the way."""
    found, every = {}, [run for run in at.runs if run.kind == "evaluate"]
    mine = [run for run in every if at.id in run.parents and run.name not in at.early]
    best = next((run.record["dataset"]["sha256"] for run in mine if run.record["dataset"].get("validation")), None)
    for run in sorted(every, key=lambda run: run.record["dataset"]["sha256"] != best):
        rows, trained = run.record["results"], run.manifest["info"]["trained"]
        other = any(row["artifact"] == at.id and row["sha256"] not in (None, at.engine) for row in rows)
        counts = run in mine and not found and not other
        if run.record.get("task", "classification") not in ("classification", "text-classification"):
            found |= {"open": True} if counts else {}
            continue
        table = dossier.table(f"{run.place}/predictions.parquet")
        source, truth = [best[0] for best in table["source:best"]], table["class"]
        dossier.compare(f"{run.place}: dataset", run.record["dataset"], {"count": len(source)})
        for row in (row for row in rows if f"{row['artifact'] or 'source'}:best" in table):
            answers, figures = [best[0] for best in table[f"{row['artifact'] or 'source'}:best"]], {}
            was, now = ([*map(eq, each, truth)] for each in (source, answers))
            figures |= {"agreement": Share([*map(eq, answers, source)])} if len({*source}) > 1 else {}
            figures |= {"top1": Share(now), "drop": Difference([*map(sub, was, now)])} if None not in truth else {}
            stated = {"samples": row["samples"], "agreement": (row["agreement"] or {}).get("share")}
            stated |= {key: (row["accuracy"] or {}).get(key) for key in ("top1", "drop") if trained}
            computed = {key: figures[key].value if key in figures else None for key in stated}
            dossier.compare(f"{run.place}: {row['artifact']}", stated, computed | {"samples": len(source)})
            hidden = row["calibrated_on"] / max(row["samples"], 1)
            for key, figure in figures.items() if counts and row["artifact"] == at.id else ():
                found[key] = figure, run.name, not trained, (0.0, hidden) if key == "drop" else (-hidden, 0.0)
    return found | {"score": found["top1"]} if "top1" in found else found

def find_snr(rows, confidence):
    """In dB with its interval; None without an error, no interval if few samples share the error."""
    noise, signal, n = rows["difference_square"], rows["reference_square"], len(rows["finite"])
    total, power = sum(noise), sum(signal)
    if not all(rows["finite"]) or not (total and power) or total**2 < 60 * sum(map(mul, noise, noise)):
        snr = None if not total else -10 * log10(total / power) if power else -600.0
        return (snr if all(rows["finite"]) else -1e30), None, None
    error = sqrt(n / (n - 1) * sum((a - total / power * b) ** 2 for a, b in zip(noise, signal))) / total
    half = 10 / log(10) * t_quantile(confidence, n - 1) * error
    return tuple(-10 * log10(total / power) + side * half for side in (0, -1, 1))

def observe_preprocessing(dossier, at):  # §8.2
    """By name; every proof is recomputed on the way."""
    found = {}
    for run in (run for run in at.runs if run.kind == "preprocess"):
        rows, record, parity = dossier.table(f"{run.place}/images.parquet"), run.record, run.record["parity"]
        for picture in parity["worst"]:
            dossier.path(f"{run.place}/{picture['file']}")
        proof, classes, snr = parity["proof"], rows["reference_class"], find_snr(rows, at.confidence)
        share = Share([*map(eq, classes, rows["dali_class"])]) if record["classifies"] and len({*classes}) > 1 else None
        stated = {"snr_db": proof["output"]["snr_db"], "equal": (proof["top1_agreement"] or {}).get("equal")}
        expected = {"images": len(classes), "snr_db": snr[0], "equal": share and share.hits}
        dossier.compare(run.place, parity | stated, expected)
        fits = record["model"] == at.model and record.get("model_sha256") in (None, at.model_sha256)
        if not found and run.name not in at.early and fits:
            refused = bool(parity["refused"])
            found = {"open": record.get("task")} if proof["prediction_agreement"] else {}
            found |= {"agreement": (share, run.name, refused or not record["trained"], (0, 0))} if share else {}
            found |= {"snr": see(*snr, refused or snr[1] is None, run.name)} if snr[0] is not None else {}
    return found

def observe_outputs(dossier, at):  # §8.3
    """By output, the observations by name."""
    checked, found = at.verification, {}
    place = f"builds/verification-{checked['id']}/errors.parquet" if checked else ""
    table = dossier.table(place) if checked and "errors.parquet" in checked["files"] else {}
    info = checked["info"] if table else {"outputs": ()}
    states, steps = {each["name"]: each for each in info.get("trajectory") or ()}, info.get("steps")
    stated = {each["name"]: each for each in info["outputs"]} | states
    for output in dict.fromkeys(table.get("output", ())):
        at_rows = [row for row, name in enumerate(table["output"]) if name == output]
        rows = {key: [column[row] for row in at_rows] for key, column in table.items()}
        finite, data, peaks = all(rows["finite"]), checked["info"]["data"], rows["difference_max"]
        snr, low, high = find_snr(rows, at.confidence)
        figures = {"max_abs": max(peaks) if finite else 1e30, "snr_db": snr, "finite": finite}
        dossier.compare(f"{place}: {output}", stated.get(output), figures)
        calibrated = data.endswith("which INT8 and FP8 are calibrated on") and at.info["precision"] in ("int8", "fp8")
        blocked, peak = data == "seeded noise" or calibrated or len(peaks) < 20, max(peaks) if finite else inf
        scattered, alike = low is None and finite and snr is not None, len({*rows["reference_best"]}) < 2
        bound = bound_next(peaks, at.confidence) if finite else inf
        mean = mean_from_runs([[*list_cosines(rows)]])
        share = Share([*map(eq, rows["output_best"], rows["reference_best"])])
        found |= {(output, steps if output in states else None): {
            "snr": see(200.0 if snr is None else max(snr, -200.0), low, high, blocked or scattered, place),
            "cosine": see_figure(mean, 1, at, blocked, place) if mean else see(blocked=True, source=place),
            "agreement": see_figure(share, 1, at, blocked or alike, place),
            "abs_error": see(peak, peak, max(peak, bound), blocked, place),
        }} if any(rows["values"]) else {}
    return found

def list_cosines(rows):
    squares = map(mul, rows["reference_square"], rows["output_square"])
    for square, product, wrong, finite in zip(squares, rows["product"], rows["difference_square"], rows["finite"]):
        yield float(finite and (product / sqrt(square) if square > 0 else wrong == 0))

def find_loss(pair, name):
    """The logarithm of one round's loss; None if a process is not VALID or lacks the figure."""
    figures = [read_figure(one, name) for one in keep_valid(pair)]
    if len(figures) < 2 or None in figures:
        return None
    return (log(figures[1]) - log(figures[0])) * (-1 if name == "throughput" else 1)

def list_rounds(group, base, at, name):  # §8.4, 1
    """Of each interleaved comparison with these settings under this load: its run, its first rounds, and all rounds."""
    backend, ids = base[-1].record["subject"]["backend"], (base[-1].artifact, at.id)
    package = f"packages.{PACKAGES[backend]}" if backend in PACKAGES else "gpu"
    same = backend != group[-1].record["subject"]["backend"] or settings_of(base[-1]) == settings_of(group[-1])
    for run in at.paired if same and get_fact(group[-1], package) == get_fact(base[-1], package) else ():
        by_id, compared = {one.record["id"]: one for one in run.measured}, run.comparison
        named = compared["baseline_artifact"], compared["contender_artifact"]
        sides = {ids: "ab", ids[::-1]: "ba"}.get(named, "")
        names = [[f"{side}{turn:03}" for side in sides] for turn in range(len(compared["baseline_ns"]))]
        if not sides or not names or not by_id.keys() >= {*flatten(names)}:
            continue
        rounds = [[by_id[name] for name in pair] for pair in names]
        alike = get_machine(rounds[0][0]) == get_machine(group[-1])
        for one, side in zip(rounds[0], (base[-1], group[-1])):
            alike = alike and one.load == group[-1].load and settings_of(one) == settings_of(side)
        lacking = [pair for pair in rounds if len(keep_valid(pair)) == 2 and find_loss(pair, name) is None]
        if alike and (is_requested(rounds[0][0], name) or not lacking):
            yield run.name, compared["first_rounds"], rounds, bool(lacking)

def observe_rounds(group, base, at, name, blocked):
    """None with fewer than four rounds of VALID processes."""
    pairs = [*list_rounds(group, base, at, name)]
    losses = [[find_loss(pair, name) for pair in rounds] for _, _, rounds, _ in pairs]
    first = [sum(loss is not None for loss in each[:number]) for each, (_, number, *_) in zip(losses, pairs)]
    shown = [[loss for loss in each if loss is not None] for each in losses]
    mean = mean_from_runs([*filter(None, shown)], [number for number, each in zip(first, shown) if each])
    if mean is None or len(flatten(shown)) < 4:
        return None
    blocked = blocked or any(lacking for *_, lacking in pairs)
    return see_change(mean, at, blocked, pairs[-1][0], len(flatten(shown)))

def observe_loss(group, name, at):  # §8.4
    approved = select(at.baseline)
    base = approved.get(group[-1].load, [*approved.values()][-1])
    caveats = any(one.record["caveats"] for one in keep_valid(base) or base)
    blocked = caveats or find_blockers(keep_requested(group, name), at)
    paired = observe_rounds(group, base, at, name, blocked)
    if paired or group[-1].load not in approved:
        return paired or see(blocked=True, source=group[-1].run)
    clocks, alike = [each[-1].clock for each in (group, base)], get_machine(group[-1]) == get_machine(base[-1])
    blocked = blocked or not keep_valid(base) or not alike or (all(clocks) and max(clocks) / min(clocks) > 1.05)
    both = [keep_requested(each, name) for each in (group, base)]
    found = [summarize(each, name, at) for each in both]
    blocked = blocked or any(len(one.values) != count_processes(each) for one, each in zip(found, both))
    apart = len({one.run for each in both for one in keep_valid(each)}) > 1 and min(len(one.parts) for one in found) < 2
    scatter = find_scatter(group_up([*at.measured, *at.baseline]), name, at) if apart else Mean(0.0, 0.0, inf)
    if not scatter or not all(one.mean and one.mean.value > 0 for one in found):
        return see(blocked=True, source=group[-1].run)
    logs = []
    for one in found:
        error, freedom = one.mean.error / one.mean.value, one.mean.freedom
        if apart and len(one.parts) < 2:
            error, freedom = max(error, scatter.error), min(freedom, scatter.freedom)
        logs.append(Mean(log(one.mean.value), error, freedom))
    change = subtract(*(logs[::-1] if name == "throughput" else logs), scatter.freedom)
    processes, gap = min(len(one.values) for one in found), max(one.gap for one in found)
    percent = float(name[1:]) if name in TAILS[1:] else 0.0
    return see_change(change, at, blocked, group[-1].run, processes, gap, percent, mirrored=True)

def subtract(new, old, most):
    """The difference of two means, with Welch's freedom, at most `most`."""
    spread, shares = new.error**2 + old.error**2, new.error**4 / new.freedom + old.error**4 / old.freedom
    freedom = spread**2 / shares if shares > 0 else new.freedom + old.freedom
    return Mean(new.value - old.value, sqrt(spread), min(freedom, most))

def find_scatter(groups, name, at):
    """The standard deviation of the logarithms of run means, and its freedom."""
    logs = [[log(fmean(run)) for run in summarize(each, name, at).parts if min(run) > 0] for each in groups]
    freedom = sum(len(each) - 1 for each in logs if each)
    squares = sum((one - fmean(each)) ** 2 for each in logs for one in each)
    return Mean(0.0, sqrt(squares / freedom), freedom) if freedom else None

def see_change(mean, at, blocked, source, processes, gap=0.0, percent=0.0, mirrored=False):
    """A loss by the mean of its logarithm; `mirrored` widens both directions of the ratio alike."""
    def interval(confidence):
        return [expm1(bound) for bound in mean.interval(confidence)]

    (low, high), ratio = map(exp, mean.interval(at.confidence)), exp(mean.value)
    below, above = widen(ratio, low, high, processes, at.policy, gap, percent)
    if mirrored:
        least, most = widen(1 / ratio, 1 / high, 1 / low, processes, at.policy, gap, percent)
        below, above = min(below, 1 / most), max(above, 1 / least)
    return see(ratio - 1, below - 1, above - 1, blocked, source, interval, processes)

def observe(criterion, at):
    """The observations of a criterion; None if this program does not recompute them."""
    section, key, proof = criterion.section, criterion.key, at.info["precision_proof"]
    if section == "environment":
        tries = [one for group in select(at.measured).values() for one in keep_valid(group) or group]
        return [see(value, source=run) for value, run in {get_fact(one, key): one.run for one in tries}.items()]
    if section == "precision":
        return [see(float((proof["share"]["macs"] or proof["share"]["layers"]).get(key, 0.0)), source=at.place)]
    if section == "size":
        return [see(float(at.size), source=at.place)]
    if section in ("accuracy", "preprocessing"):
        found, factor = at.seen[section], 100 if criterion.unit == "points" else 1
        one = found.get(key.partition("_")[2])
        if found.get("open") or criterion.score not in (None, "top1"):
            return None
        return [one if isinstance(one, Box) else see_figure(one[0], factor, at, one[2], one[1], one[3])] if one else []
    if section == "outputs":
        kept = {name: each for (name, steps), each in at.outputs.items() if steps == criterion.steps}
        return [each[key.partition("_")[2]] for name, each in kept.items() if criterion.output in (None, name)]
    if section == "tensor_cores":
        return None
    groups = select(at.measured, criterion.where).values() if section != "regression" or at.baseline else ()
    observe_one = observe_loss if section == "regression" else observe_group
    return [observe_one(each, FIGURES.get(section, key), at) for each in groups]

# ---- verdicts (§9)

def find_p_value(criterion, one, at):
    side, limit, base = -1 if criterion.least else 1, criterion.limit, float(criterion.section == "regression")

    def is_beyond(step):
        low, high = one.interval(1 - step / 2**29)
        return low > limit if side > 0 else high < limit

    distance, spread = side * (one.value - limit), one.high - one.value if side < 0 else one.value - one.low
    if one.interval:
        p = (bisect_left(range(1, 2**29), True, key=is_beyond) + 1) / 2**30
    elif spread > 0:
        p = NormalDist().cdf(-distance / spread * NormalDist().inv_cdf(0.5 + at.confidence / 2))
    else:
        p = float(distance <= 0)
    if one.processes and base + one.value > 0 < base + limit:
        far = abs(log(base + one.value) - log(base + limit)) / max(GAP, one.gap)
        p += max(0.0, 1 - far) ** one.processes / (at.look * (at.look + 1))
    return p

def reject(observed, at):
    """The observations that Holm's procedure rejects."""
    every = [(criterion, one) for criterion, found in observed if criterion.least is not None for one in found or ()]
    every = [(criterion, one) for criterion, one in every if not one.blocked and one.low < one.high]
    tests = sorted((find_p_value(criterion, one, at), id(one)) for criterion, one in every)
    kept = takewhile(lambda test: test[1][0] <= (1 - at.confidence) / 2 / (len(tests) - test[0]), enumerate(tests))
    return {one for _, (_, one) in kept}

def judge(criterion, found, rejected):
    """The judged fields of a criterion: those of its worst observation."""
    expected, ranked, limit = {"verdict": INCONCLUSIVE, "observed": None, "ci": None, "source": ""}, [], criterion.limit
    for at, one in enumerate(found):
        number = criterion.least is not None
        margin = (one.low - limit if criterion.least else limit - one.high) if number else 0.0
        beyond = number and (one.high < limit if criterion.least else one.low > limit)
        kept = margin >= 0 if number else one.value == limit
        verdict = FAIL if beyond and (one.low == one.high or id(one) in rejected) else PASS if kept else INCONCLUSIVE
        verdict, margin = INCONCLUSIVE if one.blocked else verdict, -inf if isnan(margin) else margin
        ranked.append((ORDER.index(verdict), not one.blocked, margin, one.source, at, verdict))
    if ranked:
        *_, at, verdict = min(ranked)
        one = found[at]
        expected |= {"verdict": verdict, "source": one.source}
        if isinstance(one.value, str) or isfinite(one.value):
            expected |= {"observed": one.value, "ci": None if one.exact else [one.low, one.high]}
    return expected | {"threshold": limit, "unit": criterion.unit}

def judge_trust(at, timed):
    info, checked = at.info, at.verification
    same = checked and checked["recipe"].get("artifact", {}).get("sha256") == at.engine
    machines = {str(get_machine(one)) for one in at.measured}
    whole = len(machines) == 1 and (not timed or keep_valid(at.measured))
    yield "trust.weights", PASS if info["weights"]["source"] != "random" else INCONCLUSIVE
    yield "trust.precision", PASS if info["precision_proof"]["proven"] else FAIL
    yield "trust.outputs", {True: PASS, False: FAIL}.get(checked["info"]["passed"] if same else None, INCONCLUSIVE)
    yield "trust.environment", PASS if whole else INCONCLUSIVE

def describe_group(stated, groups, at):
    """The judged fields of a group in verdict.json."""
    tries, figures = groups[tuple(stated["load"][key] for key in LOAD)], {}
    for name in stated["figures"] if keep_valid(tries) else ():
        found = summarize(tries, name, at)
        figures[name] = {"estimate": {key: getattr(found, key) for key in ("value", "low", "high")}}
    invalid = [one for one in tries if one.codes]
    left = [{"run": one.run, "measurement": one.record["id"], "codes": list_codes(one.record)} for one in invalid]
    return {"processes": count_processes(tries), "left_out": left, "figures": figures}

def judge_dossier(dossier, request, document, builds, runs, baseline):
    """Judges the evidence, and compares the result with verdict.json."""
    verdict, build, criteria = dossier.json("verdict.json"), builds[request["artifact"]], [*read_policy(document)]
    ident, info, confidence = build["id"], build["info"], document["confidence"]
    registered = document.get("evidence", {}).get("preregistered") and (request["policy_utc"] or request["created_utc"])
    early = {run.name for run in runs for first in (registered, run.kind == "bench" and request["since"])
             if first and datetime.fromisoformat(run.manifest["started_utc"]) < datetime.fromisoformat(first)}
    every = [one for run in runs for one in run.measured if one.artifact == ident]
    options = {key: as_text(value) for key, value in document.get("build", {}).get("options", {}).items()}
    measured = [one for one in every if one.run not in early and options.items() <= settings_of(one).items()]
    runs_of = Counter(load for load, _ in {(one.load, one.run) for one in every})
    look = max(runs_of.values(), default=1) + len(request["removed"])
    model = builds.get((*build["parents"], None)[0], {"recipe": {}})["recipe"].get("model", {})
    sizes = list_engine_files(build).values()
    checks = [each for each in builds.values() if each["kind"] == "verification"]
    at = Box(id=ident, info=info, engine=digest_engine(build), size=sum(each["size_bytes"] for each in sizes),
             place=f"builds/artifact-{ident}/manifest.json", measured=measured, early=early, look=look, model=info["model"],
             model_sha256=digest_json(model | {"batch": None, "shapes": None}), policy=confidence,
             confidence=1 - (1 - confidence) / (look * (look + 1)))
    at.verification = next((each for each in checks if ident in each["parents"]), None)
    at.baseline = [one for run in baseline for one in run.measured if one.artifact == request["baseline_artifact"]]
    at.paired = [run for run in runs if run.comparison and run.name not in early]
    at.runs = sorted(runs, key=lambda run: run.manifest["started_utc"], reverse=True)
    at.outputs = observe_outputs(dossier, at)
    at.seen = {"accuracy": observe_accuracy(dossier, at), "preprocessing": observe_preprocessing(dossier, at)}
    observed = [(criterion, observe(criterion, at)) for criterion in criteria]
    timed = any(criterion.section in TIMED for criterion in criteria)
    expected = {name: {"verdict": each} for name, each in judge_trust(at, timed)}
    stated, rejected = {each["name"]: each for each in verdict["criteria"]}, reject(observed, at)
    for criterion, found in observed:
        mine = stated.get(criterion.name, {})
        if found is None:
            dossier.open.append(f"{criterion.name}: not recomputed")
            expected[criterion.name] = {"verdict": mine.get("verdict")}
            continue
        expected[criterion.name] = judge(criterion, found, rejected)
        if criterion.unit:
            limit = parse(re.sub("at most |at least ", "", mine["limit"]), criterion.unit.replace("sample", "image"))
            alike = isclose(limit, criterion.limit, rel_tol=0.01)
            dossier.check(alike, f"verdict.json: {criterion.name}: limit is {mine['limit']}")
    dossier.check({*request["waivers"]} <= {*expected}, "request.json: waives criteria that do not exist")
    counted = {each["verdict"] for name, each in expected.items() if name not in request["waivers"]}
    overall, groups = min(counted or {INCONCLUSIVE}, key=ORDER.index), select(measured)
    dossier.check({*verdict} == VERDICT and len(groups) == len(verdict["groups"]), "verdict.json: other keys or groups")
    dossier.compare("verdict.json", verdict, {
        "verdict": overall, "model": info["model"], "runs": sorted({one.run for one in measured}),
        "runs_left_out": sorted({one.run for one in every if one.run in early}),
        "artifact": {"id": ident, "backend": info["backend"], "precision": info["precision"], "sha256": at.engine,
                     "size_bytes": at.size, "weights": info["weights"]["source"]},
        "policy": {"name": document.get("name", "unnamed policy"),
                   "sha256": digest((dossier.folder / "policy.toml").read_bytes())},
        **{key: request[key] for key in ("baseline", "created_utc", "optpipe", "since")},
        "criteria": [each | {"name": name, "waived": request["waivers"].get(name)} for name, each in expected.items()],
        "groups": [describe_group(each, groups, at) for each in verdict["groups"]],
    })
    if (report := dossier.folder / "report.md").is_file():
        heading = report.read_text().partition("\n")[0]
        dossier.check(f" {overall}: " in heading, f"report.md: its heading does not say {overall}")
    return overall

def check_dates(dossier, request, builds, runs):
    rows = [("request.json: policy_utc", request["policy_utc"] or request["created_utc"])]
    rows += [(place, each["started_utc"], each["finished_utc"])
             for place, each in (*builds.items(), *((run.place, run.manifest) for run in runs))]
    rows += [(one.place, run.manifest["started_utc"], one.record["started_utc"], run.manifest["finished_utc"])
             for run in runs for one in run.measured]
    for place, *times in rows:
        every = [*map(datetime.fromisoformat, (*times, request["created_utc"])), datetime.now(UTC)]
        late = any(a > b + timedelta(minutes=1) for a, b in pairwise(every))
        dossier.check(not late, f"{place}: its dates are not in order: {', '.join(map(str, every))}")

def verify(dossier, signers):
    check_seal(dossier, signers)
    if dossier.differs:
        return None
    request, found = dossier.json("request.json"), []
    document = {"confidence": "95%"} | tomllib.loads((dossier.folder / "policy.toml").read_text("utf-8-sig"))
    document["confidence"] = parse(document["confidence"], "fraction")
    dossier.check({*request} == REQUEST, "request.json: other keys")
    dossier.compare("request.json", request, {"schema_version": 1})
    dossier.stated.append("prose and renderings are not compared, and §11")
    if request["verifier"] != digest(Path(__file__).read_bytes()):
        dossier.stated.append(f"the dossier names another version of this program: {request['verifier'] or 'none'}")
    builds, artifact = read_builds(dossier), request["artifact"]
    others = {name: each for name, each in builds.items() if name != artifact}
    for folder, known, needed in (("runs", builds, artifact), ("baseline/runs", others, request["baseline_artifact"])):
        paired, confidence = {needed, request["baseline_artifact"]}, document["confidence"]
        side = Box(builds=known, needed={needed}, paired=paired, confidence=confidence)
        places = [f"{folder}/{path.name}" for path in sorted((dossier.folder / folder).glob("*/"))]
        runs = [read_run(dossier, place, side) for place in places]
        every = [one for run in runs for one in run.measured]
        copies = Counter(one.times for one in every if one.times) + Counter(one.place for one in every)
        dossier.check(max(copies.values(), default=1) < 2, f"{folder}: a measurement occurs twice")
        found.append(runs)
    about = [run for run in found[0] if run.kind == "bench" and artifact in run.parents]
    about = {run.name: len(run.record["measurements"]) for run in about}
    dossier.check(request["measurements"] == about, f"request.json: measurements are not {about}")
    check_dates(dossier, request, builds, flatten(found))
    return judge_dossier(dossier, request, document, builds, *found)

def examine(folder, signers=None):
    """The findings about a dossier, and its recomputed verdict; None if it is too damaged."""
    dossier, verdict = Dossier(folder), None
    try:
        verdict = verify(dossier, signers)
    except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError, OSError,
            polars.exceptions.PolarsError) as error:
        dossier.differs.append(f"not in the format: {type(error).__name__}: {error}")
    return dossier, verdict

def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("dossier", type=Path)
    parser.add_argument("--allowed-signers", type=Path, help="of ssh-keygen; the signature must be by one of them")
    given = parser.parse_args()
    folder = given.dossier
    if not (folder / SUMS).is_file():
        print(f"{folder}: not a dossier (no {SUMS})", file=sys.stderr)
        return 2
    dossier, verdict = examine(folder, given.allowed_signers)
    for word, lines in (("differs", dossier.differs), ("open", dossier.open), ("stated", dossier.stated)):
        for line in lines:
            print(f"{word}: {''.join(each if each.isprintable() else ascii(each)[1:-1] for each in line)}")
    state = "DIFFERS" if dossier.differs else "AGREED in part" if dossier.open else "AGREED"
    print(f"{state}: {folder.name}, verdict {verdict or 'not recomputed'} (format 1)")
    return 1 if dossier.differs else 5 if dossier.open else 0

if __name__ == "__main__":
    sys.exit(main())
