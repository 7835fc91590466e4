"""A dossier's artifact and requests again, in another interpreter."""

import subprocess
import sys

import pytest

from tests.integration.conftest import optpipe


@pytest.fixture(scope="module")
def found(signed, tmp_path_factory):
    return signed(tmp_path_factory.mktemp("recheck") / "signed")


def test_the_same_environment_gives_the_same_outputs_to_the_last_bit(
    found, inside, monkeypatch, tmp_path
):
    monkeypatch.setattr(
        "optpipe.measure.pair.MAX_ROUND_FACTOR", 1
    )  # no more rounds on a noisy machine
    monkeypatch.setattr("optpipe.deploy.recheck.MIN_SECONDS", 0.05)
    words = ("--python", sys.executable, "--rounds", "8", "--json")
    ran = inside(
        "signoff", "recheck", found.dossier, *words, "--workspace", found.workspace, cwd=tmp_path
    )
    assert ran.status in (0, 1, 5), (
        ran.stderr
    )  # how a busy machine scatters is not what is tested here
    for number in range(1, 9):
        assert f"round {number}, both processes: VALID" in ran.stderr
    record = ran.document
    (output,) = record["outputs"]
    assert (output["name"], output["changed"], output["predictions_changed"]) == ("logits", 0, 0)
    assert not record["versions"]
    low, high = record["latency"]["ci"]
    assert low <= record["latency"]["value"] <= high
    assert record["rounds_to_settle"] >= 0
    assert not list((found.workspace / "tmp").glob("recheck-*"))


def test_an_environment_that_lacks_what_the_worker_needs_is_named_with_the_command(
    found, inside, tmp_path
):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    words, workspace = ("signoff", "recheck", found.dossier, "--python"), found.workspace
    ran = optpipe(*words, tmp_path / "bare", workspace=workspace).expect(3)
    assert "lacks numpy, msgspec" in ran.stderr
    assert "uv pip install -p" in ran.stderr
    optpipe(*words, tmp_path / "nothing", workspace=workspace).expect(2)
    for option, value, said in (
        ("--max-slowdown", "5", "the number has no unit"),
        ("--rounds", "5", "a comparison of processes needs 8 rounds or more"),
    ):
        refused = inside(
            *words, sys.executable, option, value, "--workspace", workspace, cwd=tmp_path
        ).expect(2)
        assert f"{option} {value}: {said}" in refused.stderr


def test_an_audit_measures_drawn_criteria_anew_and_agrees_or_says_why_not(found, tmp_path):
    ran = optpipe(
        "verify", found.dossier, "--audit", "2:7", "--json", workspace=found.workspace
    ).expect(0)
    audit = {each["name"]: each for each in ran.document["audit"]}
    assert set(audit) == {"accuracy.maximum_drop", "preprocessing.minimum_agreement"}
    assert {each["verdict"] for each in audit.values()} == {"PASS"}
    assert ran.document["audit_seed"] == 7
    dossier = {each.name for each in (found.dossier / "runs").iterdir()}
    assert not dossier & {each["source"] for each in audit.values()}, "the evidence is new"
    for words, reason in (
        (("--audit", "many"), "expected COUNT or COUNT:SEED"),
        (("--audit", "1", "--workspace", tmp_path), "no build of digits"),
    ):
        assert reason in optpipe("verify", found.dossier, *words).expect(2).stderr
