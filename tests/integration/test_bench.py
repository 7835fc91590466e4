"""`optpipe bench` as a user runs it, on a real ONNX Runtime artifact of `digits`."""

import errno
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from optpipe.cli.bench import BenchOptions
from optpipe.cli.bench import bench as bench_command
from optpipe.core.events import SilentListener
from optpipe.core.load import Scenario
from optpipe.core.measurement import SAMPLE_COLUMNS, Phase, Reason, read_measurements
from optpipe.measure.process import WorkerProcess
from optpipe.measure.worker.messages import frame_from_spool
from optpipe.stats.percentiles import find_order_statistic
from optpipe.workspace.entry import load_run
from optpipe.workspace.runs import list_runs
from tests.command_line import call
from tests.fakes.console import text_of
from tests.integration.conftest import optpipe

ORT = ("digits", "--backend", "onnxruntime")
QUICK = (
    "--processes", "1", "--min-time", "0.1", "--percentile", "90", "--set", "warm-up=0.1", "--set", "max-warm-up=0.5",
    "--max-time", "2",
)  # fmt: skip
SHORT = {
    "min_seconds": 0.2, "max_seconds": 4.0, "warm_up_seconds": 0.1, "max_warm_up_seconds": 1.0, "percentile": 50.0
}  # fmt: skip


def bench(workspace, *arguments):
    return optpipe("bench", *arguments, workspace=workspace)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory, exported):
    folder = exported(tmp_path_factory.mktemp("bench") / "work")
    optpipe(
        "build",
        "digits",
        "--precision",
        "fp32",
        "--backend",
        "onnxruntime,torch",
        "--device",
        "cpu",
        workspace=folder,
    ).expect(0)
    return folder


@pytest.fixture(scope="module")
def artifact(workspace):
    entries = optpipe("store", "ls", "--json", workspace=workspace).document["entries"]
    return next(
        each["id"]
        for each in entries
        if (each["kind"], each["backend"]) == ("artifact", "onnxruntime")
    )


def test_the_document_the_run_and_the_raw_samples_agree(workspace):
    cpu = min(os.sched_getaffinity(0))
    pinned = ("--affinity", cpu, "--option", "onnxruntime.threads=1")
    document = (
        bench(workspace, *ORT, "--batch", "1,4", *QUICK, *pinned, "--json").expect(0).document
    )
    rows = document["measurements"]
    assert [(row["load"]["batch_size"], row["subject"]["affinity"]) for row in rows] == [
        (1, [cpu]),
        (4, [cpu]),
    ]
    run = load_run(Path(document["run_dir"]))
    assert run.find_problems() == []
    assert "bench digits --backend onnxruntime" in run.manifest.command
    stored = read_measurements(run.files)
    for row, measurement in zip(rows, stored, strict=True):
        samples = pl.read_parquet(run.path / row["samples_file"])
        assert dict(SAMPLE_COLUMNS) == {name: str(kind) for name, kind in samples.schema.items()}
        measured = samples.filter(pl.col("phase") == 1)
        latency = (measured["end_ns"] - measured["scheduled_ns"]).sort().to_numpy()
        percentiles = row["latency_ns"]["percentiles"]
        assert {"p50", "p90"} <= {*percentiles, *row["latency_ns"]["withheld"]}
        for (
            name,
            percentile,
        ) in percentiles.items():  # in so short a load, other work may leave none that can be shown
            assert percentile["value"] == find_order_statistic(latency, float(name[1:]))
        assert len(measured) == row["samples"] == measurement.samples
        assert measured["input"].n_unique() > 2
        assert row["output_check"]["passed"]
        assert row["output_check"]["tells_inputs_apart"]
        assert "source model" in row["output_check"]["reference"]
        assert row["host_peak_bytes"] > 10_000_000
        assert row["energy_j_per_image"] is None
        assert row["energy_why_not"]
        assert "p99" not in row["latency_ns"]["percentiles"] or row["samples"] >= 662
        assert row["inputs"]["kind"] == "images"


def test_an_artifact_against_itself(workspace, artifact, inside, monkeypatch, tmp_path):
    monkeypatch.setattr(
        "optpipe.measure.figures.find_reasons", lambda _: ()
    )  # else rounds are measured again
    monkeypatch.setattr(
        "optpipe.measure.pair.MAX_ROUND_FACTOR", 1
    )  # no more of them on a noisy machine
    quick = (
        "--batch",
        "1",
        *QUICK[6:],
        "--min-time",
        "0.1",
        "--percentile",
        "50",
        "--workspace",
        workspace,
        "--json",
    )
    pair = ("bench", artifact, "--against", artifact, "--set", "keep-going=true", "--rounds", "8")
    ran = inside(*pair, *quick, cwd=tmp_path).expect(0)
    found = ran.document["comparison"]
    assert found["ratio"]["rounds"] == 8
    assert found["ratio"]["ci"][0] <= found["ratio"]["value"] <= found["ratio"]["ci"][1]
    assert len(ran.document["measurements"]) == 16


