"""Evidence of other kinds that contradicts itself: turns, preprocessing, errors of outputs, profiles, copies with noise.

Every hash, count and seal is right; both verifiers refuse each. The rules on a single measurement are in
`test_impossible_data`, and are held here against measurements of the dossiers of record too.
"""

import json
import runpy
import shutil
from dataclasses import replace
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from tests.fakes.dossiers import VERIFIER, edit, examine, seal_anew

from optpipe.build.verify import recompute_outputs
from optpipe.core.entries import VerificationInfo
from optpipe.core.files import Files
from optpipe.core.load import Scenario
from optpipe.core.measurement import read_measurements
from optpipe.core.records import plain_from_record
from optpipe.measure.invariants import RawMeasurement, RawQueries, list_broken_rules
from optpipe.signoff.verify import check_dossier
from optpipe.stats.paired import compute_row_errors, pool_errors
from optpipe.workspace.entry import entry_from_folder, load_run
from optpipe.workspace.files import hash_files

POLICY = """schema = 1
[build]
precision = "int8"
[[latency]]
p50 = "50 ms"
batch_size = 1
[speedup]
over = "fp32"
minimum = 1.2
[preprocessing]
minimum_snr = "20 dB"
[outputs]
minimum_snr = "20 dB"
[tensor_cores]
minimum_share = "10%"
"""
START, END = pl.col("start_ns"), pl.col("end_ns")
ROW = pl.int_range(pl.len())


@pytest.fixture(scope="module")
def honest(make_workspace, tmp_path_factory, small_trace):
    folder = tmp_path_factory.mktemp("evidence")
    workspace = make_workspace(folder / "workspace")
    fp32, int8 = workspace.artifact("fp32"), workspace.artifact("int8")
    workspace.bench(int8, count=400, processes=3)
    workspace.turns(fp32, int8)
    workspace.preprocess(images=80)
    workspace.profile(int8, small_trace)
    _, dossier = workspace.sign_off(POLICY, folder / "one")
    add_errors(dossier)
    seal_anew(dossier)
    checked, (found, _) = check_dossier(dossier), examine(dossier)
    assert [each for each in checked.problems if "verdict.json" not in each] == []
    assert [each for each in found.differs if "verdict.json" not in each] == []
    return dossier


@pytest.fixture
def dossier(honest, tmp_path):
    return shutil.copytree(honest, tmp_path / "one")


def add_errors(dossier):
    """The errors of each sample, next to the verification of the judged build."""
    artifact = json.loads((dossier / "request.json").read_text())["artifact"]
    (path,) = (
        each
        for each in dossier.glob("builds/verification-*/manifest.json")
        if artifact in json.loads(each.read_text())["parents"]
    )
    outputs = np.random.default_rng(5).normal(size=(80, 10)).astype(np.float32)
    noise = np.random.default_rng(6).normal(size=outputs.shape).astype(np.float32)
    rows = compute_row_errors(outputs, outputs + np.float32(0.01) * noise)
    best = {
        name: outputs.argmax(axis=1).astype(np.uint32) for name in ("reference_best", "output_best")
    }
    pl.DataFrame({"output": ["scores"] * 80, **rows, **best}).write_parquet(
        path.parent / "errors.parquet"
    )
    edit(path, "info", "samples", value=80)
    tell_errors(path, (pool_errors("scores", rows),))


def tell_errors(path, outputs):
    """States the figures that the errors give, and their hash."""
    edit(path, "info", "outputs", value=[plain_from_record(each) for each in outputs])
    lowest = min((each.snr_db for each in outputs if each.snr_db is not None), default=None)
    edit(path, "info", "snr_db", value=lowest)
    hashes = {
        name: plain_from_record(each)
        for name, each in hash_files(path.parent, ("manifest.json",)).items()
    }
    edit(path, "files", value=lambda known: known | hashes)


