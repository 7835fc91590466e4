"""Records that say a thing twice, and differently: section 2.1 of the format, whose rules both verifiers hold.

Every hash, figure, and seal is put right after each change, and no raw file contradicts it.
"""

import json
import shutil

import pytest
from tests.fakes.dossiers import edit, examine
from tests.tiers import leave_to_slow_tier
from tests.unit.signoff.test_forgeries import (
    find_one,
    in_artifact,
    in_bench,
    in_file,
    in_request,
    in_run,
    put_right,
)
from tests.unit.signoff.test_impossible_evidence import add_errors

from optpipe.core.records import plain_from_record
from optpipe.preprocess.throughput import ThroughputRecord, ThroughputTuning, compute_speedup
from optpipe.signoff.verify import check_dossier

POLICY = """schema = 1
[build]
precision = "int8"
[[latency]]
p50 = "50 ms"
batch_size = 1
[accuracy]
minimum_agreement = "50 %"
[precision]
int8 = "50 %"
"""


@pytest.fixture(scope="module")
def honest(make_workspace, tmp_path_factory, small_trace):
    folder = tmp_path_factory.mktemp("records")
    workspace = make_workspace(folder / "workspace")
    int8 = workspace.artifact("int8")
    workspace.bench(int8, count=200, processes=3)
    workspace.evaluate(int8, lost=3, n=100)
    workspace.preprocess(images=40)
    workspace.profile(int8, small_trace)
    _, dossier = workspace.sign_off(POLICY, folder / "one")
    add_errors(dossier)
    add_rounds(dossier)
    put_right(dossier)
    assert check_dossier(dossier).problems == ()
    assert examine(dossier)[0].differs == []
    return dossier


@pytest.fixture
def dossier(honest, tmp_path):
    return shutil.copytree(honest, tmp_path / "one")


def make_side(name, rates):
    return ThroughputRecord(name, None, None, 100.0, None, 9, rates, None)


def add_rounds(folder, theirs=(90.0, 100.0, 110.0, 100.0), ours=None, **changes):
    """Rounds of both pipelines, DALI's about 1% faster in each."""
    if ours is None:
        ours = tuple(each * (1.01 + 0.001 * (-1) ** at) for at, each in enumerate(theirs))
    sides = make_side("DataLoader", theirs), make_side("DALI", ours)
    speedup, interval = (1.01, None) if min(theirs) <= 0 else compute_speedup(*sides)
    tuning = ThroughputTuning((), *sides, speedup, interval)
    document = plain_from_record(tuning) | changes
    edit(find_one(folder, "runs/preprocess-*/preprocess.json"), "throughput", value=document)


def with_rounds(*arguments, **changes):
    return lambda folder: add_rounds(folder, *arguments, **changes)


def find_verification(folder):
    """That of the judged build."""
    mine = json.loads((folder / "request.json").read_text())["artifact"]
    return next(
        each
        for each in sorted(folder.glob("builds/verification-*/manifest.json"))
        if mine in json.loads(each.read_text())["parents"]
    )


def in_verification(*steps, value):
    return lambda folder: edit(find_verification(folder), "info", *steps, value=value)


def in_evaluated(*steps, value):
    return in_file("runs/evaluate-*/evaluate.json", *steps, value=value)


def in_stage(*steps, value):
    return in_file("runs/profile-*/profile.json", "stages", 0, "subject", *steps, value=value)


def fail_quietly(folder):
    """An output was wrong, and nobody says so."""
    document = {"checked": 16, "passed": False, "reference": "x"}
    in_bench(0, "output_check", value=document)(folder)


def loosen_tolerance(folder):
    in_verification("tolerance_relative", value=1e-9)(folder)


def name_a_present_run(kind):
    def forge(folder):
        run = next(folder.glob("runs/bench-*")).name
        edit(folder / "request.json", kind, value=[run])

    return forge


def ask_for(after, old, new):
    """The policy selects another build than the one that was judged."""

    def forge(folder):
        path = folder / "policy.toml"
        before, name, rest = path.read_text().partition(after)
        assert old in name + rest
        path.write_text(before + (name + rest).replace(old, new, 1))

    return forge


