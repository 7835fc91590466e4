"""How many workers end a loop's wait for its data, by trial: the program runs again with other numbers of them.

`trace/hook` gives every DataLoader of torch the number that is tried, and opens a range `optpipe.loader:4` that names what a
loader really has: loaders of iterable data sets keep theirs, since each worker would read all of the data.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from optpipe.trace.analysis import Analysis
from optpipe.trace.loops import Loop
from optpipe.trace.report import StageProfile

LOADER_RANGE = "optpipe.loader:"
_FOLDER = "workers-"
_ENDED_SHARE = 0.05
"""A loop that waits for less of its time waits for nothing that more workers would change."""


def name_trial_folder(workers: int) -> str:
    return f"{_FOLDER}{workers}"


def read_loaders(measured: Analysis) -> tuple[int, ...]:
    """The numbers of workers that the loaders of a recording had."""
    names = measured.trace.ranges["name"].cast(str).unique().to_list()
    words = [name.removeprefix(LOADER_RANGE) for name in names if name.startswith(LOADER_RANGE)]
    return tuple(sorted(int(word) for word in words if word.isdecimal()))


@dataclass(frozen=True, slots=True)
class WorkerTrial:
    """One run of a loop; `workers` is None for the program as it is."""

    workers: int | None
    loop: Loop

    @property
    def wait_share(self) -> float | None:
        """Of the median time of an iteration; None where no range tells the wait."""
        wait, period = self.loop.data_wait_ns, self.loop.period_ns
        return None if wait is None or not period.median else wait.median / period.median

    @property
    def waits(self) -> bool:
        return self.wait_share is None or self.wait_share > _ENDED_SHARE


def list_trials(stages: Iterable[StageProfile]) -> tuple[WorkerTrial, ...]:
    """The runs of a profile with other numbers of workers, and the program as it is; empty without such runs."""
    trials, first = [], None
    for stage in stages:
        if stage.loop is None:
            continue
        if stage.folder.startswith(_FOLDER):
            trials.append(WorkerTrial(int(stage.folder.removeprefix(_FOLDER)), stage.loop))
        elif first is None:
            first = WorkerTrial(None, stage.loop)
    return (*([] if first is None else [first]), *trials) if trials else ()


def choose_trial(trials: Sequence[WorkerTrial]) -> WorkerTrial | None:
    """The fewest workers with which the loop no longer waits; None if it waits with all of them."""
    ended = [trial for trial in trials if trial.workers is not None and not trial.waits]
    return min(ended, key=lambda trial: trial.workers or 0, default=None)
