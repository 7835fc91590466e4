"""`optpipe sweep`."""

from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optpipe.cli.groups import Outcome
from optpipe.cli.options import DEFAULT_WORKSPACE, JsonOption, TruncateOption, WorkspaceOption
from optpipe.core.measurement import Mode, Scenario

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe.sweep.job import Cell, JobRecord
    from optpipe.sweep.matrix import Matrix
    from optpipe.sweep.rows import SweepRecord
    from optpipe.sweep.slots import Slot
    from optpipe.sweep.sweep import Executor
    from optpipe.workspace.store import Store


@dataclass(frozen=True)
class MatrixOptions:
    """What is swept over. A flag replaces the key of the matrix file."""

    matrix: Annotated[Path | None, typer.Option(metavar="FILE", help="Matrix of the sweep (TOML).")] = None
    precision: Annotated[str | None, typer.Option(help="Precisions, comma-separated; default: fp16.")] = None
    backend: Annotated[str | None, typer.Option(help="Backends, comma-separated; default: auto.")] = None
    batch: Annotated[str | None, typer.Option(help="Batch sizes, such as 1,8,32 or 1:256.")] = None
    length: Annotated[str | None, typer.Option(metavar="TOKENS", help="Sequence lengths, such as 32,128,512.")] = None
    scenario: Annotated[str | None, typer.Option(help="MLPerf scenarios, comma-separated.")] = None
    rate: Annotated[str | None, typer.Option(help="Mean queries per second (server), comma-separated.")] = None
    gpu: Annotated[
        str | None,
        typer.Option(help="Kinds of GPU by full name, comma-separated, or cpu; default: those of this host."),
    ] = None
    option: Annotated[list[str] | None, typer.Option(metavar="BACKEND.KEY=VALUE", help="Runtime option.")] = None
    build_option: Annotated[list[str] | None, typer.Option(metavar="BACKEND.KEY=VALUE", help="Build option.")] = None
    mode: Annotated[Mode | None, typer.Option(help="compute, or end-to-end with copies.")] = None
    streams: Annotated[int | None, typer.Option(help="Concurrent streams (multi-stream, offline).")] = None
    profile: Annotated[str | None, typer.Option(metavar="MIN:OPT:MAX", help="Batch range of the builds.")] = None
    weights: Annotated[str | None, typer.Option(help="default, random, or a .safetensors/.pt file.")] = None
    seed: Annotated[int | None, typer.Option(min=0, help="Seed for random weights.")] = None
    calibration: Annotated[Path | None, typer.Option(metavar="PATH", help="INT8 calibration data.")] = None
    truncate: TruncateOption = False


@dataclass(frozen=True)
class PaceOptions:
    """How long each job is measured."""

    processes: Annotated[int | None, typer.Option(min=1, help="Fresh processes for each job.")] = None
    percentile: Annotated[float | None, typer.Option(help="Highest percentile to report.")] = None
    min_time: Annotated[float | None, typer.Option(metavar="SECONDS", help="Minimum measurement time.")] = None
    max_time: Annotated[float | None, typer.Option(metavar="SECONDS", help="Maximum measurement time.")] = None
    warm_up: Annotated[float | None, typer.Option(metavar="SECONDS", help="Minimum warm-up time.")] = None
    max_warm_up: Annotated[float | None, typer.Option(metavar="SECONDS", help="Maximum warm-up time.")] = None
    max_cv: Annotated[str | None, typer.Option(help="Maximum coefficient of variation, such as 2.5%.")] = None