def rewrite(pattern, **columns):
    def forge(dossier):
        path = sorted(dossier.glob(pattern))[0]
        pl.read_parquet(path).with_columns(**columns).write_parquet(path)
        for manifest in dossier.glob("builds/verification-*/manifest.json"):
            if (manifest.parent / "errors.parquet").exists():
                entry = entry_from_folder(manifest.parent, VerificationInfo)
                edit(manifest, "files", "errors.parquet", value=plain_from_record(
                    hash_files(manifest.parent, ("manifest.json",))["errors.parquet"]
                ))  # fmt: skip
                entry = entry_from_folder(manifest.parent, VerificationInfo)
                tell_errors(manifest, recompute_outputs(entry))

    return forge


def in_turns(side="a", **columns):
    return rewrite(f"runs/turns-*/samples/{side}000.parquet", **columns)


def in_images(**columns):
    return rewrite("runs/preprocess-*/images.parquet", **columns)


def in_errors(**columns):
    return rewrite("builds/verification-*/errors.parquet", **columns)


def in_kernels(**columns):
    return rewrite("runs/profile-*/stage/tables/kernels.parquet", **columns)


def drop(pattern, column):
    def forge(dossier):
        path = sorted(dossier.glob(pattern))[0]
        pl.read_parquet(path).drop(column).write_parquet(path)

    return forge


def copy_process(noise_ns=0, *, kind="samples", shift_ns=0):
    """The second process has the queries or readings of the first one, later and with noise."""

    def forge(dossier):
        (path,) = dossier.glob("runs/bench-*/measurements.json")
        first, second = json.loads(path.read_text())["measurements"][:2]
        source, target = (path.parent / one[f"{kind}_file"] for one in (first, second))
        theirs, mine = pl.read_parquet(target), pl.read_parquet(source)
        clock = "start_ns" if kind == "samples" else "time_ns"
        by = int(theirs[clock][0] - mine[clock][0]) + shift_ns
        times = pl.col("^(time|scheduled|start|end)_ns$") + by
        drawn = np.random.default_rng(1).integers(-noise_ns, noise_ns + 1, len(mine))
        copied = mine.with_columns(times)
        if kind == "samples":
            copied = copied.with_columns(end_ns=END + pl.Series(drawn))
            copied = copied.with_columns(enqueue_ns=END - START)
        copied.write_parquet(target)

    return forge


def copy_round(dossier):
    folder = next(dossier.glob("runs/turns-*/samples"))
    for side in "ab":
        first, second = (pl.read_parquet(folder / f"{side}00{at}.parquet") for at in (0, 1))
        by = pl.col("^(scheduled|start|end)_ns$") + (second["start_ns"][0] - first["start_ns"][0])
        first.with_columns(by).write_parquet(folder / f"{side}001.parquet")


def move_round(dossier):
    """The second round was measured while the first one was."""
    folder = next(dossier.glob("runs/turns-*/samples"))
    first = pl.read_parquet(folder / "a000.parquet")
    by = pl.read_parquet(folder / "a001.parquet")["start_ns"][0] - first["start_ns"][9]
    for side in "ab":
        table = pl.read_parquet(folder / f"{side}001.parquet")
        table.with_columns(pl.col("^(scheduled|start|end)_ns$") - by).write_parquet(
            folder / f"{side}001.parquet"
        )


def stretch_turns(dossier):
    """Every query takes a hundred times as long."""
    for path in dossier.glob("runs/turns-*/samples/*.parquet"):
        pl.read_parquet(path).with_columns(
            pl.col("^(scheduled|start|end|enqueue)_ns$") * 100
        ).write_parquet(path)


