"""The matrix of a sweep: from flags or a TOML file to cells."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import msgspec

from optpipe.backends.registry import (
    BACKENDS,
    backends_from_text,
    parse_options,
    require_known_options,
)
from optpipe.core.card import batch_range_from_text
from optpipe.core.entries import Device, ModelInfo, weights_from_text
from optpipe.core.errors import BadInputError, read_as_user_file, require_existing
from optpipe.core.events import Listener
from optpipe.core.files import read_user_text
from optpipe.core.load import LoadSpec, Scenario
from optpipe.core.params import MOST_PROCESSES
from optpipe.core.precision import CALIBRATED, Precision, precisions_from_text
from optpipe.core.toml import parse_toml
from optpipe.core.wording import Argument
from optpipe.models.artifacts.named import find_buildable_source
from optpipe.models.sources.libraries import TorchvisionSource
from optpipe.models.sources.resolve import source_from_text
from optpipe.sweep.job import CPU, Cell, Matrix, Recipe
from optpipe.sweep.task import collect_contents, collect_contents_in_child
from optpipe.workspace.store import Store

LARGEST = 100_000


def matrix_from_options(base: Matrix, given: Mapping[str, Any]) -> Matrix:
    """Replaces the given keys of `base`. Raises BadInputError for a value of another type."""
    try:
        return msgspec.convert(msgspec.to_builtins(base) | msgspec.to_builtins(given), Matrix)
    except msgspec.ValidationError as error:
        raise BadInputError(f"the sweep's options: {error}") from error


def matrix_from_file(path: Path) -> Matrix:
    """Raises BadInputError with the file and the key."""
    with read_as_user_file(path, "a sweep matrix (TOML)"):
        table = parse_toml(read_user_text(path))
    try:
        return msgspec.convert(table, Matrix)
    except msgspec.ValidationError as error:
        names = ", ".join(Matrix.__struct_fields__)
        raise BadInputError(f"{path}: {error}\na matrix has the keys {names}") from error


def resolve_models(matrix: Matrix, store: Store, *, local: bool) -> Matrix:
    """The matrix with stored models by their sources, as `build` takes them.

    Raises BadInputError for an unknown model, unless the nodes of a cluster (not `local`) may know it.
    """
    models = tuple(find_buildable_source(model, store) for model in matrix.models)
    exported = {entry.info.source for entry in store.list_entries(ModelInfo)}
    for source in map(source_from_text, models if local else ()):
        if isinstance(source, TorchvisionSource) and source.name not in exported:
            source.require_known()
    return msgspec.structs.replace(matrix, models=models)


def cells_from_matrix(matrix: Matrix, kinds_here: Sequence[str]) -> tuple[Cell, ...]:
    """The cells in the order of the matrix, each once. Raises BadInputError for a matrix that makes no sense."""
    require_sound(matrix)
    cells = (
        Cell(recipe, load, kind, options, matrix.processes, matrix.max_cv)
        for kind in dict.fromkeys(matrix.gpus or tuple(kinds_here))
        for recipe in _list_recipes(matrix, kind)
        for given, load in product(matrix.options, _list_loads(matrix))
        for options in (
            tuple(option for option in given if option.startswith(f"{recipe.backend}.")),
        )
    )
    return tuple({cell.key: cell for cell in cells}.values())


def list_option_keys(matrix: Matrix) -> dict[str, set[str]]:
    """The keys of all options of the matrix by their backend."""
    keys: dict[str, set[str]] = {}
    for texts in (matrix.build_options, *matrix.options):
        for name, given in parse_options(texts).items():
            keys.setdefault(name, set()).update(given)
    return keys


def require_sound(matrix: Matrix) -> None:
    if not matrix.models:
        raise BadInputError("no model to sweep; name one, or give a matrix with `models`")
    for name in ("precisions", "backends", "batches", "scenarios", "options"):
        if not getattr(matrix, name):
            raise BadInputError(f"the matrix has an empty list of {name}")
    if min((*matrix.batches, *matrix.lengths)) < 1 or matrix.processes < 1 or matrix.streams < 1:
        raise BadInputError("batches, lengths, processes and streams must be at least 1")
    if matrix.processes > MOST_PROCESSES:
        raise BadInputError(f"processes {matrix.processes}: {MOST_PROCESSES:,} are the most")
    if Scenario.SERVER in matrix.scenarios and not matrix.rates:
        raise BadInputError(
            "the server scenario requires rates (" + Argument("rate", "QUERIES_PER_SECOND") + ")"
        )
    if any(not rate > 0 for rate in matrix.rates):
        raise BadInputError(f"rates must be positive, got {min(matrix.rates):g}")
    for texts in (matrix.build_options, *matrix.options):
        require_known_options(parse_options(texts))
    if matrix.profile is not None:
        batch_range_from_text(matrix.profile, "profile")
    weights_from_text(matrix.weights, matrix.seed)
    require_existing(
        None if matrix.calibration is None else Path(matrix.calibration), "calibration"
    )
    next(_list_loads(matrix)).require_sound()
    if not matrix.max_cv > 0:
        raise BadInputError(f"max_cv {matrix.max_cv:g}: must be positive")
    count = len(matrix.models) * len(matrix.precisions) * len(matrix.backends) * len(matrix.batches)
    count *= max(1, len(matrix.lengths)) * len(matrix.options) * max(1, len(matrix.gpus))
    count *= len(matrix.scenarios) + len(matrix.rates)
    if count > LARGEST:
        raise BadInputError(
            f"the matrix has about {count:,} cells; the limit is {LARGEST:,}: split it"
        )


def _list_recipes(matrix: Matrix, kind: str) -> Iterator[Recipe]:
    device = choose_device_of_kind(kind)
    precisions = precisions_from_text(",".join(matrix.precisions))
    backends = backends_from_text(",".join(matrix.backends), device)
    named = "auto" not in matrix.backends and "all" not in matrix.backends
    for model, backend, precision in product(matrix.models, backends, precisions):
        if not named and device not in backend.devices():
            continue
        yield Recipe(
            model=model,
            precision=str(precision),
            backend=backend.name,
            device=device,
            profile=matrix.profile,
            weights=matrix.weights,
            seed=matrix.seed,
            calibration=matrix.calibration,
            truncate=matrix.truncate,
            options=tuple(
                option for option in matrix.build_options if option.startswith(f"{backend.name}.")
            ),
        )


def add_contents(cells: Sequence[Cell], listener: Listener) -> tuple[Cell, ...]:
    """The cells with the hashes of model and calibration data. A user's Python code runs in a child process."""
    recipes = {_list_names(cell.recipe): cell.recipe for cell in cells}
    ours = {names: recipe for names, recipe in recipes.items() if _runs_code(recipe.model)}
    contents = {
        names: collect_contents(recipe) for names, recipe in recipes.items() if names not in ours
    }
    if ours:
        with listener.step("load the models of Python files"):
            contents |= zip(ours, collect_contents_in_child(tuple(ours.values())), strict=True)
    return tuple(
        replace(cell, recipe=replace(cell.recipe, files=contents[_list_names(cell.recipe)]))
        for cell in cells
    )


