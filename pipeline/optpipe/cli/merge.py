"""`optpipe merge`."""

from pathlib import Path
from typing import Annotated

import typer

from optpipe.cli.options import DEFAULT_WORKSPACE, JsonOption, WorkspaceOption
from optpipe.cli.outcome import Outcome


def merge(
    sources: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Workspaces to merge into --workspace.")],
    workspace: WorkspaceOption = DEFAULT_WORKSPACE,
    json: JsonOption = False,
) -> Outcome:
    """Merge workspaces: the union by hash.

    Nothing is overwritten: what differs under one name is kept in both versions and reported. The order does not matter.
    """
    from dataclasses import replace

    from optpipe.cli.terminal import Terminal
    from optpipe.report.terminal_sweep import render_merge
    from optpipe.sweep.merge import merge_workspaces
    from optpipe.workspace.store import Store

    with Terminal() as terminal:
        record = merge_workspaces(sources, Store(workspace), terminal)
    record = replace(record, warnings=tuple(terminal.warnings))
    return Outcome(record, lambda: render_merge(record), record.status)
