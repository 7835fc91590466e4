"""The figures of a parity proof from its rows, one per image: when it is made, and again whenever it is verified.

`images.parquet`: `image`, `mean_levels`, `max_levels` (pixels), the sums of `stats.agreement.compute_row_errors` (outputs), and
for a classifier `reference_class`, `dali_class` and, where labels are known, `class`; for other tasks those of `predictions`.
"""

from typing import TYPE_CHECKING, Any

from optpipe.core.errors import BadInputError, first_line
from optpipe.core.files import Files
from optpipe.preprocess.parity.judge import compute_agreement, judge_parity
from optpipe.preprocess.parity.predictions import compare_predictions
from optpipe.preprocess.parity.records import Accuracy, Proof
from optpipe.stats.agreement import compute_row_errors, find_best_classes, pool_errors
from optpipe.workspace.file_names import ROWS

if TYPE_CHECKING:
    import numpy as np
    import polars as pl

    from optpipe.evaluate.tasks.contract import BootstrapTask

_CLASSES = ("reference_class", "dali_class", "class")


def rows_from_outputs(reference: "np.ndarray", got: "np.ndarray", *, classifies: bool) -> "pl.DataFrame":
    """The rows' columns about the outputs of one batch, `(images, …)` each; classes are null for what is no classifier."""
    import numpy as np
    import polars as pl

    reference, got = (each.astype(np.float32) for each in (reference, got))
    columns: dict[str, Any] = dict(compute_row_errors(reference, got))
    for name, outputs in (("reference_class", reference), ("dali_class", got)):
        columns[name] = find_best_classes(outputs) if classifies else [None] * len(outputs)
    return pl.DataFrame(columns).cast({"reference_class": pl.Int64, "dali_class": pl.Int64})


def proof_from_rows(
    rows: "pl.DataFrame", *, trained: bool, classifies: bool, refused: int, task: "BootstrapTask | None" = None
) -> Proof:
    """The proof that `rows` amount to; `task` is that of a detector or segmenter."""
    sums = _list_sums(rows)
    error = pool_errors("output", row_errors_from_table(rows))
    top1 = accuracy = None
    if classifies:
        top1 = compute_agreement(sums["reference_class"], sums["dali_class"])
        if "class" in rows.columns and rows["class"].null_count() == 0:
            truth = sums["class"]
            shares = (float((sums[name] == truth).mean()) for name in ("reference_class", "dali_class"))
            accuracy = Accuracy(*shares)
    score, predicted = compare_predictions(rows, task)
    judgment = judge_parity(
        top1,
        error.snr_db,
        finite=error.finite,
        trained=trained,
        classifies=classifies or "dali_prediction" in rows.columns,
        refused=refused,
        blind=error.snr_db is None and rows["reference_square"].n_unique() < 2 and sums["max_levels"].max() > 0,
        score=score,
        predicted=predicted,
    )
    return Proof(judgment.verdict, judgment.reason, judgment.remedy, error, top1, accuracy, score, predicted)


def row_errors_from_table(rows: "pl.DataFrame") -> "dict[str, np.ndarray]":
    """The sums of each image, as `stats.agreement` takes them."""
    return {name: values for name, values in _list_sums(rows).items() if name not in _CLASSES}


def _list_sums(rows: "pl.DataFrame") -> "dict[str, np.ndarray]":
    return {name: rows[name].to_numpy() for name in rows.columns if rows[name].dtype.is_numeric() or name == "finite"}


def read_rows(files: Files) -> "pl.DataFrame":
    """The rows of a proof. Raises BadInputError where they are not there or are those of an earlier version."""
    import polars as pl

    try:
        rows = pl.read_parquet(files.read(ROWS))
    except pl.exceptions.PolarsError as error:
        raise BadInputError(f"cannot read the parity results in {files.folder / ROWS}: {first_line(error)}") from error
    if "difference_square" not in rows.columns:
        raise BadInputError(
            f"{files.folder / ROWS} was written by an earlier version and has no per-image output errors; run optpipe preprocess again"
        )
    return rows
