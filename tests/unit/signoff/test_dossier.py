"""From evidence to a sealed dossier and back: what was judged is what the raw files say."""

import json
import shutil

import polars as pl
import pytest

from optpipe.core.errors import BadInputError
from optpipe.core.files import Files
from optpipe.core.records import json_from_record
from optpipe.core.verdict import Verdict
from optpipe.models.artifacts.housekeeping import remove_stored
from optpipe.signoff.collect import SignoffRequest, collect_evidence
from optpipe.signoff.dossier import finish_dossier, read_dossier, since_from_text
from optpipe.signoff.judge import TRUST_CRITERIA, judge_dossier
from optpipe.signoff.policy import policy_from_toml
from optpipe.signoff.release import require_possible
from optpipe.signoff.reports import overview_from_dossier
from optpipe.signoff.verify import check_dossier
from optpipe.workspace.baselines import find_approved_baseline, store_baseline
from optpipe.workspace.seal import seal_folder

LATENCY = """schema = 1
[[latency]]
p99 = "%s ms"
batch_size = 1
"""


def dossier(workspace, text, tmp_path, name="one", **wanted):
    folder = tmp_path / f".{name}"
    folder.mkdir()
    collect_evidence(SignoffRequest("digits", policy_from_toml(text.encode()), **wanted), workspace.store, folder)
    signoff = judge_dossier(read_dossier(Files(folder))).record
    (folder / "verdict.json").write_bytes(json_from_record(signoff))
    return signoff, finish_dossier(folder, tmp_path / name)


@pytest.mark.parametrize(
    ("limit", "verdict"), [("50", Verdict.PASS), ("5", Verdict.FAIL), ("12", Verdict.INCONCLUSIVE)]
)
def test_three_policies_give_three_verdicts(workspace, tmp_path, limit, verdict):
    workspace.bench(workspace.artifact("fp16"), count=900)
    signoff, _ = dossier(workspace, LATENCY % limit, tmp_path)
    assert signoff.verdict is verdict, [f"{one.name}: {one.reason}" for one in signoff.criteria]


@pytest.mark.parametrize(
    ("build", "bench", "name", "verdict"),
    [
        ({"trained": False}, {}, "trust.weights", Verdict.INCONCLUSIVE),
        ({"passed": False}, {}, "trust.outputs", Verdict.FAIL),
        ({"proven": False}, {}, "trust.precision", Verdict.FAIL),
        ({}, {"valid": False}, "latency.p99.b1", Verdict.INCONCLUSIVE),
        ({}, {"caveats": ["synthetic inputs"]}, "latency.p99.b1", Verdict.INCONCLUSIVE),
        ({}, {"batches": (2,)}, "latency.p99.b1", Verdict.INCONCLUSIVE),
        ({}, {"count": 300}, "latency.p99.b1", Verdict.INCONCLUSIVE),
    ],
)
def test_what_cannot_be_trusted_never_passes(workspace, tmp_path, build, bench, name, verdict):
    workspace.bench(workspace.artifact("fp16", **build), **bench)
    signoff, _ = dossier(workspace, LATENCY % "500", tmp_path)
    found = {one.name: one for one in signoff.criteria}
    assert found[name].verdict is verdict
    assert found[name].remedy
    assert signoff.verdict is verdict


def test_an_intact_dossier_is_accepted_and_recomputed(workspace, tmp_path):
    workspace.bench(workspace.artifact("fp16"))
    signoff, folder = dossier(workspace, LATENCY % "50", tmp_path)
    shutil.rmtree(workspace.path)
    checked = check_dossier(folder)
    assert checked.problems == ()
    assert checked.verdict is not None
    assert checked.verdict.verdict is signoff.verdict is Verdict.PASS


def test_a_resealed_dossier_with_another_verdict_is_found(workspace, tmp_path):
    workspace.bench(workspace.artifact("fp16"))
    _, folder = dossier(workspace, LATENCY % "5", tmp_path)
    verdict = folder / "verdict.json"
    verdict.write_text(verdict.read_text().replace("FAIL", "PASS"))
    seal_folder(folder)
    problems = check_dossier(folder).problems
    assert any('verdict says "PASS", but the raw files give "FAIL"' in problem for problem in problems)


