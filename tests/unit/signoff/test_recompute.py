"""Nothing a run says of itself is believed: figures that do not follow from its raw files are found, however well resealed."""

import json
import shutil

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.fakes.console import text_of
from tests.fakes.dossiers import edit, examine, seal_anew
from tests.fakes.mutations import iterate_places

from optpipe.core.errors import BadInputError
from optpipe.core.files import Files, hash_file
from optpipe.core.records import json_from_record
from optpipe.core.verdict import Verdict
from optpipe.signoff.collect import SignoffRequest, collect_evidence
from optpipe.signoff.dossier import finish_dossier, read_dossier
from optpipe.signoff.judge import judge_dossier
from optpipe.signoff.policy import policy_from_toml
from optpipe.signoff.verify import check_dossier, verify_dossier
from optpipe.workspace.seal import seal_folder

POLICY = """schema = 1
[[latency]]
p50 = "50 ms"
batch_size = 1
[preprocessing]
minimum_agreement = "98 %"
minimum_snr = "40 dB"
[tensor_cores]
minimum_share = "20 %"
"""


@pytest.fixture
def dossier(sealed, tmp_path):
    return shutil.copytree(sealed, tmp_path / "one")


@pytest.fixture(scope="module")
def sealed(make_workspace, tmp_path_factory, small_trace):
    tmp_path = tmp_path_factory.mktemp("sealed")
    workspace = make_workspace(tmp_path / "workspace")
    entry = workspace.artifact("fp16")
    workspace.bench(entry)
    workspace.preprocess()
    workspace.profile(entry, small_trace)
    folder = tmp_path / ".one"
    folder.mkdir()
    collect_evidence(
        SignoffRequest("digits", policy_from_toml(POLICY.encode())), workspace.store, folder
    )
    signoff = judge_dossier(read_dossier(Files(folder)))[0]
    assert signoff.verdict is Verdict.PASS, [(one.name, one.reason) for one in signoff.criteria]
    (folder / "verdict.json").write_bytes(json_from_record(signoff))
    found = finish_dossier(folder, tmp_path / "one")
    assert check_dossier(found).problems == ()
    checked, verdict = examine(found)
    assert (checked.differs, checked.open, verdict) == ([], [], "PASS")
    return found


def forged(folder, name, change):
    (path,) = folder.glob(f"runs/*/**/{name}")
    change(path)
    seal_anew(folder)
    assert examine(folder)[0].differs
    return check_dossier(folder)


def in_json(*steps, value):
    return lambda path: edit(path, *steps, value=value)


FORGED = {
    "measurements.json": {
        'verdict says "INVALID"': in_json("measurements", 0, "verdict", value="INVALID"),
        "p90: value says 1.0": in_json(
            "measurements", 0, "latency_ns", "percentiles", "p90", "value", value=1.0
        ),
        "duration_s says 99.0": in_json("measurements", 0, "duration_s", value=99.0),
    },
    "profile.json": {
        "used_ns_by_iteration[0] says 1": in_json(
            "stages", 0, "profile", "tensor_cores", "used_ns_by_iteration", 0, value=1
        ),
        "used_ns says 1": in_json("stages", 0, "profile", "tensor_cores", "used_ns", value=1),
        "busy_ns says 1": in_json("stages", 0, "profile", "measured", "totals", "busy_ns", value=1),
        "bottleneck: verdict says": in_json(
            "stages", 0, "profile", "bottleneck", "verdict", value="launch"
        ),
    },
    "preprocess.json": {
        "snr_db says 99.0": in_json("parity", "proof", "output", "snr_db", value=99.0),
        "equal says 1": in_json("parity", "proof", "top1_agreement", "equal", value=1),
        "images says 1000000": in_json("parity", "images", value=10**6),
    },
}


@pytest.mark.parametrize("name", FORGED)
@pytest.mark.slow
def test_every_forged_figure_of_a_record_is_found(dossier, name):
    def change(path):
        for forge in FORGED[name].values():
            forge(path)

    found = [
        problem
        for problem in forged(dossier, name, change).problems
        if "the raw files give" in problem
    ]
    for says in FORGED[name]:
        assert any(says in problem for problem in found), found


