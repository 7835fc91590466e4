"""What a dossier states beside its judged figures follows from its raw files and has the format's keys and types, in both verifiers."""

import shutil
from pathlib import Path

import polars as pl
import pytest
from tests.fakes.dossiers import edit, examine, seal_anew, tell_hash

from optpipe.signoff.verify import check_dossier

RECORD = Path(__file__).parents[3] / "reports" / "gallery" / "fail"
EVALUATED, RUN = "runs/evaluate-*/evaluate.json", "runs/evaluate-*/manifest.json"
PROVEN, MODEL = "builds/verification-*/manifest.json", "builds/model-*/manifest.json"
FORGERIES = {
    "version of a package is a number": (MODEL, ("environment", "packages", "torch"), 2),
    "size is a text": (PROVEN, ("files", "errors.parquet", "size_bytes"), "9"),
    "status is null": (PROVEN, ("status",), None),
    "information is null": (RUN, ("info",), None),
    "another key": (RUN, ("info", "more"), 1),
    "another key of a row": (EVALUATED, ("results", 0, "more"), None),
    "count has a fraction": (EVALUATED, ("results", 1, "accuracy", "lost"), 1.5),
    "interval of one bound": (EVALUATED, ("results", 1, "accuracy", "drop_ci"), [0.0]),
    "macro F1": (EVALUATED, ("results", 1, "accuracy", "macro_f1"), 0.99),
    "interval of macro F1": (EVALUATED, ("results", 1, "accuracy", "macro_f1_drop_ci"), [0.0, 0.001]),
    "top-5": (EVALUATED, ("results", 1, "accuracy", "top5"), 1.0),
    "interval of the drop": (EVALUATED, ("results", 1, "accuracy", "drop_ci"), [0.0, 0.001]),
    "interval of the agreement": (EVALUATED, ("results", 1, "agreement", "ci"), [0.99, 1.0]),
    "lost samples": (EVALUATED, ("results", 1, "accuracy", "lost"), 0),
    "mean error": (PROVEN, ("info", "outputs", 0, "mean_abs"), 0.0),
    "cosine": (PROVEN, ("info", "outputs", 0, "cosine"), 1.0),
    "observed weights": ("verdict.json", ("criteria", 0, "observed"), 1.0),
    "source of a trust criterion": ("verdict.json", ("criteria", 1, "source"), "elsewhere"),
    "name of the dossier": ("verdict.json", ("dossier_name",), "other"),
    "removed runs are a text": ("request.json", ("removed",), "none"),
}  # fmt: skip


@pytest.fixture
def dossier(tmp_path):
    return Path(shutil.copytree(RECORD, tmp_path / "dossier"))


def require_refused(folder):
    seal_anew(folder)
    assert check_dossier(folder).problems
    assert examine(folder)[0].differs


@pytest.mark.parametrize("name", FORGERIES)
def test_a_statement_that_does_not_follow_is_refused_by_both(dossier, name):
    pattern, steps, value = FORGERIES[name]
    edit(next(dossier.glob(pattern)), *steps, value=value)
    require_refused(dossier)


def test_the_errors_of_each_sample_count_once(dossier):
    """All rows twice give the same means, and shorter intervals."""
    path = next(dossier.glob("builds/verification-*/errors.parquet"))
    rows = pl.read_parquet(path)
    pl.concat([rows, rows]).write_parquet(path)
    tell_hash(path)
    require_refused(dossier)


@pytest.mark.parametrize("change", [lambda rows: rows[:1], lambda rows: [*rows, rows[1]]])
def test_each_build_that_was_evaluated_has_one_row(dossier, change):
    """Without its row a build hides the samples that it was calibrated on."""
    edit(next(dossier.glob(EVALUATED)), "results", value=change)
    require_refused(dossier)


def test_errors_that_a_record_names_are_there(dossier):
    next(dossier.glob("builds/verification-*/errors.parquet")).unlink()
    require_refused(dossier)


def empty_predictions(folder):
    path = next(folder.glob("runs/evaluate-*/predictions.parquet"))
    pl.read_parquet(path).clear().write_parquet(path)


def enlarge_errors(folder):
    """Squares whose product is more than a number can be."""
    path = next(folder.glob("builds/verification-*/errors.parquet"))
    pl.read_parquet(path).with_columns(
        reference_square=pl.lit(1e308), output_square=pl.lit(1e308)
    ).write_parquet(path)
    tell_hash(path)


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("spoil", [empty_predictions, enlarge_errors])
def test_impossible_values_reach_no_arithmetic(dossier, spoil):
    spoil(dossier)
    require_refused(dossier)
