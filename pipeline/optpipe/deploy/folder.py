"""`--to folder`: the engine, its preprocessing and a loader that needs the runtime alone, for a server of the user's own."""

import shutil
from dataclasses import replace
from pathlib import Path

from optpipe.backends.base import Serving
from optpipe.core.card import Task
from optpipe.core.errors import BadInputError
from optpipe.core.files import hash_file
from optpipe.deploy.choices import choose_settings
from optpipe.deploy.records import REQUESTS, TENSORS, Choice, DeploymentRecord
from optpipe.deploy.repository import (
    ENGINE,
    copy_artifact,
    describe_deployment,
    finish_deployment,
    serving_from_build,
    write_requests,
)
from optpipe.deploy.signed_build import SignedBuild, list_signed_images
from optpipe.preprocess.artifact import PIPELINE
from optpipe.preprocess.dali_pipeline import DaliPlan
from optpipe.workspace.files import write_json
from optpipe.workspace.store import Store

PREDICT = "predict.py"
SETTINGS = "loader.json"


def write_folder(build: SignedBuild, output: Path, store: Store) -> DeploymentRecord:
    """Writes everything in one step. Raises BadInputError for a backend without a loader, and where `output` exists."""
    settings = choose_settings(build)
    serving = serving_from_build(build, settings.options)
    if serving.loader is None:
        raise BadInputError(
            f"--to folder has no loader for artifacts of {build.artifact.info.backend}; use --to triton"
        )
    with store.scratch("deploy") as scratch:
        images = list_signed_images(build)
        write_requests(build, images, scratch / REQUESTS)
        text = ", ".join(f"{name}={value}" for name, value in settings.options.items())
        record = describe_deployment(
            build, settings, serving, images, (Choice("runtime options", text, "as measured"),)
        )
        record = replace(record, preprocessing=_write_loader(build, record, serving, scratch))
        shutil.copyfile(serving.loader, scratch / PREDICT)
        text = _make_readme(build, record, images[0][1].file if images and _classifies_images(build) else None)
        (scratch / "README.md").write_text(text, encoding="utf-8")
        return finish_deployment(build, record, scratch, output)


def _write_loader(build: SignedBuild, record: DeploymentRecord, serving: Serving, folder: Path) -> str | None:
    """The engine, its preprocessing, and `loader.json`, which `predict.py` reads; returns the preprocessing's name."""
    copy_artifact(build, folder / ENGINE)
    pipeline, plan = None, None
    if build.preprocessing is not None:
        pipeline, plan = f"preprocessing/{Path(PIPELINE).name}", build.preprocessing.info.plan
        (folder / "preprocessing").mkdir()
        shutil.copyfile(build.preprocessing.file(PIPELINE), folder / pipeline)
    settings = {
        "engine": record.engine,
        "input": build.card.inputs[0].name,
        "inputs": {
            each.name: {"dtype": each.dtype, "min": each.min, "max": each.max, "batch": each.batch}
            for each in build.card.inputs
        },
        "labels": record.labels,
        "runtime": serving.loader_settings,
        "classifies": _classifies_images(build),
        "pipeline": pipeline,
        "pipeline_options": {} if plan is None else _get_pipeline_options(plan),
        "sha256": {name: hash_file(folder / name) for name in (record.engine, pipeline) if name},
    }
    write_json(folder / SETTINGS, settings)
    return pipeline


def _get_pipeline_options(plan: DaliPlan) -> dict[str, int | None]:
    device = 0 if plan.device == "gpu" else None
    return {"batch_size": plan.batch_size, "num_threads": plan.threads, "device_id": device, "prefetch_queue_depth": 1}


def _classifies_images(build: SignedBuild) -> bool:
    return build.preprocessing is not None and build.card.task is Task.CLASSIFICATION


SERVICE = """Behind FastAPI (`pip install fastapi python-multipart uvicorn`), as `service.py` in a folder of yours, since `--check`
refuses what was added to this one: `PYTHONPATH=DIR PYTHONDONTWRITEBYTECODE=1 uvicorn service:app`. LitServe, BentoML and
Ray Serve call `predict` likewise, with the images of a batch.

```python
from fastapi import FastAPI, UploadFile
from predict import predict

app = FastAPI()


@app.post("/predict")
def classify(image: UploadFile):
    [(label, score)] = predict([image.file.read()])
    return {"label": label, "score": score}
```

"""


def _make_readme(build: SignedBuild, record: DeploymentRecord, image: str | None) -> str:
    packages = " ".join(f"{name}=={version}" for name, version in record.environment.packages.items())
    run = f"```sh\npython {PREDICT} {REQUESTS}/{image}\n```\n\n{SERVICE}" if image else ""
    because = f", deployed because: {build.reference.because}" if build.reference.because else ""
    calls = "`infer` runs the engine on tensors by name" + (
        ", `preprocess` makes them from encoded images" if build.preprocessing else ""
    )
    return (
        f"# {build.card.name}\n\n"
        f"{build.artifact.info.label}, artifact {build.artifact.id}; dossier {build.reference.name}: "
        f"{build.reference.verdict}{because}.\n\n"
        f"`{PREDICT}` checks and loads the engine and needs no optpipe: {calls}.\n\n"
        f"```sh\npip install numpy {packages}\n```\n\n{run}"
        f"`{REQUESTS}/{TENSORS}` holds inputs (`input:NAME`) and the source model's outputs (`output:NAME`) to test a service "
        f"with; `{SETTINGS}` holds the options that the signed-off measurements ran with. "
        f"`sha256sum -c SHA256SUMS` checks every file; `optpipe deploy --check DIR` also compares this machine with the evidence.\n"
    )
