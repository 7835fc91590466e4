"""Among how many builds of one network a build may have been chosen by the figures that a sign-off judges.

A sweep, or somebody at a terminal, measures each build in a run of its own; the dossier holds the runs of the judged build and,
of others, only what there is room for. So the sign-off counts in the workspace, and the request states the number.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from optpipe.core.entries import ArtifactInfo
from optpipe.core.files import Files
from optpipe.evaluate.recompute import identify_data, read_evaluation
from optpipe.measure.figures import list_builds_by_load
from optpipe.models.artifacts.judged_build import judged_build_from_entry
from optpipe.signoff.dossier import split_runs
from optpipe.workspace.entry import Entry, Run, runs_from_files
from optpipe.workspace.runs import REMOVED, list_runs
from optpipe.workspace.store import Store


def count_candidates(
    entry: Entry[ArtifactInfo],
    runs: Iterable[Run],
    first: tuple[str | None, str | None],
    store: Store,
    *,
    baseline: str | None,
) -> dict[str, int]:
    """By each judged bench run and evaluation among `runs`: the builds measured under one of its loads, or evaluated on its samples.

    `first` are the times of `split_runs`: no figure from before them can have chosen a build that is judged by later ones. The build of
    the approved baseline was signed off before, and is there to compare with.
    """
    rivals = Rivals.from_store(entry, store, baseline)
    judged, _ = split_runs(list_runs(store.workspace), *first)
    removed, _ = split_runs(runs_from_files(Files(store.workspace), REMOVED), *first)
    names = {run.name for run in judged}
    counted = {}
    for kind in ("bench", "evaluate"):
        gone = {
            artifact
            for run in removed
            if run.kind == kind
            for artifact in rivals.select(run.manifest.parents)
        }
        builds: defaultdict[object, set[str]] = defaultdict(set)
        for run in judged:
            if run.kind == kind and rivals.may_be_in(run):
                for drawn, artifacts in list_builds_by_draw(run).items():
                    builds[drawn] |= rivals.select(artifacts)
        for run in runs:
            if run.kind == kind and run.name in names:
                counts = (len(builds[drawn] | gone) for drawn in list_builds_by_draw(run))
                counted[run.name] = max([1, *counts])
    return counted


@dataclass(frozen=True, slots=True)
class Rivals:
    """The builds of one exported network, whatever it is called, for any batch size."""

    model: str
    stored: frozenset[str]
    others: frozenset[str]
    """Builds of other networks, and that of the baseline."""

    @classmethod
    def from_store(cls, entry: Entry[ArtifactInfo], store: Store, baseline: str | None) -> "Rivals":
        network = judged_build_from_entry(entry).model_sha256
        every = list(store.list_entries(ArtifactInfo))
        stored = {
            build.id
            for build in every
            if network is not None and judged_build_from_entry(build).model_sha256 == network
        }
        stored = (stored - {baseline}) | {entry.id}
        others = {build.id for build in every} | {baseline or entry.id}
        return cls(entry.info.model, frozenset(stored), frozenset(others - stored))

    def select(self, artifacts: Iterable[str]) -> set[str]:
        """Those of the network; of builds that the store has no more, those that were measured under the model's name."""
        named = artifacts if isinstance(artifacts, Mapping) else {}
        return {
            artifact
            for artifact in artifacts
            if artifact in self.stored
            or (artifact not in self.others and named.get(artifact) == self.model)
        }

    def may_be_in(self, run: Run) -> bool:
        return not self.others.issuperset(run.manifest.parents)


def list_builds_by_draw(run: Run) -> dict[object, dict[str, str | None]]:
    """The artifacts and their models' names, by what was drawn with them: the load of a bench run, the samples of an evaluation."""
    if run.kind == "bench":
        return list_builds_by_load(run)
    rows = read_evaluation(run).results
    return {identify_data(run): {row.artifact: run.info.model for row in rows if row.artifact}}