def test_resealed_samples_that_were_made_faster_are_found(workspace, tmp_path):
    workspace.bench(workspace.artifact("fp16"))
    _, folder = dossier(workspace, LATENCY % "5", tmp_path)
    path = next(folder.glob("runs/*/samples/*.parquet"))
    pl.read_parquet(path).with_columns(pl.col("end_ns") - 5_000_000).write_parquet(path)
    seal_folder(folder)
    assert "was modified" in check_dossier(folder).problems[0]


@pytest.mark.parametrize("file", ["policy.toml", "request.json", "builds/artifact-*/manifest.json", "verdict.json"])
def test_a_partial_dossier_is_refused_even_when_resealed(workspace, tmp_path, file):
    workspace.bench(workspace.artifact("fp16"))
    _, folder = dossier(workspace, LATENCY % "50", tmp_path)
    next(folder.glob(file)).unlink()
    assert check_dossier(folder).problems
    seal_folder(folder)
    assert check_dossier(folder).problems


def test_a_raw_file_that_vanishes_while_it_is_copied_is_refused(workspace, tmp_path, monkeypatch):
    workspace.bench(workspace.artifact("fp16"))
    copy = shutil.copyfile

    def remove_first(source, target):
        if source.suffix == ".parquet":
            source.unlink(missing_ok=True)
        return copy(source, target)

    monkeypatch.setattr(shutil, "copyfile", remove_first)
    with pytest.raises(BadInputError, match=r"changed while it was copied \(.*\.parquet: missing\); sign off again"):
        dossier(workspace, LATENCY % "50", tmp_path)
    assert not (tmp_path / "one").exists()


def test_a_dossier_of_another_schema_version_is_refused_by_number(workspace, tmp_path):
    workspace.bench(workspace.artifact("fp16"))
    _, folder = dossier(workspace, LATENCY % "50", tmp_path)
    request = json.loads((folder / "request.json").read_text()) | {"schema_version": 7}
    (folder / "request.json").write_text(json.dumps(request))
    seal_folder(folder)
    assert "version 7; this version of optpipe reads" in check_dossier(folder).problems[0]


def test_a_regression_against_the_approved_baseline(workspace, tmp_path):
    entry = workspace.artifact("fp16")
    policy = "schema = 1\n[[regression]]\np50 = '5 %'\nbatch_size = 1\n"
    workspace.bench(entry, count=2000)
    without, folder = dossier(workspace, policy, tmp_path, "first")
    assert without.verdict is Verdict.INCONCLUSIVE
    assert {one.name: one.remedy for one in without.criteria}[
        "regression.p50.b1"
    ] == "approve one: optpipe signoff approve DOSSIER"
    store_baseline(Files(folder), workspace.path)
    same, _ = dossier(workspace, policy, tmp_path, "second")
    assert same.verdict is Verdict.PASS, [one.reason for one in same.criteria]
    workspace.counter += 100
    workspace.bench(workspace.artifact("fp16", macs=0.96), count=2000, mean_ms=12.0)
    slower, folder = dossier(workspace, policy, tmp_path, "third")
    assert slower.verdict is Verdict.FAIL
    assert check_dossier(folder).problems == ()


def test_the_newest_of_several_settings_is_judged_and_named(workspace, tmp_path):
    entry = workspace.artifact("fp16")
    for threads, mean_ms in ((1, 90.0), (2, 10.0)):
        workspace.bench(entry, mean_ms=mean_ms, options={"threads": threads, "spinning": True})
    signoff, folder = dossier(workspace, LATENCY % "50", tmp_path)
    assert signoff.verdict is Verdict.PASS, [one.reason for one in signoff.criteria]
    said = next(one for one in signoff.criteria if one.name == "latency.p99.b1").reason
    assert "(batch 1, single-stream, compute, threads=2, the most recent of 2 settings; 5 processes, " in said
    assert "it is deployed with options other than threads=2 (batch 1, single-stream, compute)" in signoff.expires_if
    assert check_dossier(folder).problems == ()
    workspace.bench(entry, mean_ms=900.0, options={"threads": 0, "spinning": True})
    signoff, _ = dossier(workspace, LATENCY % "50", tmp_path, "two")
    assert signoff.verdict is Verdict.FAIL
    assert not any(one.startswith("it is deployed with options other than") for one in signoff.expires_if), (
        "as it was built"
    )


