"""Measures the evidence that is missing for a build's criteria: `optpipe signoff` before it judges."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

from optpipe.backends.registry import BACKENDS
from optpipe.build.plan import BuildPlan
from optpipe.build.records import BuiltArtifact
from optpipe.core.entries import ArtifactInfo, ModelInfo
from optpipe.core.errors import BadInputError, OptpipeError
from optpipe.core.events import Listener
from optpipe.core.metrics.sections import Evidence
from optpipe.core.verdict import Blocker
from optpipe.core.wording import Call
from optpipe.measure.groups import ProcessGroup
from optpipe.models.artifacts.judged_build import judged_build_from_entry
from optpipe.models.export.exported import Model, explain_other_export, find_stored_model
from optpipe.signoff.build_evidence import evidence_from_runs, is_of_other_file, select_groups
from optpipe.signoff.collect import (
    SignoffRequest,
    find_judged_artifact,
    is_run_about,
    register_policy,
)
from optpipe.signoff.dossier import split_runs
from optpipe.signoff.evidence import JUDGED_RUNS, find_kind, observe
from optpipe.signoff.policy import Criterion
from optpipe.signoff.steps import make_steps
from optpipe.stats.means import MIN_VALUES
from optpipe.workspace.entry import Entry, Run
from optpipe.workspace.runs import list_runs
from optpipe.workspace.store import Store


def measure_missing_evidence(
    wanted: SignoffRequest, model: Callable[[], Model], store: Store, listener: Listener
) -> list[Path]:
    """Takes the steps whose evidence is missing for the judged build; returns the new runs. `model` resolves its source.

    A load with too few VALID processes for an interval is measured again, as is one that was measured for lower percentiles; all
    tries count.
    """
    judged = find_judged_artifact(wanted, store)
    first_used = register_policy(wanted.policy, store)
    registered = first_used if wanted.policy.preregistered else None
    runs, _ = split_runs(_list_present(judged, store), wanted.since, registered)
    needed = list(_list_needed(wanted, judged, runs))
    if not needed:
        return []
    if (why_not := BACKENDS[judged.info.backend].find_run_blocker(judged.info)) is not None:
        listener.warn(
            "nothing was measured: the judged build cannot run on this machine (" + why_not + ")"
        )
        return []
    store.require_writable()

    def source() -> Model:
        """Refuses a model other than the built one: with other weights the accuracy would differ."""
        current = model()
        stored = find_stored_model(current, store)
        if stored is not None and stored.id in judged.manifest.parents:
            return current
        built_of = store.find(judged.manifest.parents[0], ModelInfo)
        how, only_exporter = explain_other_export(current, built_of)
        what = how or "other options"
        problem = f"build {judged.id} was exported from {wanted.model} with {what} than now"
        way = "run " + Call("evaluate", wanted.model) + " or " + Call("preprocess", wanted.model)
        remedy = way + " with the options of the build"
        if how and only_exporter:
            again = Call("build", wanted.model, precision=judged.info.precision)
            remedy = "build it again: `" + again + "`"
        raise BadInputError(problem + "; " + remedy)

    return list(measure_criteria(needed, runs, wanted, judged, source, store, listener))


def measure_criteria(
    needed: Sequence[Criterion],
    present: Sequence[Run],
    wanted: SignoffRequest,
    judged: Entry[ArtifactInfo],
    model: Callable[[], Model],
    store: Store,
    listener: Listener,
) -> Iterator[Path]:
    """Takes the steps of the criteria that `present` runs do not show; a step that fails is a warning."""
    made_of, blank = (
        store.find(judged.manifest.parents[0], ModelInfo),
        BuildPlan((), (), named=True),
    )
    built = BuiltArtifact(judged, None, None)
    steps = make_steps(wanted, built, [judged], made_of, cache(model), store, listener, blank)
    for kind, criteria in _group_by_kind(needed, present):
        try:
            yield from steps[kind](criteria)
        except OptpipeError as error:
            listener.warn(f"{kind} was skipped: " + error.message)


def _list_present(judged: Entry[ArtifactInfo], store: Store) -> list[Run]:
    """The runs about the judged build, without those of another file under its id."""
    build = judged_build_from_entry(judged)
    present = (
        run
        for run in list_runs(store.workspace)
        if run.kind in JUDGED_RUNS and is_run_about(run, judged)
    )
    return [run for run in present if not is_of_other_file(run, build)]


def _list_needed(wanted: SignoffRequest, judged: Entry, runs: Sequence[Run]) -> Iterator[Criterion]:
    evidence = evidence_from_runs(judged_build_from_entry(judged), runs, wanted.policy)
    for criterion in wanted.policy.criteria:
        if criterion.is_loss:  # without a baseline it is always missing
            if not select_groups(criterion.where, evidence.measured):
                yield criterion
            continue
        few = isinstance(observe(criterion, evidence), Blocker)
        if not few and criterion.table.is_measured:
            groups = select_groups(
                criterion.where, evidence.measured
            )  # an interval needs enough VALID processes
            few = min((_count(criterion, group) for group in groups), default=0) < MIN_VALUES
        if few:
            yield criterion


def _count(criterion: Criterion, group: ProcessGroup) -> int:
    """The processes that were to show the criterion's metric."""
    limited = criterion.find_metric()
    metric = limited.inverse_of or limited
    count = group.count_tried if metric.is_listed else group.count_requested
    return count(metric.name)


def _group_by_kind(
    needed: Sequence[Criterion], runs: Sequence[Run]
) -> Iterator[tuple[str, list[Criterion]]]:
    """The criteria that each kind of run would show; only timings are made again."""
    present = {run.kind for run in runs}
    for kind in JUDGED_RUNS:
        criteria = [criterion for criterion in needed if find_kind(criterion.section) == kind]
        if criteria and (kind in (Evidence.BENCH, Evidence.TURNS) or kind not in present):
            yield kind, criteria
