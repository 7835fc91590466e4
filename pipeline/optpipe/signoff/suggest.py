"""The commands that a verdict suggests: each runs as printed and supplies the missing evidence.

DIR, FILE, DOSSIER, BEFORE, and AFTER stand for paths that only the user can fill in.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from math import expm1, log1p

from optpipe.core.measurement import (
    MAX_CV,
    PROCESSES,
    LoadSpec,
    PairMetric,
    Subject,
    format_option,
    list_load_options,
    percent_from_name,
    pooled_percent_from_name,
)
from optpipe.core.plan import to_command
from optpipe.core.quantity import share_to_text
from optpipe.measure.groups import ProcessGroup
from optpipe.models.artifacts.facts import JudgedBuild
from optpipe.signoff.policy import Criterion
from optpipe.signoff.policy_format import LoadFilter
from optpipe.stats.means import MAX_RUNS, MIN_VALUES, SPEED_GAP, count_processes_for_reach, count_runs_needed
from optpipe.trace.report import MORE_ITERATIONS, suggest_profile

LONGEST_S = 600
"""Seconds of a process that measures a rare percentile."""
MORE = 2
"""Factor on the usual number of processes to narrow an interval."""


def suggest_bench(build: JudgedBuild, where: LoadFilter, options: Mapping[str, str], name: str = "") -> str:
    """Measures `where` on a build that has no such measurement; `name` is the wanted figure."""
    words = [*_list_percentile_options(name), *_list_runtime_options(build.backend, options)]
    return to_command("bench", build.artifact, where, *words, energy=name == "energy")


def suggest_more_processes(
    group: ProcessGroup, build: JudgedBuild, name: str = "", *, more: bool = False, longer: bool = False
) -> str:
    """Measures the load of `group` again with its settings, so that both sets of processes count.

    `name` is the wanted figure; `more` suggests more processes than usual, `longer` more time.
    """
    words = list(_list_options(group, build, name))
    longest = LONGEST_S if longer and "--max-time" not in words else None
    processes = MORE * PROCESSES if more else None
    return to_command("bench", build.artifact, *words, max_time=longest, processes=processes, energy=name == "energy")


def suggest_runs(
    criterion: Criterion, runs: Sequence[Sequence[float]], confidence: float, command: str, gap: float = SPEED_GAP
) -> str:
    """Tells how often to run `command` until the criterion is decided.

    `runs` holds the figures of each run's processes, or the log ratios of a regression's rounds. Processes at another speed may be
    `gap` away, at least SPEED_GAP.
    """
    loss, limit = criterion.section == "regression", float(criterion.threshold)
    verb, every = "compare" if loss else "measure", [value for run in runs for value in run]
    if len(every) < MIN_VALUES:
        return f"{verb} again: {command}"
    middle = sum(every) / len(every)
    distance = criterion.measure_distance(expm1(middle) if loss else middle)
    level, gap = (1 - confidence) / 2, max(SPEED_GAP, gap)
    percent = pooled_percent_from_name(criterion.metric) if not loss and distance and middle < limit else 0.0
    fewest = 0.0 if criterion.section == "stability" else count_processes_for_reach(distance, level, gap, percent)
    half = abs(middle - (log1p(limit) if loss else limit))
    needed = count_runs_needed(runs, half, confidence, fewest)
    if needed is None:
        return f"at this scatter even {MAX_RUNS} runs would not settle it: reduce the scatter, or change the build or the limit"
    more = needed - len(runs)
    times = "once more" if more == 1 else f"{more} more times"
    return f"at this scatter about {needed} runs settle it; {verb} {times}: {command}"


def suggest_pair(baseline: Subject, group: ProcessGroup, build: JudgedBuild, metric: str) -> str:
    """Compares the build with the baseline's in interleaved processes under the load of `group`."""
    words = list(_list_options(group, build, metric))
    if baseline.backend != build.backend:
        settings = {name: value for name, value in baseline.settings.items() if name != "affinity"}
        words += _list_runtime_options(baseline.backend, settings)
    by = metric if metric in list(PairMetric) else PairMetric.P99
    return to_command("bench", build.artifact, "--against", baseline.artifact, "--metric", by, *words)


def _list_options(group: ProcessGroup, build: JudgedBuild, name: str) -> Iterator[str]:
    """The options of `bench` for the load, the settings, and the limits of `group`."""
    found = group.newest.measurement
    yield from list_load_options(group.load)
    yield from _list_percentile_options(name)
    usual = {key: format_option(value) for key, value in build.options.items()}
    settings = found.subject.settings
    changed = {key: value for key, value in settings.items() if key in usual and usual[key] != value}
    yield from _list_runtime_options(build.backend, changed)
    if "affinity" in settings:
        yield from ("--affinity", settings["affinity"])
    if (max_cv := found.limits.get("max_cv", MAX_CV)) != MAX_CV:
        yield from ("--max-cv", share_to_text(max_cv))


def _list_percentile_options(name: str) -> Iterator[str]:
    """Asks for enough samples for a percentile that `bench` does not report by default."""
    if (percent := percent_from_name(name)) > LoadSpec(1).percentile:
        yield from ("--percentile", f"{percent:g}", "--max-time", str(LONGEST_S))


def _list_runtime_options(backend: str, options: Mapping[str, str]) -> Iterator[str]:
    for name, value in options.items():
        yield from ("--option", f"{backend}.{name}={value}")


def suggest_build_again(build: JudgedBuild) -> str:
    return f"optpipe build {build.argument}"


def suggest_build(build: JudgedBuild) -> str:
    """Builds with trained weights."""
    return f"{suggest_build_again(build)} --backend {build.backend} --precision {build.precision} --weights FILE"


def suggest_narrowing(section: str, build: JudgedBuild) -> str:
    """Empty for sections whose intervals a load narrows."""
    said = {
        "accuracy": f"evaluate on more labeled data: optpipe evaluate {build.argument} --data DIR",
        "preprocessing": f"verify parity on more images: optpipe preprocess {build.argument} --images DIR",
        "outputs": f"build on more samples: optpipe build {build.argument} --data PATH",
        "tensor_cores": f"profile more iterations: {suggest_profile(build)} --iterations {MORE_ITERATIONS}",
    }
    return said.get(section, "")


def suggest_fix(section: str, build: JudgedBuild) -> str:
    """The command that helps to meet a section's limits; empty if none is known."""
    compare, bench = f"optpipe compare --model {shlex.quote(build.model)}", f"optpipe bench {build.artifact} --tune"
    profile = suggest_profile(build)
    said = {
        "latency": f"`{profile}` identifies the bottleneck; `{compare}` lists faster builds",
        "throughput": f"`{compare}` shows the best batch size and build; `{bench}` tunes runtime options",
        "regression": "`optpipe profile --diff BEFORE AFTER` shows what is slower than the baseline",
        "accuracy": f"`optpipe calibrate {build.argument} --sensitivity` finds the layers to keep out of INT8",
        "preprocessing": f"`optpipe preprocess {build.argument}` shows which step contributes most",
        "outputs": f"`optpipe build {build.argument} --budget 30dB` keeps the layers in float that cost the most",
        "precision": f"`optpipe store show {build.artifact}` lists the layers in other precisions",
        "memory": "reduce the batch size or use a lower precision",
        "size": "use a lower precision for a smaller engine",
        "energy": "use a lower precision or a larger batch to reduce energy per inference",
        "stability": f"stop other work and lock the clocks; `optpipe bench {build.artifact}` reports the cause",
        "tensor_cores": f"`{profile}` lists eligible layers that do not use Tensor Cores",
    }
    return said.get(section, "")
