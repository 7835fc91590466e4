"""Preprocessing is proven by the model's outputs: the verdict, and the proof over pictures."""

from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tests.fakes.odd_images import make_synthetic_image

from optpipe.core.errors import BadInputError, StageError
from optpipe.core.events import SilentListener
from optpipe.core.transform import CenterCrop, Decode, Normalize, Pack, Rescale, Resize, Transform
from optpipe.core.verdict import Verdict
from optpipe.evaluate.tasks.masks import encode_mask
from optpipe.evaluate.tasks.segmentation import Segmentation
from optpipe.models.inputs.image_set import ImageSet
from optpipe.models.inputs.images import preprocess_file
from optpipe.models.inputs.sample_set import SetFile
from optpipe.preprocess import dali_graph
from optpipe.preprocess import parity as parity_module
from optpipe.preprocess.dali_pipeline import DaliPlan
from optpipe.preprocess.parity import (
    TrainingTransform,
    compare_training_transform,
    explain_difference,
    prove_parity,
    save_side_by_side,
)
from optpipe.preprocess.proof import (
    SNR_FLOOR_DB,
    Agreement,
    TaskScore,
    agreement_from_counts,
    compare_predictions,
    compute_agreement,
    judge_parity,
    observe_prediction_agreement,
)

GOOD: dict[str, Any] = {"finite": True, "trained": True, "classifies": True, "refused": 0}


@pytest.mark.parametrize(
    ("equal", "images", "verdict"),
    [(800, 800, "PASS"), (10, 10, "INCONCLUSIVE"), (780, 800, "FAIL")],
)
def test_answers_are_judged_by_their_share_and_number(equal, images, verdict):
    assert judge_parity(agreement_from_counts(equal, images), 90.0, **GOOD).verdict == verdict


@pytest.mark.parametrize(
    ("found", "snr_db", "changes", "verdict"),
    [
        # random weights and what is no classifier are judged by the outputs' error
        *(
            (found, snr, change, verdict)
            for snr, verdict in ((None, "PASS"), (90.0, "PASS"), (SNR_FLOOR_DB - 0.1, "FAIL"))
            for found, change in (
                (agreement_from_counts(8, 8), {"trained": False}),
                (None, {"classifies": False}),
            )
        ),
        # outputs that do not depend on the image, and one class for every image, prove nothing
        (None, None, {"trained": False, "blind": True}, "INCONCLUSIVE"),
        (None, None, {"classifies": False, "blind": True}, "INCONCLUSIVE"),
        (None, 90.0, {}, "INCONCLUSIVE"),
        # whatever else is good
        (agreement_from_counts(800, 800), None, {"refused": 1}, "FAIL"),
        (agreement_from_counts(800, 800), None, {"finite": False}, "FAIL"),
    ],
)
def test_what_proves_nothing_and_what_fails(found, snr_db, changes, verdict):
    assert judge_parity(found, snr_db, **{**GOOD, **changes}).verdict == verdict
    assert compute_agreement(np.array([3, 3, 3]), np.array([3, 3, 3])) is None


@given(st.integers(1, 3000), st.integers(0, 3000))
def test_one_more_disagreement_never_improves_the_verdict(images, wrong):
    order = {Verdict.PASS: 2, Verdict.INCONCLUSIVE: 1, Verdict.FAIL: 0}
    equal = max(images - wrong, 0)
    better = judge_parity(agreement_from_counts(equal, images), 60.0, **GOOD).verdict
    worse = judge_parity(agreement_from_counts(max(equal - 1, 0), images), 60.0, **GOOD).verdict
    assert order[worse] <= order[better]