def _list_names(recipe: Recipe) -> tuple[object, ...]:
    """The fields of a recipe that determine its hashes."""
    calibrated = recipe.precision if recipe.precision in CALIBRATED else ""
    return recipe.model, recipe.weights, recipe.seed, recipe.profile, recipe.calibration, calibrated


def _runs_code(model: str) -> bool:
    try:
        return source_from_text(model).runs_code
    except BadInputError:  # only the nodes of a cluster may know it
        return False


def choose_device_of_kind(kind: str) -> Device:
    return "cpu" if kind == CPU or kind.startswith(f"{CPU}-") else "cuda"


def _list_loads(matrix: Matrix) -> Iterator[LoadSpec]:
    lengths = tuple(dict.fromkeys(matrix.lengths)) or (None,)
    for scenario, length, size in product(
        dict.fromkeys(matrix.scenarios), lengths, dict.fromkeys(matrix.batches)
    ):
        load = LoadSpec(
            size,
            scenario,
            matrix.mode,
            1,
            None,
            matrix.min_seconds,
            max(matrix.max_seconds, matrix.min_seconds),
            matrix.percentile,
            matrix.warm_up_seconds,
            max(matrix.max_warm_up_seconds, matrix.warm_up_seconds),
            length=length,
        )
        if scenario is Scenario.SERVER:
            yield from (replace(load, rate_per_s=rate) for rate in dict.fromkeys(matrix.rates))
        else:
            several = scenario in (Scenario.MULTI_STREAM, Scenario.OFFLINE)
            yield replace(load, streams=matrix.streams if several else 1)


def find_obstacle(cell: Cell) -> str | None:
    """Why no machine can run a cell, by its backend; None if one may."""
    backend = BACKENDS[cell.recipe.backend]
    reason = backend.find_obstacle(
        cell.recipe.device, Precision(cell.recipe.precision), anywhere=True
    )
    return None if reason is None else f"{backend.name} {reason}"
