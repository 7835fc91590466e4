"""An engine and its dossier as a signed model, held against tools that are not ours."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from optpipe.deploy.attestation import DOSSIER, ENGINE, SIGNATURE
from optpipe.signoff.bill import BILL
from tests.integration.conftest import optpipe

pytest.importorskip("model_signing", reason="model-signing is not installed: the extra `attest`")


@pytest.fixture(scope="module")
def attested(signed, tmp_path_factory):
    folder = tmp_path_factory.mktemp("attest")
    signed(folder / "signed")
    for name in ("key", "other"):
        command = ["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout"]
        subprocess.run([*command, "-out", folder / f"{name}.pem"], check=True)
        public = ["openssl", "ec", "-in", folder / f"{name}.pem", "-pubout"]
        subprocess.run([*public, "-out", folder / f"{name}.pub.pem"], check=True)
    words = ("signed/dossier", "--key", "key.pem", "--output", "attested")
    optpipe("signoff", "attest", *words, "--workspace", "signed/workspace", cwd=folder).expect(0)
    return folder


def verify(inside, folder, attestations, key="key.pub.pem"):
    words = ("--attestations", attestations, "--public-key", folder / key)
    return inside("verify", folder / "signed" / "dossier", *words, cwd=folder)


def test_another_tool_for_model_signatures_accepts_it(attested):
    folder = attested / "attested"
    words = ["verify", "key", folder, "--signature", folder / SIGNATURE]
    words += ["--ignore-paths", folder / SIGNATURE, "--public_key", attested / "key.pub.pem"]
    command = [sys.executable, "-m", "model_signing", *map(str, words)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_verify_checks_signature_engine_dossier_and_bill(attested, inside, tmp_path):
    right = verify(inside, attested, attested / "attested")
    assert (right.status, "attested with" in right.stdout, "not signed" in right.stdout) == (
        0,
        True,
        False,
    )
    other = verify(inside, attested, attested / "attested", "other.pub.pem")
    assert (other.status, "not signed by this key" in other.stdout + other.stderr) == (2, True)
    engine = next((attested / "attested" / ENGINE).iterdir()).name
    for name in (f"{ENGINE}/{engine}", f"{DOSSIER}/policy.toml", BILL, SIGNATURE, "more"):
        changed = Path(shutil.copytree(attested / "attested", tmp_path / name.replace("/", "-")))
        with (changed / name).open("ab") as file:
            file.write(b" x")
        ran = verify(inside, attested, changed)
        assert (ran.status, SIGNATURE in ran.stdout + ran.stderr) == (2, True), name


def test_deploy_checks_that_the_signed_engine_is_deployed(attested, inside, tmp_path):
    workspace = ("--workspace", attested / "signed" / "workspace")
    words = ("--to", "folder", "--output", tmp_path / "served", "--because", "a test")
    inside("deploy", attested / "signed/dossier", *words, *workspace, cwd=attested).expect(0)
    check = ("deploy", "--check", tmp_path / "served", "--attestations", attested / "attested")
    right = inside(*check, "--public-key", attested / "key.pub.pem", *workspace, cwd=attested)
    assert right.status in (0, 3)  # 3: another machine
    other = inside(*check, "--public-key", attested / "other.pub.pem", *workspace, cwd=attested)
    assert (other.status, "not signed by this key" in other.stderr) == (2, True)
    alone = inside(*check, *workspace, cwd=attested)
    assert (alone.status, "belong together" in alone.stderr) == (2, True)


def test_a_bill_of_another_verdict_is_found(attested, inside, tmp_path):
    """Signed by the right key, over the right engine and dossier."""
    import model_signing.hashing
    import model_signing.signing

    changed = Path(shutil.copytree(attested / "attested", tmp_path / "changed"))
    bill = json.loads((changed / BILL).read_text())
    bill["metadata"]["component"]["name"] = "better"
    (changed / BILL).write_text(json.dumps(bill))
    (changed / SIGNATURE).unlink()
    signer = model_signing.signing.Config().use_elliptic_key_signer(
        private_key=attested / "key.pem"
    )
    ignored = model_signing.hashing.Config().set_ignored_paths(paths=[SIGNATURE])
    signer.set_hashing_config(ignored).sign(changed, changed / SIGNATURE)
    ran = verify(inside, attested, changed)
    assert (ran.status, "not the bill" in ran.stdout + ran.stderr) == (2, True)


@pytest.mark.parametrize("key", ["missing.pem", "signed/dossier/policy.toml"])
def test_bad_keys_are_refused_and_nothing_is_written(attested, inside, tmp_path, key):
    words = ("--key", key, "--output", tmp_path / "new", "--workspace", "signed/workspace")
    ran = inside("signoff", "attest", "signed/dossier", *words, cwd=attested).expect(2)
    assert "openssl ecparam" in ran.stderr
    assert not (tmp_path / "new").exists()
