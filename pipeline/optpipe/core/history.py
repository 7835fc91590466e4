"""The record of a model's history: its runs and sign-offs in order, its figures, and their changes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from optpipe.core.errors import ExitStatus
from optpipe.core.quantity import Dimension, Estimate
from optpipe.core.verdict import Verdict


class FailOn(StrEnum):
    REGRESSION = "regression"


class Finding(StrEnum):
    """What a history says about its newest runs."""

    REGRESSION = "regression"
    NO_REGRESSION = "no regression"
    TOO_FEW = "too few runs"


@dataclass(frozen=True, slots=True)
class HistoryRun:
    """A bench, an evaluation, or a sign-off."""

    name: str
    """The run's, or the dossier's folder."""
    kind: str
    workspace: str
    started_utc: str
    model: str
    """As it was called then."""
    builds: tuple[str, ...]
    result: str
    """What it says in one line."""
    verdict: Verdict | None = None
    """Of a sign-off, as its dossier states it."""
    commit: str = ""
    """Of the folder in which it ran, whether or not its files differ from the commit; empty if it was in none."""
    doubt: str = ""
    """Why its place in the order is not known; such a run is in no series."""


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """A figure of one run."""

    run: str
    started_utc: str
    artifact: str
    figure: Estimate


@dataclass(frozen=True, slots=True)
class HistoryChange:
    """A change between two runs."""

    last_before: str
    first_after: str
    before: Estimate
    """The mean over runs since the change before, with its 95% interval."""
    after: Estimate
    """The mean over runs until the next change."""
    p_value: float
    worse: bool
    recovered: bool
    """Whether a later level reached the one before it: their intervals meet, or it is better."""
    differences: tuple[str, ...]
    """What differs between both runs: commits, builds, versions, driver."""

    @property
    def ratio(self) -> float | None:
        """The share by which the figure changed; None from zero."""
        return self.after.value / self.before.value - 1 if self.before.value else None


@dataclass(frozen=True, slots=True)
class HistorySeries:
    """One figure of one build under one load on one kind of machine, run by run."""

    build: str
    about: str
    """The load, or the data of an evaluation."""
    machine: str
    metric: str
    title: str
    unit: Dimension
    higher_is_better: bool
    points: tuple[HistoryPoint, ...]
    judged: bool = True
    """Whether changes are looked for: not in a figure that follows from others."""
    changes: tuple[HistoryChange, ...] = ()
    mean: Estimate | None = None
    """Over the runs since the last change, with its 95% interval; None of a figure in which no change is looked for."""

    @property
    def label(self) -> str:
        return ", ".join(part for part in (self.build, self.about, self.title) if part)

    @property
    def regressions(self) -> tuple[HistoryChange, ...]:
        """Changes for the worse from which it has not recovered."""
        return tuple(change for change in self.changes if change.worse and not change.recovered)


@dataclass(frozen=True, slots=True)
class History:
    model: str
    names: tuple[str, ...]
    """All names under which it was measured."""
    workspaces: tuple[str, ...]
    runs: tuple[HistoryRun, ...]
    """In order of their start."""
    series: tuple[HistorySeries, ...]
    finding: Finding
    risk: float
    """Probability that a history without a change shows one."""
    runs_needed: int
    """Runs of one figure from which on a change can show."""
    since: str | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Reasons by run or dossier that could not be read."""
    warnings: tuple[str, ...] = ()
    written: tuple[str, ...] = ()

    @property
    def regressed(self) -> tuple[HistorySeries, ...]:
        return tuple(series for series in self.series if series.regressions)

    def choose_status(self, fail_on: FailOn | None) -> ExitStatus:
        """FAIL for a regression, INCONCLUSIVE if too few runs could show one; DONE if nobody asked."""
        if fail_on is None or self.finding is Finding.NO_REGRESSION:
            return ExitStatus.DONE
        regressed = self.finding is Finding.REGRESSION
        return ExitStatus.FAIL if regressed else ExitStatus.INCONCLUSIVE
