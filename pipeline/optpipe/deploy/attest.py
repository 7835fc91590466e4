"""Attestations on a dossier: each statement in a DSSE envelope that a key signed, offline; and their verification.

Signing is securesystemslib's. The files lie beside the dossier, whose seal they name by its hash.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optpipe.core.errors import BadInputError, MissingError, first_line, read_as_user_file
from optpipe.core.verdict import Verdict, VerdictRecord
from optpipe.deploy.statements import CYCLONEDX, SVR, TEST_RESULT, get_result, list_statements, make_svr
from optpipe.signoff.verify import verify_dossier
from optpipe.workspace.places import move_folder, require_unused_path
from optpipe.workspace.runs import write_bytes
from optpipe.workspace.seal import SUMS
from optpipe.workspace.store import Store

PAYLOAD_TYPE = "application/vnd.in-toto+json"
SUFFIX = ".dsse.json"
KINDS = {"test-result": TEST_RESULT, "svr": SVR, "ml-bom": CYCLONEDX}
"""The statements on a dossier: their predicate types by file name."""
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
    """Id of the public key."""


def attest_dossier(dossier: Path, key: Path, output: Path, store: Store) -> AttestRecord:
    """Verifies the dossier and writes its signed statements to the new folder `output`.

    Raises BadInputError where the dossier fails verification, the key cannot be read, or `output` exists or cannot be made.
    """
    require_unused_path(output)
    signer = _open_signer(key)
    checked = verify_dossier(dossier)
    content, verdict, _ = checked.require_intact()
    place, digest = content.every_run[-1].manifest.environment, checked.files.hash(SUMS)
    with store.scratch("attest") as scratch:
        folder = scratch / "attestations"
        names = []
        for name, statement in list_statements(digest, content.policy, verdict, place).items():
            write_bytes(folder / f"{name}{SUFFIX}", _sign(statement, signer))
            names.append(f"{name}{SUFFIX}")
        move_folder(folder, output)
    return AttestRecord(
        folder=str(output),
        dossier=verdict.dossier_name,
        dossier_sha256=digest,
        verdict=verdict.verdict,
        result=get_result(verdict),
        files=tuple(names),
        key=signer.public_key.keyid,
    )


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


def find_attestation_problems(
    folder: Path, dossier_sha256: str, verdict: VerdictRecord | None, key: Path
) -> Iterator[str]:
    """What is wrong with the attestations in `folder` on a dossier, one line each: signature, digests, or what they state.

    `dossier_sha256` is of the dossier's list of hashes.
    """
    public = _open_public_key(key)
    found = sorted(folder.glob(f"*{SUFFIX}"))
    if not found:
        raise BadInputError(f"{folder} has no attestations; optpipe signoff attest writes them")
    for path in found:
        statement = _read_signed(path, public)
        if isinstance(statement, str):
            yield f"{path.name}: {statement}"
            continue
        kind = KINDS.get(name := path.name.removesuffix(SUFFIX))
        if kind not in (None, statement["predicateType"]):
            yield f"{path.name}: holds {statement['predicateType']}, not the {name}"
            continue
        digests = {each["name"]: each["digest"].get("sha256") for each in statement["subject"]}
        if dossier_sha256 not in digests.values():
            yield f"{path.name}: is about another dossier"
        elif verdict is not None:
            yield from (f"{path.name}: {each}" for each in _find_contradictions(statement, verdict, digests))
    names = {path.name.removesuffix(SUFFIX) for path in found}
    yield from (f"{each}{SUFFIX}: missing" for each in KINDS if each not in names)


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


def _find_contradictions(statement: Any, verdict: VerdictRecord, digests: dict[str, str]) -> Iterator[str]:
    if verdict.artifact.sha256 not in digests.values():
        yield "is about another artifact"
    predicate, kind = statement["predicate"], statement["predicateType"]
    if kind == TEST_RESULT and predicate["result"] != get_result(verdict):
        yield f"says {predicate['result']}, the recomputed verdict is {verdict.verdict}"
    if kind == SVR and predicate["properties"] != make_svr(verdict)["properties"]:
        yield f"has properties {predicate['properties']}, the recomputed verdict is {verdict.verdict}"
    if kind == CYCLONEDX and predicate["metadata"]["component"]["version"] != verdict.artifact.id:
        yield "describes another artifact"
