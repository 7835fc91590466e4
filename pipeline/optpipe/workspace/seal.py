"""A sealed folder: a hash per file, a hash over the hashes, and an optional signature, so that any changed byte shows.

The dossiers that `signoff approve` stores are sealed folders in `baselines/`, one for each model, whatever it is called.

Format: `SHA256SUMS` lists every other file in coreutils' form (so `sha256sum -c SHA256SUMS` works without optpipe),
sorted by path; `SHA256SUMS.sha256` holds the hash of that list; `SHA256SUMS.sig` is an SSH signature of it, made and
checked by `ssh-keygen -Y` (namespace `optpipe-dossier`), never by code of this package. `approval.json` names a person who
approved the hash of that list, and `approval.json.sig` is that person's signature of it (namespace `optpipe-approval`).
`SHA256SUMS.tsr` says when the list existed (`optpipe.workspace.timestamp`).
"""

import base64
import binascii
import hashlib
import json
import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from tempfile import NamedTemporaryFile

from optpipe.core.errors import BadInputError, MissingError, StageError, escape, read_as_user_file
from optpipe.core.files import MAX_DOCUMENT_BYTES, Files, hash_value, require_regular_file
from optpipe.core.parquet import (
    MAX_UNCOMPRESSED_BYTES,
    MAX_VALUES,
    TooLargeError,
    measure_parquet,
)
from optpipe.core.records import json_from_record, read_record, record_from_files
from optpipe.core.wording import Argument, Call
from optpipe.workspace.entry import ID_LENGTH, get_utc_time
from optpipe.workspace.file_names import REQUEST, make_file_name
from optpipe.workspace.files import find_problems, hash_files, list_files, write_bytes
from optpipe.workspace.store import Store

SUMS = "SHA256SUMS"
SEAL = "SHA256SUMS.sha256"
SIGNATURE = "SHA256SUMS.sig"
NAMESPACE = "optpipe-dossier"
APPROVAL = "approval.json"
APPROVALS = "optpipe-approval"
TIMESTAMP = "SHA256SUMS.tsr"
UNSEALED = (SUMS, SEAL, SIGNATURE, TIMESTAMP, APPROVAL, f"{APPROVAL}.sig")
_LINE = re.compile(r"^([0-9a-f]{64})  (\S(?:.*\S)?)$")


def seal_folder(folder: Path) -> str:
    """Writes the hash list and its hash; returns the latter, which identifies the folder's content."""
    text = _format_sums({name: file.sha256 for name, file in hash_files(folder, UNSEALED).items()})
    digest = hashlib.sha256(text.encode()).hexdigest()
    (folder / SUMS).write_text(text, encoding="utf-8")
    (folder / SEAL).write_text(_format_seal(digest), encoding="utf-8")
    return digest


MAX_FILES = 10_000
MAX_BYTES = 2**29
"""Of all files of a sealed folder, which are kept while it is judged."""


def require_sizes(files: Files) -> None:
    """Raises TooLargeError for a folder larger than a dossier may be, by the sizes that its files state.

    Section 1.1 of docs/dossier-format.md.
    """
    size_bytes = values = uncompressed_bytes = 0
    tables = []
    for number, path in enumerate(files.folder.rglob("*"), 1):
        if number > MAX_FILES:
            raise TooLargeError(f"{files.folder} is too large: more than {MAX_FILES:,} files")
        if path.is_symlink() or not path.is_file():
            continue
        size_bytes += path.stat().st_size
        if size_bytes > MAX_BYTES:
            raise TooLargeError(f"{files.folder} is too large: more than {MAX_BYTES:,} bytes")
        if path.suffix == ".parquet":
            tables.append(path.relative_to(files.folder).as_posix())
    for name in tables:
        try:
            size = measure_parquet(files.read(name), files.folder / name)
        except TooLargeError:
            raise
        except BadInputError:  # damaged: its hash tells
            continue
        values += size.values
        uncompressed_bytes += size.uncompressed_bytes
        if values > MAX_VALUES or uncompressed_bytes > MAX_UNCOMPRESSED_BYTES:
            raise TooLargeError(
                f"{files.folder} is too large: {values:,} values, {uncompressed_bytes:,} bytes when uncompressed"
            )


