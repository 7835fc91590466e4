"""`optpipe run digits`, cold to verdict, and `build --precision auto` with what later commands say of its decision."""

import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from optpipe.cli.app import SCHEMA_VERSION
from optpipe.measure.race import EARLY_ROUNDS, FINAL_ROUNDS
from tests.integration.conftest import Ran, ignore_host, optpipe

AUTO = ("build", "digits", "--precision", "auto")


@pytest.fixture(scope="module")
def chosen(
    tmp_path_factory: pytest.TempPathFactory, exported: Callable[[Path], Path]
) -> tuple[Path, Ran]:
    """A working directory, and the document of the choice between ONNX Runtime's FP32 and INT8."""
    folder = tmp_path_factory.mktemp("chosen")
    exported(folder / ".optpipe")
    words = ("--backend", "onnxruntime", "--device", "cpu", "--compare-at", "1,2", "--json")
    return folder, optpipe(*AUTO, *words, cwd=folder)


def test_every_candidate_is_judged_raced_and_recorded(chosen: tuple[Path, Ran]) -> None:
    folder, ran = chosen
    assert ran.status == 0, ran.stderr
    decision = ran.document["decision"]
    candidates = {each["artifact"]: each for each in decision["candidates"]}
    assert {each["precision"] for each in candidates.values()} == {"fp32", "int8"}
    assert set(decision["winners"]) == {"1", "2"}
    assert decision["candidates"][0]["artifact"] in decision["winners"].values()
    for each in candidates.values():
        assert each["accuracy"]["keeps"] is True
        for times in each["times"]:
            won = decision["winners"][str(times["batch_size"])] == each["artifact"]
            assert (times["ratio"] is None) == won, "two candidates: both are in the final rounds"
            assert len(times["final_ns"]) in (EARLY_ROUNDS, FINAL_ROUNDS)
    winner = decision["candidates"][0]["artifact"]
    assert "the fastest within 1 point" in optpipe("store", "show", winner, cwd=folder).stdout
    run = Path(ran.document["run_dir"]).name
    assert winner in optpipe("store", "show", run, cwd=folder).stdout


def test_bench_and_signoff_name_the_winner(chosen: tuple[Path, Ran]) -> None:
    folder, ran = chosen
    winners = set(ran.document["decision"]["winners"].values())
    short = ("--batch", "1", "--processes", "1", "--min-time", "0.2", "--max-cv", "900%", "--json")
    benched = optpipe("bench", "digits", "--precision", "auto", *short, cwd=folder)
    assert {each["subject"]["artifact"] for each in benched.document["measurements"]} == winners
    policy = folder / "policy.toml"
    policy.write_text(
        'schema = 1\nname = "any"\nmodel = "digits"\n\n[[latency]]\np50 = "1 s"\nbatch_size = 1\n'
    )
    refused = optpipe("signoff", "digits", "--policy", policy, "--no-measure", cwd=folder).expect(2)
    assert "--precision auto chose" in refused.stderr


BUILD = 'schema = 1\nname = "digits"\nmodel = "digits"\n[build]\nbackend = "onnxruntime"\nprecision = "int8"\n'
POLICIES = {
    "PASS": BUILD
    + '[accuracy]\nmaximum_drop = "2 points"\n[precision]\nint8 = "80 %"\n[size]\nmaximum = "1 MiB"\n',
    "FAIL": BUILD + '[size]\nmaximum = "1 KiB"\n',
}
STATUS = {"PASS": 0, "FAIL": 1}


def finished(*arguments, cwd):
    """The status, the document and what was said."""
    ran = optpipe(*arguments, "--json", cwd=cwd, workspace=None, **ignore_host(cwd))
    return ran.status, ran.document, ran.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


def test_cold_to_verdict(folder, tmp_path):
    """One workspace, cold first, then from the store; one test, so that parallel workers do not build it twice."""
    verdicts = {name: _walked(folder, name) for name in POLICIES}
    for name, document in verdicts.items():
        status, verified, _ = finished("verify", document["dossier"], cwd=folder)
        assert verified["intact"], verified["problems"]
        assert (verified["verdict"], status) == (name, STATUS[name])
    _a_changed_byte_is_exit_status_2(folder / verdicts["PASS"]["dossier"], tmp_path)
    _an_approved_baseline_is_used(folder, verdicts)


