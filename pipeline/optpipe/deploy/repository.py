"""Writes a deployment: for Triton a model repository, its passport, the requests of its proof, and a seal.

DIR/models/NAME_engine      the artifact with its store manifest in `1/`
DIR/models/NAME_preprocess  the DALI pipeline, if the dossier proves one
DIR/models/NAME             the ensemble from encoded images to the model's outputs, with labels

The measurements in the dossier and the limits of its policy choose the server's settings. Batching follows Triton's description
(docs/user_guide/batcher.md): a request waits at most the queue delay for others, then its batch waits for the running one, then
it runs. So with a latency limit L and the largest batch's latency t, delay + 2·t ≤ L keeps a lone instance inside the limit.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from optpipe import __version__
from optpipe.backends.base import Serving
from optpipe.backends.registry import BACKENDS
from optpipe.core.card import Task, TensorSpec
from optpipe.core.errors import BadInputError, OptpipeError
from optpipe.core.files import hash_file
from optpipe.core.measurement import Options, Scenario
from optpipe.core.metrics.measured import P50, P99, THROUGHPUT
from optpipe.core.metrics.sections import LATENCY
from optpipe.core.quantity import Dimension, format_quantity
from optpipe.core.records import json_from_record
from optpipe.core.wording import Argument
from optpipe.deploy.kserve import InferenceService, write_service
from optpipe.deploy.records import (
    DEPLOYMENT,
    MODELS,
    REQUESTS,
    TENSORS,
    Choice,
    DeploymentRecord,
    Form,
)
from optpipe.deploy.requests import DALI_OUTPUT, ENCODED, record_outputs
from optpipe.deploy.session_process import list_captured_sizes
from optpipe.deploy.signed_build import DALI, REQUEST_ROWS, SignedBuild, list_signed_images
from optpipe.deploy.triton_config import (
    LABELS,
    add_warm_up,
    describe_tensors,
    fill_tensors,
    get_messages,
    write_config,
)
from optpipe.measure.groups import ProcessGroup, group_processes
from optpipe.models.artifacts.lookup import hash_engine
from optpipe.models.export.exported import Reference, reference_from_file
from optpipe.preprocess.dali_pipeline import INPUT as DALI_INPUT
from optpipe.preprocess.dali_pipeline import PIPELINE
from optpipe.signoff.dossier import finish_dossier
from optpipe.signoff.policy import Criterion
from optpipe.stats.paired import TOLERATED_RELATIVE_ERROR
from optpipe.workspace.arrays import write_arrays
from optpipe.workspace.entry import MANIFEST, drop_folder, get_utc_time, strip_folders
from optpipe.workspace.file_names import CARD, POLICY, REFERENCE, make_file_name
from optpipe.workspace.files import write_bytes, write_json
from optpipe.workspace.store import Store

NOT_MEASURED = "no VALID single-stream measurement"


@dataclass(frozen=True, slots=True)
class Settings:
    max_batch_size: int
    """0 for a model without a batch axis, or with a fixed batch."""
    delay_us: int
    options: Options
    """Runtime options of the measurements that the choices rest on."""
    choices: tuple[Choice, ...]


def choose_settings(build: SignedBuild) -> Settings:
    """The longest measured sequence length decides, within the strictest latency limit that the policy sets for it."""
    every = group_processes(build.measured)
    valid = [group for group in every if group.valid]
    length = max((group.load.length or 0 for group in valid), default=0) or None
    groups = [group for group in valid if group.load.length == length]
    options = (
        dict(every[-1].newest.measurement.subject.options)
        if every
        else dict(build.artifact.info.options)
    )
    limiting = [each for each in build.policy.criteria if each.is_of(LATENCY)]
    limits = [
        (each, float(each.threshold)) for each in limiting if each.where.length in (None, length)
    ]
    limit = min(limits, key=lambda each: each[1], default=None)
    low, _, high = build.card.batch_range
    choice = Choice("instance_group.count", "1", "--tune measures more instances on the server")
    batched = {each.batch for each in build.card.inputs} | {
        each.batch for each in build.card.outputs
    } == {0}
    if not batched or low > 1:
        why = (
            "the model has no batch axis"
            if high == 1
            else f"the build takes batches of {low} to {high} only"
        )
        fixed = Choice(
            "max_batch_size", "0", f"{why}: shapes are written whole, and no batches are formed"
        )
        return Settings(0, 0, options, (fixed, choice))
    points = _list_points(groups, limit[0].metric if limit else None)
    size, why = _choose_max_batch(points, limit, high)
    known = [each for each in points if each[0].load.batch_size <= size]
    delay_us, why_delay = _choose_delay(known, limit)
    source = f"run {every[-1].newest.run}" if every else "the build's own: nothing was measured"
    choices = (
        Choice("max_batch_size", str(size), why),
        Choice("dynamic_batching.max_queue_delay_microseconds", str(delay_us), why_delay),
        choice,
        Choice("runtime options", format_options(options), source),
    )
    return Settings(size, delay_us, options, choices)


def format_options(options: Options) -> str:
    """`threads=2`, or `none`."""
    return ", ".join(f"{name}={value}" for name, value in sorted(options.items())) or "none"


def _list_points(
    groups: Sequence[ProcessGroup], limited: str | None
) -> list[tuple[ProcessGroup, float]]:
    """Single-stream measurements, without waits in a queue, by batch size, with the upper bound of their latency in ns.

    The latency is `limited`, otherwise p99 or p50.
    """
    found = {}
    for group in groups:
        latency = group.estimate(limited or P99.name, 0.95) or (
            None if limited else group.estimate(P50.name, 0.95)
        )
        rate = group.estimate(THROUGHPUT.name, 0.95)
        if (
            group.load.scenario is Scenario.SINGLE_STREAM
            and latency is not None
            and rate is not None
        ):
            found[group.load.batch_size] = group, latency.bounds[1]
    return [found[size] for size in sorted(found)]


def _describe_source(group: ProcessGroup) -> str:
    return f"run {group.newest.run}, {group.load}, {group.count_processes()} processes"


def _choose_max_batch(
    points: Sequence[tuple[ProcessGroup, float]], limit: tuple[Criterion, float] | None, high: int
) -> tuple[int, str]:
    if not points and limit:
        return (
            1,
            f"{NOT_MEASURED} of {limit[0].metric}, which the policy limits: no batches are formed",
        )
    if not points:
        return high, f"{NOT_MEASURED}: the largest batch of the build's profile"
    inside = [each for each in points if limit is None or each[1] <= limit[1]]
    chosen, latency_ns = (inside or points[:1])[-1]
    why = "the largest batch that was measured"
    if limit is not None:
        text = format_quantity(limit[1], Dimension.TIME)
        found = "the largest measured within" if inside else "the smallest measured; none meets"
        why = f"{found} the limit of {text}"
    latency = format_quantity(latency_ns, Dimension.TIME)
    return chosen.load.batch_size, f"{why} ({latency}; {_describe_source(chosen)})"


def _choose_delay(
    known: Sequence[tuple[ProcessGroup, float]], limit: tuple[Criterion, float] | None
) -> tuple[int, str]:
    if limit is None or not known:
        why = (
            "the policy has no latency limit"
            if limit is None
            else "no single-stream latency was measured"
        )
        return 0, f"{why}: no request waits for others"
    criterion, limit_ns = limit
    group, latency_ns = known[-1]
    delay_us = int(max(0.0, min(limit_ns - 2 * latency_ns, latency_ns)) // 1000)
    latency = format_quantity(latency_ns, Dimension.TIME)
    left = f"{criterion.metric} {criterion.limit}, minus twice the {latency} of batch {group.load.batch_size}"
    return delay_us, f"{left}, but at most once that latency ({_describe_source(group)})"


ENGINE = "engine"
PREDICT = "predict.py"
SETTINGS = "loader.json"
_FOLDER = Path(__file__).parent
SHIM = {"model.py": _FOLDER / "triton_model.py", "optpipe_frames.py": _FOLDER / "frames.py"}
"""Files of a model on Triton's Python backend."""


