"""`optpipe recheck`: what an upgrade changes."""

from pathlib import Path
from typing import Annotated

import typer

from optpipe.cli.options import DEFAULT_WORKSPACE, JsonOption, WorkspaceOption
from optpipe.cli.outcome import Outcome
from optpipe.core.defaults import ROUNDS


def recheck(
    dossier: Annotated[Path, typer.Argument(metavar="DOSSIER", help="Folder written by `optpipe signoff`.")],
    python: Annotated[
        Path | None,
        typer.Option(metavar="ENV", help="Environment to compare with this one; default: this one with the dossier."),
    ] = None,
    rounds: Annotated[
        int, typer.Option(help="Rounds, 8 or more; up to three times as many if noise hides a 4 % difference.")
    ] = ROUNDS,
    min_time: Annotated[float, typer.Option(min=0.05, help="Seconds to measure in each process.")] = 0.5,
    max_slowdown: Annotated[str, typer.Option(help="Slow-down that must be excluded for a PASS.")] = "5 %",
    workspace: WorkspaceOption = DEFAULT_WORKSPACE,
    json: JsonOption = False,
) -> Outcome:
    """Measure a signed-off build again after an upgrade."""
    from dataclasses import replace

    from optpipe.cli.parsing import share_from_text
    from optpipe.cli.terminal import Terminal
    from optpipe.deploy.recheck import RecheckPlan
    from optpipe.deploy.recheck import recheck as run_recheck
    from optpipe.deploy.signed_build import open_signed_build
    from optpipe.report.terminal_recheck import render_recheck
    from optpipe.workspace.store import Store

    plan = RecheckPlan(python, rounds, min_time, share_from_text(max_slowdown, "--max-slowdown"))
    store = Store(workspace)
    with Terminal() as terminal:
        with terminal.step("verify the dossier"):
            build = open_signed_build(dossier, store, because="to measure it again")
        found = run_recheck(build, plan, store, terminal)
        record = replace(found, warnings=tuple(terminal.warnings))
    return Outcome(record, lambda: render_recheck(record), record.verdict.exit_status)
