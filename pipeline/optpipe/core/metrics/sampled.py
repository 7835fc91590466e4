"""Scores of other distributions and of Python programs: what one sample adds, and how a set's score follows from it.

The run stores each sample's part, and one of two rules makes the score of them. So a verifier computes scores, drops, and
intervals again without the code that scored.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

from optpipe.core.card import Task
from optpipe.core.errors import BadInputError
from optpipe.core.files import hash_callable
from optpipe.core.metrics.registry import METRICS, name_distribution
from optpipe.core.metrics.scores import SCORE_NAMES
from optpipe.core.metrics.sections import SECTIONS
from optpipe.core.plugins import load_plugins

if TYPE_CHECKING:
    import numpy as np

TAKEN = frozenset({"agreement", "score", "drop", "top1", "top5"})
"""Figures of an evaluation that are no score of `SCORE_NAMES`."""
LARGEST = 2**31
"""The largest value, weight, or group of a part."""
_NAME = re.compile(r"[a-z][a-z0-9_-]*")


class Rule(StrEnum):
    """How the score of a set follows from its samples' parts. No score is above 1."""

    RATIO = "ratio"
    """Sum of the values over the sum of the weights."""
    CLASS_MEAN = "class mean"
    """The mean over groups of that ratio. A sample's group may depend on its truth alone."""


class Part(NamedTuple):
    """The contribution of one sample to a score."""

    value: float
    """At least 0; above `weight` only for an error, such as inserted words."""
    weight: int = 1
    """How many things of the sample are scored: words, pixels."""
    group: int = 0
    """The number of the sample's class, at least 0."""


@dataclass(frozen=True, slots=True)
class EvaluatedSample:
    """One sample with its truth, as one model answers it."""

    outputs: Mapping[str, "np.ndarray"]
    """The model's outputs by name, without the axis of samples."""
    prediction: Any
    """The prediction that the task decoded (section 8.1 of the dossier format); None if a callable scores."""
    truth: Any
    """As section 8.1 says; of a user's task and a callable, the truth itself."""


class SampleScore:
    """A score of an existing task: what one sample adds, and the rule that joins the samples.

    Every evaluation of a task that has it computes it for the source model and for each build, with its drop and intervals on
    the same samples. A plug-in of the group `optpipe.scores` is a subclass; `evaluate(scores=[...])` takes an instance.
    """

    name: str
    """In records and in a policy, `[scores.NAME]`: of small letters, digits, - and _."""
    title: str = ""
    """In a sentence: `balanced accuracy`; the name if it is empty."""
    lower_is_better: bool = False
    """True for an error, whose drop is a rise."""
    rule: Rule = Rule.RATIO
    tasks: tuple[str, ...] = ()
    """The tasks that it scores, such as `("classification", "text-classification")`; a user's task is `user:NAME`. All if it is empty."""

    def measure(self, sample: EvaluatedSample) -> Part | float:
        """The part of one sample, or its value alone, for one thing that is scored."""
        raise NotImplementedError

    def describe_source(self) -> str:
        """The code that scores, as the record names it: the distribution with its version, or the hash of a program's class."""
        if PLUGIN_SCORES.get(self.name) is self:
            return name_distribution("optpipe.scores", self.name)
        return f"{type(self).__qualname__} of a Python program, source sha256 {hash_callable(type(self).measure)[:12]}"

    def fits(self, task: str) -> bool:
        return not self.tasks or task in self.tasks


def compute_part(score: SampleScore, sample: EvaluatedSample) -> Part:
    """Raises ValueError if `score` gives no part that its rule can join; exceptions of its code are not caught."""
    given = score.measure(sample)
    value, weight, group = given if isinstance(given, tuple) else Part(given)
    if hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, bool | int | float):
        raise ValueError(f"gives a {type(given).__name__}, not a number or a Part")
    weight, group = (_require_count(count) for count in (weight, group))
    value = float(value)
    most = LARGEST if score.lower_is_better else weight
    if not isfinite(value) or not 0 <= value <= most:
        shown = f"{most:,}" if score.lower_is_better else f"its weight, {most:,}"
        raise ValueError(f"gives {value:g}, not a number from 0 to {shown}")
    return Part(value, weight, group)


def is_part(value: float, weight: float, group: float, *, is_error: bool) -> bool:
    """Whether a record may have the part."""
    whole = weight == int(weight) and group == int(group)
    inside = 0 <= value <= (LARGEST if is_error else weight)
    return whole and inside and 0 <= weight <= LARGEST and 0 <= group <= LARGEST


def _require_count(value: Any) -> int:
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST:
        raise ValueError(f"gives the weight or group {value!r}, not an integer of at least 0")
    return value


def is_score_name(name: str) -> bool:
    """Whether no other figure of an evaluation is called so."""
    return _NAME.fullmatch(name) is not None and name not in {*TAKEN, *SCORE_NAMES}


def read_score_plugin(name: str, plugin: Any) -> SampleScore:
    """Raises BadInputError for an object that is no score, or that no rule can join."""
    score = plugin() if isinstance(plugin, type) else plugin
    if not isinstance(score, SampleScore):
        raise BadInputError("is not an optpipe.core.metrics.sampled.SampleScore")
    if getattr(score, "name", None) != name:
        raise BadInputError(
            f"is registered as '{name}', and its name is {getattr(score, 'name', None)!r}: both must be the same"
        )
    return require_score(score)


def require_score(score: SampleScore) -> SampleScore:
    """The score with a title. Raises BadInputError if its name, rule, or tasks are none."""
    name = getattr(score, "name", None)
    if not isinstance(name, str) or not is_score_name(name):
        raise BadInputError(
            f"the name of a score is {name!r}: expected lowercase letters, digits, - and _, and no name that optpipe uses"
        )
    if type(score).measure is SampleScore.measure:
        raise BadInputError(f"{name} has no measure(sample)")
    if score.rule not in list(Rule):
        raise BadInputError(f"{name} has the rule {score.rule!r}; rules are {', '.join(Rule)}")
    given: Any = score.tasks
    tasks = given if isinstance(given, tuple | list) else [None]
    if not all(task in list(Task) or str(task).startswith("user:") for task in tasks):
        raise BadInputError(f"{name} has the tasks {score.tasks!r}; tasks are {', '.join(Task)}")
    if not score.title:
        score.title = name
    return score


PLUGIN_SCORES: dict[str, SampleScore] = load_plugins(
    "optpipe.scores", (*METRICS, *SECTIONS, *SCORE_NAMES, *TAKEN), read_score_plugin
)
"""The scores of other distributions, by name."""