@pytest.mark.parametrize(
    ("drop_ci", "agreement_ci", "images", "verdict"),
    [
        ((-0.001, 0.004), (0.998, 1.0), 250, "PASS"),
        ((-0.001, 0.004), (0.994, 0.996), 250, "PASS"),
        ((-0.001, 0.004), (0.93, 0.95), 250, "FAIL"),
        ((0.006, 0.02), (0.994, 0.996), 250, "FAIL"),
        ((-0.02, -0.006), (0.998, 1.0), 250, "FAIL"),  # a higher score is no parity
        ((0.0, 0.02), (0.998, 1.0), 250, "INCONCLUSIVE"),
        ((0.0, 0.0), (1.0, 1.0), 99, "INCONCLUSIVE"),
        (None, (0.998, 1.0), 250, "PASS"),
        (None, (0.99, 1.0), 250, "INCONCLUSIVE"),
        (None, (0.98, 0.99), 250, "FAIL"),
    ],
)
def test_a_detector_is_judged_by_its_predictions(drop_ci, agreement_ci, images, verdict):
    score = (
        None
        if drop_ci is None
        else TaskScore("AP", 0.6, 0.6 - sum(drop_ci) / 2, sum(drop_ci) / 2, drop_ci)
    )
    predicted = Agreement(images, sum(agreement_ci) / 2, agreement_ci)
    assert judge_parity(None, 30.0, **GOOD, score=score, predicted=predicted).verdict == verdict
    untrained = judge_parity(
        None, 30.0, **{**GOOD, "trained": False}, score=score, predicted=predicted
    )
    assert untrained.verdict is Verdict.FAIL


NORMALIZE = Normalize((0.5,) * 3, (0.25,) * 3)
TRANSFORM = Transform((Decode(), Resize((72,)), CenterCrop(64, 63), Rescale(), NORMALIZE, Pack()))
PLAN = DaliPlan(batch_size=4, threads=2)
WEIGHTS = np.random.default_rng(0).standard_normal((3 * 64 * 63, 5)).astype(np.float32)


def infer(batch):
    return {"scores": batch.reshape(len(batch), -1) @ WEIGHTS}


@pytest.fixture
def paths(tmp_path):
    for index in range(6):
        Image.fromarray(make_synthetic_image(150 + index, 211, index)).save(
            tmp_path / f"{index}.jpg", quality=90
        )
    return sorted(tmp_path.glob("*.jpg"))


def prove(paths):
    samples = ImageSet(
        "photographs", paths[0].parent, 0, tuple(SetFile(path.name, "") for path in paths)
    )
    return prove_parity(
        samples, TRANSFORM, PLAN, infer, SilentListener(), trained=False, classifies=True
    )


@pytest.mark.slow
def test_the_derived_pipeline_passes(paths):
    record, _, _ = prove(paths)
    assert record.proof.verdict is Verdict.PASS
    assert [each.step for each in record.steps] == ["decode", "resize", "center_crop", "normalize"]
    assert record.steps[-1].max_levels <= 1.01
    assert record.images == record.steps[0].images == 6


@pytest.mark.slow
def test_a_filter_without_antialiasing_is_found(paths, monkeypatch):
    filtering = dali_graph._get_filtering
    monkeypatch.setattr(
        dali_graph,
        "_get_filtering",
        lambda step, floats: {**filtering(step, floats=floats), "antialias": False},
    )
    record, _, _ = prove(paths)
    assert record.proof.verdict is Verdict.FAIL
    assert next(each.step for each in record.steps if each.mean_levels > 0.1) == "resize"


@pytest.mark.slow
def test_a_crop_shifted_by_one_pixel_is_found(paths, monkeypatch):
    start = dali_graph._compute_crop_start
    monkeypatch.setattr(dali_graph, "_compute_crop_start", lambda *arguments: start(*arguments) + 1)
    record, _, _ = prove(paths)
    assert record.proof.verdict is Verdict.FAIL
    assert next(each.step for each in record.steps if each.mean_levels > 1) == "center_crop"


def test_files_that_only_pillow_reads_are_named_and_fail(paths, tmp_path):
    Image.fromarray(make_synthetic_image(90, 90)).save(tmp_path / "gif in disguise.jpg", "GIF")
    record, rows, _ = prove([*paths, tmp_path / "gif in disguise.jpg"])
    assert [each.image.rpartition("/")[2] for each in record.refused] == ["gif in disguise.jpg"]
    assert record.proof.verdict is Verdict.FAIL
    assert rows.height == len(paths)


def test_running_out_of_memory_is_not_blamed_on_the_pictures(paths, monkeypatch):
    def exhausted(pipeline, arrays):
        msg = "CUDA runtime API error cudaErrorMemoryAllocation (2): out of memory"
        raise RuntimeError(msg)

    monkeypatch.setattr(parity_module, "_run", exhausted)
    with pytest.raises(StageError, match="--batch-size 2"):
        prove(paths)


