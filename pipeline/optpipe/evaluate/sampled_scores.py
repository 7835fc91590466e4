"""Scores of plug-ins and of Python programs in an evaluation: each sample's parts while a model runs, and the figures that follow.

The parts are columns of the predictions, `NAME:part.SCORE`, so that `recompute` needs no plug-in. A score that fails on a sample is
withheld for that model with its reason; everything else is scored without it.
"""

from collections.abc import Callable, Mapping, Sequence
from math import isfinite, nan
from typing import Any

from numpy.typing import NDArray

from optpipe.core import pl
from optpipe.core.errors import BadInputError
from optpipe.core.metrics.sampled import (
    PLUGIN_SCORES,
    EvaluatedSample,
    Part,
    SampleScore,
    compute_part,
    is_part,
    is_score_name,
)
from optpipe.core.verdict import Blocker, Observation
from optpipe.evaluate.result import SampledFigure, ScoreRule
from optpipe.evaluate.tasks.contract import TaskContract, Values
from optpipe.evaluate.tasks.sampled import SampledScore, find_mismatch, make_sampled_score
from optpipe.models.inputs.sample_set import SetFile
from optpipe.models.sources.python_file import describe_user_error
from optpipe.stats.paired import Groups

Parts = Sequence[tuple[float, float, float]]
"""Value, weight, and group of each sample."""


def choose_scores(given: Sequence[SampleScore], task: str) -> list[SampleScore]:
    """The scores `given`, and those of plug-ins that `task` has. Raises BadInputError for a name that two of them have."""
    chosen = {score.name: score for score in PLUGIN_SCORES.values() if score.fits(task)}
    own = set[str]()
    for score in given:
        if score.name in own:
            raise BadInputError(f"two scores are called {score.name}; give each its own name")
        if not score.fits(task):
            raise BadInputError(
                f"{score.name} scores {', '.join(score.tasks)}, and the task is {task}\nleave it out, or extend its tasks"
            )
        own.add(score.name)
        chosen[score.name] = score
    return [chosen[name] for name in sorted(chosen)]


def state_rules(scores: Sequence[SampleScore]) -> dict[str, ScoreRule]:
    return {
        score.name: ScoreRule(
            score.title, score.rule, score.lower_is_better, score.describe_source()
        )
        for score in scores
    }


class PartRecorder:
    """Collects what each sample of one model adds to the scores."""

    def __init__(
        self,
        scores: Sequence[SampleScore],
        task: TaskContract,
        read_truths: Callable[[int], Values | None],
    ) -> None:
        """`read_truths` gets the number of classes, which may be known only from the first outputs."""
        self._scores, self._task, self._read_truths = scores, task, read_truths
        self.parts: dict[str, list[Part]] = {score.name: [] for score in scores}
        self.withheld: dict[str, str] = {}

    def add_batch(
        self,
        rows: Mapping[str, NDArray[Any]],
        predictions: Values,
        files: Sequence[SetFile],
        start: int,
        classes: int,
    ) -> None:
        """`rows` are the outputs of the samples `files`, the first of which is number `start` of the set."""
        truths = self._read_truths(classes) if self.parts else None
        if truths is None:
            self.parts.clear()
            return
        for place, (prediction, file) in enumerate(zip(predictions, files, strict=True)):
            outputs = {name: _select_row(value, place, len(files)) for name, value in rows.items()}
            shown = self._task.show_sample(prediction, truths[start + place], file)
            for score in [score for score in self._scores if score.name in self.parts]:
                self._add(score, EvaluatedSample(outputs, *shown), file.path)

    def _add(self, score: SampleScore, sample: EvaluatedSample, place: str) -> None:
        try:
            self.parts[score.name].append(compute_part(score, sample))
        except ValueError as error:
            self._withhold(score, f"{score.name} {error} for sample {place}")
        except (Exception, SystemExit) as error:  # noqa: BLE001, a stranger's code may raise anything
            self._withhold(
                score, f"{score.name} fails on sample {place}: {describe_user_error(error)}"
            )

    def _withhold(self, score: SampleScore, reason: str) -> None:
        del self.parts[score.name]
        self.withheld[score.name] = reason.partition("\n")[0]


def _select_row(value: NDArray[Any], place: int, count: int) -> NDArray[Any]:
    """A sample's own copy; all of an output whose first axis counts something else, such as the boxes of one image."""
    row: NDArray[Any] = value[place].copy() if len(value) == count else value.copy()
    return row


