"""What a sweep will do: which cells are stored, which cannot be done, which run, and for how long by earlier runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, median

from optpipe.core.errors import BadInputError
from optpipe.core.files import hash_value
from optpipe.core.records import plain_from_record
from optpipe.sweep.job import Cell, JobRecord, Recipe, compute_job_key
from optpipe.sweep.matrix import find_obstacle
from optpipe.sweep.slots import Slot


class Standing(StrEnum):
    """What a sweep will do with a cell."""

    STORED = "stored"
    RUN = "to run"
    IMPOSSIBLE = "impossible"
    ELSEWHERE = "elsewhere"
    """Of a kind of GPU that is not here."""


@dataclass(frozen=True, slots=True)
class PlannedCell:
    """One cell with what will be done about it."""

    cell: Cell
    standing: Standing
    reason: str = ""
    record: JobRecord | None = None
    """What is stored."""
    estimate_s: float | None = None
    """From earlier jobs; None where there were none like it."""


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """The cells in the order of the matrix."""

    cells: tuple[PlannedCell, ...]
    slots: tuple[Slot, ...]

    def select(self, standing: Standing) -> tuple[PlannedCell, ...]:
        """The cells of one standing."""
        return tuple(one for one in self.cells if one.standing is standing)

    @property
    def estimate_s(self) -> float | None:
        """Wall-clock seconds over the slots; None where no earlier job tells."""
        left = self.select(Standing.RUN)
        known = [one.estimate_s for one in left if one.estimate_s is not None]
        if not known and left:
            return None
        total = sum(known) + (len(left) - len(known)) * (sum(known) / len(known) if known else 0.0)
        used = {one.cell.kind for one in left}
        return total / max(1, sum(slot.kind in used for slot in self.slots))


def plan_sweep(
    cells: Sequence[Cell], slots: Sequence[Slot], stored: Mapping[str, Sequence[JobRecord]], *, again: bool = False
) -> SweepPlan:
    """The plan. `again` measures what is stored once more."""
    times = _learn_times([records[0] for records in stored.values()])
    by_cell: dict[str, list[JobRecord]] = {}
    for records in stored.values():
        by_cell.setdefault(records[0].cell.key, []).append(records[0])
    here: dict[str, list[str]] = {}
    for slot in slots:
        here.setdefault(slot.kind, []).append(slot.fingerprint)
    planned = []
    for cell in cells:
        found = by_cell.get(cell.key, [])
        ours = [one for one in found if one.finished and one.fingerprint in here.get(cell.kind, [])]
        if ours and not again:
            planned.append(PlannedCell(cell, Standing.STORED, ours[0].reason, ours[0]))
        elif (why := find_obstacle(cell)) is not None:
            planned.append(PlannedCell(cell, Standing.IMPOSSIBLE, why))
        elif cell.kind not in here:
            done = next((one for one in found if one.finished), None)
            reason = f"no {cell.kind} here; run the sweep on a host that has one and merge its workspace"
            standing = Standing.ELSEWHERE if done is None else Standing.STORED
            planned.append(PlannedCell(cell, standing, reason if done is None else done.reason, done))
        else:
            planned.append(PlannedCell(cell, Standing.RUN, estimate_s=_estimate(cell, times)))
    return SweepPlan(tuple(planned), tuple(slots))


_Times = Mapping[tuple[str, ...], Sequence[float]]


def _learn_times(records: Sequence[JobRecord]) -> _Times:
    """Seconds of a process of earlier jobs, by what they have in common."""
    times: dict[tuple[str, ...], list[float]] = {}
    for one in records:
        if one.run is not None and one.seconds > 0:
            recipe = one.cell.recipe
            share = one.seconds / one.cell.processes
            for key in _list_likenesses(recipe):
                times.setdefault(key, []).append(share)
    return times


def _estimate(cell: Cell, times: _Times) -> float | None:
    for key in _list_likenesses(cell.recipe):
        if found := times.get(key):
            return median(found) * cell.processes
    return None


def _list_likenesses(recipe: Recipe) -> tuple[tuple[str, ...], ...]:
    """What a recipe has in common with others that take about as long, the closest first."""
    engine = recipe.backend, recipe.device
    return (recipe.model, recipe.precision, *engine), (recipe.model, *engine), engine, ()


START_S = 5.0
"""Seconds until a process measures (imports, hashes, loading): a guess."""
LOAD_S = 3.0
"""Seconds of a process of a load, beside its warm-up and measurement, where no earlier job tells: a guess."""


@dataclass(frozen=True, slots=True)
class Work:
    """Cells of one recipe and kind that one process measures one after the other."""

    recipe: Recipe
    kind: str
    cells: tuple[Cell, ...]
    load_s: float = LOAD_S
    """Expected seconds of each."""

    @property
    def expected_s(self) -> float:
        """Seconds of the whole, with the start of its process."""
        return START_S + self.load_s * len(self.cells)

    @property
    def recipe_key(self) -> str:
        """What must be equal for one build to serve both."""
        return compute_recipe_key(self.recipe)


def compute_recipe_key(recipe: Recipe) -> str:
    """The hash of a recipe."""
    return hash_value(plain_from_record(recipe))[:16]


def list_works(plan: SweepPlan, loads_per_process: int) -> tuple[Work, ...]:
    """What is to run, at most `loads_per_process` cells to one process, in the order of the matrix."""
    groups: dict[tuple[str, str, tuple[str, ...]], list[PlannedCell]] = {}
    for one in plan.select(Standing.RUN):
        cell = one.cell
        groups.setdefault((compute_recipe_key(cell.recipe), cell.kind, cell.options), []).append(one)
    return tuple(
        _make_work(planned[at : at + loads_per_process])
        for planned in groups.values()
        for at in range(0, len(planned), loads_per_process)
    )


def _make_work(planned: Sequence[PlannedCell]) -> Work:
    cells = tuple(one.cell for one in planned)
    times = [guess_load_s(one.cell) if one.estimate_s is None else one.estimate_s for one in planned]
    return Work(cells[0].recipe, cells[0].kind, cells, fmean(times))


def guess_load_s(cell: Cell) -> float:
    """Seconds that a cell takes by what it asks for alone."""
    return cell.processes * (LOAD_S + cell.load.warm_up_seconds + cell.load.min_seconds)


def select_shard(cells: Sequence[Cell], shard: tuple[int, int] | None) -> tuple[Cell, ...]:
    """Part i of n, counted from 1: neighboring cells stay together, so that few recipes are built twice."""
    if shard is None:
        return tuple(cells)
    part, parts = shard
    return tuple(cells[(part - 1) * len(cells) // parts : part * len(cells) // parts])


def shard_from_text(text: str) -> tuple[int, int]:
    """Reads `--shard 2/8`. Raises BadInputError for anything else."""
    part, _, parts = text.partition("/")
    try:
        found = int(part), int(parts)
    except ValueError:
        found = 0, 0
    if not 1 <= found[0] <= found[1]:
        raise BadInputError(f"--shard {text}: expected I/N with 1 ≤ I ≤ N, such as 2/8")
    return found


def key_of(cell: Cell, slot: Slot) -> str:
    """The job's key on a slot."""
    return compute_job_key(cell, slot.fingerprint)
