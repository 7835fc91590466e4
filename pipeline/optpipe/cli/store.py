"""`optpipe store` and `optpipe doctor`: the contents of a workspace, and what this machine can do."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from optpipe.cli.groups import Outcome, word_from_text
from optpipe.core.params import Param

if TYPE_CHECKING:
    from optpipe.report.progress import Terminal
    from optpipe.workspace.store import Store

IdArgument = Annotated[
    str,
    typer.Argument(
        metavar="ID",
        help="ID or name from `optpipe store ls`, or a unique prefix.",
        show_default=False,
        parser=word_from_text,
    ),
]


def ls(store: "Store") -> Outcome:
    """List stored artifacts and runs, oldest first."""
    from optpipe.models.artifacts.housekeeping import document_from_listing, list_stored

    return Outcome(list_stored(store), document_from_listing)


def show(id: IdArgument, store: "Store") -> Outcome:
    """Show an entry or run: hashes, parents, and command."""
    from optpipe.models.artifacts.housekeeping import (
        describe_entry,
        describe_run,
        document_from_entry,
        find_run,
    )

    if (folder := find_run(store, id)) is not None:
        return Outcome(describe_run(folder), document_from_entry)
    return Outcome(describe_entry(store.verify_entry(store.find(id)), store), document_from_entry)


def approve(id: IdArgument, store: "Store") -> Outcome:
    """Allow an entry of another workspace to be loaded.

    Loading an engine or a compiled package runs code of whoever built it. What `store merge` brought in, or was copied into the store,
    is loaded only after this.
    """
    from optpipe.models.artifacts.housekeeping import approve_entry, document_from_entry

    return Outcome(approve_entry(store.find(id), store), document_from_entry)


def rm(
    id: IdArgument,
    store: "Store",
    with_dependents: Annotated[bool, Param("Also remove everything made from it.")] = False,
) -> Outcome:
    """Remove one entry or run."""
    from optpipe.models.artifacts.housekeeping import document_from_removal, remove_stored

    return Outcome(remove_stored(store, id, with_dependents=with_dependents), document_from_removal)


def gc(
    store: "Store",
    dry_run: Annotated[bool, Param("Only show what would be removed.")] = False,
    yes: Annotated[bool, Param("Do not ask on a terminal.")] = False,
    json: bool = False,
) -> Outcome:
    """Remove data that nothing needs.

    Removes leftovers of killed runs, damaged entries, and models and graphs from which nothing was made. Artifacts, calibration tables and
    preprocessing pipelines stay.
    """
    from optpipe.models.artifacts.housekeeping import collect_garbage, document_from_removal

    planned = collect_garbage(store, dry_run=True)
    asks = sys.stdin.isatty() and sys.stderr.isatty() and not (yes or json)
    if planned.removed and asks and not dry_run:
        typer.echo("\n".join(f"  {name}" for name in planned.removed), err=True)
        dry_run = not typer.confirm(f"Remove these {len(planned.removed)} entries?", err=True)
    return Outcome(
        planned if dry_run else collect_garbage(store, dry_run=False), document_from_removal
    )


def merge(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="DIR|URL...",
            help="Workspaces to merge into --workspace; URL: an object store, such as s3://BUCKET/FOLDER.",
            parser=word_from_text,
        ),
    ],
    store: "Store",
    terminal: "Terminal",
) -> Outcome:
    """Merge workspaces by hash.

    Nothing is overwritten: what differs under one name is reported, and the version that came first is kept.
    """
    from optpipe.sweep.document import document_from_merge
    from optpipe.sweep.ledger import merge_workspaces

    record = merge_workspaces(sources, store, terminal)
    return Outcome(record, document_from_merge, record.status)


def doctor(
    options: Annotated[
        bool, Param("List each backend's options, for --option BACKEND.KEY=VALUE.")
    ] = False,
) -> Outcome:
    """Show what this machine supports and what to install."""
    from optpipe.build.doctor import (
        diagnose_machine,
        document_from_diagnosis,
        document_from_options,
        list_options,
    )
    from optpipe.workspace.environment import describe_environment

    if options:
        listed = list_options()
        return Outcome({"options": listed}, lambda _: document_from_options(listed))
    findings = diagnose_machine()
    document = {"findings": findings, "environment": describe_environment()}
    return Outcome(document, lambda _: document_from_diagnosis(findings))
