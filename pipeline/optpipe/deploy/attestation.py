"""A build with its dossier as one signed model: the OpenSSF Model Signature (OMS) over both, and the ML-BOM.

    engine/…        the engine's files
    dossier/…       the dossier
    bom.cdx.json    the CycloneDX ML-BOM (`optpipe.signoff.bill`)
    model.sig       the OMS bundle (a Sigstore bundle with a DSSE envelope) over all of them

Any tool for OMS checks it: `model_signing verify key DIR --signature DIR/model.sig --ignore-paths DIR/model.sig --public_key FILE`.
Keys are elliptic curves (P-256, P-384, P-521), so that neither signing nor checking needs a network.
"""

import base64
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from optpipe.core.errors import BadInputError, MissingError, first_line, read_as_user_file
from optpipe.core.files import MAX_DOCUMENT_BYTES, hash_value, require_regular_file
from optpipe.core.wording import Call
from optpipe.deploy.check import check_deployment
from optpipe.deploy.signed_build import find_signed_entry
from optpipe.models.artifacts.engine_files import list_engine_files
from optpipe.signoff.bill import BILL, make_bill
from optpipe.signoff.verify import VerifiedDossier, verify_dossier
from optpipe.workspace.files import list_files, write_bytes
from optpipe.workspace.places import format_extra, move_folder, require_unused_path
from optpipe.workspace.seal import SUMS
from optpipe.workspace.store import Store

SIGNATURE = "model.sig"
ENGINE, DOSSIER = "engine", "dossier"
NEW_KEY = (
    "openssl ecparam -name prime256v1 -genkey -noout -out key.pem && "
    "openssl ec -in key.pem -pubout -out key.pub.pem"
)


def attest_dossier(dossier: Path, key: Path, output: Path, store: Store) -> Mapping[str, str]:
    """Writes the signed folder; returns its signature's file, the verdict, and the dossier's name and hash.

    Raises BadInputError if the dossier fails verification, the workspace lacks its engine, the key cannot be read, or `output`
    exists; MissingError without model-signing.
    """
    require_unused_path(output)
    signing, _, hashing = _import_signing()
    with _read_key(key, "a private key of an elliptic curve in PEM, without a passphrase"):
        signer = signing.Config().use_elliptic_key_signer(private_key=key)
    content, verdict, _ = verify_dossier(dossier).require_intact()
    entry = find_signed_entry(content, store)
    with store.scratch("attest") as scratch:
        folder = scratch / "attested"
        for name in list_engine_files(entry):
            target = folder / ENGINE / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(entry.file(name), target)
        for name in list_files(dossier):
            write_bytes(folder / DOSSIER / name, content.files.read(name))
        write_bytes(folder / BILL, make_bill(content, verdict))
        signer.set_hashing_config(hashing.Config().set_ignored_paths(paths=[SIGNATURE]))
        signer.sign(folder, folder / SIGNATURE)
        move_folder(folder, output)
    return {
        "file": str(output / SIGNATURE),
        "dossier": verdict.dossier_name,
        "dossier_sha256": content.files.hash(SUMS),
        "verdict": verdict.verdict,
        "bill": str(output / BILL),
    }


def find_attestation_problems(folder: Path, checked: VerifiedDossier, key: Path) -> Iterator[str]:
    """Finds an invalid signature by `key`, and what it covers that is not of the dossier."""
    signed = list(_read_signed(folder, key))
    problems = [part for part in signed if isinstance(part, str)]
    yield from problems
    if problems or checked.content is None or checked.verdict is None:
        return
    (hashes,) = (part for part in signed if not isinstance(part, str))
    yield from _find_other_build(hashes, checked.files.hash(SUMS), checked.verdict.artifact.sha256)
    if (folder / BILL).read_bytes() != make_bill(checked.content, checked.verdict):
        yield f"{BILL}: is not the bill that the dossier gives"


def require_attested(deployment: Path, folder: Path, key: Path) -> None:
    """Raises BadInputError unless `folder` has a signature by `key` over the engine and the dossier of a deployment."""
    record = check_deployment(deployment).record
    for signed in _read_signed(folder, key):
        problems = [signed] if isinstance(signed, str) else []
        if not isinstance(signed, str):
            problems += _find_other_build(signed, record.dossier.sha256, record.artifact_sha256)
        if problems:
            raise BadInputError(f"{folder} does not sign {deployment}: {problems[0]}")


def _find_other_build(
    hashes: Mapping[str, str], dossier_sha256: str, artifact_sha256: str | None
) -> Iterator[str]:
    if hashes.get(f"{DOSSIER}/{SUMS}") != dossier_sha256:
        yield f"{SIGNATURE}: is of another dossier"
    engine = {
        name.removeprefix(f"{ENGINE}/"): sha256
        for name, sha256 in hashes.items()
        if name.startswith(f"{ENGINE}/")
    }
    engine_sha256 = next(iter(engine.values())) if len(engine) == 1 else hash_value(engine)
    if engine_sha256 != artifact_sha256:
        yield f"{SIGNATURE}: is of another engine"


def _read_signed(folder: Path, key: Path) -> Iterator[str | Mapping[str, str]]:
    """The SHA-256 of each signed file by its path, or the problem with the signature."""
    _, verifying, hashing = _import_signing()
    if not (folder / SIGNATURE).is_file():
        raise BadInputError(
            f"{folder} has no {SIGNATURE}; " + Call("signoff attest") + " writes it"
        )
    with _read_key(key, "a public key of an elliptic curve in PEM"):
        verifier = verifying.Config().use_elliptic_key_verifier(public_key=key)
    ignored = hashing.Config().set_ignored_paths(paths=[SIGNATURE])
    try:
        verifier.set_hashing_config(ignored).verify(folder, folder / SIGNATURE)
        envelope = json.loads((folder / SIGNATURE).read_bytes())["dsseEnvelope"]
        predicate = json.loads(base64.b64decode(envelope["payload"]))["predicate"]
        if predicate["serialization"]["hash_type"] != "sha256":
            yield f"{SIGNATURE}: signs other hashes than SHA-256"
            return
        yield {resource["name"]: resource["digest"] for resource in predicate["resources"]}
    except Exception as error:  # noqa: BLE001  # model-signing raises what its parsers raise
        yield f"{SIGNATURE}: not signed by this key, or something was changed ({first_line(error)})"


def _read_key(path: Path, what: str) -> Any:
    way_out = f"create a pair with: {NEW_KEY}"
    if not path.exists():
        raise BadInputError(f"{path}: no such file; expected {what}\n{way_out}")
    with read_as_user_file(path, what, way_out):
        require_regular_file(path, MAX_DOCUMENT_BYTES)
    return read_as_user_file(path, what, way_out)


def _import_signing() -> tuple[Any, Any, Any]:
    """Its modules for signing, verifying, and hashing."""
    try:
        from model_signing import hashing, signing, verifying
    except ImportError as error:
        problem = f"signing needs model-signing ({error})"
        raise MissingError(f"{problem}; install it with `{format_extra('attest')}`") from error
    return signing, verifying, hashing
