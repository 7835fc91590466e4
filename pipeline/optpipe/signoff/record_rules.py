"""What no record states, and what two records cannot both state: section 2.1 of docs/dossier-format.md, in its order.

A record that was edited with every hash put right shows itself where it says a thing twice: shares that add up to more than
all, a verification that passed with errors above its tolerance, a row of another precision than its build.
"""

import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from math import isclose
from typing import Any

from optpipe.core.entries import (
    ArtifactInfo,
    CalibrationInfo,
    GraphInfo,
    ReferenceInfo,
    VerificationInfo,
)
from optpipe.core.measurement import read_measurements
from optpipe.core.parquet import read_parquet
from optpipe.core.records import record_from_files
from optpipe.evaluate.recompute import read_evaluation
from optpipe.evaluate.result import Evaluation
from optpipe.preprocess.proof import PreprocessRecord
from optpipe.preprocess.throughput import ThroughputRecord, ThroughputTuning, compute_speedup
from optpipe.signoff.dossier import Dossier, DossierRequest
from optpipe.signoff.possible_records import (
    Stated,
    check_calibration,
    check_data,
    check_output_check,
    check_preprocessing,
    check_previous,
    find_impossible_classes,
    find_other_facts,
    find_other_predictions,
)
from optpipe.trace.report import ProfileRecord
from optpipe.workspace.entry import MANIFEST, Entry, Run
from optpipe.workspace.file_names import (
    BUILDS,
    OUTPUT_ERRORS,
    PREDICTIONS,
    PREPROCESSING,
    PROFILE,
    REQUEST,
    ROWS,
)

ROUNDING = 1e-6
"""By how much shares may exceed 1, and by which share figures may differ."""
LOOSEST = 2.0
"""A verification is judged by the batches that fit worst, and states the errors of all samples."""
SNR_APART_DB = 3.0
MOST_LOOKS = 1_000_000
"""Of baselines, of verifications, and of builds, which nobody compares so often."""


def find_contradicting_records(dossier: Dossier) -> Iterator[str]:
    """One line for each rule that a record breaks, with the place of the record."""
    builds = {build.id: build for build in dossier.builds}
    yield from (f"{REQUEST}: {wrong}" for wrong in _check_request(dossier.request, dossier))
    for entry in dossier.builds:
        place = f"{BUILDS}/{entry.path.name}"
        problems = (*_check_sizes(entry), *_check_build(entry), *_check_parents(entry, builds))
        yield from (f"{place}: {wrong}" for wrong in problems)
    for run in (*dossier.every_run, *dossier.baseline_runs):
        place = run.files.prefix.rstrip("/")
        problems = (*_check_sizes(run), *_check_run(run, builds))
        yield from (f"{place}: {wrong}" for wrong in problems)
    yield from find_other_facts(_list_facts(dossier))
    yield from find_other_predictions(dossier.every_run)


def _list_facts(dossier: Dossier) -> Stated:
    records: list[tuple[str, Entry[Any] | Run]] = [
        (f"{BUILDS}/{entry.path.name}", entry) for entry in dossier.builds
    ]
    records += [
        (run.files.prefix.rstrip("/"), run) for run in (*dossier.every_run, *dossier.baseline_runs)
    ]
    return Stated(
        {place: record.manifest.environment for place, record in records},
        [
            (f"{place}/{name}", file)
            for place, record in records
            for name, file in record.manifest.files.items()
        ],
    )


def _check_sizes(entry: Entry[Any] | Run) -> Iterator[str]:
    for name, file in entry.manifest.files.items():
        if file.size_bytes < 0:
            yield f"{name} has {file.size_bytes} bytes"
        elif entry.files.has(name) and (size := len(entry.files.read(name))) != file.size_bytes:
            yield f"{name} has {size:,} bytes, not {file.size_bytes:,}"


def _check_build(entry: Entry[Any]) -> Iterator[str]:
    if isinstance(entry.info, ArtifactInfo):
        yield from _check_proof(entry.info)
    if isinstance(entry.info, VerificationInfo):
        yield from _check_verification(entry.info, entry.recipe.get("minimum_snr_db"))
        if entry.files.has(OUTPUT_ERRORS):
            rows = read_parquet(entry.files, OUTPUT_ERRORS)
            yield from find_impossible_classes(rows, "reference_best", "output_best")


