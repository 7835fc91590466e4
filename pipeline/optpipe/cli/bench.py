"""`optpipe bench`: latency, throughput, energy; of two builds in turn; from image files to predictions. `optpipe compare`."""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optpipe.cli.groups import Outcome, word_from_text
from optpipe.cli.options import TargetOptions
from optpipe.core import params
from optpipe.core.bench_defaults import MAX_CV, PROCESSES, ROUNDS
from optpipe.core.comparison import Goal
from optpipe.core.errors import BadInputError, ExitStatus, require_existing
from optpipe.core.history import FailOn
from optpipe.core.load import LoadSpec
from optpipe.core.metrics.measured import PairMetric
from optpipe.core.params import Param
from optpipe.core.precision import Precision
from optpipe.core.settings import format_cpus
from optpipe.core.wording import for_workspace

if TYPE_CHECKING:
    from optpipe.core.events import Listener
    from optpipe.measure.measure import BenchPlan
    from optpipe.models.artifacts.lookup import StoredArtifact
    from optpipe.report.progress import Terminal
    from optpipe.workspace.store import Store


def _cpus_from_text(text: str, flag: str) -> tuple[int, ...]:
    have = os.sched_getaffinity(0)
    cpus: set[int] = set()
    try:
        for part in text.split(","):
            low, dash, high = part.partition("-")
            span = range(int(low), int(high if dash else low) + 1)
            cpus |= set(span) if span and span[-1] <= max(have) else {-1}
    except ValueError:
        cpus = set()
    if not cpus or cpus - have:
        raise BadInputError(
            f"{flag} {text}: expected CPUs from {','.join(map(str, sorted(have)))}, such as 0,2 or 4-7"
        )
    return tuple(sorted(cpus))


@dataclass(frozen=True, slots=True)
class BenchOptions:
    batch: Annotated[
        tuple[int, ...] | None,
        Param(
            "Batch sizes: 8, a list 1,8,32, or powers of two 1:256. Default: the whole profile.",
            metavar="SIZES",
            parse=params.sizes_from_text,
        ),
    ] = None
    length: Annotated[tuple[int, ...] | None, params.LENGTHS] = None
    slo: Annotated[
        str | None,
        Param(
            "Latency limit, such as p99=15ms: find the largest batch (server: rate) that meets it.",
            metavar="pNN=TIME",
        ),
    ] = None
    against: Annotated[
        str | None,
        Param(
            "Compare with this build in interleaved processes: an ID, a model, or another precision or backend of MODEL.",
            metavar="BASELINE",
            parse=params.text_from_text,
        ),
    ] = None
    metric: Annotated[
        PairMetric | None, Param("With --against: metric to compare; default: p50.")
    ] = None
    rounds: Annotated[
        int | None,
        Param(
            "With --against: rounds, 8 or more; up to three times as many if noise hides a 4% difference. "
            f"Default: {ROUNDS}."
        ),
    ] = None
    from_images: Annotated[
        Path | None,
        Param(
            "Measure from the image files in this folder to predictions, with the DALI pipeline of `optpipe preprocess`.",
            metavar="DIR",
        ),
    ] = None
    resume: Annotated[
        Path | None, Param("Finish a killed run from its saved samples.", metavar="RUN_DIR")
    ] = None
    processes: Annotated[
        int | None, replace(params.PROCESSES, help=f"{params.PROCESSES.help} Default: {PROCESSES}.")
    ] = None
    energy: Annotated[bool, Param("Measure energy; takes at least 12 s per process.")] = False
    turns: Annotated[
        bool,
        Param(
            "With --against: both take turns in short trials, so that other work disturbs both alike."
        ),
    ] = False
    max_cv: Annotated[float, params.MAX_CV] = MAX_CV
    images: Annotated[Path | None, Param("Folder of images to use as inputs.", metavar="DIR")] = (
        None
    )
    affinity: Annotated[
        tuple[int, ...] | None,
        Param(
            "Pin the worker to CPUs, such as 0,2 or 4-7.",
            metavar="CPUS",
            parse=_cpus_from_text,
            show=format_cpus,
        ),
    ] = None
    keep_going: Annotated[
        bool,
        Param(
            "Start all processes, even if other work on the machine makes them INVALID.",
            setting=True,
        ),
    ] = False
    seed: Annotated[int, Param("Random seed of inputs.", minimum=0, setting=True)] = 0


