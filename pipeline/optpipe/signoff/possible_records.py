"""Values that no machine, no data set, and no proof has, and values that two records cannot both have.

The rules of section 2.1 of docs/dossier-format.md on environments, evaluations, preprocessing, and rows of errors; those on
builds and requests are in `record_rules`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import combinations
from math import inf, isclose, isfinite
from typing import Any

import polars as pl

from optpipe.core.card import Task
from optpipe.core.entries import Environment, GraphInfo
from optpipe.core.files import hash_text
from optpipe.core.measurement import Measurement
from optpipe.evaluate.possible_answers import Known, find_impossible_answers
from optpipe.evaluate.recompute import read_evaluation, read_predictions
from optpipe.evaluate.result import Evaluation
from optpipe.preprocess.proof import PreprocessRecord
from optpipe.signoff.dossier import DossierRequest
from optpipe.workspace.entry import Entry, Run
from optpipe.workspace.file_names import PREDICTIONS
from optpipe.workspace.files import FileHash

COMPUTE_CAPABILITIES = {
    "V100": "7.0",
    "T4": "7.5",
    "A100": "8.0",
    "A10": "8.6",
    "A40": "8.6",
    "L4": "8.9",
    "L40": "8.9",
    "L40S": "8.9",
    "H100": "9.0",
    "H200": "9.0",
    "GH200": "9.0",
    "B200": "10.0",
    "GB200": "10.0",
}
"""By a word of the GPU's name (NVIDIA's list of CUDA GPUs)."""
HASH = r"^[0-9a-f]{64}$"
ROUNDING = 1e-6
TIES, TIED_SHARE = 2, 0.01
"""So many first classes of one engine may differ between two evaluations of the same samples, whose outputs are nearly equal."""
LEVELS = 255.0
SIX_DIGITS = 1e-5
"""A tolerance is written with six digits."""


@dataclass(frozen=True, slots=True)
class Stated:
    """What the records of a dossier state about things that occur in several of them."""

    environments: Mapping[str, Environment]
    """By the place of the record."""
    files: Sequence[tuple[str, FileHash]]
    """With the place of each."""


def find_other_facts(stated: Stated) -> Iterator[str]:
    """GPUs that are none, and files of one hash that have two sizes."""
    known: dict[str, str] = {}
    for place, environment in stated.environments.items():
        if environment.cpu_count is not None and environment.cpu_count < 1:
            yield f"{place}: a machine with {environment.cpu_count} processors"
        for gpu in environment.gpus:
            words = re.findall(r"[A-Za-z0-9]+", gpu.name)
            expected = {
                COMPUTE_CAPABILITIES[word] for word in words if word in COMPUTE_CAPABILITIES
            }
            expected |= {known.setdefault(gpu.name, gpu.compute_capability)}
            if expected != {gpu.compute_capability} or gpu.memory_bytes <= 0:
                yield f"{place}: no {gpu.name} has compute capability {gpu.compute_capability} and {gpu.memory_bytes:,} bytes"
    sizes = {hash_text(""): 0}
    for place, file in stated.files:
        if sizes.setdefault(file.sha256, file.size_bytes) != file.size_bytes or (
            file.size_bytes == 0 and file.sha256 != hash_text("")
        ):
            yield f"{place}: {file.size_bytes:,} bytes with the SHA-256 {file.sha256}"


def check_previous(request: DossierRequest) -> Iterator[str]:
    """Of the earlier sign-off: its date, and figures inside their intervals."""
    previous = request.previous
    if previous is None:
        return
    before, now = map(datetime.fromisoformat, (previous.created_utc, request.created_utc))
    if before > now:
        yield f"the earlier sign-off is of {previous.created_utc}"
    for name, figure in previous.figures.items():
        if not figure.low <= figure.value <= figure.high:
            yield f"the earlier {name} is {figure.value:g}, from {figure.low:g} to {figure.high:g}"


def check_output_check(measurement: Measurement) -> Iterator[str]:
    check = measurement.output_check
    if check is None:
        return
    if not 0 <= check.checked <= measurement.load.output_checks:
        yield f"{measurement.id}: {check.checked} of {measurement.load.output_checks} outputs were checked"
    if not check.passed and "wrong-output" not in {reason.code for reason in measurement.reasons}:
        yield f"{measurement.id}: an output was wrong, and no reason says so"
    error, most = check.relative_error, (check.tolerance or "").rpartition(" ")[2]
    if error is not None and not (error >= 0 and isfinite(error)):
        yield f"{measurement.id}: its outputs differ by {error:g}"
    elif check.passed and (error or 0.0) > _read_number(most) * (1 + SIX_DIGITS):
        yield f"{measurement.id}: outputs that differ by {error:g} passed with {check.tolerance!r}"


def _read_number(word: str) -> float:
    """Infinite for another word."""
    return float(word) if re.fullmatch(r"[0-9.]+(e[+-]?[0-9]+)?", word) else inf


def check_data(evaluated: Evaluation, run: Run) -> Iterator[str]:
    data = evaluated.dataset
    if len(set(data.unreadable)) < len(data.unreadable):
        yield "a sample occurs twice among those that could not be read"
    if not 0 <= data.truncated <= data.count:
        yield f"{data.truncated} of {data.count} texts were cut"
    if evaluated.accuracy_budget is not None and not evaluated.accuracy_budget >= 0:
        yield f"its budget is {evaluated.accuracy_budget:g}"
    if run.files.has(PREDICTIONS):
        hashes = read_predictions(run)["sha256"]
        if not (hashes.null_count() == 0 and hashes.str.contains(HASH).all()):
            yield f"{PREDICTIONS} has a sample whose SHA-256 is none"


def check_calibration(evaluated: Evaluation, builds: Mapping[str, Entry[Any]]) -> Iterator[str]:
    """A build that was calibrated on the very set on which it was evaluated, and does not say so."""
    for row in evaluated.results:
        build = builds.get(row.artifact or "")
        parents = build.manifest.parents if build else ()
        graphs = [builds[parent].info for parent in parents if parent in builds]
        sets = {graph.set.sha256 for graph in graphs if isinstance(graph, GraphInfo) and graph.set}
        if evaluated.dataset.sha256 in sets and row.calibrated_on != row.samples:
            yield f"{row.artifact} was calibrated on its {row.samples} samples, and says {row.calibrated_on}"


def find_other_predictions(runs: Iterable[Run]) -> Iterator[str]:
    """Two evaluations of one classifier's engine on the same samples, with other predictions."""
    evaluated = [(run, read_evaluation(run)) for run in runs if run.kind == "evaluate"]
    for (run, before), (later, after) in combinations(evaluated, 2):
        if (before.dataset.sha256, before.model_id, before.task) != (
            after.dataset.sha256,
            after.model_id,
            after.task,
        ) or not all(side.files.has(PREDICTIONS) for side in (run, later)):
            continue
        first, second = read_predictions(run), read_predictions(later)
        files = [
            {row.artifact: row.sha256 for row in evaluation.results}
            for evaluation in (before, after)
        ]
        for artifact in files[0].keys() & files[1].keys():
            name = f"{artifact or 'source'}:best"
            hashes = {hashes_of[artifact] for hashes_of in files} - {None}
            if len(hashes) > 1 or name not in first.columns or name not in second.columns:
                continue
            both = first.select("path", mine=pl.col(name).list.first()).join(
                second.select("path", theirs=pl.col(name).list.first()), on="path"
            )
            apart = both.filter(pl.col("mine") != pl.col("theirs")).height
            if apart > TIES + TIED_SHARE * both.height:
                yield f"{run.name} and {later.name}: {apart} of {both.height} predictions of {name.partition(':')[0]} differ"


