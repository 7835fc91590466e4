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
            help="A model that was built, or an artifact's id; two of them with --interleave.",
            show_default=False,
        ),
    ] = None,
    precision: Annotated[str | None, typer.Option(help="Only these precisions, separated by commas.")] = None,
    backend: Annotated[str | None, typer.Option(help="Only these backends, separated by commas.")] = None,
    device: Annotated[str | None, typer.Option(help="Only artifacts for cpu or for cuda.")] = None,
    batch: Annotated[
        str | None,
        typer.Option(metavar="SIZES", help="8, a list 1,8,32, or powers of two 1:256; default: the whole profile."),
    ] = None,
    scenario: Annotated[
        str, typer.Option(help="single-stream, multi-stream, offline or server (MLPerf's).")
    ] = "single-stream",
    mode: Annotated[
        str, typer.Option(help="compute (inputs on the device) or end-to-end (copies in and out).")
    ] = "compute",
    streams: Annotated[int, typer.Option(help="Concurrent streams (multi-stream and offline).")] = 1,
    rate: Annotated[float | None, typer.Option(help="Server: mean queries per second; or give --slo.")] = None,
    slo: Annotated[
        str | None,
        typer.Option(metavar="pNN=TIME", help="Find the largest batch (server: rate) inside it, such as p99=15ms."),
    ] = None,
    tune: Annotated[bool, typer.Option("--tune", help="Search the runtime's options first.")] = False,
    interleave: Annotated[
        bool, typer.Option("--interleave", help="Compare two: A B B A … in fresh processes.")
    ] = False,
    rounds: Annotated[
        int, typer.Option(help="Rounds of --interleave; up to three times as many where noise hides 4 %.")
    ] = 10,
    metric: Annotated[str, typer.Option(help="What --interleave compares: p50, p90, p99, mean, throughput.")] = "p50",
    percentile: Annotated[
        float, typer.Option(help="Highest percentile wanted; it decides how many samples are taken.")
    ] = 99.0,
    min_time: Annotated[float, typer.Option(metavar="SECONDS", help="Measure for at least so long.")] = 3.0,
    max_time: Annotated[float, typer.Option(metavar="SECONDS", help="And at most so long.")] = 60.0,
    warm_up: Annotated[float, typer.Option(metavar="SECONDS", help="Warm up for at least so long.")] = 0.5,
    max_warm_up: Annotated[float, typer.Option(metavar="SECONDS", help="Give up waiting for a steady level.")] = 20.0,
    max_cv: Annotated[
        str, typer.Option(help="Largest coefficient of variation of a VALID measurement, such as 2.5%.")
    ] = "2.5%",
    energy: Annotated[
        bool, typer.Option("--energy", help="Measure at least 12 s, as the energy counter needs.")
    ] = False,
    all_sizes: Annotated[bool, typer.Option("--all-sizes", help="Do not stop at saturation.")] = False,
    images: Annotated[Path | None, typer.Option(metavar="DIR", help="Real images to rotate through.")] = None,
    from_images: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Files to answers: DALI and the artifact overlapped; needs one --batch size or none."
        ),
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(metavar="BACKEND.KEY=VALUE", help="A runtime option, recorded with the result.")
    ] = None,
    affinity: Annotated[str | None, typer.Option(metavar="CPUS", help="Pin the worker, such as 0,2 or 4-7.")] = None,
    sort: Annotated[
        str, typer.Option(help="Order of the table: given, latency, throughput, memory, energy.")
    ] = "given",
    recover: Annotated[
        Path | None, typer.Option(metavar="RUN_DIR", help="Finish a run that was killed, from the samples it left.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything that is drawn.")] = 0,
    workspace: WorkspaceOption = DEFAULT_WORKSPACE,
    json: JsonOption = False,
) -> Outcome:
    """Measure latency, throughput, memory and energy, VALID or not.

    Every percentile has its interval, and each INVALID measurement its reason and remedy.
    """
    from optpipe.bench.bench import bench as run_bench
    from optpipe.bench.bench import bench_record
    from optpipe.bench.pair import bench_pair, pair_record
    from optpipe.bench.recover import recover as recover_run
    from optpipe.bench.recover import recovered_record
    from optpipe.commands.bench_request import (
        bench_plan,
        bench_targets,
        one_batch,
        pair_from_targets,
        require_interleave,
        require_only_from_images,
    )
    from optpipe.commands.parsing import options_from_text
    from optpipe.commands.terminal import Terminal
    from optpipe.end_to_end.from_images import bench_from_images as run_from_images
    from optpipe.errors import BadInputError
    from optpipe.reporters.terminal_bench import bench_table, pair_table, sort_key
    from optpipe.reporters.terminal_from_images import from_images_table
    from optpipe.workspace.store import Store

    store = Store(workspace)
    sort_key(sort)
    if recover is not None:
        rest = recovered_record(recover_run(recover), [])
        return Outcome(rest, lambda: bench_table(rest, sort))
    if not model:
        raise BadInputError("give a MODEL that was built, or --recover RUN_DIR; `optpipe ls` lists what there is")
    options = options_from_text(option or [])
    if not interleave:
        require_interleave(rounds=rounds != 10, metric=metric != "p50")
    if from_images is not None:
        require_only_from_images(
            scenario=scenario != "single-stream", mode=mode != "compute", streams=streams != 1, rate=rate, slo=slo,
            tune=tune, interleave=interleave, energy=energy, images=images, affinity=affinity, percentile=percentile != 99,
            max_time=max_time != 60, warm_up=warm_up != 0.5, max_warm_up=max_warm_up != 20, max_cv=max_cv != "2.5%",
            all_sizes=all_sizes, sort=sort != "given",
        )  # fmt: skip
        with Terminal() as terminal:
            groups = bench_targets(model, store, precision, backend, device, options, terminal)
            fed = run_from_images(
                [artifact for group in groups for artifact in group], from_images, one_batch(batch), min_time,
                options, store, terminal,
            )  # fmt: skip
        answers = {**fed.record, "warnings": terminal.warnings}
        return Outcome(answers, lambda: from_images_table(answers), fed.status)
    plan = bench_plan(
        batch=batch, scenario=scenario, mode=mode, streams=streams, rate=rate, slo=slo, tune=tune, percentile=percentile,
        min_time=min_time, max_time=max_time, warm_up=warm_up,
        max_warm_up=max_warm_up, max_cv=max_cv, all_sizes=all_sizes, images=images, options=options,
        affinity=affinity, seed=seed, energy=energy, interleave=interleave,
    )  # fmt: skip
    with Terminal() as terminal:
        found = bench_targets(model, store, precision, backend, device, options, terminal)
        if interleave:
            first, second, metric_name = pair_from_targets(model, found, metric)
            pair = bench_pair(first, second, plan, rounds, metric_name, store, terminal)
            record = pair_record(pair, terminal.warnings)
            return Outcome(record, lambda: pair_table(record), pair.status)
        everything = tuple(artifact for group in found for artifact in group)
        result = run_bench(everything, plan, store, terminal)
        for why in sorted({each.energy_why_not or "" for each in result.measurements} if energy else ()):
            if why:
                terminal.warn(f"--energy: no figure, {why}")
    document = bench_record(result, terminal.warnings)
    return Outcome(document, lambda: bench_table(document, sort), result.status)