def test_the_worst_picture_is_shown_beside_the_reference_and_the_difference(paths, tmp_path):
    _, _, worst = prove(paths)
    assert len(worst) == 3
    saved = save_side_by_side(tmp_path / "worst.png", worst[0], TRANSFORM)
    assert (saved.file, saved.image) == ("worst.png", worst[0].name)
    assert saved.difference_times > 1
    assert Image.open(tmp_path / "worst.png").size == (3 * 63 + 2 * 8, 64)


def make_rows(images, seed=0, share=0.02):
    """Masks of which the second pipeline changes about `share` of the pixels."""
    draw = np.random.default_rng(seed)
    masks = draw.integers(0, 3, (images, 8, 8), np.uint8)
    changed = np.where(draw.random(masks.shape) < share, (masks + 1) % 3, masks).astype(np.uint8)
    columns = {"reference_prediction": masks, "dali_prediction": changed}
    return pl.DataFrame(
        {name: [encode_mask(each) for each in values] for name, values in columns.items()}
    )


def test_the_agreement_is_that_of_the_proof_with_an_interval_at_the_confidence_of_the_policy():
    rows, task = make_rows(200), Segmentation()
    _, proven = compare_predictions(rows, task)
    seen = {
        level: observe_prediction_agreement(rows, task, level, "200 images")
        for level in (0.95, 0.99)
    }
    assert proven is not None
    assert seen[0.95].value == proven.share
    assert (seen[0.95].low, seen[0.95].high) == proven.ci
    assert seen[0.99].low < seen[0.95].low < seen[0.95].value < seen[0.95].high <= seen[0.99].high
    assert not seen[0.95].blockers


def test_few_images_that_all_agree_prove_nothing():
    (few,) = observe_prediction_agreement(
        make_rows(20, share=0.0), Segmentation(), 0.95, "20 images"
    ).blockers
    assert few.reason == "20 images are too few to prove agreement"
    assert few.remedy == "verify parity on 100 or more"


TRAINING = """
import math
import numpy as np, torch
from PIL import Image
from torchvision.transforms import InterpolationMode, v2

def pack(mean=0.5, std=0.25, scale=True):
    return [v2.ToDtype(torch.float32, scale=scale), v2.Normalize([mean] * 3, [std] * 3)]

def compose(*steps, values=pack()):
    return v2.Compose([*steps, v2.PILToTensor(), *values])

crop = v2.CenterCrop((64, 63))
right = compose(v2.Resize(72), crop)
bicubic = compose(v2.Resize(72, InterpolationMode.BICUBIC), crop)
smaller = compose(v2.Resize(66), crop)
squash = compose(v2.Resize((64, 63)))
aliased = v2.Compose([v2.ToImage(), v2.Resize(72, antialias=False), crop, *pack()])
on_tensors = v2.Compose([v2.ToImage(), v2.Resize(72, antialias=True), crop, *pack()])
no_values = compose(v2.Resize(72), crop, values=[v2.ToDtype(torch.float32, scale=True)])
no_scale = compose(v2.Resize(72), crop, values=pack(scale=False))
other_mean = compose(v2.Resize(72), crop, values=pack(0.4, 0.3))
random = compose(v2.Resize(72), crop, v2.RandomHorizontalFlip())
last = compose()
bgr = lambda image: right(image)[[2, 1, 0]]
bgr_and_bicubic = lambda image: bicubic(image).flip(0)
array = lambda image: np.moveaxis(right(Image.fromarray(image[:])).numpy(), 0, -1)
factory = lambda: right
albumentations = lambda *, image: {"image": right(Image.fromarray(image))}
per_image = lambda image: (right(image) - right(image).mean()) / right(image).std()
text = lambda image: "label"
flat = lambda image: right(image).flatten()
nan = lambda image: right(image) * float("nan")
number = 3

def raises(image):
    raise KeyError("label")

def upward(image):
    width, height = image.size
    sides = [math.ceil(side * 72 / min(width, height)) for side in (width, height)]
    return last(v2.functional.center_crop(image.resize(sides, Image.BILINEAR), (64, 63)))

def letterbox(image):
    scale = 64 / max(image.size)
    sides = [int(side * scale) for side in image.size]
    box = Image.new("RGB", (63, 64), (114, 114, 114))
    box.paste(image.resize(sides, Image.BILINEAR), (-(-(63 - sides[0]) // 2) if sides[0] < 63 else 0, (64 - sides[1]) // 2))
    return last(box)

def shifted(image):
    image = v2.functional.resize(image, 72)
    left, top = round((image.width - 63) / 2), round((image.height - 64) / 2)
    return last(image.crop((left + 1, top, left + 64, top + 64)))
"""


