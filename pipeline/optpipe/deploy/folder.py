"""Writes a deployment as a folder that a Python program loads, without a server."""

import shutil
from dataclasses import replace
from pathlib import Path

from optpipe.backends.base import Serving
from optpipe.core.card import Task
from optpipe.core.files import hash_file
from optpipe.deploy.records import (
    DeploymentRecord,
)
from optpipe.deploy.signed_build import SignedBuild
from optpipe.deploy.signed_files import copy_artifact
from optpipe.preprocess.dali_pipeline import PIPELINE
from optpipe.workspace.files import write_json

ENGINE = "engine"


PREDICT = "predict.py"


SETTINGS = "loader.json"


def write_folder(
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
            spec.name: {"dtype": spec.dtype, "min": spec.min, "max": spec.max, "batch": spec.batch}
            for spec in build.card.inputs
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
