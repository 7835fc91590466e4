"""`--to kserve`: an InferenceService (serving.kserve.io/v1beta1) for the model repository.

KServe mounts the content of `storageUri` at /mnt/models and starts Triton on it, so the content of `models/` must be uploaded. Its
runtime for Triton fills in 1 CPU and 2 GiB where a manifest names no resources; ours names all of them. Source: KServe's
`config/runtimes/kserve-tritonserver.yaml` and its custom resource definition.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from optpipe.core.errors import BadInputError
from optpipe.core.quantity import format_bytes
from optpipe.core.wording import Argument
from optpipe.deploy.records import MODELS, Choice
from optpipe.deploy.signed_build import SignedBuild
from optpipe.models.artifacts.engine_files import hash_engine

MANIFEST = "inference-service.yaml"
SERVER_BYTES = 2 << 30
"""Memory of KServe's runtime for Triton without a model."""
_MIB = 1 << 20
_LONGEST_NAME = 50
"""A DNS label has 63 characters, and KServe adds a suffix."""


@dataclass(frozen=True, slots=True)
class InferenceService:
    """What the user says about the service.

    Raises BadInputError for a missing URI, for one that KServe refuses, and for text that names no image.
    """

    storage_uri: str | None
    """Where `models/` will be uploaded, such as s3://BUCKET/PATH, pvc://CLAIM/PATH, or oci://REGISTRY/IMAGE."""
    image: str | None = None
    """Triton's image; None for the one of KServe's runtime."""

    def __post_init__(self) -> None:
        if self.storage_uri is None:
            raise BadInputError(
                Argument("to", "kserve")
                + " requires "
                + Argument("storage_uri", "URI")
                + ", where models/ will be uploaded: s3://BUCKET/PATH, pvc://…, oci://…"
            )
        if not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\s/]\S*", self.storage_uri):
            raise BadInputError(
                Argument("storage_uri", self.storage_uri)
                + " is not a URI, such as s3://BUCKET/PATH or pvc://CLAIM/PATH"
            )
        if self.image is not None and not re.fullmatch(r"\S+", self.image):
            raise BadInputError(Argument("image", self.image) + " is not the name of an image")


def write_service(
    build: SignedBuild,
    service: InferenceService,
    threads: int,
    triton_backend: str,
    folder: Path,
) -> tuple[Choice, ...]:
    """Writes the manifest of one instance into `folder`; `threads` are those of the measured session, 0 if it chose them itself.

    Requests equal limits, because the measurements had their cores to themselves. Raises BadInputError if KServe's image cannot serve
    the repository.
    """
    if triton_backend == "python" and service.image is None:
        raise BadInputError(
            f"Triton has no backend for {build.artifact.info.backend}: the server needs optpipe, which the image of KServe's "
            "runtime lacks; pass " + Argument("image", "IMAGE")
        )
    choices = [_choose_cpus(build, threads), _choose_memory(build)]
    if build.artifact.info.device == "cuda" or _decodes_on_gpu(build):
        choices.append(Choice("resources.nvidia.com/gpu", "1", "the evidence is of one GPU"))
    resources = {choice.setting.removeprefix("resources."): choice.value for choice in choices}
    manifest = _make_manifest(build, service, resources)
    (folder / MANIFEST).write_text(manifest, encoding="utf-8")

    option = Argument("image")
    own = "no " + option + " was given; the passport says which Triton release it must be"
    image = Choice(
        "image", service.image or "KServe's own", "given by " + option if service.image else own
    )
    return (*choices, image, Choice("storageUri", str(service.storage_uri), "given by the user"))


def _choose_cpus(build: SignedBuild, threads: int) -> Choice:
    decoding = 0 if build.preprocessing is None else build.preprocessing.info.plan.threads
    if build.artifact.info.device == "cuda":
        needed, why = 1, "one thread, which enqueues"
    elif threads:
        needed, why = threads, f"{threads} threads, as measured"
    else:
        needed = build.place.cpu_count or 1
        why = "the machine of the evidence, whose runtime chose its threads itself"
    return Choice("resources.cpu", str(needed + decoding), f"{why}; {decoding} of preprocessing")


def _choose_memory(build: SignedBuild) -> Choice:
    peaks = [
        (recorded.measurement.host_peak_bytes, recorded.run)
        for recorded in build.measured
        if recorded.measurement.host_peak_bytes
    ]
    peak_bytes, run = max(peaks, default=(0, ""))
    server = f"{format_bytes(SERVER_BYTES)} of KServe's runtime for Triton"
    source = (
        f"{server} and {format_bytes(peak_bytes)}, the largest of run {run}"
        if peak_bytes
        else f"{server} alone: nothing was measured"
    )
    amount = f"{math.ceil((SERVER_BYTES + peak_bytes) / _MIB)}Mi"
    return Choice("resources.memory", amount, source)


def _decodes_on_gpu(build: SignedBuild) -> bool:
    return build.preprocessing is not None and build.preprocessing.info.plan.device == "gpu"


def name_service(model: str) -> str:
    """A DNS label (RFC 1035), as KServe demands: lower case, digits, and hyphens, with a letter first."""
    name = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")
    name = name if name[:1].isalpha() else f"model-{name}"
    return name[:_LONGEST_NAME].rstrip("-")


def _make_manifest(
    build: SignedBuild, service: InferenceService, resources: Mapping[str, str]
) -> str:
    """Strings are written as JSON, which is valid YAML."""
    amounts = ", ".join(
        f"{json.dumps(name)}: {json.dumps(value)}" for name, value in resources.items()
    )
    image = f"      image: {json.dumps(service.image)}\n" if service.image else ""
    return (
        f"# Upload the content of {MODELS}/ to storageUri, then: kubectl apply -f {MANIFEST}\n"
        "apiVersion: serving.kserve.io/v1beta1\n"
        "kind: InferenceService\n"
        "metadata:\n"
        f"  name: {json.dumps(name_service(build.card.name))}\n"
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
        f"      storageUri: {json.dumps(service.storage_uri)}\n"
        f"{image}"
        "      resources:\n"
        f"        requests: {{{amounts}}}\n"
        f"        limits: {{{amounts}}}\n"
    )
