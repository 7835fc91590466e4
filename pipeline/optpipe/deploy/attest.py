"""The attestation on a dossier: an in-toto Statement in a DSSE envelope that a key signed, offline; and its verification.

The predicate is test-result v0.1 (in-toto/attestation spec v1), which has no INCONCLUSIVE: that is WARNED, as is a PASS with waived
criteria. Signing is securesystemslib's. The file lies beside the dossier, whose seal it names by its hash.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optpipe.core.errors import BadInputError, MissingError, first_line, read_as_user_file
from optpipe.core.verdict import Verdict, VerdictRecord
from optpipe.signoff.policy import Policy
from optpipe.signoff.verify import verify_dossier
from optpipe.workspace.file_names import POLICY
from optpipe.workspace.files import write_bytes
from optpipe.workspace.places import move_folder, require_unused_path
from optpipe.workspace.seal import SUMS
from optpipe.workspace.store import Store

STATEMENT = "https://in-toto.io/Statement/v1"
TEST_RESULT = "https://in-toto.io/attestation/test-result/v0.1"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
FILE = "test-result.dsse.json"
NEW_KEY = "openssl genpkey -algorithm ed25519 -out key.pem && openssl pkey -in key.pem -pubout -out key.pub.pem"


@dataclass(frozen=True, slots=True)
class AttestRecord:
    """The JSON document of `optpipe signoff attest`."""

    folder: str
    dossier: str
    dossier_sha256: str
    verdict: Verdict
    result: str
    """PASSED, WARNED or FAILED."""
    files: tuple[str, ...]
    key: str


def attest_dossier(dossier: Path, key: Path, output: Path, store: Store) -> AttestRecord:
    """Verifies the dossier and writes its signed statement to the new folder `output`.

    Raises BadInputError where the dossier fails verification, the key cannot be read, or `output` exists or cannot be made.
    """
    require_unused_path(output)
    signer = _open_signer(key)
    content, verdict, _ = verify_dossier(dossier).require_intact()
    digest = content.files.hash(SUMS)
    with store.scratch("attest") as scratch:
        statement = make_statement(digest, content.policy, verdict)
        write_bytes(scratch / "attestations" / FILE, _sign(statement, signer))
        move_folder(scratch / "attestations", output)
    return AttestRecord(
        folder=str(output),
        dossier=verdict.dossier_name,
        dossier_sha256=digest,
        verdict=verdict.verdict,
        result=_name_result(verdict),
        files=(FILE,),
        key=signer.public_key.keyid,
    )


def make_statement(digest: str, policy: Policy, verdict: VerdictRecord) -> dict[str, object]:
    """The statement on a dossier whose list of hashes has the SHA-256 `digest`; a waived criterion is among the warned tests."""
    lists: dict[str, list[str]] = {"passedTests": [], "warnedTests": [], "failedTests": []}
    names = {Verdict.PASS: "passedTests", Verdict.FAIL: "failedTests"}
    for one in verdict.criteria:
        lists["warnedTests" if one.waived else names.get(one.verdict, "warnedTests")].append(one.name)
    configuration = [{"name": POLICY, "digest": {"sha256": policy.sha256}}]
    return {
        "_type": STATEMENT,
        "subject": [
            {"name": f"artifact-{verdict.artifact.id}", "digest": {"sha256": verdict.artifact.sha256}},
            {"name": verdict.dossier_name, "digest": {"sha256": digest}},
        ],
        "predicateType": TEST_RESULT,
        "predicate": {"result": _name_result(verdict), "configuration": configuration, **lists},
    }


def _name_result(verdict: VerdictRecord) -> str:
    if verdict.verdict is Verdict.FAIL:
        return "FAILED"
    return "PASSED" if verdict.verdict is Verdict.PASS and not verdict.waived else "WARNED"


def _sign(statement: object, signer: Any) -> bytes:
    from securesystemslib.dsse import Envelope

    envelope = Envelope(json.dumps(statement, indent=1).encode(), PAYLOAD_TYPE, {})
    envelope.sign(signer)
    return json.dumps(envelope.to_dict(), indent=1).encode() + b"\n"


def _require_library() -> None:
    try:
        import cryptography  # noqa: F401
        import securesystemslib  # noqa: F401
    except ImportError as error:
        raise MissingError(
            f"signing needs securesystemslib ({error}); install it with `pip install 'optpipe[attest]'`"
        ) from error


def _open_signer(key: Path) -> Any:
    _require_library()
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from securesystemslib.signer import CryptoSigner

    if not key.is_file():
        raise BadInputError(f"no key at {key}; create one with: {NEW_KEY}")
    with read_as_user_file(key, "a private key in PEM without a passphrase", f"create one with: {NEW_KEY}"):
        return CryptoSigner(load_pem_private_key(key.read_bytes(), None))


def _open_public_key(key: Path) -> Any:
    _require_library()
    from cryptography.hazmat.primitives.serialization import load_pem_public_key
    from securesystemslib.signer import SSlibKey

    if not key.is_file():
        raise BadInputError(f"no public key at {key}")
    with read_as_user_file(key, "a public key in PEM", f"create a pair with: {NEW_KEY}"):
        return SSlibKey.from_crypto(load_pem_public_key(key.read_bytes()))


def find_attestation_problems(folder: Path, digest: str, verdict: VerdictRecord | None, key: Path) -> Iterator[str]:
    """What is wrong with the attestation in `folder`, one line each: its signature, its digests, or what it states.

    `digest` is the SHA-256 of the dossier's list of hashes.
    """
    public = _open_public_key(key)
    if not (folder / FILE).is_file():
        raise BadInputError(f"{folder} has no {FILE}; optpipe signoff attest writes it")
    statement = _read_signed(folder / FILE, public)
    if isinstance(statement, str):
        yield f"{FILE}: {statement}"
        return
    if statement["predicateType"] != TEST_RESULT:
        yield f"{FILE}: holds {statement['predicateType']}, not a test result"
        return
    digests = {each["digest"].get("sha256") for each in statement["subject"]}
    if digest not in digests:
        yield f"{FILE}: is about another dossier"
    elif verdict is not None:
        if verdict.artifact.sha256 not in digests:
            yield f"{FILE}: is about another artifact"
        if (found := statement["predicate"]["result"]) != _name_result(verdict):
            yield f"{FILE}: says {found}, the recomputed verdict is {verdict.verdict}"


def _read_signed(path: Path, public: Any) -> Any:
    """The statement in an envelope that the key signed, or what is wrong with it."""
    from securesystemslib.dsse import Envelope
    from securesystemslib.exceptions import FormatError, VerificationError

    with read_as_user_file(path, "a DSSE envelope"):
        envelope = Envelope.from_dict(json.loads(path.read_text(encoding="utf-8")))
        try:
            envelope.verify([public], 1)
        except (VerificationError, FormatError) as error:
            return f"is not signed by this key, or was changed ({first_line(error)})"
        if envelope.payload_type != PAYLOAD_TYPE:
            return f"holds {envelope.payload_type}, not an in-toto statement"
        return json.loads(envelope.payload)
