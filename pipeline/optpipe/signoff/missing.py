"""Measures what a policy asks for and no run in the workspace shows yet; what cannot be measured here is said."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

from optpipe.build.records import BuiltArtifact
from optpipe.core.entries import ArtifactInfo, ModelInfo
from optpipe.core.errors import BadInputError, OptpipeError
from optpipe.core.events import Listener
from optpipe.core.observation import Missing
from optpipe.measure.recompute import list_artifact_measurements
from optpipe.models.artifacts.facts import judged_build_from_entry
from optpipe.models.export.exported import find_stored_model
from optpipe.models.export.model import Model
from optpipe.signoff.build_evidence import BuildEvidence, evidence_from_runs, is_of_other_file, select_groups
from optpipe.signoff.collect import SignoffRequest, find_judged_artifact, is_run_about
from optpipe.signoff.dossier import split_runs
from optpipe.signoff.evidence import JUDGED_RUNS, find_kind, observe
from optpipe.signoff.policy import Criterion
from optpipe.signoff.policy_format import SECTIONS, MeasuredSection
from optpipe.signoff.steps import (
    MeasurementBudget,
    run_bench_step,
    run_evaluate_step,
    run_preprocess_step,
    run_profile_step,
)
from optpipe.stats.means import FEWEST
from optpipe.workspace.entry import Entry, Run
from optpipe.workspace.runs import list_runs
from optpipe.workspace.store import Store


def measure_missing_evidence(
    wanted: SignoffRequest, model: Callable[[], Model], pace: MeasurementBudget, store: Store, listener: Listener
) -> list[Path]:
    """Takes the steps whose evidence is missing for the judged build; returns the new runs. `model` resolves its source.

    A load with fewer VALID processes than an interval over processes takes is measured again, and all its tries count; so is one
    that was measured for lower percentiles than the policy's.
    """
    from optpipe.backends.registry import BACKENDS

    judged = find_judged_artifact(wanted, store)
    runs, _ = split_runs(_list_present(judged, store), wanted.since)
    needed = list(_list_needed(wanted, judged, runs))
    if not needed:
        return []
    why_not = BACKENDS[judged.info.backend].find_run_blocker(judged.info)
    if why_not is not None:
        listener.warn(f"nothing was measured: the judged build cannot run on this machine ({why_not})")
        return []
    store.require_writable()
    done: list[Path] = []
    for kind, criteria in _group_by_kind(needed, runs):
        try:
            done += _steps(wanted, judged, model, pace, store, listener)[kind](criteria)
        except OptpipeError as error:
            listener.warn(f"{kind} was skipped: {error}")
    return done


def _list_present(judged: Entry[ArtifactInfo], store: Store) -> list[Run]:
    """The runs about the judged build, without those of another file under its id: these are made again."""
    build = judged_build_from_entry(judged)
    present = (
        run for run in list_runs(store.workspace) if run.kind in JUDGED_RUNS and is_run_about(run, judged, store)
    )
    return [run for run in present if not is_of_other_file(run, build)]


def _list_needed(wanted: SignoffRequest, judged: Entry, runs: Sequence[Run]) -> Iterator[Criterion]:
    build = judged_build_from_entry(judged)
    measured = list_artifact_measurements(runs, wanted.policy.confidence, build.artifact)
    evidence = evidence_from_runs(build, runs, wanted.policy, measured)
    for criterion in wanted.policy.criteria:
        if criterion.section == "regression":  # without a baseline it is missing whatever is measured
            if not select_groups(criterion.where, evidence.measured):
                yield criterion
        elif isinstance(observe(criterion, evidence), Missing) or _has_too_few_processes(criterion, evidence):
            yield criterion


def _has_too_few_processes(criterion: Criterion, evidence: BuildEvidence) -> bool:
    """Whether a load was measured for the criterion by fewer VALID processes than an interval over processes takes."""
    if not issubclass(SECTIONS.get(criterion.section, object), MeasuredSection):
        return False
    groups = select_groups(criterion.where, evidence.measured)
    return min((group.count_asked(criterion.metric) for group in groups), default=0) < FEWEST


def _group_by_kind(needed: Sequence[Criterion], runs: Sequence[Run]) -> Iterator[tuple[str, list[Criterion]]]:
    """The criteria that each kind of run would show; one that was made and does not show them is not made again."""
    present = {run.kind for run in runs}
    for kind in JUDGED_RUNS:
        criteria = [one for one in needed if find_kind(one.section) == kind]
        if criteria and (kind == "bench" or kind not in present):
            yield kind, criteria


def _steps(
    wanted: SignoffRequest,
    judged: Entry[ArtifactInfo],
    model: Callable[[], Model],
    pace: MeasurementBudget,
    store: Store,
    listener: Listener,
) -> dict[str, Callable[[list[Criterion]], list[Path]]]:
    @cache
    def source() -> Model:
        """The model, where it is the one that was built: with other weights its accuracy would be another's."""
        found = model()
        stored = find_stored_model(found, store)
        if stored is not None and stored.id in judged.manifest.parents:
            return found
        raise BadInputError(
            f"{wanted.model} was built with non-default options; run optpipe evaluate or optpipe preprocess with the same options"
        )

    made_of = store.find(judged.manifest.parents[0], ModelInfo)
    built = BuiltArtifact(judged, None, None)
    return {
        "evaluate": lambda _: run_evaluate_step(source(), None, store, listener),
        "preprocess": lambda _: run_preprocess_step(source(), None, store, listener),
        "bench": lambda criteria: run_bench_step(
            [judged], criteria, pace, store, listener, options={judged.info.backend: wanted.policy.options}
        ),
        "profile": lambda _: run_profile_step(built, made_of, wanted.policy.criteria, store, listener),
    }
