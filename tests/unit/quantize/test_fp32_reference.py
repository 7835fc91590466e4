import numpy as np
import pytest
from PIL import Image

from optpipe.core.card import ModelCard, Task, TensorSpec
from optpipe.core.errors import BadInputError
from optpipe.core.transform import Decode, Pack, Rescale, Resize, Transform
from optpipe.evaluate.tasks.registry import TASKS
from optpipe.models.inputs.image_set import image_set_from_path
from optpipe.quantize.fp32_reference import _read_truths

TRANSFORM = Transform((Decode(), Resize((8, 8), fit="exact"), Rescale(), Pack()))


@pytest.mark.parametrize(("task", "shape"), [(Task.DETECTION, ("n", 6, 20)), (Task.SEGMENTATION, ("n", 2, 8, 8))])
def test_a_draw_with_nothing_to_judge_goes_by_agreement(tmp_path, task, shape) -> None:
    """As of a set in which few images have boxes; what does not fit is still refused."""
    for name in ("images", "masks", "labels"):
        (tmp_path / name).mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "images" / "1.png")
    Image.fromarray(np.full((8, 8), 255, np.uint8)).save(tmp_path / "masks" / "1.png")
    (tmp_path / "labels" / "1.txt").write_text("")
    samples = image_set_from_path(tmp_path)[0]
    card = ModelCard("m", "s", task, (), (TensorSpec("y", "float32", shape),), labels=("a", "b"), transform=TRANSFORM)
    with pytest.raises(BadInputError, match=r"none of the 1 (images has an annotated box|masks has a judged pixel)"):
        TASKS[task].read_truths(samples, card, 2)
    assert _read_truths(TASKS[task], samples, card, 2) is None
    Image.fromarray(np.full((8, 8), 5, np.uint8)).save(tmp_path / "masks" / "1.png")
    (tmp_path / "labels" / "1.txt").write_text("5 0.5 0.5 0.5 0.5")
    with pytest.raises(BadInputError, match="class 5, but the model has 2 classes"):
        _read_truths(TASKS[task], samples, card, 2)
