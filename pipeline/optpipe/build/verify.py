"""Runs an artifact on the reference inputs and compares its outputs with the source model's, and the states of a trajectory."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd, inf, isfinite, nan
from pathlib import Path

import numpy as np

from optpipe.backends.base import Session
from optpipe.backends.plain_session import PlainSession
from optpipe.backends.selections import read_selection
from optpipe.core.card import ModelCard, Task
from optpipe.core.entries import OutputError, ReferenceInfo, VerificationInfo
from optpipe.core.errors import BadInputError, read_as_user_file
from optpipe.core.parquet import parse_parquet, read_parquet
from optpipe.core.precision import CALIBRATED, EXACT_DB
from optpipe.core.tables import require_columns
from optpipe.core.verdict import Blocker, Observation
from optpipe.core.wording import Argument, Call
from optpipe.evaluate.tasks.detection import Detection
from optpipe.models.artifacts.judged_build import JudgedBuild
from optpipe.models.export.exported import Reference
from optpipe.models.inputs.rows import count_rows, list_batches, run_rows
from optpipe.models.inputs.samples import CALIBRATED_ON, NOISE
from optpipe.stats.means import predict_next_upper_bound
from optpipe.stats.paired import (
    FEWEST_FOR_SNR,
    FEWEST_SAMPLES,
    RowErrors,
    Share,
    compare_rows,
    compute_snr_interval,
    compute_top1_accuracy,
    compute_top1_agreement,
    figure_from_samples,
    pool_errors,
)
from optpipe.stats.row_sums import find_broken_sums
from optpipe.stats.selected_rows import EMPTY, align_rows
from optpipe.workspace.entry import Entry
from optpipe.workspace.file_names import BUILDS, OUTPUT_ERRORS

TOLERATED_BOXES = 0.05
"""The share of boxes that may differ at any precision: a score near the limit may fall on either side of it."""


def verify_session(
    session: Session,
    card: ModelCard,
    tolerated: float,
    reference: Reference,
    about: ReferenceInfo,
    sizes: Sequence[int] = (),
    graph: Path | None = None,
) -> tuple[VerificationInfo, dict[str, RowErrors]]:
    """The worst result of all samples in the largest batches of the profile and in batches of each of `sizes`.

    Outputs that NMS or TopK inside a detector's source `graph` selects are compared with the graph's as boxes. Other selected
    rows are compared as sets: see `align_rows`.
    """
    selection = read_selection(graph) if graph else EMPTY
    selected = selection.outputs.keys() & reference.outputs.keys()
    compared, boxes = reference, None
    if graph and selected and card.task is Task.DETECTION:
        boxes = Detection().compare_outputs(card, reference.inputs, reference.outputs, session.run)
        if boxes is not None:
            others = {
                name: value for name, value in reference.outputs.items() if name not in selected
            }
            compared = replace(reference, outputs=others)
    checks = []
    for size in (None, *sizes):
        tensors = compared if size is None else fill_batches(compared, size)
        outputs = run_rows(card, tensors.inputs, session.run, size)
        outputs = align_rows(tensors.outputs, outputs, selection, tolerated)
        checks.append(compare_to_reference(card, tolerated, tensors, outputs, about, size))
    info, rows = min(
        checks,
        key=lambda check: (
            check[0].passed is not False,
            inf if check[0].snr_db is None else check[0].snr_db,
        ),
    )
    count = checks[0][0].samples
    kept: dict[str, RowErrors] = {
        name: {key: value[:count] for key, value in errors.items()} for name, errors in rows.items()
    }
    info = replace(
        info,
        samples=count,
        outputs=tuple(pool_errors(name, errors) for name, errors in kept.items()),
    )
    if boxes is not None:
        agree = info.passed is not False and boxes >= 1 - max(tolerated, TOLERATED_BOXES)
        info = replace(info, passed=agree, box_agreement=boxes)
    values = sum(output.size for output in reference.outputs.values())
    return replace(info, values=values, selected=tuple(sorted(selected))), kept


MOST_STEPS = 1000
STEPS_FORM = (
    "N, or N:STATE:TIME:START with the names of two inputs, such as 20:sample:timestep:1000"
)


@dataclass(frozen=True)
class Trajectory:
    """Euler steps of a flow: x ← x − output/steps, where the time input, if any, runs from `start` to start/steps.

    The start is the reference's input; the rest of the inputs stays as it is.
    """

    steps: int
    state: str
    output: str
    time: str | None
    start: float
    card: ModelCard
    inputs: Mapping[str, np.ndarray]
    source: Path
    """The user's ONNX file, or the exported graph of a module."""

    @property
    def name(self) -> str:
        """`sample after 20 steps (timestep from 1000)`."""
        return f"{self.state} after {self.steps} steps" + (
            f" ({self.time} from {self.start:g})" if self.time else ""
        )

    @property
    def recipe(self) -> list[str | float | None]:
        return [self.steps, self.state, self.output, self.time, self.start]

    @cached_property
    def expected(self) -> np.ndarray:
        with PlainSession(self.source) as source:
            final = self.run(source)
        if not np.isfinite(final).all():
            raise BadInputError(
                f"the source model's {self.name} is not finite",
                argument=Argument("steps", self.steps),
                remedy="give inputs from which the trajectory stays finite ("
                + Argument("data")
                + "), or leave "
                + Argument("steps")
                + " out",
            )
        return final

    def run(self, session: Session | PlainSession) -> np.ndarray:
        """The states after the last step (samples, ...), without samples that no batch held."""
        rows = dict(self.inputs)
        for step in range(self.steps):
            if self.time is not None:
                value, kind = self.start * (1 - step / self.steps), rows[self.time].dtype
                rows[self.time] = np.full_like(
                    rows[self.time], round(value) if kind.kind in "iu" else value
                )
            moved = (
                run_rows(self.card, rows, session.run)[self.output].astype(np.float32) / self.steps
            )
            rows = {name: value[: len(moved)] for name, value in rows.items()}
            with np.errstate(over="ignore", invalid="ignore"):
                rows[self.state] = (rows[self.state] - moved).astype(rows[self.state].dtype)
        return rows[self.state]

    def compare(self, session: Session) -> dict[str, RowErrors]:
        """The errors of each sample's state, by its name."""
        final = self.run(session)
        return {self.name: compare_rows(self.expected[: len(final)], final)}


