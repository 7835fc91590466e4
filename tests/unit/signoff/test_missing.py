"""What a sign-off measures by itself: what the policy asks for and no run shows, once, and never anything else."""

import json
from dataclasses import replace

import pytest
from tests.fakes.preprocess import preprocess_record

from optpipe.core.card import card_from_dict
from optpipe.core.entries import ModelInfo
from optpipe.core.transform import Decode, Normalize, Pack, Rescale, Resize, Transform
from optpipe.models.artifacts.facts import hash_model, judged_build_from_entry
from optpipe.preprocess.proof import observe_preprocessing
from optpipe.signoff.collect import SignoffRequest, collect_evidence, find_judged_artifact, is_run_about
from optpipe.signoff.policy import policy_from_toml
from optpipe.signoff.steps import _group_by_kind, _list_needed
from optpipe.workspace.runs import list_runs
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


def kinds(workspace):
    wanted, store = SignoffRequest("digits", policy_from_toml(POLICY.encode())), Store(workspace.path)
    judged = find_judged_artifact(wanted, store)
    runs = [run for run in list_runs(workspace.path) if is_run_about(run, judged, store)]
    needed = list(_list_needed(wanted, judged, runs))
    return {kind: [one.name for one in criteria] for kind, criteria in _group_by_kind(needed, runs)}


def test_everything_is_missing_of_a_build_that_was_never_measured(workspace):
    workspace.artifact("fp16")
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
    assert found["bench"] == ["latency.p99.b1", "latency.p99.b1.server.5qps"], "no process of it is VALID"
    workspace.bench(workspace.artifact("fp16"))
    assert kinds(workspace)["bench"] == ["latency.p99.b1.server.5qps"]
    assert set(found) == {"bench", "evaluate", "profile"}


def test_what_was_measured_for_lower_percentiles_than_the_policys_is_measured_again(workspace, monkeypatch):
    workspace.bench(workspace.artifact("fp16"))
    monkeypatch.setitem(
        globals(), "POLICY", POLICY.replace('p99 = "50 ms"\nbatch_size = 1\n[[', '"p99.9" = "50 ms"\n[[')
    )
    assert kinds(workspace)["bench"] == ["latency.p99.9", "latency.p99.b1.server.5qps"]


def test_a_parity_proof_of_another_model_of_the_name_is_no_evidence(workspace, tmp_path):
    workspace.artifact("fp16", trained=False)
    run = workspace.preprocess()
    entry = workspace.artifact("fp16")
    assert "preprocess" in kinds(workspace)
    assert observe_preprocessing([run], judged_build_from_entry(entry), 0.95) == {}
    wanted = SignoffRequest("digits", policy_from_toml(POLICY.encode()), artifact=entry.id)
    collect_evidence(wanted, workspace.store, tmp_path / "dossier")
    assert not list(tmp_path.glob("dossier/runs/preprocess-*"))


SEEN = Transform((Decode(), Resize((32, 32), "exact"), Rescale(), Normalize((0.5,) * 3, (0.25,) * 3), Pack()))


@pytest.mark.parametrize(("mean", "counts"), [(0.5, True), (0.9, False)])
def test_a_parity_proof_that_names_no_model_counts_for_its_preprocessing_alone(workspace, mean, counts):
    entry = workspace.artifact("fp16")
    pipeline = replace(preprocess_record().pipeline, steps=tuple(SEEN.to_dict()["steps"]))
    run = workspace.preprocess(model_sha256=None, pipeline=pipeline)
    steps = [
        *SEEN.to_dict()["steps"][:3],
        {"step": "normalize", "mean": [mean] * 3, "std": [0.25] * 3},
        {"step": "pack"},
    ]
    shape = [1, 3, 32, 32]
    image = {"name": "x", "dtype": "float32", "min": shape, "opt": shape, "max": shape}
    card = card_from_dict(
        {"name": "digits", "source": "d.py", "task": "other", "inputs": [image], "preprocessing": {"steps": steps}}
    )
    model = workspace.store.find(entry.manifest.parents[0], ModelInfo)
    model.file("card.json").write_text(json.dumps(card.to_dict()))
    assert is_run_about(run, entry, workspace.store) is counts


def test_a_parity_proof_counts_whatever_batch_sizes_the_model_was_built_for(workspace):
    manifest = workspace.store.find(workspace.artifact("fp16").manifest.parents[0], ModelInfo).manifest

    def found(weights, batch):
        return hash_model(replace(manifest, recipe={"model": {"weights": weights, "batch": batch, "shapes": {}}}))

    assert found("a", None) == found("a", [1, 8, 64]) != found("b", None)


def test_what_was_measured_with_other_options_than_the_policy_asks_for_is_missing(workspace, monkeypatch):
    monkeypatch.setitem(globals(), "POLICY", POLICY + "[build.options]\nthreads = 2\n")
    entry = workspace.artifact("fp16")
    workspace.bench(entry, options={"threads": 1})
    assert "latency.p99.b1" in kinds(workspace)["bench"]
    workspace.bench(entry, options={"threads": 2})
    assert "latency.p99.b1" not in kinds(workspace)["bench"]


def test_measurements_of_another_build_are_no_evidence(workspace):
    workspace.artifact("fp16")
    workspace.bench(workspace.artifact("fp32"))
    assert "latency.p99.b1" in kinds(workspace)["bench"]
