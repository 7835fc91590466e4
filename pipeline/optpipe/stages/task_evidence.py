"""What evaluation, preprocessing and profile runs show for a build. A run kind that is absent shows nothing.

Accuracy is computed anew from the predictions of every image. A parity proof and a profile are taken from their hashed
records: their raw pictures and recordings are too large for a dossier, and the latter hold the process environment.
"""

import base64
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optpipe.core.criteria import Cap
from optpipe.core.evidence import Build, Figure
from optpipe.core.report import RawFile
from optpipe.core.runs import Run, json_of_run
from optpipe.stats.distributions import proportion_interval
from optpipe.stats.paired import Interval, difference_interval, share_interval

if TYPE_CHECKING:
    import polars as pl

PREDICTIONS, EVALUATION = "predictions.parquet", "evaluate.json"
PREPROCESSING, PROFILE = "preprocess.json", "profile.json"
RANDOM_WEIGHTS = Cap("the weights are random, so accuracy and agreement mean nothing", "build with trained weights")
PICTURES = 6


def accuracy_figures(runs: Sequence[Run], build: Build, confidence: float) -> Mapping[str, Figure]:
    """`top1`, `drop` and `agreement` of the newest evaluation that has the build, as fractions.

    Computed anew from the run's predictions. Agreement is left out where the source gives every image the same class.
    """
    import polars as pl

    mine = f"{build.artifact}:best"
    for run in _newest(runs, "evaluate"):
        answers = pl.read_parquet(run.path / PREDICTIONS)
        if mine in answers.columns:
            caps = () if run.manifest["details"].get("trained", False) else (RANDOM_WEIGHTS,)
            found = answers.select(
                pl.col("class"),
                pl.col(mine).list.first().alias("mine"),
                pl.col("source:best").list.first().alias("source"),
            )
            return _answer_figures(found, caps, run.run_id, confidence)
    return {}


def _answer_figures(
    answers: "pl.DataFrame", caps: tuple[Cap, ...], source: str, confidence: float
) -> dict[str, Figure]:
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
    for run in _newest(runs, "preprocess"):
        record = json_of_run(run, PREPROCESSING)
        if record.get("model") != build.model:
            continue
        parity = record["parity"]
        trained = record["weights"].get("trained", False)
        caps = _refused(parity)
        found = {}
        agreement = parity.get("top1_agreement")
        if agreement:
            interval = proportion_interval(agreement["equal"], agreement["images"])
            share = agreement["equal"] / agreement["images"]
            about = f"{agreement['images']} images"
            weights = () if trained else (RANDOM_WEIGHTS,)
            found["agreement"] = Figure(share, *interval, (*caps, *weights), run.run_id, about)
        snr = parity["output"].get("snr_db")
        if snr is not None:
            found["snr"] = Figure(snr, snr, snr, caps, run.run_id, f"{parity['images']} images")
        return found
    return {}


def _refused(parity: Mapping[str, Any]) -> tuple[Cap, ...]:
    refused = parity.get("refused") or ()
    if not refused:
        return ()
    return (Cap(f"{len(refused)} images could not be decoded", "convert or remove them, then prove parity again"),)


def tensor_core_figure(runs: Sequence[Run], build: Build) -> Figure | None:
    """Share of the eligible kernel time that used Tensor Cores, from the newest profile of the build."""
    for run in _newest(runs, "profile"):
        for stage in json_of_run(run, PROFILE).get("stages", ()):
            cores = stage.get("tensor_cores") or {}
            if stage.get("artifact") == build.artifact and cores.get("eligible_ns"):
                share = cores["used_ns"] / cores["eligible_ns"]
                quality = stage["trace_quality"]["verdict"]
                caps = () if quality == "PASS" else (Cap(f"the trace's quality is {quality}", "profile again"),)
                return Figure(share, share, share, caps, run.run_id, str(stage["name"]))
    return None


def documents(runs: Sequence[Run], root: Path) -> dict[str, Any]:
    """What the report shows of them: fields of `core.report.Report`; file paths are relative to `root`."""
    fields: dict[str, Any] = {}
    for run in _newest(runs, "profile"):
        stages = [stage for stage in json_of_run(run, PROFILE).get("stages", ()) if stage.get("findings") is not None]
        inference = [stage for stage in stages if stage.get("kind") == "inference"]
        if stages:
            fields["profile"] = (inference or stages)[-1]
            fields["profile_files"] = _files(run, PROFILE, root)
            break
    for run in _newest(runs, "preprocess"):
        fields["preprocessing"] = json_of_run(run, PREPROCESSING)
        fields["pictures"] = tuple(_pictures(run, fields["preprocessing"]))
        break
    for run in _newest(runs, "evaluate"):
        fields["evaluation"] = tuple(json_of_run(run, EVALUATION).get("results", ()))
        break
    return fields


def _pictures(run: Run, record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for picture in record["parity"].get("pictures", ())[:PICTURES]:
        path = run.path / picture["path"]
        if path.is_file():
            data = base64.b64encode(path.read_bytes()).decode()
            name, times = Path(str(picture["image"])).name, float(picture["difference_times"])
            caption = f"{name}: the model's own, DALI's, and their difference ({times:.3g} times)"
            yield caption, f"data:image/png;base64,{data}"


def _files(run: Run, name: str, root: Path) -> tuple[RawFile, ...]:
    import os

    records = [record for record in run.manifest["files"] if record["path"] == name]
    place = Path(os.path.relpath((run.path / name).resolve(), root.resolve())).as_posix()
    return tuple(RawFile(place, record["sha256"], record["bytes"]) for record in records)


def _newest(runs: Sequence[Run], kind: str) -> list[Run]:
    return sorted(
        (run for run in runs if run.kind == kind), key=lambda run: str(run.manifest["started_utc"]), reverse=True
    )
