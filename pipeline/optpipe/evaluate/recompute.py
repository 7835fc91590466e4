"""Recomputes scores, drop, and agreement of an evaluation run from its stored predictions."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import polars as pl

from optpipe.core.card import Task
from optpipe.core.errors import BadInputError, escape
from optpipe.core.metrics.scores import Score
from optpipe.core.parquet import MAX_CLASS, read_parquet
from optpipe.core.records import Recomputed, record_from_files
from optpipe.core.tables import require_columns
from optpipe.core.verdict import RANDOM_WEIGHTS, Blocker, Observation
from optpipe.core.wording import Call
from optpipe.evaluate.result import EvaluatedModel, Evaluation, SampledFigure
from optpipe.evaluate.sampled_scores import (
    Parts,
    find_sampled_score,
    observe_parts,
    parts_from_frame,
    score_parts,
)
from optpipe.evaluate.tasks import TASKS
from optpipe.evaluate.tasks.bounds import measure_answers, require_bounded
from optpipe.evaluate.tasks.contract import TaskContract, Values
from optpipe.evaluate.tasks.user_file import PREFIX, StoredScores
from optpipe.models.artifacts.judged_build import JudgedBuild
from optpipe.stats.paired import Groups
from optpipe.workspace.entry import Run
from optpipe.workspace.file_names import EVALUATION, PREDICTIONS
from optpipe.workspace.runs import newest_runs


def observe_accuracy(
    runs: Sequence[Run], build: JudgedBuild, confidence: float
) -> Mapping[str, Observation]:
    """Observes the newest evaluation of the build's file by its task, recomputed from its predictions.

    An evaluation on the whole validation set of the model's card precedes those on other data.
    """
    for run in rank_evaluations(runs, build):
        caps = () if run.info.trained else (RANDOM_WEIGHTS,)
        if figures := recompute_accuracy(run, build.artifact, confidence):
            widened = {
                name: _widen_for_calibration(figure, name, run, build.artifact)
                for name, figure in figures.items()
            }
            return {
                name: replace(figure, blockers=(*figure.blockers, *caps), source=run.name)
                for name, figure in widened.items()
            }
    return {}


def rank_evaluations(runs: Sequence[Run], build: JudgedBuild) -> list[Run]:
    """The evaluations of the build's file that have its predictions; the first is judged."""
    evaluations = [(run, read_evaluation(run).dataset) for run in _list_evaluations(runs, build)]
    validation = next((dataset.sha256 for _, dataset in evaluations if dataset.validation), None)
    ranked = sorted(evaluations, key=lambda evaluation: evaluation[1].sha256 != validation)
    of_file = (run for run, _ in ranked if not has_evaluated_other_file(run, build))
    return [run for run in of_file if (row := _find_row(run, build)) and row.why_not is None]


def find_failure(runs: Sequence[Run], build: JudgedBuild) -> Blocker | None:
    """Why the accuracy of a build is not judged that failed when it was evaluated on some data for the last time.

    A build that gives NaN, or ends, on some samples is not made right by an evaluation on others, nor by an older one on the same. One
    that this machine cannot run was not tried.
    """
    settled = set()
    for run in _list_evaluations(runs, build):
        row, data = _find_row(run, build), identify_data(run)
        passed_over = row is None or (row.why_not is not None and not row.failed)
        if passed_over or data in settled or has_evaluated_other_file(run, build):
            continue
        settled.add(data)
        if row is not None and row.failed:
            name = read_evaluation(run).dataset.name
            what = f"the build failed when it was last evaluated on {name} ({run.name})"
            again = build.choose_way(Call("evaluate", build.argument, data="DIR"))
            way = "fix the build, or evaluate it there again: " + again
            return Blocker(f"{what}: " + (row.why_not or ""), way)
    return None


def _list_evaluations(runs: Sequence[Run], build: JudgedBuild) -> list[Run]:
    """Those that name the build, newest first."""
    return [run for run in newest_runs(runs, "evaluate") if build.artifact in run.manifest.parents]


def _find_row(run: Run, build: JudgedBuild) -> EvaluatedModel | None:
    rows = read_evaluation(run).results
    return next((row for row in rows if row.artifact == build.artifact), None)


