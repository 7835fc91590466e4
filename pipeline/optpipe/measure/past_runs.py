"""What workspaces know of a model's past: its benches and evaluations in order, its names, and its networks.

Figures are recomputed from raw files. A run that cannot be read is left out with the reason; one whose clock was wrong is kept, in
doubt.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from optpipe.core.entries import ArtifactInfo, ModelInfo
from optpipe.core.errors import BadInputError, escape
from optpipe.core.files import Files
from optpipe.core.measurement import read_measurements
from optpipe.core.metrics.scores import Score
from optpipe.core.quantity import Estimate
from optpipe.core.wording import Call
from optpipe.evaluate.recompute import observe_scores, read_evaluation
from optpipe.measure.figures import measurements_from_run
from optpipe.measure.groups import RecordedMeasurement
from optpipe.models.artifacts.builds_by_name import find_builds, find_by_id
from optpipe.models.artifacts.network_facts import describe_network
from optpipe.workspace.entry import (
    MANIFEST,
    Entry,
    OtherVersionError,
    Run,
    RunKind,
    load_run,
    require_unchanged,
    runs_from_files,
)
from optpipe.workspace.runs import REMOVED, RUNS, list_run_folders
from optpipe.workspace.store import Store

CLOCK_SLACK = timedelta(seconds=1)
"""Times are written to the millisecond or the microsecond; by more than this, one of two clocks was wrong."""
HISTORIC: tuple[RunKind, ...] = ("bench", "evaluate")
"""Kinds of runs with figures of a history."""


@dataclass(frozen=True, slots=True)
class KnownBuild:
    """A build of the model in a store, and the model that it was built from."""

    entry: Entry[ArtifactInfo]
    made_of: Entry[ModelInfo] | None

    @property
    def content(self) -> str:
        return "" if self.made_of is None else self.made_of.info.content or self.made_of.id


@dataclass(frozen=True, slots=True)
class PastScore:
    """A score of one build in an evaluation."""

    artifact: str
    build: str
    data: str
    score: Score
    figure: Estimate


@dataclass(frozen=True, slots=True)
class PastRun:
    """A finished run that measured or evaluated the model."""

    run: Run
    workspace: Path
    measured: tuple[RecordedMeasurement, ...] = ()
    scores: tuple[PastScore, ...] = ()
    doubt: str = ""

    @property
    def started_utc(self) -> str:
        return self.run.manifest.started_utc


@dataclass(slots=True)
class Past:
    """Everything that the workspaces know of a model."""

    names: tuple[str, ...]
    builds: Mapping[str, KnownBuild]
    networks: Mapping[str, str]
    """By build, if several networks have one of the names; empty otherwise."""
    others: frozenset[str] = frozenset()
    """Builds of a name that are of another network than the one that was asked for."""
    runs: list[PastRun] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def read_past(
    text: str,
    stores: Sequence[Store],
    *,
    since: str | None = None,
    length: int | None = None,
    advance: Callable[[], None] = lambda: None,
) -> Past:
    """Reads every run of the model `text`: a name, a file, or an ID. What cannot be read is left out with the reason.

    Raises BadInputError if nothing of it was measured, or if a folder is no workspace.
    """
    for store in stores:
        if not (store.workspace / RUNS).is_dir():
            raise BadInputError(
                f"{store.workspace} holds no runs",
                remedy="give the folder of a workspace, or measure first: "
                + Call("bench", "MODEL"),
            )
    left_out: dict[str, str] = {}
    listed = [entry for store in stores for entry in _list_runs(store, left_out)]
    listed = _drop_copies(listed, left_out)
    past = _identify(text, stores, {name for _, _, models in listed for name in models})
    past.left_out = left_out
    for run, workspace, models in listed:
        if not models & set(past.names):
            continue
        advance()
        if since is not None and read_time(run.manifest.started_utc) < read_time(since):
            continue
        try:
            past_run = _read_run(run, workspace, past, length)
        except BadInputError as error:
            left_out[run.name] = error.message
            continue
        if past_run.measured or past_run.scores:
            past.runs.append(past_run)
    for store in stores:
        past.left_out |= {run.name: "was removed" for run in _list_removed(store, past)}
    past.runs.sort(key=lambda past_run: (read_time(past_run.started_utc), past_run.run.name))
    if not past.runs and not left_out:
        raise BadInputError(f"nothing of {escape(text)} was measured" + _say_since(since))
    return past


def _list_removed(store: Store, past: Past) -> Iterator[Run]:
    """Runs of the model that were removed since, of which the manifests are left."""
    for run in runs_from_files(Files(store.workspace), REMOVED):
        if run.kind in HISTORIC and past.builds.keys() & set(run.manifest.parents):
            yield run


def _say_since(since: str | None) -> str:
    return "" if since is None else f" since {since}"


def _list_runs(
    store: Store, left_out: dict[str, str]
) -> Iterator[tuple[Run, Path, frozenset[str]]]:
    """The finished runs with figures, and the names of the models in each."""
    for kind in HISTORIC:
        for folder in list_run_folders(store.workspace, kind):
            if not (folder / MANIFEST).is_file():
                continue  # being written, or cut off
            try:
                run = load_run(folder)
                if kind == "evaluate":
                    models = {read_evaluation(run).model}
                else:
                    models = {
                        str(measurement.subject.model)
                        for measurement in read_measurements(run.files)
                    }
            except OtherVersionError:
                left_out[folder.name] = "is of another version of optpipe"
                continue
            except BadInputError as error:
                left_out[folder.name] = error.message
                continue
            yield run, store.workspace, frozenset(models)


def _drop_copies(
    listed: Sequence[tuple[Run, Path, frozenset[str]]], left_out: dict[str, str]
) -> list[tuple[Run, Path, frozenset[str]]]:
    """Without copies of a run in another workspace, such as `store merge` makes."""
    kept: dict[str, tuple[Run, Path, frozenset[str]]] = {}
    for run, workspace, models in listed:
        first = kept.setdefault(run.name, (run, workspace, models))
        if first[0].manifest.files != run.manifest.files:
            left_out[f"{workspace}: {run.name}"] = (
                f"differs from the run of that name in {first[1]}"
            )
    return [*kept.values()]


def _identify(text: str, stores: Sequence[Store], measured: set[str]) -> Past:
    """The names and builds that `text` means: also those of the same content under another name."""
    builds = {build.entry.id: build for store in stores for build in _list_builds(store)}
    meant = {entry.id for store in stores for entry in _find_meant(text, store, any_content=True)}
    names = {text} | {builds[ident].entry.info.model for ident in meant if ident in builds}
    contents = {build.content for build in builds.values() if build.entry.info.model in names} - {
        ""
    }
    renamed = {build.entry.info.model for build in builds.values() if build.content in contents}
    names = (names | renamed) & measured
    if not names:
        known = ", ".join(sorted(measured)) or "none"
        raise BadInputError(
            f"nothing of {escape(text)} was measured; measured models: {known}",
            remedy="measure it: " + Call("bench", escape(text)),
        )
    called = {name: build for name, build in builds.items() if build.entry.info.model in names}
    networks, warnings = _describe_networks(called), []
    others: frozenset[str] = frozenset()
    if len(distinct := dict.fromkeys(networks.values())) < 2:
        networks = {}
    elif text not in names:  # a file or an ID: its own network is meant
        exact = {entry.id for store in stores for entry in _find_meant(text, store)}
        mine = {networks[ident] for ident in exact if ident in networks}
        others = frozenset(
            name for name, network in networks.items() if mine and network not in mine
        )
        networks = {name: network for name, network in networks.items() if name not in others}
        networks = networks if len({*networks.values()}) > 1 else {}
    if networks:
        warnings.append(
            f"{len(distinct)} networks are called {escape(text)}, and are kept apart: {'; '.join(distinct)};"
            " give the ID of a build to see one alone"
        )
    if len(names) > 1:
        warnings.append(f"the same model was measured as {', '.join(sorted(names))}")
    return Past(tuple(sorted(names)), called, networks, others, warnings=warnings)


def _list_builds(store: Store) -> Iterator[KnownBuild]:
    models = {entry.id: entry for entry in store.scan_entries(ModelInfo)[0]}
    for entry in store.scan_entries(ArtifactInfo)[0]:
        yield KnownBuild(entry, models.get(next(iter(entry.manifest.parents), "")))


def _find_meant(text: str, store: Store, *, any_content: bool = False) -> list[Entry[ArtifactInfo]]:
    try:
        return find_by_id(text, store) or find_builds(text, store, any_content=any_content)
    except BadInputError:  # a damaged entry: the names in runs are left
        return []


def _describe_networks(builds: Mapping[str, KnownBuild]) -> dict[str, str]:
    """`describe_network` by build, where the store has its files; read only if there are several models."""
    if len({build.content for build in builds.values() if build.content}) < 2:
        return {}
    described: dict[str, str | None] = {}
    for build in builds.values():
        if build.made_of is not None and build.content not in described:
            try:
                described[build.content] = describe_network(build.made_of)
            except (BadInputError, OSError):
                described[build.content] = None
    return {
        name: network
        for name, build in builds.items()
        if (network := described.get(build.content)) is not None
    }


def _read_run(run: Run, workspace: Path, past: Past, length: int | None) -> PastRun:
    """Raises BadInputError if a file differs from the run's manifest, or cannot be read."""
    doubt = _find_doubt(run)
    if run.kind == "bench":
        measured = tuple(
            recorded
            for recorded in measurements_from_run(run)
            if recorded.measurement.subject.model in past.names
            and (length is None or recorded.measurement.load.length == length)
            and recorded.measurement.subject.artifact not in past.others
        )
        return PastRun(run, workspace, measured, doubt=doubt)
    require_unchanged(run)
    evaluated = read_evaluation(run)
    if evaluated.model not in past.names:
        return PastRun(run, workspace)
    scores = tuple(
        PastScore(
            row.artifact,
            f"{row.backend} {row.precision}",
            evaluated.dataset.identify(),
            score,
            Estimate(float(figure.value), figure.low, figure.high),
        )
        for row in evaluated.results
        if row.artifact is not None and row.artifact not in past.others
        for score, figure in observe_scores(run, row.artifact)
    )
    return PastRun(run, workspace, scores=scores, doubt=doubt)


def _find_doubt(run: Run) -> str:
    """Why the start of a run is not its place in the order; empty if nothing speaks against it."""
    manifest = run.manifest
    started, finished = read_time(manifest.started_utc), read_time(manifest.finished_utc)
    if datetime.min.replace(tzinfo=UTC) in (started, finished):
        return "its times cannot be read"
    if finished < started:
        return "it ended before it began"
    if started > datetime.now(UTC) + CLOCK_SLACK:
        return "it began in the future"
    begun = (
        [read_time(measurement.started_utc) for measurement in read_measurements(run.files)]
        if run.kind == "bench"
        else []
    )
    earliest, latest = started - CLOCK_SLACK, finished + CLOCK_SLACK
    outside = any(not earliest <= time <= latest for time in begun)
    return "a measurement in it has a time outside of its own" if outside else ""


def read_time(text: str) -> datetime:
    """A time in UTC; the first of all for what is none."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return datetime.min.replace(tzinfo=UTC)
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)
