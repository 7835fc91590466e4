"""The attestation on a dossier: an in-toto Statement in a signed DSSE envelope, made and verified offline.

The predicate is test-result v0.1 (in-toto/attestation spec v1), which has no INCONCLUSIVE: that is WARNED, as is a PASS with
waived criteria. securesystemslib signs. The file names the dossier's seal by its hash and lies outside the dossier.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optpipe.core.errors import BadInputError, MissingError, first_line, read_as_user_file
from optpipe.core.records import find_disagreements
from optpipe.core.verdict import Verdict, VerdictRecord
from optpipe.signoff.policy import Policy
from optpipe.signoff.verify import VerifiedDossier, verify_dossier
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
    folder: str
    dossier: str
    dossier_sha256: str
    verdict: Verdict
    result: str
    """PASSED, WARNED or FAILED."""
    files: tuple[str, ...]
    key: str


def attest_dossier(dossier: Path, key: Path, output: Path, store: Store) -> AttestRecord:
    """Raises BadInputError if the dossier fails verification, the key cannot be read, or `output` exists."""
    require_unused_path(output)
    signer = _open_key(key, public=False)
    content, verdict, _ = verify_dossier(dossier).require_intact()
    digest = content.files.hash(SUMS)
    statement = make_statement(digest, content.policy, verdict)
    with store.scratch("attest") as scratch:
        write_bytes(scratch / "attestations" / FILE, sign_statement(statement, signer))
        move_folder(scratch / "attestations", output)
    result, name = statement["predicate"]["result"], verdict.dossier_name
    return AttestRecord(str(output), name, digest, verdict.verdict, result, (FILE,), signer.public_key.keyid)


def make_statement(digest: str, policy: Policy, verdict: VerdictRecord) -> Mapping[str, Any]:
    """The statement on a dossier; `digest` is the SHA-256 of its list of hashes. Waived criteria are among the warned tests."""
    results = {Verdict.PASS: "PASSED", Verdict.FAIL: "FAILED"}
    tests: dict[str, list[str]] = {"PASSED": [], "WARNED": [], "FAILED": []}
    for one in verdict.criteria:
        tests["WARNED" if one.waived else results.get(one.verdict, "WARNED")].append(one.name)
    qualified = verdict.verdict is Verdict.PASS and verdict.waived
    return {
        "_type": STATEMENT,
        "subject": [
            {"name": f"artifact-{verdict.artifact.id}", "digest": {"sha256": verdict.artifact.sha256}},
            {"name": verdict.dossier_name, "digest": {"sha256": digest}},
        ],
        "predicateType": TEST_RESULT,
        "predicate": {
            "result": "WARNED" if qualified else results.get(verdict.verdict, "WARNED"),
            "configuration": [{"name": POLICY, "digest": {"sha256": policy.sha256}}],
            **{f"{name.lower()}Tests": each for name, each in tests.items()},
        },
    }


def sign_statement(statement: object, signer: Any) -> bytes:
    """The envelope as JSON; `signer` is a signer of securesystemslib."""
    from securesystemslib.dsse import Envelope

    envelope = Envelope(json.dumps(statement, indent=1).encode(), PAYLOAD_TYPE, {})
    envelope.sign(signer)
    return json.dumps(envelope.to_dict(), indent=1).encode() + b"\n"


def _open_key(path: Path, *, public: bool) -> Any:
    try:
        from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key
        from securesystemslib.signer import CryptoSigner, SSlibKey
    except ImportError as error:
        raise MissingError(
            f"signing needs securesystemslib ({error}); install it with `pip install 'optpipe[attest]'`"
        ) from error
    what = "a public key in PEM" if public else "a private key in PEM without a passphrase"
    if not path.is_file():
        raise BadInputError(f"{path}: no such file; expected {what}\ncreate a pair with: {NEW_KEY}")
    with read_as_user_file(path, what, f"create a pair with: {NEW_KEY}"):
        content = path.read_bytes()
        return (
            SSlibKey.from_crypto(load_pem_public_key(content))
            if public
            else CryptoSigner(load_pem_private_key(content, None))
        )


def find_attestation_problems(folder: Path, checked: VerifiedDossier, key: Path) -> Iterator[str]:
    """Finds an invalid signature, or a statement that differs from the dossier."""
    public, path = _open_key(key, public=True), folder / FILE
    from securesystemslib.dsse import Envelope
    from securesystemslib.exceptions import FormatError, VerificationError

    if not path.is_file():
        raise BadInputError(f"{folder} has no {FILE}; optpipe signoff attest writes it")
    with read_as_user_file(path, "a DSSE envelope"):
        envelope = Envelope.from_dict(json.loads(path.read_bytes()))
        try:
            envelope.verify([public], 1)
        except (VerificationError, FormatError) as error:
            yield f"{FILE}: is not signed by this key, or was changed ({first_line(error)})"
            return
        stated = json.loads(envelope.payload) if envelope.payload_type == PAYLOAD_TYPE else envelope.payload_type
    if checked.content is not None and checked.verdict is not None:
        expected = make_statement(checked.files.hash(SUMS), checked.content.policy, checked.verdict)
        yield from find_disagreements(stated, expected, FILE, (), "the dossier gives")
