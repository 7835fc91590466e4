"""`--to kserve`: an InferenceService (serving.kserve.io/v1beta1) that serves the model repository beside it.

KServe mounts what lies at `storageUri` at /mnt/models and starts Triton on it, so the content of `models/` is what is uploaded.
Resources that a manifest leaves out come from KServe's runtime for Triton (1 CPU, 2 GiB), whatever the model needs: all are written.
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
from optpipe.models.artifacts.engine import hash_engine

MANIFEST = "inference-service.yaml"
CONTAINERFILE = "Containerfile"
SCHEMES = (
    "s3", "gs", "https", "http", "hdfs", "webhdfs", "pvc", "file", "hf", "oci", "oci+native", "oci+modelcar", "oci+fetch",
)  # fmt: skip
"""Of `storageUri`, as KServe's validation has them (pkg/controller/v1beta1/inferenceservice/utils, pkg/utils/storage.go)."""
SERVER_BYTES = 2 << 30
"""Memory that KServe's runtime gives Triton without a model (config/runtimes/kserve-tritonserver.yaml)."""
MIB = 1 << 20


def require_service(storage_uri: str | None, image: str | None) -> None:
    """Raises BadInputError for a missing URI, or one that KServe refuses."""
    if storage_uri is None:
        raise BadInputError(
            "--to kserve requires --storage-uri URI, where models/ will be uploaded: s3://BUCKET/PATH, pvc://…, oci://…"
        )
    scheme, separator, rest = storage_uri.partition("://")
    if scheme not in SCHEMES or not separator or not rest or re.search(r"\s", storage_uri):
        raise BadInputError(
            f"--storage-uri {storage_uri!r} is not a URI that KServe reads; its schemes: {', '.join(SCHEMES)}"
        )
    if image is not None and (not image or re.search(r"\s", image)):
        raise BadInputError(f"--image {image!r} is not the name of an image")


def write_service(
    build: SignedBuild, settings: Settings, storage_uri: str, image: str | None, backend: str, folder: Path
) -> list[Choice]:
    """Writes the manifest, and for an `oci` URI the Containerfile of its image; `backend` and `image` are Triton's.

    Raises BadInputError where KServe's own image could not serve the repository.
    """
    if backend == "python" and image is None:
        raise BadInputError(
            f"Triton has no backend for {build.artifact.info.backend}: the server needs optpipe, which the image of KServe's runtime "
            "lacks; pass --image IMAGE"
        )
    resources, choices = _choose_resources(build, settings)
    (folder / MANIFEST).write_text(_make_manifest(build, storage_uri, image, resources), encoding="utf-8")
    if storage_uri.startswith("oci"):  # a modelcar is a running container: its image needs a shell
        (folder / CONTAINERFILE).write_text(f"FROM busybox:stable\nCOPY {MODELS} /models\n", encoding="utf-8")
    if image:
        choices.append(Choice("image", image, "given by --image"))
    else:
        choices.append(
            Choice("image", "KServe's own", "no --image was given; the passport says which Triton release it must be")
        )
    return [*choices, Choice("storageUri", storage_uri, "given by --storage-uri")]


def _choose_resources(build: SignedBuild, settings: Settings) -> tuple[dict[str, str], list[Choice]]:
    """Requests, which are also the limits: what was measured had its cores to itself."""
    on_gpu = build.artifact.info.device == "cuda"
    threads, why = _count_threads(build, settings, on_gpu)
    decoding = build.preprocessing.info.plan.threads if build.preprocessing else 0
    resources = {"cpu": str(threads + decoding)}
    choices = [Choice("resources.cpu", resources["cpu"], f"{why}; {decoding} of the preprocessing")]
    peaks = [(one.measurement.host_peak_bytes, one.run) for one in build.measured if one.measurement.host_peak_bytes]
    peak, run = max(peaks, default=(0, ""))
    resources["memory"] = f"{math.ceil((SERVER_BYTES + settings.instances * peak) / MIB)}Mi"
    source = (
        f"and {settings.instances} × {format_bytes(peak)}, the largest of run {run}"
        if peak
        else "alone: nothing was measured"
    )
    choices.append(
        Choice(
            "resources.memory",
            resources["memory"],
            f"{format_bytes(SERVER_BYTES)} of KServe's runtime for Triton {source}",
        )
    )
    if on_gpu or (build.preprocessing and build.preprocessing.info.plan.device == "gpu"):
        resources["nvidia.com/gpu"] = "1"
        choices.append(Choice("resources.nvidia.com/gpu", "1", "the evidence is of one GPU"))
    return resources, choices


def _count_threads(build: SignedBuild, settings: Settings, on_gpu: bool) -> tuple[int, str]:
    if on_gpu:
        return settings.instances, f"one thread for each of {settings.instances} instances"
    if threads := int(settings.options.get("threads", 0)):
        return (
            settings.instances * threads,
            f"{settings.instances} × {threads} threads, instances as configured and threads as measured",
        )
    return build.place.cpu_count or 1, "the machine of the evidence: the runtime chose its threads itself"


def _make_manifest(build: SignedBuild, storage_uri: str, image: str | None, resources: dict[str, str]) -> str:
    """In YAML, whose strings in double quotes are JSON's."""
    amounts = ", ".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in resources.items())
    own_image = f"      image: {json.dumps(image)}\n" if image else ""
    return (
        f"# Upload the content of {MODELS}/ to storageUri, then: kubectl apply -f {MANIFEST}\n"
        f"# Predictions: POST /v2/models/{build.card.name}{'' if build.preprocessing else '_engine'}/infer\n"
        "apiVersion: serving.kserve.io/v1beta1\n"
        "kind: InferenceService\n"
        "metadata:\n"
        f"  name: {json.dumps(_name_service(build.card.name))}\n"
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


def _name_service(model: str) -> str:
    """As a DNS label (RFC 1035), which KServe asks for: `YOLO_v8.n` is `yolo-v8-n`."""
    text = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")[:50].rstrip("-")
    return text if text[:1].isalpha() else f"model-{text}".rstrip("-")
