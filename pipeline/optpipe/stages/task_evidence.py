"""What evaluation, preprocessing and profile runs show for a build. A run kind that is absent shows nothing."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optpipe.core.criteria import Cap
from optpipe.core.evidence import Build, Figure
from optpipe.core.runs import Run
from optpipe.stats.paired import Interval, difference_interval, share_interval

if TYPE_CHECKING:
    import polars as pl

PREDICTIONS = "predictions.parquet"


def accuracy_figures(runs: Sequence[Run], build: Build, confidence: float) -> Mapping[str, Figure]:
    """`top1`, `drop` and `agreement` of the newest evaluation that has the build, as fractions.

    Computed anew from the run's predictions. Agreement is left out where the source gives every image the same class.
    """
    import polars as pl

    mine = f"{build.artifact}:best"
    for run in reversed([each for each in runs if each.kind == "evaluate"]):
        answers = pl.read_parquet(run.path / PREDICTIONS)
        if mine in answers.columns:
            caps = () if run.manifest["details"].get("trained", False) else (_RANDOM,)
            found = answers.select(
                pl.col("class"),
                pl.col(mine).list.first().alias("mine"),
                pl.col("source:best").list.first().alias("source"),
            )
            return _figures(found, caps, run.run_id, confidence)
    return {}


_RANDOM = Cap("the weights are random", "evaluate a trained model: --weights FILE")


def _figures(answers: "pl.DataFrame", caps: tuple[Cap, ...], source: str, confidence: float) -> dict[str, Figure]:
    n, about = answers.height, f"{answers.height} images"
    figures = {}
    if answers["source"].n_unique() > 1:
        same = int((answers["mine"] == answers["source"]).sum())
        figures["agreement"] = _figure(same / n, share_interval(same, n, confidence), caps, source, about)
    if answers["class"].null_count() == 0:
        right, was = answers["mine"] == answers["class"], answers["source"] == answers["class"]
        lost, won = int((was & ~right).sum()), int((right & ~was).sum())
        hits = int(right.sum())
        figures["top1"] = _figure(hits / n, share_interval(hits, n, confidence), caps, source, about)
        drop = difference_interval(lost, won, n, confidence)
        figures["drop"] = _figure((lost - won) / n, drop, caps, source, about)
    return figures


def _figure(value: float, interval: Interval, caps: tuple[Cap, ...], source: str, about: str) -> Figure:
    return Figure(value, interval.low, interval.high, caps, source, about)


def preprocessing_figures(runs: Sequence[Run], build: Build, confidence: float) -> Mapping[str, Figure]:  # noqa: ARG001
    """`agreement` (fraction) and `snr` (dB) of the newest parity proof for the build's model."""
    return {}


def tensor_core_figure(runs: Sequence[Run], build: Build) -> Figure | None:  # noqa: ARG001
    """Share of the eligible kernel time that used Tensor Cores, from the newest profile of the build."""
    return None


def documents(runs: Sequence[Run], root: Path) -> dict[str, Any]:  # noqa: ARG001
    """What the report shows of them: fields of `core.report.Report`; file paths are relative to `root`."""
    return {}
