"""Writes the models of a Triton repository.

DIR/models/NAME_engine      the artifact with its store manifest in `1/`
DIR/models/NAME_preprocess  the DALI pipeline, if the dossier proves one
DIR/models/NAME             the ensemble from encoded images to the model's outputs, with labels
"""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from optpipe.backends.base import Serving
from optpipe.core.card import TensorSpec
from optpipe.core.entries import ArtifactInfo
from optpipe.core.errors import BadInputError
from optpipe.core.records import json_from_record
from optpipe.core.wording import Argument
from optpipe.deploy.records import (
    Choice,
    DeploymentRecord,
)
from optpipe.deploy.requests import DALI_OUTPUT, ENCODED
from optpipe.deploy.server_settings import Settings
from optpipe.deploy.session_process import list_captured_sizes
from optpipe.deploy.signed_build import SignedBuild
from optpipe.deploy.signed_files import copy_artifact, write_card
from optpipe.deploy.triton_config import (
    LABELS,
    add_warm_up,
    describe_tensors,
    fill_tensors,
    get_messages,
    write_config,
)
from optpipe.models.export.exported import Reference
from optpipe.preprocess.dali_pipeline import INPUT as DALI_INPUT
from optpipe.workspace.file_names import CARD, REFERENCE
from optpipe.workspace.files import write_bytes

_FOLDER = Path(__file__).parent


SHIM = {"model.py": _FOLDER / "triton_model.py", "optpipe_frames.py": _FOLDER / "frames.py"}
"""Files of a model on Triton's Python backend."""


def write_engine(
    build: SignedBuild,
    record: DeploymentRecord,
    serving: Serving,
    settings: Settings,
    known: Reference,
    folder: Path,
) -> Choice:
    """Writes the artifact as a Triton model and returns its warm-up: rows of the reference.

    The warm-up has one request of one sample, of the largest batch, and of each CUDA graph's size.
    """
    pb, info = get_messages(), build.artifact.info
    copy_artifact(build, folder / "1")
    inputs, outputs = describe_tensors(
        build.card, batched=settings.max_batch_size > 0, by_position=serving.by_position
    )
    config = pb.ModelConfig(name=folder.name, max_batch_size=settings.max_batch_size)
    config.backend, config.platform = serving.triton_backend, serving.platform
    if serving.own_session:
        for name, source in SHIM.items():
            shutil.copyfile(source, folder / "1" / name)
        add_shim_parameters(config, Path("$$TRITON_MODEL_DIRECTORY/1"), "artifact")
    else:
        config.default_model_filename = info.file
    config.parameters[
        "artifact_sha256"
    ].string_value = record.artifact_sha256  # tells a live check what is loaded
    fill_tensors(config, inputs, outputs)
    _write_labels(record, config, folder)
    kind = "KIND_GPU" if info.device == "cuda" else "KIND_CPU"
    group = config.instance_group.add(count=1, kind=pb.ModelInstanceGroup.Kind.Value(kind))
    group.profile.extend(serving.profiles)
    _set_batching(config, settings)
    for name, value in serving.parameters.items():
        config.parameters[name].string_value = value
    if serving.cuda_graph:
        config.optimization.cuda.graphs = True
    if serving.graph_level:
        config.optimization.graph.level = serving.graph_level
    sizes = _list_warm_up_sizes(settings, serving, info)
    for size in sizes:
        given = []
        for spec, served in zip(build.card.inputs, inputs, strict=True):
            # Triton repeats a file of one sample for the whole batch, so one row serves every size
            row = known.inputs[spec.name][:1] if size else known.inputs[spec.name]
            shape = row.shape[1:] if size else row.shape
            given.append((replace(served, shape=shape), row.tobytes()))
        add_warm_up(config, folder, f"batch {size}" if size else "one request", size, given)
    write_config(config, folder)
    return Choice(
        f"{folder.name} warm-up",
        ", ".join(map(str, sizes)),
        f"rows of the reference inputs ({REFERENCE})",
    )


def _list_warm_up_sizes(settings: Settings, serving: Serving, info: ArtifactInfo) -> list[int]:
    """One sample, the largest batch, and the size of each CUDA graph; 0 for a model without a batch."""
    largest = settings.max_batch_size
    if not largest:
        return [0]
    captures = serving.own_session and info.device == "cuda"
    return sorted({1, largest, *(list_captured_sizes(largest) if captures else ())})