def write_deployment(
    build: SignedBuild,
    output: Path,
    store: Store,
    target: Form,
    service: InferenceService | None = None,
) -> None:
    """Writes everything in one step: `output` is complete or does not exist. `service` is KServe's.

    Raises BadInputError if `output` exists, and for an artifact that needs other files or has no loader for a folder.
    """
    settings, backend = choose_settings(build), BACKENDS[build.artifact.info.backend]
    place = build.place.get_fact(f"packages.{backend.package}")
    serving = backend.serving(build.artifact.info, settings.options, place)
    with store.scratch("deploy") as scratch:
        images = list_signed_images(build)
        known = write_requests(build, images, scratch / REQUESTS)
        named = {name: prediction for name, (_, prediction) in images.items()}
        record = describe_deployment(build, settings, serving, named)
        if target == "folder":
            record = _write_folder(build, record, serving, scratch)
        else:
            name, models = make_file_name(build.card.name), scratch / MODELS
            record = replace(
                record, engine=f"{name}_engine", preprocessing=f"{name}_preprocess", ensemble=name
            )
            engine = _write_engine(build, record, serving, settings, known, models / record.engine)
            choices = [*settings.choices, engine]
            if build.preprocessing is None:
                record = replace(record, preprocessing=None, ensemble=None)
            else:
                pictures = [scratch / REQUESTS / name for name in images]
                choices += _write_preprocessing(
                    build, settings, pictures, models / f"{name}_preprocess"
                )
                _write_ensemble(build, record, serving, settings, models / name)
            if service is not None:
                threads = int(settings.options.get("threads", 0))
                choices += write_service(build, service, threads, serving.triton_backend, scratch)
            record = replace(record, choices=tuple(choices))
        write_card(build, scratch / CARD)
        write_bytes(scratch / POLICY, build.policy.source)
        write_bytes(scratch / DEPLOYMENT, json_from_record(replace(record, target=target)))
        if target != "folder" and backend.find_run_blocker(build.artifact.info) is None:
            # without them a check compares with the source model's alone
            with suppress(OptpipeError, RuntimeError, ValueError):
                record_outputs(scratch, record, build.card)
        finish_dossier(scratch, output)


