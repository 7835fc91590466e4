"""`optpipe deploy` and `optpipe sweep`: from a dossier to a server, and its proof; a matrix on several GPUs and hosts."""

import os
from collections.abc import Mapping
from contextlib import nullcontext, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from optpipe.cli.groups import Outcome, path_from_text
from optpipe.cli.options import BECAUSE
from optpipe.core.errors import BadInputError, ExitStatus
from optpipe.core.params import Param, text_from_text
from optpipe.sweep.job import Matrix, SweepOptions

MAX_RATE = 10_000.0

if TYPE_CHECKING:
    from optpipe.report.progress import Terminal
    from optpipe.sweep.slots import Slot
    from optpipe.sweep.sweep import Executor
    from optpipe.workspace.remote import RemoteWorkspace
    from optpipe.workspace.store import Store


def _load_from_text(text: str, flag: str) -> tuple[int, float]:
    number, _, rate = text.partition("@")
    with suppress(ValueError):
        load = int(number), float(rate.removesuffix("/s"))
        if load[0] >= 1 and 0 < load[1] <= MAX_RATE:
            return load
    raise BadInputError(
        f"{flag} {text}: expected NUMBER@RATE, such as 700@20 for 700 requests at 20 per second"
    )


def deploy(
    store: "Store",
    terminal: "Terminal",
    dossier: Annotated[
        Path | None,
        typer.Argument(
            metavar="DOSSIER",
            help="Folder written by `optpipe signoff`; with --check URL, by `optpipe deploy`.",
            parser=path_from_text,
        ),
    ] = None,
    to: Annotated[
        Literal["triton", "kserve", "folder"], Param("Form of the deployment.")
    ] = "triton",
    storage_uri: Annotated[
        str | None,
        Param(
            "With --to kserve: where models/ will be uploaded.",
            metavar="URI",
            parse=text_from_text,
        ),
    ] = None,
    image: Annotated[
        str | None,
        Param(
            "With --to kserve: Triton's image; default: KServe's.",
            metavar="IMAGE",
            parse=text_from_text,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        Param(
            "Where to write the deployment; with --check URL: metrics for Prometheus.",
            metavar="DIR|FILE",
        ),
    ] = None,
    because: Annotated[str | None, BECAUSE] = None,
    check: Annotated[
        str | None,
        Param(
            "Check a deployment against this machine; or that a server answers as DEPLOYMENT.",
            metavar="DIR|URL",
            parse=text_from_text,
        ),
    ] = None,
    attestations: Annotated[
        Path | None,
        Param("With --check DIR: what signoff attest wrote; needs --public-key.", metavar="DIR"),
    ] = None,
    public_key: Annotated[Path | None, Param("Public key in PEM.", metavar="FILE")] = None,
    load: Annotated[
        tuple[int, float] | None,
        Param(
            "With --check URL: also judge latency, by this number of requests at this rate per second.",
            metavar="NUMBER@RATE",
            parse=_load_from_text,
        ),
    ] = None,
    ensemble: Annotated[
        bool, Param("Serve encoded images; --no-ensemble deploys the engine alone.")
    ] = True,
    prove: Annotated[bool, Param("Serve it and compare the served outputs.")] = False,
    tune: Annotated[bool, Param("Before --prove, search instances and batching.")] = False,
    server: Annotated[
        str | None,
        Param(
            "tritonserver, or an environment with nvidia-pytriton; default: on PATH.",
            metavar="PATH",
            envvar="OPTPIPE_TRITON",
            parse=text_from_text,
        ),
    ] = None,
    seconds: Annotated[
        float, Param("Time of each candidate of --tune.", minimum=0.5, maximum=600)
    ] = 4.0,
) -> Outcome:
    """Deploy a signed-off build, and prove it on a server.

    With --check DIR: exit status 2 if a file or setting is not as written, 3 if this machine differs from the measured one. With
    --check URL (http, https, grpc, grpcs) a running server gets the signed-off requests: 0 if it answers as signed off, 1 if it
    does not, 5 if it cannot be reached or more requests are needed; SSL_CERT_FILE names the CA to trust.
    """
    from optpipe.deploy.attestation import require_attested
    from optpipe.deploy.deploy import check_folder, deploy_dossier, require_server
    from optpipe.deploy.live import check_live, document_from_live_check
    from optpipe.deploy.records import document_from_deployment

    if (attestations is None) != (public_key is None):
        raise BadInputError("--attestations DIR and --public-key FILE belong together")
    if attestations is not None and (check is None or "://" in check):
        raise BadInputError("--attestations requires --check DIR")
    if check is not None and "://" in check:
        if dossier is None:
            problem = f"--check {check} requires the deployment that it serves"
            raise BadInputError(f"{problem}: optpipe deploy DIR --check URL")
        live = check_live(dossier, check, load, output, terminal)
        assert live.proof is not None
        assert live.proof.verdict is not None
        return Outcome(live, document_from_live_check, live.proof.verdict.exit_status)
    if load is not None:
        raise BadInputError("--load requires --check URL")
    if (check is None) == (dossier is None):
        usage = (
            "DOSSIER with --output DIR, or --check DIR, or the deployment's folder with --check URL"
        )
        raise BadInputError(f"deploy requires {usage}")
    program = require_server(to, server) if prove or tune else None
    serving: Mapping[str, Any] = {"program": program, "tune": tune, "seconds": seconds}
    if dossier is None:
        if attestations is not None and public_key is not None:
            with terminal.step("check the signature"):
                require_attested(Path(check or ""), attestations, public_key)
        result = check_folder(Path(check or ""), store, terminal, **serving)
        status = ExitStatus.MISSING if result.differences else ExitStatus.DONE
        return Outcome(result, document_from_deployment, status)
    if output is None:
        raise BadInputError("deploy DOSSIER requires --output DIR")
    result = deploy_dossier(
        dossier,
        output,
        to,
        store,
        terminal,
        because=because,
        ensemble=ensemble,
        storage_uri=storage_uri,
        image=image,
        **serving,
    )
    return Outcome(result, document_from_deployment)


def sweep(
    store: "Store",
    terminal: "Terminal",
    models: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL]...", help="As for `optpipe build`.")
    ] = None,
    matrix: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Matrix of the sweep (TOML); a flag replaces its key.",
            parser=path_from_text,
        ),
    ] = None,
    wanted: Annotated[Mapping[str, Any], Matrix] = {},
    option: Annotated[
        list[str] | None, typer.Option(metavar="BACKEND.KEY=VALUE", help="Runtime option.")
    ] = None,
    how: SweepOptions = SweepOptions(),
) -> Outcome:
    """Build and measure a matrix on this host's GPUs or on Ray.

    Every cell gets a row, even if it failed. Stored results are reused, and an interrupted sweep resumes.
    """
    from optpipe.backends.registry import warn_of_unused_options
    from optpipe.sweep.cluster import describe_node
    from optpipe.sweep.document import document_from_sweep
    from optpipe.sweep.ledger import push_workspace
    from optpipe.sweep.matrix import (
        add_contents,
        cells_from_matrix,
        list_option_keys,
        matrix_from_file,
        matrix_from_options,
        require_sound,
        resolve_models,
    )
    from optpipe.sweep.plan import select_shard, shard_from_text
    from optpipe.sweep.slots import list_kinds
    from optpipe.sweep.sweep import run_sweep

    if how.node_labels:
        labels = describe_node()
        return Outcome(
            {"labels": labels},
            lambda _: ",".join(f"{name}={value}" for name, value in labels.items()),
        )
    shard = None if how.shard is None else shard_from_text(how.shard)
    given = {
        **wanted,
        **({"models": models} if models else {}),
        **({"options": [option]} if option else {}),
    }
    full = matrix_from_options(Matrix() if matrix is None else matrix_from_file(matrix), given)
    require_sound(full)
    store, target = _choose_stores(how, store)
    slots, executor = _connect(how, store)
    full = resolve_models(full, store, local=how.on is None)
    every = cells_from_matrix(full, list_kinds(slots))
    warn_of_unused_options(
        list_option_keys(full), {cell.recipe.backend for cell in every}, "built", terminal
    )
    cells = add_contents(select_shard(every, shard), terminal)
    # Ray prints the log of a failed node; the table already has the result of its jobs
    with redirect_stdout(StringIO()) if how.on else nullcontext():
        record = run_sweep(cells, slots, how, store, terminal, executor)
    if target is not None:
        pushed = push_workspace(store, target, terminal)
        terminal.inform(
            f"{pushed} entries were copied to {target.url}; `optpipe store merge` reads it"
        )
    return Outcome(record, document_from_sweep, ExitStatus(record.exit_status))


