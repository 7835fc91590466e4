"""Whether the stored predictions of an evaluation are those of its data set: section 8.1 of docs/dossier-format.md."""

from collections.abc import Iterator

import polars as pl

from optpipe.core.files import hash_text
from optpipe.evaluate.possible_answers import Known, find_impossible_answers
from optpipe.evaluate.recompute import read_evaluation, read_predictions
from optpipe.evaluate.tasks.classification import TOP_K
from optpipe.workspace.entry import Run
from optpipe.workspace.file_names import EVALUATION, PREDICTIONS


def find_foreign_samples(run: Run) -> Iterator[str]:
    """One line for each way in which the rows contradict the data set. Raises BadInputError for an invalid file."""
    if not run.files.has(PREDICTIONS):
        return
    frame, evaluated = read_predictions(run), read_evaluation(run)
    stated = evaluated.dataset.sha256
    if absent := {"path", "sha256"} - set(frame.columns):
        yield f"{PREDICTIONS}: has no column {', '.join(sorted(absent))}"
        return
    lines = frame.select(pl.concat_str("sha256", pl.lit("  "), "path", pl.lit("\n")))
    computed = hash_text("".join(lines.to_series().fill_null("")))
    if stated != computed:
        yield f"{EVALUATION}: the data set is {stated}, but {PREDICTIONS} has samples of {computed}"
    if frame.is_empty():
        yield f"{PREDICTIONS}: has no sample"
    if frame["path"].has_nulls() or frame["path"].is_duplicated().any():
        yield f"{PREDICTIONS}: a sample occurs twice, or has no path"
    if {"label", "class"} <= set(frame.columns):
        labeled = frame.drop_nulls("label").group_by("label").agg(pl.col("class").n_unique())
        if (labeled["class"] > 1).any():
            yield f"{PREDICTIONS}: samples with the same label are of different classes"
    for name in (column for column in frame.columns if column.endswith(":best")):
        if (frame[name].list.len() > TOP_K).any():
            yield f"{PREDICTIONS}: {name} has more than {TOP_K} classes"
    known = Known(evaluated.dataset.classes, evaluated.dataset.labels)
    wrong = find_impossible_answers(evaluated.task, known, frame)
    yield from (f"{PREDICTIONS}: {problem}" for problem in wrong)
    yield from _find_unstated_builds(run, frame)


def _find_unstated_builds(run: Run, frame: pl.DataFrame) -> Iterator[str]:
    """Predictions without a row of the record, which states what the build was calibrated on; and builds with two rows."""
    rows = [row.artifact or "source" for row in read_evaluation(run).results]
    predicted = {name.partition(":")[0] for name in frame.columns if ":" in name}
    if absent := predicted - set(rows):
        yield f"{EVALUATION}: has no row of {', '.join(sorted(absent))}, whose predictions are there"
    if len(set(rows)) < len(rows):
        yield f"{EVALUATION}: has two rows of a build"
    scored = {name.partition(":part.")[2] for name in frame.columns if ":part." in name}
    if unstated := scored - read_evaluation(run).sampled.keys():
        yield f"{EVALUATION}: has no rule of {', '.join(sorted(unstated))}, whose parts are there"


def count_copies(run: Run) -> int:
    """The number of samples whose content is that of an earlier one."""
    hashes = read_predictions(run)["sha256"] if run.files.has(PREDICTIONS) else pl.Series()
    return len(hashes) - hashes.n_unique()
