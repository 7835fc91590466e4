"""Records that say a thing twice, and differently: section 2.1 of the format, whose rules both verifiers hold.

Every hash, figure, and seal is put right after each change, and no raw file contradicts it.
"""

import json
import shutil

import polars as pl
import pytest
from tests.fakes.dossiers import edit, examine
from tests.tiers import leave_to_slow_tier
from tests.unit.signoff.test_forgeries import (
    find_artifact,
    find_one,
    in_artifact,
    in_bench,
    in_file,
    in_request,
    in_run,
    put_right,
)
from tests.unit.signoff.test_impossible_evidence import add_errors, tell_errors
from tests.unit.signoff.test_tasks import state_again

from optpipe.build.verify import recompute_outputs
from optpipe.core.entries import GraphInfo, SampleSetSummary, VerificationInfo
from optpipe.core.precision import Precision
from optpipe.core.records import plain_from_record
from optpipe.preprocess.throughput import ThroughputRecord, ThroughputTuning, compute_speedup
from optpipe.signoff.verify import check_dossier
from optpipe.workspace.entry import compute_entry_id, entry_from_folder
from optpipe.workspace.files import hash_files

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


def chosen_among(count):
    def forge(folder):
        run = next(folder.glob("runs/bench-*")).name
        edit(folder / "request.json", "candidates", value={run: count})

    return forge


def ask_for(after, old, new):
    """The policy selects another build than the one that was judged."""

    def forge(folder):
        path = folder / "policy.toml"
        before, name, rest = path.read_text().partition(after)
        assert old in name + rest
        path.write_text(before + (name + rest).replace(old, new, 1))

    return forge


def change_gpu(**changes):
    """The machine of the first run gets a GPU."""
    gpu = {
        "index": 0,
        "name": "NVIDIA H100 80GB HBM3",
        "compute_capability": "9.0",
        "memory_bytes": 1 << 36,
        "driver": "580.1",
    }

    def forge(folder):
        edit(
            find_one(folder, "runs/bench-*/manifest.json"),
            "environment",
            "gpus",
            value=[gpu | changes],
        )

    return forge


def evaluate_again(folder):
    """A second evaluation of the same samples, in which the engine is right everywhere."""
    source = find_one(folder, "runs/evaluate-*")
    target = source.with_name(f"{source.name}b")
    shutil.copytree(source, target)
    edit(target / "manifest.json", "id", value=target.name.removeprefix("evaluate-"))
    table = pl.read_parquet(target / "predictions.parquet")
    right = pl.concat_list(pl.col("class").reverse())
    mine = [name for name in table.columns if name.endswith(":best") and "source" not in name]
    table.with_columns(right.alias(mine[0])).write_parquet(target / "predictions.parquet")
    state_again(target)


def calibrate_on_evaluated(folder):
    """The set on which the build was calibrated is that of its evaluation."""
    data = json.loads(find_one(folder, "runs/evaluate-*/evaluate.json").read_text())["dataset"]
    drawn = {"name": "x", "sha256": data["sha256"], "count": data["count"], "seed": 0}
    artifact = find_artifact(folder)
    recipe = {"drawn": drawn["sha256"]}
    name = compute_entry_id(GraphInfo, recipe)
    graph = artifact.parents[1] / f"graph-{name}"
    shutil.copytree(artifact.parent, graph)
    info = plain_from_record(GraphInfo(Precision.INT8, set=SampleSetSummary(**drawn)))
    for key, value in {
        "kind": "graph",
        "id": name,
        "recipe": recipe,
        "info": info,
        "parents": [],
    }.items():
        edit(graph / "manifest.json", key, value=value)
    edit(artifact, "parents", value=lambda known: [*known, name])


def swap_sizes(folder):
    """One engine of two sizes."""
    files = json.loads(find_artifact(folder).read_text())["files"]
    (known,) = [each for name, each in files.items() if name == "model.onnx"]
    edit(
        find_artifact(folder),
        "files",
        "copy.onnx",
        value=known | {"size_bytes": known["size_bytes"] + 1},
    )


def in_proof(*steps, value):
    return in_file("runs/preprocess-*/preprocess.json", *steps, value=value)


def in_images(**columns):
    def forge(folder):
        path = find_one(folder, "runs/preprocess-*/images.parquet")
        pl.read_parquet(path).with_columns(**columns).write_parquet(path)

    return forge


def make_equal(folder, place=0):
    """Outputs without any error, whose largest values lie `place` apart."""
    zero = {f"difference_{name}": pl.lit(0.0) for name in ("square", "sum", "max")}
    path = find_verification(folder).parent / "errors.parquet"
    same = pl.col("reference_square")
    pl.read_parquet(path).with_columns(
        **zero,
        product=same,
        output_square=same,
        output_best=(pl.col("reference_best") + place).cast(pl.UInt32),
    ).write_parquet(path)
    hashes = hash_files(path.parent, ("manifest.json",))["errors.parquet"]
    edit(path.parent / "manifest.json", "files", "errors.parquet", value=plain_from_record(hashes))
    tell_errors(
        path.parent / "manifest.json",
        recompute_outputs(entry_from_folder(path.parent, VerificationInfo)),
    )


