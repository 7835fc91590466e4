"""Writes a deployment in one step: models for Triton or a folder, a passport, the requests of its proof, and a seal."""

import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from optpipe import __version__
from optpipe.backends.base import Serving
from optpipe.backends.registry import BACKENDS
from optpipe.core.card import Task
from optpipe.core.errors import OptpipeError
from optpipe.core.records import json_from_record
from optpipe.deploy.folder import ENGINE, write_folder
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
from optpipe.deploy.requests import record_outputs
from optpipe.deploy.server_settings import Settings, choose_settings, format_options
from optpipe.deploy.signed_build import DALI, REQUEST_ROWS, SignedBuild, list_signed_images
from optpipe.deploy.signed_files import write_card
from optpipe.deploy.triton_models import write_engine, write_ensemble, write_preprocessing
from optpipe.models.artifacts.engine_files import hash_engine
from optpipe.models.export.exported import Reference, reference_from_file
from optpipe.signoff.dossier import finish_dossier
from optpipe.stats.paired import TOLERATED_RELATIVE_ERROR
from optpipe.workspace.arrays import write_arrays
from optpipe.workspace.entry import get_utc_time
from optpipe.workspace.file_names import CARD, POLICY, REFERENCE, make_file_name
from optpipe.workspace.files import write_bytes
from optpipe.workspace.store import Store


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
            record = write_folder(build, record, serving, scratch)
        else:
            name, models = make_file_name(build.card.name), scratch / MODELS
            record = replace(
                record, engine=f"{name}_engine", preprocessing=f"{name}_preprocess", ensemble=name
            )
            engine = write_engine(build, record, serving, settings, known, models / record.engine)
            choices = [*settings.choices, engine]
            if build.preprocessing is None:
                record = replace(record, preprocessing=None, ensemble=None)
            else:
                pictures = [scratch / REQUESTS / name for name in images]
                choices += write_preprocessing(
                    build, settings, pictures, models / f"{name}_preprocess"
                )
                write_ensemble(build, record, serving, settings, models / name)
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
        selection=build.selection,
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
    first = {spec.name: spec.batch for spec in build.card.inputs}
    first |= {spec.name: spec.batch for spec in build.card.outputs}
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