def bench(
    store: "Store",
    terminal: "Terminal",
    model: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL", help="Built models or artifact IDs.", show_default=False),
    ] = None,
    targets: TargetOptions = TargetOptions(),
    load: Annotated[Mapping[str, Any], LoadSpec] = {},
    how: BenchOptions = BenchOptions(),
) -> Outcome:
    """Measure latency, throughput, memory, and energy.

    Percentiles have confidence intervals; INVALID measurements state the reason and a remedy. With --against, two builds are
    measured in turn; with --from-images, everything from image files to predictions.
    """
    from optpipe.measure.bench import bench_artifacts, recover_run
    from optpipe.measure.document import document_from_bench

    models = model or []
    if how.resume is not None:
        words = [f"MODEL {model}" for model in models]
        _require_alone(
            "--resume RUN_DIR", how, {"resume"}, load, *words, *params.list_words(targets)
        )
        return Outcome(
            replace(recover_run(how.resume), exit_status=int(ExitStatus.DONE)), document_from_bench
        )
    if not models:
        raise BadInputError(
            f"bench requires MODEL; `{for_workspace('optpipe store ls')}` lists what is built"
        )
    if how.from_images is not None:
        _require_alone(
            "--from-images", how, {"from_images", "batch"}, load.keys() - {"min_seconds"}
        )
        return _bench_from_images(models, targets, load, how, store, terminal)
    plan = make_bench_plan(load, targets, how)
    if how.against is not None:
        return _bench_against(models, how.against, targets, plan, how, store, terminal)
    if how.turns:
        raise BadInputError("--turns requires --against BASELINE")
    if how.metric is not None or how.rounds is not None:
        raise BadInputError(
            f"{'--metric' if how.metric else '--rounds'} requires --against BASELINE"
        )
    groups = find_bench_targets(models, targets, store, terminal)
    record = bench_artifacts(
        tuple(artifact for group in groups for artifact in group), plan, store, terminal
    )
    for why in sorted(
        {measured.energy_why_not or "" for measured in record.measurements} if how.energy else ()
    ):
        if why:
            terminal.warn(f"--energy: not measured: {why}")
    return Outcome(record, document_from_bench, ExitStatus(record.exit_status))


_BESIDE_AGAINST = {
    "turns",
    "against",
    "metric",
    "rounds",
    "batch",
    "length",
    "max_cv",
    "images",
    "affinity",
    "keep_going",
    "seed",
}
"""Options of a comparison with `--against`."""


def _bench_against(
    models: Sequence[str],
    against: str,
    targets: TargetOptions,
    plan: "BenchPlan",
    how: BenchOptions,
    store: "Store",
    terminal: "Terminal",
) -> Outcome:
    from optpipe.measure.document import document_from_pair
    from optpipe.measure.pair import bench_pair

    if how.turns and how.keep_going:
        raise BadInputError(
            "--turns measures under any load, so that --set keep-going=true has no effect"
        )
    _require_alone("--against", how, _BESIDE_AGAINST)
    if len(models) > 1 or len(how.batch or ()) > 1 or len(how.length or ()) > 1:
        raise BadInputError(
            "--against compares one MODEL at one batch size and length with its baseline"
        )
    baseline, contender = find_pair(models[0], against, targets, store, terminal)
    if how.turns:
        if how.metric is not None:
            raise BadInputError("--turns compares medians; leave out --metric")
        return _bench_in_turns(baseline, contender, plan, how.rounds, store, terminal)
    rounds, metric = how.rounds or ROUNDS, how.metric or PairMetric.P50
    record = bench_pair(baseline, contender, plan, rounds, metric, store, terminal)
    return Outcome(record, document_from_pair, ExitStatus(record.exit_status))


def _bench_in_turns(
    baseline: "StoredArtifact",
    contender: "StoredArtifact",
    plan: "BenchPlan",
    rounds: int | None,
    store: "Store",
    terminal: "Terminal",
) -> Outcome:
    from optpipe.measure import turns

    count = turns.ROUNDS if rounds is None else rounds
    if count < turns.FEWEST_ROUNDS:
        raise BadInputError(f"--rounds {count}: builds in turns need {turns.FEWEST_ROUNDS} or more")
    run = turns.measure_turns(baseline, contender, plan, store, terminal, count)
    record = turns.report_from_run(run)
    return Outcome(record, turns.document_from_turns)


