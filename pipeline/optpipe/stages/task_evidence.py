"""What evaluation, preprocessing and profile runs show for a build. A run kind that is absent shows nothing.

Accuracy is computed anew from the predictions of every image, a parity proof from the rows of every image, a profile from the
tables of its trace (the recording itself holds the process environment and never leaves the scratch folder).
"""

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from optpipe.core.advice import advised
from optpipe.core.criteria import Cap, Observation
from optpipe.core.evidence import Build
from optpipe.core.report import Picture
from optpipe.core.runs import Run, json_of_run
from optpipe.stages.again import (
    EVALUATION,
    PREDICTIONS,
    PREPROCESSING,
    PROFILE,
    answers_again,
    proof_again,
    stage_again,
)
from optpipe.stages.preprocess.proof import ROWS
from optpipe.stages.report_data import raw_files

RANDOM_WEIGHTS = Cap("the weights are random, so accuracy and agreement mean nothing", "build with trained weights")
PICTURES = 6


def accuracy_figures(runs: Sequence[Run], build: Build, confidence: float) -> Mapping[str, Observation]:
    """`top1`, `drop` and `agreement` of the newest evaluation that has the build, as fractions.

    Computed anew from the run's predictions. Agreement is left out where the source gives every image the same class.
    """
    for run in _newest(runs, "evaluate"):
        caps = () if run.manifest["details"].get("trained", False) else (RANDOM_WEIGHTS,)
        found = answers_again(run.path / PREDICTIONS, build.artifact, confidence)
        if found:
            return {
                name: replace(_as_if_lost(figure, name, run, build.artifact), caps=caps, source=run.run_id)
                for name, figure in found.items()
            }
    return {}


def _as_if_lost(figure: Observation, name: str, run: Run, artifact: str) -> Observation:
    """The figure with its interval wide enough to hold even if all samples that the ranges were computed from had been lost.

    On those accuracy flatters; how many they are is on the evaluation's record.
    """
    rows = json_of_run(run, EVALUATION).get("results", ())
    row = next((row for row in rows if row.get("artifact") == artifact and row.get("calibrated_on")), None)
    if row is None or figure.low is None or figure.high is None:
        return figure
    share, about = row["calibrated_on"] / row["n"], f"{figure.about}, {row['calibrated_on']} of which calibrated it"
    if name == "drop":
        return replace(figure, high=min(1.0, figure.high + share), about=about)
    return replace(figure, low=max(0.0, figure.low - share), about=about)


def preprocessing_figures(runs: Sequence[Run], build: Build) -> Mapping[str, Observation]:
    """`agreement` (fraction) and `snr` (dB) of the newest parity proof for the build's model, from its rows."""
    for run in _newest(runs, "preprocess"):
        record = json_of_run(run, PREPROCESSING)
        if record.get("model") == build.model:
            return _parity_figures(run, record)
    return {}


def _parity_figures(run: Run, record: Mapping[str, Any]) -> dict[str, Observation]:
    proof, caps = proof_again(run, record), _refused(record["parity"])
    about = f"{record['parity']['images']} images"
    found = {}
    if proof.top1 is not None:
        weights = () if record["weights"].get("trained", False) else (RANDOM_WEIGHTS,)
        share, interval = proof.top1.equal / proof.top1.images, proof.top1.interval
        found["agreement"] = Observation(share, interval.low, interval.high, (*caps, *weights), about, run.run_id)
    snr = proof.outputs.snr_db
    if snr is not None:
        found["snr"] = Observation(snr, snr, snr, caps, about, run.run_id)
    return found


def _refused(parity: Mapping[str, Any]) -> tuple[Cap, ...]:
    refused = parity.get("refused") or ()
    if not refused:
        return ()
    return (Cap(f"{len(refused)} images could not be decoded", "convert or remove them, then prove parity again"),)


def tensor_core_figure(runs: Sequence[Run], build: Build) -> Observation | None:
    """Share of the eligible kernel time that used Tensor Cores, from the newest profile of the build and its raw tables."""
    for run in _newest(runs, "profile"):
        for stage in json_of_run(run, PROFILE).get("stages", ()):
            if stage.get("artifact") == build.artifact and (stage.get("tensor_cores") or {}).get("eligible_ns"):
                again = stage_again(run, stage)
                caps = () if again else (_no_tables(),)
                return _share(again or stage, run.run_id, caps)
    return None


def _share(stage: Mapping[str, Any], source: str, caps: tuple[Cap, ...]) -> Observation | None:
    cores, quality = stage["tensor_cores"], stage["trace_quality"]["verdict"]
    if not cores.get("eligible_ns"):
        return None
    caps += () if quality == "PASS" else (Cap(f"the trace's quality is {quality}", "profile again"),)
    share = cores["used_ns"] / cores["eligible_ns"]
    return Observation(share, share, share, caps, str(stage.get("name", "")), source)


def _no_tables() -> Cap:
    fewer = advised("profile … --iterations 10")
    return Cap("the tables of the trace are too large for a dossier", f"profile fewer iterations: {fewer}")


def documents(runs: Sequence[Run], root: Path) -> dict[str, Any]:
    """What the report shows of them: fields of `core.report.Report`; file paths are relative to `root`."""
    fields: dict[str, Any] = {}
    for run in _newest(runs, "profile"):
        stages = [stage for stage in json_of_run(run, PROFILE).get("stages", ()) if stage.get("findings") is not None]
        inference = [stage for stage in stages if stage.get("kind") == "inference"]
        if stages:
            fields["profile"] = (inference or stages)[-1]
            folder = (fields["profile"].get("recording") or {}).get("folder", "")
            tables = (
                record["path"] for record in run.manifest["files"] if record["path"].startswith(f"{folder}/tables/")
            )
            fields["profile_files"] = tuple(
                file for name in (PROFILE, *tables) for file in raw_files((run,), root, name)
            )
            break
    for run in _newest(runs, "preprocess"):
        fields["preprocessing"] = json_of_run(run, PREPROCESSING)
        fields["pictures"] = tuple(_pictures(run, fields["preprocessing"], root))
        break
    return fields


def _pictures(run: Run, record: Mapping[str, Any], root: Path) -> Iterator[Picture]:
    for picture in record["parity"].get("pictures", ())[:PICTURES]:
        path = run.path / picture["path"]
        if path.is_file():
            data = base64.b64encode(path.read_bytes()).decode()
            name, times = Path(str(picture["image"])).name, float(picture["difference_times"])
            caption = f"{name}: the model's own, DALI's, and their difference ({times:.3g} times)"
            files = (*raw_files((run,), root, picture["path"]), *raw_files((run,), root, ROWS))
            yield Picture(caption, f"data:image/png;base64,{data}", files)


def _newest(runs: Sequence[Run], kind: str) -> list[Run]:
    return sorted(
        (run for run in runs if run.kind == kind), key=lambda run: str(run.manifest["started_utc"]), reverse=True
    )
