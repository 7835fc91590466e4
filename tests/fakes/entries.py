"""Infos of store entries, filled where a test does not care."""

from dataclasses import dataclass
from typing import Any, ClassVar

from optpipe.core.entries import ArtifactInfo, WeightsRecord
from optpipe.core.precision import Precision, PrecisionProof, PrecisionShare


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
    }
    return ArtifactInfo(**{**known, **changes})


def thing_of(kind: str) -> type[Thing]:
    """A class for entries of `kind` that say nothing."""
    return type("ThingOfKind", (Thing,), {"KIND": kind})
