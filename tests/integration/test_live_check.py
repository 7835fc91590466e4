"""A running Triton server against the deployment that it should serve; a proxy before it plants each fault."""

import asyncio
import json
import shutil
import ssl
import subprocess
from contextlib import suppress
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from random import uniform
from threading import Thread
from time import sleep

import pytest

from tests.integration.conftest import SERVER, needs_server, optpipe

pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed: the extra `triton`")
pytestmark = needs_server

POLICY = """schema = 1
[build]
backend = "torch"
[size]
maximum = "10 MiB"
[[latency]]
p50 = "100 ms"
"""


@pytest.fixture(scope="module")
def served(exported, tmp_path_factory):
    """A deployment on Triton's Python backend as it is, and the HTTP and gRPC addresses of a server of it."""
    from optpipe.deploy.server import find_server, run_server

    folder = tmp_path_factory.mktemp("live")
    workspace = exported(folder / "workspace")
    (folder / "policy.toml").write_text(POLICY)
    for status, words in (
        (0, ("build", "digits", "--precision", "fp32", "--backend", "torch", "--device", "cpu")),
        (
            5,
            (
                "signoff",
                "digits",
                "--policy",
                "policy.toml",
                "--no-measure",
                "--no-figures",
                "--output",
                "dossier",
            ),
        ),
        (0, ("deploy", "dossier", "--because", "a trial", "--no-ensemble", "--output", "served")),
    ):
        optpipe(*words, cwd=folder, workspace=workspace).expect(status)
    copy = shutil.copytree(
        folder / "served" / "models", folder / "uploaded"
    )  # Python writes its byte code there
    with run_server(find_server(SERVER), copy, folder) as (http, grpc, _):
        yield folder / "served", http, grpc


def read_metric(file, name, label="verdict"):
    """The values of a metric by one of its labels, as Prometheus reads them."""
    from prometheus_client.parser import text_string_to_metric_families

    return {
        sample.labels[label]: sample.value
        for family in text_string_to_metric_families(file.read_text())
        for sample in family.samples
        if family.name == f"optpipe_check_{name}"
    }


def test_a_server_that_serves_the_deployment_passes_over_both_protocols(served, tmp_path):
    folder, http, grpc = served
    for url in (f"http://{http}", f"grpc://{grpc}"):
        words = ("deploy", folder, "--check", url, "--output", tmp_path / "check.prom", "--json")
        proof = optpipe(*words).expect(0).document["proof"]
        judged = {each["name"]: each for each in proof["criteria"]}
        assert {each["verdict"] for each in judged.values()} == {"PASS"} == {proof["verdict"]}
        for name in ("answers", "outputs", "version", "configuration"):
            assert f"{name}.digits_engine" in judged
        assert read_metric(tmp_path / "check.prom", "verdict")["PASS"] == 1
        loaded = optpipe(*words, "--load", "200@500").document["proof"]["criteria"][-1]
        assert loaded["name"] == "latency.p50"
        assert loaded["verdict"] in ("PASS", "INCONCLUSIVE"), (
            "a busy machine answers too irregularly for an interval"
        )
        limits = read_metric(tmp_path / "check.prom", "limit_seconds", "criterion")
        assert "latency.p50" in limits or loaded["observed"] is None


def test_a_server_that_is_not_there_decides_nothing_and_another_one_fails(served, tmp_path):
    folder, http, grpc = served
    for url, status, reason in (
        ("http://127.0.0.1:1", 5, "refused"),
        ("grpc://127.0.0.1:1", 5, "failed to connect"),
        (f"http://{grpc}", 1, "not a server of the KServe v2 protocol"),
        (f"ftp://{http}", 2, "expected http://"),
        (http, 2, "requires"),
    ):
        ran = optpipe("deploy", folder, "--check", url, "--output", tmp_path / "check.prom").expect(
            status
        )
        assert reason in " ".join((ran.stdout + ran.stderr).split())
    assert read_metric(tmp_path / "check.prom", "verdict")["FAIL"] == 1, "an old PASS must not stay"
    assert (
        "NUMBER@RATE"
        in optpipe("deploy", folder, "--check", f"http://{http}", "--load", "many").expect(2).stderr
    )
    assert (
        "0.5" in optpipe("deploy", "--check", folder, "--tune", "--seconds", "0.1").expect(2).stderr
    )
    assert (
        "requires the deployment" in optpipe("deploy", "--check", f"http://{http}").expect(2).stderr
    )


