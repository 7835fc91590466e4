"""`optpipe ls`, `show`, `rm` and `gc`: what is stored."""

from typing import Annotated

import typer

from optpipe.commands.options import DEFAULT_WORKSPACE, JsonOption, WorkspaceOption
from optpipe.commands.outcome import Outcome

IdArgument = Annotated[
    str, typer.Argument(metavar="ID", help="An id or a name that ls lists, or its beginning.", show_default=False)
]


def ls(workspace: WorkspaceOption = DEFAULT_WORKSPACE, json: JsonOption = False) -> Outcome:
    """List what is stored, oldest first."""
    from optpipe.artifacts.housekeeping import stored_record
    from optpipe.reporters.terminal_stored import stored_tables
    from optpipe.workspace.store import Store

    record = stored_record(Store(workspace))
    return Outcome(record, lambda: stored_tables(record))


def show(id: IdArgument, workspace: WorkspaceOption = DEFAULT_WORKSPACE, json: JsonOption = False) -> Outcome:
    """Show one entry or run: hashes, parents, reproducing command."""
    from optpipe.artifacts.housekeeping import entry_details, found_run, run_details
    from optpipe.reporters.terminal_stored import entry_text, run_text
    from optpipe.workspace.store import Store

    store = Store(workspace)
    folder = found_run(store, id)
    if folder is not None:
        run = run_details(folder)
        return Outcome(run, lambda: run_text(run))
    record = entry_details(store.verified(store.find(id)))
    return Outcome(record, lambda: entry_text(record))


def rm(
    id: IdArgument,
    with_dependents: Annotated[bool, typer.Option("--with-dependents", help="Also what was made from it.")] = False,
    workspace: WorkspaceOption = DEFAULT_WORKSPACE,
    json: JsonOption = False,
) -> Outcome:
    """Remove one entry or run."""
    from optpipe.artifacts.housekeeping import removed
    from optpipe.reporters.terminal_stored import removed_text
    from optpipe.workspace.store import Store

    record = removed(Store(workspace), id, with_dependents=with_dependents)
    return Outcome(record, lambda: removed_text(record))


def gc(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    workspace: WorkspaceOption = DEFAULT_WORKSPACE,
    json: JsonOption = False,
) -> Outcome:
    """Remove what no artifact needs.

    Leftovers of killed runs, damaged entries, models and graphs without artifacts.
    """
    from optpipe.artifacts.housekeeping import collected
    from optpipe.reporters.terminal_stored import removed_text
    from optpipe.workspace.store import Store

    record = collected(Store(workspace), dry_run=dry_run)
    return Outcome(record, lambda: removed_text(record))
