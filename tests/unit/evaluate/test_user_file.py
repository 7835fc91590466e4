from pathlib import Path

import numpy as np
import pytest

from optpipe.core.card import ModelCard, Task, TensorSpec
from optpipe.core.errors import BadInputError
from optpipe.evaluate.tasks.user_file import StoredScores, UserTask
from optpipe.models.inputs.image_set import ImageSet
from optpipe.models.inputs.sample_set import SetFile

BRIGHTNESS = """
class Brightness:
    name = "brightness"

    def read_truths(self, paths):
        return [float(path.stem) / 10 for path in paths]

    def decode(self, outputs, path):
        return round(float(outputs["mean"].mean()), 3)

    def score(self, prediction, truth):
        return max(0.0, 1 - abs(prediction - truth))

TASK = Brightness()
"""
CARD = ModelCard("m", "s", Task.OTHER, (), (TensorSpec("mean", "float32", (1, 2)),))
SAMPLES = ImageSet("s", Path("root"), 0, tuple(SetFile(f"{index}.png", "0") for index in range(8)))


def make_task(tmp_path, text: str = BRIGHTNESS) -> UserTask:
    (tmp_path / "task.py").write_text(text)
    return UserTask(tmp_path / "task.py")


def decode(task: UserTask, shift: float):
    truths = task.read_truths(SAMPLES, CARD, None)
    values = np.arange(8)[:, None] / 10 + np.full((8, 2), shift)
    return truths, task.decode({"mean": values}, SAMPLES.files, SAMPLES, CARD)


def test_the_mean_of_the_users_scores_is_the_score_and_needs_no_code_again(tmp_path) -> None:
    task = make_task(tmp_path)
    truths, source = decode(task, 0.0)
    _, found = decode(task, 0.2)
    assert truths is not None
    scored = StoredScores().score_predictions(truths, source, found)
    assert scored.scores[0].value == pytest.approx(0.8)
    assert scored.scores[0].drop == pytest.approx(0.2)
    parity = StoredScores().compute_parity(source, source)
    assert parity is not None
    assert parity.share == 1
    assert task.name == "user:brightness"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("TASK = Brightness()", ""), "defines no TASK"),
        (("def score", "def rate"), r"its TASK has no score\(\)"),
        (('name = "brightness"', "name = 3"), "its TASK has no name"),
        (("1 - abs(prediction - truth)", "3.0"), "score gives 3.0 for 0.png; it must be a number from 0 to 1"),
        (("round(float(", "undefined(float("), "decode raised NameError"),
        (("return [float", "return [1] + [float"), "read_truths gives 9 truths for 8 samples"),
        (('outputs["mean"].mean()), 3)', 'outputs["mean"].mean()), 3) * 1j'), "JSON cannot hold a complex"),
    ],
)
def test_what_is_wrong_in_the_file_is_one_line(tmp_path, change, message) -> None:
    assert change[0] in BRIGHTNESS
    with pytest.raises(BadInputError, match=message):
        decode(make_task(tmp_path, BRIGHTNESS.replace(*change)), 0.0)