def add_shim_parameters(config: Any, folder: Path, kind: str) -> None:
    """Parameters of `model.py`; its interpreter is OPTPIPE_PYTHON, or `python3`."""
    config.parameters["folder"].string_value = str(folder)
    config.parameters["kind"].string_value = kind


def _set_batching(config: Any, settings: Settings) -> None:
    if settings.max_batch_size > 1:
        config.dynamic_batching.max_queue_delay_microseconds = settings.delay_us


def _write_labels(record: DeploymentRecord, config: Any, folder: Path) -> None:
    if record.labels:
        config.output[0].label_filename = LABELS
        (folder / LABELS).write_text(
            "".join(f"{label}\n" for label in record.labels), encoding="utf-8"
        )


def write_preprocessing(
    build: SignedBuild, settings: Settings, images: Sequence[Path], folder: Path
) -> list[Choice]:
    pb, entry = get_messages(), build.preprocessing
    assert entry is not None
    transform = build.card.transform
    assert transform is not None
    plan = entry.info.plan
    shutil.copytree(entry.path / "1", folder / "1")
    shutil.copyfile(entry.path / "transform.json", folder / "1" / "transform.json")
    write_bytes(folder / "1" / "preprocessing.json", json_from_record(entry.info))
    size = min(plan.batch_size, settings.max_batch_size or plan.batch_size)
    config = pb.ModelConfig(name=folder.name, backend="dali", max_batch_size=size)
    config.input.add(name=DALI_INPUT, data_type=pb.TYPE_UINT8, dims=[-1], allow_ragged_batch=True)
    fill_tensors(
        config, (), (TensorSpec(DALI_OUTPUT, transform.pack.dtype, tuple(transform.shape)),)
    )
    kind = "KIND_GPU" if plan.device == "gpu" else "KIND_CPU"
    config.instance_group.add(count=1, kind=pb.ModelInstanceGroup.Kind.Value(kind))
    _set_batching(config, settings)
    config.parameters["num_threads"].string_value = str(plan.threads)
    choices = [
        Choice(f"{folder.name} threads", str(plan.threads), f"the proven pipeline {entry.id}"),
        Choice(f"{folder.name} instance_group.count", "1", "DALI's backend advises one instance"),
    ]
    if images:
        content = images[0].read_bytes()
        add_warm_up(
            config,
            folder,
            "one image",
            1,
            [(TensorSpec(DALI_INPUT, "uint8", (len(content),)), content)],
        )
        choices.append(
            Choice(f"{folder.name} warm-up", "1", f"the image {images[0].name} of the evaluation")
        )
    write_config(config, folder)
    return choices


def write_ensemble(
    build: SignedBuild, record: DeploymentRecord, serving: Serving, settings: Settings, folder: Path
) -> None:
    """Writes the ensemble from encoded images to the outputs; labels by Triton's classification extension (`class_count`)."""
    pb = get_messages()
    if not settings.max_batch_size:
        problem = f"{build.card.name} takes no batches of changing size, which an ensemble from images needs"
        raise BadInputError(f"{problem}; build it with " + Argument("batch", "1:…"))
    inner = describe_tensors(build.card, batched=True, by_position=serving.by_position)
    _, outputs = describe_tensors(build.card, batched=True)
    assert build.preprocessing is not None
    size = min(
        build.preprocessing.info.plan.batch_size, settings.max_batch_size
    )  # at most that of each step
    config = pb.ModelConfig(name=folder.name, platform="ensemble", max_batch_size=size)
    fill_tensors(config, (TensorSpec(ENCODED, "uint8", (-1,)),), outputs)
    (folder / "1").mkdir(parents=True)
    write_card(
        build, folder / "1" / CARD
    )  # Triton needs a version folder, and an empty one cannot be sealed
    _write_labels(record, config, folder)
    first = config.ensemble_scheduling.step.add(model_name=record.preprocessing, model_version=-1)
    first.input_map[DALI_INPUT], first.output_map[DALI_OUTPUT] = ENCODED, "preprocessed"
    second = config.ensemble_scheduling.step.add(model_name=record.engine, model_version=-1)
    second.input_map[inner[0][0].name] = "preprocessed"
    for inside, outside in zip(inner[1], outputs, strict=True):
        second.output_map[inside.name] = outside.name
    write_config(config, folder)
