"""`optpipe bench --from-images` as users run it: files in, answers out, both at once."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from optpipe.core.shipped import shipped


def optpipe(*arguments, workspace):
    return subprocess.run(
        [sys.executable, "-m", "optpipe", *arguments, "--workspace", str(workspace)], capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workspace")
    done = optpipe("build", "digits", "--precision", "fp32", "--backend", "onnxruntime", workspace=folder)
    assert done.returncode == 0, done.stderr
    return folder


FILES = str(shipped("calibration") / "digits" / "validation")


def test_the_answers_of_the_timed_run_are_the_references(workspace):
    done = optpipe("bench", "digits", "--from-images", FILES, "--min-time", "0.5", "--json", workspace=workspace)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    (found,) = record["results"]
    assert found["error"] is None
    assert found["answers_checked"] == {"answers": 32, "equal": 32, "classes": found["answers_checked"]["classes"]}
    assert found["answers_checked"]["classes"] > 3
    assert set(found["parts_images_per_s"]) == {"read", "decode", "preprocess", "inference"}
    assert found["bottleneck"]["name"] == "CPU"
    assert sum(found["timeline"].values()) == pytest.approx(1, abs=0.05)
    assert "optpipe preprocess digits" in " ".join(record["warnings"])
    assert (Path(record["run_dir"]) / f"{found['artifact']}.parquet").is_file()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--from-images", "absent"], "no such folder"),
        (["--from-images", FILES, "--batch", "1,8"], "one batch size"),
        (["--from-images", FILES, "--batch", "9999"], "outside the profile"),
        (["--from-images", FILES, "--min-time", "nan"], "above 0"),
        (["--from-images", FILES, "--rate", "10", "--tune"], "does not go with --rate, --tune"),
    ],
)
def test_bad_input_is_named(workspace, arguments, said):
    done = optpipe("bench", "digits", *arguments, workspace=workspace)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