@dataclass(frozen=True)
class RunOptions:
    """How the jobs are run."""

    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the jobs and the estimated time.")] = False
    again: Annotated[bool, typer.Option("--again", help="Measure again what is stored.")] = False
    against: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Workspace of the baseline: PASS, FAIL or INCONCLUSIVE for each cell."),
    ] = None
    tolerance: Annotated[str, typer.Option(help="Slowdown against the baseline that still passes.")] = "2%"
    shard: Annotated[str | None, typer.Option(metavar="I/N", help="Only part I of N (Slurm, Kubernetes, ssh).")] = None
    loads_per_process: Annotated[int, typer.Option(min=1, help="Loads of one artifact measured by one process.")] = 1
    slots: Annotated[int | None, typer.Option(min=1, help="Use at most this many GPUs (or parts of the CPU).")] = None
    cpu_slots: Annotated[int, typer.Option(min=1, help="Equal parts of the processors, timed side by side.")] = 1
    job_timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Time limit of a process.")] = 1800.0
    lock_timeout: Annotated[float, typer.Option(metavar="SECONDS", help="How long to wait for a GPU in use.")] = 600.0
    retries: Annotated[int, typer.Option(min=0, help="Further tries of a job that crashed.")] = 1
    calibrate_host: Annotated[
        bool,
        typer.Option("--calibrate-host", help="Measure the neighbor effect: one GPU alone and with all others busy."),
    ] = False
    rounds: Annotated[int, typer.Option(help="Rounds of --calibrate-host.")] = 10
    on: Annotated[str | None, typer.Option(metavar="ray|ray://HOST:PORT", help="Run on a Ray cluster.")] = None
    node: Annotated[
        list[str] | None,
        typer.Option(metavar="LABEL=VALUE", help="Only nodes of the cluster with this label (or LABEL!=VALUE)."),
    ] = None
    store: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|URL", help="Workspace under one path on all nodes, or s3://, gs://; default: Ray's store."
        ),
    ] = None
    pending_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long a cluster may take to place a job.")
    ] = 300.0
    node_labels: Annotated[bool, typer.Option("--node-labels", help="Print this node's labels for `ray start`.")] = (
        False
    )
    output: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for the report (Markdown, JSON).")] = None


def sweep(
    models: Annotated[list[str] | None, typer.Argument(metavar="[MODEL]...", help="As for `optpipe build`.")] = None,
    *,
    wanted: MatrixOptions,
    pace: PaceOptions,
    how: RunOptions,
    workspace: WorkspaceOption = DEFAULT_WORKSPACE,
    json: JsonOption = False,
) -> Outcome:
    """Build and measure a matrix on this host's GPUs or on Ray.

    Every cell is a row, whatever came of it. What is stored is not measured again; an interrupted sweep goes on.
    """
    from dataclasses import replace

    from optpipe.cli.parsing import share_from_text
    from optpipe.cli.terminal import Terminal
    from optpipe.core.errors import ExitStatus
    from optpipe.report.terminal_sweep import render_sweep
    from optpipe.sweep.launch import Limits
    from optpipe.sweep.matrix import cells_from_matrix, require_sound, resolve_models
    from optpipe.sweep.plan import select_shard, shard_from_text
    from optpipe.sweep.slots import list_kinds
    from optpipe.sweep.sweep import SweepOptions, run_sweep
    from optpipe.sweep.transport import is_bucket
    from optpipe.workspace.places import require_writable_folder
    from optpipe.workspace.store import Store

    if how.node_labels:
        return _print_node_labels()
    shard = None if how.shard is None else shard_from_text(how.shard)
    if how.output is not None:
        require_writable_folder(how.output, "--output")
    tolerance = share_from_text(how.tolerance, "--tolerance")
    baseline = {} if how.against is None or how.dry_run else _read_baseline(how.against)
    matrix = _matrix_from_options(models or [], wanted, pace)
    require_sound(matrix)
    terminal = Terminal()
    slots, execute = _connect(how, terminal.warn)
    if how.store is not None and not is_bucket(how.store):
        workspace = Path(how.store)
    store = Store(workspace)
    matrix = resolve_models(matrix, store, local=how.on is None)
    cells = select_shard(cells_from_matrix(matrix, list_kinds(slots)), shard)
    if how.calibrate_host:
        return _calibrate_host(cells, slots, how, store)
    options = SweepOptions(
        how.dry_run,
        how.again,
        how.loads_per_process,
        Limits(how.job_timeout, how.lock_timeout, how.retries, how.pending_timeout),
    )
    # Ray prints the end of the log of a node that dies; what came of its jobs is in the table
    with terminal, redirect_stdout(StringIO()) if how.on else nullcontext():
        record = run_sweep(cells, slots, options, store, terminal, execute)
    record = replace(record, warnings=tuple(terminal.warnings))
    if baseline:
        record = _judge(record, str(how.against), baseline, tolerance, workspace)
    if how.output is not None:
        record = replace(record, written=_write_report(record, how.output))
    return Outcome(record, lambda: render_sweep(record), ExitStatus(record.exit_status))