def _check_proof(info: ArtifactInfo) -> Iterator[str]:
    proof, placed = info.precision_proof, info.precision_proof.placement
    for kind, shares in (("MACs", proof.share.macs), ("layers", proof.share.layers)):
        if sum(shares.values()) > 1 + ROUNDING:
            yield f"the shares of {kind} add up to {sum(shares.values()):g}"
    if proof.share.total_macs < 0:
        yield f"the network has {proof.share.total_macs} MACs"
    if proof.others_count < len(proof.others):
        yield f"{len(proof.others)} layers are of other types, but it counts {proof.others_count}"
    if placed and not (0 <= placed.share <= 1 and 0 <= placed.count <= placed.nodes):
        yield f"{placed.count} of {placed.nodes} nodes with a share of {placed.share:g} run elsewhere"


def _check_verification(info: VerificationInfo, asked_db: float | None) -> Iterator[str]:
    known = [output.snr_db for output in info.outputs if output.snr_db is not None]
    if min(info.samples, info.values) < 0:
        yield f"compares {info.samples} samples and {info.values} values"
    for output in info.outputs if info.passed else ():
        if not (output.finite and output.relative <= LOOSEST * info.tolerance_relative):
            yield f"passed, but {output.name} differs by {output.relative:g} (tolerated: {info.tolerance_relative:g})"
    if info.outputs and not info.trajectory:
        stated, lowest = info.snr_db, min(known, default=None)
        apart = stated is not None and lowest is not None and abs(stated - lowest) > SNR_APART_DB
        if apart or (stated is None) != (lowest is None):
            yield f"its SNR is {stated} dB, and the lowest of its outputs {lowest} dB"
    if asked_db is not None:
        tolerated = 10 ** (-asked_db / 20)
        if not isclose(info.tolerance_relative, tolerated, rel_tol=ROUNDING):
            yield f"tolerates {info.tolerance_relative:g}, but its recipe says {tolerated:g}"


def _check_parents(entry: Entry[Any], builds: Mapping[str, Entry[Any]]) -> Iterator[str]:
    """What a record repeats of those that it was made from."""
    info = entry.info
    for parent in (builds[parent] for parent in entry.manifest.parents if parent in builds):
        match info, parent.info:
            case GraphInfo(), CalibrationInfo() if info.set != parent.info.set:
                yield f"its set of samples is not that of {parent.name}"
            case VerificationInfo(), ReferenceInfo() if info.data != parent.info.data:
                yield f"compares samples of {info.data!r}, and {parent.name} has others"


def _check_rows(evaluated: Evaluation, run: Run) -> Iterator[str]:
    columns = set[str]()
    if run.files.has(PREDICTIONS):
        columns = set(read_parquet(run.files, PREDICTIONS).columns)
        truths = bool(columns & {"class", "truth"})
        if evaluated.dataset.labeled != truths:
            yield f"labeled is {evaluated.dataset.labeled}, and {PREDICTIONS} tells otherwise"
    if evaluated.model != run.info.model:
        yield f"evaluated {evaluated.model!r}, and {MANIFEST} says {run.info.model!r}"
    for row in evaluated.results:
        name = row.artifact or "source"
        whose = (row.backend, row.precision, row.calibrated_on, row.sha256)
        if row.artifact is None and whose != ("source", "source", 0, None):
            yield "the row of the source model says that it is of a build"
        if columns & {f"{name}:best", f"{name}:prediction"} and (row.failed or row.why_not):
            yield f"{name} has predictions, and its row says that it failed"


def _check_run(run: Run, builds: Mapping[str, Entry[Any]]) -> Iterator[str]:
    if run.kind == "evaluate":
        evaluated = read_evaluation(run)
        yield from _check_rows(evaluated, run)
        yield from check_data(evaluated, run)
        yield from check_calibration(evaluated, builds)
        for row in evaluated.results:
            if (build := builds.get(row.artifact or "")) is not None:
                yield from _compare_with_record(
                    {"backend": row.backend, "precision": row.precision, "device": row.device},
                    build,
                )
                if evaluated.model_id not in build.manifest.parents:
                    yield f"evaluated model {evaluated.model_id}, and {build.id} is of another one"
    if run.kind == "profile":
        for stage in record_from_files(run.files, PROFILE, ProfileRecord).stages:
            if (build := builds.get(stage.subject.artifact or "")) is not None:
                subject = stage.subject
                yield from _compare_with_record(
                    {"precision": subject.precision, "device": subject.device}, build
                )
    if run.kind == "bench":
        for measurement in read_measurements(run.files):
            yield from check_output_check(measurement)
    if run.kind == "preprocess":
        record = record_from_files(run.files, PREPROCESSING, PreprocessRecord)
        yield from () if record.throughput is None else _check_rounds(record.throughput)
        if run.files.has(ROWS):
            rows = read_parquet(run.files, ROWS)
            yield from check_preprocessing(record, rows, run)
            yield from find_impossible_classes(rows, "reference_class", "dali_class")