def describe_deployment(
    build: SignedBuild, settings: Settings, serving: Serving, images: Mapping[str, int | None]
) -> DeploymentRecord:
    info, place = build.artifact.info, build.place
    names = [*BACKENDS[info.backend].packages, *([DALI] if build.preprocessing else [])]
    return DeploymentRecord(
        target="folder",
        model=build.card.name,
        artifact=build.artifact.id,
        artifact_sha256=hash_engine(build.artifact),
        backend=info.backend,
        precision=info.precision,
        device=info.device,
        dossier=build.reference,
        engine=f"{ENGINE}/{info.file}",
        preprocessing=None,
        ensemble=None,
        options=settings.options,
        labels=build.card.labels if build.card.task is Task.CLASSIFICATION else (),
        choices=(Choice("runtime options", format_options(settings.options), "as measured"),),
        not_carried=serving.not_carried,
        tolerance=TOLERATED_RELATIVE_ERROR[info.precision],
        images=images,
        environment=replace(
            place,
            packages={name: place.get_fact(f"packages.{name}") for name in names},
            gpus=place.gpus if info.device == "cuda" else (),
        ),
        triton=serving.requirement,
        optpipe=__version__,
        created_utc=get_utc_time(),
    )


def write_requests(
    build: SignedBuild, images: Mapping[str, tuple[Path, int | None]], folder: Path
) -> Reference:
    """Writes the requests of a proof: reference inputs with the source model's outputs, and signed-off images."""
    known = reference_from_file(build.samples.file(REFERENCE))
    by_boxes = build.verification.info.by_boxes if build.verification else ()
    first = {each.name: each.batch for each in build.card.inputs}
    first |= {each.name: each.batch for each in build.card.outputs}
    rows = {
        f"{side}:{name}": array[:REQUEST_ROWS] if first.get(name, 0) == 0 else array
        for side, arrays in (("input", known.inputs), ("output", known.outputs))
        for name, array in arrays.items()
        if name not in by_boxes
    }
    folder.mkdir()
    write_arrays(folder / TENSORS, rows)
    for name, (path, _) in images.items():
        shutil.copyfile(path, folder / name)
    return reference_from_file(folder / TENSORS)