@pytest.mark.parametrize("load", [("--batch", "1"), ("--scenario", "server", "--rate", "50")])
def test_a_pair_stops_after_two_processes_that_one_cause_on_the_host_made_invalid(
    workspace, artifact, inside, monkeypatch, tmp_path, load
):
    loaded = Reason("loaded-host", "other work took 50%", "free the machine", invalidates=True)
    monkeypatch.setattr("optpipe.measure.figures.find_reasons", lambda _: (loaded,))
    quick = (*load, *QUICK[6:], "--min-time", "0.1", "--percentile", "50", "--workspace", workspace)
    ran = inside("bench", artifact, "--against", artifact, *quick, "--json", cwd=tmp_path)
    ran.expect(5)
    assert ran.document["comparison"] is None
    assert not ran.document["interrupted"]
    assert ran.document["stopped"]["code"] == "loaded-host"
    assert len(ran.document["measurements"]) == 2
    (warning,) = ran.document["warnings"]
    turns, anyway = (each for each in warning.split("`")[1::2])
    assert "--turns" in turns
    assert "keep-going=true" in anyway
    assert load_run(Path(ran.document["run_dir"])).find_problems() == []
    shown = inside("bench", artifact, "--against", artifact, *quick, cwd=tmp_path).expect(5)
    assert "stopped before the last round: no comparison" in shown.stdout


def test_a_corrupted_artifact_does_not_hide_the_others(workspace, tmp_path):
    shutil.copytree(workspace, tmp_path / "copy")
    path = next((tmp_path / "copy" / "store").glob("artifact-*/model.onnx"))
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    both = bench(tmp_path / "copy", "digits", "--batch", "1", *QUICK)
    assert both.status == 4  # the other was measured, and what was asked for is not all there
    for said in ("damaged", "rebuild it with", "images/s"):
        assert said in both.stdout


@pytest.mark.parametrize(
    ("entry", "name", "damage"),
    [
        ("artifact", "model.onnx", "truncated"),
        ("reference", "reference.npz", "truncated"),
        ("model", "card.json", "changed"),
    ],
)
def test_what_is_damaged_is_named_and_the_remedy_mends_it(
    exported, inside, tmp_path, entry, name, damage
):
    store = exported(tmp_path / "work") / "store"
    path = next(store.glob(f"{entry}-*")) / name
    content = path.read_bytes()
    path.write_bytes(content[:100] if damage == "truncated" else content.replace(b"0", b"1", 1))
    measure = ("bench", *ORT, "--batch", "1", *QUICK, "--json", "--workspace", tmp_path / "work")
    problem, remedy = (
        inside(*measure, cwd=tmp_path).expect(4).document["error"]["message"].split("\n")
    )
    assert name in problem
    inside(*shlex.split(remedy.split("`")[1])[1:], cwd=tmp_path).expect(0)
    assert inside(*measure, cwd=tmp_path).status == 0


def test_where_the_disk_is_full_the_reason_says_so_and_what_was_measured_is_recovered(
    workspace, artifact, monkeypatch
):
    """The file system's own refusals, at the two places where samples are written."""
    from optpipe.core.errors import StageError
    from optpipe.workspace import files

    def refusing(path, frame):
        if path.name == "m001.parquet":
            frame = frame.clear()
            monkeypatch.setattr(os, "fsync", full)
        return write(path, frame)

    def full(_number):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write, fsync, known = files.write_parquet, os.fsync, set((workspace / "runs").glob("*"))
    monkeypatch.setattr("optpipe.measure.measure.write_parquet", refusing)
    heard, how = SilentListener(), BenchOptions(batch=(1, 2))
    with pytest.raises(StageError, match="No space left"):
        call(
            bench_command,
            model=[artifact],
            load=SHORT,
            how=how,
            workspace=workspace,
            terminal=heard,
        )
    assert any("optpipe bench --resume" in each for each in heard.warnings)
    monkeypatch.setattr(os, "fsync", fsync)
    cut = next(path for path in (workspace / "runs").iterdir() if path not in known)
    rows = optpipe("bench", "--resume", str(cut), "--json").document["measurements"]
    assert [row["samples"] > 0 for row in rows] == [True, True]