def _walked(folder, name):
    (folder / f"{name}.toml").write_text(POLICIES[name])
    quick = ["--set", "min-time=0.2", "--max-cv", "400%", "--no-profile", "--no-preprocess"]
    quick += (
        [] if name == "PASS" else ["--precision", "int8"]
    )  # without FP32, the default beside it
    status, document, errors = finished(
        "run", "digits", "--policy", f"{name}.toml", *quick, cwd=folder
    )
    assert "criteria" in document, errors
    criteria = {one["name"]: one["verdict"] for one in document["criteria"]}
    assert (document["verdict"], status) == (name, STATUS[name]), (criteria, errors)
    assert {"name", "observed", "threshold", "ci", "verdict", "reason", "remedy"} <= set(
        document["criteria"][0]
    )
    assert document["expires_if"]
    assert [step["name"] for step in document["steps"]] == ["build", "evaluate", "bench"]
    assert all(step["status"] == "done" for step in document["steps"]), (
        "a finished walk is never answered from notes"
    )
    assert (folder / document["dossier"] / "junit.xml").read_text().startswith("<?xml")
    return document


def _a_changed_byte_is_exit_status_2(dossier, tmp_path):
    copied = shutil.copytree(dossier, tmp_path / "copied")
    samples = next(copied.glob("runs/bench-*/samples/*.parquet"))
    content = bytearray(samples.read_bytes())
    content[len(content) // 2] ^= 1
    samples.write_bytes(content)
    status, document, _ = finished("verify", "copied", cwd=tmp_path)
    assert status == 2
    assert document["problems"] == [f"{samples.relative_to(copied)}: changed"]


def _an_approved_baseline_is_used(folder, verdicts):
    status, _, _ = finished("signoff", "approve", verdicts["FAIL"]["dossier"], cwd=folder)
    assert status == 1, "a FAIL is no baseline without a reason"
    status, document, _ = finished("signoff", "approve", verdicts["PASS"]["dossier"], cwd=folder)
    assert (status, document["model"]) == (0, "digits")
    (folder / "regression.toml").write_text(
        BUILD + '[[regression]]\np50 = "10000 %"\nbatch_size = 1\n'
    )
    _, document, _ = finished("signoff", "digits", "--policy", "regression.toml", cwd=folder)
    found = next(one for one in document["criteria"] if one["name"] == "regression.p50.b1")
    assert document["baseline"] == verdicts["PASS"]["dossier_name"]
    # one run on either side: the scatter between runs is hardly known, so that even this limit may be inside the interval
    assert found["verdict"] in ("PASS", "INCONCLUSIVE")
    assert found["observed"] is not None


def test_init_writes_a_policy_that_works_and_never_over_another(tmp_path, inside):
    written = inside("signoff", "--init", "--json", cwd=tmp_path)
    assert (written.status, written.document) == (
        0,
        {"schema_version": SCHEMA_VERSION, "policy": "policy.toml", "schema": "policy.schema.json"},
    )
    assert inside("signoff", "--init", "--json", cwd=tmp_path).status == 2


def test_an_interrupted_signoff_names_the_command_that_resumes_it(
    exported: Callable[[Path], Path],
    inside: Callable[..., Ran],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exported(tmp_path / "of mine")
    text = 'schema = 1\nmodel = "digits"\n[accuracy]\nmaximum_drop = "5 points"\n[preprocessing]\n'
    (tmp_path / "a policy.toml").write_text(text + 'minimum_agreement = "90%"\n')
    words = ("--workspace", "of mine", "signoff", "digits", "--policy", "a policy.toml")
    monkeypatch.setattr(sys, "argv", ["/somewhere/optpipe", *words])

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as interrupted:
        interrupted.setattr("optpipe.signoff.steps.derive_preprocessing", interrupt)
        cut = inside(*words, cwd=tmp_path)
    assert cut.status == 130, cut.stderr
    assert [each.name.split("-")[0] for each in (tmp_path / "of mine/runs").iterdir()] == [
        "evaluate"
    ]
    said = " ".join(cut.stderr.split())
    program, *typed = shlex.split(said.partition("this resumes it: ")[2].split(" optpipe: ")[0])
    assert (program, tuple(typed)) == ("optpipe", words)
    resumed = inside(*typed, cwd=tmp_path)
    assert resumed.status in (0, 1, 5), resumed.stderr
    kinds = sorted(each.name.split("-")[0] for each in (tmp_path / "of mine/runs").iterdir())
    assert kinds == ["evaluate", "preprocess"], "what was measured is not measured again"
