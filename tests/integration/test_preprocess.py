"""`optpipe preprocess` and `bench --from-images` as users run them, on the model that ships."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean

import numpy as np
import pytest
from PIL import Image

from optpipe.core.records import read_record, record_from_json
from optpipe.preprocess.end_to_end import EndToEndRecord, describe_end_to_end_validity
from optpipe.workspace.entry import load_run
from optpipe.workspace.places import find_shipped_folder
from tests.fakes.odd_images import make_synthetic_image
from tests.integration.conftest import optpipe


@pytest.fixture(scope="module")
def workspace(tmp_path_factory, exported):
    return exported(tmp_path_factory.mktemp("preprocess") / "workspace")


@pytest.fixture(scope="module")
def record(workspace):
    done = optpipe("preprocess", "digits", "--no-throughput", "--json", workspace=workspace).expect(
        0
    )
    return done.document


def test_digits_pass_on_their_own_validation_images(record):
    assert record["verdict"] == "PASS"
    assert record["parity"]["proof"]["top1_agreement"]["share"] >= 0.995
    assert record["parity"]["proof"]["top1_agreement"]["images"] == 800
    accuracy = record["parity"]["proof"]["accuracy"]
    assert accuracy["dali"] == pytest.approx(accuracy["reference"], abs=0.003)


def test_a_picture_that_comes_through_as_another_is_named(workspace, tmp_path):
    levels = np.linspace(0, 255, 64 * 64, dtype=np.float32).reshape(64, 64)
    Image.fromarray(levels).save(tmp_path / "floats.tif")  # 0 to 255 for Pillow, 0 to 1 for DALI
    Image.fromarray(levels.astype(np.int32)).save(tmp_path / "integers.tif")
    Image.fromarray(make_synthetic_image(50, 60, 1)).save(tmp_path / "plain.png")
    done = optpipe(
        "preprocess",
        "digits",
        "--no-throughput",
        "--images",
        str(tmp_path),
        "--json",
        workspace=workspace,
    )
    assert done.document["verdict"] == "FAIL"
    assert done.document["parity"]["far"] == 1
    (refused,) = done.document["parity"]["refused"]
    assert refused["image"].endswith("integers.tif")
    assert "sample_type" in refused["reason"]
    assert "1 of 2 images differ visibly" in done.document["warnings"][0]
    assert "floats.tif" in done.document["warnings"][0]


def test_pictures_of_one_pixel_come_through_alike(workspace, tmp_path):
    for level in range(6):
        Image.new("RGB", (1, 1), (40 * level, 255 - 40 * level, 9)).save(tmp_path / f"{level}.png")
    done = optpipe(
        "preprocess",
        "digits",
        "--no-throughput",
        "--images",
        str(tmp_path),
        "--json",
        workspace=workspace,
    )
    record = done.document
    assert done.status == 5, done.stderr  # six pictures prove little
    assert (record["images"]["count"], record["parity"]["proof"]["top1_agreement"]["share"]) == (
        6,
        1.0,
    )


@pytest.mark.slow
def test_the_fastest_configurations_are_found_and_measured_in_turn(workspace, tmp_path):
    for index in range(16):
        Image.fromarray(make_synthetic_image(50, 60, index)).save(tmp_path / f"{index}.jpg")
    arguments = ["--images", str(tmp_path), "--batch-size", "4", "--set", "seconds=0.1", "--json"]
    done = optpipe("preprocess", "digits", *arguments, workspace=workspace)
    record = done.document
    tuned = record["throughput"]
    winners = [tuned[name] for name in ("dataloader", "dali")]
    for row in (*tuned["tried"], *winners):
        assert row["error"] is None
        assert row["ci"] is None or row["ci"][0] <= row["images_per_s"] <= row["ci"][1]
    rounds = [each["repeats_images_per_s"] for each in winners]
    ratios = [dali / loader for loader, dali in zip(*rounds, strict=True)]
    assert tuned["speedup"] == pytest.approx(geometric_mean(ratios))
    assert tuned["speedup_ci"][0] < tuned["speedup"] < tuned["speedup_ci"][1]
    assert record["pipeline"]["plan"] == tuned["dali"]["plan"]
    assert [len(each["repeats_images_per_s"]) for each in winners] == [4, 4]
    assert all(name in done.stderr for name in ("DataLoader by workers", "DALI by decoder"))


def test_without_dali_the_install_command_is_given(workspace):
    code = "import sys; sys.modules['nvidia.dali'] = None; sys.argv[0] = 'optpipe'; from optpipe.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "preprocess", "digits", "--workspace", str(workspace)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 3
    assert "pip install nvidia-dali-cuda130" in done.stderr


TRAINING = """
import torch
from torchvision.transforms import InterpolationMode, v2

def compose(interpolation):
    values = [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.3437] * 3, [0.3203] * 3)]
    return v2.Compose([v2.Resize(36, interpolation), v2.CenterCrop(32), *values])

right, wrong = compose(InterpolationMode.BILINEAR), compose(InterpolationMode.BICUBIC)
def random(image):
    print("a line of the user")
    return right(image) + torch.rand(1)
"""


@pytest.mark.parametrize(("name", "status"), [("right", 0), ("wrong", 1), ("random", 2)])
def test_the_cards_pixels_are_those_of_training_or_the_step_that_differs_is_named(
    workspace, tmp_path, name, status
):
    (tmp_path / "training.py").write_text(TRAINING)
    options = (
        "--against",
        f"{tmp_path}/training.py:{name}",
        "--limit",
        20,
        "--output",
        tmp_path / "shown",
        "--json",
    )
    done = optpipe("preprocess", "digits", *options, workspace=workspace).expect(status)
    if status < 2:
        assert done.document["step"] == (None, "resize")[status]
        assert Path(done.document["worst"]["file"]) == tmp_path / "shown" / "digits.png"
        assert (tmp_path / "shown" / "digits.png").is_file()
    else:
        assert "not deterministic" in done.stderr


FILES = str(find_shipped_folder("calibration") / "digits" / "validation")


def test_the_predictions_of_the_timed_run_are_the_references(exported, tmp_path):
    untouched, given = (
        exported(tmp_path / "untouched"),
        ("--from-images", FILES, "--min-time", "0.3", "--json"),
    )
    done = optpipe("bench", "digits", *given, workspace=untouched).expect(0)
    record = record_from_json(done.stdout, EndToEndRecord, "stdout")
    (result,) = record.results
    figures = result.figures
    assert f"{result.label}: {describe_end_to_end_validity(figures)}" in done.stderr
    assert (figures.checked, figures.equal) == (32, 32)
    assert figures.classes > 3
    assert figures.bottleneck == "CPU"
    assert result.options["spinning"] is False
    assert "optpipe preprocess digits" in " ".join(record.warnings)
    run = load_run(Path(record.run_dir))
    assert (run.kind, run.find_problems()) == ("end-to-end", [])
    stored = read_record(run.path / "end-to-end.json", EndToEndRecord)
    assert replace(record, warnings=()) == stored
    assert (run.path / f"{result.artifact}.parquet").is_file()