@pytest.fixture
def behind(served):
    """`behind(change)`: the address of a proxy whose `change(number, path, answer)` returns (status, answer)."""
    opened = []

    def open_proxy(change):
        numbers = count(1)

        class Proxy(BaseHTTPRequestHandler):
            protocol_version, disable_nagle_algorithm = "HTTP/1.1", True

            def do_GET(self):
                beyond = HTTPConnection(served[1])
                length = int(self.headers.get("Content-Length", 0))
                kept = {
                    name: value
                    for name, value in self.headers.items()
                    if name not in ("Host", "Connection")
                }
                beyond.request(self.command, self.path, self.rfile.read(length), kept)
                answer = beyond.getresponse()
                number = next(numbers) if self.path.endswith("/infer") else 0
                status, body = change(number, self.path, answer.read())
                self.send_response(status)
                for name in ("Content-Type", "Inference-Header-Content-Length"):
                    if (value := answer.getheader(name)) is not None and status == 200:
                        self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                with suppress(BrokenPipeError):  # the client may have given up
                    self.wfile.write(body)

            do_POST = do_GET

            def log_message(self, *_):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
        Thread(target=server.serve_forever, daemon=True).start()
        opened.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield open_proxy
    for server in opened:
        server.shutdown()
        server.server_close()


def replace_bytes(old, new):
    return lambda _number, _path, body: (200, body.replace(old, new))


def fail_one(at):
    return lambda number, _path, body: (
        (500, b'{"error": "out of memory"}') if number == at else (200, body)
    )


def delay(seconds):
    def change(number, _path, body):
        sleep(
            seconds * uniform(1, 1.5) if number else 0
        )  # a busy machine alone gives correlated samples
        return 200, body

    return change


