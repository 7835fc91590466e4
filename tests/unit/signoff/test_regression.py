"""Regressions are decided by interleaved processes of both builds where they were compared so."""

import json
import re
import shutil

import pytest
from tests.fakes.dossiers import edit, examine, seal_anew

from optpipe.core.entries import ArtifactInfo
from optpipe.core.files import Files
from optpipe.core.verdict import Verdict
from optpipe.measure.compare_workspace import compare_workspace
from optpipe.signoff.verify import check_dossier
from optpipe.workspace.seal import store_baseline

POLICY = "schema = 1\n[build]\nprecision = 'fp16'\n[[regression]]\np50 = '3 %'\nbatch_size = 1\nmode = 'compute'\n"


@pytest.fixture(scope="module")
def measured(make_workspace, tmp_path_factory):
    folder = tmp_path_factory.mktemp("regression")
    workspace = make_workspace(folder / "workspace")
    old = workspace.artifact("fp16")
    workspace.bench(old, count=2000)
    workspace.approve(POLICY, folder / "approved")
    new = workspace.artifact("fp16", macs=0.96)
    workspace.bench(new, count=2000, mean_ms=10.3, seed=5)
    return workspace, old.id, new.id


@pytest.fixture
def workspace(measured, make_workspace, tmp_path):
    return make_workspace(
        shutil.copytree(measured[0].path, tmp_path / "workspace"), measured[0].counter
    )


@pytest.fixture
def builds(measured, workspace):
    """The approved build and the next one, measured on a day on which everything took 3 % longer."""
    return tuple(workspace.store.find(each, ArtifactInfo) for each in measured[1:])


