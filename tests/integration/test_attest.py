"""A verdict as a signed in-toto statement, held against libraries that are not ours."""

import base64
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from optpipe.signoff.verify import FILE
from tests.integration.conftest import optpipe

pytest.importorskip(
    "securesystemslib", reason="securesystemslib is not installed: the extra `attest`"
)


@pytest.fixture(scope="module")
def attested(signed, tmp_path_factory):
    folder = tmp_path_factory.mktemp("attest")
    found = signed(folder / "signed")
    for name in ("key", "other"):
        subprocess.run(
            ["openssl", "genpkey", "-algorithm", "ed25519", "-out", folder / f"{name}.pem"],
            check=True,
        )
        subprocess.run(
            [
                "openssl",
                "pkey",
                "-in",
                folder / f"{name}.pem",
                "-pubout",
                "-out",
                folder / f"{name}.pub.pem",
            ],
            check=True,
        )
    optpipe(
        "signoff",
        "attest",
        found.dossier,
        "--key",
        "key.pem",
        "--output",
        "attestations",
        cwd=folder,
    ).expect(0)
    return folder


def payload(path):
    return json.loads(base64.b64decode(json.loads(path.read_text())["payload"]))


def verify(inside, folder, attestations, key="key.pub.pem"):
    words = (
        "verify",
        folder / "signed" / "dossier",
        "--attestations",
        attestations,
        "--public-key",
        folder / key,
    )
    return inside(*words, cwd=folder)


def test_the_statement_is_valid_for_the_library_of_its_format(attested):
    from google.protobuf import json_format
    from in_toto_attestation.predicates.test_result.v0 import test_result_pb2
    from in_toto_attestation.v1 import statement_pb2
    from in_toto_attestation.v1.statement import Statement

    (path,) = (attested / "attestations").iterdir()
    Statement.copy_from_pb(
        json_format.ParseDict(payload(path), statement_pb2.Statement())
    ).validate()
    result = json_format.ParseDict(payload(path)["predicate"], test_result_pb2.TestResult())
    assert result.result == "PASSED"
    assert "accuracy.maximum_drop" in list(result.passed_tests)


def test_verify_checks_signature_and_digests(attested, inside, tmp_path):
    right = verify(inside, attested, attested / "attestations")
    assert (right.status, "attested with" in right.stdout, "not signed" in right.stdout) == (
        0,
        True,
        False,
    )
    other = verify(inside, attested, attested / "attestations", "other.pub.pem")
    assert other.status == 2
    assert "is not signed by this key" in other.stdout + other.stderr
    changed = Path(shutil.copytree(attested / "attestations", tmp_path / "changed"))
    envelope = json.loads((changed / FILE).read_text())
    text = (
        base64.b64decode(envelope["payload"])
        .replace(b"WARNED", b"PASSED")
        .replace(b"v0.1", b"v0.2")
    )
    (changed / FILE).write_text(
        json.dumps({**envelope, "payload": base64.b64encode(text).decode()})
    )
    ran = verify(inside, attested, changed)
    assert ran.status == 2
    assert "is not signed by this key, or was changed" in ran.stdout + ran.stderr


@pytest.mark.parametrize("key", ["missing.pem", "signed/policy.toml"])
def test_bad_keys_are_refused_and_nothing_is_written(attested, inside, tmp_path, key):
    words = ("--key", key, "--output", tmp_path / "new")
    ran = inside("signoff", "attest", attested / "signed/dossier", *words, cwd=attested).expect(2)
    assert "openssl genpkey" in ran.stderr
    assert not (tmp_path / "new").exists()
