"""The attestation on a dossier says what its verdict says, of that dossier and artifact, signed by that key."""

from types import SimpleNamespace
from typing import Any

import pytest

from optpipe.core.verdict import Verdict
from optpipe.deploy.attest import FILE, find_attestation_problems, make_statement

pytest.importorskip("securesystemslib", reason="securesystemslib is not installed: the extra `attest`")
POLICY: Any = SimpleNamespace(sha256="0")


def a_verdict(verdict=Verdict.PASS, waived=(), artifact="1"):
    found: Any = SimpleNamespace(
        verdict=verdict,
        waived=waived,
        criteria=(),
        dossier_name="d",
        artifact=SimpleNamespace(id="a", sha256=artifact),
    )
    return found


@pytest.mark.parametrize(
    ("verdict", "waived", "result"),
    [
        (Verdict.PASS, (), "PASSED"),
        (Verdict.PASS, ("a criterion",), "WARNED"),
        (Verdict.INCONCLUSIVE, (), "WARNED"),
        (Verdict.FAIL, (), "FAILED"),
    ],
)
def test_only_an_unqualified_pass_passed(verdict, waived, result):
    statement: Any = make_statement("2", POLICY, a_verdict(verdict, waived))
    assert statement["predicate"]["result"] == result


def test_an_attestation_is_of_its_dossier_artifact_kind_and_verdict(tmp_path):
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
    from securesystemslib.signer import CryptoSigner

    from optpipe.deploy.attest import _sign

    private = Ed25519PrivateKey.generate()
    key = tmp_path / "key.pub.pem"
    key.write_bytes(private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    statement = make_statement("2", POLICY, a_verdict())

    def find_problems(digest, verdict, **changes):
        (tmp_path / FILE).write_bytes(_sign({**statement, **changes}, CryptoSigner(private)))
        return " ".join(find_attestation_problems(tmp_path, digest, verdict, key))

    assert find_problems("2", a_verdict()) == ""
    assert "another dossier" in find_problems("3", a_verdict())
    assert "another artifact" in find_problems("2", a_verdict(artifact="3"))
    assert "says PASSED" in find_problems("2", a_verdict(Verdict.FAIL))
    assert "not a test result" in find_problems("2", a_verdict(), predicateType="another")
