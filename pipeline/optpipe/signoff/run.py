"""The whole walk as plain calls: build, evaluate, preprocess, bench, profile, sign off, in this order.

An interrupted walk goes on after its last finished step: finished steps are noted under `walks/`, by everything that
decides them (the artifacts, the policy, the settings, the content of the data, the machine). A finished walk clears its
notes, so that the next one measures again: a timing is never answered from a cache.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from pathlib import Path
from time import monotonic

from optpipe import __version__
from optpipe.build.build import BuildPlan, build_model, require_artifacts
from optpipe.build.records import ModelBuild
from optpipe.core.card import card_from_file
from optpipe.core.errors import BadInputError, GateError, MissingError, StageError
from optpipe.core.events import Listener
from optpipe.core.files import hash_value
from optpipe.core.records import plain_from_record
from optpipe.core.verdict import StepRecord
from optpipe.models.export.model import Model
from optpipe.models.inputs.task_data import hash_data
from optpipe.signoff.collect import SignoffRequest, find_judged_artifact
from optpipe.signoff.policy import Policy
from optpipe.signoff.release import SignedDossier, document_from_signed, sign_off
from optpipe.signoff.steps import (
    MeasurementBudget,
    require_evaluable,
    run_bench_step,
    run_evaluate_step,
    run_preprocess_step,
    run_profile_step,
)
from optpipe.workspace.entry import MANIFEST, Entry
from optpipe.workspace.environment import describe_environment
from optpipe.workspace.file_names import CARD
from optpipe.workspace.files import write_json
from optpipe.workspace.store import NOTES, Store


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """What the walk is to do."""

    wanted: SignoffRequest
    build: BuildPlan
    data: Path | None = None
    images: Path | None = None
    pace: MeasurementBudget = field(default_factory=MeasurementBudget)
    preprocess: bool = True
    profile: bool = True
    output: Path | None = None
    key: Path | None = None

    @property
    def policy(self) -> Policy:
        """What the build must prove."""
        return self.wanted.policy


@dataclass(frozen=True, slots=True)
class PipelineResult:
    """A finished walk."""

    signed: SignedDossier
    steps: tuple[StepRecord, ...]


def run_pipeline(model: Model, plan: PipelinePlan, store: Store, listener: Listener) -> PipelineResult:
    """Takes `model` to a verdict. A step that cannot be done here is named and leaves its criteria INCONCLUSIVE.

    Raises what build raises, and BadInputError where the policy does not say which of several builds is judged.
    """
    started = monotonic()
    if plan.data is not None:
        require_evaluable(model, plan.data, store, listener, truncate=plan.build.truncate)
    built = build_model(model, plan.build, store, listener)
    require_artifacts(built)
    judged = find_judged_artifact(plan.wanted, store)
    steps = [StepRecord("build", "done", round(monotonic() - started, 3))]
    notes = _Checkpoint.of(plan, built, store)
    artifacts = [each.entry for each in built.artifacts if each.why_not is None]
    for name, work in _list_steps(model, plan, built, judged, artifacts, store, listener):
        steps.append(_run_step(name, work, notes, listener))
    signed = sign_off(plan.wanted, store, plan.output, plan.key, listener)
    notes.clear()
    return PipelineResult(signed, tuple(steps))


PipelineStep = Callable[[], list[Path]]


def _list_steps(
    model: Model,
    plan: PipelinePlan,
    built: ModelBuild,
    judged: Entry,
    artifacts: list[Entry],
    store: Store,
    listener: Listener,
) -> Iterator[tuple[str, PipelineStep]]:
    yield "evaluate", lambda: run_evaluate_step(model, plan.data, store, listener, truncate=plan.build.truncate)
    if plan.preprocess:
        yield "preprocess", lambda: run_preprocess_step(model, plan.images, store, listener)
    yield "bench", lambda: _run_bench(plan, judged, artifacts, store, listener)
    if plan.profile:
        yield "profile", lambda: _run_profile(plan, built, judged, store, listener)


def _run_step(name: str, work: PipelineStep, notes: "_Checkpoint", listener: Listener) -> StepRecord:
    """Runs a step, or takes it from an interrupted walk's notes; what cannot be done here does not stop the walk."""
    if (found := notes.finished(name)) is not None:
        with listener.step(name) as step:
            step.cached()
        return StepRecord(name, "resumed", runs=tuple(path.name for path in found))
    started = monotonic()
    try:
        runs = work()
    except (MissingError, BadInputError) as error:
        listener.warn(f"{name} was skipped: {error}")
        return StepRecord(name, "skipped", round(monotonic() - started, 3), reason=str(error))
    except (StageError, GateError) as error:
        listener.warn(f"{name} failed: {error}")
        return StepRecord(name, "failed", round(monotonic() - started, 3), reason=str(error))
    notes.finish(name, runs)
    return StepRecord(name, "done", round(monotonic() - started, 3), tuple(path.name for path in runs))


