"""`--to folder`: the engine, its preprocessing and a loader that needs the runtime alone, for a server of the user's own."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optpipe.backends.base import Serving
from optpipe.core.card import Task
from optpipe.core.errors import BadInputError
from optpipe.core.files import hash_file
from optpipe.core.records import json_from_record
from optpipe.deploy.choices import choose_settings
from optpipe.deploy.passport import passport_from_build, serving_from_build
from optpipe.deploy.records import DEPLOYMENT, PASSPORT, REQUESTS, TENSORS, Choice, Passport
from optpipe.deploy.repository import WrittenDeployment, describe_deployment, list_labels, write_card, write_requests
from optpipe.deploy.signed_build import SignedBuild, list_signed_images
from optpipe.preprocess.artifact import PIPELINE
from optpipe.preprocess.dali_pipeline import DaliPlan
from optpipe.signoff.dossier import finish_dossier
from optpipe.workspace.file_names import CARD, POLICY
from optpipe.workspace.files import write_bytes
from optpipe.workspace.store import Store

PREDICT = "predict.py"
SETTINGS = "loader.json"


@dataclass(frozen=True, slots=True)
class LoaderSettings:
    """What `predict.py` reads: `loader.json`."""

    engine: str
    input: str
    labels: tuple[str, ...]
    runtime: Mapping[str, Any]
    """The settings of the backend's own loader."""
    classifies: bool
    """Whether `predict.py` can name the class of an image."""
    pipeline: str | None
    pipeline_options: Mapping[str, int | None] = field(default_factory=dict)
    """Of DALI's `Pipeline.deserialize`."""
    sha256: Mapping[str, str] = field(default_factory=dict)


def write_folder(build: SignedBuild, output: Path, store: Store) -> WrittenDeployment:
    """Writes everything in one step. Raises BadInputError for a backend without a loader, and where `output` exists."""
    settings = choose_settings(build)
    serving = serving_from_build(build, settings.options)
    if serving.loader is None:
        raise BadInputError(
            f"--to folder has no loader for artifacts of {build.artifact.info.backend}; use --to triton"
        )
    with store.scratch("deploy") as scratch:
        run, images = list_signed_images(build)
        write_requests(build, run, images, scratch / REQUESTS)
        found = _describe_loader(build, serving, scratch)
        write_bytes(scratch / SETTINGS, json_from_record(found))
        shutil.copyfile(serving.loader, scratch / PREDICT)
        write_card(build, scratch / CARD)
        write_bytes(scratch / POLICY, build.policy.source)
        options = Choice(
            "runtime options", ", ".join(f"{name}={value}" for name, value in settings.options.items()), "as measured"
        )
        record = describe_deployment(build, settings, (), "folder", found.engine, found.pipeline, None, (options,))
        passport = passport_from_build(build, serving)
        write_bytes(scratch / DEPLOYMENT, json_from_record(record))
        write_bytes(scratch / PASSPORT, json_from_record(passport))
        text = _make_readme(build, passport, images[0][1].file if images and _classifies_images(build) else None)
        (scratch / "README.md").write_text(text, encoding="utf-8")
        finish_dossier(scratch, output)
    return WrittenDeployment(output, record, passport)


def _describe_loader(build: SignedBuild, serving: Serving, folder: Path) -> LoaderSettings:
    shutil.copytree(build.artifact.path, folder / "engine", ignore=shutil.ignore_patterns("manifest.json", "*.log"))
    engine, pipeline, plan = f"engine/{build.artifact.info.file}", None, None
    if build.preprocessing is not None:
        pipeline, plan = f"preprocessing/{Path(PIPELINE).name}", build.preprocessing.info.plan
        (folder / "preprocessing").mkdir()
        shutil.copyfile(build.preprocessing.file(PIPELINE), folder / pipeline)
    return LoaderSettings(
        engine=engine,
        input=build.card.inputs[0].name,
        labels=list_labels(build),
        runtime=serving.loader_settings,
        classifies=_classifies_images(build),
        pipeline=pipeline,
        pipeline_options={} if plan is None else _get_pipeline_options(plan),
        sha256={name: hash_file(folder / name) for name in (engine, pipeline) if name},
    )


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


def _make_readme(build: SignedBuild, passport: Passport, image: str | None) -> str:
    packages = " ".join(f"{name}=={version}" for name, version in passport.packages.items())
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