@pytest.mark.slow
def test_an_invalid_measurement_cannot_be_made_valid(dossier):
    """A third of the samples, of any input, become twice as slow: no record can call that VALID."""
    longer_ns = (
        pl.when(pl.int_range(pl.len()) % 3 == 0).then(20_000_000).otherwise(0).cast(pl.Int64)
    )
    before_ns = longer_ns.cum_sum() - longer_ns  # later queries wait, since none overlap

    def change(path):
        moved = {
            "scheduled_ns": pl.col("scheduled_ns") + before_ns,
            "start_ns": pl.col("start_ns") + before_ns,
            "end_ns": pl.col("end_ns") + before_ns + longer_ns,
        }
        pl.read_parquet(path).sort("start_ns").with_columns(**moved).write_parquet(path)

    checked = forged(dossier, "samples/m1.parquet", change)
    assert any(
        'verdict says "VALID", but the raw files give "INVALID"' in problem
        for problem in checked.problems
    ), checked.problems
    assert checked.verdict is not None
    found = {one.name: one for one in checked.verdict.criteria}["latency.p50.b1"]
    assert "4 processes; left out: 1 INVALID" in found.about


@pytest.mark.slow
def test_a_trace_whose_kernels_are_renamed_gives_other_figures(dossier):
    def change(path):
        renamed = pl.col("name").str.replace_all(
            "(?i)tensorop|xmma|16816|wgmma|nvjet|cutlass|mma", "plain"
        )
        pl.read_parquet(path).with_columns(renamed).write_parquet(path)

    problems = forged(dossier, "tables/kernels.parquet", change).problems
    assert any("used_ns says" in problem for problem in problems), problems


def test_tables_that_were_left_out_leave_nothing_to_judge(dossier):
    (path,) = dossier.glob("runs/*/**/tables/kernels.parquet")
    path.unlink()
    seal_folder(dossier)
    checked = check_dossier(dossier)
    assert examine(dossier)[0].open
    found = {one.name: one for one in checked.verdict.criteria}["tensor_cores.minimum_share"]
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "too large for a dossier" in found.reason


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_values_of_the_wrong_kind_are_problems_and_never_a_traceback(
    dossier, tmp_path_factory, data
):
    folder = tmp_path_factory.mktemp("wrong") / "one"
    shutil.copytree(dossier, folder)
    path = data.draw(st.sampled_from(sorted(folder.rglob("*.json"))))
    document = json.loads(path.read_text())
    holder, key = data.draw(st.sampled_from(list(iterate_places(document))))
    holder[key] = data.draw(st.sampled_from([None, "x", [], {}, -1, 1e300, True]))
    path.write_text(json.dumps(document))
    for manifest in {*folder.glob("runs/*/manifest.json")} - {path}:
        record = json.loads(manifest.read_text())
        for name, file in record["files"].items():
            if manifest.parent / name == path:
                file["sha256"] = hash_file(path)
        manifest.write_text(json.dumps(record))
    seal_folder(folder)
    said = ""
    try:
        verify_dossier(folder)
    except BadInputError as error:
        said = str(error)
    assert len(said.splitlines()) <= 2


def test_exit_statuses_tell_a_changed_byte_from_a_figure_that_does_not_follow(workspace, tmp_path):
    from tests.command_line import call

    from optpipe.cli.signoff import verify

    workspace.bench(workspace.artifact("fp16"))
    folder = workspace.release(
        b'schema = 1\n[[latency]]\np50 = "50 ms"\nbatch_size = 1\n', tmp_path / "one"
    )
    assert call(verify, folder).status == 0
    policy_file = folder / "policy.toml"
    text = policy_file.read_bytes()
    policy_file.write_bytes(text.replace(b"50 ms", b"51 ms"))
    outcome = call(verify, folder)
    assert (outcome.status, outcome.document.as_sealed) == (2, False)
    assert "seal is intact" not in text_of(outcome.show(outcome.document))
    policy_file.write_bytes(text)
    verdict = folder / "verdict.json"
    verdict.write_text(verdict.read_text().replace('"PASS"', '"FAIL"'))
    seal_folder(folder)
    outcome = call(verify, folder)
    assert (outcome.status, outcome.document.intact, outcome.document.verdict) == (1, False, None)
    assert 'verdict says "FAIL", but the raw files give "PASS"' in text_of(
        outcome.show(outcome.document), width=200
    )