def test_a_policy_may_say_with_which_options_the_build_is_judged(workspace, tmp_path):
    entry, policy = workspace.artifact("fp16"), LATENCY % "50" + "[build.options]\nthreads = 2\n"
    workspace.bench(entry, mean_ms=10.0, options={"threads": 1, "spinning": True})
    signoff, _ = dossier(workspace, policy, tmp_path)
    missing = next(one for one in signoff.criteria if one.name == "latency.p99.b1")
    assert (missing.verdict, missing.reason) == (Verdict.INCONCLUSIVE, "not measured: batch 1, with threads=2")
    assert missing.remedy == f"optpipe bench {entry.id} --batch 1 --option onnxruntime.threads=2"
    workspace.bench(entry, mean_ms=10.0, options={"threads": 2, "spinning": True})
    workspace.bench(entry, mean_ms=90.0, options={"threads": 4, "spinning": True})
    signoff, folder = dossier(workspace, policy, tmp_path, "two")
    assert signoff.verdict is Verdict.PASS, [one.reason for one in signoff.criteria]
    assert check_dossier(folder).problems == ()


def test_a_regression_names_the_options_of_the_baseline(workspace, tmp_path):
    entry = workspace.artifact("fp16")
    policy = "schema = 1\n[[regression]]\np50 = '5 %'\nbatch_size = 1\n"
    workspace.bench(entry, count=2000, options={"threads": 1})
    _, folder = dossier(workspace, policy, tmp_path, "first")
    store_baseline(Files(folder), workspace.path)
    workspace.bench(entry, count=2000, options={"threads": 2})
    signoff, _ = dossier(workspace, policy, tmp_path, "second")
    about = next(one.about for one in signoff.criteria if one.name == "regression.p50.b1")
    assert about.startswith(
        "batch 1, single-stream, compute, threads=2, the most recent of 2 settings; 5 processes, compared with digits-"
    )
    assert " with threads=1 (5 processes)" in about


def test_waiving_needs_a_criterion_that_exists(workspace, tmp_path):
    workspace.bench(workspace.artifact("fp16"))
    signoff, folder = dossier(workspace, LATENCY % "5", tmp_path, waivers={"latency.p99.b1": "ticket 12"})
    assert signoff.verdict is Verdict.PASS
    assert [one.waived for one in signoff.waived] == ["ticket 12"]
    assert check_dossier(folder).intact
    with pytest.raises(BadInputError, match="cannot waive unknown criterion 'latency'; criteria are trust"):
        dossier(workspace, LATENCY % "5", tmp_path, "two", waivers={"latency": "x"})


def test_the_build_to_judge_must_be_clear(workspace, tmp_path):
    with pytest.raises(BadInputError, match="first run `optpipe build digits`"):
        dossier(workspace, LATENCY % "5", tmp_path)
    workspace.artifact("fp16")
    workspace.artifact("int8")
    with pytest.raises(BadInputError, match="2 builds of digits match"):
        dossier(workspace, LATENCY % "5", tmp_path, "two")
    with pytest.raises(BadInputError, match="no build of digits matches precision bf16"):
        dossier(workspace, LATENCY % "5" + "[build]\nprecision = 'bf16'", tmp_path, "three")
    with pytest.raises(BadInputError, match="onnxruntime has no option 'thread'"):
        dossier(workspace, LATENCY % "5" + "[build]\nprecision = 'int8'\noptions = {thread = 2}", tmp_path, "four")