def _read_baseline(folder: Path) -> "dict[str, list[JobRecord]]":
    from optpipe.core.errors import BadInputError
    from optpipe.sweep.ledger import read_jobs

    if not (found := read_jobs(folder)):
        raise BadInputError(f"--against {folder}: no jobs found; expected the workspace of an earlier sweep")
    return found


def _judge(
    record: "SweepRecord", name: str, before: "dict[str, list[JobRecord]]", tolerance: float, workspace: Path
) -> "SweepRecord":
    """The record with a verdict for each cell; an interrupted sweep stays one."""
    from dataclasses import replace

    from optpipe.sweep.ledger import read_jobs
    from optpipe.sweep.rows import judge_against

    # of `--again` the new records, not the ones that are kept beside them
    shown = {(row.key, row.run) for row in record.rows}
    stored = read_jobs(workspace)
    now = {key: one for key, tries in stored.items() for one in reversed(tries) if (key, one.run) in shown}
    found = judge_against(record.rows, now, before, name, tolerance)
    status = record.exit_status if record.interrupted else int(found.verdict.exit_status)
    return replace(record, regression=found, exit_status=status)


def _print_node_labels() -> Outcome:
    from optpipe.sweep.ray_cluster import describe_node

    labels = describe_node()
    return Outcome(labels, lambda: ",".join(f"{name}={value}" for name, value in labels.items()))


def _connect(how: RunOptions, warn: "Callable[[str], None]") -> "tuple[tuple[Slot, ...], Executor]":
    """The slots and what runs on them: this host's, or a cluster's."""
    from functools import partial

    from optpipe.core.errors import BadInputError
    from optpipe.sweep.local import run_locally
    from optpipe.sweep.ray_cluster import selector_from_text
    from optpipe.sweep.transport import is_bucket, require_bucket

    selectors = tuple(selector_from_text(each) for each in how.node or ())
    if how.on is None:
        if selectors or (how.store is not None and is_bucket(how.store)):
            raise BadInputError(f"{'--node' if selectors else '--store ' + str(how.store)} requires --on ray")
        return _list_slots(how), run_locally
    if how.on != "ray" and not how.on.startswith("ray://"):
        raise BadInputError(f"--on {how.on}: expected ray or ray://HOST:PORT")
    if how.calibrate_host:
        raise BadInputError("--calibrate-host measures the host it runs on; run it there, without --on")
    if len({each.label for each in selectors}) < len(selectors):
        raise BadInputError("--node: each label may be given once")
    from optpipe.sweep.ray_cluster import connect, list_cluster_slots
    from optpipe.sweep.ray_driver import run_on_ray

    shared = how.store
    if shared is not None and is_bucket(shared):
        require_bucket(shared)
    elif shared is not None:
        shared = str(Path(shared).resolve())
    connect(how.on)
    return list_cluster_slots(selectors), partial(run_on_ray, shared=shared, selectors=selectors, warn=warn)