def find_seal_problems(files: Files) -> list[str]:
    """Lists every difference from the sealed state, one line each. Raises BadInputError if the folder is not sealed at all."""
    folder = files.folder
    if not files.has(SUMS):
        problem = f"is not a dossier: {SUMS} is missing" if folder.exists() else "does not exist"
        raise BadInputError(f"{folder} {problem}; create a dossier with " + Call("signoff"))
    try:
        require_sizes(files)
    except TooLargeError as error:
        return [str(error)]
    listed_bytes = files.read(SUMS)
    listed = _parse_sums(listed_bytes)
    problems = _find_unsealable(folder)
    if not files.has(SEAL):
        problems.append(f"{SEAL}: missing")
    elif files.read(SEAL) != _format_seal(hashlib.sha256(listed_bytes).hexdigest()).encode():
        problems.append(f"{SEAL}: does not match {SUMS}")
    if listed is None:
        return [f"{SUMS}: not a valid list of hashes", *problems]
    problems += find_problems(files, listed, SUMS, UNSEALED)
    if not problems and listed_bytes != _format_sums(dict(sorted(listed.items()))).encode():
        problems.append(f"{SUMS}: not in canonical form")
    return sorted(problems)


def require_key(key: Path) -> None:
    """Raises BadInputError without a key file, MissingError without ssh-keygen."""
    if key.exists():
        with read_as_user_file(key, "an SSH key"):
            require_regular_file(key, MAX_DOCUMENT_BYTES)
    else:
        raise BadInputError(f"no key at {key}; create one with: ssh-keygen -t ed25519 -f {key}")
    _find_ssh_keygen()


@dataclass(frozen=True, slots=True)
class Approval:
    dossier: str
    """Hash of the dossier's SHA256SUMS."""
    by: str
    role: str
    approved_utc: str
    because: str | None


def approve_folder(folder: Path, key: Path, by: str, role: str, because: str | None) -> None:
    """Writes the approval of a sealed folder, signed with the SSH private key `key`. Raises as `sign_folder` does."""
    if not all(text.strip() and text.isprintable() for text in (by, role)):
        raise BadInputError(
            "a name and a role must be printable text", argument=Argument("by", f"{by!r} {role!r}")
        )
    require_key(key)
    digest = hashlib.sha256((folder / SUMS).read_bytes()).hexdigest()
    write_bytes(
        folder / APPROVAL, json_from_record(Approval(digest, by, role, get_utc_time(), because))
    )
    try:
        sign_folder(folder, key, APPROVAL, APPROVALS)
    except StageError:
        (folder / APPROVAL).unlink()
        raise


def check_approval(files: Files, allowed_signers: Path | None = None) -> tuple[str | None, str]:
    """The problem with a folder's approval, or None, and who approved it in words; empty without an approval."""
    if not files.has(APPROVAL):
        return None, ""
    approval = record_from_files(files, APPROVAL, Approval)
    if approval.dossier != files.hash(SUMS):
        return f"{APPROVAL}: is of another dossier", ""
    if not files.has(f"{APPROVAL}.sig"):
        return f"{APPROVAL}: not signed", ""
    problem, signer = check_signature(files, allowed_signers, APPROVAL, APPROVALS)
    who = f"{escape(approval.by)} ({escape(approval.role)}) on {escape(approval.approved_utc[:10])}"
    return problem, f"approved by {who}, {signer}"


def sign_folder(folder: Path, key: Path, name: str = SUMS, namespace: str = NAMESPACE) -> None:
    """Signs the file `name` of a sealed folder with the SSH private key `key`. Raises MissingError, BadInputError or StageError."""
    require_key(key)
    (folder / f"{name}.sig").unlink(missing_ok=True)
    result = _run_ssh_keygen(
        ["-Y", "sign", "-q", "-f", str(key), "-n", namespace, str(folder / name)], b""
    )
    if result.returncode != 0 or not (folder / f"{name}.sig").is_file():
        raise StageError(f"ssh-keygen could not sign with {key}: {_first_line(result.stderr)}")