@pytest.mark.parametrize(
    ("policy", "waivers", "said"),
    [
        (LATENCY.replace("[[", "model='resnet50'\n[[", 1), {}, "the policy is for 'resnet50'"),
        (LATENCY, {"latency": "x"}, "cannot waive unknown criterion 'latency'; criteria are trust"),
        (
            LATENCY + "[build]\nbackend = 'onnxruntime'\noptions = {thread = 2}",
            {},
            "onnxruntime has no option 'thread'; options are",
        ),
    ],
)
def test_what_could_never_be_signed_off_is_refused_before_anything_is_built(workspace, policy, waivers, said):
    wanted = SignoffRequest("digits", policy_from_toml((policy % "5").encode()), None, waivers)
    with pytest.raises(BadInputError, match=said):
        require_possible(wanted, workspace.store, None, None, None)


@pytest.mark.parametrize("model", ["", "model='digits'\n"])
def test_the_id_of_an_artifact_as_model_leads_to_the_right_command(workspace, tmp_path, model):
    found = workspace.artifact("fp16").id
    policy = LATENCY.replace("[[", f"{model}[[", 1) % "5"
    right = (
        f"{found} is an artifact of digits, not a MODEL; run `optpipe signoff digits --artifact {found} --policy FILE`"
    )
    with pytest.raises(BadInputError, match=right):
        require_possible(SignoffRequest(found, policy_from_toml(policy.encode())), workspace.store, None, None, None)


def test_a_place_or_key_that_cannot_be_used_is_refused_before_anything_is_built(workspace, tmp_path):
    wanted = SignoffRequest("digits", policy_from_toml((LATENCY % "5").encode()))
    with pytest.raises(BadInputError, match="--output"):
        require_possible(wanted, workspace.store, tmp_path, None, None)
    with pytest.raises(BadInputError, match="ssh-keygen -t ed25519"):
        require_possible(wanted, workspace.store, None, tmp_path / "none", None)
    with pytest.raises(BadInputError, match="--junit"):
        require_possible(wanted, workspace.store, None, None, tmp_path)
    require_possible(wanted, workspace.store, tmp_path / "new" / "dossier", None, tmp_path / "new" / "junit.xml")
    assert not (tmp_path / "new").exists()


def test_what_every_dossier_must_prove_is_known_before(workspace, tmp_path):
    workspace.bench(workspace.artifact("fp16"))
    signoff, _ = dossier(workspace, LATENCY % "5", tmp_path)
    assert tuple(one.name for one in signoff.criteria)[:4] == TRUST_CRITERIA


def test_approving_replaces_the_baseline_whole(workspace, tmp_path):
    workspace.bench(workspace.artifact("fp16"))
    _, first = dossier(workspace, LATENCY % "5", tmp_path)
    _, second = dossier(workspace, LATENCY % "6", tmp_path, "two")
    for folder in (first, second):
        target = store_baseline(Files(folder), tmp_path / "w", "reason")
        assert check_dossier(target).intact
        assert (target / "policy.toml").read_bytes() == (folder / "policy.toml").read_bytes()
    assert sorted(path.name for path in target.parent.iterdir()) == ["digits", "digits.json"]


def test_a_damaged_baseline_is_refused_and_not_taken_for_none(workspace, tmp_path):
    workspace.bench(workspace.artifact("fp16"))
    _, folder = dossier(workspace, LATENCY % "5", tmp_path)
    target = store_baseline(Files(folder), tmp_path / "w")
    assert find_approved_baseline(tmp_path / "w", "digits") == target
    (target / "policy.toml").write_text("changed")
    with pytest.raises(BadInputError, match=r"policy.toml: changed\n.*optpipe signoff approve DOSSIER`"):
        find_approved_baseline(tmp_path / "w", "digits")
    for path in target.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(BadInputError, match="SHA256SUMS: missing"):
        find_approved_baseline(tmp_path / "w", "digits")


