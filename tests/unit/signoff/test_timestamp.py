"""RFC 3161 timestamps over the seal of a dossier, by an authority that the test starts: OpenSSL behind a small HTTP server."""

import json
import re
import shutil
import subprocess
import threading
import time
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tests.command_line import call
from tests.fakes.console import text_of
from tests.fakes.dossiers import examine, seal_anew

from optpipe.cli.signoff import stamp, verify
from optpipe.core.errors import BadInputError, StageError
from optpipe.core.events import SilentListener
from optpipe.signoff.collect import SignoffRequest
from optpipe.signoff.policy import policy_from_toml
from optpipe.signoff.release import sign_off
from optpipe.signoff.verify import verify_dossier
from optpipe.workspace.seal import TIMESTAMP
from optpipe.workspace.timestamp import require_authority, stamp_folder

pytest.importorskip("rfc3161_client", reason="rfc3161-client is not installed: the extra `attest`")
if shutil.which("openssl") is None:
    pytest.skip("the test's authority is OpenSSL's", allow_module_level=True)

POLICY = b'schema = 1\n[build]\nprecision = "fp16"\n[size]\nmaximum = "1 GiB"\n'
DAY = timedelta(days=1)
CONFIGURATION = """[tsa]
default_tsa = one
[one]
serial = serial
signer_cert = tsa.pem
signer_key = tsa.key
signer_digest = sha256
default_policy = 1.2.3.4.1
digests = sha256
"""


def write_authority(folder, name, *, ends=DAY):
    """A root and a certificate for timestamps that it issued, valid until `ends` from now."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    folder.mkdir()
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    names = [
        x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, each)])
        for each in (f"{name} root", f"{name} authority")
    ]
    for place, (key, subject) in enumerate(zip(keys, names, strict=True)):
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(names[0])
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(datetime.now(UTC) - 20 * DAY)
            .not_valid_after(datetime.now(UTC) + (ends if place else 900 * DAY))
        )
        if place == 0:
            extension, critical = x509.BasicConstraints(ca=True, path_length=None), True
        else:
            purpose = x509.ExtendedKeyUsageOID.TIME_STAMPING
            extension, critical = x509.ExtendedKeyUsage([purpose]), True
        signed = builder.add_extension(extension, critical).sign(keys[0], hashes.SHA256())
        pem = signed.public_bytes(serialization.Encoding.PEM)
        (folder / ("tsa.pem" if place else "root.pem")).write_bytes(pem)
    (folder / "tsa.key").write_bytes(
        keys[1].private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    (folder / "tsa.cnf").write_text(CONFIGURATION)
    (folder / "serial").write_text("01\n")
    return folder


def answer_query(folder, query):
    (folder / "query").write_bytes(query)
    command = ["openssl", "ts", "-reply", "-config", "tsa.cnf", "-queryfile", "query"]
    return subprocess.run(
        [*command, "-out", "/dev/stdout"], cwd=folder, check=True, capture_output=True
    ).stdout


def ask_about(folder, data):
    """A query of OpenSSL's for other data."""
    (folder / "data").write_bytes(data)
    command = ["openssl", "ts", "-query", "-data", "data", "-sha256", "-cert"]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True).stdout


@pytest.fixture(scope="module")
def authorities(tmp_path_factory):
    folder = tmp_path_factory.mktemp("authorities")
    return {
        "honest": write_authority(folder / "honest", "Honest"),
        "other": write_authority(folder / "other", "Other"),
        "expired": write_authority(folder / "expired", "Expired", ends=-DAY),
    }


@pytest.fixture(scope="module")
def serve(authorities):
    """Starts an HTTP server that answers in one way; returns its URL."""
    servers = []

    def start(how):
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                query = self.rfile.read(int(self.headers["Content-Length"]))
                answer = respond(how, authorities, query)
                if answer is None:
                    self.send_error(503)
                    return
                self.send_response(200)
                self.send_header("Content-Type", "application/timestamp-reply")
                self.end_headers()
                for at in range(len(answer)) if how == "slow" else ():
                    self.wfile.write(answer[at : at + 1])
                    self.wfile.flush()
                    time.sleep(0.2)
                if how != "slow":
                    self.wfile.write(answer)

            def log_message(self, *_):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}/tsa"

    yield start
    for server in servers:
        server.shutdown()


def respond(how, authorities, query):
    if how == "broken":
        return None
    if how == "no answer of its kind":
        return b"<html>welcome</html>"
    if how == "huge":
        return b"\x30" * 200_000
    if how == "refuses":  # the digest is none that its configuration allows
        return answer_query(authorities["honest"], query.replace(b"\x04\x02\x01", b"\x04\x02\x03"))
    if how == "another digest":
        return answer_query(authorities["honest"], ask_about(authorities["honest"], b"other"))
    return answer_query(authorities[how if how in authorities else "honest"], query)