def _compare_with_record(stated: Mapping[str, str | None], build: Entry[Any]) -> Iterator[str]:
    for name, value in stated.items():
        expected = str(getattr(build.info, name))  # built for `cuda`, run on `cuda:0`
        if value is not None and value.partition(":")[0] != expected:
            yield f"{name} of {build.id} is {value!r}, but {BUILDS}/{build.path.name} says {expected!r}"


def _check_request(request: DossierRequest, dossier: Dossier) -> Iterator[str]:
    present = {run.name for run in dossier.every_run}
    if request.model != dossier.artifact.info.model:
        yield f"model is {request.model!r}, and the build is of {dossier.artifact.info.model!r}"
    of_baseline = (request.baseline_artifact, request.baseline_network)
    if not (0 < request.baselines <= MOST_LOOKS and 0 < request.verifications <= MOST_LOOKS):
        yield f"{request.baselines} baselines and {request.verifications} verifications"
    yield from _check_candidates(request, dossier)
    for key in ("backend", "precision"):
        asked, judged = dossier.policy.build.get(key), str(getattr(dossier.artifact.info, key))
        if asked not in (None, judged):
            yield f"the policy asks for a build of {key} {asked!r}, and {judged!r} was judged"
    if request.verifier and not re.fullmatch("[0-9a-f]{64}", request.verifier):
        yield f"its verifier has the SHA-256 {request.verifier!r}"
    yield from check_previous(request)
    if request.baseline is None and (dossier.baseline_runs or of_baseline != (None, None)):
        yield "something of a baseline is there, and it names none"
    for kind, names in (("removed", request.removed), ("other_file", request.other_file)):
        if len(set(names)) < len(names):
            yield f"a run occurs twice in {kind}"
        if there := present & set(names):
            yield f"{kind} names {', '.join(sorted(there))}, which is in the dossier"
    if request.since is not None:
        since, created = map(datetime.fromisoformat, (request.since, request.created_utc))
        if since > created:
            yield f"since {request.since} is after created {request.created_utc}"
    checked = [
        build
        for build in dossier.builds
        if isinstance(build.info, VerificationInfo) and request.artifact in build.manifest.parents
    ]
    if request.verifications < len(checked):
        yield f"{request.verifications} verifications, but the dossier has {len(checked)}"


def _check_candidates(request: DossierRequest, dossier: Dossier) -> Iterator[str]:
    there = {
        run.name
        for run in dossier.every_run
        if run.kind in ("bench", "evaluate") and request.artifact in run.manifest.parents
    }
    for name, count in request.candidates.items():
        if name not in there:
            yield f"candidates names {name}, which is no bench run or evaluation of the build"
        if not 0 < count <= MOST_LOOKS:
            yield f"it was one of {count} builds"


def _check_rounds(tuning: ThroughputTuning) -> Iterator[str]:
    for side in (tuning.dataloader, tuning.dali):
        rates = side.repeats_images_per_s
        if min((side.images_per_s or 0.0, *rates)) <= 0 or side.batches < 0:
            yield f"{side.implementation}: a rate or a number of batches is impossible"
            return
        if rates and not _lies_within(side):
            yield f"{side.implementation}: its rate is not between those of its rounds"
    speedup, interval = compute_speedup(tuning.dataloader, tuning.dali)
    figures, stated = (speedup, *(interval or ())), (tuning.speedup, *(tuning.speedup_ci or ()))
    if len(figures) != len(stated) or not all(
        isclose(figure, said, rel_tol=ROUNDING)
        for figure, said in zip(figures, stated, strict=True)
    ):
        yield f"the speedup is {tuning.speedup:g}, but the rounds give {speedup:g}"


def _lies_within(side: ThroughputRecord) -> bool:
    rates, rate = side.repeats_images_per_s, side.images_per_s or 0.0
    return min(rates) * (1 - 1e-9) <= rate <= max(rates) * (1 + 1e-9)
