import numpy as np
import pytest
from PIL import Image

from optpipe.core.card import InputSpec, ModelCard, Task, TensorSpec
from optpipe.core.errors import BadInputError
from optpipe.core.transform import CenterCrop, Decode, Pack, Rescale, Resize, Transform
from optpipe.evaluate.tasks import TASKS
from optpipe.evaluate.tasks.masks import decode_mask, encode_mask
from optpipe.evaluate.tasks.segmentation import Segmentation
from optpipe.models.inputs.image_set import NothingJudgedError, image_set_from_path

TASK = Segmentation()
RNG = np.random.default_rng(0)
IGNORED = 255
EXACT = (Resize((32, 32), fit="exact"),)


def make_card(outputs=(1, 3, 32, 32), labels=("sky", "sea", "land"), geometry=EXACT) -> ModelCard:
    transform = Transform((Decode(), *geometry, Rescale(), Pack()))
    image = InputSpec("image", "float32", (1, 3, 32, 32), (1, 3, 32, 32), (1, 3, 32, 32))
    logits = TensorSpec("logits", "float32", outputs)
    return ModelCard("m", "s", Task.SEGMENTATION, (image,), (logits,), transform, tuple(labels))


def make_masks(count: int, wrong: float, truths=None, seed: int = 1):
    rng = np.random.default_rng(seed)
    truths = (
        [rng.integers(0, 3, (20, 24)).astype(np.uint8) for _ in range(count)]
        if truths is None
        else truths
    )
    return [
        np.where(rng.random(each.shape) < wrong, rng.integers(0, 3, each.shape), each).astype(
            np.uint8
        )
        for each in truths
    ]


def encode(masks):
    return [encode_mask(each) for each in masks]


def write_set(folder, masks, size=(24, 20)):
    for name in ("images", "masks"):
        (folder / name).mkdir()
    for index, mask in enumerate(masks):
        image = RNG.integers(0, 255, (size[1], size[0], 3)).astype(np.uint8)
        Image.fromarray(image).save(folder / "images" / f"{index}.png")
        Image.fromarray(mask).save(folder / "masks" / f"{index}.png")
    return image_set_from_path(folder)[0]


def test_scores_are_those_of_the_confusion_matrix() -> None:
    from sklearn.metrics import confusion_matrix

    truths = make_masks(30, 0.0)
    truths[3][:5] = IGNORED
    source, found = make_masks(30, 0.1, truths, 2), make_masks(30, 0.3, truths, 3)
    scored = TASK.score_predictions(
        encode(truths), encode(source), encode(found), ("sky", "sea", "land")
    )
    judged = np.concatenate([each.ravel() for each in truths]) != IGNORED
    flat = [
        np.concatenate([each.ravel() for each in masks])[judged]
        for masks in (truths, found, source)
    ]
    expected = []
    for masks in flat[1:]:
        table = confusion_matrix(flat[0], masks, labels=[0, 1, 2])
        expected.append(table.diagonal() / (table.sum(0) + table.sum(1) - table.diagonal()))
    first, accuracy = scored.scores
    assert first.value == pytest.approx(expected[0].mean())
    assert first.drop == pytest.approx(expected[1].mean() - expected[0].mean())
    assert accuracy.value == pytest.approx((flat[0] == flat[1]).mean())
    assert [each.label for each in scored.classes] == ["sky", "sea", "land"]
    assert [each.value for each in scored.classes] == pytest.approx(expected[0])
    assert first.drop_ci[0] < first.drop < first.drop_ci[1]
    assert first.drop_ci[0] > 0


def test_two_swapped_classes_are_found_by_class() -> None:
    truths = make_masks(30, 0.0)
    source = make_masks(30, 0.05, truths, 2)
    swapped = [np.array([0, 2, 1], np.uint8)[each] for each in source]
    scored = TASK.score_predictions(
        encode(truths), encode(source), encode(swapped), ("sky", "sea", "land")
    )
    drops = {each.label: each.drop for each in scored.classes}
    assert drops["sky"] == pytest.approx(0, abs=1e-9)
    assert min(drops["sea"], drops["land"]) > 0.7
    assert TASK.compute_parity(encode(source), encode(swapped)).share < 0.5


def test_masks_are_predicted_at_the_source_geometry(tmp_path) -> None:
    samples = write_set(tmp_path, [np.zeros((20, 24), np.uint8)])
    logits = np.zeros((1, 3, 16, 16), np.float32)
    logits[0, 1, :, :8] = 1
    logits[0, 2, :, 8:] = 1
    mask = decode_mask(TASK.decode({"logits": logits}, samples.files, samples, make_card())[0])
    assert mask.shape == (20, 24)
    assert (mask[:, :12] == 1).all()
    assert (mask[:, 12:] == 2).all()


