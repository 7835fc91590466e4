"""What is recorded of a model: its build, its preprocessing, and the inference of each build."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

from optpipe.backends.registry import BACKENDS, resolve_effective_options
from optpipe.core.card import ModelCard
from optpipe.core.entries import ArtifactInfo
from optpipe.models.artifacts.engine_files import hash_engine
from optpipe.models.inputs.rows import read_length
from optpipe.preprocess.preprocess import choose_dali_plan
from optpipe.trace.nsys import BUILD_STAGES, ProfilePlan, Stage
from optpipe.trace.record import (
    BuildJob,
    InferenceJob,
    PreprocessJob,
    ProfileJob,
    read_profiled_rows,
)
from optpipe.trace.report import StageSubject
from optpipe.trace.rules import StageFacts
from optpipe.workspace.entry import Entry
from optpipe.workspace.file_names import ONNX
from optpipe.workspace.store import Store

_DALI_THREADS = {"cuda": 8, "cpu": 2}


def list_build_jobs(
    plan: ProfilePlan,
    build: BuildJob,
    images: tuple[Path, ...],
    card: ModelCard,
    model: Entry,
    store: Store,
) -> Iterator[ProfileJob]:
    """The job of all stages of the build, and that of preprocessing."""
    wanted, on_gpu = plan.stage or tuple(Stage), build.on_gpu
    if built := tuple(stage for stage in BUILD_STAGES if stage in wanted):
        stages = tuple(
            (StageSubject(stage, "build"), StageFacts(stage, expects_gpu=False)) for stage in built
        )
        yield ProfileJob("+".join(built), on_gpu, build, stages)
    if Stage.PREPROCESS in wanted and card.transform is not None and images:
        batch_size = max(plan.batch_size)
        dali = choose_dali_plan(
            "mixed" if on_gpu else "cpu", _DALI_THREADS["cuda" if on_gpu else "cpu"], batch_size
        )
        work = PreprocessJob(store.workspace.resolve(), model.id, images, dali)
        name = f"preprocess dali batch {batch_size}"
        subject = StageSubject(name, "preprocess", batch_size=batch_size)
        yield ProfileJob(
            name, on_gpu, work, ((subject, StageFacts(Stage.PREPROCESS, expects_gpu=on_gpu)),)
        )


def list_inference_jobs(
    plan: ProfilePlan,
    artifacts: Sequence[Entry[ArtifactInfo]],
    options_by_backend: Mapping[str, Mapping[str, Any]],
    card: ModelCard,
    store: Store,
) -> Iterator[ProfileJob]:
    for entry in artifacts:
        info, sha256, read_rows = (
            entry.info,
            hash_engine(entry),
            cache(partial(read_profiled_rows, entry, store)),
        )
        backend, precision, device = info.backend, info.precision, info.device
        known = BACKENDS[backend].runtime_options(device)
        given = options_by_backend.get(backend, {})  # the other options were for the build
        options = resolve_effective_options(
            info, {name: value for name, value in given.items() if name in known}
        )
        facts = StageFacts(Stage.INFERENCE, backend, options, expects_gpu=device == "cuda")
        graphs = [store.find(parent) for parent in entry.manifest.parents if parent]
        path = next(
            (graph.file(ONNX) for graph in reversed(graphs) if graph.file(ONNX).is_file()), None
        )
        for wanted, batch_size in product(plan.length or (None,), plan.batch_size):
            inference = InferenceJob(
                store.workspace.resolve(), entry.id, backend, device, options, batch_size, wanted
            )
            length = wanted
            if length is None and card.length_range is not None:
                length = read_length(*read_rows())
            name = f"{backend} {precision} batch {batch_size}" + (
                f" length {length}" if length else ""
            )
            subject = StageSubject(
                name, "inference", entry.id, precision, device, batch_size, length, sha256
            )
            inputs = card.inputs if length is None else card.with_usual_length(length).inputs
            yield ProfileJob(
                name, device == "cuda", inference, ((subject, facts),), path, inputs, read_rows
            )