def _require_alone(
    flag: str, how: BenchOptions, beside: set[str], load: Collection[str] = (), *words: str
) -> None:
    """Raises BadInputError for options that `flag` does not allow; those of `how` named in `beside` are allowed."""
    given = [*words, *params.list_words(how, *beside)]
    given += [option.flag for option in params.list_fields(LoadSpec) if option.name in load]
    if given:
        raise BadInputError(f"{flag} cannot be combined with {' '.join(given)}")


def make_bench_plan(
    load: Mapping[str, Any], targets: TargetOptions, how: BenchOptions
) -> "BenchPlan":
    """Raises BadInputError for options that contradict each other."""
    from optpipe.backends.registry import parse_options
    from optpipe.measure.plan import plan_bench

    return plan_bench(
        load,
        batch=how.batch,
        length=how.length,
        slo=how.slo,
        processes=how.processes,
        energy=how.energy,
        max_cv=how.max_cv,
        images=how.images,
        affinity=how.affinity,
        keep_going=how.keep_going,
        seed=how.seed,
        options=parse_options(targets.option),
    )


def find_bench_targets(
    models: Sequence[str], given: TargetOptions, store: "Store", listener: "Listener"
) -> "tuple[tuple[StoredArtifact, ...], ...]":
    """The runnable artifacts of each MODEL; warns about the others."""
    from optpipe.build.plan import require_device
    from optpipe.measure.targets import find_targets

    return find_targets(
        models,
        store,
        listener,
        precision=given.precision,
        backend=given.backend,
        device=require_device(given.device),
    )


def find_pair(
    model: str, against: str, targets: TargetOptions, store: "Store", listener: "Listener"
) -> "tuple[StoredArtifact, StoredArtifact]":
    """The baseline of `--against` and the artifact of MODEL. Both get the same inputs if they are of one model.

    Raises BadInputError if either matches several artifacts.
    """
    from optpipe.backends.registry import BACKENDS

    (named,) = find_bench_targets([model], targets, store, listener)
    if against in list(Precision):
        (others,) = find_bench_targets(
            [model], replace(targets, precision=against), store, listener
        )
    elif against in BACKENDS:
        (others,) = find_bench_targets([model], replace(targets, backend=against), store, listener)
    else:
        (others,) = find_bench_targets(
            [against], TargetOptions(device=targets.device), store, listener
        )
        if len(others) > 1 and (targets.precision or targets.backend):
            (others,) = find_bench_targets([against], targets, store, listener)
    for text, matches in ((model, named), (f"--against {against}", others)):
        if len(matches) > 1:
            labels = ", ".join(f"{build.entry.id} {build.label}" for build in matches)
            raise BadInputError(f"{text} matches {labels}\nspecify one of these IDs")
    baseline, contender = others[0], named[0]
    if contender.model.id == baseline.model.id:
        contender = replace(contender, reference=baseline.reference)
    return baseline, contender


def _bench_from_images(
    models: Sequence[str],
    targets: TargetOptions,
    load: Mapping[str, Any],
    how: BenchOptions,
    store: "Store",
    terminal: "Terminal",
) -> Outcome:
    from optpipe.backends.registry import parse_options
    from optpipe.preprocess.document import document_from_end_to_end
    from optpipe.preprocess.end_to_end import bench_end_to_end, choose_exit_status

    assert how.from_images is not None
    require_existing(how.from_images, "--from-images")
    if how.batch and len(how.batch) > 1:
        raise BadInputError("--from-images measures one batch size; give --batch one number")
    size = how.batch[0] if how.batch else None
    seconds, options = load.get("min_seconds", 3.0), parse_options(targets.option)
    groups = find_bench_targets(models, targets, store, terminal)
    artifacts = [build for group in groups for build in group]
    record = bench_end_to_end(
        artifacts,
        how.from_images,
        store,
        terminal,
        batch_size=size,
        seconds=seconds,
        options=options,
    )
    return Outcome(record, document_from_end_to_end, choose_exit_status(record))


