"""The CycloneDX ML-BOM of a signed-off build: the model card that the field's tools read, filled from the verdict.

CycloneDX 1.6 (ECMA-424): a component of type `machine-learning-model` whose `modelCard` has the data sets and, for each judged
figure, `performanceMetrics` with its confidence interval. Nothing in it is measured or judged here.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from optpipe import __version__
from optpipe.core.verdict import CriterionResult, Verdict, VerdictRecord
from optpipe.evaluate.recompute import read_evaluation
from optpipe.signoff.dossier import Dossier
from optpipe.workspace.seal import SUMS

BILL = "bom.cdx.json"
SCHEMA = "http://cyclonedx.org/schema/bom-1.6.schema.json"


def make_bill(dossier: Dossier, verdict: VerdictRecord) -> bytes:
    """The bill as JSON, which follows from the dossier alone: the same dossier gives the same bytes."""
    digest = dossier.files.hash(SUMS)
    datasets = dict(_list_datasets(dossier))
    bill = {
        "$schema": SCHEMA,
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": uuid5(NAMESPACE_URL, f"sha256:{digest}").urn,
        "version": 1,
        "metadata": {
            "timestamp": verdict.created_utc,
            "tools": {
                "components": [{"type": "application", "name": "optpipe", "version": __version__}]
            },
            "component": _describe_build(dossier, verdict, digest, list(datasets)),
        },
        "components": list(datasets.values()),
    }
    return json.dumps(bill, indent=1, ensure_ascii=False).encode() + b"\n"


def _describe_build(
    dossier: Dossier, verdict: VerdictRecord, digest: str, datasets: list[str]
) -> dict[str, Any]:
    artifact, info = verdict.artifact, dossier.artifact.info
    properties = {
        "optpipe:result": _summarize(verdict),
        "optpipe:verdict": verdict.verdict,
        "optpipe:policy": verdict.policy.name,
        "optpipe:policy-sha256": verdict.policy.sha256,
        "optpipe:confidence": f"{dossier.policy.confidence:g}",
        "optpipe:backend": artifact.backend,
        "optpipe:precision": artifact.precision,
        "optpipe:device": info.device,
        "optpipe:weights": artifact.weights or "unknown",
        "optpipe:engine-sha256": artifact.sha256 or "unknown",
        **{
            f"optpipe:waived:{criterion.name}": str(criterion.waived)
            for criterion in verdict.waived
        },
    }
    single = artifact.sha256 is not None and not info.more_files
    return {
        "type": "machine-learning-model",
        "bom-ref": f"artifact-{artifact.id}",
        "name": verdict.model,
        "version": artifact.id,
        "description": f"{artifact.backend} {artifact.precision} build, {verdict.verdict} by {verdict.policy.name}",
        **({"hashes": [_hash(str(artifact.sha256))]} if single else {}),
        "externalReferences": [
            {
                "type": "evidence",
                "url": f"urn:sha256:{digest}",
                "comment": f"{SUMS} of the dossier {verdict.dossier_name}",
                "hashes": [_hash(digest)],
            }
        ],
        "modelCard": {
            "modelParameters": {
                **_describe_task(dossier),
                "datasets": [{"ref": name} for name in datasets],
            },
            "quantitativeAnalysis": {
                "performanceMetrics": [_describe_metric(criterion) for criterion in verdict.criteria
                                       if isinstance(criterion.observed, float | int)],
            },
            "considerations": {"technicalLimitations": list(_list_limitations(verdict))},
        },
        "properties": [
            {"name": name, "value": str(value)}
            for name, value in (
                *properties.items(),
                *((f"optpipe:criterion:{criterion.name}", criterion.verdict) for criterion in verdict.criteria),
            )
        ],
    }  # fmt: skip


def _summarize(verdict: VerdictRecord) -> str:
    """PASSED for nothing but a PASS without waivers: what a cluster asks for before it runs a model."""
    if verdict.is_unqualified_pass:
        return "PASSED"
    return "FAILED" if verdict.verdict is Verdict.FAIL else "WARNED"


def _hash(sha256: str) -> dict[str, str]:
    return {"alg": "SHA-256", "content": sha256}


def _describe_metric(criterion: CriterionResult) -> dict[str, Any]:
    """A judged figure in its base unit; an exact one has no interval."""
    bounds = (
        {}
        if criterion.ci is None
        else dict(zip(("lowerBound", "upperBound"), criterion.ci, strict=True))
    )
    unit = f" [{criterion.unit}]" if criterion.unit else ""
    return {
        "type": f"{criterion.name}{unit}",
        "value": repr(criterion.observed),
        **({"slice": criterion.about} if criterion.about else {}),
        **(
            {"confidenceInterval": {name: repr(value) for name, value in bounds.items()}}
            if bounds
            else {}
        ),
    }


def _list_limitations(verdict: VerdictRecord) -> Iterator[str]:
    yield from (f"the verdict expires if {event}" for event in verdict.expires_if)
    yield from (limit.message for limit in verdict.loosened)
    yield from (
        f"{criterion.name} is {criterion.verdict} and was waived: {criterion.waived}"
        for criterion in verdict.waived
    )


def _describe_task(dossier: Dossier) -> Mapping[str, str]:
    tasks = {read_evaluation(run).task for run in dossier.runs if run.kind == "evaluate"}
    return {"task": ", ".join(sorted(tasks))} if tasks else {}


def _list_datasets(dossier: Dossier) -> Iterator[tuple[str, dict[str, Any]]]:
    """Components by reference: the data of evaluations, and the inputs of the comparison of outputs."""
    for run in dossier.runs:
        if run.kind == "evaluate":
            data = read_evaluation(run).dataset
            reference = f"data-{data.sha256[:16]}"
            yield (
                reference,
                _describe_data(
                    reference, data.name, f"{data.count:,} samples of {data.kind}", data.sha256
                ),
            )
    if dossier.verification is not None and (about := dossier.verification.info.data):
        reference = f"verification-{dossier.verification.id}"
        count = dossier.verification.info.samples
        yield reference, _describe_data(reference, about, f"{count:,} samples", None)


def _describe_data(
    reference: str, name: str, description: str, sha256: str | None
) -> dict[str, Any]:
    known = {"properties": [{"name": "optpipe:samples-sha256", "value": sha256}]} if sha256 else {}
    data = {"type": "dataset", "name": name, "description": description}
    return {"type": "data", "bom-ref": reference, "name": name, "data": [data], **known}
