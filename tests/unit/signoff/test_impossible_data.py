"""Raw data that contradict themselves, in dossiers whose hashes, counts and seals are right: both verifiers refuse each."""

import json
import shutil
from dataclasses import replace

import polars as pl
import pytest
from tests.fakes.dossiers import edit, examine, seal_anew
from tests.tiers import leave_to_slow_tier

from optpipe.core.measurement import InputPool
from optpipe.core.records import plain_from_record
from optpipe.signoff.verify import verify_dossier

POLICY = b"schema = 1\n[[latency]]\np50 = '50 ms'\nbatch_size = 4\n"
START, END = pl.col("start_ns"), pl.col("end_ns")
ROW = pl.int_range(pl.len())


@pytest.fixture(scope="module")
def honest(make_workspace, tmp_path_factory):
    folder = tmp_path_factory.mktemp("impossible")
    workspace = make_workspace(folder / "workspace")
    workspace.bench(
        workspace.artifact("fp16"), batches=(4,), count=300, processes=3, noise=0.05, power=50
    )
    return workspace.release(POLICY, folder / "one")


@pytest.fixture
def dossier(honest, tmp_path):
    return shutil.copytree(honest, tmp_path / "one")


def find_raw(dossier, kind):
    (path,) = dossier.glob("runs/bench-*/measurements.json")
    first = json.loads(path.read_text())["measurements"][0]
    return path.parent / first[f"{kind}_file"]


def change(kind, **columns):
    """Replaces columns of the first process's raw file."""

    def forge(dossier):
        path = find_raw(dossier, kind)
        pl.read_parquet(path).with_columns(**columns).write_parquet(path)

    return forge


def change_record(*steps, value):
    def forge(dossier):
        (path,) = dossier.glob("runs/bench-*/measurements.json")
        edit(path, "measurements", 0, *steps, value=value)

    return forge


def keep_no_readings(dossier):
    path = find_raw(dossier, "machine")
    pl.read_parquet(path).clear().write_parquet(path)


def drop_column(dossier):
    path = find_raw(dossier, "samples")
    pl.read_parquet(path).drop("input").write_parquet(path)


def use_file_of_other_process(kind):
    def forge(dossier):
        (path,) = dossier.glob("runs/bench-*/measurements.json")
        other = json.loads(path.read_text())["measurements"][1][f"{kind}_file"]
        edit(path, "measurements", 0, f"{kind}_file", value=other)

    return forge


def shift_process(dossier):
    """The second process runs while the first one does."""
    (path,) = dossier.glob("runs/bench-*/measurements.json")
    first, second = json.loads(path.read_text())["measurements"][:2]
    begin = pl.read_parquet(path.parent / first["samples_file"])["start_ns"][0] + 1
    by = pl.read_parquet(path.parent / second["samples_file"])["start_ns"][0] - begin
    for kind in ("samples", "machine"):
        raw = path.parent / second[f"{kind}_file"]
        clock = pl.col("^(time|scheduled|start|end)_ns$") - by
        pl.read_parquet(raw).with_columns(clock).write_parquet(raw)


def with_pool(**changes):
    """Inputs of 16 rotated batches, as the queries have them, but for `changes`."""
    pool = InputPool("images", 64, 8, 0, "0", rotated=16)
    return change_record("inputs", value=plain_from_record(replace(pool, **changes)))


def rotate(**columns):
    def forge(dossier):
        with_pool()(dossier)
        change("samples", **columns)(dossier)

    return forge


def with_load(**changes):
    def forge(dossier):
        for name, value in changes.items():
            change_record("load", name, value=value)(dossier)

    return forge


