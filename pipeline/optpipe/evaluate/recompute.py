"""Accuracy, drop and agreement of an evaluation run, computed again from every stored prediction."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from optpipe.core.disagreements import find_disagreements
from optpipe.core.observation import RANDOM_WEIGHTS, Observation, Tail
from optpipe.core.records import plain_from_record, read_record
from optpipe.errors import BadInputError, first_line
from optpipe.evaluate.result import Accuracy, Agreement, Evaluation
from optpipe.evaluate.scores import compute_accuracy, compute_agreement
from optpipe.stats.paired import (
    Interval,
    PairedDifference,
    Share,
    compute_difference_interval,
    compute_share_interval,
)
from optpipe.workspace.runs import Run, newest_runs

if TYPE_CHECKING:
    import polars as pl
from collections.abc import Sequence
from dataclasses import replace

from optpipe.artifacts.facts import JudgedBuild
from optpipe.workspace.file_names import (
    EVALUATION,
    PREDICTIONS,
)


def observe_accuracy(runs: Sequence[Run], build: JudgedBuild, confidence: float) -> Mapping[str, Observation]:
    """`top1`, `drop` and `agreement` of the newest evaluation that has the build, as fractions.

    Computed anew from the run's predictions. Agreement is left out where the source gives every image the same class.
    """
    for run in newest_runs(runs, "evaluate"):
        caps = () if run.manifest.trained else (RANDOM_WEIGHTS,)
        found = recompute_accuracy(run.path / PREDICTIONS, build.artifact, confidence)
        if found:
            return {
                name: replace(
                    _widen_for_calibration(figure, name, run, build.artifact), blockers=caps, source=run.run_id
                )
                for name, figure in found.items()
            }
    return {}


def _widen_for_calibration(figure: Observation, name: str, run: Run, artifact: str) -> Observation:
    """The figure with its interval wide enough to hold even if all samples that the ranges were computed from had been lost.

    On those accuracy flatters; how many they are is on the evaluation's record.
    """
    rows = read_evaluation(run).results
    row = next((row for row in rows if row.artifact == artifact and row.calibrated_on), None)
    if row is None or figure.low is None or figure.high is None:
        return figure
    share, about = (
        row.calibrated_on / row.samples,
        f"{figure.about}, {row.calibrated_on} of which were used for calibration",
    )
    if name == "drop":
        return replace(figure, high=min(1.0, figure.high + share), about=about)
    return replace(figure, low=max(0.0, figure.low - share), about=about)


def read_evaluation(run: Run) -> Evaluation:
    """The record of an evaluation run. Raises BadInputError where it is missing or of another form."""
    return read_record(run.path / EVALUATION, Evaluation)


def find_evaluation_disagreements(run: Run) -> Iterator[str]:
    """Where `evaluate.json` differs from what the predictions give, one line each."""
    if not (run.path / PREDICTIONS).is_file():
        return
    frame = _table(run.path / PREDICTIONS)
    classes = frame["class"]
    labels = None if classes.null_count() else classes.to_numpy()
    source = np.array(frame["source:best"].to_list())
    for row in read_evaluation(run).results:
        name = row.artifact or "source"
        found = np.array(frame[f"{name}:best"].to_list()) if f"{name}:best" in frame.columns else None
        found = source if name == "source" else found
        again: tuple[Agreement | None, Accuracy | None] = (None, None)
        if found is not None:
            top5 = row.accuracy is not None and row.accuracy.top5 is not None
            accuracy = None if labels is None else compute_accuracy(source, found, labels, top5=top5)
            again = compute_agreement(source, found), accuracy if run.manifest.trained else None
        for key, stored, computed in zip(("agreement", "accuracy"), (row.agreement, row.accuracy), again, strict=True):
            place = f"{EVALUATION}: {name}: {key}"
            yield from find_disagreements(plain_from_record(stored), plain_from_record(computed), place)


def recompute_accuracy(path: Path, artifact: str | None, confidence: float) -> dict[str, Observation]:
    """The figures of one artifact's predictions in the file at `path`; none where it has none there."""
    import polars as pl

    answers, mine = _table(path), f"{artifact}:best"
    if mine not in answers.columns:
        return {}
    return _compute_accuracy(
        answers.select(
            pl.col("class"),
            pl.col(mine).list.first().alias("mine"),
            pl.col("source:best").list.first().alias("source"),
        ),
        confidence,
    )


def _compute_accuracy(answers: "pl.DataFrame", confidence: float) -> dict[str, Observation]:
    n, about = answers.height, f"{answers.height} images"
    figures = {}
    if answers["source"].n_unique() > 1:
        same = int((answers["mine"] == answers["source"]).sum())
        figures["agreement"] = _figure(same / n, compute_share_interval(same, n, confidence), about, Share(same, n))
    if answers["class"].null_count() == 0:
        right, was = answers["mine"] == answers["class"], answers["source"] == answers["class"]
        lost, won = int((was & ~right).sum()), int((right & ~was).sum())
        hits = int(right.sum())
        figures["top1"] = _figure(hits / n, compute_share_interval(hits, n, confidence), about, Share(hits, n))
        interval = compute_difference_interval(lost, won, n, confidence)
        figures["drop"] = _figure((lost - won) / n, interval, about, PairedDifference(lost, won, n))
    return figures


def _figure(value: float, interval: Interval, about: str, tail: Tail) -> Observation:
    return Observation(value, interval.low, interval.high, about=about, tail=tail)


def _table(path: Path) -> "pl.DataFrame":
    import polars as pl

    try:
        return pl.read_parquet(path)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise BadInputError(f"cannot read {path}: {first_line(error)}") from error