def _list_slots(how: RunOptions) -> "tuple[Slot, ...]":
    import os

    from optpipe.core.errors import BadInputError
    from optpipe.sweep.slots import list_slots

    if how.cpu_slots > (have := len(os.sched_getaffinity(0))):
        raise BadInputError(f"--cpu-slots {how.cpu_slots}: only {have} processors are available")
    slots = list_slots(how.cpu_slots)
    gpus, parts = [slot for slot in slots if slot.gpu], [slot for slot in slots if not slot.gpu]
    return (*gpus[: how.slots], *parts[: how.slots])


def _matrix_from_options(models: list[str], wanted: MatrixOptions, pace: PaceOptions) -> "Matrix":
    import msgspec

    from optpipe.cli.parsing import share_from_text
    from optpipe.core.choices import choices_from_text
    from optpipe.core.errors import BadInputError
    from optpipe.measure.search import batch_sizes_from_text
    from optpipe.sweep.matrix import Matrix, matrix_from_file

    def words(text: str | None) -> list[str] | None:
        return None if text is None else [each.strip() for each in text.split(",") if each.strip()]

    given: dict[str, object] = {
        "models": models or None,
        "precisions": words(wanted.precision),
        "backends": words(wanted.backend),
        "batches": None if wanted.batch is None else batch_sizes_from_text(wanted.batch),
        "lengths": None if wanted.length is None else batch_sizes_from_text(wanted.length, "--length"),
        "scenarios": None
        if wanted.scenario is None
        else choices_from_text(wanted.scenario, list(Scenario), "--scenario"),
        "rates": None if wanted.rate is None else _rates_from_text(wanted.rate),
        "options": None if wanted.option is None else [wanted.option],
        "gpus": words(wanted.gpu),
        "mode": wanted.mode,
        "streams": wanted.streams,
        "profile": wanted.profile,
        "weights": wanted.weights,
        "seed": wanted.seed,
        "calibration": None if wanted.calibration is None else str(wanted.calibration),
        "truncate": wanted.truncate or None,
        "build_options": wanted.build_option,
        "processes": pace.processes,
        "percentile": pace.percentile,
        "min_seconds": pace.min_time,
        "max_seconds": pace.max_time,
        "warm_up_seconds": pace.warm_up,
        "max_warm_up_seconds": pace.max_warm_up,
        "max_cv": None if pace.max_cv is None else share_from_text(pace.max_cv, "--max-cv"),
    }
    base = Matrix() if wanted.matrix is None else matrix_from_file(wanted.matrix)
    merged = msgspec.to_builtins(base) | {name: value for name, value in given.items() if value is not None}
    try:
        return msgspec.convert(merged, Matrix, strict=False)
    except msgspec.ValidationError as error:
        raise BadInputError(f"the sweep's options: {error}") from error


def _rates_from_text(text: str) -> list[float]:
    from optpipe.core.errors import BadInputError

    try:
        return [float(each) for each in text.split(",")]
    except ValueError as error:
        raise BadInputError(f"--rate {text}: expected queries per second, such as 100 or 100,200") from error


def _calibrate_host(cells: "tuple[Cell, ...]", slots: "tuple[Slot, ...]", how: RunOptions, store: "Store") -> Outcome:
    """Builds the first cell's artifact where it is not stored, and measures it alone and beside busy neighbors."""
    from optpipe.cli.terminal import Terminal
    from optpipe.report.terminal_sweep import render_neighbor_effect
    from optpipe.sweep.calibration import calibrate_host

    with Terminal() as terminal:
        found = calibrate_host(cells[0], slots, how.rounds, how.lock_timeout, store, terminal)
    return Outcome(found, lambda: render_neighbor_effect(found))


def _write_report(record: "SweepRecord", folder: Path) -> tuple[str, ...]:
    from optpipe.core.records import json_from_record
    from optpipe.report.terminal_sweep import render_sweep_markdown
    from optpipe.workspace.runs import write_bytes

    write_bytes(folder / "sweep.md", render_sweep_markdown(record).encode())
    write_bytes(folder / "sweep.json", json_from_record(record))
    return str(folder / "sweep.md"), str(folder / "sweep.json")