def identify_data(run: Run) -> tuple[str, str]:
    """What an evaluation drew: its samples and the task that scores them. The same samples again are no new draw."""
    evaluated = read_evaluation(run)
    return evaluated.dataset.sha256, evaluated.task


def count_evaluated_together(
    judged: Sequence[Run],
    evaluated: Sequence[Run],
    build: JudgedBuild,
    candidates: Mapping[str, int],
) -> int:
    """The number of builds among which the evaluation may have chosen this one: those in any of its evaluations on the judged data.

    `judged` are the runs that may be judged, `evaluated` all evaluations of the build; `candidates` counts builds in other evaluations
    on the same data too.
    """
    first = next(iter(rank_evaluations(judged, build)), None)
    if first is None:
        return 1
    same = [run for run in evaluated if identify_data(run) == identify_data(first)]
    builds = {row.artifact for run in same for row in read_evaluation(run).results if row.artifact}
    return max(1, len(builds), candidates.get(first.name, 1))


def has_evaluated_other_file(run: Run, build: JudgedBuild) -> bool:
    """True for an evaluation of another file under the build's id. Raises BadInputError as `read_evaluation`."""
    return any(
        build.has_other_file(row.artifact, row.sha256) for row in read_evaluation(run).results
    )


def _widen_for_calibration(figure: Observation, name: str, run: Run, artifact: str) -> Observation:
    """Widens the interval by `TaskContract.bound_hidden_loss` of the evaluation's record."""
    evaluated = read_evaluation(run)
    row = next(
        (row for row in evaluated.results if row.artifact == artifact and row.calibrated_on), None
    )
    if row is None or figure.low is None or figure.high is None:
        return figure
    named = name.removeprefix("drop of ")
    task, about = (
        find_sampled_score(evaluated.sampled, named) or _find_task(evaluated),
        f"{figure.about}, {row.calibrated_on} of which were used for calibration",
    )
    least, most = task.score_range
    hidden = task.bound_hidden_loss(row)
    if name.startswith("drop"):
        return replace(figure, high=min(most - least, figure.high + hidden), about=about)
    if name == "agreement":  # a share of samples for any score
        return replace(figure, low=max(0.0, figure.low - hidden / (most - least)), about=about)
    if task.find_score(name).lower_is_better:
        return replace(figure, high=min(most, figure.high + hidden), about=about)
    return replace(figure, low=max(least, figure.low - hidden), about=about)


def read_evaluation(run: Run) -> Evaluation:
    """Raises BadInputError if the record is missing or invalid."""
    evaluation = record_from_files(run.files, EVALUATION, Evaluation)
    if (
        evaluation.dataset.classes is not None
        and not 0 <= evaluation.dataset.classes <= MAX_CLASS + 1
    ):
        raise BadInputError(
            f"{run.path / EVALUATION}: {evaluation.dataset.classes:,} classes; at most {MAX_CLASS + 1:,}"
        )
    return evaluation


def recompute_evaluation(run: Run) -> Iterator[Recomputed]:
    if not run.files.has(PREDICTIONS):
        return
    stored = read_evaluation(run)
    frame = read_predictions(run)
    names = read_groups(frame)
    task, count = _find_task(stored).with_groups(names), len(set(names))
    truths, source = _read_truths(frame, task), _select_predictions(frame, task, "source")
    if source is None:
        raise BadInputError(f"{run.path / PREDICTIONS}: has no predictions of the source")
    yield (
        f"{EVALUATION}: dataset",
        stored.dataset,
        replace(stored.dataset, count=len(source), groups=count or None),
    )
    for row in stored.results:
        name = row.artifact or "source"
        predictions = source if name == "source" else _select_predictions(frame, task, name)
        again = replace(row, agreement=None, accuracy=None, scores=None, sampled={})
        if predictions is not None:
            again = replace(
                again, samples=len(source), agreement=task.compute_parity(source, predictions)
            )
            if truths and run.info.trained:
                again = task.add_scores(
                    again,
                    truths,
                    source,
                    predictions,
                    stored.dataset.labels,
                    stored.dataset.classes,
                )
                again = replace(again, sampled=_score_again(frame, stored, row, task.groups))
        yield f"{EVALUATION}: {name}", row, again


