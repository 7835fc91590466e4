"""A build made again under the same id need not be the same file: what another file showed does not count."""

import json
from pathlib import Path

import pytest

from optpipe.core.files import Files, hash_file
from optpipe.core.records import json_from_record
from optpipe.measure.int8_notes import check_int8_accuracy
from optpipe.models.artifacts.engine import hash_engine
from optpipe.models.artifacts.facts import judged_build_from_entry
from optpipe.signoff.collect import SignoffRequest, collect_evidence
from optpipe.signoff.dossier import finish_dossier, read_dossier
from optpipe.signoff.judge import judge_dossier
from optpipe.signoff.policy import policy_from_toml
from optpipe.signoff.steps import _group_by_kind, _list_needed, _list_present
from optpipe.signoff.verify import find_contradictions
from optpipe.trace.read import trace_from_sqlite
from optpipe.workspace.baselines import store_baseline
from optpipe.workspace.entry import MANIFEST

TRACE = Path(__file__).parents[2] / "golden" / "traces" / "h200-resnet50-fp16-b8.sqlite"
ACCURACY, CORES = "accuracy.maximum_drop", "tensor_cores.minimum_share"
POLICY = """schema = 1
[build]
precision = "fp16"
[accuracy]
maximum_drop = "1 points"
[tensor_cores]
minimum_share = "1 %"
"""
WANTED = SignoffRequest("digits", policy_from_toml(POLICY.encode()))
OTHER = "f" * 64


@pytest.fixture
def judge(workspace, tmp_path):
    def signed():
        collect_evidence(WANTED, workspace.store, tmp_path)
        return {
            one.name: (one.verdict, one.reason) for one in judge_dossier(read_dossier(Files(tmp_path))).record.criteria
        }

    return signed


def list_kinds_to_measure(workspace, entry):
    runs = _list_present(entry, workspace.store)
    return [kind for kind, _ in _group_by_kind(list(_list_needed(WANTED, entry, runs)), runs)]


def test_what_is_known_of_another_file_is_missing_and_measured_again(workspace, judge) -> None:
    entry = workspace.artifact("fp16")
    workspace.evaluate(entry, sha256=OTHER)
    workspace.profile(entry, trace_from_sqlite(TRACE), OTHER)
    found = judge()
    said = "the {} file differs from the one being judged (sha256 mismatch)"
    assert found[ACCURACY] == ("INCONCLUSIVE", said.format("evaluated"))
    assert found[CORES] == ("INCONCLUSIVE", said.format("profiled"))
    assert list_kinds_to_measure(workspace, entry) == ["evaluate", "profile"]


@pytest.mark.parametrize("known", [True, False], ids=["this-file", "no-hash-stored"])
def test_an_older_run_of_this_file_counts_before_a_newer_one_of_another(workspace, judge, known) -> None:
    entry = workspace.artifact("fp16")
    sha256, trace = hash_engine(entry) if known else None, trace_from_sqlite(TRACE)
    workspace.evaluate(entry, sha256=sha256)
    workspace.evaluate(entry, 500, sha256=OTHER)
    workspace.profile(entry, trace, sha256)
    workspace.profile(entry, trace, OTHER)
    found = judge()
    assert [found[name][0] for name in (ACCURACY, CORES)] == ["PASS", "PASS"]
    assert list_kinds_to_measure(workspace, entry) == []


def test_bench_does_not_warn_of_the_drop_of_another_file(workspace) -> None:
    entry = workspace.artifact("int8")
    run = workspace.evaluate(entry, 40, sha256=OTHER)
    assert check_int8_accuracy([run], judged_build_from_entry(entry)) is None


def rebuild(workspace, entry):
    """The store's record of `entry` with another file under its id, as a compiler that gives other bytes each time leaves it."""
    manifest = json.loads((entry.path / MANIFEST).read_bytes())
    (entry.path / "model.onnx").write_bytes(b"other bytes")
    manifest["files"]["model.onnx"] = {"sha256": hash_file(entry.path / "model.onnx"), "size_bytes": 11}
    (entry.path / MANIFEST).write_text(json.dumps(manifest))
    return workspace.store.find(entry.id, type(entry.info))


def test_a_bench_run_of_another_file_is_named_and_not_taken(workspace, tmp_path) -> None:
    entry, other = workspace.artifact("fp16"), workspace.artifact("fp32")
    old, of_other = workspace.bench(entry), workspace.bench(other)
    entry, _ = rebuild(workspace, entry), rebuild(workspace, other)
    assert [run.name for run in _list_present(entry, workspace.store)] == []
    new = workspace.bench(entry)
    folder = collect_evidence(WANTED, workspace.store, tmp_path / "dossier")
    found = judge_dossier(read_dossier(Files(folder))).record
    assert {path.name for path in (folder / "runs").iterdir()} == {of_other.name, new.name}
    assert list(find_contradictions(read_dossier(Files(folder)))) == []
    assert [each.message for each in found.notes if each.code == "other-file"] == [
        f"1 bench run of another file under this build's ID not judged: {old.name}"
    ]


def test_the_approved_file_may_lie_under_the_id_of_the_judged_one(workspace, tmp_path) -> None:
    entry = workspace.artifact("fp16")
    workspace.bench(entry)
    folder = collect_evidence(WANTED, workspace.store, tmp_path / "approved")
    (folder / "verdict.json").write_bytes(json_from_record(judge_dossier(read_dossier(Files(folder))).record))
    store_baseline(Files(finish_dossier(folder, tmp_path / "sealed")), workspace.path)
    workspace.bench(rebuild(workspace, entry))
    folder = collect_evidence(WANTED, workspace.store, tmp_path / "next")
    assert [*(folder / "baseline" / "runs").iterdir()]
    assert list(find_contradictions(read_dossier(Files(folder)))) == []