def score_parts(
    rules: Mapping[str, ScoreRule],
    source: Mapping[str, Parts],
    build: Mapping[str, Parts],
    withheld: Mapping[str, str],
    groups: Groups | None,
) -> dict[str, SampledFigure]:
    """Each score of a model whose parts are `build`; withheld with a reason where a score has none."""
    prepared = _prepare_scores(rules, source, build, withheld, groups)
    return {name: _score(name, task, source, build) for name, task in prepared.items()}


def _prepare_scores(
    rules: Mapping[str, ScoreRule],
    source: Mapping[str, Parts],
    build: Mapping[str, Parts],
    withheld: Mapping[str, str],
    groups: Groups | None,
) -> dict[str, SampledScore | str]:
    """The object that computes each score, or the reason why the score is withheld."""
    prepared: dict[str, SampledScore | str] = {}
    for name, stated in rules.items():
        if name in withheld:
            prepared[name] = withheld[name]
        elif name not in source:
            prepared[name] = "the source model has no score to compare with"
        elif name not in build:
            prepared[name] = "it has no parts"
        elif (mismatch := find_mismatch(stated, source[name], build[name])) is not None:
            prepared[name] = mismatch
        else:
            task = make_sampled_score(name, stated, source[name], build[name])
            prepared[name] = task.grouped_by(groups)
    return prepared


def _withhold(reason: str) -> SampledFigure:
    return SampledFigure(None, None, None, None, reason)


def _score(
    name: str,
    task: SampledScore | str,
    source: Mapping[str, Parts],
    build: Mapping[str, Parts],
) -> SampledFigure:
    if isinstance(task, str):
        return _withhold(task)
    try:
        (score,) = task.score_predictions(build[name], source[name], build[name]).scores
    except BadInputError as error:
        return _withhold(error.message)
    return SampledFigure(score.value, score.ci, score.drop, score.drop_ci)


def observe_parts(
    rules: Mapping[str, ScoreRule],
    source: Mapping[str, Parts],
    build: Mapping[str, Parts],
    withheld: Mapping[str, str],
    groups: Groups | None,
    confidence: float,
    about: str,
) -> dict[str, Observation]:
    """Every score for a policy: by name, and as `drop of NAME`. A withheld one has no value, and its reason as a blocker."""
    figures = dict[str, Observation]()
    for name, task in _prepare_scores(rules, source, build, withheld, groups).items():
        named = (name, f"drop of {name}")
        why_not = _score(name, task, source, build).why_not
        if isinstance(task, str) or why_not is not None:
            blocker = Blocker(str(why_not), "fix the score's code and evaluate again")
            blank = Observation(nan, blockers=(blocker,), about=about)
            figures |= dict.fromkeys(named, blank)
        else:
            seen = task.observe(build[name], source[name], build[name], confidence, about)
            figures |= {key: seen[key] for key in named}
    return figures


def find_sampled_score(rules: Mapping[str, ScoreRule], name: str) -> SampledScore | None:
    return SampledScore(name, rules[name]) if name in rules else None


def columns_from_parts(model: str, parts: Mapping[str, Parts]) -> "dict[str, pl.Series]":
    """`NAME:part.SCORE` for each score."""
    return {
        f"{model}:part.{name}": pl.Series(
            [[float(number) for number in part] for part in samples], dtype=pl.List(pl.Float64)
        )
        for name, samples in parts.items()
    }


def parts_from_frame(
    frame: "pl.DataFrame", model: str, rules: Mapping[str, ScoreRule]
) -> dict[str, Parts]:
    """The parts of one model by score. Raises BadInputError for parts that no evaluation writes."""
    by_score = dict[str, Parts]()
    for name, stated in rules.items():
        column = f"{model}:part.{name}"
        if column not in frame.columns:
            continue
        if not is_score_name(name):
            raise BadInputError(f"{column}: a score of a plug-in cannot be called {name}")
        parts = frame[column].to_list()
        if not all(_is_sound(part, stated) for part in parts):
            raise BadInputError(
                f"{column}: not a value, a weight, and a group that {stated.rule} has"
            )
        by_score[name] = [(value, weight, group) for value, weight, group in parts]
    return by_score


def _is_sound(part: list[float] | None, stated: ScoreRule) -> bool:
    if part is None or len(part) != 3 or None in part:
        return False
    value, weight, group = part
    return all(map(isfinite, part)) and is_part(
        value, weight, group, is_error=stated.lower_is_better
    )
