"""The command that sweeps one cell, as users are shown it."""

import shlex

from optpipe.core.measurement import Mode, Scenario
from optpipe.sweep.job import Cell
from optpipe.sweep.matrix import Matrix


def command_from_cell(cell: Cell) -> str:
    """The command whose matrix has this cell alone; what is the default is left out."""
    recipe, load, usual = cell.recipe, cell.load, Matrix()
    given = (
        ("precision", recipe.precision, None),
        ("backend", recipe.backend, None),
        ("batch", load.batch_size, None),
        ("gpu", cell.kind, None),
        ("length", load.length, None),
        ("scenario", load.scenario, Scenario.SINGLE_STREAM),
        ("rate", load.rate_per_s, None),
        ("mode", load.mode, Mode.COMPUTE),
        ("streams", load.streams, usual.streams),
        ("profile", recipe.profile, None),
        ("weights", recipe.weights, usual.weights),
        ("seed", recipe.seed, usual.seed),
        ("calibration", recipe.calibration, None),
        ("processes", cell.processes, usual.processes),
        ("percentile", load.percentile, usual.percentile),
        ("min-time", load.min_seconds, usual.min_seconds),
        ("max-time", load.max_seconds, usual.max_seconds),
        ("warm-up", load.warm_up_seconds, usual.warm_up_seconds),
        ("max-warm-up", load.max_warm_up_seconds, usual.max_warm_up_seconds),
        ("max-cv", None if cell.max_cv == usual.max_cv else f"{100 * cell.max_cv:.12g}%", None),
    )
    words = [
        word for name, value, default in given if value not in (None, default) for word in (f"--{name}", str(value))
    ]
    words += ["--truncate"] if recipe.truncate else []
    words += [word for each in recipe.options for word in ("--build-option", each)]
    words += [word for each in cell.options for word in ("--option", each)]
    return shlex.join(["optpipe", "sweep", recipe.model, *words])
