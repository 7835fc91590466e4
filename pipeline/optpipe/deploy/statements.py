"""A verdict in the formats of the ecosystem: in-toto Statements (test-result, SVR) and a CycloneDX bill of materials.

Sources: in-toto/attestation spec v1 with predicates test-result v0.1 and svr v0.1; CycloneDX 1.6, `modelCard`. None of them has
an INCONCLUSIVE: it is WARNED in a test result, and an SVR has no property then, so that a policy denies.
"""

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from optpipe import __version__
from optpipe.core.environment import Environment
from optpipe.core.verdict import CriterionResult, Verdict, VerdictRecord
from optpipe.signoff.policy import Policy
from optpipe.workspace.file_names import POLICY

STATEMENT = "https://in-toto.io/Statement/v1"
TEST_RESULT = "https://in-toto.io/attestation/test-result/v0.1"
SVR = "https://in-toto.io/attestation/svr/v0.1"
CYCLONEDX = "https://cyclonedx.org/bom"
VERIFIER = f"pkg:generic/optpipe@{__version__}"
PASS_PROPERTY = "OPTPIPE_SIGNOFF_PASS"
WAIVED_PROPERTY = "OPTPIPE_SIGNOFF_PASS_WITH_WAIVERS"

Plain = dict[str, Any]
"""A JSON object of somebody else's schema."""


def list_statements(digest: str, policy: Policy, verdict: VerdictRecord, place: Environment) -> Mapping[str, Plain]:
    """The statements by file name on a dossier whose list of hashes has the SHA-256 `digest`, measured at `place`."""
    subject = [
        {"name": f"artifact-{verdict.artifact.id}", "digest": {"sha256": verdict.artifact.sha256}},
        {"name": verdict.dossier_name, "digest": {"sha256": digest}},
    ]

    def state(predicate_type: str, predicate: Plain) -> Plain:
        return {"_type": STATEMENT, "subject": subject, "predicateType": predicate_type, "predicate": predicate}

    return {
        "test-result": state(TEST_RESULT, make_test_result(policy, verdict)),
        "svr": state(SVR, make_svr(verdict)),
        "ml-bom": state(CYCLONEDX, make_bom(digest, verdict, place)),
    }


def get_result(verdict: VerdictRecord) -> str:
    """PASSED, FAILED or WARNED; a PASS with waived criteria is WARNED."""
    if verdict.verdict is Verdict.FAIL:
        return "FAILED"
    return "PASSED" if verdict.verdict is Verdict.PASS and not verdict.waived else "WARNED"


def make_test_result(policy: Policy, verdict: VerdictRecord) -> Plain:
    """The predicate test-result v0.1: a waived criterion is among the warned tests."""
    lists: dict[str, list[str]] = {"passedTests": [], "warnedTests": [], "failedTests": []}
    for one in verdict.criteria:
        lists[_name_list(one)].append(one.name)
    return {
        "result": get_result(verdict),
        "configuration": [{"name": POLICY, "digest": {"sha256": policy.sha256}}],
        **lists,
    }


def _name_list(one: CriterionResult) -> str:
    if one.waived:
        return "warnedTests"
    return {Verdict.PASS: "passedTests", Verdict.FAIL: "failedTests"}.get(one.verdict, "warnedTests")


def make_svr(verdict: VerdictRecord) -> Plain:
    """The predicate svr v0.1: what a policy of a cluster asks for. No property but for a PASS."""
    properties = []
    if verdict.verdict is Verdict.PASS:
        properties = [WAIVED_PROPERTY if verdict.waived else PASS_PROPERTY]
    return {"verifier": {"id": VERIFIER}, "timeCreated": _format_time(verdict.created_utc), "properties": properties}


def _format_time(text: str) -> str:
    return text.replace("+00:00", "Z")


def make_bom(digest: str, verdict: VerdictRecord, place: Environment) -> Plain:
    """A CycloneDX 1.6 ML-BOM: the artifact with every judged figure and its interval, and the packages it was measured with."""
    artifact = verdict.artifact
    model = {
        "type": "machine-learning-model",
        "bom-ref": f"artifact-{artifact.id}",
        "name": verdict.model,
        "version": artifact.id,
        "hashes": [{"alg": "SHA-256", "content": artifact.sha256}],
        "properties": [
            {"name": "optpipe:backend", "value": artifact.backend},
            {"name": "optpipe:precision", "value": artifact.precision},
            {"name": "optpipe:verdict", "value": str(verdict.verdict)},
            {"name": "optpipe:dossier", "value": verdict.dossier_name},
        ],
        "modelCard": {"quantitativeAnalysis": {"performanceMetrics": list_metrics(verdict.criteria)}},
    }
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid5(NAMESPACE_URL, digest)}",
        "version": 1,
        "metadata": {
            "timestamp": _format_time(verdict.created_utc),
            "tools": {"components": [{"type": "application", "name": "optpipe", "version": verdict.optpipe}]},
            "component": model,
        },
        "components": [
            {
                "type": "library",
                "name": name,
                "version": version,
                "purl": f"pkg:pypi/{name}@{version.replace('+', '%2B')}",
            }
            for name, version in sorted(place.packages.items())
        ],
    }


def list_metrics(criteria: Sequence[CriterionResult]) -> list[Plain]:
    """The criteria that have a figure, in the base unit that the type names."""
    found = []
    for one in criteria:
        if isinstance(one.observed, float) and one.observed == one.observed:
            metric: Plain = {"type": f"{one.name} ({one.unit})" if one.unit else one.name, "value": repr(one.observed)}
            if one.about:
                metric["slice"] = one.about
            if one.ci is not None:
                metric["confidenceInterval"] = {"lowerBound": repr(one.ci[0]), "upperBound": repr(one.ci[1])}
            found.append(metric)
    return found