def _score_again(
    frame: pl.DataFrame, stored: Evaluation, row: EvaluatedModel, groups: Groups | None
) -> Mapping[str, SampledFigure]:
    """The scores of plug-ins."""
    parts = _read_parts(frame, stored, row)
    return score_parts(stored.sampled, *parts, groups)


def _read_parts(
    frame: pl.DataFrame, stored: Evaluation, row: EvaluatedModel
) -> tuple[Mapping[str, Parts], Mapping[str, Parts], Mapping[str, str]]:
    """The parts of the source and of the row's model, and the reasons for scores without parts, which their code alone knows."""
    models = ("source", row.artifact or "source")
    source, build = (parts_from_frame(frame, model, stored.sampled) for model in models)
    stated = {name: scored.why_not for name, scored in row.sampled.items() if name not in build}
    return source, build, {name: why_not for name, why_not in stated.items() if why_not}


def recompute_accuracy(run: Run, artifact: str | None, confidence: float) -> dict[str, Observation]:
    """The figures of one artifact's predictions; empty without predictions."""
    evaluated, frame = read_evaluation(run), read_predictions(run)
    task = _find_task(evaluated).with_groups(read_groups(frame))
    build, source = (_select_predictions(frame, task, str(name)) for name in (artifact, "source"))
    if build is None or source is None:
        return {}
    judged = replace(evaluated.dataset, count=len(source))
    # reports of older versions do not name the data, and `verify` must render the same bytes
    about = judged.describe() if judged.validation is None else judged.identify()
    labels, truths = evaluated.dataset.labels, _read_truths(frame, task)
    figures = task.observe(truths, source, build, confidence, about, labels)
    rows = {row.artifact or "source": row for row in evaluated.results}
    if truths is None or (row := rows.get(artifact or "source")) is None:
        return figures
    parts = _read_parts(frame, evaluated, row)
    return figures | observe_parts(evaluated.sampled, *parts, task.groups, confidence, about)


def _find_task(evaluated: Evaluation) -> TaskContract:
    if evaluated.task.startswith(PREFIX):
        return StoredScores()
    if evaluated.task not in TASKS:
        raise BadInputError(
            f"{EVALUATION}: unknown task {escape(evaluated.task)!r}; known: {', '.join(TASKS)}"
        )
    return TASKS[Task(evaluated.task)]


def _read_truths(frame: pl.DataFrame, task: TaskContract) -> Values | None:
    column = frame[task.truth_column]
    return None if column.null_count() else column.to_list()


def _select_predictions(frame: pl.DataFrame, task: TaskContract, name: str) -> Values | None:
    column = f"{name}:{task.prediction_column}"
    return frame[column].to_list() if column in frame.columns else None


def read_groups(frame: pl.DataFrame) -> list[str]:
    """The source of every sample; empty without a column of them. Raises BadInputError for a sample without a source."""
    if "group" not in frame.columns:
        return []
    if frame["group"].null_count():
        raise BadInputError(f"{PREDICTIONS}: some samples have no group")
    return [str(group) for group in frame["group"]]


def read_predictions(run: Run) -> pl.DataFrame:
    """Every sample with its truth and predictions. Raises BadInputError if the file cannot be read."""
    frame = require_columns(
        read_parquet(run.files, PREDICTIONS), "predictions", run.path / PREDICTIONS
    )
    for column in frame.iter_columns():
        numbers = column
        while isinstance(numbers.dtype, pl.List):
            numbers = numbers.explode()
        if numbers.dtype.is_integer() and not numbers.is_between(-1, MAX_CLASS).all():
            raise BadInputError(
                f"{run.path / PREDICTIONS}: a number of {column.name!r} is not a class, which is at most {MAX_CLASS:,}"
            )
    require_bounded(measure_answers(frame), run.path / PREDICTIONS)
    return frame


def observe_scores(run: Run, artifact: str) -> Iterator[tuple[Score, Observation]]:
    """Every score of the artifact's predictions, recomputed, with a 95% interval; none of a model with random weights."""
    if not run.info.trained or not run.files.has(PREDICTIONS):
        return
    evaluated, figures = read_evaluation(run), recompute_accuracy(run, artifact, 0.95)
    task = _find_task(evaluated)
    for name in (*task.scores, *evaluated.sampled):
        if (figure := figures.get(name)) is not None:
            of = find_sampled_score(evaluated.sampled, name) or task
            yield of.find_score(name), figure