def check_signature(
    files: Files, allowed_signers: Path | None = None, name: str = SUMS, namespace: str = NAMESPACE
) -> tuple[str | None, str]:
    """The problem with the signature of a folder's file `name`, or None, and the signer in words.

    With `allowed_signers` (ssh-keygen's file of that name) the signer must be one of them; without, only the signature
    itself is checked. A missing signature is a problem only with `allowed_signers`.
    """
    signature = f"{name}.sig"
    if not files.has(signature):
        return (
            f"{signature}: missing, but a signature is required" if allowed_signers else None,
            "not signed",
        )
    armored = files.read(signature)
    if _canonicalize_signature(armored) != armored:
        return f"{signature}: not in the format that ssh-keygen writes", ""
    if allowed_signers is not None:
        if not allowed_signers.exists():
            raise BadInputError(
                f"allowed-signers file {allowed_signers} does not exist; see the ssh-keygen manual page for its format"
            )
        with read_as_user_file(allowed_signers, "allowed signers"):
            require_regular_file(allowed_signers, MAX_DOCUMENT_BYTES)
    with NamedTemporaryFile() as copy:  # of the bytes that were read, which cannot change meanwhile
        copy.write(armored)
        copy.flush()
        check = ["-Y", "check-novalidate"]
        if allowed_signers is not None:
            signers = ["-f", str(allowed_signers)]
            who = _run_ssh_keygen(["-Y", "find-principals", "-s", copy.name, *signers], b"")
            if who.returncode != 0:
                return f"{signature}: signed with a key that is not in {allowed_signers.name}", ""
            check = ["-Y", "verify", "-I", _first_line(who.stdout), *signers]
        result = _run_ssh_keygen([*check, "-n", namespace, "-s", copy.name], files.read(name))
    if result.returncode != 0:
        return f"{signature}: {_first_line(result.stderr or result.stdout)}", ""
    if allowed_signers is not None:
        return None, f"signed by {_first_line(who.stdout)}, an allowed signer"
    key = _first_line(result.stdout).rpartition(" ")[2]
    return None, f"signed by an unknown key, {key}"


def _run_ssh_keygen(
    arguments: list[str], standard_input: bytes
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [_find_ssh_keygen(), *arguments], input=standard_input, capture_output=True, check=False
    )


def _find_ssh_keygen() -> str:
    program = shutil.which("ssh-keygen")
    if program is None:
        raise MissingError(
            "signing requires ssh-keygen; install the OpenSSH client (openssh-client)"
        )
    return program


def _canonicalize_signature(armored: bytes) -> bytes:
    """The signature as ssh-keygen would write it, so that no byte of the file can vary unnoticed; empty if it is not one."""
    begin, end = b"-----BEGIN SSH SIGNATURE-----\n", b"-----END SSH SIGNATURE-----\n"
    if not (armored.startswith(begin) and armored.endswith(end)):
        return b""
    try:
        blob = base64.b64decode(armored[len(begin) : -len(end)].replace(b"\n", b""), validate=True)
    except (binascii.Error, ValueError):
        return b""
    text = base64.b64encode(blob)
    lines = [text[at : at + 70] for at in range(0, len(text), 70)]
    return begin + b"\n".join(lines) + b"\n" + end


def _find_unsealable(folder: Path) -> list[str]:
    """Links, devices and empty folders, which no hash covers."""
    return [
        f"{path.relative_to(folder).as_posix()}: neither a regular file nor a non-empty folder"
        for path in sorted(folder.rglob("*"))
        if path.is_symlink()
        or (path.is_dir() and not any(path.iterdir()))
        or not (path.is_dir() or path.is_file())
    ]


def _parse_sums(text: bytes) -> dict[str, str] | None:
    try:
        lines = text.decode("utf-8").splitlines()
    except UnicodeDecodeError:
        return None
    matches = [_LINE.match(line) for line in lines]
    return {match[2]: match[1] for match in matches if match} if matches and all(matches) else None


def _format_sums(hashes: dict[str, str]) -> str:
    return "".join(f"{digest}  {path}\n" for path, digest in hashes.items())


def _format_seal(digest: str) -> str:
    return f"{digest}  {SUMS}\n"


def _first_line(text: bytes) -> str:
    lines = text.decode("utf-8", "replace").strip().splitlines()
    return lines[0] if lines else "no message"


