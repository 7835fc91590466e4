"""`--to kserve`: an InferenceService (serving.kserve.io/v1beta1) for the model repository.

KServe mounts the content of `storageUri` at /mnt/models and starts Triton on it, so the content of `models/` must be uploaded.
KServe's runtime for Triton would fill missing resources with 1 CPU and 2 GiB, so the manifest names all resources.
"""

import json
import math
import re
from pathlib import Path

from optpipe.core.errors import BadInputError
from optpipe.core.quantity import format_bytes
from optpipe.deploy.choices import Settings
from optpipe.deploy.records import MODELS, Choice
from optpipe.deploy.signed_build import SignedBuild
from optpipe.models.artifacts.facts import hash_engine

MANIFEST = "inference-service.yaml"
SERVER_BYTES = 2 << 30
"""Memory of KServe's runtime for Triton without a model (config/runtimes/kserve-tritonserver.yaml)."""
MIB = 1 << 20


def require_service(storage_uri: str | None, image: str | None) -> None:
    """Raises BadInputError for a missing URI, or one that KServe refuses."""
    if storage_uri is None:
        raise BadInputError(
            "--to kserve requires --storage-uri URI, where models/ will be uploaded: s3://BUCKET/PATH, pvc://…, oci://…"
        )
    if not re.fullmatch(r"[a-z0-9+]+://\S+", storage_uri):
        raise BadInputError(f"--storage-uri {storage_uri!r} is not a URI, such as s3://BUCKET/PATH or pvc://CLAIM/PATH")
    if image is not None and (not image or re.search(r"\s", image)):
        raise BadInputError(f"--image {image!r} is not the name of an image")


def write_service(
    build: SignedBuild, settings: Settings, storage_uri: str, image: str | None, backend: str, folder: Path
) -> list[Choice]:
    """Writes the manifest; `backend` and `image` are Triton's.

    Requests are also limits, because the measurements had their cores to themselves. Raises BadInputError if KServe's image cannot
    serve the repository.
    """
    if backend == "python" and image is None:
        raise BadInputError(
            f"Triton has no backend for {build.artifact.info.backend}: the server needs optpipe, which the image of KServe's runtime "
            "lacks; pass --image IMAGE"
        )
    on_gpu, decoding = build.artifact.info.device == "cuda", 0
    if build.preprocessing is not None:
        decoding = build.preprocessing.info.plan.threads
    if on_gpu:
        threads, why = settings.instances, f"one thread for each of {settings.instances} instances"
    elif per_instance := int(settings.options.get("threads", 0)):
        threads = settings.instances * per_instance
        why = f"{settings.instances} × {per_instance} threads, instances as configured and threads as measured"
    else:
        threads, why = build.place.cpu_count or 1, "the machine of the evidence: the runtime chose its threads itself"
    peaks = [(one.measurement.host_peak_bytes, one.run) for one in build.measured if one.measurement.host_peak_bytes]
    peak, run = max(peaks, default=(0, ""))
    memory = f"{math.ceil((SERVER_BYTES + settings.instances * peak) / MIB)}Mi"
    of_build = (
        f"and {settings.instances} × {format_bytes(peak)}, the largest of run {run}"
        if peak
        else "alone: nothing was measured"
    )
    choices = [
        Choice("resources.cpu", str(threads + decoding), f"{why}; {decoding} of the preprocessing"),
        Choice("resources.memory", memory, f"{format_bytes(SERVER_BYTES)} of KServe's runtime for Triton {of_build}"),
    ]
    if on_gpu or (build.preprocessing and build.preprocessing.info.plan.device == "gpu"):
        choices.append(Choice("resources.nvidia.com/gpu", "1", "the evidence is of one GPU"))
    resources = {each.setting.removeprefix("resources."): each.value for each in choices}
    (folder / MANIFEST).write_text(_make_manifest(build, storage_uri, image, resources), encoding="utf-8")
    otherwise = "no --image was given; the passport says which Triton release it must be"
    return [
        *choices,
        Choice("image", image or "KServe's own", "given by --image" if image else otherwise),
        Choice("storageUri", storage_uri, "given by --storage-uri"),
    ]


def _make_manifest(build: SignedBuild, storage_uri: str, image: str | None, resources: dict[str, str]) -> str:
    """Writes strings as JSON, which is valid YAML."""
    amounts = ", ".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in resources.items())
    name = re.sub(r"[^a-z0-9]+", "-", build.card.name.lower()).strip("-")[:50].rstrip("-")
    name = name if name[:1].isalpha() else f"model-{name}".rstrip("-")  # KServe needs a DNS label (RFC 1035)
    own_image = f"      image: {json.dumps(image)}\n" if image else ""
    return (
        f"# Upload the content of {MODELS}/ to storageUri, then: kubectl apply -f {MANIFEST}\n"
        f"# Predictions: POST /v2/models/{build.card.name}{'' if build.preprocessing else '_engine'}/infer\n"
        "apiVersion: serving.kserve.io/v1beta1\n"
        "kind: InferenceService\n"
        "metadata:\n"
        f"  name: {json.dumps(name)}\n"
        "  annotations:\n"
        f"    optpipe/artifact-sha256: {json.dumps(hash_engine(build.artifact))}\n"
        f"    optpipe/dossier: {json.dumps(build.reference.name)}\n"
        f"    optpipe/dossier-sha256: {json.dumps(build.reference.sha256)}\n"
        f"    optpipe/verdict: {json.dumps(str(build.reference.verdict))}\n"
        "spec:\n"
        "  predictor:\n"
        "    model:\n"
        '      modelFormat: {name: triton, version: "2"}\n'
        "      protocolVersion: v2\n"
        f"      storageUri: {json.dumps(storage_uri)}\n"
        f"{own_image}"
        "      resources:\n"
        f"        requests: {{{amounts}}}\n"
        f"        limits: {{{amounts}}}\n"
    )
