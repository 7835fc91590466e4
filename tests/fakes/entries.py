"""Infos of store entries, filled where a test does not care."""

from dataclasses import dataclass
from typing import Any, ClassVar

from optpipe.core.entries import ArtifactInfo, ReferenceInfo, VerificationInfo, WeightsRecord
from optpipe.core.events import SilentListener
from optpipe.core.precision import (
    Budget,
    KeptLayer,
    LayerType,
    MixedPrecision,
    Precision,
    PrecisionCost,
    PrecisionProof,
    PrecisionShare,
)

HASH = "a1b2c3d4e5f6" + "0" * 52
WRONG = PrecisionProof(
    PrecisionShare({}, {"fp16": 0.6, "fp32": 0.4}, 1000), False, "60.0% of MACs in fp16, 80% required",
    (LayerType("fc", "Gemm", "fp32", 400),), 3,
)  # fmt: skip

MIXED = MixedPrecision(
    Budget(0.5, "points"), "top1", 500, PrecisionCost(62.61, 0.002, (-0.001, 0.005)),
    (KeptLayer("norm/Pow", "Pow", 0, "alone turns outputs into NaN or Inf"),
     KeptLayer("conv5", "Conv", 37_700_000, "its weights come near the end of FP16's range")), 424_000_000,
)  # fmt: skip


@dataclass(frozen=True)
class Thing:
    """An entry of no verb."""

    KIND: ClassVar[str] = "thing"
    answer: int = 42


def proof(precision="fp32", share=1.0, *, proven=True, reason="as asked"):
    macs = {precision: share} if share == 1.0 else {precision: share, "fp32": 1 - share}
    return PrecisionProof(PrecisionShare({}, macs, 1000), proven, reason, (), 0)


def artifact_info(**changes: Any) -> ArtifactInfo:
    precision = Precision(changes.pop("precision", "fp32"))
    known = {
        "model": "digits",
        "source": "card:digits",
        "backend": "onnxruntime",
        "precision": precision,
        "device": "cpu",
        "file": "model.onnx",
        "weights": WeightsRecord("file", "0" * 64),
        "precision_proof": proof(precision),
        "packages": ("onnxruntime-gpu",),
    }
    return ArtifactInfo(**{**known, **changes})


def put(store, info, recipe, parents=(), files=None):
    """A stored entry made of other entries, with the content of its files by name."""

    def make(folder):
        for name, content in (files or {}).items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
        return info

    ids = tuple(each.id for each in parents)
    return store.produce(type(info), recipe, make, parents=ids, listener=SilentListener())[0]


def put_verified(store, model, artifact, samples, files=None):
    """The reference of so many samples and the verification of the artifact against it."""
    info = ReferenceInfo("images", samples, "0" * 64, "source model", ())
    reference = put(store, info, {"of": model.id, "samples": samples}, (model,), files)
    checked = VerificationInfo("source model", samples, 0.1, 61.2, None, None, None, (), 80, True)
    recipe = {"artifact": artifact.id, "reference": reference.id}
    return reference, put(store, checked, recipe, (artifact, reference))


def thing_of(kind: str) -> type[Thing]:
    """A class for entries of `kind` that say nothing."""
    return type("ThingOfKind", (Thing,), {"KIND": kind})
