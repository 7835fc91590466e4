"""`optpipe bench`, `optpipe bench-pair` and `optpipe recover`."""

from pathlib import Path
from typing import Annotated

import typer

from optpipe.commands.bench_options import (
    LOAD,
    AffinityOption,
    BackendOption,
    DeviceOption,
    ImagesOption,
    LengthOption,
    MaxCvOption,
    MaxTimeOption,
    MaxWarmUpOption,
    MinTimeOption,
    PercentileOption,
    PrecisionOption,
    ProcessesOption,
    RuntimeOption,
    SeedOption,
    StreamsOption,
    WarmUpOption,
)
from optpipe.commands.options import DEFAULT_WORKSPACE, JsonOption, WorkspaceOption
from optpipe.commands.outcome import Outcome
from optpipe.core.bench_record import BenchSort, PairMetric
from optpipe.core.defaults import MAX_CV, PROCESSES, ROUNDS
from optpipe.core.measurement import Mode, Scenario


def bench(
    model: Annotated[
        list[str], typer.Argument(metavar="MODEL", help="A built model or an artifact ID.", show_default=False)
    ],
    precision: PrecisionOption = None,
    backend: BackendOption = None,
    device: DeviceOption = None,
    batch: Annotated[
        str | None,
        typer.Option(
            metavar="SIZES", help="Batch sizes: 8, a list 1,8,32, or powers of two 1:256. Default: the whole profile."
        ),
    ] = None,
    length: LengthOption = None,
    scenario: Annotated[Scenario, typer.Option(help="MLPerf scenario.")] = LOAD.scenario,
    mode: Annotated[
        Mode, typer.Option(help="compute: inputs already on the device; end-to-end: with copies.")
    ] = LOAD.mode,
    streams: StreamsOption = LOAD.streams,
    rate: Annotated[float | None, typer.Option(help="Mean queries per second (server); or use --slo.")] = None,
    slo: Annotated[
        str | None,
        typer.Option(
            metavar="pNN=TIME",
            help="Latency limit, such as p99=15ms: find the largest batch (server: rate) that meets it.",
        ),
    ] = None,
    tune: Annotated[bool, typer.Option("--tune", help="Tune the runtime options first.")] = False,
    processes: ProcessesOption = PROCESSES,
    interval: Annotated[
        str | None,
        typer.Option(metavar="SHARE", help="Measure more processes until p50 is known to within this, such as 1%."),
    ] = None,
    percentile: PercentileOption = LOAD.percentile,
    min_time: MinTimeOption = LOAD.min_seconds,
    max_time: MaxTimeOption = LOAD.max_seconds,
    warm_up: WarmUpOption = LOAD.warm_up_seconds,
    max_warm_up: MaxWarmUpOption = LOAD.max_warm_up_seconds,
    max_cv: MaxCvOption = f"{MAX_CV:.1%}",
    energy: Annotated[bool, typer.Option("--energy", help="Measure energy; takes at least 12 s per process.")] = False,
    all_sizes: Annotated[
        bool, typer.Option("--all-sizes", help="Measure all batch sizes, even past saturation.")
    ] = False,
    images: ImagesOption = None,
    option: RuntimeOption = None,
    affinity: AffinityOption = None,
    sort: Annotated[BenchSort, typer.Option(help="Order of the table.")] = BenchSort.GIVEN,
    seed: SeedOption = 0,
    workspace: WorkspaceOption = DEFAULT_WORKSPACE,
    json: JsonOption = False,
) -> Outcome:
    """Measure latency, throughput, memory and energy.

    Percentiles have confidence intervals; INVALID measurements state the reason and a remedy.
    """
    from optpipe.bench.bench import bench_artifacts, record_from_bench
    from optpipe.commands.bench_request import (
        bench_plan_from_options,
        find_bench_targets,
        load_from_options,
        slo_from_options,
    )
    from optpipe.commands.parsing import options_from_text, share_from_text
    from optpipe.commands.terminal import Terminal
    from optpipe.reporters.terminal_bench import render_bench
    from optpipe.workspace.store import Store

    options, store = options_from_text(option or []), Store(workspace)
    limit = slo_from_options(slo, scenario, rate)
    load = load_from_options(
        scenario, mode, streams, rate, limit, percentile, min_time, max_time, warm_up, max_warm_up, energy=energy
    )
    plan = bench_plan_from_options(
        load, batch=batch, length=length, slo=limit, max_cv=max_cv, images=images, options=options, affinity=affinity, seed=seed,
        tune=tune, to_the_end=all_sizes, processes=processes,
        interval=None if interval is None else share_from_text(interval, "--interval"),
    )  # fmt: skip
    with Terminal() as terminal:
        found = find_bench_targets(model, store, precision, backend, device, options, terminal)
        result = bench_artifacts(tuple(artifact for group in found for artifact in group), plan, store, terminal)
        for why in sorted({each.energy_why_not or "" for each in result.measurements} if energy else ()):
            if why:
                terminal.warn(f"--energy: not measured: {why}")
    record = record_from_bench(result, terminal.warnings)
    return Outcome(record, lambda: render_bench(record, sort), result.status)