def copy_artifact(build: SignedBuild, folder: Path) -> None:
    """Copies the artifact; its manifest loses the folders of this machine."""
    shutil.copytree(build.artifact.path, folder)
    write_bytes(folder / MANIFEST, json_from_record(strip_folders(build.artifact.manifest)))


def _write_engine(
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
    largest = settings.max_batch_size
    captured = (
        list_captured_sizes(largest)
        if largest and serving.own_session and info.device == "cuda"
        else ()
    )
    sizes = sorted({1, largest, *captured}) if largest else [0]
    for size in sizes:
        given = []
        for spec, each in zip(build.card.inputs, inputs, strict=True):
            # Triton repeats a file of one sample for the whole batch, so one row serves every size
            row = known.inputs[spec.name][:1] if size else known.inputs[spec.name]
            given.append((replace(each, shape=row.shape[1:] if size else row.shape), row.tobytes()))
        add_warm_up(config, folder, f"batch {size}" if size else "one request", size, given)
    write_config(config, folder)
    return Choice(
        f"{folder.name} warm-up",
        ", ".join(map(str, sizes)),
        f"rows of the reference inputs ({REFERENCE})",
    )


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
            "".join(f"{each}\n" for each in record.labels), encoding="utf-8"
        )


def _write_preprocessing(
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


def _write_ensemble(
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


def write_card(build: SignedBuild, path: Path) -> None:
    """Writes the model card without the paths of this machine."""
    card = replace(build.card, data={}, source=drop_folder(build.card.source)).to_dict()
    write_bytes(path, json.dumps(card, indent=1).encode() + b"\n")


def _write_folder(
    build: SignedBuild, record: DeploymentRecord, serving: Serving, folder: Path
) -> DeploymentRecord:
    """Returns the record with the preprocessing. Raises BadInputError for a backend without a loader."""
    assert serving.loader is not None  # refused before the dossier was verified
    copy_artifact(build, folder / ENGINE)
    pipeline, options = None, {}
    if build.preprocessing is not None:
        pipeline, plan = f"preprocessing/{Path(PIPELINE).name}", build.preprocessing.info.plan
        options = {
            "batch_size": plan.batch_size,
            "num_threads": plan.threads,
            "device_id": 0 if plan.device == "gpu" else None,
            "prefetch_queue_depth": 1,
        }
        (folder / "preprocessing").mkdir()
        shutil.copyfile(build.preprocessing.file(PIPELINE), folder / pipeline)
    classifies = build.preprocessing is not None and build.card.task is Task.CLASSIFICATION
    settings = {
        "engine": record.engine,
        "input": build.card.inputs[0].name,
        "inputs": {
            each.name: {"dtype": each.dtype, "min": each.min, "max": each.max, "batch": each.batch}
            for each in build.card.inputs
        },
        "labels": record.labels,
        "runtime": serving.loader_settings,
        "classifies": classifies,
        "pipeline": pipeline,
        "pipeline_options": options,
        "sha256": {name: hash_file(folder / name) for name in (record.engine, pipeline) if name},
    }
    write_json(folder / SETTINGS, settings)
    shutil.copyfile(serving.loader, folder / PREDICT)
    image = next(iter(record.images), None) if classifies else None
    (folder / "README.md").write_text(_make_readme(build, record, image), encoding="utf-8")
    return replace(record, preprocessing=pipeline)


def _make_readme(build: SignedBuild, record: DeploymentRecord, image: str | None) -> str:
    template = Path(__file__).with_name("folder-readme.md").read_text(encoding="utf-8")
    head, service, tail = template.split("<!-- with an image -->\n")
    return (f"{head}{service}{tail}" if image else f"{head}{tail}").format(
        name=build.card.name,
        label=build.artifact.info.label,
        artifact=build.artifact.id,
        dossier=build.reference.name,
        verdict=build.reference.verdict,
        because=f", deployed because: {build.reference.because}" if build.reference.because else "",
        calls=", `preprocess` makes them from encoded images" if build.preprocessing else "",
        packages=" ".join(
            f"{name}=={version}" for name, version in record.environment.packages.items()
        ),
        image=image,
    )
