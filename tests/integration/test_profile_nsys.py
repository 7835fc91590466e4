"""Real nsys without a GPU: export, quantize, build, preprocess and CPU inference of `digits`."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from optpipe.core.errors import ExitStatus, MissingError, OptpipeError, StageError
from optpipe.core.records import find_disagreements, json_from_record
from optpipe.trace.nsys import Capture, find_nsys, record_program
from optpipe.trace.read import trace_from_path
from optpipe.trace.record import JOB, WorkerJob, read_result
from tests.integration.conftest import optpipe

try:
    NSYS: Path | None = find_nsys()
except MissingError:
    NSYS = None
needs_nsys = pytest.mark.skipif(
    NSYS is None, reason="Nsight Systems (nsys) is not installed: sudo .ci/install-nsys"
)
SECRET = "correct-horse-battery-staple"
FP32 = ("digits", "--precision", "fp32", "--backend", "onnxruntime")
INFERENCE = (*FP32, "--stage", "inference")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, exported: Callable[[Path], Path]) -> Path:
    return exported(tmp_path_factory.mktemp("profile") / "workspace")


@pytest.fixture(scope="module")
def document(workspace: Path) -> dict[str, Any]:
    arguments = (*FP32, "--batch-size", "1", "--iterations", "10", "--json")
    finished = optpipe("profile", *arguments, workspace=workspace, API_TOKEN=SECRET)
    failed = finished.document.get("failed")
    assert finished.status == ExitStatus.DONE, (failed, finished.stderr)
    for stage in finished.document["stages"]:
        passed = stage["profile"]["trace_quality"]["verdict"] == "PASS"
        said = f"profile {stage['subject']['name']}: {'VALID' if passed else 'INVALID ('}"
        assert said in finished.stderr
    found: dict[str, Any] = finished.document
    return found


def main_profile(document: dict[str, Any]) -> dict[str, Any]:
    """The profile of the stage that is shown in full."""
    found: dict[str, Any] = main_stage(document)["profile"]
    return found


def main_stage(document: dict[str, Any]) -> dict[str, Any]:
    stages: list[dict[str, Any]] = document["stages"]
    [found] = [each for each in stages if each["subject"]["name"] == document["main"]]
    return found


@needs_nsys
def test_every_stage_is_recorded_and_judged_and_inference_has_a_roofline(
    document: dict[str, Any],
) -> None:
    subjects = [stage["subject"] for stage in document["stages"]]
    assert [each["kind"] for each in subjects] == [
        "build",
        "build",
        "build",
        "preprocess",
        "inference",
    ]
    assert [each["name"] for each in subjects][:3] == ["export", "quantize", "build"]
    assert all(stage["profile"]["tracer"].startswith("nsys 20") for stage in document["stages"])
    assert {stage["profile"]["bottleneck"]["verdict"] for stage in document["stages"]} == {"CPU"}
    repeating = [
        stage
        for stage in document["stages"]
        if stage["subject"]["kind"] in ("preprocess", "inference")
    ]
    assert {stage["profile"]["iterations"]["range"] for stage in repeating} == {"optpipe.iteration"}
    spans = [stage["profile"]["measured"]["totals"]["span_ns"] for stage in document["stages"][:3]]
    assert min(spans) > 0
    assert len(set(spans)) == 3, "each stage is judged by its own range, not by the recording"
    assert document["main"] == "onnxruntime fp32 batch 1"
    profile = main_profile(document)
    assert profile["iterations"]["count"] == 10
    roofline = profile["roofline"]
    assert roofline["peaks"]["source"] == "measured"
    timed = [layer for layer in roofline["layers"] if layer["measured_ns"]]
    assert sum(layer["cost"]["macs"] for layer in timed) == pytest.approx(roofline["macs"])


@needs_nsys
def test_the_run_folder_holds_no_environment_and_can_be_judged_again(
    document: dict[str, Any], workspace: Path
) -> None:
    run = Path(document["run_dir"])
    assert (run / "manifest.json").is_file()
    ranges = pl.read_parquet(run / "onnxruntime-fp32-batch-1" / "tables" / "ranges.parquet")
    assert "optpipe.measure" in ranges["name"].to_list()
    leaks = [
        path for path in run.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()
    ]
    assert leaks == []
    assert list((workspace / "tmp").glob("profile-*")) == []
    stage = str(run / "onnxruntime-fp32-batch-1")
    again = optpipe("profile", "--trace", stage, "--json")
    whole = main_stage(document)
    expected = whole["profile"] | {
        name: whole[name] for name in ("details", "modules", "loop", "counters", "energy")
    }
    expected |= {"schema_version": again.document["schema_version"], "against": None}
    assert find_disagreements(expected, again.document, "again") == []


@needs_nsys
def test_keep_raw_warns(workspace: Path, document: dict[str, Any]) -> None:
    arguments = (*INFERENCE, "--iterations", "3", "--workspace", str(workspace), "--json")
    kept = (
        optpipe("profile", *arguments, "--set", "keep-raw=true", API_TOKEN=SECRET)
        .expect(0)
        .document
    )
    assert any("whole process environment" in warning for warning in kept["warnings"])
    raw = next(Path(kept["run_dir"]).rglob("raw/recording.sqlite"))
    assert SECRET.encode() in raw.read_bytes()
    assert SECRET not in optpipe("profile", "--trace", str(raw), "--json").stdout


def test_without_nsys_it_says_how_to_get_it(tmp_path: Path) -> None:
    """PATH without nsys: exit 3 before anything is built."""
    if Path("/opt/nvidia").exists():
        pytest.skip("an nsys below /opt would be found without PATH")
    finished = optpipe("profile", "digits", workspace=tmp_path, PATH="/nowhere").expect(
        ExitStatus.MISSING
    )
    assert "Nsight Systems (nsys) not found" in finished.stderr
    assert not (tmp_path / "store").exists()


@needs_nsys
def test_a_qdstrm_without_a_report_is_imported(tmp_path: Path) -> None:
    """Debian's nsys leaves the .qdstrm, because it looks for its importer elsewhere; then it is called here."""
    assert NSYS is not None
    program = "import torch; torch.cuda.nvtx.range_push('hello'); torch.cuda.nvtx.range_pop()"
    options = ["-t", "nvtx", "--sample", "none", "--cpuctxsw", "none", "-o", str(tmp_path / "left")]
    subprocess.run(
        [str(NSYS), "profile", *options, sys.executable, "-c", program],
        capture_output=True,
        check=True,
    )
    left = tmp_path / "left.qdstrm"
    if not left.is_file():
        pytest.skip("this nsys finds its importer by itself")
    assert trace_from_path(left).ranges["name"].to_list() == ["hello"]
    shutil.copy(left, tmp_path / "cut.qdstrm")
    with (tmp_path / "cut.qdstrm").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(OptpipeError):
        trace_from_path(tmp_path / "cut.qdstrm")