def check_preprocessing(record: PreprocessRecord, rows: pl.DataFrame, run: Run) -> Iterator[str]:
    yield from _find_classes_beyond(rows)
    parity = record.parity
    stated = (record.model, record.trained)
    if (
        run.info.model or record.model,
        stated[1] if run.info.trained is None else run.info.trained,
    ) != stated:
        yield f"it is of {record.model!r}, trained {record.trained}, and its manifest says otherwise"
    if not rows.height <= record.images.count or not 0 <= parity.far <= rows.height:
        yield f"{rows.height} of {record.images.count} images were compared, and {parity.far} are far apart"
    for step in parity.steps:
        possible = 0 <= step.mean_levels <= step.max_levels * (1 + ROUNDING)
        if not (possible and 0 <= step.off_share <= 1 and 0 <= step.images <= record.images.count):
            yield f"the differences after {step.step} are none"
    if {"mean_levels", "max_levels"} <= set(rows.columns):
        levels = {
            name: levels_of
            for name, *levels_of in rows.select("image", "mean_levels", "max_levels").rows()
        }
        if not all(
            0 <= mean <= most * (1 + ROUNDING) < 2 * LEVELS for mean, most in levels.values()
        ):
            yield "the levels of an image are none"
        for sample in parity.worst:
            expected = levels.get(sample.image)
            if expected is None or not all(
                isclose(mine, theirs, rel_tol=ROUNDING, abs_tol=ROUNDING)
                for mine, theirs in zip(
                    (sample.mean_levels, sample.max_levels), expected, strict=True
                )
            ):
                yield f"the levels of {sample.image} are not those of its row"
    if record.task in (Task.DETECTION, Task.SEGMENTATION):
        yield from find_impossible_answers(record.task, Known(2**8), rows)


def find_impossible_classes(rows: pl.DataFrame, reference: str, output: str) -> Iterator[str]:
    """Equal vectors whose largest values lie at two places."""
    if not {reference, output, "difference_square", "finite"} <= set(rows.columns):
        return
    equal = rows.filter((pl.col("difference_square") == 0) & pl.col("finite"))
    if equal.filter(pl.col(reference) != pl.col(output)).height:
        yield f"{reference} and {output} differ for equal outputs"


def _find_classes_beyond(rows: pl.DataFrame) -> Iterator[str]:
    """Classes of images that are no places of their outputs' values."""
    names = {"reference_class", "dali_class"} & set(rows.columns)
    for name in names if "values" in rows.columns else ():
        if rows.filter(~pl.col(name).is_between(0, pl.col("values") - 1)).height:
            yield f"{name} is none of the output's"