@pytest.fixture(scope="module")
def compared(measured, make_workspace, tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    workspace = make_workspace(
        shutil.copytree(measured[0].path, folder / "workspace"), measured[0].counter
    )
    workspace.pair(*(workspace.store.find(each, ArtifactInfo) for each in measured[1:]))
    sign_off(workspace, folder, "one")
    return folder / "one"


def sign_off(workspace, tmp_path, name, criterion="regression.p50.b1.compute", **wanted):
    found, folder = workspace.sign_off(POLICY, tmp_path / name, **wanted)
    checked, verdict = examine(folder)
    assert (checked.differs, checked.open, verdict) == ([], [], found.verdict)
    return {one.name: one for one in found.criteria}.get(criterion)


@pytest.mark.slow
def test_a_baseline_of_another_network_of_that_name_is_said(make_workspace, tmp_path):
    """One that was trained again is none; `verify` reads the same from the dossier."""
    workspace = make_workspace(tmp_path / "workspace")
    for name, width in (("approved", 10), ("again", 10), ("other", 20)):
        workspace.counter += 100
        artifact = workspace.artifact("fp16", macs=0.9 + workspace.counter / 1e4, width=width)
        workspace.bench(artifact)
        sign_off(workspace, tmp_path, name, artifact=artifact.id)
        if name == "approved":
            store_baseline(Files(tmp_path / name), workspace.path)
    notes = {name: read_notes(tmp_path / name) for name in ("approved", "again", "other")}
    assert "other-network" not in notes["approved"].keys() | notes["again"].keys()
    assert (
        "is of another network called digits: other, x n×8 to y n×10, 80 weights; this one: "
        in notes["other"]["other-network"]
    )
    assert check_dossier(tmp_path / "other").problems == ()
    reasons = {name: read_reason(tmp_path / name) for name in ("again", "other")}
    assert "another network" in reasons["other"]
    assert "another network" not in reasons["again"]
    (warning,) = [
        each for each in compare_workspace(workspace.store)[0].warnings if "networks" in each
    ]
    assert warning.startswith("2 networks are called digits, and each row shows the newest: ")


def read_reason(dossier):
    """Why the regression is judged so; it is INCONCLUSIVE in all dossiers of this test."""
    (found,) = (
        one
        for one in json.loads((dossier / "verdict.json").read_text())["criteria"]
        if one["name"].startswith("regression")
    )
    assert found["verdict"] == "INCONCLUSIVE"
    return found["reason"]


def read_notes(dossier):
    return {
        note["code"]: note["message"]
        for note in json.loads((dossier / "verdict.json").read_text())["notes"]
    }


@pytest.mark.slow
def test_what_different_days_cannot_decide_suggests_the_comparison_that_can(
    workspace, tmp_path, builds
):
    old, new = builds
    seen = sign_off(workspace, tmp_path, "one")
    assert seen.verdict is Verdict.INCONCLUSIVE, seen.reason
    assert seen.remedy == (
        "compare both in interleaved processes: "
        f"optpipe bench {new.id} --against {old.id} --metric p50 --batch 1 --max-cv 50%"
    )
    workspace.pair(old, new, ratio=1.0)
    seen = sign_off(workspace, tmp_path, "two")
    assert seen.verdict is Verdict.PASS, seen.reason
    assert seen.about.startswith(
        "batch 1, single-stream, compute; 10 interleaved rounds with digits-onnxruntime-fp16-"
    )
    assert check_dossier(tmp_path / "two").problems == ()


@pytest.mark.parametrize(
    "swapped",
    [
        pytest.param(False, id="baseline first"),
        pytest.param(True, id="build first", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_a_loss_is_found_whichever_build_was_named_first(workspace, tmp_path, builds, swapped):
    old, new = builds
    pair = (
        workspace.pair(new, old, ratio=1 / 1.1) if swapped else workspace.pair(old, new, ratio=1.1)
    )
    seen = sign_off(workspace, tmp_path, "one")
    assert seen.verdict is Verdict.FAIL
    assert seen.observed == pytest.approx(0.1, abs=0.02)
    assert seen.source == pair.name


@pytest.mark.slow
def test_all_comparisons_count_and_rounds_that_are_not_valid_do_not(workspace, tmp_path, builds):
    workspace.pair(*builds, ratio=1.1, invalid=("a003", "b003", "b007"), seed=1)
    workspace.pair(*builds, ratio=1.0, seed=2)
    seen = sign_off(workspace, tmp_path, "one")
    assert "18 interleaved rounds in 2 runs" in seen.about
    assert seen.about.endswith("; left out: 2 not VALID")
    assert seen.verdict is Verdict.INCONCLUSIVE, "the two runs differ by far more than their rounds"
    assert seen.remedy.startswith("with this scatter even 20 runs")
    workspace.pair(*builds, ratio=1.1, seed=3)
    seen = sign_off(workspace, tmp_path, "two")
    assert "28 interleaved rounds in 3 runs" in seen.about
    assert seen.remedy.startswith("with this scatter even 20 runs")


@pytest.mark.slow
def test_a_comparison_under_another_load_or_with_other_settings_is_none_of_this_one(
    workspace, tmp_path, builds
):
    workspace.pair(*builds, ratio=1.1, mode="end-to-end")
    workspace.pair(*builds, ratio=1.1, seed=1, invalid=[f"a{turn:03}" for turn in range(8)])
    seen = sign_off(workspace, tmp_path, "one")
    assert "interleaved" not in seen.about
    assert "--against" in seen.remedy


@pytest.mark.slow
def test_a_load_that_the_baseline_was_never_measured_under_is_compared_too(
    workspace, tmp_path, builds, monkeypatch
):
    old, new = builds
    workspace.bench(new, mode="end-to-end")
    monkeypatch.setitem(globals(), "POLICY", POLICY.replace("'compute'", "'end-to-end'"))
    seen = sign_off(workspace, tmp_path, "one", "regression.p50.b1.end-to-end")
    assert seen.reason.startswith(
        "the baseline has no measurement of batch 1, single-stream, end-to-end"
    )
    assert (
        f"optpipe bench {new.id} --against {old.id} --metric p50 --batch 1 --mode end-to-end"
        in seen.remedy
    )
    workspace.pair(old, new, mode="end-to-end")
    assert (
        sign_off(workspace, tmp_path, "two", "regression.p50.b1.end-to-end").verdict is Verdict.PASS
    )


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("first_rounds", 9, "comparison.json: ratio"),
        pytest.param("seed", 8, "comparison.json: measurements[0] says", marks=pytest.mark.slow),
        pytest.param(
            "contender_ns", [1e6] * 10, "comparison.json: contender_ns", marks=pytest.mark.slow
        ),
        pytest.param(
            "invalid_processes",
            3,
            "comparison.json: invalid_processes says 3",
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.slow
def test_a_comparison_that_does_not_follow_from_its_samples_is_found(
    compared, tmp_path, key, value, said
):
    shutil.copytree(compared, tmp_path / "one")
    (path,) = (tmp_path / "one").glob("runs/*/comparison.json")
    edit(path, key, value=value)
    seal_anew(tmp_path / "one")
    problems = check_dossier(tmp_path / "one").problems
    assert any(said in problem for problem in problems), problems
    assert examine(tmp_path / "one")[0].differs


@pytest.mark.slow
def test_processes_and_rounds_that_do_not_show_a_percentile_decide_nothing(
    workspace, tmp_path, builds, monkeypatch
):
    """Those that show it may be the ones that nothing disturbed."""
    monkeypatch.setitem(globals(), "POLICY", POLICY.replace("p50", "p99"))
    old, new = builds
    workspace.bench(new, mean_ms=25.0, count=400, processes=4)
    seen = sign_off(workspace, tmp_path, "one", "regression.p99.b1.compute")
    assert seen.verdict is Verdict.INCONCLUSIVE
    assert "p99 could not be estimated in 4 of 9 VALID processes: needs 662 samples" in seen.reason
    workspace.pair(old, new)
    assert (
        "the interval" in sign_off(workspace, tmp_path, "two", "regression.p99.b1.compute").reason
    )
    workspace.pair(old, new, count=400, seed=1)
    seen = sign_off(workspace, tmp_path, "three", "regression.p99.b1.compute")
    assert seen.verdict is Verdict.INCONCLUSIVE
    assert "the processes of 10 of 20 VALID rounds do not show p99" in seen.reason
    assert re.search(r"measure longer: optpipe bench .* --against .* --since", seen.remedy)