@pytest.fixture
def training(tmp_path):
    (tmp_path / "training.py").write_text(TRAINING)
    return lambda name: TrainingTransform(f"{tmp_path}/training.py:{name}")


@pytest.mark.parametrize("name", ["right", "array", "factory", "albumentations", "on_tensors"])
def test_a_transform_that_equals_the_cards_is_called_as_it_wants(paths, training, name):
    one = training(name)
    for path in paths[:2]:
        assert (
            np.abs(one.apply(path).transpose(2, 0, 1) - preprocess_file(path, TRANSFORM)).max() * 64
            <= 1.01
        )
    assert ("Pillow" in one.given) == (name in ("right", "factory", "on_tensors"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "step", "change"),
    [
        ("bicubic", "resize", "interpolation bicubic instead of bilinear"),
        ("aliased", "resize", "antialias False instead of True"),
        ("smaller", "resize", "size (66,) instead of (72,)"),
        ("squash", "resize", "fit exact instead of short"),
        ("upward", "resize", "sides round up"),
        ("shifted", "center_crop", "(0, -1) pixels earlier"),
        ("bgr", "decode", "channels BGR instead of RGB"),
        ("no_values", "normalize", "none"),
        ("no_scale", "rescale", "none"),
        ("other_mean", "normalize", "mean (0.4, 0.4, 0.4) instead of (0.5, 0.5, 0.5)"),
        ("per_image", "normalize", "each image"),
        ("bgr_and_bicubic", "decode", "channels BGR instead of RGB"),
    ],
)
def test_a_planted_difference_is_found_in_its_step(paths, training, name, step, change):
    one = training(name)
    changes, left = explain_difference(TRANSFORM, [(path, one.apply(path)) for path in paths[:4]])
    assert next(iter(changes)) == step
    assert change in changes[step]
    assert left.max_levels <= 1.01
    assert ("resize" in changes) == (step == "resize" or name == "bgr_and_bicubic")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("random", "not deterministic"),
        ("raises", "KeyError: 'label' (training.py, line"),
        ("text", "not finite values in 1 or 3 channels"),
        ("flat", r"shape [12096]"),
        ("nan", "not finite values"),
        ("number", "has no transform 'number'"),
        ("other", "pack, compose, crop, right"),
    ],
)
def test_a_transform_that_cannot_be_compared_is_refused_in_two_lines(paths, training, name, said):
    with pytest.raises(BadInputError) as refused:
        training(name).apply(paths[0])
    assert said in str(refused.value)
    assert len(str(refused.value).splitlines()) <= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "verdict"), [("right", "PASS"), ("letterbox", "FAIL"), ("variable", "FAIL")]
)
def test_the_dali_pipeline_is_compared_too_and_the_difference_is_shown(
    paths, tmp_path, name, verdict
):
    (tmp_path / "training.py").write_text(TRAINING + "variable = compose(v2.Resize(72))\n")
    samples = ImageSet(
        "photographs", paths[0].parent, 0, tuple(SetFile(path.name, "") for path in paths)
    )
    training = TrainingTransform(f"{tmp_path}/training.py:{name}")
    record = compare_training_transform(
        training, "net", samples, TRANSFORM, PLAN, tmp_path / "shown", SilentListener()
    )
    assert record.verdict == verdict
    card, dali = record.differences[:2]
    assert abs(card.mean_levels - dali.mean_levels) < 0.5
    assert (card.max_levels <= record.tolerance_levels) == (verdict == "PASS")
    assert record.step == {"right": None, "letterbox": "resize", "variable": "center_crop"}[name]
    image = Image.open(record.worst.file)
    assert image.height == 64
    assert image.width > 3 * 63 + 3 * 8