def parse_steps(text: str) -> tuple[int, str, str, str, float]:
    """N, STATE, TIME, and START of `--steps N[:STATE[:TIME[:START]]]`, and START as a number. Raises BadInputError."""
    number, state, time, start = (*text.split(":", 3), "", "", "")[:4]
    steps = int(number) if number.isdecimal() else 0
    try:
        first = float(start or 1)
    except ValueError:
        first = nan
    if not 1 <= steps <= MOST_STEPS or not isfinite(first):
        raise BadInputError(
            f"expected {STEPS_FORM}; N is at most {MOST_STEPS}", argument=Argument("steps", text)
        )
    return steps, state, time, start, first


def read_trajectory(text: str, card: ModelCard, reference: Reference, source: Path) -> Trajectory:
    """Reads `--steps`. STATE may be left out if one input has the shape of an output, and TIME if one is a single number for each
    sample; START is 1, and 1000 if TIME is an integer. Raises BadInputError.
    """
    steps, state, time, start, first = parse_steps(text)
    inputs = reference.inputs
    shapes = {
        value.shape: name
        for name, value in reversed([*reference.outputs.items()])
        if value.dtype.kind == "f"
    }
    states = [
        name for name, value in inputs.items() if value.dtype.kind == "f" and value.shape in shapes
    ]
    times = [name for name, value in inputs.items() if value[0].size == 1 and name not in states]
    if not states:
        raise BadInputError(
            f"no input of {card.name} has the type and shape of an output, to become the next state",
            argument=Argument("steps", text),
        )
    if (state and state not in states) or (not state and len(states) > 1):
        raise BadInputError(
            "name the state as "
            + Argument("steps", f"{steps}:STATE")
            + f", one of {', '.join(states)}",
            argument=Argument("steps", text),
        )
    if (
        (time and time not in inputs)
        or time == (state or states[0])
        or (not time and len(times) > 1)
    ):
        known = times or [name for name in inputs if name not in states]
        raise BadInputError(
            "name the time as "
            + Argument("steps", f"{steps}:STATE:TIME")
            + f", one of {', '.join(known)}",
            argument=Argument("steps", text),
        )
    state, chosen = state or states[0], time or next(iter(times), None)
    if start and chosen is None:
        raise BadInputError(
            f"{card.name} has no input with one number for each sample to start from {start}",
            argument=Argument("steps", text),
        )
    if not start and chosen is not None and inputs[chosen].dtype.kind in "iu":
        first = 1000.0
    return Trajectory(
        steps, state, shapes[inputs[state].shape], chosen, first, card, inputs, source
    )


