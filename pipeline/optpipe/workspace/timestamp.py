"""When a sealed folder existed, by an authority that is neither its author nor its reader: RFC 3161.

`SHA256SUMS.tsr` is the authority's answer, a TimeStampResp in DER. Its token signs the SHA-256 of `SHA256SUMS`, the identity of
the folder, and a time. OpenSSL reads it: `openssl ts -verify -data SHA256SUMS -in SHA256SUMS.tsr -CAfile ROOTS.pem`.
Checking it needs no network: the token holds the authority's certificates, and the reader has the roots that he trusts.
"""

import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, build_opener

from optpipe.core.errors import (
    BadInputError,
    MissingError,
    StageError,
    escape,
    first_line,
    read_as_user_file,
)
from optpipe.core.files import Files, read_user_bytes, require_regular_file
from optpipe.core.wording import Argument
from optpipe.workspace.files import write_bytes
from optpipe.workspace.places import format_extra
from optpipe.workspace.seal import SUMS, TIMESTAMP

WAIT_S = 30.0
"""In all, from the first name that is looked up to the last byte."""
LARGEST_BYTES = 1 << 16
"""Of an answer: a token with a chain of certificates has some 6 KiB."""
GRANTED = 0
SHA256 = "2.16.840.1.101.3.4.2.1"


def require_authority(url: str) -> None:
    """Raises BadInputError for anything but a URL of HTTP, MissingError without the package."""
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname)
        known = known and (parts.port is None or parts.port > 0) and url.isascii()
    except ValueError:
        known = False
    if not known or any(char.isspace() or not char.isprintable() for char in url):
        raise BadInputError(
            "expected the URL of an RFC 3161 authority, such as http://timestamp.example.com",
            argument=Argument("timestamp", repr(escape(url))),
        )
    _import_client()


def stamp_folder(folder: Path, url: str) -> datetime:
    """Asks the authority at `url` for a token over the seal of `folder` and writes it; returns its time in UTC.

    Raises BadInputError and MissingError as `require_authority` does, StageError if there is no answer that fits. Nothing is
    written then.
    """
    require_authority(url)
    client, sums = _import_client(), (folder / SUMS).read_bytes()
    builder = client.TimestampRequestBuilder().data(sums)
    request = builder.hash_algorithm(client.HashAlgorithm.SHA256).build()
    host = urlsplit(url).hostname
    answer = _ask(url, request.as_bytes(), str(host))
    try:
        response = client.decode_timestamp_response(answer)
        refused = f"refused: status {response.status} {' '.join(response.status_string)}".rstrip()
        problem = refused if response.status != GRANTED else _find_mismatch(response, request)
    except ValueError as error:
        problem = f"gave no RFC 3161 answer ({first_line(error)})"
    if problem:
        raise StageError(f"the authority {host} {escape(problem)}")
    write_bytes(folder / TIMESTAMP, answer)
    return _read_time(response)


def _read_time(response: Any) -> datetime:
    """The token's time in UTC."""
    time: datetime = response.tst_info.gen_time
    return time.astimezone(UTC)


def _find_mismatch(response: Any, request: Any) -> str | None:
    token, asked = response.tst_info, request.message_imprint
    imprint = token.message_imprint
    if (imprint.hash_algorithm, bytes(imprint.message)) != (
        asked.hash_algorithm,
        bytes(asked.message),
    ):
        return "answered for another digest"
    if token.nonce != request.nonce:
        return "answered another request (its nonce differs)"
    return None


