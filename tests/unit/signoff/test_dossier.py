"""From evidence to a sealed dossier and back: what was judged is what the raw files say."""

import json
import shutil
from dataclasses import replace

import pytest
from tests.fakes.dossiers import edit, examine

from optpipe.core.errors import BadInputError
from optpipe.core.events import SilentListener
from optpipe.core.files import Files, hash_file
from optpipe.core.measurement import Reason
from optpipe.core.precision import PrecisionShare
from optpipe.core.records import plain_from_record
from optpipe.core.verdict import Verdict
from optpipe.models.artifacts.housekeeping import remove_stored
from optpipe.signoff.collect import SignoffRequest
from optpipe.signoff.dossier import read_dossier, since_from_text
from optpipe.signoff.judge import TRUST_CRITERIA, judge_dossier
from optpipe.signoff.policy import policy_from_toml
from optpipe.signoff.release import require_possible
from optpipe.signoff.reports import compare_dossier
from optpipe.signoff.verify import check_dossier
from optpipe.workspace.seal import find_approved_baseline, seal_folder, store_baseline

LATENCY = 'schema = 1\n[[latency]]\np99 = "%s ms"\nbatch_size = 1\n'
REGRESSION = "schema = 1\n[[regression]]\np50 = '5 %'\nbatch_size = 1\n"


@pytest.fixture
def sign_off(workspace, tmp_path):
    """`sign_off(policy, name, ...)`: the verdict and the dossier, on which the independent verifier agrees."""

    def make(policy, name="one", **wanted):
        record, folder = workspace.sign_off(policy, tmp_path / name, **wanted)
        found, verdict = examine(folder)
        assert (found.differs, found.open, verdict) == ([], [], record.verdict)
        return record, folder

    return make


def compare(folder):
    dossier = read_dossier(Files(folder))
    return compare_dossier(dossier, judge_dossier(dossier)[1])


@pytest.fixture(scope="module")
def signed(make_workspace, tmp_path_factory):
    """An FP16 build that was measured, a dossier that passes and one that fails."""
    place = tmp_path_factory.mktemp("signed")
    workspace = make_workspace(place / "workspace")
    workspace.bench(workspace.artifact("fp16"))
    return workspace, {
        limit: workspace.sign_off(LATENCY % limit, place / limit) for limit in ("50", "5")
    }


@pytest.fixture
def passed(signed, tmp_path):
    return shutil.copytree(signed[1]["50"][1], tmp_path / "passed")


@pytest.fixture
def failed(signed, tmp_path):
    return shutil.copytree(signed[1]["5"][1], tmp_path / "failed")


@pytest.mark.parametrize(
    ("limit", "verdict"), [("50", "PASS"), ("5", "FAIL"), ("15", "INCONCLUSIVE")]
)
def test_three_policies_give_three_verdicts(workspace, sign_off, limit, verdict):
    workspace.bench(workspace.artifact("fp16"), count=900)
    record, _ = sign_off(LATENCY % limit)
    assert record.verdict == verdict, [f"{one.name}: {one.reason}" for one in record.criteria]
    assert tuple(one.name for one in record.criteria)[:4] == TRUST_CRITERIA


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
def test_what_cannot_be_trusted_never_passes(workspace, sign_off, build, bench, name, verdict):
    workspace.bench(workspace.artifact("fp16", **build), **bench)
    record, _ = sign_off(LATENCY % "500")
    found = {one.name: one for one in record.criteria}
    assert (found[name].verdict, record.verdict) == (verdict, verdict)
    assert found[name].remedy


@pytest.mark.parametrize(
    "limit", ['[size]\nmaximum = "1 GiB"', '[accuracy]\nmaximum_drop = "9 points"']
)
@pytest.mark.parametrize("measured", ["invalid", "nothing"])
@pytest.mark.slow
def test_a_policy_without_times_does_not_pass_without_a_valid_process(
    workspace, sign_off, limit, measured
):
    entry = workspace.artifact("fp16")
    workspace.evaluate(entry)
    if measured == "invalid":
        workspace.bench(entry, processes=1, valid=False)
    record, _ = sign_off(f"schema = 1\n{limit}\n")
    found = {one.name: one for one in record.criteria}
    assert found["trust.environment"].verdict is Verdict.INCONCLUSIVE
    assert record.verdict is Verdict.INCONCLUSIVE
    assert found["trust.environment"].remedy


