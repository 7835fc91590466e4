"""The commands that a verdict suggests: each runs as it is printed and supplies what is missing.

DIR, FILE, DOSSIER, BEFORE and AFTER stand for what only the user has.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from math import expm1, log1p

from optpipe.core.defaults import MAX_CV, PROCESSES
from optpipe.core.measurement import LoadSpec, Subject, format_option, list_load_options, percent_from_name
from optpipe.measure.groups import ProcessGroup
from optpipe.models.artifacts.facts import JudgedBuild
from optpipe.profile.recompute import MORE_ITERATIONS, suggest_profile
from optpipe.signoff.policy import Criterion
from optpipe.signoff.policy_format import LoadFilter
from optpipe.stats.means import FEWEST, MOST_RUNS, SPEED_GAP, count_processes_for_reach, count_runs_needed

MORE = 2
"""How many times the usual processes are suggested where an interval has to be narrower."""


def suggest_bench(build: JudgedBuild, where: LoadFilter, options: Mapping[str, str], name: str = "") -> str:
    """Measures what `where` asks for of a build of which nothing such is measured; `name` is the figure that is wanted."""
    parts = [f"optpipe bench {build.artifact}"]
    parts += [f"--batch {where.batch_size}"] if where.batch_size else []
    parts += [f"--length {where.length}"] if where.length else []
    parts += [f"--scenario {where.scenario}"] if where.scenario else []
    parts += [f"--mode {where.mode}"] if where.mode else []
    parts += [f"--streams {where.streams}"] if where.streams else []
    parts += [f"--rate {where.rate:.15g}"] if where.rate else []
    parts += _list_percentile_options(name)
    parts += [_format_option(build.backend, *each) for each in options.items()]
    return " ".join([*parts, *(["--energy"] if name == "energy" else [])])


def suggest_more_processes(
    group: ProcessGroup, build: JudgedBuild, name: str = "", *, more: bool = False, longer: bool = False
) -> str:
    """Measures the load of `group` again with its settings, so that its processes count with those that are there.

    `name` is the figure that is wanted; `more` asks for more processes than usual, `longer` for more time.
    """
    parts = ["optpipe bench", build.artifact, *_list_options(group, build, name)]
    parts += ["--max-time 600"] if longer and "--max-time" not in " ".join(parts) else []
    parts += [f"--processes {MORE * PROCESSES}"] if more else []
    return " ".join([*parts, *(["--energy"] if name == "energy" else [])])


def suggest_runs(
    criterion: Criterion, runs: Sequence[Sequence[float]], confidence: float, command: str, gap: float = SPEED_GAP
) -> str:
    """How often `command` has to be run before `runs` and those runs decide the criterion.

    `runs` holds the figures of each run's processes; of a regression, the logarithms of the rounds' ratios. Processes at another
    speed may be `gap` away, SPEED_GAP at least.
    """
    loss, limit = criterion.section == "regression", float(criterion.threshold)
    verb, every = "compare" if loss else "measure", [value for run in runs for value in run]
    if len(every) < FEWEST:
        return f"{verb} again: {command}"
    middle = sum(every) / len(every)
    distance = criterion.measure_distance(expm1(middle) if loss else middle)
    level, gap = (1 - confidence) / 2, max(SPEED_GAP, gap)
    fewest = 0.0 if criterion.section == "stability" else count_processes_for_reach(distance, level, gap)
    half = abs(middle - (log1p(limit) if loss else limit))
    needed = count_runs_needed(runs, half, confidence, fewest)
    if needed is None:
        return f"at this scatter even {MOST_RUNS} runs would not settle it: reduce the scatter, or change the build or the limit"
    more = needed - len(runs)
    times = "once more" if more == 1 else f"{more} more times"
    return f"at this scatter about {needed} runs settle it; {verb} {times}: {command}"


def suggest_pair(baseline: Subject, group: ProcessGroup, build: JudgedBuild, metric: str) -> str:
    """Compares the build with the baseline's in interleaved processes under the load of `group`."""
    parts = ["optpipe bench-pair", baseline.artifact, build.artifact, "--metric"]
    parts += [metric if metric in ("p50", "p90", "p99", "throughput") else "p99"]
    parts += _list_options(group, build, metric)
    if baseline.backend != build.backend:
        parts += [
            _format_option(baseline.backend, *each) for each in baseline.settings.items() if each[0] != "affinity"
        ]
    return " ".join(parts)


