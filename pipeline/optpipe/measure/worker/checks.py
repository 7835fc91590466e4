"""Checks the timed answers: a random sample of them is kept and compared after the clock has stopped.

They are compared with the same session's untimed answers (as in MLPerf's TEST01) and, if there is one, with the
reference's outputs. A probe then checks whether a repeated input is answered faster than a new one, as by a cache.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import sqrt
from pathlib import Path
from random import Random
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from optpipe.core.measurement import OutputCheck
from optpipe.measure.worker.messages import CacheProbe
from optpipe.models.inputs.rows import Arrays, lay_out, to_rows
from optpipe.stats.ratio import SMALLEST_ROUNDS, Order
from optpipe.stats.selected_rows import EMPTY, Selection, align_rows

if TYPE_CHECKING:
    from optpipe.backends.base import Session
    from optpipe.measure.worker.loops import Lane


Axes = Mapping[str, int | None]
MAX_ROTATED_BATCHES = 8
MIN_ROTATED_BATCHES = 2
MAX_ROTATED_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Rotation:
    """A few distinct batches; `rows[i]` are the pool's indices of the inputs in batch `i`."""

    batches: tuple[Arrays, ...]
    rows: tuple[np.ndarray, ...]

    @property
    def nbytes(self) -> int:
        return sum(int(array.nbytes) for batch in self.batches for array in batch.values())

    def first(self, count: int) -> "Rotation":
        return Rotation(self.batches[:count], self.rows[:count])


