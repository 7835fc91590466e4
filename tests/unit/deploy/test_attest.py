"""Attestations on a dossier are of the kind that their file names say."""

import shutil
from types import SimpleNamespace
from typing import Any

import pytest

from optpipe.core.verdict import Verdict
from optpipe.deploy.attest import KINDS, find_attestation_problems
from optpipe.deploy.statements import STATEMENT, TEST_RESULT, make_svr

pytest.importorskip("securesystemslib", reason="securesystemslib is not installed: the extra `attest`")
VERDICT: Any = SimpleNamespace(
    verdict=Verdict.PASS,
    waived=(),
    created_utc="2026-11-23T00:00:00+00:00",
    artifact=SimpleNamespace(id="a", sha256="1"),
)
PREDICATES = {
    "test-result": {"result": "PASSED"},
    "svr": make_svr(VERDICT),
    "ml-bom": {"metadata": {"component": {"version": "a"}}},
}


def test_a_statement_of_another_kind_takes_nobodys_place(tmp_path):
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
    from securesystemslib.signer import CryptoSigner

    from optpipe.deploy.attest import _sign

    private = Ed25519PrivateKey.generate()
    key = tmp_path / "key.pub.pem"
    key.write_bytes(private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    digests = "1", "2"
    subject = [{"name": each, "digest": {"sha256": each}} for each in digests]
    for name, kind in KINDS.items():
        statement = {"_type": STATEMENT, "subject": subject, "predicateType": kind, "predicate": PREDICATES[name]}
        (tmp_path / f"{name}.dsse.json").write_bytes(_sign(statement, CryptoSigner(private)))
    assert list(find_attestation_problems(tmp_path, digests[1], VERDICT, key)) == []
    shutil.copyfile(tmp_path / "test-result.dsse.json", tmp_path / "svr.dsse.json")
    assert list(find_attestation_problems(tmp_path, digests[1], VERDICT, key)) == [
        f"svr.dsse.json: holds {TEST_RESULT}, not the svr"
    ]
