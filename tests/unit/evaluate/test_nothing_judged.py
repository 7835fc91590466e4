import numpy as np
import pytest
from PIL import Image

from optpipe.core.card import ModelCard, Task, TensorSpec
from optpipe.core.errors import BadInputError
from optpipe.core.transform import Decode, Pack, Rescale, Resize, Transform
from optpipe.evaluate.tasks.registry import TASKS
from optpipe.models.inputs.annotations import NothingJudgedError
from optpipe.models.inputs.image_set import image_set_from_path

TRANSFORM = Transform((Decode(), Resize((8, 8), fit="exact"), Rescale(), Pack()))


@pytest.mark.parametrize(("task", "shape"), [(Task.DETECTION, ("n", 6, 20)), (Task.SEGMENTATION, ("n", 2, 8, 8))])
def test_a_set_with_nothing_to_judge_is_told_from_truths_that_do_not_fit(tmp_path, task, shape) -> None:
    for name in ("images", "masks", "labels"):
        (tmp_path / name).mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "images" / "1.png")
    Image.fromarray(np.full((8, 8), 255, np.uint8)).save(tmp_path / "masks" / "1.png")
    (tmp_path / "labels" / "1.txt").write_text("")
    samples = image_set_from_path(tmp_path)[0]
    card = ModelCard("m", "s", task, (), (TensorSpec("y", "float32", shape),), labels=("a", "b"), transform=TRANSFORM)
    with pytest.raises(
        NothingJudgedError, match=r"none of the 1 (images has an annotated box|masks has a judged pixel)"
    ):
        TASKS[task].read_truths(samples, card, 2)
    Image.fromarray(np.full((8, 8), 5, np.uint8)).save(tmp_path / "masks" / "1.png")
    (tmp_path / "labels" / "1.txt").write_text("5 0.5 0.5 0.5 0.5")
    with pytest.raises(BadInputError, match="class 5, but the model has 2 classes") as refused:
        TASKS[task].read_truths(samples, card, 2)
    assert not isinstance(refused.value, NothingJudgedError)