@pytest.fixture(scope="module")
def judged(make_workspace, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stamped")
    workspace = make_workspace(folder / "workspace")
    workspace.bench(workspace.artifact("fp16"), count=200, processes=3)
    return workspace, workspace.release(POLICY, folder / "one")


@pytest.fixture(autouse=True)
def _real_time(monkeypatch, judged):
    """OpenSSL knows no other."""
    monkeypatch.setattr("optpipe.workspace.entry.datetime", datetime)


@pytest.fixture
def dossier(judged, tmp_path):
    return shutil.copytree(judged[1], tmp_path / "one")


def test_a_timestamp_is_checked_offline_by_both_verifiers_and_openssl(dossier, authorities, serve):
    roots = authorities["honest"] / "root.pem"
    assert "a timestamp is required" in verify_dossier(dossier, None, roots).problems[0]
    outcome = call(stamp, dossier, timestamp=serve("honest"))
    assert outcome.status == 0
    begun = datetime.fromisoformat(outcome.document["time_utc"])
    assert abs(begun - datetime.now(UTC)) < timedelta(minutes=2)
    checked = verify_dossier(dossier, None, roots)
    assert (checked.problems, checked.exit_status) == ((), verify_dossier(dossier).exit_status)
    assert "by Honest authority, a trusted authority" in checked.signature
    unchecked = call(verify, dossier)
    assert "by Honest authority, which was not checked" in unchecked.document.signature
    assert "A signature names" in text_of(unchecked.show(unchecked.document), width=10_000)
    found, _ = examine(dossier)
    assert found.differs == []
    assert any("openssl ts -verify" in each for each in found.stated)
    command = ["openssl", "ts", "-verify", "-data", "SHA256SUMS", "-in", TIMESTAMP]
    said = subprocess.run(
        [*command, "-CAfile", roots], cwd=dossier, capture_output=True, text=True, check=True
    )
    assert "Verification: OK" in said.stdout + said.stderr


def test_only_a_trusted_authority_with_a_valid_certificate_counts(dossier, authorities, serve):
    for how in ("other", "expired"):
        stamp_folder(dossier, serve(how))
        roots = authorities["honest" if how == "other" else how] / "root.pem"
        (problem,) = verify_dossier(dossier, None, roots).problems
        assert problem.startswith(TIMESTAMP), problem


def test_a_token_of_another_dossier_or_a_changed_one_is_a_problem(dossier, serve):
    stamp_folder(dossier, serve("honest"))
    token = (dossier / TIMESTAMP).read_bytes()
    (dossier / TIMESTAMP).write_bytes(token + b"more")
    assert verify_dossier(dossier).problems
    assert examine(dossier)[0].differs
    (dossier / TIMESTAMP).write_bytes(token[:-40])
    assert verify_dossier(dossier).problems
    assert examine(dossier)[0].differs
    (dossier / TIMESTAMP).write_bytes(token)
    (dossier / "report.md").write_text("another")
    seal_anew(dossier)
    assert any("another dossier" in each for each in verify_dossier(dossier).problems)
    assert any("another dossier" in each for each in examine(dossier)[0].differs)


BAD_AUTHORITIES = {
    "broken": "HTTP 503",
    "no answer of its kind": "gave no RFC 3161 answer",
    "huge": "more than 65,536 bytes",
    "refuses": "refused: status 2",
    "another digest": "another digest",
    "slow": "did not answer within",
    "absent": "cannot be reached",
}


@pytest.mark.parametrize("how", BAD_AUTHORITIES)
@pytest.mark.slow
def test_a_verdict_is_never_lost_with_its_timestamp(judged, serve, tmp_path, monkeypatch, how):
    monkeypatch.setattr("optpipe.workspace.timestamp.WAIT_S", 1.0)
    url = "http://127.0.0.1:9/" if how == "absent" else serve(how)
    workspace, listener = judged[0], SilentListener()
    wanted = SignoffRequest("digits", policy_from_toml(POLICY))
    verdict, folder = sign_off(
        wanted, workspace.store, tmp_path / "one", None, listener, figures=False, authority=url
    )
    (warning,) = (each for each in listener.warnings if "timestamp" in each)
    assert BAD_AUTHORITIES[how] in warning
    assert re.search(rf"optpipe signoff stamp \S+ --timestamp {re.escape(url)}", warning)
    assert not (folder / TIMESTAMP).exists()
    assert verify_dossier(folder).problems == ()
    assert json.loads((folder / "verdict.json").read_text())["verdict"] == verdict.verdict


@pytest.mark.parametrize(
    "url", ["", "tsa.example.com", "ftp://x", "file:///etc/passwd", "http://", "http://[::1:9",
            "http://x:99999", "http://x y", "http://é.example"]
)  # fmt: skip
def test_a_bad_url_is_refused_before_anything_runs(url):
    with pytest.raises(BadInputError, match="expected the URL of an RFC 3161 authority"):
        require_authority(url)


def test_a_token_is_not_written_twice_over_a_good_one(dossier, serve):
    stamp_folder(dossier, serve("honest"))
    token = (dossier / TIMESTAMP).read_bytes()
    with pytest.raises(StageError):
        stamp_folder(dossier, serve("broken"))
    assert (dossier / TIMESTAMP).read_bytes() == token


def test_bad_roots_are_bad_input(dossier, serve, tmp_path):
    stamp_folder(dossier, serve("honest"))
    (tmp_path / "roots.pem").write_text("no certificate")
    for path in (tmp_path / "roots.pem", tmp_path / "absent.pem"):
        with pytest.raises(BadInputError, match="trusted certificates in PEM"):
            verify_dossier(dossier, None, path)
