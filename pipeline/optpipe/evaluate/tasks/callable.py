"""A metric of a Python program: a callable that scores one sample, from its outputs and its truth.

The run stores each sample's score, so that means, drops, and intervals can be recomputed; the scores themselves cannot, since
only a hash of the callable's source is kept.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from math import isfinite
from typing import Any

import numpy as np

from optpipe.core.card import ModelCard
from optpipe.core.errors import BadInputError
from optpipe.core.files import hash_arrays, hash_callable, hash_text
from optpipe.core.metrics.sampled import EvaluatedSample, SampleScore
from optpipe.evaluate.tasks.contract import Values
from optpipe.evaluate.tasks.user_file import PREFIX, StoredScores
from optpipe.models.inputs.rows import Arrays
from optpipe.models.inputs.sample_set import SampleSet, SetFile
from optpipe.models.sources.python_file import describe_user_error

LONGEST_TRUTH = 200
"""Longer truths and predictions, as JSON, are stored as their hash."""


class CallableTask(StoredScores):
    """Scores by `function(outputs, truth)`, whose range becomes 0 to 1, larger being better.

    `pack` makes the outputs of one sample, by name, into what the callable takes. `truths` are those of the samples in order; None
    takes each sample's label.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        score_range: tuple[float, float],
        pack: Callable[[Mapping[str, Any]], Any],
        truths: Sequence[Any] | None,
        *,
        larger_is_better: bool = True,
    ) -> None:
        self._name, self._function, self._range = name, function, score_range
        self._pack, self._given, self._larger = pack, truths, larger_is_better
        self._truths: dict[str, Any] = {}

    @property
    def name(self) -> str:
        return f"{PREFIX}{self._name}"

    def describe_scoring(self, card: ModelCard) -> str:
        low, high = (f"{bound:g}" for bound in self._range)
        sense = "" if self._larger else ", smaller is better"
        return (
            f"{self._name} by a callable (source sha256 {hash_callable(self._function)[:12]}) from {low} to {high}{sense}, as a share of "
            "that range; mean over samples. Scored by a callable: not recomputable, but means, drops, and intervals are"
        )

    def read_truths(
        self, samples: SampleSet, card: ModelCard, classes: int | None
    ) -> Values | None:
        truths = self._given
        if truths is None:
            truths = [file.label for file in samples.files]
            if any(truth is None for truth in truths):
                raise BadInputError(
                    f"{samples.name} has no truths for {self._name}\ngive them with the inputs: Data((inputs, labels))"
                )
        if len(truths) != len(samples.files):
            raise BadInputError(f"{len(truths)} truths are given for {len(samples.files)} samples")
        self._truths = dict(zip((file.path for file in samples.files), truths, strict=True))
        return [_to_json(truth) for truth in truths]

    def show_sample(self, prediction: Any, truth: Any, file: SetFile) -> tuple[Any, Any]:
        return None, deepcopy(self._truths[file.path])

    def decode(
        self, outputs: Arrays, files: Sequence[SetFile], samples: SampleSet, card: ModelCard
    ) -> Values:
        predictions = []
        for place, file in enumerate(files):
            own = {name: np.copy(value[place]) for name, value in outputs.items()}  # may be changed
            truth = deepcopy(self._truths[file.path])
            score = self._score(self._pack(own), truth, file.path)
            # agreement is of scores
            predictions.append({"prediction": f"{score:.3g}", "score": score})
        return predictions

    def _score(self, outputs: Any, truth: Any, sample: str) -> float:
        """The score as a share of the range. Raises BadInputError if the callable raises, or gives no number in the range."""
        low, high = self._range
        try:
            given = self._function(outputs, truth)
        except (Exception, SystemExit) as error:
            raise BadInputError(
                f"metric '{self._name}' fails on sample {sample}: {describe_user_error(error)}"
            ) from error
        try:
            share = read_share(given, low, high)
        except ValueError as error:
            raise BadInputError(
                f"metric '{self._name}' {error} for sample {sample}\nreturn one number for each sample, inside range="
            ) from error
        return share if self._larger else 1.0 - share


class MetricScore(SampleScore):
    """A callable as one more score of a task, whose value is its share of the range."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        score_range: tuple[float, float],
        pack: Callable[[Mapping[str, Any]], Any],
        *,
        larger_is_better: bool = True,
    ) -> None:
        self.name = self.title = name
        self._function, self._range, self._pack = function, score_range, pack
        self.lower_is_better = not larger_is_better

    def measure(self, sample: EvaluatedSample) -> float:
        return read_share(self._function(self._pack(sample.outputs), sample.truth), *self._range)

    def describe_source(self) -> str:
        low, high = self._range
        source = hash_callable(self._function)[:12]
        return f"a callable of a Python program, source sha256 {source}, as a share of {low:g} to {high:g}"


def read_share(value: Any, low: float, high: float) -> float:
    """Converts what a callable returned to its share of the range from `low` to `high`.

    Raises ValueError for anything else; the caller puts the callable's name in front of the message.
    """
    if hasattr(value, "item") and getattr(value, "size", 1) is not None:
        try:
            value = value.item()
        except (ValueError, RuntimeError) as error:
            raise ValueError("gives an array") from error
    if isinstance(value, bool | np.bool_):
        value = float(value)
    if not isinstance(value, int | float) or not isfinite(value) or not low <= value <= high:
        raise ValueError(f"gives {value!r}, not a number from {low:g} to {high:g}")
    return (float(value) - low) / (high - low)


def _to_json(value: Any) -> str:
    if isinstance(value, np.ndarray):
        if value.size > LONGEST_TRUTH:
            return f"sha256 {hash_arrays({'': value})[:16]}"
        value = value.tolist()
    elif isinstance(value, np.generic):
        value = value.item()
    text = json.dumps(value, default=repr)
    return text if len(text) <= LONGEST_TRUTH else f"sha256 {hash_text(text)[:16]}"