def bench_pair(
    artifacts: Annotated[
        list[str],
        typer.Argument(metavar="BASELINE CONTENDER", help="Two artifact IDs or models of one artifact each."),
    ],
    metric: Annotated[PairMetric, typer.Option(help="What the two are compared by.")] = PairMetric.P50,
    rounds: Annotated[
        int, typer.Option(help="Rounds; up to three times as many if noise hides a 4 % difference.")
    ] = ROUNDS,
    precision: PrecisionOption = None,
    backend: BackendOption = None,
    device: DeviceOption = None,
    batch: Annotated[int | None, typer.Option(help="Batch size; default: the smallest of the profile.")] = None,
    length: Annotated[int | None, typer.Option(metavar="TOKENS", help="Sequence length.")] = None,
    scenario: Annotated[Scenario, typer.Option(help="MLPerf scenario.")] = LOAD.scenario,
    mode: Annotated[
        Mode, typer.Option(help="compute: inputs already on the device; end-to-end: with copies.")
    ] = LOAD.mode,
    streams: StreamsOption = LOAD.streams,
    rate: Annotated[float | None, typer.Option(help="Mean queries per second (server).")] = None,
    percentile: PercentileOption = LOAD.percentile,
    min_time: MinTimeOption = LOAD.min_seconds,
    max_time: MaxTimeOption = LOAD.max_seconds,
    warm_up: WarmUpOption = LOAD.warm_up_seconds,
    max_warm_up: MaxWarmUpOption = LOAD.max_warm_up_seconds,
    max_cv: MaxCvOption = f"{MAX_CV:.1%}",
    images: ImagesOption = None,
    option: RuntimeOption = None,
    affinity: AffinityOption = None,
    seed: SeedOption = 0,
    workspace: WorkspaceOption = DEFAULT_WORKSPACE,
    json: JsonOption = False,
) -> Outcome:
    """Compare two artifacts in interleaved fresh processes."""
    from optpipe.bench.pair import bench_pair as run_bench_pair
    from optpipe.bench.pair import record_from_pair
    from optpipe.commands.bench_request import (
        bench_plan_from_options,
        find_bench_targets,
        load_from_options,
        pair_from_targets,
    )
    from optpipe.commands.parsing import options_from_text
    from optpipe.commands.terminal import Terminal
    from optpipe.reporters.terminal_bench import render_pair
    from optpipe.workspace.store import Store

    options, store = options_from_text(option or []), Store(workspace)
    load = load_from_options(scenario, mode, streams, rate, None, percentile, min_time, max_time, warm_up, max_warm_up)
    plan = bench_plan_from_options(
        load, batch=None if batch is None else str(batch), length=None if length is None else str(length), slo=None,
        max_cv=max_cv, images=images, options=options, affinity=affinity, seed=seed,
    )  # fmt: skip
    with Terminal() as terminal:
        found = find_bench_targets(artifacts, store, precision, backend, device, options, terminal)
        baseline, contender = pair_from_targets(artifacts, found)
        pair = run_bench_pair(baseline, contender, plan, rounds, metric, store, terminal)
    record = record_from_pair(pair, terminal.warnings)
    return Outcome(record, lambda: render_pair(record), pair.status)


def recover(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder of a killed bench run.")],
    json: JsonOption = False,
) -> Outcome:
    """Finish a killed bench run from the samples that it left."""
    from dataclasses import replace

    from optpipe.bench.bench import record_from_bench
    from optpipe.bench.recover import recover_run
    from optpipe.errors import ExitStatus
    from optpipe.reporters.terminal_bench import render_bench

    record = replace(record_from_bench(recover_run(run_dir), []), exit_status=int(ExitStatus.DONE))
    return Outcome(record, lambda: render_bench(record, BenchSort.GIVEN))