EARLIER = {
    "dossier_name": "x",
    "verdict": "PASS",
    "created_utc": "2026-01-01T00:00:00+00:00",
    "figures": {},
}
OUTSIDE = {"value": 1.0, "low": 5.0, "high": 6.0}
CHECKED = {
    "checked": 16,
    "passed": True,
    "reference": "x",
    "tolerance": "relative L2 error at most 0.001",
}
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
    "one of fewer builds than itself": chosen_among(0),
    "one of more builds than anyone has": chosen_among(2**62),
    "chosen by a run that is not there": in_request("candidates", value={"bench-1": 2}),
    "another speedup than the rounds": with_rounds(speedup=3.0),
    "another interval than the rounds": with_rounds(speedup_ci=[1.0, 1.02]),
    "no interval of four rounds": with_rounds(speedup_ci=None),
    "a round below zero": with_rounds((90.0, 100.0, -1.0, 100.0), (1.0, 1.0, 1.0, 1.0)),
    "rounds that exclude the rate": with_rounds((1.0, 2.0, 1.0, 2.0)),
    "an interval of three rounds": with_rounds((90.0, 100.0, 110.0), speedup_ci=[1.0, 1.02]),
    "an H100 of another architecture": change_gpu(compute_capability="7.5"),
    "a GPU without memory": change_gpu(memory_bytes=0),
    "a machine without a processor": in_run("environment", "cpu_count", value=0),
    "an engine of two sizes": swap_sizes,
    "an engine of no bytes": in_artifact("files", "model.onnx", "size_bytes", value=0),
    "an earlier sign-off that is later": in_request("previous", value=EARLIER | {"created_utc": "2099-01-01T00:00:00+00:00"}),
    "an earlier figure outside its interval": in_request("previous", value=EARLIER | {"figures": {"p50": OUTSIDE}}),
    "a verifier without a hash": in_request("verifier", value="me"),
    "more outputs checked than asked for": in_bench(0, "output_check", value=CHECKED | {"checked": 10**6}),
    "outputs above the tolerance that passed": in_bench(0, "output_check", value=CHECKED | {"relative_error": 0.5}),
    "outputs closer than equal": in_bench(0, "output_check", value=CHECKED | {"relative_error": -0.5}),
    "measured another model": in_bench(0, "subject", "model", value="other"),
    "measured other weights": in_bench(0, "subject", "weights", value="1" * 64),
    "more threads than its options say": in_bench(0, "subject", "threads", value=9),
    "CUDA graphs of a CPU": in_bench(0, "subject", "cuda_graph", value=True),
    "one engine, other predictions": evaluate_again,
    "calibrated on the evaluated samples": calibrate_on_evaluated,
    "a sample that could not be read twice": in_evaluated("dataset", "unreadable", value=["a", "a"]),
    "fewer than no cut texts": in_evaluated("dataset", "truncated", value=-3),
    "more cut texts than samples": in_evaluated("dataset", "truncated", value=10**6),
    "a budget below zero": in_evaluated("accuracy_budget", value=-5.0),
    "names of other classes": in_evaluated("dataset", "labels", value=["a", "b"]),
    "a proof of another model": in_proof("model", value="other"),
    "a proof with random weights": in_proof("trained", value=False),
    "a proof of fewer images": in_proof("images", "count", value=3),
    "fewer than no images far apart": in_proof("parity", "far", value=-7),
    "a step that is off everywhere and more": in_proof("parity", "steps", 0, "off_share", value=7.0),
    "a class that the output does not have": in_images(reference_class=pl.lit(99, pl.Int64), dali_class=pl.lit(99, pl.Int64)),
    "levels of no image": in_images(mean_levels=pl.lit(9.0), max_levels=pl.lit(3.0)),
    "equal outputs with other largest values": lambda folder: make_equal(folder, 1),
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
    said = "§2.1", "verification", "§5", "§8.1.2", "recomputed", "trained"
    assert any(words in each for words in said for each in differs), (problems, differs)


def put_right_but(folder, name):
    """Hashes, figures, and the seal; but not the size that is forged."""
    from optpipe.workspace.seal import seal_folder

    if "raw file" in name:
        seal_folder(folder)
    else:
        put_right(folder)


def test_equal_outputs_are_judged_alike(dossier):
    policy = (dossier / "policy.toml").read_text()
    (dossier / "policy.toml").write_text(policy + '[outputs]\nminimum_snr = "20 dB"\n')
    make_equal(dossier)
    put_right(dossier)
    assert check_dossier(dossier).problems == ()
    assert examine(dossier)[0].differs == []


def test_fewer_rounds_have_a_ratio_and_no_interval(dossier):
    add_rounds(dossier, (90.0, 110.0), speedup=1.0, speedup_ci=None)
    put_right(dossier)
    assert check_dossier(dossier).problems == ()
    assert examine(dossier)[0].differs == []