def _ask(url: str, body: bytes, host: str) -> bytes:
    """The answer, within WAIT_S and LARGEST_BYTES. Raises StageError."""
    headers = {"Content-Type": "application/timestamp-query"}
    answers: list[bytes | Exception] = []

    def fetch() -> None:
        try:
            with build_opener().open(Request(url, body, headers), timeout=WAIT_S) as reply:
                answers.append(reply.read(LARGEST_BYTES + 1))
        except HTTPError as error:
            answers.append(StageError(f"answered with HTTP {error.code}"))
        except (URLError, OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            answers.append(StageError(f"cannot be reached ({first_line(reason)})"))
        except Exception as error:  # noqa: BLE001  # http.client raises its own kinds
            answers.append(StageError(f"gave no HTTP answer ({first_line(error)})"))

    # a server that sends one byte a second resets each timeout of a socket, but not that of the thread
    thread = threading.Thread(target=fetch, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    answer = answers[0] if answers else StageError(f"did not answer within {WAIT_S:.0f} s")
    if isinstance(answer, bytes) and len(answer) > LARGEST_BYTES:
        answer = StageError(f"answered with more than {LARGEST_BYTES:,} bytes")
    if isinstance(answer, bytes):
        return answer
    raise StageError(f"the authority {host} {escape(str(answer))}")


@dataclass(frozen=True, slots=True)
class Timestamp:
    """A folder's token: a problem with it, or what it says in words."""

    problem: str | None = None
    words: str = ""
    time: datetime | None = None


def check_timestamp(files: Files, roots: Path | None = None) -> Timestamp:
    """Checks the token of a sealed folder offline.

    With `roots` (trusted certificates in PEM) the authority's certificate must lead to one of them and have been valid at the
    token's time; without, only digest and time are read. A missing token is a problem only with `roots`. Raises BadInputError
    for unreadable `roots`, MissingError without the package if `roots` are given.
    """
    if not files.has(TIMESTAMP):
        problem = f"{TIMESTAMP}: missing, but a timestamp is required" if roots else None
        return Timestamp(problem)
    trusted = None if roots is None else _read_roots(roots)
    try:
        client = _import_client()
    except MissingError:
        if roots is not None:
            raise
        return Timestamp(words=f"timestamp not read (needs `{format_extra('attest')}`)")
    try:
        response = client.decode_timestamp_response(files.read(TIMESTAMP))
        if response.as_bytes() != files.read(TIMESTAMP):
            return Timestamp(f"{TIMESTAMP}: more than one RFC 3161 answer in DER")
        token = response.tst_info
        imprint, time = token.message_imprint, _read_time(response)
        digest = bytes.fromhex(files.hash(SUMS))
        if response.status != GRANTED:
            return Timestamp(f"{TIMESTAMP}: status {response.status}, which is not granted")
        if imprint.hash_algorithm.dotted_string != SHA256 or bytes(imprint.message) != digest:
            return Timestamp(f"{TIMESTAMP}: is of another dossier")
        said = f"{time:%Y-%m-%d %H:%M:%S} UTC by {_describe_authority(response)}"
        if trusted is None:
            return Timestamp(words=f"timestamp {said}, which was not checked", time=time)
        _verify(client, response, trusted, digest)
    except (ValueError, client.VerificationError) as error:
        return Timestamp(f"{TIMESTAMP}: {escape(first_line(error))}")
    return Timestamp(words=f"existed at {said}, a trusted authority", time=time)


def _verify(client: Any, response: Any, trusted: list[Any], digest: bytes) -> None:
    """Raises VerificationError of `client` unless the token's signature leads to a trusted root."""
    # certificates of the token only join the chain; as intermediate certificates of the verifier they would be trusted
    client.VerifierBuilder(roots=list(trusted)).build().verify(response, digest)


def _describe_authority(response: Any) -> str:
    """The name in the certificate that signed, as the token gives it."""
    from cryptography.x509 import NameOID, load_der_x509_certificate

    signers = {
        (signer.issuer, signer.serial_number) for signer in response.signed_data.signer_infos
    }
    for encoded in response.signed_data.certificates:
        certificate = load_der_x509_certificate(bytes(encoded))
        if (certificate.issuer, certificate.serial_number) in signers:
            names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
            return escape(str(names[0].value)) if names else "an authority without a name"
    return "an authority without a certificate"


def _read_roots(path: Path) -> list[Any]:
    _import_client()
    from cryptography.x509 import load_pem_x509_certificates

    with read_as_user_file(path, "trusted certificates in PEM"):
        if path.exists():
            require_regular_file(path)
        else:
            raise BadInputError(f"{path}: no such file; expected trusted certificates in PEM")
        return [*load_pem_x509_certificates(read_user_bytes(path))]


def _import_client() -> Any:
    try:
        import rfc3161_client
    except ImportError as error:
        problem = f"timestamps need rfc3161-client ({error})"
        raise MissingError(f"{problem}; install it with `{format_extra('attest')}`") from error
    return rfc3161_client
