"""`optpipe bench --from-images`: every artifact fed from a folder of files, overlapped, with its bottleneck named."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from optpipe.artifacts.lookup import StoredArtifact
from optpipe.core.events import Listener
from optpipe.core.verdict import Verdict, combine_verdicts
from optpipe.end_to_end.end_to_end import EndToEndResult, measure_end_to_end
from optpipe.errors import BadInputError, ExitStatus
from optpipe.inputs.images import find_readable_images, format_unreadable
from optpipe.preprocess.dali.pipeline import DaliPlan, require_dali
from optpipe.preprocess.preprocess import MAX_SECONDS, choose_dali_plan, require_image_transform
from optpipe.preprocess.throughput.throughput import warm_page_cache, warn_about_other_load
from optpipe.workspace.environment import count_cores
from optpipe.workspace.file_names import PREPROCESSING
from optpipe.workspace.manifest import get_command_line
from optpipe.workspace.runs import (
    OpenRun,
    finish_run,
    list_runs,
    open_run,
    write_json,
    write_parquet,
)
from optpipe.workspace.store import Store

MAX_FILES = 4096
"""More files than this are not needed to measure a steady state; they are spread over the whole folder."""

NOISE = 0.05
"""By so much the whole may seem faster than its slower part."""


@dataclass(frozen=True, slots=True)
class FromImagesResult:
    """What was measured."""

    results: tuple[EndToEndResult, ...]
    record: Mapping[str, Any]

    @property
    def status(self) -> ExitStatus:
        """A failed measurement before a wrong answer before one that proves nothing."""
        if any(each.error for each in self.results):
            return ExitStatus.STAGE_FAILED
        return combine_verdicts(each.verdict for each in self.results).exit_status


def bench_from_images(
    artifacts: Sequence[StoredArtifact],
    images: Path,
    batch_size: int | None,
    seconds: float,
    options: Mapping[str, Mapping[str, Any]],
    store: Store,
    listener: Listener,
) -> FromImagesResult:
    """Measures each artifact with the DALI configuration that `optpipe preprocess` found fastest here.

    Raises BadInputError for models without image preprocessing and for unusable images, MissingError without DALI.
    """
    require_dali()
    if not 0 < seconds <= MAX_SECONDS:
        raise BadInputError(f"--min-time {seconds:g}: must be greater than 0 and at most {MAX_SECONDS:g}")
    for each in artifacts:
        each.resolve_effective_options(options)  # refuses what is no option
    found = find_readable_images(images, MAX_FILES, threads=count_cores())
    if found.unreadable:
        listener.warn(
            f"{len(found.unreadable)} images cannot be read and are skipped: {format_unreadable(found.unreadable)}"
        )
    size_bytes = warm_page_cache(found.paths)
    results = []
    for each in artifacts:
        transform = require_image_transform(each.card)
        plan = choose_plan(each, batch_size, store, listener)
        with listener.step(f"files to predictions, {each.label}"):
            results.append(
                measure_end_to_end(
                    each.entry,
                    each.label,
                    transform,
                    found.paths,
                    plan,
                    each.given(options),
                    seconds,
                    store,
                )
            )
    for one in results:
        if one.error is None:
            warn_about_other_load(one.measured["other_cpu_cores"], one.label, listener)
        if one.error is None and one.of_slower_part > 1 + NOISE:
            listener.warn(
                f"{one.label}: {one.of_slower_part:.2f} times as fast as its slower stage: the stages were disturbed "
                "when measured alone; repeat on an idle machine"
            )
    with open_run(store.workspace, "preprocess") as run:
        record = _write_run(results, artifacts, found.paths, images, size_bytes, run)
    return FromImagesResult(tuple(results), record)


def choose_plan(artifact: StoredArtifact, batch_size: int | None, store: Store, listener: Listener) -> DaliPlan:
    """The newest tuned plan for this model on this device, cut to the artifact's profile; else DALI's usual settings."""
    on_gpu = artifact.entry.info["device"] == "cuda"
    plan = find_tuned_plan(artifact.card.name, store, gpu=on_gpu)
    if plan is None:
        plan = choose_dali_plan("mixed" if on_gpu else "cpu", None, None, "exact")
        tune = f"optpipe preprocess {artifact.card.name}"
        listener.warn(
            f"DALI is not tuned for {artifact.card.name} on this machine; run `{tune}` first for best performance"
        )
    spec = artifact.card.inputs[0]
    wanted = batch_size or min(plan.batch_size, spec.max[0])
    if not spec.min[0] <= wanted <= spec.max[0]:
        wider = f"{spec.min[0]}:{wanted}:{max(wanted, spec.max[0])}"
        raise BadInputError(
            f"batch size {wanted} is outside the profile {spec.min[0]}…{spec.max[0]} of {artifact.label}\n"
            f"`optpipe build {artifact.card.name} --batch {wider}` builds one that includes it"
        )
    return replace(plan, batch_size=wanted)


def find_tuned_plan(model: str, store: Store, *, gpu: bool) -> DaliPlan | None:
    """What the newest `optpipe preprocess` of `model` that did not FAIL found fastest on this kind of device, or None."""
    for run in reversed(list_runs(store.workspace, "preprocess")):
        file = run.path / PREPROCESSING
        if run.manifest["details"].get("model") != model or not file.is_file():
            continue
        record = json.loads(file.read_text(encoding="utf-8"))
        tuned = record["tuned"]
        if tuned is None or record["verdict"] == Verdict.FAIL or (tuned["plan"]["device"] == "gpu") != gpu:
            continue
        if set(tuned["plan"]) == set(DaliPlan().to_dict()):  # another version's plan means something else
            return DaliPlan(**tuned["plan"])
    return None


def _write_run(
    results: Sequence[EndToEndResult],
    artifacts: Sequence[StoredArtifact],
    paths: Sequence[Path],
    images: Path,
    size_bytes: int,
    run: OpenRun,
) -> dict[str, Any]:
    """Writes the run folder: the record and the raw times of every batch."""
    import polars as pl

    names = ("batch_ns", "latency_ns", "wait_ns", "launch_ns", "answer_ns")
    for each in results:
        if each.error is None:
            columns = {name: each.measured[name] for name in names}
            write_parquet(run.path / f"{each.artifact}.parquet", pl.DataFrame(columns))
    record = {
        "from_images": {"folder": str(images), "count": len(paths), "bytes": size_bytes, "page_cache": "warm"},
        "results": [each.to_dict() for each in results],
        "verdict": str(combine_verdicts([each.verdict for each in results]) if results else Verdict.INCONCLUSIVE),
        "run_dir": str(run.path),
    }
    write_json(run.path / "from-images.json", record)
    finish_run(
        run,
        command=shlex.split(get_command_line()),
        parents=tuple(each.entry.id for each in artifacts),
        details={"from_images": str(images)},
    )
    return record