def long_bench(workspace):
    """A measurement that is under way, and that only a signal ends within the test's time."""
    arguments = ["bench", *ORT, "--batch", "1", *QUICK[:2], *QUICK[6:10], "--min-time", "50"]
    command = [sys.executable, "-m", "optpipe", *arguments, "--workspace", str(workspace)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 300
    while measured_so_far(workspace) < 200:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return process


def measured_so_far(workspace):
    """The samples behind the warm-up, whose length is the machine's: none of them are in a result."""
    spools = (workspace / "runs").glob("*/samples/*.spool")
    return sum(
        len(frame_from_spool(path).filter(pl.col("phase") == Phase.MEASURED)) for path in spools
    )


def test_ctrl_c_keeps_what_was_measured(workspace):
    known = {run.name for run in list_runs(workspace, "bench")}
    process = long_bench(workspace)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    run = next(run for run in list_runs(workspace, "bench") if run.name not in known)
    assert run.interrupted
    row = read_measurements(run.files)[0]
    assert row.interrupted
    assert row.samples > 0
    assert "interrupted" in {reason.code for reason in row.reasons}


def interrupting(real, calls, *, after):
    """`real`, whose call number `calls` is interrupted, before or after its work."""
    count = 0

    def called(*arguments):
        nonlocal count
        count += 1
        if count == calls and not after:
            raise KeyboardInterrupt
        found = real(*arguments)
        if count == calls:
            raise KeyboardInterrupt
        return found

    return called


@pytest.mark.parametrize("after", [False, True], ids=["between two", "twice inside one"])
@pytest.mark.parametrize("interleave", [False, True], ids=["sweep", "interleave"])
def test_ctrl_c_at_any_moment_keeps_what_was_measured(
    workspace, artifact, monkeypatch, interleave, after
):
    """A worker that is told to stop ends in order; an interruption it never hears of must lose nothing either."""
    monkeypatch.setattr(
        WorkerProcess, "measure", interrupting(WorkerProcess.measure, 2, after=after)
    )
    how = BenchOptions(batch=(1,), against=artifact) if interleave else BenchOptions(batch=(1, 2))
    outcome = call(bench_command, model=[artifact], load=SHORT, how=how, workspace=workspace)
    assert outcome.status == 130
    assert outcome.document.interrupted
    run = load_run(Path(outcome.document.run_dir))
    assert run.interrupted
    assert run.find_problems() == []
    first, second = read_measurements(run.files)
    assert (first.interrupted, second.interrupted) == (False, True)
    assert first.samples > 0
    assert (second.samples > 0) is after
    assert text_of(outcome.show(outcome.document))


def test_ctrl_c_in_the_first_measurement_of_a_search_ends_the_search(
    workspace, artifact, monkeypatch
):
    def told_to_stop(*arguments):
        return replace(measure(*arguments), interrupted=True)

    measure = WorkerProcess.measure
    monkeypatch.setattr(WorkerProcess, "measure", told_to_stop)
    how, load = BenchOptions(batch=(1,), slo="p50=10s"), {**SHORT, "scenario": Scenario.SERVER}
    outcome = call(bench_command, model=[artifact], load=load, how=how, workspace=workspace)
    document = outcome.document
    assert outcome.status == 130
    assert len(document.measurements) == 1


def test_a_rate_so_low_that_nobody_comes_ends_when_the_time_is_up(workspace, artifact):
    arguments = (
        artifact,
        "--scenario",
        "server",
        "--rate",
        "0.000001",
        "--batch",
        "1",
        *QUICK[:-1],
        "0.5",
        "--json",
    )
    row = bench(workspace, *arguments).document["measurements"][0]
    assert (row["samples"], [each["code"] for each in row["reasons"]]) == (0, ["too-few-samples"])


def test_a_killed_run_is_recovered_from_its_samples(workspace):
    known = set((workspace / "runs").glob("*"))
    process = long_bench(workspace)
    process.kill()
    process.communicate()
    assert list((workspace / "tmp").glob("bench-*"))
    freed = optpipe("store", "gc", "--json", workspace=workspace).document["scratch_bytes"]
    assert freed > 1_000_000, "its inputs and their answers"
    cut = next(path for path in (workspace / "runs").iterdir() if path not in known)
    assert cut.name not in {run.name for run in list_runs(workspace)}
    row = optpipe("bench", "--resume", str(cut), "--json").expect(0).document["measurements"][0]
    assert row["samples"] >= 200
    assert row["warm_up_samples"] > 0
    assert row["verdict"] == "INVALID"
    run = load_run(cut)
    assert run.interrupted
    assert run.find_problems() == []
    assert not list(cut.rglob("*.spool"))
    assert "already finished" in optpipe("bench", "--resume", str(cut)).stderr