def test_facts_of_a_machine_on_which_no_process_was_valid_prove_nothing(workspace, sign_off):
    workspace.bench(workspace.artifact("fp16"), valid=False)
    record, _ = sign_off('schema = 1\n[environment]\ngpu = "none"\n')
    found = {one.name: one.verdict for one in record.criteria}
    assert found["environment.gpu"] is Verdict.INCONCLUSIVE


@pytest.mark.slow
def test_a_precision_without_layers_that_were_read_is_undecided(workspace, sign_off):
    entry = workspace.artifact("fp16", proven=False)
    nothing = replace(
        entry.info.precision_proof, share=PrecisionShare(layers={}, macs={}, total_macs=0)
    )
    edit(entry.path / "manifest.json", "info", "precision_proof", value=plain_from_record(nothing))
    workspace.bench(entry)
    record, _ = sign_off(LATENCY % "50")
    found = {one.name: one.verdict for one in record.criteria}
    assert found["trust.precision"] is Verdict.INCONCLUSIVE


UNKNOWN = {
    "policy on the share": ("fp16", 0.97, '[precision]\nfp16 = "50%"', "precision.fp16"),
    "proof alone": ("fp16", 0.97, "", "trust.precision"),
    "fp32": ("fp32", 1.0, "", "trust.precision"),
}


@pytest.mark.parametrize("case", UNKNOWN)
@pytest.mark.parametrize("kind", ["unattributed", "bf16"])
@pytest.mark.slow
def test_products_of_unknown_cost_decide_nothing(workspace, sign_off, case, kind):
    precision, share, limit, name = UNKNOWN[case]
    entry = workspace.artifact(precision, macs=share)
    unknown = [{"op": "Attention", "type": kind, "count": 2}]
    place = "info", "precision_proof", "share", "unknown"
    edit(entry.path / "manifest.json", *place, value=unknown)
    workspace.bench(entry, count=900)
    record, folder = sign_off(LATENCY % "50" + f"\n{limit}\n")
    found = {one.name: one for one in record.criteria}
    assert found[name].verdict is Verdict.INCONCLUSIVE
    assert record.verdict is Verdict.INCONCLUSIVE
    assert "unknown cost" in f"{found[name].reason} {found[name].about}"
    assert not check_dossier(folder).problems


@pytest.mark.slow
def test_both_verifiers_accept_a_process_that_was_interrupted_on_a_busy_host(workspace, sign_off):
    """The worker's own reasons and those that follow from the raw files are one set, in whatever order they were found."""
    entry = workspace.artifact("fp16")
    workspace.bench(entry)
    own = [
        Reason(code, "seen by the worker", "run it again", invalidates=True)
        for code in ("interrupted", "not-steady")
    ]
    run = workspace.bench(entry, processes=1, reasons=own, noise=2.0, max_cv=0.025)
    path = run.path / "measurements.json"
    edit(path, "measurements", 0, "reasons", value=lambda reasons: reasons[::-1])
    hashed = {"sha256": hash_file(path), "size_bytes": path.stat().st_size}
    edit(run.path / "manifest.json", "files", "measurements.json", value=hashed)
    record, _ = sign_off(LATENCY % "50")
    (codes,) = {one.codes for group in record.groups for one in group.left_out}
    assert codes == ("dispersion", "interrupted", "not-steady")


@pytest.mark.parametrize(
    ("precision", "share", "stated", "trusted", "verdict"),
    [
        ("fp16", 0.77, 'fp16 = "75%"', True, "PASS"),
        ("fp16", 0.77, 'fp16 = "78%"', True, "FAIL"),
        ("fp16", 0.77, 'int8 = "1%"', False, "FAIL"),
        ("fp32", 0.77, 'fp32 = "75%"', False, "FAIL"),
    ],
)
@pytest.mark.slow
def test_a_policy_states_the_share_of_a_precision_that_is_enough(
    workspace, sign_off, precision, share, stated, trusted, verdict
):
    workspace.bench(workspace.artifact(precision, proven=False, macs=share), count=900)
    record, folder = sign_off(LATENCY % "50" + f"\n[precision]\n{stated}\n")
    found = {one.name: one.verdict for one in record.criteria}
    assert (found["trust.precision"] is Verdict.PASS) == trusted
    assert record.verdict == verdict
    assert not check_dossier(folder).problems