PROOF = "info", "precision_proof"
PLACED = {"provider": "CUDA", "nodes": 9, "count": 1, "elsewhere": [], "unit": "of MACs"}
CONTRADICTING = {
    "shares of MACs of 180%": in_artifact(*PROOF, "share", "macs", value={"int8": 0.9, "fp32": 0.9}),
    "shares of layers of 150%": in_artifact(*PROOF, "share", "layers", value={"int8": 1.0, "fp32": 0.5}),
    "fewer than no MACs": in_artifact(*PROOF, "share", "total_macs", value=-1),
    "fewer other layers than are named": in_artifact(*PROOF, "others_count", value=-1),
    "a share of placement below zero": in_artifact(*PROOF, "placement", value=PLACED | {"share": -0.5}),
    "more nodes elsewhere than there are": in_artifact(*PROOF, "placement", value=PLACED | {"share": 0.0, "count": 10}),
    "an engine of fewer than no bytes": in_artifact("files", "model.onnx", "size_bytes", value=-(10**9)),
    "another size of a raw file": in_run("files", "measurements.json", "size_bytes", value=1),
    "another size of the errors": lambda folder: edit(find_verification(folder), "files", "errors.parquet", "size_bytes", value=1),
    "passed above its tolerance": loosen_tolerance,
    "fewer than no samples": in_verification("values", value=-1),
    "another SNR than its outputs": in_verification("snr_db", value=99.0),
    "no error beside outputs with errors": in_verification("snr_db", value=None),
    "a row of another precision": in_evaluated("results", 1, "precision", value="fp16"),
    "a row of another backend": in_evaluated("results", 1, "backend", value="tensorrt"),
    "a row of another device": in_evaluated("results", 1, "device", value="cuda"),
    "a row of no device": in_evaluated("results", 1, "device", value=""),
    "an evaluation of another model": in_evaluated("model_id", value="0" * 12),
    "an evaluation of another name": in_evaluated("model", value="other"),
    "a request of another name": in_request("model", value="other"),
    "labels that are not there": in_evaluated("dataset", "labeled", value=False),
    "a row with predictions that failed": in_evaluated("results", 1, "failed", value=True),
    "a row with predictions and without a reason": in_evaluated("results", 1, "why_not", value="no GPU"),
    "a source that is a build": in_evaluated("results", 0, "backend", value="torch"),
    "a source of a precision": in_evaluated("results", 0, "precision", value="fp32"),
    "a calibrated source": in_evaluated("results", 0, "calibrated_on", value=3),
    "a source with an engine": in_evaluated("results", 0, "sha256", value="0" * 64),
    "weights that were converted": in_evaluated("weights", "converted_from", value="other"),
    "an artifact of a baseline that is none": in_request("baseline_artifact", value="0" * 12),
    "a network of a baseline that is none": in_request("baseline_network", value="other"),
    "a policy for another precision": ask_for("precision", "int8", "fp16"),
    "a policy for another backend": ask_for("[build]", "[build]", '[build]\nbackend = "inductor"'),
    "a stage of another precision": in_stage("precision", value="fp16"),
    "a wrong output without a reason": fail_quietly,
    "fewer outputs checked than none": in_bench(0, "output_check", value={"checked": -1, "passed": True, "reference": "x"}),
    "a removed run twice": in_request("removed", value=["bench-1", "bench-1"]),
    "a removed run that is there": name_a_present_run("removed"),
    "a run of another file that is there": name_a_present_run("other_file"),
    "since a day after": in_request("since", value="2999-01-01T00:00:00+00:00"),
    "fewer verifications than there are": in_request("verifications", value=0),
    "more baselines than anyone has": in_request("baselines", value=2**62),
    "more verifications than anyone made": in_request("verifications", value=2**62),
    "another speedup than the rounds": with_rounds(speedup=3.0),
    "another interval than the rounds": with_rounds(speedup_ci=[1.0, 1.02]),
    "no interval of four rounds": with_rounds(speedup_ci=None),
    "a round below zero": with_rounds((90.0, 100.0, -1.0, 100.0), (1.0, 1.0, 1.0, 1.0)),
    "rounds that exclude the rate": with_rounds((1.0, 2.0, 1.0, 2.0)),
    "an interval of three rounds": with_rounds((90.0, 100.0, 110.0), speedup_ci=[1.0, 1.02]),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    leave_to_slow_tier(CONTRADICTING, but=("shares of MACs of 180%", "a row of another device")),
)
def test_records_that_contradict_each_other_are_refused_by_both_verifiers(dossier, name):
    CONTRADICTING[name](dossier)
    put_right_but(dossier, name)
    problems, differs = check_dossier(dossier).problems, examine(dossier)[0].differs
    assert problems
    assert any("§2.1" in each or "verification" in each for each in differs), (problems, differs)


def put_right_but(folder, name):
    """Hashes, figures, and the seal; but not the size that is forged."""
    from optpipe.workspace.seal import seal_folder

    if "raw file" in name:
        seal_folder(folder)
    else:
        put_right(folder)


def test_fewer_rounds_have_a_ratio_and_no_interval(dossier):
    add_rounds(dossier, (90.0, 110.0), speedup=1.0, speedup_ci=None)
    put_right(dossier)
    assert check_dossier(dossier).problems == ()
    assert examine(dossier)[0].differs == []
