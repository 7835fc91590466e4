"""A user's task: the `TASK` of a Python file, or a plug-in of the group `optpipe.tasks`; an object with

    name = "word-accuracy"                           # the name of its score
    def read_truths(self, paths): ...                # a truth for each sample's path (texts: line number), or None
    def decode(self, outputs, path): ...             # one sample's outputs by name to a prediction that JSON can hold
    def score(self, prediction, truth): ...          # from 0 to 1, larger is better

Its score on a set is the mean over samples. Predictions agree with the source model's if they are equal; numbers with a fraction
may differ by 1% of the spread of the source model's. The run stores each sample's prediction and score, so `verify` computes means,
drops, and intervals without the user's code.
"""

import inspect
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from optpipe.core.card import ModelCard, Task
from optpipe.core.errors import BadInputError, MissingError, require_existing
from optpipe.core.files import hash_file
from optpipe.core.plugins import FAILURES, list_entry_points, load_plugins
from optpipe.core.records import require_flat
from optpipe.core.wording import Argument
from optpipe.evaluate.tasks.closeness import compare_predictions
from optpipe.evaluate.tasks.contract import TaskContract, Values
from optpipe.models.inputs.image_set import ImageSet
from optpipe.models.inputs.rows import Arrays
from optpipe.models.inputs.sample_set import SampleSet, SetFile
from optpipe.models.sources.python_file import UserCode, describe_user_error

PREFIX = "user:"
_METHODS = ("read_truths", "decode", "score")
Running = Callable[[], AbstractContextManager[None]]


def find_user_task(text: str) -> "UserTask":
    """The task that `--task` names: a plug-in of the group `optpipe.tasks`, or a Python file with a `TASK`."""
    if text not in (entry.name for entry in list_entry_points("optpipe.tasks")):
        return UserTask.from_file(Path(text))
    loaded = load_plugins("optpipe.tasks", list(Task), UserTask.from_plugin)
    if text in loaded:
        return loaded[text]
    raise MissingError(next(str(failure) for failure in FAILURES if failure.name == text))


class StoredScores(TaskContract):
    """A stored user's task: a prediction is its JSON text and its score (null without truths)."""

    scores: ClassVar[tuple[str, ...]] = ("score",)
    names_classes: ClassVar[bool] = False

    def take_as_truths(self, predictions: Values) -> Values:
        return [prediction["prediction"] for prediction in predictions]

    def gather(self, truths: Values, predictions: Values) -> NDArray[np.float64]:
        return np.array([[prediction["score"]] for prediction in predictions], np.float64)

    def compute_sample_parity(self, source: Values, build: Values) -> NDArray[np.float64]:
        """Whether both predictions are the same; numbers with a fraction within the tolerance of `closeness`."""
        predictions = (
            [*map(_read_prediction, self.take_as_truths(values))] for values in (source, build)
        )
        return compare_predictions(*predictions)


def _read_prediction(text: str) -> Any:
    """Raises BadInputError for one that is nested deeper than the documents of a dossier."""
    require_flat(text.encode(), "a prediction")
    return json.loads(text)


class UserTask(StoredScores):
    """A user's object that decodes and scores; `path` is the file that defines it."""

    def __init__(self, task: Any, path: Path, running: Running) -> None:
        """Calls of the object run within `running()`. Raises BadInputError if it lacks a name or a method."""
        self.path, self._task, self._running = path, task, running
        self._truths = dict[str, Any]()
        absent = [name for name in _METHODS if not callable(getattr(task, name, None))]
        if absent or not isinstance(getattr(task, "name", None), str):
            lack = f"has no {absent[0]}()" if absent else "has no name"
            problem = "defines no TASK" if task is None else f"its TASK {lack}"
            needed = ", ".join(f"{name}()" for name in _METHODS)
            raise BadInputError(f"{path}: {problem}; a task has a name, {needed}")

    @classmethod
    def from_file(cls, path: Path) -> "UserTask":
        """The `TASK` of a Python file. Raises BadInputError if there is none."""
        if str(path) in list(Task):
            raise BadInputError(
                Argument("task") + " takes a Python file with your own task, or a plug-in",
                argument=Argument("task", path),
                remedy=f'a model card sets a task of optpipe: task = "{path}"',
            )
        require_existing(path, "task")
        if path.suffix != ".py" or not path.is_file():
            raise BadInputError(
                Argument("task", path)
                + " is not a Python file (.py); a model card sets one of optpipe's: "
                + ", ".join(Task)
            )
        code = UserCode(path)
        with code.running():
            task = getattr(code.import_definitions(), "TASK", None)
        return cls(task, path, code.running)

    @classmethod
    def from_plugin(cls, name: str, plugin: Any) -> "UserTask":
        """The object, or an instance of the class, that a distribution registers as `name`."""
        task = plugin() if isinstance(plugin, type) else plugin
        source = inspect.getsourcefile(type(task))
        return cls(task, Path(source or name), nullcontext)

    @property
    def name(self) -> str:
        return f"{PREFIX}{self._task.name}"

    def describe_scoring(self, card: ModelCard) -> str:
        return f"{self._task.name} of {self.path.name} (sha256 {hash_file(self.path)[:12]}), mean over samples"

    def read_truths(
        self, samples: SampleSet, card: ModelCard, classes: int | None
    ) -> Values | None:
        paths = (
            samples.paths
            if isinstance(samples, ImageSet)
            else [file.path for file in samples.files]
        )
        returned = self._call("read_truths", list(paths))
        if returned is None:
            return None
        truths = list(returned)
        if len(truths) != len(paths):
            raise BadInputError(
                f"{self.path}: read_truths gives {len(truths)} truths for {len(paths)} samples"
            )
        self._truths = dict(zip((file.path for file in samples.files), truths, strict=True))
        return [self._to_json(truth) for truth in truths]

    def show_sample(self, prediction: Any, truth: Any, file: SetFile) -> tuple[Any, Any]:
        return json.loads(prediction["prediction"]), deepcopy(self._truths[file.path])

    def decode(
        self, outputs: Arrays, files: Sequence[SetFile], samples: SampleSet, card: ModelCard
    ) -> Values:
        predictions = []
        for place, file in enumerate(files):
            own = {name: np.copy(value[place]) for name, value in outputs.items()}  # may be changed
            where = samples.root / file.path if isinstance(samples, ImageSet) else file.path
            prediction = self._call("decode", own, where)
            predictions.append(
                {
                    "prediction": self._to_json(prediction),
                    "score": self._score(prediction, file.path),
                }
            )
        return predictions

    def _score(self, prediction: Any, path: str) -> float | None:
        if path not in self._truths:
            return None
        value = self._call("score", prediction, deepcopy(self._truths[path]))
        if not isinstance(value, int | float | np.number) or not 0 <= value <= 1:
            raise BadInputError(
                f"{self.path}: score gives {value!r} for {path}; it must be a number from 0 to 1"
            )
        return float(value)

    def _call(self, name: str, *arguments: Any) -> Any:
        with self._running():
            try:
                return getattr(self._task, name)(*arguments)
            except (Exception, SystemExit) as error:
                raise BadInputError(
                    f"{self.path}: {name} raised {describe_user_error(error)}"
                ) from error

    def _to_json(self, value: Any) -> str:
        try:
            text = json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise BadInputError(
                f"{self.path}: JSON cannot hold a {type(value).__name__} ({error})"
            ) from error
        require_flat(text.encode(), f"{self.path}: a prediction")
        return text
