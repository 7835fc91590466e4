"""`optpipe bench`."""

from pathlib import Path
from typing import Annotated

import typer

from optpipe.commands.options import DEFAULT_WORKSPACE, JsonOption, WorkspaceOption
from optpipe.commands.outcome import Outcome


def bench(
    model: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL",
            help="A built model or an artifact ID; two with --interleave.",
            show_default=False,
        ),
    ] = None,
    precision: Annotated[str | None, typer.Option(help="Precisions to measure, comma-separated.")] = None,
    backend: Annotated[str | None, typer.Option(help="Backends to measure, comma-separated.")] = None,
    device: Annotated[str | None, typer.Option(help="Device: cpu or cuda.")] = None,
    batch: Annotated[
        str | None,
        typer.Option(
            metavar="SIZES", help="Batch sizes: 8, a list 1,8,32, or powers of two 1:256. Default: the whole profile."
        ),
    ] = None,
    scenario: Annotated[
        str, typer.Option(help="MLPerf scenario: single-stream, multi-stream, offline or server.")
    ] = "single-stream",
    mode: Annotated[
        str, typer.Option(help="compute (inputs already on the device) or end-to-end (with copies).")
    ] = "compute",
    streams: Annotated[int, typer.Option(help="Number of concurrent streams (multi-stream, offline).")] = 1,
    rate: Annotated[float | None, typer.Option(help="Mean queries per second (server); or use --slo.")] = None,
    slo: Annotated[
        str | None,
        typer.Option(
            metavar="pNN=TIME",
            help="Latency limit, such as p99=15ms: find the largest batch (server: rate) that meets it.",
        ),
    ] = None,
    tune: Annotated[bool, typer.Option("--tune", help="Tune the runtime options first.")] = False,
    interleave: Annotated[
        bool, typer.Option("--interleave", help="Compare two artifacts, A B B A …, in fresh processes.")
    ] = False,
    rounds: Annotated[
        int, typer.Option(help="Rounds for --interleave; up to three times as many if noise hides a 4 % difference.")
    ] = 10,
    metric: Annotated[str, typer.Option(help="Metric for --interleave: p50, p90, p99, mean or throughput.")] = "p50",
    percentile: Annotated[
        float, typer.Option(help="Highest percentile to report; determines the sample count.")
    ] = 99.0,
    min_time: Annotated[float, typer.Option(metavar="SECONDS", help="Minimum measurement time per point.")] = 3.0,
    max_time: Annotated[float, typer.Option(metavar="SECONDS", help="Maximum measurement time per point.")] = 60.0,
    warm_up: Annotated[float, typer.Option(metavar="SECONDS", help="Minimum warm-up time.")] = 0.5,
    max_warm_up: Annotated[float, typer.Option(metavar="SECONDS", help="Maximum warm-up time.")] = 20.0,
    max_cv: Annotated[
        str, typer.Option(help="Maximum coefficient of variation of a VALID measurement, such as 2.5%.")
    ] = "2.5%",
    energy: Annotated[bool, typer.Option("--energy", help="Measure energy; takes at least 12 s per point.")] = False,
    all_sizes: Annotated[
        bool, typer.Option("--all-sizes", help="Measure all batch sizes, even past saturation.")
    ] = False,
    images: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of images to use as inputs.")] = None,
    option: Annotated[
        list[str] | None, typer.Option(metavar="BACKEND.KEY=VALUE", help="Runtime option; recorded with the result.")
    ] = None,
    affinity: Annotated[
        str | None, typer.Option(metavar="CPUS", help="Pin the worker to CPUs, such as 0,2 or 4-7.")
    ] = None,
    sort: Annotated[
        str, typer.Option(help="Sort the table by: given, latency, throughput, memory or energy.")
    ] = "given",
    recover: Annotated[
        Path | None, typer.Option(metavar="RUN_DIR", help="Recover a killed run from its samples.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    workspace: WorkspaceOption = DEFAULT_WORKSPACE,
    json: JsonOption = False,
) -> Outcome:
    """Measure latency, throughput, memory and energy.

    Percentiles have confidence intervals; INVALID measurements state the reason and a remedy.
    """
    from optpipe.bench.bench import bench_artifacts as run_bench
    from optpipe.bench.bench import document_from_bench
    from optpipe.bench.pair import bench_pair, document_from_pair
    from optpipe.bench.recover import document_from_recovered_run
    from optpipe.bench.recover import recover_run as recover_run
    from optpipe.commands.bench_request import (
        bench_plan_from_options,
        find_bench_targets,
        pair_from_targets,
        require_interleave,
    )
    from optpipe.commands.parsing import options_from_text
    from optpipe.commands.terminal import Terminal
    from optpipe.errors import BadInputError
    from optpipe.reporters.terminal_bench import render_bench, render_pair, sort_key_from_name
    from optpipe.workspace.store import Store

    store = Store(workspace)
    sort_key_from_name(sort)
    if recover is not None:
        rest = document_from_recovered_run(recover_run(recover), [])
        return Outcome(rest, lambda: render_bench(rest, sort))
    if not model:
        raise BadInputError("specify a built MODEL or --recover RUN_DIR; `optpipe ls` lists what is stored")
    options = options_from_text(option or [])
    if not interleave:
        require_interleave(rounds=rounds != 10, metric=metric != "p50")
    plan = bench_plan_from_options(
        batch=batch, scenario=scenario, mode=mode, streams=streams, rate=rate, slo=slo, tune=tune, percentile=percentile,
        min_time=min_time, max_time=max_time, warm_up=warm_up,
        max_warm_up=max_warm_up, max_cv=max_cv, all_sizes=all_sizes, images=images, options=options,
        affinity=affinity, seed=seed, energy=energy, interleave=interleave,
    )  # fmt: skip
    with Terminal() as terminal:
        found = find_bench_targets(model, store, precision, backend, device, options, terminal)
        if interleave:
            first, second, metric_name = pair_from_targets(model, found, metric)
            pair = bench_pair(first, second, plan, rounds, metric_name, store, terminal)
            record = document_from_pair(pair, terminal.warnings)
            return Outcome(record, lambda: render_pair(record), pair.status)
        everything = tuple(artifact for group in found for artifact in group)
        result = run_bench(everything, plan, store, terminal)
        for why in sorted({each.energy_why_not or "" for each in result.measurements} if energy else ()):
            if why:
                terminal.warn(f"--energy: not measured: {why}")
    document = document_from_bench(result, terminal.warnings)
    return Outcome(document, lambda: render_bench(document, sort), result.status)