@needs_nsys
@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "Segmentation fault"),
        ("raise RuntimeError('the model broke')", "RuntimeError: the model broke"),
    ],
)
def test_a_process_that_dies_under_nsys_shows_its_own_error(
    tmp_path: Path, program: str, words: str
) -> None:
    job = WorkerJob(tmp_path)
    (tmp_path / JOB).write_bytes(json_from_record(job))
    broken = (
        "from optpipe.trace import record\n"
        f"record.run_job = lambda job: exec({program!r})\n"
        f"record.main({str(tmp_path / JOB)!r})\n"
    )
    recorded = record_program([sys.executable, "-c", broken], tmp_path, Capture(on_gpu=False))
    with pytest.raises(StageError, match=f"the profiled process crashed.*{words}"):
        read_result(job, recorded)


def _still_running(directory: Path) -> list[str]:
    """The command lines that name `directory`, of processes that are no zombies."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            text = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if str(directory) in text:
                found.append(text)
    return found


def _until(condition: Callable[[], object], limit_s: float) -> bool:
    until = time.monotonic() + limit_s
    while not (met := bool(condition())) and time.monotonic() < until:
        time.sleep(0.1)
    return met


@needs_nsys
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("moment", ["before the program runs", "while it runs"])
def test_a_signal_ends_nsys_and_the_program_and_leaves_nothing(workspace, document, number, moment):
    """To the process alone, as a scheduler does it: not to its group, as a terminal does."""
    before = set((workspace / "runs").iterdir())
    arguments = (*INFERENCE, "--iterations", "200000", "--workspace", str(workspace), "--json")
    words = [sys.executable, "-m", "optpipe", "profile", *arguments]
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    begun = {
        "before the program runs": "profile-*/nsys.log",
        "while it runs": "profile-*/job-worker.log",
    }[moment]
    assert _until(lambda: list((workspace / "tmp").glob(begun)), 300)
    process.send_signal(number)
    out, err = process.communicate(timeout=300)
    assert process.returncode == ExitStatus.INTERRUPTED, err
    assert "interrupted" in json.loads(out)["error"]["message"]
    assert "Traceback" not in err
    assert _until(lambda: not _still_running(workspace / "tmp"), 60), _still_running(
        workspace / "tmp"
    )
    assert list((workspace / "tmp").glob("profile-*")) == []
    assert set((workspace / "runs").iterdir()) == before


@needs_nsys
@pytest.mark.parametrize("free_kb", [60, 900])
def test_a_full_disk_is_named_and_nothing_is_left(workspace, document, tmp_path, free_kb):
    """A real one, of a few hundred kilobytes: it runs full for the job's files, or for what nsys records and exports."""
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no user namespaces here, so no file system of its own")
    size_kb = (
        sum(path.stat().st_size // 4096 + 1 for path in (workspace / "store").rglob("*")) * 4
        + free_kb
    )
    small = tmp_path / "small"
    small.mkdir()
    script = (
        f'mount -t tmpfs -o size={size_kb}k tmpfs "{small}" && cp -r "{workspace}/store" "{small}/" && "$@"; status=$?; '
        f'find "{small}" \\( -path "*/store" -o -path "*/used" -o -path "*/notes" \\) -prune -o -type f -print >&2; exit $status'
    )
    command = [sys.executable, "-m", "optpipe", "profile", *INFERENCE, "--workspace", str(small)]
    finished = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, "sh", *command],
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == ExitStatus.STAGE_FAILED, finished.stderr
    assert "the disk is full" in finished.stderr.splitlines()[-1], (
        finished.stderr
    )  # nothing is listed behind it
    assert "Traceback" not in finished.stderr