def compare(
    store: "Store",
    terminal: "Terminal",
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...",
            help="Bench runs or a model; default: all runs in the workspace. With --history: more workspaces.",
            show_default=False,
            parser=word_from_text,
        ),
    ] = None,
    model: Annotated[
        str | None, Param("Compare only this model.", parse=params.text_from_text)
    ] = None,
    length: Annotated[
        int | None, Param("Compare only this sequence length.", metavar="TOKENS")
    ] = None,
    baseline: Annotated[
        str | None,
        Param(
            "Baseline: a run, a workspace, or the approved baseline.",
            metavar="RUN|DIR|approved",
            parse=params.text_from_text,
        ),
    ] = None,
    goal: Annotated[Goal | None, Param("Sort by goal.", flag="for")] = None,
    slo: Annotated[
        str | None, Param("Latency limit that the best builds must meet.", metavar="p99=15ms")
    ] = None,
    across: Annotated[
        bool, Param("Allow comparison across different GPUs, drivers, or CPUs.")
    ] = False,
    output: Annotated[
        Path | None,
        Param("Folder for HTML, Markdown, CSV, Parquet, and JSON reports.", metavar="DIR"),
    ] = None,
    history: Annotated[
        str | None,
        Param(
            "Show every bench, evaluation, and sign-off of this model in order, and where its figures changed.",
            metavar="MODEL",
        ),
    ] = None,
    fail_on: Annotated[
        FailOn | None,
        Param(
            "With --history: exit with 1 if a figure is worse than it was, with 5 if too few runs could show it."
        ),
    ] = None,
    since: Annotated[
        str | None,
        Param(
            "With --history: only runs from this time on (UTC), such as 2026-11-21.", metavar="TIME"
        ),
    ] = None,
) -> Outcome:
    """Compare measurements: speedups, frontier, and best builds; or one model with its past.

    Each row is all processes that measured a build with its options under one load. Speedups are relative to the
    baseline build with the same options if measured, otherwise to the fastest baseline build.
    """
    if history is not None:
        given = {"--model": model, "--baseline": baseline, "--for": goal, "--slo": slo}
        if others := [flag for flag, value in given.items() if value is not None]:
            raise BadInputError(f"--history cannot be combined with {' '.join(others)}")
        return _show_history(
            history, runs or (), store, terminal, length, since, output, fail_on, across=across
        )
    if fail_on is not None or since is not None:
        raise BadInputError(
            f"{'--since' if fail_on is None else '--fail-on'} requires --history MODEL"
        )
    from optpipe.measure.best_rows import sort_by_goal
    from optpipe.measure.compare_workspace import compare_workspace
    from optpipe.measure.document import document_from_comparison, frame_from_comparison
    from optpipe.measure.search import slo_from_text
    from optpipe.signoff.reports import write_comparison
    from optpipe.workspace.files import write_bytes, write_parquet
    from optpipe.workspace.places import require_writable_folder

    limit = slo_from_text(slo) if slo is not None else None
    if output is not None:
        require_writable_folder(output, "output")
    with terminal.step("compare"):
        compared, measured, of_runs = compare_workspace(
            store,
            names=runs or (),
            model=model,
            length=length,
            baseline=baseline,
            slo=limit,
            across=across,
        )
    comparison = sort_by_goal(compared, goal) if goal else compared
    written: list[str] = []
    if output is not None:
        with terminal.step("write the reports"):
            written = [str(path) for path in write_comparison(compared, measured, of_runs, output)]
            frame = frame_from_comparison(comparison)
            write_bytes(output / "comparison.csv", frame.write_csv().encode())
            write_parquet(output / "comparison.parquet", frame)
            written += [str(output / name) for name in ("comparison.csv", "comparison.parquet")]
    return Outcome(replace(comparison, written=tuple(written)), document_from_comparison)


def _show_history(
    model: str,
    more: Sequence[str],
    store: "Store",
    terminal: "Terminal",
    length: int | None,
    since: str | None,
    output: Path | None,
    fail_on: FailOn | None,
    *,
    across: bool,
) -> Outcome:
    from optpipe.measure.history_document import document_from_history
    from optpipe.signoff.dossier import since_from_text
    from optpipe.signoff.history import collect_history, write_history
    from optpipe.workspace.places import require_writable_folder
    from optpipe.workspace.store import Store

    if output is not None:
        require_writable_folder(output, "output")
    history = collect_history(
        model,
        [store, *(Store(Path(folder)) for folder in more)],
        terminal,
        across=across,
        since=None if since is None else since_from_text(since),
        length=length,
    )
    if output is not None:
        with terminal.step("write the reports"):
            history = write_history(history, output)
    return Outcome(history, document_from_history, history.choose_status(fail_on))