def test_a_runtime_that_no_triton_release_carries_is_named(workspace, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(SilentListener, "inform", lambda _, message: told.append(message))
    workspace.bench(workspace.artifact("fp16"))
    workspace.release((LATENCY % "50").encode(), tmp_path / "one")
    assert [
        each for each in told if each.startswith("to serve this build: no Triton release up to")
    ]


@pytest.mark.parametrize(
    "file", ["policy.toml", "request.json", "builds/artifact-*/manifest.json", "verdict.json"]
)
def test_a_partial_dossier_is_refused_even_when_resealed(passed, file):
    next(passed.glob(file)).unlink()
    assert check_dossier(passed).problems
    seal_folder(passed)
    assert check_dossier(passed).problems


def test_a_raw_file_that_vanishes_while_it_is_copied_is_refused(
    workspace, sign_off, tmp_path, monkeypatch
):
    workspace.bench(workspace.artifact("fp16"))
    read = Files.read

    def remove_first(files, name):
        if name.endswith(".parquet"):
            (files.folder / name).unlink(missing_ok=True)
        return read(files, name)

    monkeypatch.setattr(Files, "read", remove_first)
    with pytest.raises(BadInputError, match=r"cannot read .*\.parquet: No such file"):
        sign_off(LATENCY % "50")
    assert not (tmp_path / "one").exists()


def test_a_dossier_of_another_schema_version_is_refused_by_number(passed):
    edit(passed / "request.json", "schema_version", value=7)
    seal_folder(passed)
    assert "version 7; this version of optpipe reads" in check_dossier(passed).problems[0]


@pytest.mark.slow
def test_a_regression_against_the_approved_baseline(workspace, sign_off):
    workspace.bench(workspace.artifact("fp16"), count=2000, options={"threads": 1})
    without, folder = sign_off(REGRESSION, "first")
    assert without.verdict is Verdict.INCONCLUSIVE
    remedies = {one.name: one.remedy for one in without.criteria}
    assert "optpipe signoff approve" in remedies["regression.p50.b1"]
    store_baseline(Files(folder), workspace.path)
    same, _ = sign_off(REGRESSION, "second")
    assert same.verdict is Verdict.PASS, [one.reason for one in same.criteria]
    workspace.counter += 100
    slow = workspace.artifact("fp16", macs=0.96)
    options = {"threads": 2, "spinning": True}
    workspace.bench(slow, count=2000, mean_ms=12.0, options=options)
    once, _ = sign_off(REGRESSION, "third")
    reason = next(one.reason for one in once.criteria if one.name == "regression.p50.b1")
    assert "how much runs differ is not known" in reason
    workspace.bench(slow, count=2000, mean_ms=12.0, options=options)
    slower, folder = sign_off(REGRESSION, "fourth")
    assert slower.verdict is Verdict.FAIL
    look = next(one.message for one in slower.notes if one.code == "look")
    assert "measurements, look 2 (2 bench runs of one load)" in look
    about = next(one.about for one in slower.criteria if one.name == "regression.p50.b1")
    assert " with threads=1 (5 processes)" in about
    assert check_dossier(folder).problems == ()


@pytest.mark.slow
def test_the_newest_of_several_settings_is_judged_and_named(workspace, sign_off):
    entry = workspace.artifact("fp16")
    for threads, mean_ms in ((1, 90.0), (2, 10.0)):
        workspace.bench(entry, mean_ms=mean_ms, options={"threads": threads, "spinning": True})
    record, folder = sign_off(LATENCY % "50")
    assert record.verdict is Verdict.PASS, [one.reason for one in record.criteria]
    said = next(one for one in record.criteria if one.name == "latency.p99.b1").about
    assert "threads=2, the most recent of 2 settings; 5 processes" in said
    deployed = "it is deployed with options other than"
    assert any(one.startswith(f"{deployed} threads=2") for one in record.expires_if)
    assert check_dossier(folder).problems == ()
    workspace.bench(entry, mean_ms=900.0, options={"threads": 0, "spinning": True})
    record, _ = sign_off(LATENCY % "50", "two")
    assert record.verdict is Verdict.FAIL
    assert not any(one.startswith(deployed) for one in record.expires_if), "as it was built"


@pytest.mark.slow
def test_a_policy_may_say_with_which_options_the_build_is_judged(workspace, sign_off):
    entry, policy = workspace.artifact("fp16"), LATENCY % "50" + "[build.options]\nthreads = 2\n"
    workspace.bench(entry, options={"threads": 1, "spinning": True})
    record, _ = sign_off(policy)
    missing = next(one for one in record.criteria if one.name == "latency.p99.b1")
    assert missing.verdict is Verdict.INCONCLUSIVE
    assert missing.remedy == f"optpipe bench {entry.id} --batch 1 --option onnxruntime.threads=2"
    workspace.bench(entry, options={"threads": 2, "spinning": True})
    workspace.bench(entry, mean_ms=90.0, options={"threads": 4, "spinning": True})
    record, folder = sign_off(policy, "two")
    assert record.verdict is Verdict.PASS, [one.reason for one in record.criteria]
    assert check_dossier(folder).problems == ()


def test_the_build_to_judge_must_be_clear(workspace, sign_off):
    with pytest.raises(BadInputError, match="`optpipe build digits` builds it"):
        sign_off(LATENCY % "5")
    workspace.artifact("fp16")
    workspace.artifact("int8")
    for number, (build, said) in enumerate(
        (
            ("", "2 builds of digits match"),
            ("[build]\nprecision = 'bf16'", "no build of digits matches precision bf16"),
        )
    ):
        with pytest.raises(BadInputError, match=said):
            sign_off(LATENCY % "5" + build, str(number))


@pytest.mark.parametrize(
    ("policy", "waivers", "said"),
    [
        (LATENCY.replace("[[", "model='resnet50'\n[[", 1), {}, "the policy is for 'resnet50'"),
        (LATENCY, {"latency": "x"}, "cannot waive unknown criterion 'latency'; criteria are trust"),
        (LATENCY, {"trust.weights": "\u200b"}, "the waiver of trust.weights has no reason"),
        (LATENCY + "[build]\nbackend = 'onnxruntime'\noptions = {thread = 2}", {}, "onnxruntime has no option 'thread'"),
    ],
)  # fmt: skip
def test_what_could_never_be_signed_off_is_refused_before_anything_is_built(
    workspace, policy, waivers, said
):
    wanted = SignoffRequest("digits", policy_from_toml((policy % "5").encode()), None, waivers)
    with pytest.raises(BadInputError, match=said):
        require_possible(wanted, workspace.store, None, None)


def test_approving_replaces_the_baseline_whole_and_a_damaged_one_is_not_taken_for_none(
    passed, failed, tmp_path
):
    for folder in (passed, failed):
        target = store_baseline(Files(folder), tmp_path / "w", "reason")
        assert check_dossier(target).intact
        assert (target / "policy.toml").read_bytes() == (folder / "policy.toml").read_bytes()
    assert sorted(path.name for path in target.parent.iterdir()) == [
        target.name,
        f"{target.name}.json",
    ]
    assert find_approved_baseline(tmp_path / "w", "digits").folder == target
    (target / "policy.toml").write_text("changed")
    with pytest.raises(
        BadInputError, match=r"policy.toml: changed\n.*optpipe signoff approve DOSSIER`"
    ):
        find_approved_baseline(tmp_path / "w", "digits")
    for path in target.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(BadInputError, match="SHA256SUMS: missing"):
        find_approved_baseline(tmp_path / "w", "digits")


@pytest.mark.slow
def test_all_tries_count_and_a_run_that_was_removed_is_named(workspace, sign_off):
    entry = workspace.artifact("fp16")
    fast, slow = (
        workspace.bench(entry, mean_ms=ms, seed=seed) for seed, ms in ((1, 10.0), (2, 10.2))
    )
    (group,) = sign_off(LATENCY % "50", "both")[0].groups
    assert (group.processes, set(group.runs)) == (10, {fast.name, slow.name})
    remove_stored(workspace.store, slow.name, with_dependents=False)
    record, folder = sign_off(LATENCY % "50")
    assert record.groups[0].processes == 5
    assert any(one.code == "removed-runs" and slow.name in one.message for one in record.notes)
    assert check_dossier(folder).problems == ()


@pytest.mark.slow
def test_since_narrows_what_is_judged_and_what_it_leaves_out_is_named(workspace, sign_off):
    entry = workspace.artifact("fp16")
    removed, slow, fast = (
        workspace.bench(entry, mean_ms=ms, seed=int(ms)) for ms in (11.0, 90.0, 10.0)
    )
    remove_stored(workspace.store, removed.name, with_dependents=False)
    every, _ = sign_off(LATENCY % "50", "every")
    assert every.verdict is not Verdict.PASS
    assert (every.since, every.runs_left_out) == (None, ())
    since = since_from_text(fast.manifest.started_utc)
    record, folder = sign_off(LATENCY % "50", "since", since=since)
    assert record.verdict is Verdict.PASS, [one.reason for one in record.criteria]
    assert (record.since, record.runs, record.runs_left_out) == (since, (fast.name,), (slow.name,))
    notes = {one.code: one.message for one in record.notes}
    assert slow.name in notes["since"]
    assert removed.name in notes["removed-runs"]
    assert json.loads((folder / "request.json").read_text())["since"] == since
    assert check_dossier(folder).problems == ()
    comparison, _ = compare(folder)
    assert [one.artifact for one in comparison.rows] == [entry.id]
    assert any("5 measurements are excluded" in each for each in comparison.warnings)
    edit(folder / "request.json", "since")
    seal_folder(folder)
    assert any('verdict says "PASS"' in problem for problem in check_dossier(folder).problems)


@pytest.mark.slow
def test_a_preregistered_policy_is_decided_by_later_evidence_alone(workspace, sign_off):
    entry, policy = (
        workspace.artifact("fp16"),
        LATENCY % "50" + "[evidence]\npreregistered = true\n",
    )
    old = workspace.bench(entry)
    record, folder = sign_off(policy)
    assert (record.verdict, record.runs, record.runs_left_out) == (
        Verdict.INCONCLUSIVE,
        (),
        (old.name,),
    )
    assert f"older runs, left out: {old.name}" in record.notes[0].message
    assert check_dossier(folder).problems == ()
    assert f"judged too: {old.name}" in sign_off(LATENCY % "50", "without")[0].notes[0].message
    new = workspace.bench(entry)
    record, folder = sign_off(policy, "two")
    assert (record.verdict, record.runs) == (Verdict.PASS, (new.name,))
    assert "bench runs of this build since then: 1" in record.notes[0].message
    edit(folder / "request.json", "policy_utc", value="2999-01-01T00:00:00.000+00:00")
    seal_folder(folder)
    assert check_dossier(folder).problems
    assert examine(folder)[0].differs
    for note in workspace.path.glob("notes/policy-*.json"):
        edit(note, "first_used_utc", value="2999-01-01T00:00:00.000+00:00")
    with pytest.raises(BadInputError, match="correct the clock"):
        sign_off(policy, "three")


def test_since_is_read_in_utc():
    assert since_from_text("2026-01-02") == "2026-01-02T00:00:00.000+00:00"
    assert since_from_text("2026-01-02T03:00+02:00") == "2026-01-02T01:00:00.000+00:00"
    for text, said in (
        ("yesterday", "expected a date or time in UTC"),
        ("2999-01-01", "is in the future"),
    ):
        with pytest.raises(BadInputError, match=f"--since {text}: {said}"):
            since_from_text(text)


@pytest.mark.slow
def test_the_report_shows_the_judged_build_and_none_that_is_called_the_same(workspace, sign_off):
    old, new = workspace.artifact("fp16", macs=0.96), workspace.artifact("fp16")
    workspace.bench(old, workspace.artifact("fp32"), processes=3)
    workspace.bench(new, mean_ms=14.0, processes=3)
    workspace.bench(workspace.artifact("int8", trained=False), processes=3)
    _, folder = sign_off(LATENCY % "50", artifact=old.id)
    found, _ = compare(folder)
    assert {row.precision: row.artifact == old.id for row in found.rows} == {
        "fp16": True,
        "fp32": False,
    }
    assert found.warnings[-1].startswith("6 measurements are excluded")
