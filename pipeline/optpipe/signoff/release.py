"""Makes a finished dossier with its reports from evidence."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, count
from pathlib import Path
from time import monotonic

from optpipe import __version__
from optpipe.backends.registry import BACKENDS, find_missing_release
from optpipe.build.build import BuildPlan, build_model, require_artifacts
from optpipe.build.records import BuiltArtifact, ModelBuild
from optpipe.core.card import card_from_file
from optpipe.core.errors import BadInputError, GateError, MissingError, StageError
from optpipe.core.events import Listener
from optpipe.core.files import Files, hash_value
from optpipe.core.records import json_from_record, plain_from_record, record_from_json
from optpipe.core.verdict import StepRecord, VerdictRecord
from optpipe.models.export.model import Model
from optpipe.models.inputs.task_data import hash_data
from optpipe.signoff.collect import (
    SignoffRequest,
    collect_evidence,
    find_judged_artifact,
    register_policy,
    require_valid_request,
)
from optpipe.signoff.dossier import finish_dossier, read_dossier
from optpipe.signoff.judge import judge_dossier
from optpipe.signoff.reports import list_drawing_versions, render_dossier, write_reports
from optpipe.signoff.steps import make_steps, require_evaluable
from optpipe.signoff.verify import describe_looser_rules
from optpipe.workspace.entry import MANIFEST
from optpipe.workspace.environment import describe_environment
from optpipe.workspace.file_names import CARD, VERDICT
from optpipe.workspace.files import write_bytes, write_json
from optpipe.workspace.places import require_unused_path, require_writable_file
from optpipe.workspace.runs import RUNS
from optpipe.workspace.seal import require_key
from optpipe.workspace.store import NOTES, Store


@dataclass(frozen=True, slots=True)
class SignedDossier:
    folder: Path
    verdict: VerdictRecord
    reports: Mapping[str, str]


def document_from_signed(signed: SignedDossier, warnings: list[str]) -> Mapping[str, object]:
    """The JSON document of `optpipe signoff`."""
    return {**plain_from_record(signed.verdict), "dossier": str(signed.folder), "warnings": warnings}


def require_possible(
    wanted: SignoffRequest, store: Store, output: Path | None, key: Path | None, junit: Path | None
) -> None:
    """Raises BadInputError, before anything is built or measured, if the sign-off could not be written."""
    require_valid_request(wanted, store)
    if output is not None:
        require_unused_path(output)
    if key is not None:
        require_key(key)
    if junit is not None:
        require_writable_file(junit, "--junit")
        if output is not None and junit.resolve().is_relative_to(output.resolve()):
            raise BadInputError(f"--junit {junit}: {output} is sealed when it is written; choose a place outside it")


def sign_off(
    wanted: SignoffRequest,
    store: Store,
    output: Path | None,
    key: Path | None,
    listener: Listener,
    *,
    figures: bool = True,
) -> SignedDossier:
    """Gathers the evidence, judges it, writes the reports, and seals the dossier."""
    with store.scratch("dossier") as scratch:
        with listener.step("gather evidence"):
            collect_evidence(wanted, store, scratch, drawn_with=list_drawing_versions() if figures else {})
        with listener.step("judge"):
            dossier = read_dossier(Files(scratch, kept={}))
            verdict, evidence = judge_dossier(dossier)
            write_bytes(scratch / VERDICT, json_from_record(verdict))
        if looser := describe_looser_rules(dossier):
            listener.warn(looser)
        backend = BACKENDS[dossier.artifact.info.backend]
        for version in {one.environment.get_fact(f"packages.{backend.package}") for one in evidence.measured}:
            if missing := find_missing_release(dossier.artifact.info, version):
                listener.inform(missing)
        with listener.step("write the report"):
            reports = render_dossier(dossier, verdict, figures=figures)
            write_reports(reports, scratch)
        usual = store.workspace / "dossiers" / verdict.dossier_name  # one build may be judged twice within a second
        numbered = chain([usual], (usual.with_name(f"{usual.name}-{n}") for n in count(2)))
        target = output or next(path for path in numbered if not path.exists())
        finish_dossier(scratch, target, key)
    return SignedDossier(target, verdict, reports)


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    wanted: SignoffRequest
    build: BuildPlan
    data: Path | None = None
    images: Path | None = None
    preprocess: bool = True
    profile: bool = True
    output: Path | None = None
    key: Path | None = None


def run_pipeline(
    model: Model, plan: PipelinePlan, store: Store, listener: Listener
) -> tuple[SignedDossier, tuple[StepRecord, ...]]:
    """Takes `model` to a verdict. A step that this machine cannot do leaves its criteria INCONCLUSIVE.

    Raises the errors of building, and BadInputError if the policy does not select one of several builds.
    """
    started = monotonic()
    if plan.data is not None:
        require_evaluable(model, plan.data, store, listener, truncate=plan.build.truncate)
    built = build_model(model, plan.build, store, listener)
    require_artifacts(built)
    judged = find_judged_artifact(plan.wanted, store)
    register_policy(plan.wanted.policy, store)
    steps = [StepRecord("build", "done", round(monotonic() - started, 3))]
    notes = _place_notes(plan, built, store)
    artifacts = [each.entry for each in built.artifacts if each.why_not is None]
    build = next((each for each in built.artifacts if each.entry.id == judged.id), BuiltArtifact(judged, None, None))
    work = make_steps(
        plan.wanted, build, artifacts, built.model, lambda: model, store, listener, data=plan.data, images=plan.images,
        options=plan.build.options, truncate=plan.build.truncate,
    )  # fmt: skip
    for name, step in work.items():
        if (plan.preprocess or name != "preprocess") and (plan.profile or name != "profile"):
            steps.append(_run_step(name, partial(step, plan.wanted.policy.criteria), notes, listener))
    signed = sign_off(plan.wanted, store, plan.output, plan.key, listener)
    notes.unlink(missing_ok=True)
    return signed, tuple(steps)


def _run_step(name: str, work: Callable[[], list[Path]], notes: Path, listener: Listener) -> StepRecord:
    """Runs a step, or takes its runs from the notes of an interrupted pipeline; an error of the step is only recorded."""
    done: dict[str, list[str]] = {}
    with suppress(OSError, BadInputError):
        done = record_from_json(notes.read_bytes(), dict[str, list[str]], notes)
    known = done.get(name, [])
    if known and all((notes.parent.parent / RUNS / run / MANIFEST).is_file() for run in known):
        with listener.step(name) as step:
            step.cached()
        return StepRecord(name, "resumed", runs=tuple(known))
    started = monotonic()
    try:
        runs = work()
    except (MissingError, BadInputError) as error:
        listener.warn(f"{name} was skipped: {error}")
        return StepRecord(name, "skipped", round(monotonic() - started, 3), reason=str(error))
    except (StageError, GateError) as error:
        listener.warn(f"{name} failed: {error}")
        return StepRecord(name, "failed", round(monotonic() - started, 3), reason=str(error))
    names = [path.name for path in runs]
    write_json(notes, done | {name: names})
    return StepRecord(name, "done", round(monotonic() - started, 3), tuple(names))


def _place_notes(plan: PipelinePlan, built: ModelBuild, store: Store) -> Path:
    """The file of exactly this pipeline's finished steps. Raises BadInputError for data that cannot be read."""
    own = card_from_file(built.model.file(CARD)).data.get("validation")
    validation = Path(own) if own and Path(own).exists() else None
    decisive = {
        "optpipe": __version__,
        "artifacts": sorted(each.entry.id for each in built.artifacts),
        "policy": plan.wanted.policy.sha256,
        "options": {name: dict(given) for name, given in plan.build.options.items()},
        "settings": [plan.wanted.min_seconds, plan.wanted.max_cv, plan.build.truncate],
        "data": [each and hash_data(each) for each in (plan.data or validation, plan.images or validation)],
        "environment": plain_from_record(describe_environment()),
    }
    return store.workspace / NOTES / f"steps-{hash_value(decisive)[:12]}.json"