BASELINES = "baselines"


@dataclass(frozen=True, slots=True)
class Approved:
    """The note beside a baseline, of which model it is; workspaces of earlier versions lack the model."""

    approved_utc: str
    dossier: str
    because: str | None = None
    model: str | None = None
    content: str = ""
    """The model's ID; empty if the workspace does not have the model."""
    network: str | None = None
    """`network` of its request."""
    earlier_utc: tuple[str, ...] = ()
    """When the model's former baselines were approved."""


def count_baselines(folder: Path, since_utc: str | None) -> int:
    """The number of baselines in the place of `folder` that a build first measured at `since_utc` can be compared with.

    These are the baseline of that time, and all that were approved later; 1 for None.
    """
    path = folder.with_name(f"{folder.name}.json")
    if since_utc is None or not path.is_file():
        return 1
    note = read_record(path, Approved)
    since = datetime.fromisoformat(since_utc)
    times = [*note.earlier_utc, note.approved_utc]
    later = sum(datetime.fromisoformat(time) > since for time in times)
    return later + (later < len(times))


def find_approved_baseline(
    workspace: Path, model: str, network: str | None = None, content: str = ""
) -> Files | None:
    """The dossier that was approved last for this very model; None if nothing called `model` was approved.

    A model whose `content` was never approved has the baseline of the newest model with its name and `network`, such as the one
    before it was trained again, and otherwise that of the newest one with its name. Raises BadInputError if it is damaged.
    """
    known = _list_approved(workspace, model)
    if not known:
        return None
    same_network = [
        baseline for baseline in known if network is not None and baseline[1].network == network
    ]
    same_content = [baseline for baseline in known if content and baseline[1].content == content]
    folder, _ = (same_content or same_network or known)[-1]
    files = Files(folder, kept={})
    problems = find_seal_problems(files) if files.has(SUMS) else [f"{SUMS}: missing"]
    if problems:
        raise BadInputError(
            f"the approved baseline {folder} is damaged: {problems[0]}",
            remedy="restore it with `" + Call("signoff approve", "DOSSIER") + "`",
        )
    return files


def _list_approved(workspace: Path, model: str) -> list[tuple[Path, Approved]]:
    """The folders of the baselines of `model`, and their notes; the one that was approved last is at the end."""
    approved = []
    for folder in sorted((workspace / BASELINES).glob("*/")):
        path = folder.with_name(f"{folder.name}.json")
        note = read_record(path, Approved) if path.is_file() else Approved("", folder.name)
        if note.model == model:
            approved.append((folder, note))
        elif note.model is None and folder.name == make_file_name(model):
            files = Files(folder)
            asked = json.loads(files.read(REQUEST)) if files.has(REQUEST) else {}
            approved.append((folder, replace(note, network=asked.get("network"))))
    return sorted(approved, key=lambda baseline: baseline[1].approved_utc)


def store_baseline(
    files: Files, workspace: Path, because: str | None = None, content: str = ""
) -> Path:
    """Stores a verified dossier as the next baseline of its model, whose ID is `content`; returns its folder.

    It replaces the former baseline of this very model, never one of another model with its name. `because` is the reason for
    approving anything but a plain PASS.
    """
    request = json.loads(files.read(REQUEST))
    model, network = str(request["model"]), request.get("network")
    own = hash_value([model, content or network])[:ID_LENGTH]
    target = workspace / BASELINES / f"{make_file_name(model)}.{own}"
    path = target.with_name(f"{target.name}.json")
    former = read_record(path, Approved) if path.is_file() else None
    earlier = () if former is None else former.earlier_utc
    if former is not None and former.dossier != files.folder.name:
        earlier = (*earlier, former.approved_utc)
    with Store(workspace).scratch("baseline") as scratch:
        for name in list_files(files.folder):
            write_bytes(scratch / "new" / name, files.read(name))
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            target.rename(scratch / "old")
        (scratch / "new").rename(target)
    note = Approved(
        get_utc_time("microseconds"),
        files.folder.name,
        because,
        model,
        content,
        network,
        earlier,
    )
    write_bytes(path, json_from_record(note))
    return target
