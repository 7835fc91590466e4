"""`optpipe bench --from-images` as users run it: files in, answers out, both at once."""

from pathlib import Path

import numpy as np
import pytest

from optpipe.artifacts.lookup import find_artifacts
from optpipe.backends.registry import BACKENDS
from optpipe.end_to_end.consumers import HostConsumer
from optpipe.end_to_end.loops import run_overlapped
from optpipe.inputs.images import find_readable_images
from optpipe.preprocess.dali.pipeline import DaliPlan, make_reading_pipeline
from optpipe.preprocess.preprocess import require_image_transform
from optpipe.workspace.shipped import find_shipped_folder
from optpipe.workspace.store import Store
from tests.integration.conftest import optpipe


@pytest.fixture(scope="module")
def workspace(tmp_path_factory, exported):
    return exported(tmp_path_factory.mktemp("from-images") / "workspace")


FILES = str(find_shipped_folder("calibration") / "digits" / "validation")


def test_the_answers_of_the_timed_run_are_the_references(workspace):
    done = optpipe("bench", "digits", "--from-images", FILES, "--min-time", "0.3", "--json", workspace=workspace)
    assert done.status == 0, done.stderr
    record = done.document
    (found,) = record["results"]
    assert found["error"] is None
    assert found["answers_checked"] == {"answers": 32, "equal": 32, "classes": found["answers_checked"]["classes"]}
    assert found["answers_checked"]["classes"] > 3
    assert set(found["parts_images_per_s"]) == {"read", "decode", "preprocess", "inference"}
    assert found["bottleneck"]["name"] == "CPU"
    assert sum(found["timeline"].values()) == pytest.approx(1, abs=0.05)
    assert "optpipe preprocess digits" in " ".join(record["warnings"])
    sharing = found["sharing"]
    assert sharing["division"] in [{k: v for k, v in each.items() if k != "images_per_s"} for each in sharing["tried"]]
    assert all(cost > 0 for cost in sharing["cpu_ms_per_image"].values())
    alone = sharing["cpu_ms_per_image"]["preprocess"] + sharing["cpu_ms_per_image"]["inference"]
    assert sharing["bound_images_per_s"] == pytest.approx(1000 * sharing["cores"] / alone)
    assert sharing["of_bound"] == pytest.approx(found["images_per_s"] / sharing["bound_images_per_s"])
    assert sharing["of_slower_part_with_same_threads"] > 0
    # a part at its best is no slower than with the threads of the division
    assert found["parts_images_per_s"]["inference"] >= sharing["same_threads_images_per_s"]["inference"]
    assert (Path(record["run_dir"]) / f"{found['artifact']}.parquet").is_file()


def test_threads_that_the_user_gives_are_kept_and_the_terminal_names_the_bound(workspace):
    given = ("--option", "onnxruntime.threads=1", "--batch", "16")
    done = optpipe("bench", "digits", "--from-images", FILES, "--min-time", "0.2", *given, workspace=workspace)
    assert done.status == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "1 stream of 1 thread, spinning off" in said
    assert "ms of processor time per image on" in said
    assert "of the slower part alone with the same threads" in said


def test_batches_that_several_streams_answer_at_once_keep_their_pixels(workspace):
    (artifact,) = find_artifacts("digits", Store(workspace), ("fp32",), ("onnxruntime",), "cpu")
    plan, transform = DaliPlan(batch_size=16, threads=2), require_image_transform(artifact.card)
    paths = find_readable_images(Path(FILES), 400).paths
    info = artifact.entry.info
    with BACKENDS["onnxruntime"].load(artifact.entry.path, info, "cpu", {"threads": 1}) as session:
        consumer = HostConsumer(session, streams=3)
        found = run_overlapped(make_reading_pipeline(paths, transform, plan), consumer, plan, None, 0.3)
        expected = {}
        pipeline = make_reading_pipeline(paths, transform, plan)
        while len(expected) < len(paths):
            pixels, index = pipeline.run()
            best = consumer.finish(consumer.launch(pixels.as_tensor()))
            expected |= dict(zip(np.asarray(index.as_tensor()).ravel().tolist(), best.tolist(), strict=True))
    assert len(found.predictions) >= 16 * len(found.rows["batch_ns"])
    assert all(expected[index] == best for index, best in found.predictions)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--from-images", "absent"], "no such folder"),
        (["--from-images", FILES, "--batch", "1,8"], "cannot be combined with"),
        (["--from-images", FILES, "--batch", "9999"], "outside the profile"),
        (["--from-images", FILES, "--min-time", "nan"], "greater than 0"),
        (
            ["--from-images", FILES, "--option", "onnxruntime.spinning=perhaps"],
            "spinning=perhaps: expected true or false",
        ),
        (["--from-images", FILES, "--option", "onnxruntime.streams=2"], "no option 'streams'"),
        (["--from-images", FILES, "--rate", "10", "--tune"], "does not go with --rate, --tune"),
        (["--from-images", FILES, "--max-time", "9", "--max-cv", "9%"], "does not go with --max-time, --max-cv"),
    ],
)
def test_bad_input_is_named(workspace, inside, tmp_path, arguments, said):
    done = inside("bench", "digits", *arguments, "--workspace", workspace, cwd=tmp_path)
    assert done.status == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
