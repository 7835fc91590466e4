"""`optpipe bench`, `optpipe bench-pair` and `optpipe recover`."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from optpipe.cli.bench_options import LoadOptions, TargetOptions
from optpipe.cli.groups import Outcome
from optpipe.cli.options import DEFAULT_WORKSPACE, JsonOption, LengthOption, WorkspaceOption
from optpipe.core.bench_record import BenchSort, PairMetric
from optpipe.core.defaults import PROCESSES, ROUNDS
from optpipe.core.errors import ExitStatus


def bench(
    model: Annotated[
        list[str], typer.Argument(metavar="MODEL", help="A built model or an artifact ID.", show_default=False)
    ],
    targets: TargetOptions = TargetOptions(),
    batch: Annotated[
        str | None,
        typer.Option(
            metavar="SIZES", help="Batch sizes: 8, a list 1,8,32, or powers of two 1:256. Default: the whole profile."
        ),
    ] = None,
    length: LengthOption = None,
    load: LoadOptions = LoadOptions(),
    slo: Annotated[
        str | None,
        typer.Option(
            metavar="pNN=TIME",
            help="Latency limit, such as p99=15ms: find the largest batch (server: rate) that meets it.",
        ),
    ] = None,
    tune: Annotated[bool, typer.Option("--tune", help="Tune the runtime options first.")] = False,
    processes: Annotated[
        int, typer.Option(min=1, help="Fresh processes; fewer than three give no interval over processes.")
    ] = PROCESSES,
    interval: Annotated[
        str | None,
        typer.Option(metavar="SHARE", help="Measure more processes until p50 is known to within this, such as 1%."),
    ] = None,
    energy: Annotated[bool, typer.Option("--energy", help="Measure energy; takes at least 12 s per process.")] = False,
    all_sizes: Annotated[
        bool, typer.Option("--all-sizes", help="Measure all batch sizes, even past saturation.")
    ] = False,
    sort: Annotated[BenchSort, typer.Option(help="Order of the table.")] = BenchSort.GIVEN,
    workspace: WorkspaceOption = DEFAULT_WORKSPACE,
    json: JsonOption = False,
) -> Outcome:
    """Measure latency, throughput, memory and energy.

    Percentiles have confidence intervals; INVALID measurements state the reason and a remedy.
    """
    from optpipe.cli.bench_request import bench_plan_from_options, find_bench_targets
    from optpipe.cli.terminal import Terminal
    from optpipe.measure.bench import bench_artifacts
    from optpipe.report.terminal_bench import render_bench
    from optpipe.workspace.store import Store

    store = Store(workspace)
    plan = bench_plan_from_options(
        load, targets, batch=batch, length=length, slo=slo, energy=energy, tune=tune,
        to_the_end=all_sizes, processes=processes, interval=interval,
    )  # fmt: skip
    with Terminal() as terminal:
        found = find_bench_targets(model, targets, store, terminal)
        result = bench_artifacts(tuple(artifact for group in found for artifact in group), plan, store, terminal)
        for why in sorted({each.energy_why_not or "" for each in result.measurements} if energy else ()):
            if why:
                terminal.warn(f"--energy: not measured: {why}")
    record = replace(result, warnings=tuple(terminal.warnings))
    return Outcome(record, lambda: render_bench(record, sort), ExitStatus(record.exit_status))


def bench_pair(
    artifacts: Annotated[
        list[str], typer.Argument(metavar="BASELINE CONTENDER", help="Two artifact IDs or models of one artifact each.")
    ],
    metric: Annotated[PairMetric, typer.Option(help="What the two are compared by.")] = PairMetric.P50,
    rounds: Annotated[
        int, typer.Option(help="Rounds, 8 or more; up to three times as many if noise hides a 4 % difference.")
    ] = ROUNDS,
    targets: TargetOptions = TargetOptions(),
    batch: Annotated[int | None, typer.Option(help="Batch size; default: the smallest of the profile.")] = None,
    length: Annotated[int | None, typer.Option(metavar="TOKENS", help="Sequence length.")] = None,
    load: LoadOptions = LoadOptions(),
    workspace: WorkspaceOption = DEFAULT_WORKSPACE,
    json: JsonOption = False,
) -> Outcome:
    """Compare two artifacts in interleaved fresh processes."""
    from optpipe.cli.bench_request import bench_plan_from_options, find_bench_targets, pair_from_targets
    from optpipe.cli.terminal import Terminal
    from optpipe.measure.pair import bench_pair as run_bench_pair
    from optpipe.report.terminal_bench import render_pair
    from optpipe.workspace.store import Store

    store = Store(workspace)
    plan = bench_plan_from_options(
        load, targets, batch=None if batch is None else str(batch),
        length=None if length is None else str(length),
    )  # fmt: skip
    with Terminal() as terminal:
        found = find_bench_targets(artifacts, targets, store, terminal)
        baseline, contender = pair_from_targets(artifacts, found)
        pair = run_bench_pair(baseline, contender, plan, rounds, metric, store, terminal)
    record = replace(pair, warnings=tuple(terminal.warnings))
    return Outcome(record, lambda: render_pair(record), ExitStatus(record.exit_status))


def recover(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder of a killed bench run.")],
    json: JsonOption = False,
) -> Outcome:
    """Finish a killed bench run from the samples that it left."""
    from optpipe.measure.bench import recover_run
    from optpipe.report.terminal_bench import render_bench

    record = replace(recover_run(run_dir), exit_status=int(ExitStatus.DONE))
    return Outcome(record, lambda: render_bench(record, BenchSort.GIVEN))