SENSOR = pl.col("other_cpu_cores")
IMPOSSIBLE = {
    "images times 100": change("samples", images=pl.col("images") * 100),
    "images of one query": change("samples", images=pl.when(ROW == 99).then(5).otherwise(4).cast(pl.UInt32)),
    "scheduled after the start": change("samples", scheduled_ns=END - 1000),
    "scheduled long before": change("samples", scheduled_ns=START // 2),
    "ends before it starts": change("samples", end_ns=START - 1),
    "times below zero": change("samples", scheduled_ns=START - 2**62, start_ns=START - 2**62),
    "queries overlap": change("samples", end_ns=END + 2_000_000),
    "slow half is warm-up": change("samples", phase=pl.when(ROW.is_between(90, 200)).then(0).otherwise("phase").cast(pl.UInt8)),
    "phase 2": change("samples", phase=pl.when(ROW == 200).then(2).otherwise("phase").cast(pl.UInt8)),
    "no phase": change("samples", phase=pl.when(ROW == 200).then(None).otherwise("phase").cast(pl.UInt8)),
    "all queries on a device, on a CPU": change("samples", compute_ns=pl.lit(1_000_000, pl.Int64)),
    "one query on a device, on a CPU": change("samples", d2h_ns=pl.when(ROW == 0).then(5).cast(pl.Int64)),
    "enqueued longer than it took": change("samples", enqueue_ns=END),
    "times as floats": change("samples", end_ns=END.cast(pl.Float64)),
    "phase as a number of 64 bits": change("samples", phase=pl.col("phase").cast(pl.Int64)),
    "another column": change("samples", certified=pl.lit(1)),
    "a column less": drop_column,
    "readings of another day": change("machine", time_ns=pl.col("time_ns") + 86_400 * 10**9),
    "readings in no order": change("machine", time_ns=pl.col("time_ns").reverse()),
    "reading without a time": change("machine", time_ns=pl.when(ROW == 3).then(None).otherwise("time_ns")),
    "readings NaN": change("machine", other_cpu_cores=pl.lit(float("nan"))),
    "readings -inf": change("machine", other_cpu_cores=pl.lit(float("-inf"))),
    "one reading inf": change("machine", cpu_mhz=pl.when(ROW == 9).then(float("inf")).otherwise("cpu_mhz")),
    "readings negative": change("machine", other_cpu_cores=-SENSOR - 1),
    "energy falls": change("machine", gpu_energy_mj=pl.col("gpu_energy_mj").reverse()),
    "busy by more than all": change("machine", gpu_utilization=pl.lit(400, pl.Int64)),
    "readings as 128 bits": change("machine", time_ns=pl.col("time_ns").cast(pl.Int128)),
    "no readings": keep_no_readings,
    "readings of another process": use_file_of_other_process("machine"),
    "samples of another process": use_file_of_other_process("samples"),
    "1,000 processors": change_record("subject", "affinity", value=list(range(1000))),
    "one processor twice": change_record("subject", "affinity", value=[0, 0]),
    "no processor": change_record("subject", "affinity", value=[]),
    "processor below zero": change_record("subject", "affinity", value=[-1]),
    "padding below zero": change_record("inputs", value=plain_from_record(InputPool("texts", 9, 9, 0, "0", padding=-9.0))),
    "fewer than no bytes": change_record("host_peak_bytes", value=-1),
    "processes at one time": shift_process,
    "inputs in another order": rotate(input=pl.col("input").reverse()),
    "one input for all": rotate(input=pl.lit(0, pl.UInt32)),
    "every second input": rotate(input=(pl.col("input") * 2 % 16).cast(pl.UInt32)),
    "an input that is not rotated": rotate(input=pl.col("input") + 16),
    "more real inputs than inputs": with_pool(real=65),
    "no inputs": with_pool(count=0, real=0),
    "fewer than no rotated inputs": with_pool(rotated=-1),
    "a shortest input longer than the longest": with_pool(lengths=(9, 3)),
    "a stream that the load does not have": change("samples", stream=pl.lit(3, pl.UInt16)),
    "a percentile of 900": with_load(percentile=900.0),
    "at least longer than at most": with_load(min_seconds=9.0, max_seconds=1.0),
    "less than no warm-up": with_load(warm_up_seconds=-1.0),
    "more warm-up than at most": with_load(warm_up_seconds=1000.0),
    "less than no checks": with_load(output_checks=-1),
    "a rate without a server": with_load(rate_per_s=5.0),
    "streams in a single stream": with_load(streams=4),
    "sequences without a token": with_load(length=0),
    "a seed without arrivals": change_record("arrivals_seed", value=7),
    "a process below zero": change_record("process", value=-1),
    "a process with more memory than its GPU": change(
        "machine", gpu_used_bytes=pl.lit(2**20, pl.Int64), gpu_worker_bytes=pl.lit(2**30, pl.Int64)
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    leave_to_slow_tier(IMPOSSIBLE, but=("images times 100", "ends before it starts")),
)
def test_raw_data_that_contradict_themselves_are_refused_by_both_verifiers(dossier, name):
    IMPOSSIBLE[name](dossier)
    seal_anew(dossier)
    (run,) = dossier.glob("runs/bench-*")
    problems, differs = verify_dossier(dossier).problems, examine(dossier)[0].differs
    named = f"{run.name}/measurements.json: m", "is not a raw sample file: missing columns"
    assert any(words in each for each in problems for words in named), problems
    said = "impossible raw data", "other columns", "began before", "its file of"
    assert any(words in each for each in differs for words in said), differs


def test_rotated_inputs_in_their_order_contradict_nothing(dossier):
    with_pool()(dossier)
    seal_anew(dossier)
    found = verify_dossier(dossier).problems, examine(dossier)[0].differs
    assert [each for each in (*found[0], *found[1]) if "measurements.json" in each] == []


def test_an_honest_dossier_contradicts_nothing(dossier):
    seal_anew(dossier)
    assert verify_dossier(dossier).problems == ()
    assert examine(dossier)[0].differs == []
