"""What a sign-off measures by itself, once; what another file of the same id showed does not count; an interrupted run goes on."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from tests.fakes.entries import put

from optpipe.build.plan import BuildPlan
from optpipe.build.records import ModelBuild
from optpipe.core.card import ModelCard, Task
from optpipe.core.entries import Environment, ModelInfo, WeightsRecord
from optpipe.core.errors import MissingError, StageError
from optpipe.core.events import SilentListener
from optpipe.core.files import Files, hash_file
from optpipe.core.metrics.measured import ENERGY_SECONDS
from optpipe.core.records import json_from_record
from optpipe.measure.int8_notes import check_int8_accuracy
from optpipe.measure.pair import BenchRecord
from optpipe.models.artifacts.engine_files import hash_engine, hash_model
from optpipe.models.artifacts.judged_build import judged_build_from_entry
from optpipe.models.sources.modules import NoWeightsError
from optpipe.preprocess.proof import observe_preprocessing
from optpipe.signoff import audit, missing, pipeline, steps
from optpipe.signoff.collect import (
    SignoffRequest,
    collect_evidence,
    find_judged_artifact,
    is_run_about,
)
from optpipe.signoff.dossier import finish_dossier, read_dossier
from optpipe.signoff.judge import judge_dossier
from optpipe.signoff.loads import loads_from_criteria
from optpipe.signoff.policy import policy_from_toml
from optpipe.signoff.verify import find_contradictions, verify_dossier
from optpipe.workspace.entry import MANIFEST
from optpipe.workspace.file_names import CARD
from optpipe.workspace.runs import list_runs
from optpipe.workspace.seal import store_baseline
from optpipe.workspace.store import Store

POLICY = """schema = 1
[build]
precision = "fp16"
[[latency]]
p99 = "50 ms"
batch_size = 1
[[latency]]
p99 = "50 ms"
batch_size = 1
scenario = "server"
rate = "5 queries/s"
[[regression]]
p50 = "5 %"
batch_size = 1
[accuracy]
maximum_drop = "1 points"
[preprocessing]
minimum_snr = "40 dB"
[tensor_cores]
minimum_share = "50 %"
[size]
maximum = "1 MiB"
"""


def kinds(workspace, artifact=None):
    wanted, store = (
        SignoffRequest("digits", policy_from_toml(POLICY.encode()), artifact),
        Store(workspace.path),
    )
    judged = find_judged_artifact(wanted, store)
    runs = [run for run in list_runs(workspace.path) if is_run_about(run, judged)]
    needed = list(missing._list_needed(wanted, judged, runs))
    return {
        kind: [one.name for one in criteria]
        for kind, criteria in missing._group_by_kind(needed, runs)
    }


def test_everything_is_missing_of_a_build_that_was_never_measured(workspace):
    workspace.artifact("fp16")
    workspace.bench(workspace.artifact("fp32"))
    assert kinds(workspace) == {
        "evaluate": ["accuracy.maximum_drop"],
        "preprocess": ["preprocessing.minimum_snr"],
        "bench": ["latency.p99.b1", "latency.p99.b1.server.5qps", "regression.p50.b1"],
        "profile": ["tensor_cores.minimum_share"],
    }


def test_what_was_measured_by_enough_processes_is_not_measured_again(workspace):
    workspace.bench(workspace.artifact("fp16"), valid=False)
    workspace.preprocess()
    found = kinds(workspace)
    assert found["bench"] == ["latency.p99.b1", "latency.p99.b1.server.5qps"], (
        "no process of it is VALID"
    )
    workspace.bench(workspace.artifact("fp16"))
    assert kinds(workspace)["bench"] == ["latency.p99.b1.server.5qps"]
    assert set(found) == {"bench", "evaluate", "profile"}


def test_what_was_measured_for_lower_percentiles_than_the_policys_is_measured_again(
    workspace, monkeypatch
):
    workspace.bench(workspace.artifact("fp16"))
    policy = POLICY.replace('p99 = "50 ms"\nbatch_size = 1\n[[', '"p99.9" = "50 ms"\n[[')
    monkeypatch.setitem(globals(), "POLICY", policy)
    assert kinds(workspace)["bench"] == ["latency.p99.9", "latency.p99.b1.server.5qps"]


def test_a_parity_proof_of_another_model_of_the_name_is_no_evidence(workspace, tmp_path):
    workspace.artifact("fp16", trained=False)
    run = workspace.preprocess()
    entry = workspace.artifact("fp16")
    assert "preprocess" in kinds(workspace, entry.id)
    assert observe_preprocessing([run], judged_build_from_entry(entry), 0.95) == {}
    wanted = SignoffRequest("digits", policy_from_toml(POLICY.encode()), artifact=entry.id)
    collect_evidence(wanted, workspace.store, tmp_path / "dossier")
    assert not list(tmp_path.glob("dossier/runs/preprocess-*"))


def test_a_parity_proof_counts_whatever_batch_sizes_the_model_was_built_for(workspace):
    manifest = workspace.store.find(
        workspace.artifact("fp16").manifest.parents[0], ModelInfo
    ).manifest

    def found(weights, batch):
        return hash_model(
            replace(manifest, recipe={"model": {"weights": weights, "batch": batch, "shapes": {}}})
        )

    assert found("a", None) == found("a", [1, 8, 64]) != found("b", None)


ACCURACY, CORES = "accuracy.maximum_drop", "tensor_cores.minimum_share"
POLICY_OTHER_FILE = """schema = 1
[build]
precision = "fp16"
[accuracy]
maximum_drop = "1 points"
[tensor_cores]
minimum_share = "1 %"
"""
WANTED = SignoffRequest("digits", policy_from_toml(POLICY_OTHER_FILE.encode()))
OTHER = "f" * 64


@pytest.fixture
def judge(workspace, tmp_path):
    def signed():
        collect_evidence(WANTED, workspace.store, tmp_path)
        return {
            one.name: (one.verdict, one.reason)
            for one in judge_dossier(read_dossier(Files(tmp_path)))[0].criteria
        }

    return signed


def list_kinds_to_measure(workspace, entry):
    runs = missing._list_present(entry, workspace.store)
    return [
        kind
        for kind, _ in missing._group_by_kind(list(missing._list_needed(WANTED, entry, runs)), runs)
    ]


def test_what_is_known_of_another_file_is_missing_and_measured_again(
    workspace, judge, small_trace
) -> None:
    entry = workspace.artifact("fp16")
    workspace.evaluate(entry, sha256=OTHER)
    workspace.profile(entry, small_trace, OTHER)
    found = judge()
    said = "the {} file differs from the one being judged (sha256 mismatch)"
    assert found[ACCURACY] == ("INCONCLUSIVE", said.format("evaluated"))
    assert found[CORES] == ("INCONCLUSIVE", said.format("profiled"))
    assert list_kinds_to_measure(workspace, entry) == ["evaluate", "profile"]


@pytest.mark.parametrize("known", [True, False], ids=["this-file", "no-hash-stored"])
@pytest.mark.slow
def test_an_older_run_of_this_file_counts_before_a_newer_one_of_another(
    workspace, judge, known, small_trace
) -> None:
    entry = workspace.artifact("fp16")
    sha256, trace = hash_engine(entry) if known else None, small_trace
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
    manifest["files"]["model.onnx"] = {
        "sha256": hash_file(entry.path / "model.onnx"),
        "size_bytes": 11,
    }
    (entry.path / MANIFEST).write_text(json.dumps(manifest))
    return workspace.store.find(entry.id, type(entry.info))


def test_a_bench_run_of_another_file_is_named_and_not_taken(workspace, tmp_path) -> None:
    entry, other = workspace.artifact("fp16"), workspace.artifact("fp32")
    old, of_other = workspace.bench(entry), workspace.bench(other)
    entry, _ = rebuild(workspace, entry), rebuild(workspace, other)
    assert [run.name for run in missing._list_present(entry, workspace.store)] == []
    new = workspace.bench(entry)
    folder = collect_evidence(WANTED, workspace.store, tmp_path / "dossier")
    found = judge_dossier(read_dossier(Files(folder)))[0]
    assert {path.name for path in (folder / "runs").iterdir()} == {of_other.name, new.name}
    assert list(find_contradictions(read_dossier(Files(folder)))) == []
    assert [each.message for each in found.notes if each.code == "other-file"] == [
        f"1 bench run of another file under this build's ID not judged: {old.name}"
    ]


def test_the_approved_file_may_lie_under_the_id_of_the_judged_one(workspace, tmp_path) -> None:
    entry = workspace.artifact("fp16")
    workspace.bench(entry)
    folder = collect_evidence(WANTED, workspace.store, tmp_path / "approved")
    (folder / "verdict.json").write_bytes(
        json_from_record(judge_dossier(read_dossier(Files(folder)))[0])
    )
    store_baseline(Files(finish_dossier(folder, tmp_path / "sealed")), workspace.path)
    workspace.bench(rebuild(workspace, entry))
    folder = collect_evidence(WANTED, workspace.store, tmp_path / "next")
    assert [*(folder / "baseline" / "runs").iterdir()]
    assert list(find_contradictions(read_dossier(Files(folder)))) == []


def test_an_interrupted_bench_ends_the_walk_it_is_part_of(monkeypatch, tmp_path):
    def bench(*_):
        return BenchRecord("r", "r", (), Environment(), 0, interrupted=interrupted)

    monkeypatch.setattr("optpipe.signoff.steps.bench_artifacts", bench)
    interrupted = False
    assert steps.run_bench_step([], (), WANTED, Store(tmp_path), SilentListener()) == [Path("r")]
    interrupted = True
    with pytest.raises(KeyboardInterrupt):
        steps.run_bench_step([], (), WANTED, Store(tmp_path), SilentListener())


def test_a_finished_step_is_not_done_again_until_the_pipeline_is_finished(tmp_path):
    notes, listener, done = tmp_path / "notes" / "one.json", SilentListener(), []
    notes.parent.mkdir()
    notes.write_text("{")  # damaged notes are as none

    def work():
        done.append(tmp_path / "runs" / f"bench-{len(done)}")
        done[-1].mkdir(parents=True)
        (done[-1] / MANIFEST).write_text("{}")
        return done[-1:]

    def fail(error):
        raise error

    def status(work):
        return pipeline._run_step("bench", work, notes, listener).status

    assert [status(work), status(work)] == ["done", "resumed"]
    (done[0] / MANIFEST).unlink()
    assert [status(work), len(done)] == ["done", 2], "what is not whole is not finished"
    with pytest.raises(KeyboardInterrupt):
        pipeline._run_step("profile", lambda: fail(KeyboardInterrupt()), notes, listener)
    assert status(work) == "resumed", "an interruption leaves the notes"
    notes.unlink()
    no_weights = NoWeightsError("the weights cannot be downloaded", "example.com")
    errors = (MissingError("no DALI"), "skipped"), (StageError("broke"), "failed")
    for error, said in (*errors, (no_weights, "failed")):
        assert status(partial(fail, error)) == said
        assert str(error) in listener.warnings[-1]
    assert not notes.exists()


def test_notes_are_those_of_data_with_the_same_content(tmp_path):
    policy = policy_from_toml(b'schema = 1\n[size]\nmaximum = "1 MiB"\n')
    store, data = Store(tmp_path / "work"), tmp_path / "data.jsonl"
    info = ModelInfo(
        "reader", "reader.onnx", WeightsRecord("embedded", ""), simplified=True, own_precision=None
    )
    card = json.dumps(ModelCard("reader", "reader.onnx", Task.OTHER, ()).to_dict()).encode()
    model = put(store, info, {}, files={CARD: card})
    build = BuildPlan((), (), named=True)
    wanted = SignoffRequest("reader", policy)
    paths = []
    for content in ("1", "2", "1"):
        data.write_text(content)
        paths.append(pipeline._place_notes(wanted, build, data, ModelBuild(model, None), store))
    assert paths[0] == paths[2] != paths[1]


P99 = "[[latency]]\n'p99' = '1 ms'\nbatch_size = 1\n"
IMAGES = "[[throughput]]\nminimum = '1 images/s'\nbatch_size = 8\n"
OFFLINE = IMAGES + "scenario = 'offline'\nmode = 'end-to-end'"
SERVER = "[[latency]]\np99 = '20 ms'\nbatch_size = 1\nscenario = 'server'\nrate = '500 queries/s'\n"
STREAMS = "[[latency]]\n'p99.9' = '20 ms'\nbatch_size = 4\nscenario = 'multi-stream'\nstreams = 3\n"
JOULES = "[[energy]]\nmaximum = '1 J/image'\nbatch_size = 64\n"
SIZE = "[size]\nmaximum = '1 MiB'\n"


@pytest.mark.parametrize(
    ("text", "energy", "loads"),
    [
        (P99 + IMAGES + SIZE, True, [("batch 1, single-stream, compute", (1, 8), 99.0, 0.6)]),
        (OFFLINE, True, [("batch 8, offline, end-to-end", (8,), 99.0, 0.6)]),
        (SIZE, True, [("batch 1, single-stream, compute", (1,), 99.0, 0.6)]),
        (
            "[[latency]]\n'p99.9' = '20 ms'\n",
            True,
            [("batch 1, single-stream, compute", (1,), 99.9, 0.6)],
        ),
        (
            "[[latency]]\n'p99.9' = '20 ms'\n" + IMAGES,
            True,
            [("batch 8, single-stream, compute", (8,), 99.9, 0.6)],
        ),
        (SERVER, True, [("batch 1, server at 500/s, compute", (1,), 99.0, 0.6)]),
        (STREAMS, True, [("batch 4, multi-stream in 3 streams, compute", (4,), 99.9, 0.6)]),
        (JOULES, True, [("batch 64, single-stream, compute", (64,), 99.0, ENERGY_SECONDS)]),
        (JOULES, False, [("batch 64, single-stream, compute", (64,), 99.0, 0.6)]),
    ],
)
def test_the_loads_follow_from_the_policy(text, energy, loads):
    criteria = policy_from_toml(f"schema = 1\n{text}".encode()).criteria
    found = loads_from_criteria(criteria, 0.6, 30.0, energy=energy)
    assert [(str(load), sizes, load.percentile, load.min_seconds) for load, sizes in found] == loads


def test_an_audit_measures_by_the_limits_of_validity_that_the_dossier_records(
    workspace, monkeypatch, tmp_path
):
    workspace.bench(workspace.artifact("fp16"))
    policy = (
        b'schema = 1\n[build]\nprecision = "fp16"\n[[latency]]\np50 = "50 ms"\nbatch_size = 1\n'
    )
    checked, limits = verify_dossier(workspace.release(policy, tmp_path / "dossier")), []

    def bench(_artifacts, _criteria, wanted, *_):
        limits.append(wanted.max_cv)
        raise StageError("it ends here")

    monkeypatch.setattr(steps, "run_bench_step", bench)
    (found,) = audit.audit_dossier(checked, 1, 7, lambda: None, workspace.store, SilentListener())
    assert limits == [0.5]
    assert found.reason.endswith("VALID as in the dossier: --max-cv 50%")
