"""`optpipe compare`."""

from pathlib import Path
from typing import Annotated

import typer

from optpipe.commands.options import DEFAULT_WORKSPACE, JsonOption, WorkspaceOption
from optpipe.commands.outcome import Outcome


def compare(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...", help="Bench runs, or a model; all in the workspace if left out.", show_default=False
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Only this model.")] = None,
    baseline: Annotated[
        str | None, typer.Option(metavar="RUN|approved", help="Hold everything against this run, or the approved one.")
    ] = None,
    goal: Annotated[
        str | None, typer.Option("--for", metavar="GOAL", help="latency, throughput or efficiency: sorts by it.")
    ] = None,
    slo: Annotated[
        str | None, typer.Option(metavar="p99=15ms", help="Only builds inside this latency can be the best.")
    ] = None,
    across: Annotated[bool, typer.Option(help="Compare across different GPUs, drivers or CPUs.")] = False,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write HTML, Markdown, CSV, Parquet and JSON there.")
    ] = None,
    workspace: WorkspaceOption = DEFAULT_WORKSPACE,
    json: JsonOption = False,
) -> Outcome:
    """Compare everything measured: speed-ups, frontier, best build.

    A row is a build with its options under one load, of its newest measurement. A speed-up is over the baseline's build with
    the same options where it was measured so, else with its fastest.
    """
    from optpipe.commands.release_options import goal_from_text
    from optpipe.commands.terminal import Terminal
    from optpipe.compare.best import sorted_for
    from optpipe.compare.overview import overview
    from optpipe.measuring.slo import slo_from_text
    from optpipe.reporters.files import write_csv, write_parquet
    from optpipe.reporters.terminal_compare import comparison_table
    from optpipe.signoff.release import comparison_report, write_reports
    from optpipe.workspace.store import Store

    wanted, limit = goal_from_text(goal), slo_from_text(slo) if slo is not None else None
    with Terminal() as terminal:
        with terminal.step("compare"):
            found = overview(
                Store(workspace), names=runs or (), model=model, baseline=baseline, slo=limit, across=across
            )
        comparison = sorted_for(found.comparison, wanted) if wanted else found.comparison
        written: list[str] = []
        if output is not None:
            with terminal.step("write the reports"):
                output.mkdir(parents=True, exist_ok=True)
                written = [str(path) for path in write_reports(comparison_report(found, "Comparison", output), output)]
                for name, write in (("comparison.csv", write_csv), ("comparison.parquet", write_parquet)):
                    write(comparison, output / name)
                    written.append(str(output / name))
    document = comparison.as_json() | {"written": written}
    return Outcome(document, lambda: comparison_table(comparison))
