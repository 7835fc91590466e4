"""`optpipe store` and `optpipe doctor`: what a workspace holds, and what this machine can do."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from optpipe.cli.groups import Outcome
from optpipe.cli.options import DEFAULT_WORKSPACE

IdArgument = Annotated[
    str,
    typer.Argument(metavar="ID", help="ID or name from `optpipe store ls`, or a unique prefix.", show_default=False),
]


def ls(workspace: Path = DEFAULT_WORKSPACE) -> Outcome:
    """List stored artifacts and runs, oldest first."""
    from optpipe.models.artifacts.housekeeping import list_stored
    from optpipe.models.document import document_from_listing
    from optpipe.workspace.store import Store

    listing = list_stored(Store(workspace))
    return Outcome(listing, lambda: document_from_listing(listing))


def show(
    id: IdArgument,
    as_: Annotated[
        Literal["trtexec"] | None,
        typer.Option("--as", help="Print the equivalent command of NVIDIA's own tool for a TensorRT artifact."),
    ] = None,
    workspace: Path = DEFAULT_WORKSPACE,
) -> Outcome:
    """Show an entry or run: hashes, parents, command.

    Of a TensorRT engine also its layers with their types and, where known, tactics.
    """
    from optpipe.models.artifacts.housekeeping import describe_entry, describe_run, find_run
    from optpipe.models.artifacts.lookup import command_from_artifact
    from optpipe.models.document import document_from_entry, document_from_run, document_from_tool_command
    from optpipe.workspace.store import Store

    store = Store(workspace)
    if as_ is not None:
        command = command_from_artifact(id, as_, store)
        return Outcome(command, lambda: document_from_tool_command(command))
    folder = find_run(store, id)
    if folder is not None:
        run = describe_run(folder)
        return Outcome(run, lambda: document_from_run(run))
    entry = store.verify_entry(store.find(id))
    details = describe_entry(entry, store)
    return Outcome(details, lambda: document_from_entry(details))


def rm(
    id: IdArgument,
    with_dependents: Annotated[
        bool, typer.Option("--with-dependents", help="Also remove everything made from it.")
    ] = False,
    workspace: Path = DEFAULT_WORKSPACE,
) -> Outcome:
    """Remove one entry or run."""
    from optpipe.models.artifacts.housekeeping import remove_stored
    from optpipe.models.document import document_from_removal
    from optpipe.workspace.store import Store

    removal = remove_stored(Store(workspace), id, with_dependents=with_dependents)
    return Outcome(removal, lambda: document_from_removal(removal))


def gc(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask on a terminal.")] = False,
    workspace: Path = DEFAULT_WORKSPACE,
    json: bool = False,
) -> Outcome:
    """Remove data that nothing needs.

    Removes leftovers of killed runs, damaged entries, and models and graphs from which nothing was made. Artifacts, calibration tables and
    preprocessing pipelines stay.
    """
    from optpipe.models.artifacts.housekeeping import collect_garbage
    from optpipe.models.document import document_from_removal
    from optpipe.workspace.store import Store

    store = Store(workspace)
    planned = collect_garbage(store, dry_run=True)
    asks = sys.stdin.isatty() and sys.stderr.isatty() and not (yes or json)
    if planned.removed and asks and not dry_run:
        typer.echo("\n".join(f"  {name}" for name in planned.removed), err=True)
        dry_run = not typer.confirm(f"Remove these {len(planned.removed)} entries?", err=True)
    removal = planned if dry_run else collect_garbage(store, dry_run=False)
    return Outcome(removal, lambda: document_from_removal(removal))


def merge(
    sources: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Workspaces to merge into --workspace.")],
    workspace: Path = DEFAULT_WORKSPACE,
) -> Outcome:
    """Merge workspaces: the union by hash.

    Nothing is overwritten: what differs under one name is kept in both versions and reported. The order does not matter.
    """
    from dataclasses import replace

    from optpipe.cli.terminal import Terminal
    from optpipe.sweep.document import document_from_merge
    from optpipe.sweep.merge import merge_workspaces
    from optpipe.workspace.store import Store

    with Terminal() as terminal:
        record = merge_workspaces(sources, Store(workspace), terminal)
    record = replace(record, warnings=tuple(terminal.warnings))
    return Outcome(record, lambda: document_from_merge(record), record.status)


def doctor(
    options: Annotated[
        bool, typer.Option("--options", help="List each backend's options, for --option BACKEND.KEY=VALUE.")
    ] = False,
) -> Outcome:
    """Show what this machine supports and what to install."""
    from optpipe.build.doctor import diagnose_machine, list_options
    from optpipe.build.document import document_from_diagnosis, document_from_options

    if options:
        listed = list_options()
        return Outcome(listed, lambda: document_from_options(listed))
    found = diagnose_machine()
    return Outcome(found, lambda: document_from_diagnosis(found.findings))
