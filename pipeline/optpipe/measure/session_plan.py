"""What a bench worker is told of one stored artifact: its inputs, what they must give, and the options in force."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optpipe.core.entries import ArtifactInfo
from optpipe.core.errors import BadInputError, OptpipeError
from optpipe.core.events import Listener
from optpipe.core.measurement import PROCESSES, LoadSpec, Options, Subject
from optpipe.core.plan import for_workspace, to_command
from optpipe.core.precision import Precision
from optpipe.measure.measure import RunContext
from optpipe.measure.search import Slo
from optpipe.measure.validity import LIMITS
from optpipe.measure.worker.plan import SessionPlan
from optpipe.models.artifacts.engine import hash_engine
from optpipe.models.artifacts.lookup import StoredArtifact
from optpipe.models.export.exported import reference_from_file, run_onnx_graph
from optpipe.models.inputs.rows import fill_sequences, read_length
from optpipe.models.inputs.samples import POOL_SIZE, describe_pool, load_image_pool, save_pool, vary_inputs
from optpipe.models.inputs.tensor_set import holds_tensors
from optpipe.stats.agreement import TOLERATED_RELATIVE_ERROR
from optpipe.workspace.file_names import ONNX, REFERENCE
from optpipe.workspace.runs import OpenRun
from optpipe.workspace.store import Store

POOL_LIMIT = 256
REFERENCE_BATCH = 8
"""Of the exported model in FP32, where a length is asked for."""


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """What to measure of every artifact."""

    load: LoadSpec
    batches: tuple[int, ...] | None = None
    lengths: tuple[int, ...] | None = None
    """Tokens of the sequences; None for those of the inputs that the build was verified on."""
    slo: Slo | None = None
    processes: int = PROCESSES
    """Fresh processes for every point."""
    interval: float | None = None
    """Half the width of p50's interval that is to be reached, as a share of it."""
    tune: bool = False
    to_the_end: bool = False
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    images: Path | None = None
    affinity: tuple[int, ...] | None = None
    limits: Mapping[str, float] = field(default_factory=lambda: dict(LIMITS))
    seed: int = 0


def _find_coarsest_precision(info: ArtifactInfo) -> Precision:
    """INT8 where any layer is computed in it: a model that came quantized dynamically has scales of each whole batch."""
    return Precision.INT8 if info.precision_proof.share.macs.get("int8") else info.precision


def prepare_session(
    artifact: StoredArtifact, plan: BenchPlan, store: Store, scratch: Path, directory: Path, length: int | None = None
) -> tuple[SessionPlan, RunContext]:
    """The worker's plan with its inputs on disk, and what is said of every measurement of this artifact.

    With a `length` the inputs are filled up to it, and the reference is what the exported model gives for them.
    """
    info, card = artifact.entry.info, artifact.card
    real, expected = _known_inputs(artifact, store)
    assert artifact.reference is not None
    kind = artifact.reference.info.samples_kind
    if plan.images is not None:
        real, expected = load_image_pool(card, plan.images), {}
        kind = "tensors" if holds_tensors(plan.images) else "images"
    if length is not None:
        real = fill_sequences(card, real, length, POOL_LIMIT)
        expected = run_onnx_graph(store.verify_entry(artifact.model, ONNX).file(ONNX), card, real, REFERENCE_BATCH)[0]
    count = min(len(array) for array in real.values())
    shared = frozenset(each.name for each in card.inputs if each.batch is None and card.batched)
    pool = vary_inputs(real, max(POOL_SIZE, count), plan.seed, shared)
    caveats = () if info.weights.trained else ("random-weights",)
    session = SessionPlan(
        loader="optpipe.measure.worker.plan:session_from_store",
        arguments={"workspace": str(store.workspace), "entry": artifact.entry.path.name, "options": {}},
        inputs=save_pool(scratch, "input", pool),
        reference=save_pool(scratch, "reference", expected),
        input_axes={each.name: each.batch for each in card.inputs},
        output_axes={each.name: each.batch for each in card.outputs},
        reference_name="the source model" if length is None else "the exported model in FP32",
        tolerance=TOLERATED_RELATIVE_ERROR[_find_coarsest_precision(info)],
        device=info.device,
        streams=plan.load.streams,
        seed=plan.seed,
    )
    context = RunContext(
        directory=directory,
        limits=plan.limits,
        inputs=describe_pool(kind, count, pool, plan.seed, card.length_range),
        caveats=(*caveats, *(("synthetic-inputs",) if kind == "synthetic" else ())),
        length=read_length(card, pool),
        images=card.takes_images,
    )
    return session, context


@contextmanager
def offer_recovery(run: OpenRun, listener: Listener) -> Iterator[None]:
    """Says of a run that is not finished, because something failed in the block, how what was measured is had after all; one that is
    still empty is removed."""
    try:
        yield
    except (OptpipeError, OSError, KeyboardInterrupt):
        if [*run.path.glob("samples/*.spool"), *run.path.glob("samples/*.parquet")]:
            finish = for_workspace(to_command("bench", resume=run.path))
            listener.warn(f"completed measurements were kept; `{finish}` finishes the run")
        elif not any(run.path.iterdir()):
            run.path.rmdir()
        raise


def _known_inputs(artifact: StoredArtifact, store: Store) -> tuple[dict[str, Any], dict[str, Any]]:
    """The inputs that the build verified itself on, with the source model's answers; at most POOL_LIMIT of them."""
    if artifact.reference is None:
        raise BadInputError(
            f"{artifact.label} has no reference in the store; create it with `{for_workspace(artifact.model.manifest.command)}`"
        )
    known = reference_from_file(store.verify_entry(artifact.reference, REFERENCE).file(REFERENCE))
    return tuple({name: array[:POOL_LIMIT] for name, array in each.items()} for each in (known.inputs, known.outputs))  # type: ignore[return-value]


def warn_about_threads(
    artifact: StoredArtifact, options: Options, affinity: Sequence[int] | None, listener: Listener
) -> None:
    """Says where a runtime that chooses its own number of threads may choose more than there are processors for the worker.

    ONNX Runtime counts the machine's: pinned to one of two, `digits` scattered by 217 %, with threads=1 it was VALID.
    """
    usable, every = len(affinity or os.sched_getaffinity(0)), os.cpu_count() or 1
    if artifact.entry.info.device == "cpu" and options.get("threads") == 0 and usable < every:
        flag = f"--option {artifact.entry.info.backend}.threads={usable}"
        listener.warn(
            f"{artifact.label}: {usable} of {every} CPUs are available; the runtime may use more threads: use {flag}"
        )


def subject_from_artifact(artifact: StoredArtifact, options: Options) -> Subject:
    """What a measurement says that it measured."""
    info = artifact.entry.info
    return Subject(
        artifact=artifact.entry.id,
        backend=info.backend,
        precision=info.precision,
        device="cuda:0" if info.device == "cuda" else "cpu",
        model=info.model,
        sha256=hash_engine(artifact.entry),
        options=dict(options),
        cuda_graph=None if info.device == "cpu" else bool(options.get("cuda_graph", False)),
        threads=int(options["threads"]) or None if "threads" in options else None,
        weights=info.weights.sha256 if info.weights.trained else info.weights.source,
    )
