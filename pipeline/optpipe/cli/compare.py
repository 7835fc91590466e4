"""`optpipe compare`."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optpipe.cli.groups import Outcome
from optpipe.core.measurement import Goal
from optpipe.core.plan import Param

if TYPE_CHECKING:
    from optpipe.cli.terminal import Terminal
    from optpipe.workspace.store import Store


def compare(
    store: "Store",
    terminal: "Terminal",
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...", help="Bench runs or a model; default: all runs in the workspace.", show_default=False
        ),
    ] = None,
    model: Annotated[str | None, Param("Compare only this model.")] = None,
    length: Annotated[int | None, Param("Compare only this sequence length.", metavar="TOKENS")] = None,
    baseline: Annotated[str | None, Param("Baseline: a run, or the approved baseline.", metavar="RUN|approved")] = None,
    goal: Annotated[Goal | None, Param("Sort by goal.", flag="for")] = None,
    slo: Annotated[str | None, Param("Latency limit that the best builds must meet.", metavar="p99=15ms")] = None,
    across: Annotated[bool, Param("Allow comparison across different GPUs, drivers or CPUs.")] = False,
    fleet: Annotated[bool, Param("Compare kinds of GPU by the jobs of `optpipe sweep`: engines, GPUs needed.")] = False,
    load: Annotated[
        float | None,
        Param("Images or samples per second for --fleet: how many GPUs does it need?", metavar="PER_S"),
    ] = None,
    output: Annotated[
        Path | None, Param("Folder for HTML, Markdown, CSV, Parquet and JSON reports.", metavar="DIR")
    ] = None,
) -> Outcome:
    """Compare measurements: speedups, frontier, best builds.

    Each row is all processes that measured a build with its options under one load. Speedups are relative to the
    baseline build with the same options if measured, otherwise to the fastest baseline build.
    """
    from optpipe.core.errors import BadInputError
    from optpipe.measure.compare import sort_by_goal
    from optpipe.measure.document import document_from_comparison, frame_from_comparison
    from optpipe.measure.overview import compare_workspace
    from optpipe.measure.search import slo_from_text
    from optpipe.signoff.reports import write_comparison
    from optpipe.sweep.document import document_from_fleet
    from optpipe.sweep.fleet import compare_fleet
    from optpipe.sweep.ledger import keep_backed, read_jobs
    from optpipe.workspace.files import write_bytes, write_parquet
    from optpipe.workspace.places import require_writable_folder

    limit = slo_from_text(slo) if slo is not None else None
    if fleet or load is not None:
        if output is not None:
            raise BadInputError("--fleet writes no reports: use --json instead of --output")
        if load is not None and not 0 < load < 1e9:
            raise BadInputError(f"--load {load:g}: expected images (or samples) per second, more than 0 and under 1e9")
        jobs = keep_backed(store.workspace, read_jobs(store.workspace))
        model = model or next(iter(runs or ()), None)
        return Outcome(compare_fleet(jobs, model=model, slo=limit, load_per_s=load), document_from_fleet)
    if output is not None:
        require_writable_folder(output, "--output")
    with terminal.step("compare"):
        found, measured, of_runs = compare_workspace(
            store,
            names=runs or (),
            model=model,
            length=length,
            baseline=baseline,
            slo=limit,
            across=across,
        )
    comparison = sort_by_goal(found, goal) if goal else found
    written: list[str] = []
    if output is not None:
        with terminal.step("write the reports"):
            written = [str(path) for path in write_comparison(found, measured, of_runs, output)]
            frame = frame_from_comparison(comparison)
            write_bytes(output / "comparison.csv", frame.write_csv().encode())
            write_parquet(output / "comparison.parquet", frame)
            written += [str(output / name) for name in ("comparison.csv", "comparison.parquet")]
    return Outcome(replace(comparison, written=tuple(written)), document_from_comparison)