@needs_nsys
def test_every_stage_is_profiled_without_options_where_a_precision_becomes_fp32(
    workspace: Path,
) -> None:
    """A CPU has no FP16: its build is one in FP32, and so is the one that is recorded."""
    words = ("digits", "--device", "cpu", "--iterations", "5", "--json")
    ran = optpipe("profile", *words, workspace=workspace).expect(ExitStatus.DONE)
    assert not ran.document["failed"]
    kinds = {stage["subject"]["kind"] for stage in ran.document["stages"]}
    assert kinds == {"build", "preprocess", "inference"}


@needs_nsys
def test_what_was_built_on_the_same_pictures_is_profiled_not_built_again(tmp_path: Path) -> None:
    workspace, pictures = (
        tmp_path / "workspace",
        Path(__file__).parents[2] / "calibration" / "samples",
    )
    ours = ("--images", pictures, "--json")
    built = optpipe("build", *FP32, *ours, workspace=workspace).expect(ExitStatus.DONE)
    profiled = optpipe(
        "profile", *INFERENCE, *ours, "--iterations", "5", workspace=workspace
    ).expect(0)
    assert main_profile(profiled.document)["iterations"]["count"] == 5
    assert (
        profiled.document["stages"][0]["subject"]["artifact"]
        == built.document["artifacts"][0]["id"]
    )
    assert len(list((workspace / "store").glob("artifact-*"))) == 1


@needs_nsys
def test_a_stored_int8_build_is_profiled_without_its_calibration_data(tmp_path: Path) -> None:
    root, workspace, card = (
        Path(__file__).parents[2],
        tmp_path / "workspace",
        tmp_path / "card.toml",
    )
    text = (root / "models" / "digits.toml").read_text().replace('"../', f'"{root}/')
    own = text.replace('"digits/', f'"{root}/models/digits/').splitlines()
    card.write_text("\n".join(line for line in own if not line.startswith("calibration")))
    int8 = (
        str(card),
        "--precision",
        "int8",
        "--backend",
        "onnxruntime",
        "--device",
        "cpu",
        "--json",
    )
    built = optpipe(
        "build", *int8, "--calibration", root / "calibration" / "samples", workspace=workspace
    )
    ran = optpipe("profile", *int8, "--iterations", "5", workspace=workspace)
    stages = ran.expect(ExitStatus.DONE).document["stages"]
    [stage] = [each for each in stages if each["subject"]["kind"] == "inference"]
    assert "--calibration is not given" in ran.stderr
    assert not [each for each in stages if each["subject"]["kind"] == "build"]
    assert stage["subject"]["artifact"] == built.document["artifacts"][0]["id"]
