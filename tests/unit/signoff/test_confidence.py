"""The confidence of a policy reaches every interval that a verdict rests on."""

from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from optpipe.core.files import Files
from optpipe.core.records import json_from_record
from optpipe.core.verdict import Verdict
from optpipe.signoff.collect import SignoffRequest, collect_evidence
from optpipe.signoff.dossier import read_dossier
from optpipe.signoff.judge import judge_dossier
from optpipe.signoff.policy import policy_from_toml
from optpipe.trace.read import trace_from_sqlite
from optpipe.workspace.baselines import store_baseline
from optpipe.workspace.seal import seal_folder

TRACE = Path(__file__).parents[2] / "golden" / "traces" / "h200-resnet50-fp16-b8.sqlite"
POLICY = """schema = 1
confidence = "%s %%"
[build]
precision = "fp16"
[latency]
p50 = "50 ms"
p99 = "50 ms"
[throughput]
minimum = "1 images/s"
[regression]
p50 = "50 %%"
[memory]
maximum = "900 MiB"
[energy]
maximum = "9 J/image"
[stability]
maximum_cv = "90 %%"
[preprocessing]
minimum_agreement = "1 %%"
minimum_snr = "1 dB"
[precision]
fp16 = "1 %%"
[size]
maximum = "1 MiB"
[tensor_cores]
minimum_share = "1 %%"
"""
EXACT = {"precision.fp16", "size.maximum"}
"""Facts of the built network and of its file: nothing is estimated."""


@pytest.fixture(params=[pytest.param(False, id="alone"), pytest.param(True, id="interleaved", marks=pytest.mark.slow)])
def judged(workspace, tmp_path, request):
    entry = workspace.artifact("fp16")
    workspace.bench(entry, count=1500, power=200.0, peaks=2**20)
    workspace.preprocess()
    trace = trace_from_sqlite(TRACE)
    names = pl.col("name").cast(pl.String).str.replace("nvjet_sm90_hsh_128x112", "sgemm_128x112")
    workspace.profile(entry, replace(trace, kernels=trace.kernels.with_columns(names)))

    def judge(confidence):
        folder = tmp_path / str(confidence)
        folder.mkdir()
        policy = policy_from_toml((POLICY % confidence).encode())
        collect_evidence(SignoffRequest("digits", policy), workspace.store, folder)
        return judge_dossier(read_dossier(Files(folder)))[0], folder

    found, folder = judge(95.0)
    (folder / "verdict.json").write_bytes(json_from_record(found))
    seal_folder(folder)
    store_baseline(Files(folder), workspace.path)
    if request.param:
        workspace.pair(entry, entry, peaks=2**20)
    return lambda confidence: {one.name: one for one in judge(confidence)[0].criteria}


def test_a_higher_confidence_widens_every_interval_and_nothing_else_does(judged):
    usual, sure = judged(90), judged(99)
    for name, one in usual.items():
        if name.startswith("trust."):
            continue
        assert one.verdict is Verdict.PASS or "in 2 runs" in one.reason, f"{name}: {one.reason}"
        assert one.observed == sure[name].observed
        if name in EXACT:
            assert one.ci is None
            continue
        low, high = one.ci
        assert sure[name].ci[0] <= low <= high <= sure[name].ci[1], name
        assert sure[name].ci[1] - sure[name].ci[0] > high - low, name
