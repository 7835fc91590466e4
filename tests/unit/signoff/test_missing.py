"""What a sign-off measures by itself: what the policy asks for and no run shows, once, and never anything else."""

from optpipe.signoff.collect import SignoffRequest, find_judged_artifact
from optpipe.signoff.missing import _group_by_kind, _list_needed
from optpipe.signoff.policy import policy_from_toml
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
    wanted = SignoffRequest("digits", policy_from_toml(POLICY.encode()))
    runs = list_runs(workspace.path)
    needed = list(_list_needed(wanted, find_judged_artifact(wanted, Store(workspace.path)), runs))
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
