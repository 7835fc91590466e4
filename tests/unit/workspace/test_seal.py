"""Every single-byte change in a sealed folder is found, whichever file it hits."""

import shutil
import subprocess

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from optpipe.core.errors import BadInputError
from optpipe.core.files import Files
from optpipe.workspace.seal import (
    SEAL,
    SIGNATURE,
    SUMS,
    check_signature,
    find_seal_problems,
    seal_folder,
    sign_folder,
)

FILES = {
    "verdict.json": b'{"verdict": "PASS"}\n',
    "evidence/a b.parquet": bytes(range(256)),
    "report.html": b"<p>hi",
    "empty.txt": b"",
}


@pytest.fixture(scope="module")
def key(tmp_path_factory):
    path = tmp_path_factory.mktemp("key") / "id"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
    return path


@pytest.fixture(scope="module")
def sealed_and_signed(tmp_path_factory, key):
    folder = tmp_path_factory.mktemp("dossier")
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    seal_folder(folder)
    sign_folder(folder, key)
    return folder


def problems(folder):
    return find_seal_problems(Files(folder)) or [
        each for each in check_signature(Files(folder))[:1] if each
    ]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_every_single_byte_change_is_found(sealed_and_signed, data):
    files = [
        path
        for path in sorted(sealed_and_signed.rglob("*"))
        if path.is_file() and path.stat().st_size
    ]
    path = data.draw(st.sampled_from(files))
    good = path.read_bytes()
    at = data.draw(st.integers(0, len(good) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda value: value != good[at]))
    try:
        path.write_bytes(good[:at] + bytes([byte]) + good[at + 1 :])
        assert problems(sealed_and_signed)
    finally:
        path.write_bytes(good)
    assert not problems(sealed_and_signed)


@pytest.mark.parametrize("name", [*FILES, SEAL])
def test_a_truncated_longer_missing_or_added_file_is_found(sealed_and_signed, tmp_path, name):
    for change in ("truncate", "append", "remove", "add", "link", "folder"):
        folder = tmp_path / change
        shutil.copytree(sealed_and_signed, folder)
        path = folder / name
        content = path.read_bytes()
        if change == "truncate" and content:
            path.write_bytes(content[:-1])
        elif change == "append":
            path.write_bytes(content + b"\n")
        elif change == "remove":
            path.unlink()
        elif change == "add":
            (folder / "more.txt").write_bytes(b"")
        elif change == "link":
            (folder / "link").symlink_to(path)
        elif change == "folder":
            (folder / "nothing").mkdir()
        else:
            continue
        assert find_seal_problems(Files(folder)), change


def test_files_moved_about_or_lists_in_another_order_are_found(sealed_and_signed, tmp_path):
    folder = tmp_path / "moved"
    shutil.copytree(sealed_and_signed, folder)
    lines = (folder / SUMS).read_text().splitlines(keepends=True)
    (folder / SUMS).write_text("".join(reversed(lines)))
    assert find_seal_problems(Files(folder))


def test_resealing_a_changed_folder_breaks_its_signature(sealed_and_signed, tmp_path, key):
    folder = tmp_path / "resealed"
    shutil.copytree(sealed_and_signed, folder)
    (folder / "verdict.json").write_text("{}")
    seal_folder(folder)
    assert find_seal_problems(Files(folder)) == []
    assert "ignature" in (check_signature(Files(folder))[0] or "")


def test_only_allowed_signers_are_accepted(sealed_and_signed, tmp_path, key):
    allowed = tmp_path / "allowed"
    allowed.write_text(f"release@example.org {key.with_suffix('.pub').read_text()}")
    signer = "signed by release@example.org, an allowed signer"
    assert check_signature(Files(sealed_and_signed), allowed) == (None, signer)
    problem, who = check_signature(Files(sealed_and_signed))
    assert problem is None
    assert who.startswith("signed by an unknown key, SHA256:")
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "other"], check=True
    )
    allowed.write_text(f"release@example.org {(tmp_path / 'other.pub').read_text()}")
    assert "is not in" in (check_signature(Files(sealed_and_signed), allowed)[0] or "")
    unsigned = tmp_path / "unsigned"
    shutil.copytree(sealed_and_signed, unsigned)
    (unsigned / SIGNATURE).unlink()
    assert check_signature(Files(unsigned)) == (None, "not signed")
    assert "missing" in (check_signature(Files(unsigned), allowed)[0] or "")


def test_coreutils_can_check_it_too(sealed_and_signed):
    for listing in (SUMS, SEAL):
        subprocess.run(
            ["sha256sum", "--check", "--strict", listing], cwd=sealed_and_signed, check=True
        )


def test_what_is_no_dossier_says_what_to_do(tmp_path):
    with pytest.raises(BadInputError, match="optpipe signoff"):
        find_seal_problems(Files(tmp_path))
    with pytest.raises(BadInputError, match="does not exist"):
        find_seal_problems(Files(tmp_path / "none"))
    with pytest.raises(BadInputError, match="ssh-keygen -t ed25519"):
        sign_folder(tmp_path, tmp_path / "no-key")
