"""The proof finds what is planted: a wrong filter, a shifted crop, a file that only one side reads."""

import numpy as np
import pytest
from PIL import Image

from optpipe.core.errors import StageError
from optpipe.core.events import SilentListener
from optpipe.core.transform import (
    CenterCrop,
    Decode,
    Normalize,
    Pack,
    Rescale,
    Resize,
    Transform,
)
from optpipe.core.verdict import Verdict
from optpipe.models.inputs.synthetic import make_synthetic_image
from optpipe.preprocess import dali_graph
from optpipe.preprocess import parity as parity_module
from optpipe.preprocess.dali_pipeline import DaliPlan
from optpipe.preprocess.parity import prove_parity, save_side_by_side

TRANSFORM = Transform(
    (Decode(), Resize((72,)), CenterCrop(64, 63), Rescale(), Normalize((0.5,) * 3, (0.25,) * 3), Pack())
)
PLAN = DaliPlan(batch_size=4, threads=2)
WEIGHTS = np.random.default_rng(0).standard_normal((3 * 64 * 63, 5)).astype(np.float32)


def infer(batch):
    return {"scores": batch.reshape(len(batch), -1) @ WEIGHTS}


@pytest.fixture
def paths(tmp_path):
    for index in range(6):
        Image.fromarray(make_synthetic_image(150 + index, 211, index)).save(tmp_path / f"{index}.jpg", quality=90)
    return sorted(tmp_path.glob("*.jpg"))


@pytest.fixture
def without_edge_cases(monkeypatch):
    """They take longer than the proof, and other tests have them."""
    monkeypatch.setattr(parity_module, "check_edge_cases", lambda *_: ())


def prove(paths, **changes):
    options = {"trained": False, "classifies": True, "labels": None, **changes}
    return prove_parity(paths, TRANSFORM, PLAN, infer, SilentListener(), **options)


@pytest.mark.slow
def test_the_derived_pipeline_passes_and_names_the_step_that_adds_most(paths):
    record = prove(paths).record
    assert record.proof.verdict is Verdict.PASS
    assert [each.step for each in record.steps] == ["decode", "resize", "center_crop", "normalize"]
    assert record.largest_step == "resize"
    assert record.steps[-1].cumulative.max_levels <= 1.01
    assert record.images == record.steps[0].cumulative.images == 6
    assert all(each.matches for each in record.edge_cases)


@pytest.mark.slow
def test_a_filter_without_antialiasing_is_found(paths, monkeypatch):
    filtering = dali_graph._get_filtering
    monkeypatch.setattr(
        dali_graph, "_get_filtering", lambda step, floats: {**filtering(step, floats=floats), "antialias": False}
    )
    record = prove(paths).record
    assert record.proof.verdict is Verdict.FAIL
    assert record.largest_step == "resize"
    assert {each.outcome for each in record.edge_cases} & {"different"}


def test_a_crop_shifted_by_one_pixel_is_found(paths, monkeypatch, without_edge_cases):
    start = dali_graph._compute_crop_start
    monkeypatch.setattr(dali_graph, "_compute_crop_start", lambda *arguments: start(*arguments) + 1)
    record = prove(paths).record
    assert record.proof.verdict is Verdict.FAIL
    assert record.largest_step == "center_crop"


def test_accuracy_is_given_where_labels_are_known(paths, without_edge_cases):
    proof = prove(paths, trained=True, labels=[0, 1, 2, 3, 4, 0]).record.proof
    assert proof.accuracy is not None
    assert proof.accuracy.reference == proof.accuracy.dali
    assert proof.verdict is Verdict.INCONCLUSIVE


def test_files_that_only_pillow_reads_are_named_and_fail(paths, tmp_path, without_edge_cases):
    Image.fromarray(make_synthetic_image(90, 90)).save(tmp_path / "gif in disguise.jpg", "GIF")
    proof = prove([*paths, tmp_path / "gif in disguise.jpg"])
    assert [each.image.rpartition("/")[2] for each in proof.record.refused] == ["gif in disguise.jpg"]
    assert proof.record.proof.verdict is Verdict.FAIL
    assert proof.rows.height == len(paths)


def test_running_out_of_memory_is_not_blamed_on_the_pictures(paths, monkeypatch):
    def exhausted(pipeline, arrays):
        msg = "CUDA runtime API error cudaErrorMemoryAllocation (2): out of memory"
        raise RuntimeError(msg)

    monkeypatch.setattr(parity_module, "_run", exhausted)
    with pytest.raises(StageError, match="--batch-size 2"):
        prove(paths)


def test_the_worst_picture_is_shown_beside_the_reference_and_the_difference(paths, tmp_path, without_edge_cases):
    proof = prove(paths)
    assert len(proof.worst) == 3
    saved = save_side_by_side(tmp_path / "worst.png", proof.worst[0], TRANSFORM)
    assert (saved.file, saved.image) == ("worst.png", proof.worst[0].name)
    assert saved.difference_times > 1
    assert Image.open(tmp_path / "worst.png").size == (3 * 63 + 2 * 8, 64)