def _list_options(group: ProcessGroup, build: JudgedBuild, name: str) -> Iterator[str]:
    """The options of `bench` and `bench-pair` that say the load of `group`, what it ran with, and by what it was judged."""
    found = group.newest.measurement
    yield from list_load_options(group.load)
    yield from _list_percentile_options(name)
    usual = {key: format_option(value) for key, value in build.options.items()}
    for key, value in found.subject.settings.items():
        if key in usual and usual[key] != value:
            yield _format_option(build.backend, key, value)
    if "affinity" in found.subject.settings:
        yield f"--affinity {found.subject.settings['affinity']}"
    if (max_cv := found.limits.get("max_cv", MAX_CV)) != MAX_CV:
        yield f"--max-cv {max_cv:g}"


def _list_percentile_options(name: str) -> Iterator[str]:
    """What makes the samples enough for the figure `name`, where it is a percentile that `bench` does not give unasked."""
    if (percent := percent_from_name(name)) > LoadSpec(1).percentile:
        yield f"--percentile {percent:g} --max-time 600"


def _format_option(backend: str, name: str, value: str) -> str:
    return f"--option {shlex.quote(f'{backend}.{name}={value}')}"


def suggest_build_again(build: JudgedBuild) -> str:
    """Builds its model again."""
    return f"optpipe build {build.argument}"


def suggest_build(build: JudgedBuild) -> str:
    """Builds it with trained weights."""
    return f"{suggest_build_again(build)} --backend {build.backend} --precision {build.precision} --weights FILE"


def suggest_narrowing(section: str, build: JudgedBuild) -> str:
    """What makes the interval of a section's figures narrower, where no load decides it; empty for the others."""
    said = {
        "accuracy": f"evaluate on more labeled data: optpipe evaluate {build.argument} --data DIR",
        "preprocessing": f"verify parity on more images: optpipe preprocess {build.argument} --images DIR",
        "tensor_cores": f"profile more iterations: {suggest_profile(build)} --iterations {MORE_ITERATIONS}",
    }
    return said.get(section, "")


def suggest_fix(section: str, build: JudgedBuild) -> str:
    """What brings a build inside a section's limits, or shows what keeps it out; empty where nothing is known to."""
    compare, bench = f"optpipe compare --model {shlex.quote(build.model)}", f"optpipe bench {build.artifact} --tune"
    profile = suggest_profile(build)
    said = {
        "latency": f"`{profile}` identifies the bottleneck; `{compare}` lists faster builds",
        "throughput": f"`{compare}` shows the best batch size and build; `{bench}` tunes runtime options",
        "regression": "`optpipe profile --diff BEFORE AFTER` shows what is slower than the baseline",
        "accuracy": f"`optpipe calibrate {build.argument} --sensitivity` finds the layers to keep out of INT8",
        "preprocessing": f"`optpipe preprocess {build.argument}` shows which step contributes most",
        "precision": f"`optpipe store show {build.artifact}` lists the layers in other precisions",
        "memory": "reduce the batch size or use a lower precision",
        "size": "use a lower precision for a smaller engine",
        "energy": "use a lower precision or a larger batch to reduce energy per inference",
        "stability": f"stop other work and lock the clocks; `optpipe bench {build.artifact}` reports the cause",
        "tensor_cores": f"`{profile}` lists eligible layers that do not use Tensor Cores",
    }
    return said.get(section, "")
