"""`build --precision auto` on a CPU, then what `show`, `bench` and `signoff` say of its decision."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.conftest import Ran, optpipe

AUTO = ("build", "digits", "--precision", "auto")


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory, exported: Callable[[Path], Path]) -> tuple[Path, Ran]:
    """A working directory, and the document of the choice between ONNX Runtime's FP32 and INT8."""
    folder = tmp_path_factory.mktemp("chosen")
    exported(folder / ".optpipe")
    return folder, optpipe(
        *AUTO, "--backend", "onnxruntime", "--device", "cpu", "--compare-at", "1,2", "--json", cwd=folder
    )


def test_every_candidate_is_judged_raced_and_recorded(chosen: tuple[Path, Ran]) -> None:
    folder, ran = chosen
    assert ran.status == 0, ran.stderr
    assert "at most" in ran.stderr  # how long it will take
    decision = ran.document["decision"]
    candidates = {each["artifact"]: each for each in decision["candidates"]}
    assert {each["precision"] for each in candidates.values()} == {"fp32", "int8"}
    assert set(decision["winners"]) == {"1", "2"}
    assert decision["candidates"][0]["artifact"] in decision["winners"].values()
    for each in candidates.values():
        assert each["accuracy"]["keeps"] is True
        for times in each["times"]:
            won = decision["winners"][str(times["batch_size"])] == each["artifact"]
            assert (times["ratio"] is None) == won, "two candidates: both are in the final rounds"
            assert len(times["final_ns"]) == 8
    winner = decision["candidates"][0]["artifact"]
    assert "the fastest within 1 point" in optpipe("store", "show", winner, cwd=folder).stdout
    run = Path(ran.document["run_dir"]).name
    assert winner in optpipe("store", "show", run, cwd=folder).stdout


def test_bench_and_signoff_name_the_winner(chosen: tuple[Path, Ran]) -> None:
    folder, ran = chosen
    winners = set(ran.document["decision"]["winners"].values())
    short = ("--batch", "1", "--processes", "1", "--min-time", "0.2", "--max-cv", "900%", "--json")
    benched = optpipe("bench", "digits", "--precision", "auto", *short, cwd=folder)
    assert {each["subject"]["artifact"] for each in benched.document["measurements"]} == winners
    policy = folder / "policy.toml"
    policy.write_text('schema = 1\nname = "any"\nmodel = "digits"\n\n[[latency]]\np50 = "1 s"\nbatch_size = 1\n')
    refused = optpipe("signoff", "digits", "--policy", policy, "--no-measure", cwd=folder)
    assert refused.status == 2
    assert "--precision auto chose" in refused.stderr