def draw_rotation(
    pool: Arrays, batch_size: int, seed: int, known: int = 0, axes: Axes | None = None
) -> Rotation:
    """Draws batches from the pool, each in another seeded order; a batch larger than the pool repeats it.

    The first `known` inputs have a reference: each batch gets one while unused ones are left. `axes` are the batch axes
    of the inputs; an input without one is the same for all rows of a batch.
    """
    size = min(len(array) for array in pool.values())
    batch_bytes = sum(int(array[:1].nbytes) for array in pool.values()) * batch_size
    count = max(
        MIN_ROTATED_BATCHES, min(MAX_ROTATED_BATCHES, MAX_ROTATED_BYTES // max(batch_bytes, 1))
    )
    generator = np.random.default_rng(seed)
    drawn = np.concatenate(
        [generator.permutation(size) for _ in range(-(-batch_size * count // size))]
    )
    rows = tuple(drawn[index * batch_size : (index + 1) * batch_size] for index in range(count))
    unused = iter(np.setdiff1d(np.arange(known), drawn[: count * batch_size]))
    for row in rows:
        if (row >= known).all():
            row[0] = next(unused, row[0])
    batch_axes = axes or {}
    batches = tuple(
        {name: lay_out(array[row], batch_axes.get(name, 0)) for name, array in pool.items()}
        for row in rows
    )
    return Rotation(batches, rows)


def pool_from_files(files: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Maps pools of inputs or reference outputs into memory."""
    return {
        name: np.load(Path(path), mmap_mode="r", allow_pickle=False) for name, path in files.items()
    }


def make_unseen_batch(batch: Arrays, seed: int, axes: Axes | None = None) -> dict[str, np.ndarray]:
    """The batch with its values rolled by a seeded step: equally realistic, and new to the runtime.

    If some inputs have a batch axis, those without one stay, since they say how to read the others.
    """
    step = int(np.random.default_rng(seed).integers(1, 1 << 16))
    batch_axes = axes or {}
    batched = any(batch_axes.get(name, 0) is not None for name in batch)
    return {
        name: array
        if array.ndim == 0 or (batched and batch_axes.get(name, 0) is None)
        else np.roll(array, 1 + step % max(array[0].size - 1, 1)).reshape(array.shape)
        for name, array in batch.items()
    }


PROBE_SECONDS = 10.0
MAX_OUTPUT_BYTES = 1 << 28
MAX_UNTIMED_SECONDS = 15.0
CHUNK_VALUES = 1 << 22


class Reservoir:
    """A uniform random sample of a stream of unknown length (Vitter's algorithm R)."""

    def __init__(self, size: int, seed: int) -> None:
        self.size, self._random, self._seen = size, Random(seed), 0
        self.kept: list[tuple[int, Any]] = []

    def slot(self) -> int | None:
        """Index for the next item; None if it is not kept."""
        self._seen += 1
        if len(self.kept) < self.size:
            return len(self.kept)
        place = int(self._random.random() * self._seen)
        return place if place < self.size else None

    def keep(self, slot: int, index: int, outputs: Any) -> None:
        if slot == len(self.kept):
            self.kept.append((index, outputs))
        else:
            self.kept[slot] = (index, outputs)


def compute_untimed_outputs(session: "Session", turns: Rotation) -> list[dict[str, np.ndarray]]:
    """The session's untimed outputs for the rotated inputs, as many as time and memory allow, at least MIN_ROTATED_BATCHES.

    The first call may be slow (lazy loading, a search for algorithms) and does not count.
    """
    answers = [session.run(turns.batches[0])]
    begun = perf_counter()
    for batch in turns.batches[1:]:
        answers.append(session.run(batch))
        room = (len(answers) + 1) * count_output_bytes(answers[0]) <= MAX_OUTPUT_BYTES
        if len(answers) >= MIN_ROTATED_BATCHES and not (
            room and perf_counter() - begun < MAX_UNTIMED_SECONDS
        ):
            break
    return answers


def count_output_bytes(answer: Arrays) -> int:
    return sum(int(array.nbytes) for array in answer.values())


def limit_output_checks(wanted: int, answer: Arrays) -> int:
    """Number of timed answers to keep: at most `wanted`, as memory allows, but at least MIN_ROTATED_BATCHES."""
    return min(
        wanted, max(MIN_ROTATED_BATCHES, MAX_OUTPUT_BYTES // max(count_output_bytes(answer), 1))
    )


def _compute_distance(
    reference: Arrays, got: Arrays, selection: Selection = EMPTY, tolerance: float = 0.0
) -> float:
    """Maximum relative L2 distance over the outputs; infinite for NaN, another shape, or a missing output.

    Rows of a `selection` are sets; in order, they are compared beyond the `tolerance`.
    """
    if selection.outputs:
        got = align_rows(reference, got, selection, tolerance)
    worst = 0.0
    for name, expected in reference.items():
        output = got.get(name)
        if output is None or output.shape != expected.shape:
            return float("inf")
        difference, scale = _compute_norms(expected, output)
        worst = (
            max(worst, difference / scale if scale else difference)
            if np.isfinite(difference)
            else float("inf")
        )
    return worst


def _compute_norms(expected: np.ndarray, output: np.ndarray) -> tuple[float, float]:
    """‖output − expected‖ and ‖expected‖ in float64, in chunks, since outputs may be as large as the memory."""
    truth, got = np.ravel(expected), np.ravel(output)
    squares = [0.0, 0.0]
    for start in range(0, truth.size, CHUNK_VALUES):
        part = truth[start : start + CHUNK_VALUES].astype(np.float64)
        apart = got[start : start + CHUNK_VALUES].astype(np.float64) - part
        squares = [squares[0] + float(apart @ apart), squares[1] + float(part @ part)]
    return sqrt(squares[0]), sqrt(squares[1])


def check_outputs(
    kept: Sequence[tuple[int, Arrays]],
    before: Sequence[Arrays],
    reference: Arrays,
    rows: Sequence[np.ndarray],
    tolerance: float,
    reference_name: str,
    axes: Axes | None = None,
    selection: Selection = EMPTY,
) -> OutputCheck:
    """Whether the `kept` outputs match the untimed ones in `before`, and the reference within `tolerance`.

    `axes` are the batch axes of the outputs. Rows of a `selection` are compared as sets, where the batch axis is the first.
    """
    selection = selection.leave_out([name for name, axis in (axes or {}).items() if axis != 0])
    problems: list[str] = []
    worst_self = 0.0
    for index, got in kept:
        own = _compute_distance(before[index], got, selection, tolerance)
        worst_self = max(worst_self, own)
        if own > tolerance:
            apart = f"differs from the untimed output by {own:.2g}"
            finite = all(bool(np.isfinite(array).all()) for array in got.values())
            problems.append(apart if finite else "contains NaN or Inf")
        elif own > 1e-7:
            others = [
                _compute_distance(before[other], got)
                for other in range(len(before))
                if other != index
            ]
            if others and min(others) < 0.1 * own:
                problems.append("belongs to another input")
    error = _compare_to_reference(reference, rows, kept, axes or {}, selection, tolerance)
    if error is not None and error > tolerance:
        problems.append(f"differs from {reference_name} by {error:.2g}")
    between = [_compute_distance(first, second) for first, second in combinations(before, 2)]
    return OutputCheck(
        checked=len(kept),
        passed=bool(kept) and not problems,
        reference="the untimed run" if error is None else f"{reference_name} and the untimed run",
        relative_error=min(worst_self if error is None else error, 1e30),
        tolerance=f"relative L2 error at most {tolerance:g}",
        why_not=problems[0] if problems else None if kept else "no timed output was kept",
        tells_inputs_apart=bool(between) and min(between) > 0.0,
    )


def _compare_to_reference(
    reference: Arrays,
    rows: Sequence[np.ndarray],
    kept: Sequence[tuple[int, Arrays]],
    axes: Axes,
    selection: Selection,
    tolerance: float,
) -> float | None:
    """The distance over all kept answers together; infinite if an output is missing.

    Only inputs with a reference count, which may be the first of the pool alone. None if no such input was kept.
    """
    size = count_reference_inputs(reference)
    expected: dict[str, list[np.ndarray]] = {name: [] for name in reference}
    outputs: dict[str, list[np.ndarray]] = {name: [] for name in reference}
    for index, got in kept:
        known = rows[index] < size
        for name, array in reference.items():
            if known.any() and name not in got:
                return float("inf")
            own = to_rows(got[name], axes.get(name, 0), len(known)) if known.any() else ()
            if known.any() and len(own) == len(known):
                expected[name].append(np.asarray(array)[rows[index][known]])
                outputs[name].append(own[known])
    present = [name for name in reference if outputs[name]]
    if not present:
        return None
    wanted, given = (
        {name: np.concatenate(arrays[name]) for name in present} for arrays in (expected, outputs)
    )
    return _compute_distance(wanted, given, selection, tolerance)


def count_reference_inputs(reference: Arrays) -> int:
    return min((len(array) for array in reference.values()), default=0)


def probe_cache(
    session: "Session",
    lane: "Lane",
    turns: Rotation,
    probes: int,
    seed: int,
    tolerance: float,
    axes: Axes | None = None,
    selection: Selection = EMPTY,
) -> CacheProbe:
    """Times known and new inputs in rounds, `probes` of them or as many as PROBE_SECONDS allow."""
    known = {name: np.array(array) for name, array in turns.batches[0].items()}
    times: dict[str, list[int]] = {"known_ns": [], "new_ns": []}
    stale, begun, order = False, perf_counter(), Order(seed)
    for probe in range(probes):
        late = probe + 1 >= SMALLEST_ROUNDS and perf_counter() - begun > PROBE_SECONDS
        for kind in order.draw(("known", "new")):
            # both kinds are fresh memory that was written just now: only a cache of answers can tell them apart
            unseen = make_unseen_batch(known, seed + probe, axes)
            seen = {name: array.copy() for name, array in known.items()}
            batch = unseen if kind == "new" else seen
            lane.replace(0, batch)
            lane.stage(0)
            start, end, *_ = lane.query()
            times[f"{kind}_ns"].append(max(end - start, 1))
            if kind == "new" and (late or probe == probes - 1):
                answer = lane.on_host(lane.outputs())
                apart = _compute_distance(session.run(batch), answer, selection, tolerance)
                stale = apart > tolerance
        if late:
            break
    lane.replace(0, known)
    return CacheProbe(tuple(times["known_ns"]), tuple(times["new_ns"]), stale)
