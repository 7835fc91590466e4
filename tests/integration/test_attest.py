"""A verdict as signed in-toto statements and a CycloneDX bill of materials, held against libraries that are not ours."""

import base64
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from optpipe.core.environment import Environment
from optpipe.core.records import read_record
from optpipe.core.verdict import Verdict, VerdictRecord
from optpipe.deploy.statements import list_statements
from optpipe.signoff.policy import policy_from_toml
from tests.integration.conftest import optpipe

pytest.importorskip("securesystemslib", reason="securesystemslib is not installed: the extra `attest`")


@pytest.fixture(scope="module")
def attested(signed, tmp_path_factory):
    folder = tmp_path_factory.mktemp("attest")
    found = signed(folder / "signed")
    for name in ("key", "other"):
        subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", folder / f"{name}.pem"], check=True)
        subprocess.run(
            ["openssl", "pkey", "-in", folder / f"{name}.pem", "-pubout", "-out", folder / f"{name}.pub.pem"],
            check=True,
        )
    ran = optpipe("signoff", "attest", found.dossier, "--key", folder / "key.pem", "--output", folder / "attestations")
    assert ran.status == 0, ran.stderr
    return folder


def payload(path):
    return json.loads(base64.b64decode(json.loads(path.read_text())["payload"]))


def verify(inside, folder, attestations, key="key.pub.pem"):
    words = ("verify", folder / "signed" / "dossier", "--attestations", attestations, "--public-key", folder / key)
    return inside(*words, cwd=folder)


def test_the_statements_are_valid_for_the_libraries_of_their_formats(attested):
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator
    from google.protobuf import json_format
    from in_toto_attestation.predicates.test_result.v0 import test_result_pb2
    from in_toto_attestation.v1 import statement_pb2
    from in_toto_attestation.v1.statement import Statement

    for path in (attested / "attestations").iterdir():
        Statement.copy_from_pb(json_format.ParseDict(payload(path), statement_pb2.Statement())).validate()
    result = payload(attested / "attestations" / "test-result.dsse.json")["predicate"]
    assert json_format.ParseDict(result, test_result_pb2.TestResult()).result == "PASSED"
    bom = payload(attested / "attestations" / "ml-bom.dsse.json")["predicate"]
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(bom)) is None
    metrics = bom["metadata"]["component"]["modelCard"]["quantitativeAnalysis"]["performanceMetrics"]
    drop = next(each for each in metrics if each["type"].startswith("accuracy.maximum_drop"))
    assert float(drop["confidenceInterval"]["lowerBound"]) < float(drop["confidenceInterval"]["upperBound"])
    assert payload(attested / "attestations" / "svr.dsse.json")["predicate"]["properties"] == ["OPTPIPE_SIGNOFF_PASS"]


def test_verify_checks_signature_and_digests(attested, inside, tmp_path):
    right = verify(inside, attested, attested / "attestations")
    assert (right.status, "attested with" in right.stdout, "not signed" in right.stdout) == (0, True, False)
    other = verify(inside, attested, attested / "attestations", "other.pub.pem")
    assert other.status == 2
    assert "is not signed by this key" in other.stdout + other.stderr
    changed = Path(shutil.copytree(attested / "attestations", tmp_path / "changed"))
    envelope = json.loads((changed / "svr.dsse.json").read_text())
    text = base64.b64decode(envelope["payload"]).replace(b"OPTPIPE_SIGNOFF_PASS", b"OPTPIPE_SIGNOFF_BEST")
    (changed / "svr.dsse.json").write_text(json.dumps({**envelope, "payload": base64.b64encode(text).decode()}))
    (changed / "ml-bom.dsse.json").unlink()
    ran = verify(inside, attested, changed)
    assert ran.status == 2
    assert "svr.dsse.json: is not signed by this key, or was changed" in ran.stdout + ran.stderr
    assert "ml-bom.dsse.json: missing" in ran.stdout + ran.stderr


@pytest.mark.parametrize("words", [("--key", "missing.pem"), ("--key", "signed/policy.toml")])
def test_bad_keys_are_refused_and_nothing_is_written(attested, inside, tmp_path, words):
    ran = inside("signoff", "attest", attested / "signed/dossier", *words, "--output", tmp_path / "new", cwd=attested)
    assert ran.status == 2
    assert "openssl genpkey" in ran.stderr
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("verdict", "result", "properties"),
    [(Verdict.FAIL, "FAILED", []), (Verdict.INCONCLUSIVE, "WARNED", []), (Verdict.PASS, "PASSED", ["OPTPIPE_SIGNOFF_PASS"])],
)  # fmt: skip
def test_inconclusive_is_a_warning_and_no_property(attested, verdict, result, properties):
    from dataclasses import replace

    folder = attested / "signed" / "dossier"
    policy = policy_from_toml((folder / "policy.toml").read_bytes())
    record = replace(read_record(folder / "verdict.json", VerdictRecord), verdict=verdict)
    found = list_statements("0", policy, record, Environment())
    assert found["test-result"]["predicate"]["result"] == result
    assert found["svr"]["predicate"]["properties"] == properties