def fill_batches(reference: Reference, size: int) -> Reference:
    """The samples repeated until they fill batches of `size`."""
    times = size // gcd(count_rows(reference.inputs), size)
    inputs, outputs = (
        {name: np.concatenate([rows] * times) for name, rows in side.items()}
        for side in (reference.inputs, reference.outputs)
    )
    return Reference(
        inputs,
        outputs,
        None if reference.labels is None else np.concatenate([reference.labels] * times),
    )


def compare_to_reference(
    card: ModelCard,
    tolerated: float,
    reference: Reference,
    actual: Mapping[str, np.ndarray],
    about: ReferenceInfo,
    size: int | None = None,
) -> tuple[VerificationInfo, dict[str, RowErrors]]:
    """Outputs (samples, ...) of batches of `size` by name against the reference's, without samples that no batch held; and the
    errors of each sample by output.

    Agreement only for classifiers whose reference predictions vary.
    """
    total = count_rows(reference.inputs)
    count = sum(part.stop - part.start for part in list_batches(card, reference.inputs, size))
    expected = {
        name: value[:count] if len(value) == total else value
        for name, value in reference.outputs.items()
    }
    rows = {name: compare_rows(value, actual[name]) for name, value in expected.items()}
    errors = tuple(pool_errors(name, errors) for name, errors in rows.items())
    values = sum(
        value.size for value in reference.outputs.values()
    )  # a detector may have found nothing to compare
    agreement = accuracy = source_accuracy = None
    if card.task in (Task.CLASSIFICATION, Task.TEXT_CLASSIFICATION):
        name = next(iter(reference.outputs))
        source, scores = expected[name], actual[name].astype(np.float32)
        agreement = compute_top1_agreement(source, scores)
        if reference.labels is not None:
            accuracy = compute_top1_accuracy(reference.labels[:count], scores)
            source_accuracy = compute_top1_accuracy(reference.labels[:count], source)
    info = VerificationInfo(
        reference=about.origin,
        samples=count,
        tolerance_relative=tolerated,
        snr_db=min((error.snr_db for error in errors if error.snr_db is not None), default=None),
        top1_agreement=agreement,
        top1_accuracy=accuracy,
        source_top1_accuracy=source_accuracy,
        outputs=errors,
        values=values,
        passed=all(error.finite and error.relative <= tolerated for error in errors)
        if values
        else None,
        data=about.data,
    )
    return info, rows


def observe_outputs(
    checked: Entry[VerificationInfo], build: JudgedBuild, confidence: float
) -> dict[str, dict[str, Observation]]:
    """`snr` (dB), `cosine`, `agreement` (fraction) and `abs_error` of each output and state, from the errors of each sample.

    Empty if these are missing or not those of `checked`, and for an output without values. The cosine is the mean over samples,
    the error the largest, up to a bound for the next sample.
    """
    with read_as_user_file(checked.path / OUTPUT_ERRORS, "errors of outputs"):
        return {
            name: _observe_output(name, rows, checked, build, confidence)
            for name, rows in read_output_errors(checked).items()
            if rows["values"].any()
        }


def recompute_outputs(checked: Entry[VerificationInfo]) -> tuple[OutputError, ...]:
    """The errors of each output, then of the state, from those of each sample; empty if these are missing."""
    with read_as_user_file(checked.path / OUTPUT_ERRORS, "errors of outputs"):
        return tuple(pool_errors(name, rows) for name, rows in read_output_errors(checked).items())


