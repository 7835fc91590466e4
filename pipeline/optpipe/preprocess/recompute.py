"""The parity proof of a preprocess run, computed again from the rows of every image."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from optpipe.artifacts.facts import JudgedBuild
from optpipe.core.disagreements import find_disagreements, plain_json
from optpipe.core.observation import RANDOM_WEIGHTS, Blocker, Observation
from optpipe.preprocess.parity.proof import Proof, proof_from_rows, rows_from_file
from optpipe.workspace.file_names import (
    PREPROCESSING,
    ROWS,
)
from optpipe.workspace.runs import Run, newest_runs, read_run_json


def observe_preprocessing(runs: Sequence[Run], build: JudgedBuild) -> Mapping[str, Observation]:
    """`agreement` (fraction) and `snr` (dB) of the newest parity proof for the build's model, from its rows."""
    for run in newest_runs(runs, "preprocess"):
        record = read_run_json(run, PREPROCESSING)
        if record.get("model") == build.model:
            return _observe_parity(run, record)
    return {}


def _observe_parity(run: Run, record: Mapping[str, Any]) -> dict[str, Observation]:
    proof, caps = recompute_proof(run, record), _find_refused(record["parity"])
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


def _find_refused(parity: Mapping[str, Any]) -> tuple[Blocker, ...]:
    refused = parity.get("refused") or ()
    if not refused:
        return ()
    return (Blocker(f"{len(refused)} images could not be decoded", "convert or remove them, then verify parity again"),)


def find_preprocessing_disagreements(run: Run) -> Iterator[str]:
    """Where `preprocess.json` differs from what the rows of the images give, one line each."""
    if (run.path / ROWS).is_file():
        record = read_run_json(run, PREPROCESSING)
        again = recompute_proof(run, record).to_dict()
        stored = {name: record["parity"].get(name, "nothing") for name in again}
        yield from find_disagreements(stored, plain_json(again), f"{PREPROCESSING}: parity")


def recompute_proof(run: Run, record: Mapping[str, Any]) -> Proof:
    """The parity proof of a preprocess run from its rows. Raises BadInputError where they are not there or too old."""
    return proof_from_rows(
        rows_from_file(run.path / ROWS),
        trained=bool(record["weights"].get("trained", False)),
        classifies=bool(record["classifies"]),
        refused=len(record["parity"].get("refused") or ()),
    )
