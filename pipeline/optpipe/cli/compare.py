"""`optpipe compare`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optpipe.cli.groups import Outcome
from optpipe.cli.options import DEFAULT_WORKSPACE
from optpipe.core.comparison import Goal

if TYPE_CHECKING:
    from optpipe.measure.search import Slo


def compare(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...", help="Bench runs or a model; default: all runs in the workspace.", show_default=False
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Compare only this model.")] = None,
    length: Annotated[int | None, typer.Option(metavar="TOKENS", help="Compare only this sequence length.")] = None,
    baseline: Annotated[
        str | None, typer.Option(metavar="RUN|approved", help="Baseline: a run, or the approved baseline.")
    ] = None,
    goal: Annotated[Goal | None, typer.Option("--for", help="Sort by goal.")] = None,
    slo: Annotated[
        str | None, typer.Option(metavar="p99=15ms", help="Latency limit that the best builds must meet.")
    ] = None,
    across: Annotated[bool, typer.Option(help="Allow comparison across different GPUs, drivers or CPUs.")] = False,
    fleet: Annotated[
        bool,
        typer.Option(
            "--fleet", help="Compare kinds of GPU by the jobs of `optpipe sweep`: engines, costs, GPUs needed."
        ),
    ] = False,
    prices: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Price list (TOML) for --fleet.", show_default=False)
    ] = None,
    load: Annotated[
        float | None,
        typer.Option(metavar="PER_S", help="Images or samples per second for --fleet: how many GPUs does it need?"),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for HTML, Markdown, CSV, Parquet and JSON reports.")
    ] = None,
    workspace: Path = DEFAULT_WORKSPACE,
) -> Outcome:
    """Compare measurements: speedups, frontier, best builds.

    Each row is all processes that measured a build with its options under one load. Speedups are relative to the
    baseline build with the same options if measured, otherwise to the fastest baseline build.
    """
    from dataclasses import replace

    from optpipe.cli.terminal import Terminal
    from optpipe.core.errors import BadInputError
    from optpipe.measure.compare import sort_by_goal
    from optpipe.measure.document import document_from_comparison
    from optpipe.measure.overview import compare_workspace
    from optpipe.measure.report_data import frame_from_comparison
    from optpipe.measure.search import slo_from_text
    from optpipe.signoff.reports import write_comparison
    from optpipe.workspace.files import write_bytes, write_parquet
    from optpipe.workspace.places import require_writable_folder
    from optpipe.workspace.store import Store

    limit = slo_from_text(slo) if slo is not None else None
    if fleet or prices is not None or load is not None:
        if output is not None:
            raise BadInputError("--fleet writes no reports: use --json instead of --output")
        return _compare_fleet(model or next(iter(runs or ()), None), limit, prices, load, workspace)
    if output is not None:
        require_writable_folder(output, "--output")
    with Terminal() as terminal:
        with terminal.step("compare"):
            found = compare_workspace(
                Store(workspace),
                names=runs or (),
                model=model,
                length=length,
                baseline=baseline,
                slo=limit,
                across=across,
            )
        comparison = sort_by_goal(found.comparison, goal) if goal else found.comparison
        written: list[str] = []
        if output is not None:
            with terminal.step("write the reports"):
                written = [str(path) for path in write_comparison(found, output)]
                frame = frame_from_comparison(comparison)
                write_bytes(output / "comparison.csv", frame.write_csv().encode())
                write_parquet(output / "comparison.parquet", frame)
                written += [str(output / name) for name in ("comparison.csv", "comparison.parquet")]
    return Outcome(replace(comparison, written=tuple(written)), lambda: document_from_comparison(comparison))


def _compare_fleet(
    model: str | None, slo: "Slo | None", prices: Path | None, load: float | None, workspace: Path
) -> Outcome:
    """The answers across kinds of GPU, from what sweeps have recorded."""
    from optpipe.core.errors import BadInputError
    from optpipe.sweep.document import document_from_fleet
    from optpipe.sweep.fleet import compare_fleet, prices_from_file
    from optpipe.sweep.ledger import keep_backed, read_jobs

    if load is not None and not 0 < load < 1e9:
        raise BadInputError(f"--load {load:g}: expected images (or samples) per second, more than 0 and under 1e9")
    known = None if prices is None else prices_from_file(prices)
    found = compare_fleet(
        keep_backed(workspace, read_jobs(workspace)), model=model, slo=slo, prices=known, load_per_s=load
    )
    return Outcome(found, lambda: document_from_fleet(found))
