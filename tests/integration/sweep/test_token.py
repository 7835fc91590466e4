"""`sweep --on ray` on a real cluster with token authentication and nothing else: the right token works, others end in two lines."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.integration.conftest import optpipe

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs optpipe[ray]"),
]
TOKEN = "0123456789abcdef" * 4
CLUSTER = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from tests.fakes.ray_nodes import start_cluster
cluster, _ = start_cluster(())
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""
WAY_OUT = (
    "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the token of the cluster"
)
REJECTED = "the Ray cluster rejected the connection: its token is missing or incorrect"


STARTS = 3
"""Ray gives a node 30 s to start, which a busy machine exceeds now and then."""


@pytest.fixture(scope="module")
def address():
    """Of a cluster whose token is TOKEN."""
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    command = [sys.executable, "-c", CLUSTER]
    for _ in range(STARTS):
        with subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            try:
                if found := process.stdout.readline().strip():
                    yield found
                    return
            finally:
                process.communicate()
    pytest.fail(f"no Ray cluster started in {STARTS} tries")


@pytest.fixture(scope="module")
def sweep(address, tmp_path_factory):
    """A sweep on the cluster, with these variables and no token in the home folder."""

    def run(*arguments, **variables):
        folder = tmp_path_factory.mktemp("sweep")
        where = ("--backend", "onnxruntime", "--gpu", "cpu", "--on", "ray")
        found = {"RAY_ADDRESS": address, "HOME": str(folder), **variables}
        return optpipe(
            "sweep",
            "digits",
            "--precision",
            "fp32",
            *where,
            *arguments,
            workspace=folder / "w",
            **found,
        )

    with pytest.MonkeyPatch.context() as patch:
        for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
            patch.delenv(name, raising=False)
        yield run


def test_the_right_token_runs_jobs_on_a_node_without_labels(sweep):
    quick = (
        "--processes",
        "1",
        "--min-time",
        "0.2",
        "--max-time",
        "3",
        "--set",
        "percentile=90",
        "--max-cv",
        "500%",
    )
    ran = sweep(*quick, "--json", RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=TOKEN)
    assert ran.status in (0, 5), ran.stderr
    assert ran.document["rows"][0]["run"]


def test_a_token_from_a_file_does_too(sweep, tmp_path):
    (tmp_path / "token").write_text(TOKEN)
    ran = sweep("--dry-run", RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(tmp_path / "token"))
    assert (ran.status, "1 job to run" in ran.stdout) == (0, True), ran.stderr


OTHERS = {
    "another": ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "another"}, REJECTED),
    "no mode": ({}, REJECTED),
    "no token": ({"RAY_AUTH_MODE": "token"}, "authentication token"),
    "no file": ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/no/such"}, "/no/such"),
}


@pytest.fixture(scope="module")
def refused(sweep):
    """What each ends with: side by side, because Ray tries the first two for 20 s."""
    with ThreadPoolExecutor(3) as threads:
        running = {
            name: threads.submit(sweep, **variables) for name, (variables, _) in OTHERS.items()
        }
    return {name: each.result() for name, each in running.items()}


@pytest.mark.parametrize("name", OTHERS)
def test_any_other_ends_in_two_lines(refused, name):
    ran, said = refused[name], OTHERS[name][1]
    lines = ran.stderr.splitlines()
    assert (ran.status, len(lines), said in lines[0], lines[1]) == (3, 2, True, WAY_OUT), ran.stderr