def _choose_stores(how: SweepOptions, store: "Store") -> "tuple[Store, RemoteWorkspace | None]":
    """The workspace in which the sweep runs, and the one to which its entries are copied at the end, if they differ."""
    from optpipe.workspace.remote import is_url, open_remote
    from optpipe.workspace.store import Store

    if how.store is None:
        return store, None
    if not is_url(how.store):
        return Store(Path(how.store)), None
    if how.on is not None:
        problem = f"--store {how.store}: with --on ray it is a folder that all nodes mount"
        raise BadInputError(f"{problem}; without --store Ray sends all")
    target = open_remote(how.store)
    target.require_writable()
    return store, target


def _connect(how: SweepOptions, store: "Store") -> "tuple[tuple[Slot, ...], Executor]":
    from optpipe.sweep.cluster import RayExecutor, connect, list_cluster_slots, selector_from_text
    from optpipe.sweep.local import LocalExecutor
    from optpipe.sweep.slots import list_slots

    selectors = dict(map(selector_from_text, how.node))
    if how.on is None:
        if selectors:
            raise BadInputError("--node requires --on ray")
        if how.cpu_slots > (have := len(os.sched_getaffinity(0))):
            raise BadInputError(
                f"--set cpu-slots={how.cpu_slots}: only {have} processors are available"
            )
        slots = list_slots(how.cpu_slots)
        gpus, parts = [slot for slot in slots if slot.gpu], [slot for slot in slots if not slot.gpu]
        return (*gpus[: how.slots], *parts[: how.slots]), LocalExecutor(store.workspace, how)
    if len(selectors) < len(how.node):
        raise BadInputError("--node: each label may be given once")
    shared = None if how.store is None else str(Path(how.store).resolve())
    connect()
    slots = list_cluster_slots(selectors)
    return slots, RayExecutor(slots, store, how, shared, selectors)
