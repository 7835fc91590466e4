"""How often a history finds a slowdown, how soon, and how often quiet runs show one: a simulation with known truth.

`change_points.py [HISTORIES]`; on quiet runs, Otava's own test of a split (Student's t test at 0.001) runs beside ours.
"""

import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import numpy as np
from scipy.stats import ttest_ind

from optpipe.stats.changes import LEAST_RUNS, find_changes

STEP, SCATTER = 1.03, 0.01
OTAVA_P_VALUE = 0.001
NORMAL, HEAVY, SLOW = "normal", "t with 3 degrees of freedom", "one run in ten is slow"


def draw(generator, level, runs, kind=NORMAL):
    """Figures of runs whose scatter is 1%, in the mean over many."""
    if kind == HEAVY:
        noise = generator.standard_t(3, runs) / 3**0.5
    elif kind == SLOW:
        noise = 0.5 * generator.standard_normal(runs) + 2.8 * (generator.random(runs) < 0.1)
    else:
        noise = generator.standard_normal(runs)
    return level * (1 + SCATTER * noise)


def shows_step(before, figures, seed):
    """Whether one of `figures` becomes slower, and the history says so within five runs and finds it in that figure alone."""
    generator = np.random.default_rng([58, before, figures, seed])
    quiet = [draw(generator, 1.0, before + 5) for _ in range(figures - 1)]
    slowed = np.append(draw(generator, 1.0, before), draw(generator, STEP, 5))
    return any(
        find_changes([slowed[: before + after], *(each[: before + after] for each in quiet)])[0]
        for after in range(LEAST_RUNS, 6)
    )


def shows_nothing_there(runs, figures, kind, seed):
    generator = np.random.default_rng([59, runs, figures, seed])
    return any(find_changes([draw(generator, 1.0, runs, kind) for _ in range(figures)]))


def count_alarms(seed):
    """Of 100 quiet runs, after each of which the history is examined: those after which it shows a change."""
    values = draw(np.random.default_rng([60, seed]), 1.0, 100)
    return sum(bool(find_changes([values[:runs]])[0]) for runs in range(2 * LEAST_RUNS, 101))


def shows_nothing_there_by_t(kind, seed):
    """Whether the t test of the best split of 100 quiet runs is below its p-value."""
    values = draw(np.random.default_rng([61, seed]), 1.0, 100, kind)
    splits = range(2, len(values) - 1)
    return min(ttest_ind(values[:at], values[at:]).pvalue for at in splits) < OTAVA_P_VALUE


def main(histories=1000):
    with ProcessPoolExecutor() as pool:

        def measure(what, *given, count=histories):
            return np.array([*pool.map(partial(what, *given), range(count), chunksize=8)])

        for before, figures in ((10, 1), (20, 1), (50, 1), (20, 12), (50, 12)):
            share = measure(shows_step, before, figures).mean()
            print(f"{before} runs before, {figures} figures: found in {share:.1%}", flush=True)
        for kind in (NORMAL, HEAVY, SLOW):
            share = measure(shows_nothing_there, 100, 1, kind).mean()
            other = measure(shows_nothing_there_by_t, kind).mean()
            print(f"100 quiet runs, {kind}: {share:.2%}; by the t test {other:.1%}", flush=True)
        share = measure(shows_nothing_there, 100, 12, NORMAL).mean()
        print(f"100 quiet runs of 12 figures: {share:.2%}", flush=True)
        alarms = measure(count_alarms, count=histories // 4)
        print(f"examined after each of 100 quiet runs: {alarms.mean():.2f} alarms", flush=True)
        print(f"  histories with any alarm: {(alarms > 0).mean():.1%}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