def test_all_tries_count_and_a_run_that_was_removed_is_named(workspace, tmp_path):
    entry = workspace.artifact("fp16")
    fast, slow = (workspace.bench(entry, mean_ms=ms, seed=seed) for seed, ms in ((1, 10.0), (2, 10.2)))
    signoff, _ = dossier(workspace, LATENCY % "50", tmp_path, "both")
    (group,) = signoff.groups
    assert (group.processes, set(group.runs)) == (10, {fast.name, slow.name})
    remove_stored(workspace.store, slow.name, with_dependents=False)
    signoff, folder = dossier(workspace, LATENCY % "50", tmp_path, "one")
    assert signoff.groups[0].processes == 5
    assert f"1 bench run of this build was removed and not judged: {slow.name}" in [
        one.message for one in signoff.notes
    ]
    assert check_dossier(folder).problems == ()


def test_since_narrows_what_is_judged_and_what_it_leaves_out_is_named(workspace, tmp_path):
    entry = workspace.artifact("fp16")
    removed, slow, fast = (workspace.bench(entry, mean_ms=ms, seed=int(ms)) for ms in (11.0, 90.0, 10.0))
    remove_stored(workspace.store, removed.name, with_dependents=False)
    every, _ = dossier(workspace, LATENCY % "50", tmp_path, "every")
    assert every.verdict is not Verdict.PASS
    assert (every.since, every.runs_left_out) == (None, ())
    since = since_from_text(fast.manifest.started_utc)
    signoff, folder = dossier(workspace, LATENCY % "50", tmp_path, "since", since=since)
    assert signoff.verdict is Verdict.PASS, [one.reason for one in signoff.criteria]
    assert (signoff.since, signoff.runs, signoff.runs_left_out) == (since, (fast.name,), (slow.name,))
    notes = {one.code: one for one in signoff.notes}
    assert notes["since"].message.startswith(
        f"only bench runs since {since[:10]} {since[11:19]} UTC are judged (--since)"
    )
    assert f"left out: batch 1, single-stream, compute ({slow.name}): 5 processes, p50 71." in notes["since"].message
    assert removed.name in notes["removed-runs"].message
    assert json.loads((folder / "request.json").read_text())["since"] == since
    assert check_dossier(folder).problems == ()
    assert [one.artifact for one in overview_from_dossier(read_dossier(Files(folder))).comparison.rows] == [entry.id]
    assert (
        "5 measurements are excluded: earlier than --since"
        in overview_from_dossier(read_dossier(Files(folder))).comparison.warnings
    )
    request = json.loads((folder / "request.json").read_text()) | {"since": None}
    (folder / "request.json").write_text(json.dumps(request))
    seal_folder(folder)
    assert any('verdict says "PASS"' in problem for problem in check_dossier(folder).problems)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("yesterday", "--since yesterday: expected a date or time in UTC, such as 2026-11-21"),
        ("2999-01-01", "--since 2999-01-01: is in the future; nothing was measured since then"),
    ],
)
def test_a_since_that_cannot_be_meant_is_refused(text, said):
    with pytest.raises(BadInputError, match=said):
        since_from_text(text)


def test_since_is_read_in_utc():
    assert since_from_text("2026-01-02") == "2026-01-02T00:00:00.000+00:00"
    assert since_from_text("2026-01-02T03:00+02:00") == "2026-01-02T01:00:00.000+00:00"


def test_the_report_shows_the_judged_build_and_none_that_is_called_the_same(workspace, tmp_path):
    old, new = workspace.artifact("fp16", macs=0.96), workspace.artifact("fp16")
    workspace.bench(old, workspace.artifact("fp32"))
    workspace.bench(new, mean_ms=14.0)
    workspace.bench(workspace.artifact("int8", trained=False))
    _, folder = dossier(workspace, LATENCY % "50", tmp_path, artifact=old.id)
    found = overview_from_dossier(read_dossier(Files(folder))).comparison
    assert {row.precision: row.artifact == old.id for row in found.rows} == {"fp16": True, "fp32": False}
    assert found.warnings[-1] == "10 measurements are excluded: of another build or model that is called the same"