def _run_bench(
    plan: PipelinePlan, judged: Entry, artifacts: list[Entry], store: Store, listener: Listener
) -> list[Path]:
    if judged.id not in {each.id for each in artifacts}:
        raise MissingError(
            f"the judged build ({judged.info.backend} {judged.info.precision}) cannot run on this machine"
        )
    options = {judged.info.backend: plan.policy.options}
    return run_bench_step(artifacts, plan.policy.criteria, plan.pace, store, listener, options=options)


def _run_profile(plan: PipelinePlan, built: ModelBuild, judged: Entry, store: Store, listener: Listener) -> list[Path]:
    artifact = next(each for each in built.artifacts if each.entry.id == judged.id)
    criteria, options = plan.policy.criteria, plan.build.options
    return run_profile_step(artifact, built.model, criteria, store, listener, options=options)


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """Which steps of an unfinished walk are done, and the runs they wrote."""

    path: Path

    @classmethod
    def of(cls, plan: PipelinePlan, built: ModelBuild, store: Store) -> "_Checkpoint":
        """The notes of exactly this walk. Raises BadInputError for data that cannot be read."""
        own = card_from_file(built.model.file(CARD)).data.get("validation")
        validation = Path(own) if own and Path(own).exists() else None
        decisive = {
            "optpipe": __version__,
            "artifacts": sorted(each.entry.id for each in built.artifacts),
            "policy": plan.policy.sha256,
            "options": {name: dict(given) for name, given in plan.build.options.items()},
            "settings": [*astuple(plan.pace), plan.build.truncate],
            "data": [each and hash_data(each) for each in (plan.data or validation, plan.images or validation)],
            "environment": plain_from_record(describe_environment()),
        }
        return cls(store.workspace / NOTES / f"steps-{hash_value(decisive)[:12]}.json")

    def _read(self) -> dict[str, list[str]]:
        with suppress(OSError, ValueError):
            found = json.loads(self.path.read_text(encoding="utf-8"))
            if isinstance(found, dict):
                return found
        return {}

    def finished(self, name: str) -> list[Path] | None:
        """The runs of a finished step, all still there; None where it is to be done."""
        runs = self._read().get(name)
        paths = [self.path.parent.parent / "runs" / run for run in runs or ()]
        return paths if runs and all((path / MANIFEST).is_file() for path in paths) else None

    def finish(self, name: str, runs: list[Path]) -> None:
        """Notes a finished step."""
        write_json(self.path, self._read() | {name: [path.name for path in runs]})

    def clear(self) -> None:
        """Forgets the walk."""
        self.path.unlink(missing_ok=True)


def document_from_pipeline(walked: PipelineResult, warnings: list[str]) -> Mapping[str, object]:
    """The JSON document of `optpipe run`: that of `signoff`, with the steps."""
    return {**document_from_signed(walked.signed, warnings), "steps": plain_from_record(walked.steps)}