FAULTS = {
    "wrong answers": (
        lambda n, _path, body: (200, body[:-40] + body[-40:][::-1] if n else body),
        None,
        "outputs",
    ),
    "another version": (
        replace_bytes(b'"model_version":"1"', b'"model_version":"3"'),
        None,
        "version",
    ),
    "another engine": (
        lambda _n, _path, body: (200, body.replace(b'"string_value":"', b'"string_value":"0')),
        None,
        "configuration",
    ),
    "another batching": (
        replace_bytes(b'"max_batch_size":', b'"max_batch_size":1'),
        None,
        "configuration",
    ),
    "an error in 1 of 100": (fail_one(70), (100, 1000.0), "answers.latency"),
    "a slow server": (delay(0.15), (60, 1000.0), "latency"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_the_one_criterion_that_fails(served, behind, fault):
    from optpipe.core.events import SilentListener
    from optpipe.deploy.live import check_live

    change, load, named = FAULTS[fault]
    found = check_live(served[0], behind(change), load, None, SilentListener()).proof
    assert found.verdict == "FAIL", found.criteria
    failed = [each for each in found.criteria if each.verdict != "PASS"]
    assert [each.name.startswith(named) for each in failed] == [True], failed
    assert fault != "an error in 1 of 100" or "1 of 100 requests failed" in failed[0].reason


def test_a_server_that_does_not_answer_in_time_is_asked_once(served, behind, monkeypatch):
    from optpipe.core.events import SilentListener
    from optpipe.deploy import live, proof

    monkeypatch.setattr(proof, "REQUEST_LIMIT_S", 0.3)
    found = live.check_live(served[0], behind(delay(2.0)), None, None, SilentListener()).proof
    (answers,) = (each for each in found.criteria if each.name.startswith("answers"))
    assert (answers.verdict, found.comparisons[0].requests) == ("FAIL", 1)


def test_tuning_moves_away_from_a_planted_delay_and_keeps_the_evidence(
    served, tmp_path, monkeypatch
):
    from optpipe.core.events import SilentListener
    from optpipe.deploy import tune
    from optpipe.deploy.check import check_deployment
    from optpipe.deploy.server import find_server
    from optpipe.workspace.seal import seal_folder
    from optpipe.workspace.store import Store

    folder = shutil.copytree(served[0], tmp_path / "served")
    (folder / "policy.toml").write_text(POLICY.partition("[[latency]]")[0])
    planted = "max_batch_size: 16\ndynamic_batching { max_queue_delay_microseconds: 200000 }"
    config = folder / "models/digits_engine/config.pbtxt"
    config.write_text(config.read_text().replace("max_batch_size: 1", planted, 1))
    seal_folder(folder)
    monkeypatch.setattr(
        tune, "_list_neighbors", lambda best, _: [(1, 0, ()), (1, 2 * best[1], (16,))]
    )
    checked = check_deployment(folder)
    tune.tune_deployment(
        checked, find_server(SERVER), 8.0, Store(tmp_path / "workspace"), SilentListener()
    )
    found = check_deployment(folder).record
    assert {each.setting: each.value for each in found.choices}[tune.DELAY] == "0"
    first = json.loads((folder / "tuning.json").read_text())["steps"][0]
    assert list(first["shown_better"]) == ["1 instance, delay 0 µs, preferred []"]
    assert all(len(rounds) == tune.ROUNDS for rounds in first["rounds_ns"].values())


@pytest.fixture
def encrypted(served, tmp_path):
    """`encrypted(protocol)`: the address of a TLS proxy whose certificate is in `tls.pem`."""
    command = (
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-subj",
        "/CN=localhost",
        "-days",
        "2",
    )
    files = (
        "-addext",
        "subjectAltName=IP:127.0.0.1",
        "-keyout",
        tmp_path / "tls.key",
        "-out",
        tmp_path / "tls.pem",
    )
    subprocess.run((*command, *files), check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "tls.pem", tmp_path / "tls.key")
    context.set_alpn_protocols(["h2", "http/1.1"])
    loop = asyncio.new_event_loop()
    Thread(target=loop.run_forever, daemon=True).start()

    async def copy(reader, writer):
        with suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    def open_proxy(protocol):
        async def forward(reader, writer):
            beyond = await asyncio.open_connection(
                *served[{"https": 1, "grpcs": 2}[protocol]].split(":")
            )
            await asyncio.gather(copy(reader, beyond[1]), copy(beyond[0], writer))

        server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(forward, "127.0.0.1", 0, ssl=context), loop
        )
        return f"{protocol}://127.0.0.1:{server.result(10).sockets[0].getsockname()[1]}"

    yield open_proxy
    loop.call_soon_threadsafe(loop.stop)


@pytest.mark.parametrize("protocol", ["https", "grpcs"])
def test_an_encrypted_server_is_checked_if_its_certificate_is_trusted(
    served, encrypted, tmp_path, protocol
):
    url = encrypted(protocol)
    for trusted, status, said in (
        ("", 5, "its certificate is not trusted"),
        (
            tmp_path / "tls.key",
            2,
            f"SSL_CERT_FILE={tmp_path}/tls.key: not a PEM file of certificates",
        ),
        (tmp_path / "tls.pem", 0, "PASS"),
    ):
        ran = optpipe(
            "deploy", served[0], "--check", url, SSL_CERT_FILE=str(trusted), COLUMNS="200"
        ).expect(status)
        assert said in " ".join((ran.stdout + ran.stderr).split())
        assert len(ran.stderr.splitlines()) <= 2
