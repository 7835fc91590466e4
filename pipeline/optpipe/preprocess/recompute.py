"""The parity proof of a preprocess run, computed again from the rows of every image."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from optpipe.core.records import Recomputed, record_from_files
from optpipe.core.verdict import RANDOM_WEIGHTS, Blocker, Observation
from optpipe.models.artifacts.facts import JudgedBuild
from optpipe.preprocess.parity.proof import (
    find_stored_task,
    observe_prediction_agreement,
    proof_from_rows,
    read_rows,
    row_errors_from_table,
)
from optpipe.preprocess.parity.records import Proof
from optpipe.preprocess.records import PreprocessRecord
from optpipe.stats.agreement import FEWEST_FOR_SNR, compute_snr_interval
from optpipe.stats.paired import Share, compute_share_interval
from optpipe.workspace.entry import Run
from optpipe.workspace.file_names import PREPROCESSING, ROWS
from optpipe.workspace.runs import newest_runs

if TYPE_CHECKING:
    import polars as pl


def observe_preprocessing(runs: Sequence[Run], build: JudgedBuild, confidence: float) -> Mapping[str, Observation]:
    """`agreement` (fraction) and `snr` (dB) of the newest parity proof for the build's model, from its rows."""
    for run in newest_runs(runs, "preprocess"):
        record = record_from_files(run.files, PREPROCESSING, PreprocessRecord)
        if is_proof_for(record, build):
            return _observe_parity(run, record, confidence)
    return {}


def is_proof_for(record: PreprocessRecord, build: JudgedBuild) -> bool:
    """Whether it was proven on the build's own model; a record of an earlier version has only a name to tell by."""
    return record.model == build.model and record.model_sha256 in (None, build.model_sha256)


def _observe_parity(run: Run, record: PreprocessRecord, confidence: float) -> dict[str, Observation]:
    rows = read_rows(run.files)
    proof, refused = recompute_proof(rows, record), len(record.parity.refused)
    remedy = "convert or remove them, then verify parity again"
    blockers = (Blocker(f"{refused} images could not be decoded", remedy),) if refused else ()
    weights = () if record.trained else (RANDOM_WEIGHTS,)
    about = f"{rows.height} images"
    found = {}
    if proof.top1_agreement is not None:
        agreement = proof.top1_agreement
        interval = compute_share_interval(agreement.equal, agreement.images, confidence)
        tail = Share(agreement.equal, agreement.images)
        found["agreement"] = Observation(
            agreement.share, interval.low, interval.high, (*blockers, *weights), about, run.name, tail
        )
    elif proof.prediction_agreement is not None and (task := find_stored_task(record.task)) is not None:
        seen = observe_prediction_agreement(rows, task, confidence, about)
        found["agreement"] = replace(seen, blockers=(*blockers, *weights, *seen.blockers), source=run.name)
    if (snr := proof.output.snr_db) is not None:
        extent = compute_snr_interval(row_errors_from_table(rows), confidence)
        low, high = extent or (None, None)
        few = Blocker(
            f"fewer than {FEWEST_FOR_SNR} images share the error: how far its SNR scatters is not known",
            f"verify parity on more images: optpipe preprocess {shlex.quote(record.model)} --images DIR",
        )
        found["snr"] = Observation(snr, low, high, blockers if extent else (*blockers, few), about, run.name)
    return found


def recompute_preprocessing(run: Run) -> Iterator[Recomputed]:
    """The proof of a preprocess run, where the rows of its images are there."""
    if run.files.has(ROWS):
        stored = record_from_files(run.files, PREPROCESSING, PreprocessRecord)
        rows = read_rows(run.files)
        proof = recompute_proof(rows, stored)
        parity = replace(stored.parity, proof=proof, images=rows.height)
        yield PREPROCESSING, stored, replace(stored, parity=parity, verdict=proof.verdict)


def recompute_proof(rows: "pl.DataFrame", record: PreprocessRecord) -> Proof:
    """The parity proof of a preprocess run from its rows."""
    return proof_from_rows(
        rows,
        trained=record.trained,
        classifies=record.classifies,
        refused=len(record.parity.refused),
        task=find_stored_task(record.task),
    )