def test_a_crop_and_a_letterbox_are_undone(tmp_path) -> None:
    samples = write_set(tmp_path, [np.zeros((20, 40), np.uint8)], size=(40, 20))
    box = (Resize((32,), fit="long"), CenterCrop(32, 32, fill=114))
    logits = np.zeros((1, 3, 32, 32), np.float32)
    logits[0, 0] = 0.5
    logits[0, 1, 8:16] = 1  # the upper half of the image, which lies in rows 8 to 24 of the input
    mask = decode_mask(
        TASK.decode({"logits": logits}, samples.files, samples, make_card(geometry=box))[0]
    )
    assert (mask[:10] == 1).all()
    assert (mask[10:] == 0).all()


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (np.zeros((24, 20), np.uint8), "the mask is 20×24 pixels, but its image is 24×20"),
        (np.full((20, 24), 7, np.uint8), "class 7, but the model has 3 classes"),
        (np.zeros((20, 24, 3), np.uint8), "its mode is RGB"),
        (np.full((20, 24), IGNORED, np.uint8), "none of the 1 masks has a judged pixel"),
    ],
)
def test_masks_that_do_not_fit_are_refused(tmp_path, mask, message) -> None:
    samples = write_set(tmp_path, [mask])
    with pytest.raises(BadInputError, match=message):
        TASK.read_truths(samples, make_card(), 3)


def test_a_missing_mask_is_named(tmp_path) -> None:
    samples = write_set(tmp_path, make_masks(2, 0))
    (tmp_path / "masks" / "1.png").unlink()
    with pytest.raises(BadInputError, match=r"1.png has no mask"):
        TASK.read_truths(samples, make_card(), 3)


def test_outputs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(BadInputError, match="logits has shape 1×3"):
        TASK.require_model(make_card(outputs=(1, 3)))
    with pytest.raises(
        BadInputError,
        match="the model card has 2 labels, but its segmentation output has 3 classes",
    ):
        TASK.require_model(make_card(labels=("a", "b")))


@pytest.mark.parametrize(("images", "drops"), [(1, (-1.0, 1.0)), (19, (-1.0, 1.0)), (20, None)])
def test_too_few_images_decide_nothing(images: int, drops: tuple[float, float] | None) -> None:
    rng = np.random.default_rng(0)
    truths = [rng.integers(0, 3, (6, 6)).astype(np.uint8) for _ in range(images)]
    masks = encode([np.where(rng.random((6, 6)) < 0.2, 0, each) for each in truths])
    first = TASK.score_predictions(encode(truths), encode(truths), masks).scores[0]
    seen = TASK.observe(encode(truths), encode(truths), masks, 0.95, "images")
    assert (seen["drop"].low, seen["drop"].high) == first.drop_ci
    assert 0 < first.drop < 1
    if drops is None:
        assert -1 < first.drop_ci[0] < first.drop < first.drop_ci[1] < 1
        assert 0 < seen["agreement"].low < seen["agreement"].high
    else:
        assert first.drop_ci == drops
        assert first.ci == (seen["agreement"].low, seen["agreement"].high) == (0.0, 1.0)


TRANSFORM = Transform((Decode(), Resize((8, 8), fit="exact"), Rescale(), Pack()))


@pytest.mark.parametrize(
    ("task", "shape"), [(Task.DETECTION, ("n", 6, 20)), (Task.SEGMENTATION, ("n", 2, 8, 8))]
)
def test_a_set_with_nothing_to_judge_is_told_from_truths_that_do_not_fit(
    tmp_path, task, shape
) -> None:
    for name in ("images", "masks", "labels"):
        (tmp_path / name).mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "images" / "1.png")
    Image.fromarray(np.full((8, 8), 255, np.uint8)).save(tmp_path / "masks" / "1.png")
    (tmp_path / "labels" / "1.txt").write_text("")
    samples = image_set_from_path(tmp_path)[0]
    card = ModelCard(
        "m",
        "s",
        task,
        (),
        (TensorSpec("y", "float32", shape),),
        labels=("a", "b"),
        transform=TRANSFORM,
    )
    with pytest.raises(
        NothingJudgedError,
        match=r"none of the 1 (images has an annotated box|masks has a judged pixel)",
    ):
        TASKS[task].read_truths(samples, card, 2)
    Image.fromarray(np.full((8, 8), 5, np.uint8)).save(tmp_path / "masks" / "1.png")
    (tmp_path / "labels" / "1.txt").write_text("5 0.5 0.5 0.5 0.5")
    with pytest.raises(BadInputError, match="class 5, but the model has 2 classes") as refused:
        TASKS[task].read_truths(samples, card, 2)
    assert not isinstance(refused.value, NothingJudgedError)


@pytest.mark.parametrize("absent", ["tower", "N/A", "__background__", ""])
@pytest.mark.slow
def test_a_named_class_that_does_not_occur_widens_a_mean_over_classes(absent) -> None:
    truths = make_masks(300, 0.0)
    masks = [encode(truths), encode(make_masks(300, 0.02, truths, 2))]
    labels = ["sky", "sea", "land", absent]
    known, wide = (
        TASK.score_predictions(masks[0], masks[0], masks[1], of) for of in (labels[:3], labels)
    )
    seen = TASK.observe(masks[0], masks[0], masks[1], 0.95, "here", labels)
    assert ("tower" in seen["drop"].about) == (absent == "tower")
    assert ("tower" in TASK.describe_absent(masks[0], masks[0], labels)) == (absent == "tower")
    assert "tower" not in seen["pixel-accuracy"].about
    assert known.scores[1] == wide.scores[1]
    if absent != "tower":
        assert known == wide
        return
    (low, high), value = wide.scores[0].drop_ci, wide.scores[0].drop
    assert high - value > 3 / 4, "three classes like the absent one may be lost"
    assert (low, high) == (seen["drop"].low, seen["drop"].high)
    assert known.scores[0].drop_ci[1] < 0.1