def find_impossible_errors(checked: Entry[VerificationInfo]) -> Iterator[str]:
    """The rules that the errors of samples break: they are not those of two outputs."""
    yield from find_broken_sums(read_parquet(checked.files, OUTPUT_ERRORS))
    for name, rows in read_output_errors(checked).items():
        if len(rows["values"]) > checked.info.samples:
            yield f"{name} has more rows than the {checked.info.samples:,} samples of its record"


def read_output_errors(checked: Entry[VerificationInfo]) -> dict[str, RowErrors]:
    """The errors of each sample by output; empty if they are missing or not those of `checked`."""
    if OUTPUT_ERRORS not in checked.manifest.files or not checked.files.has(OUTPUT_ERRORS):
        return {}
    content = checked.files.read(OUTPUT_ERRORS)
    if hashlib.sha256(content).hexdigest() != checked.sha256(OUTPUT_ERRORS):
        return {}
    place = checked.path / OUTPUT_ERRORS
    frame = require_columns(parse_parquet(content, place), "errors", place)
    parts = frame.group_by("output", maintain_order=True)
    return {
        str(key): {column: part[column].to_numpy() for column in part.columns if column != "output"}
        for (key,), part in parts
    }


def _observe_output(
    name: str,
    rows: RowErrors,
    checked: Entry[VerificationInfo],
    build: JudgedBuild,
    confidence: float,
) -> dict[str, Observation]:
    count, data = len(rows["values"]), checked.info.data
    kind = "state" if name in {state.name for state in checked.info.trajectory} else "output"
    about = f"{kind} {name}, {count} samples of {data}"
    steps = str(checked.info.steps) if kind == "state" else None
    more = build.choose_way(Call("build", build.argument, data="PATH", steps=steps))
    same = rows["output_best"] == rows["reference_best"]
    hits, pooled = int(same.sum()), pool_errors(name, rows)
    share = Share(hits, count)
    with np.errstate(invalid="ignore", divide="ignore"):
        product = rows["product"] / np.sqrt(rows["reference_square"] * rows["output_square"])
    cosines = np.where(np.isnan(product), rows["difference_square"] == 0, product) * rows["finite"]
    cosine = figure_from_samples(float(cosines.mean()), cosines, count, (-1.0, 1.0))
    peaks = [float(peak) for peak in rows["difference_max"]] if pooled.finite else [inf]
    bound = predict_next_upper_bound(peaks, confidence) if pooled.finite else inf
    snr = EXACT_DB if pooled.snr_db is None else max(pooled.snr_db, -EXACT_DB)
    extent = (
        compute_snr_interval(rows, confidence)
        if pooled.finite and pooled.snr_db is not None
        else (snr, snr)
    )
    low, high = extent or (None, None)
    blockers = []
    if data == NOISE:
        blockers.append(
            Blocker("the outputs were compared on noise", "build on real inputs: " + more)
        )
    if data.endswith(CALIBRATED_ON) and build.precision in CALIBRATED:
        blockers.append(
            Blocker("the outputs were compared on the calibration samples", "give others: " + more)
        )
    if count < FEWEST_SAMPLES:
        blockers.append(
            Blocker(
                f"{count} samples are too few for an interval", f"give {FEWEST_SAMPLES}: " + more
            )
        )
    scattered = Blocker(
        f"fewer than {FEWEST_FOR_SNR} samples share the error", "give more samples: " + more
    )
    alike = Blocker(
        "the largest values lie at the same places for every sample",
        "give samples that differ: " + more,
    )
    observations = {
        "snr": Observation(snr, low, high, () if extent else (scattered,)),
        "cosine": Observation(cosine.value, *cosine.interval(confidence), tail=cosine),
        "agreement": Observation(share.value, *share.interval(confidence), tail=share),
        "abs_error": Observation(max(peaks), max(peaks), max(*peaks, bound or inf)),
    }
    if len(np.unique(rows["reference_best"])) < 2:
        observations["agreement"] = replace(observations["agreement"], blockers=(alike,))
    source = f"{BUILDS}/{checked.name}/{OUTPUT_ERRORS}"
    return {
        key: replace(
            observation, blockers=(*blockers, *observation.blockers), about=about, source=source
        )
        for key, observation in observations.items()
    }