def compress(factor, *kinds):
    """The clock of a run advances `factor` times as slowly, in each raw file from its first query on."""

    def forge(dossier):
        (path,) = dossier.glob("runs/bench-*/measurements.json")
        for one in json.loads(path.read_text())["measurements"]:
            begin = pl.read_parquet(path.parent / one["samples_file"])["start_ns"].min()
            for kind in kinds:
                raw = path.parent / one[f"{kind}_file"]
                clock = pl.col("^(time|scheduled|start|end)_ns$")
                frame = pl.read_parquet(raw).with_columns((clock - begin) // factor + begin)
                if kind == "samples":
                    frame = frame.with_columns(enqueue_ns=END - START)
                frame.write_parquet(raw)

    return forge


def run_longer(dossier):
    """The dates of the second process are an hour later, and so is the end of the run."""
    (path,) = dossier.glob("runs/bench-*/measurements.json")
    later = lambda text: (datetime.fromisoformat(text) + timedelta(hours=1)).isoformat()  # noqa: E731  # short
    for at in (1, 2):
        edit(path, "measurements", at, "started_utc", value=later)
    edit(path.parent / "manifest.json", "finished_utc", value=later)


def repeat_kernels(dossier):
    """More rows than all traces of a dossier have."""
    path = next(dossier.glob("runs/profile-*/stage/tables/kernels.parquet"))
    rows = pl.read_parquet(path)
    rows[np.arange(2**20 + 1) % len(rows)].write_parquet(path)


SQUARE = pl.col("difference_square")
EVIDENCE = {
    "turns overlap": in_turns(end_ns=END + 50_000_000, enqueue_ns=pl.lit(0, pl.Int64)),
    "turns in phase 2": in_turns(phase=pl.when(ROW == 3).then(2).otherwise("phase").cast(pl.UInt8)),
    "turns with images times 100": in_turns("b", images=pl.col("images") * 100),
    "turns scheduled before": in_turns(scheduled_ns=START - 1),
    "turns end before they start": in_turns("b", end_ns=START - 1),
    "turns enqueued longer than they took": in_turns(enqueue_ns=END),
    "turns on a device, on a CPU": in_turns("b", compute_ns=END - START),
    "turns with a column less": drop("runs/turns-*/samples/a000.parquet", "input"),
    "turns as floats": in_turns(end_ns=END.cast(pl.Float64)),
    "turns below zero": in_turns(start_ns=START - 2**62, scheduled_ns=START - 2**62),
    "one round twice": copy_round,
    "two rounds at one time": move_round,
    "turns longer than their run": stretch_turns,
    "one process twice, 1 ns apart": copy_process(1),
    "one process twice, 50 ns apart": copy_process(50),
    "readings of one process twice": copy_process(kind="machine"),
    "clock compressed by 100": compress(100, "samples", "machine"),
    "clock compressed by 8": compress(8, "samples", "machine"),
    "clock of the queries compressed by 100": compress(100, "samples"),
    "an hour between two processes": run_longer,
    "image without error": in_images(difference_square=pl.when(ROW == 0).then(0.0).otherwise(SQUARE)),
    "a hundredth of every error": in_images(difference_square=SQUARE / 100),
    "a hundredth of every difference": in_images(
        difference_square=SQUARE / 10_000,
        difference_sum=pl.col("difference_sum") / 100,
        difference_max=pl.col("difference_max") / 100,
    ),
    "negative error": in_images(difference_square=-SQUARE),
    "reference times 100": in_images(reference_square=pl.col("reference_square") * 10_000),
    "error as infinite": in_images(difference_max=pl.lit(float("inf"))),
    "sums as integers": in_images(difference_square=SQUARE.cast(pl.Int64)),
    "one image for all": in_images(image=pl.col("image").first()),
    "image without a name": in_images(image=pl.lit(None, pl.String)),
    "a sum is missing": in_images(product=pl.when(ROW > 0).then("product")),
    "outputs without error": in_errors(difference_square=SQUARE / 100),
    "outputs with the largest error halved": in_errors(difference_max=pl.col("difference_max") / 2),
    "outputs of fewer values": in_errors(values=pl.lit(0, pl.Int64)),
    "outputs with a better cosine": in_errors(
        product=(pl.col("reference_square") * pl.col("output_square")).sqrt()
    ),
    "kernels before their calls": in_kernels(start_ns=START - 2_000_000, end_ns=END - 2_000_000),
    "a million kernels": repeat_kernels,
    "iterations overlap": rewrite(
        "runs/profile-*/stage/tables/ranges.parquet",
        end_ns=pl.when(pl.col("name").cast(pl.String) == "optpipe.iteration")
        .then(END + 100_000)
        .otherwise(END),
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", EVIDENCE)
def test_evidence_that_contradicts_itself_is_refused_by_both_verifiers(dossier, honest, name):
    before = {*check_dossier(honest).problems}, {*examine(honest)[0].differs}
    EVIDENCE[name](dossier)
    seal_anew(dossier)
    problems, differs = {*check_dossier(dossier).problems}, {*examine(dossier)[0].differs}
    assert [each for each in problems - before[0] if "verdict.json" not in each]
    assert [each for each in differs - before[1] if "verdict.json" not in each]


ONE_MEASUREMENT = {
    "images times 100": ("samples", {"images": pl.col("images") * 100}),
    "scheduled after the start": ("samples", {"scheduled_ns": END - 1}),
    "ends before it starts": ("samples", {"end_ns": START - 1}),
    "queries overlap": ("samples", {"end_ns": END + 50_000_000}),
    "the last queries are warm-up": (
        "samples",
        {"phase": pl.when(pl.len() - 20 <= ROW).then(0).otherwise("phase").cast(pl.UInt8)},
    ),
    "phase 2": ("samples", {"phase": pl.when(ROW == 200).then(2).otherwise("phase").cast(pl.UInt8)}),
    "enqueued longer than it took": ("samples", {"enqueue_ns": END}),
    "longer on the device than it took": ("samples", {"compute_ns": (END - START) * 2}),
    "readings of another day": ("machine", {"time_ns": pl.col("time_ns") + 86_400 * 10**9}),
    "readings in no order": ("machine", {"time_ns": pl.col("time_ns").reverse()}),
    "readings NaN": ("machine", {"other_cpu_cores": pl.lit(float("nan"))}),
    "readings -inf": ("machine", {"other_cpu_cores": pl.lit(float("-inf"))}),
    "readings negative": ("machine", {"other_cpu_cores": -pl.col("other_cpu_cores") - 1}),
    "readings a hundred times as often": (
        "machine",
        {"time_ns": (pl.col("time_ns") - pl.col("time_ns").first()) // 100 + pl.col("time_ns").first()},
    ),
}  # fmt: skip
RECORDS = ("digits-cpu", "resnet50-h100", "resnet50-h200")


@cache
def read_measurement(record, scenario=Scenario.SINGLE_STREAM):
    """The first measurement under a scenario of a dossier of record, its raw files, and the verifier's own view of it."""
    folder = Path(__file__).parents[3] / "reports" / record
    for path in sorted(folder.glob("runs/bench-*/measurements.json")):
        run, plain = load_run(path.parent), json.loads(path.read_text())["measurements"]
        for one, stored in zip(read_measurements(Files(path.parent)), plain, strict=True):
            right = one.is_valid and one.load.scenario is scenario
            if right and one.samples_file and (path.parent / one.samples_file).is_file():
                tables = {
                    "samples": pl.read_parquet(path.parent / one.samples_file),
                    "machine": pl.read_parquet(path.parent / one.machine_file),
                }
                return one, stored, tables, run.manifest.environment.cpu_count
    raise LookupError(record)


DEVICE = pl.col("compute_ns")
ON_GPU = {
    "half of the energy": ("machine", {"gpu_energy_mj": pl.col("gpu_energy_mj") // 2}),
    "twice the power": ("machine", {"gpu_power_w": pl.col("gpu_power_w") * 2}),
    "more memory than the GPU has": ("machine", {"gpu_used_bytes": pl.lit(2**50, pl.Int64)}),
    "a process with more memory than its GPU": ("machine", {"gpu_used_bytes": pl.col("gpu_used_bytes") // 2}),
    "one time for every query": ("samples", {"compute_ns": pl.lit(1000, pl.Int64)}),
    "a query without its time": ("samples", {"compute_ns": pl.when(ROW != 99).then(DEVICE)}),
    "copies that were not measured": ("samples", {"h2d_ns": pl.lit(1000, pl.Int64)}),
    "inputs in another order": ("samples", {"input": pl.col("input").reverse()}),
    "another stream": ("samples", {"stream": pl.lit(1, pl.UInt16)}),
}  # fmt: skip
OF_SERVER = {
    "arrivals at another time": {"scheduled_ns": pl.col("scheduled_ns") - 1000 * (ROW % 2)},
    "every query due as it starts": {"scheduled_ns": START},
    "a query left out": {"phase": pl.when(pl.len() // 2 == ROW).then(0).otherwise("phase").cast(pl.UInt8)},
}  # fmt: skip


def judge_both(record, kind, columns, **stated):
    """What is wrong with a measurement of record, forged, to optpipe and to the verifier."""
    one, plain, tables, cpu_count = record
    forged = tables | {kind: tables[kind].with_columns(**columns)}
    queries = RawQueries(
        one.load, one.subject.device, forged["samples"].sort("start_ns", maintain_order=True)
    )
    raw = RawMeasurement(replace(one, **stated), queries, forged["machine"], cpu_count, 2**40)
    known = load_verifier()
    theirs = json.loads(json.dumps(plain | stated), object_pairs_hook=known["Record"])
    readings = forged["machine"].to_dict(as_series=False)
    differs, _ = known["find_impossible"](theirs, forged["samples"], readings, cpu_count, 2**40)
    return list_broken_rules(raw), differs


@pytest.mark.parametrize("record", ["resnet50-h100", "resnet50-h200"])
@pytest.mark.parametrize("name", ON_GPU)
def test_measurements_on_a_gpu_are_refused_once_forged(record, name):
    assert all(judge_both(read_measurement(record), *ON_GPU[name]))


@pytest.mark.parametrize("name", OF_SERVER)
def test_arrivals_are_those_of_their_seed(name):
    server = read_measurement("resnet50-h100", Scenario.SERVER)
    assert judge_both(server, "samples", {}) == ([], [])
    assert all(judge_both(server, "samples", OF_SERVER[name]))


@pytest.mark.parametrize("seed", [None, 7])
def test_a_server_has_the_seed_of_its_arrivals(seed):
    server = read_measurement("resnet50-h100", Scenario.SERVER)
    assert all(judge_both(server, "samples", {}, arrivals_seed=seed))


@cache
def load_verifier():
    return runpy.run_path(str(VERIFIER))


@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize("name", ["nothing", *ONE_MEASUREMENT])
def test_measurements_of_record_are_refused_once_forged(record, name):
    one, stored, tables, cpu_count = read_measurement(record)
    kind, columns = ONE_MEASUREMENT.get(name, ("samples", {}))
    forged = tables | {kind: tables[kind].with_columns(**columns)}
    queries = RawQueries(
        one.load, one.subject.device, forged["samples"].sort("start_ns", maintain_order=True)
    )
    broken = list_broken_rules(RawMeasurement(one, queries, forged["machine"], cpu_count))
    known = load_verifier()
    record_of_verifier = json.loads(json.dumps(stored), object_pairs_hook=known["Record"])
    readings = forged["machine"].to_dict(as_series=False)
    differs, _ = known["find_impossible"](
        record_of_verifier, forged["samples"], readings, cpu_count
    )
    assert (bool(broken), bool(differs)) == ((False,) * 2 if name == "nothing" else (True,) * 2)
