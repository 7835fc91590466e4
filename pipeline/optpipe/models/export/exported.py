"""Exports a source model to a checked ONNX file, and proves that both compute the same."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from optpipe.backends.onnx_graph import load_onnx
from optpipe.backends.onnx_pairs import find_faulty_pair
from optpipe.backends.onnx_quantized import find_own_precision, is_quantized_dynamically
from optpipe.backends.plain_session import PlainSession
from optpipe.backends.rewrites import EXACT_RELATIVE, RewriteGuard, find_worst
from optpipe.backends.selections import read_selection
from optpipe.core import onnx, torch
from optpipe.core.card import ModelCard, require_matching_input
from optpipe.core.entries import ModelInfo, OutputError, ReferenceInfo, WeightsRequest
from optpipe.core.errors import (
    BadInputError,
    GateError,
    InconclusiveError,
    OptpipeError,
    first_line,
)
from optpipe.core.events import Listener
from optpipe.core.files import hash_value
from optpipe.core.precision import CALIBRATED, Precision
from optpipe.core.wording import Argument
from optpipe.models.export.onnx_export import complete_card, onnx_from_torch, save_graph
from optpipe.models.export.source_graph import prepare_graph
from optpipe.models.export.stable_selection import open_stable_selection
from optpipe.models.export.ties import describe_tie
from optpipe.models.identity import compute_content_id
from optpipe.models.inputs.rows import Arrays, run_rows, split_batches
from optpipe.models.inputs.samples import (
    SAMPLE_COUNT,
    choose_samples,
    load_sample_inputs,
    read_sample_labels,
)
from optpipe.models.sources.libraries import explain_unreachable
from optpipe.models.sources.modules import LoadedModel, NoWeightsError, Source
from optpipe.models.sources.onnx_file import ShapeRanges
from optpipe.models.sources.own_type import describe_conversion
from optpipe.models.sources.python_file import describe_user_error
from optpipe.models.sources.resolve import CardSource
from optpipe.models.stored_card import format_card_place, place_at_source, read_stored_card
from optpipe.stats.paired import TOLERATED_RELATIVE_ERROR, compute_output_error
from optpipe.stats.selected_rows import Selection, align_rows
from optpipe.workspace.arrays import read_arrays, write_arrays
from optpipe.workspace.entry import Entry, compute_entry_id
from optpipe.workspace.environment import get_package_version
from optpipe.workspace.file_names import CARD, ONNX, REFERENCE, TOKENIZER
from optpipe.workspace.files import write_json
from optpipe.workspace.store import NOTES, Store

PROBE_S = 0.3
"""Timeout for a host that had no weights before, after which it counts as unreachable again."""


@dataclass
class Model:
    source: Source
    weights: WeightsRequest
    batch: tuple[int, int, int] | None = None
    shapes: ShapeRanges = field(default_factory=dict)
    fallback_reason: str | None = None
    """Why the default weights were replaced by random ones."""
    exported: Entry[ModelInfo] | None = None
    """The stored export that the user named by an ID; its recipe is the model's."""
    _loaded: LoadedModel | None = None

    def recipe(self) -> dict[str, Any]:
        """Everything that determines the exported model. Cheap, except for a user's code, which has to run."""
        made = {"made": dict(self.load().code_identity)} if self.source.runs_code else {}
        return {
            "source": dict(self.source.collect_identity()) | made,
            "weights": self.weights.recipe(),
            "batch": self.batch,
            "shapes": {
                name: [list(shape) for shape in shapes]
                for name, shapes in sorted(self.shapes.items())
            },
        }

    def load(self) -> LoadedModel:
        """The model in memory, with the requested shapes in its card."""
        if self._loaded is None:
            loaded = self.source.load(self.weights)
            read = {name: shape for name, shape in self.shapes.items() if name not in loaded.unread}
            card = loaded.card.with_profile(self.batch, read)
            if (
                card.tokenization is not None
                and (longest := card.inputs[0].max[-1]) > card.tokenization.max_length
            ):
                raise BadInputError(
                    f"{card.name} takes up to {card.tokenization.max_length} tokens, not {longest}",
                    argument="shape",
                    remedy="give shorter shapes, or a model with a larger position table",
                )
            self._loaded = replace(loaded, card=card)
        return self._loaded

    def find_quantization(self) -> Precision | None:
        """INT8 or FP8 for a model that comes quantized."""
        loaded = self.load()
        if loaded.onnx is None:
            return loaded.quantization
        own = find_own_precision(load_onnx(loaded.onnx, weights=False))
        return own if own in CALIBRATED else None

    def fresh_module(self) -> Any:
        """A new copy of the module, since backends change the types of parameters in place."""
        return self.source.load(self.weights).module


def choose_available_weights(model: Model, workspace: Path, listener: Listener) -> Model:
    """`model`, with random weights if the default ones cannot be downloaded; warns about it.

    A failed download is recorded in the workspace while its host does not answer, so that builds without a network are
    not slowed down each time.
    """
    if model.weights.kind != "default":
        return model
    memory = (
        workspace
        / NOTES
        / f"unavailable-{hash_value(dict(model.source.collect_identity()))[:12]}.json"
    )
    reason = None
    with suppress(OSError, ValueError, KeyError):
        record = json.loads(memory.read_text(encoding="utf-8"))
        reason = (
            str(record["reason"])
            if explain_unreachable(f"https://{record['host']}", PROBE_S)
            else None
        )
    if reason is None:
        try:
            model.load()
        except NoWeightsError as error:
            reason = str(error)
            write_json(memory, {"reason": reason, "host": error.host})
        else:
            memory.unlink(missing_ok=True)
            return model
    instead = "using seeded random weights instead: speed is meaningful, accuracy is not"
    given = Argument("weights", "FILE")
    listener.warn(f"{reason}\n{instead} (pass " + given + " for real weights)")
    weights = WeightsRequest(kind="random", seed=model.weights.seed)
    return replace(model, weights=weights, fallback_reason=reason, _loaded=None)


@dataclass(frozen=True, slots=True)
class Reference:
    inputs: Arrays
    outputs: Arrays
    labels: np.ndarray | None = None


def reference_from_file(path: Path) -> Reference:
    stored = read_arrays(path)
    inputs, outputs = (
        {
            name.removeprefix(side): values
            for name, values in stored.items()
            if name.startswith(side)
        }
        for side in ("input:", "output:")
    )
    return Reference(inputs, outputs, stored.get("labels"))


REVISION = 14
"""Raise it if this stage writes something else from the same recipe."""


def find_stored_model(model: Model, store: Store) -> Entry[ModelInfo] | None:
    """The store's entry of `model`, with the place of its card as of now."""
    stored = store.get(ModelInfo, _recipe(model))
    return stored and place_at_source(stored, model.source)


def compute_model_id(model: Model) -> str:
    return compute_entry_id(ModelInfo, _recipe(model))


def prepare_model(
    model: Model, store: Store, listener: Listener
) -> tuple[Model, Entry[ModelInfo] | None]:
    """`model` with available weights, and its store entry if it exists."""
    if model.source.runs_code:  # its code determines the model
        with listener.step("load"):
            model.load()
    if (stored := find_stored_model(model, store)) is not None:
        return model, stored
    available = choose_available_weights(model, store.workspace, listener)
    return available, None if available is model else find_stored_model(available, store)


def read_card(model: Model, stored: Entry[ModelInfo] | None) -> ModelCard:
    return read_stored_card(stored) if stored else model.load().card


def read_tokenizer(model: Model, stored: Entry[ModelInfo] | None) -> str | None:
    if stored is None:
        return model.load().tokenizer
    return (
        stored.file(TOKENIZER).read_text(encoding="utf-8")
        if stored.file(TOKENIZER).is_file()
        else None
    )


def export_model(
    model: Model, store: Store, listener: Listener, stored: Entry[ModelInfo] | None = None
) -> tuple[Entry[ModelInfo], bool]:
    """The store entry `model` with `model.onnx` and `card.json`, and whether it existed.

    `stored` is the entry from `prepare_model`, so that it is not hashed twice.
    """
    if stored is not None:
        _tell_of_changes(stored, listener)
        return stored, True

    def make(directory: Path) -> ModelInfo:
        loaded = model.load()
        require_matching_input(loaded.card)
        target = directory / ONNX
        if loaded.onnx is not None:
            # loads external data too, so that the entry is complete
            prepared = prepare_graph(onnx.load(loaded.onnx), loaded.card, own_file=True)
            save_graph(prepared.graph, target)
        else:
            prepared = onnx_from_torch(loaded.module, loaded.card, target, listener)
            if (fault := find_faulty_pair(prepared.graph)) is not None:
                raise BadInputError(fault, place=loaded.card.source)
        card = complete_card(loaded.card, target)
        place = None
        if isinstance(model.source, CardSource):
            card = replace(card, data=model.source.data_as_written)
            place = format_card_place(model.source.path, store.workspace)
        (directory / CARD).write_text(json.dumps(card.to_dict(), indent=2) + "\n", encoding="utf-8")
        if loaded.tokenizer is not None:
            (directory / TOKENIZER).write_text(loaded.tokenizer, encoding="utf-8")
        own_precision = find_own_precision(onnx.load(target, load_external_data=False))
        return ModelInfo(
            name=card.name,
            source=card.source,
            weights=loaded.weights,
            simplified=prepared.simplified,
            own_precision=own_precision,
            left_out=() if loaded.module is None else getattr(loaded.module, "left_out", ()),
            card=place,
            remarks=prepared.remarks,
            content=compute_content_id(onnx.load(target), card),
        )

    entry, existed = store.produce(ModelInfo, _recipe(model), make, listener=listener)
    _tell_of_changes(entry, listener)
    return place_at_source(entry, model.source), existed


def _tell_of_changes(model: Entry[ModelInfo], listener: Listener) -> None:
    """Warns of what is not as the user gave it: rewrites that failed, its type, and outputs that are no tensors."""
    info = model.info
    for remark in info.remarks:
        listener.warn(f"{info.name}: {remark}")
    if (changed := describe_conversion(info.name, info.weights)) is not None:
        listener.warn(changed)
    if info.left_out:
        outputs = ", ".join(info.left_out)
        listener.warn(
            f"{info.name}: left out of its outputs, because they are not tensors: {outputs}"
        )


def _recipe(model: Model) -> dict[str, Any]:
    if model.exported is not None:
        return dict(model.exported.recipe)
    return {
        "revision": REVISION,
        "model": model.recipe(),
        "tools": {
            name: get_package_version(name) for name in ("onnx", "onnxscript", "onnxslim", "torch")
        },
    }


def explain_other_export(model: Model, exported: Entry[ModelInfo]) -> tuple[str, bool]:
    """How `exported` differs from an export of `model` now, and whether only the exporter's version does.

    The text is empty if the recipes are equal: `other versions of torch`, `other weights, batch`.
    """
    now, then = _recipe(model), exported.recipe
    if now["model"] != then.get("model"):
        given = then.get("model") or {}
        names = now["model"].keys() | given.keys()
        differing = [name for name in sorted(names) if now["model"].get(name) != given.get(name)]
        return f"other {', '.join(differing)}", False
    made_by = then.get("tools") or {}
    tools = [name for name, version in now["tools"].items() if made_by.get(name) != version]
    if now["revision"] != then.get("revision"):
        tools = ["optpipe", *tools]
    return (f"other versions of {', '.join(tools)}" if tools else "", True)


ONNX_ORIGIN = "the file as given, on ONNX Runtime without optimizations"
BATCH_WAY_OUT = "its forward pass depends on the batch size; build it for one: " + Argument(
    "batch", "N"
)
TORCH_WAY_OUT = (
    "its forward pass is random\n"
    "disable randomness in eval mode, as torch.nn.Dropout and functional.dropout(..., training=self.training) do"
)
TIE_WAY_OUT = "make them differ in the model, for example by a small ramp over their indices"
ONNX_WAY_OUT = (
    "its graph is random\nexport it in eval mode, or remove RandomNormal, Dropout and similar nodes"
)


def compute_reference(
    model: Model,
    entry: Entry[ModelInfo],
    data: Path | None,
    store: Store,
    listener: Listener,
    calibration: Path | None = None,
    *,
    truncate: bool = False,
) -> tuple[Entry[ReferenceInfo], bool]:
    """The store entry `reference`: the source model's outputs on the samples of `choose_samples`, compared with the exported graph's.

    Both run on all samples, and on a few at batch sizes 1 and 3 if the profile allows. Raises GateError for outputs
    outside the FP32 tolerance.
    """
    card = read_stored_card(entry)
    samples = choose_samples(card, data, calibration, entry, listener, truncate=truncate)
    labels = read_sample_labels(card, samples)
    recipe = {
        "revision": REVISION,
        "model": entry.id,
        "samples": samples.sha256,
        "data": samples.data,
        "held_out": list(samples.held_out),
        "labels": None if labels is None else labels.tolist(),
    }

    def make(directory: Path) -> ReferenceInfo:
        inputs = load_sample_inputs(card, samples, entry)
        source = model.load()
        module = source.module
        selection = read_selection(entry.file(ONNX))
        try:
            onnx_outputs = _run_onnx_model(entry.file(ONNX), card, inputs, listener, selection)
            if module is None:
                assert source.onnx is not None
                [outputs] = run_onnx_graph(source.onnx, card, inputs, card.batch_range[2])
                errors = _require_rewrites(
                    entry, source.onnx, card, inputs, outputs, onnx_outputs, selection
                )
            else:
                outputs = run_torch_model(module, card, inputs)
                errors = _check_parity(
                    module, entry.file(ONNX), card, inputs, outputs, onnx_outputs, selection
                )
                _require_independence(module, card, inputs, outputs, selection)
                outputs = _run_given_module(source, card, inputs, outputs, selection)
        except (GateError, InconclusiveError):
            for name, value in inputs.items():
                if value.dtype.kind == "f" and np.isnan(value).any():
                    raise BadInputError(
                        f"{samples.data}: input '{name}' contains NaN, and so do the outputs"
                    ) from None
            _require_fixed_shapes(entry.file(ONNX), card, inputs)
            size = card.batch_range[1]
            if module is None:
                _require_repeatable(
                    run_onnx_graph(source.onnx or entry.file(ONNX), card, inputs, size, size),
                    card,
                    ONNX_WAY_OUT,
                    selection,
                )
            else:
                answers = [run_torch_model(module, card, inputs) for _ in range(2)]
                _require_repeatable(answers, card, TORCH_WAY_OUT, selection)
            raise
        tensors = {f"input:{name}": value for name, value in inputs.items()}
        tensors |= {f"output:{name}": value for name, value in outputs.items()}
        if labels is not None:
            tensors["labels"] = labels
        write_arrays(directory / REFERENCE, tensors)
        apart = any(bool((value != value[:1]).any()) for value in outputs.values())
        return ReferenceInfo(
            samples_kind=samples.kind,
            samples=len(samples.drawn.files) if samples.drawn else 0,
            samples_sha256=samples.sha256,
            data=samples.data,
            held_out=samples.held_out,
            origin="source model" if module is not None else ONNX_ORIGIN,
            export_parity=errors,
            constant=not apart and len(next(iter(inputs.values()))) > 1,
        )

    reference, stored = store.produce(
        ReferenceInfo, recipe, make, parents=(entry.id,), listener=listener
    )
    if reference.info.constant:
        listener.warn(
            f"{card.name} gives the same outputs for every input, so comparing outputs proves nothing"
        )
    return reference, stored


def _run_given_module(
    loaded: LoadedModel,
    card: ModelCard,
    inputs: Arrays,
    converted: dict[str, np.ndarray],
    selection: Selection,
) -> dict[str, np.ndarray]:
    """The outputs of the user's own module, which are the reference; `converted` if it is in float32.

    Raises GateError if the conversion to float32 changes more than the rounding of its own type explains.
    """
    if loaded.own_module is None:
        return converted
    outputs = run_torch_model(loaded.own_module, card, inputs)
    tolerated = TOLERATED_RELATIVE_ERROR[loaded.weights.own_precision]
    for error in _compare_outputs(outputs, converted, selection):
        if error.relative > tolerated:
            own = loaded.weights.converted_from
            problem = f"{card.name} in float32 does not match the module in {own}: output '{error.name}' has a"
            raise GateError(
                f"{problem} relative error of {error.relative:.2e}; rounding to {own} explains {tolerated:.0e}\n"
                f"it may overflow in {own}, or choose by its type in forward; return the module in float32 (.float())"
            )
    return outputs


def _require_repeatable(
    answers: Sequence[Arrays], card: ModelCard, way_out: str, selection: Selection
) -> None:
    """Raises BadInputError if the source model's outputs are not finite, GateError if they differ between `answers`."""
    first, again = answers
    require_finite_outputs(card.name, first)
    for error in _compare_outputs(first, again, selection):
        if error.relative > TOLERATED_RELATIVE_ERROR[Precision.FP32]:
            raise GateError(f"{card.name} is not deterministic (output '{error.name}'): {way_out}")


def require_finite_outputs(name: str, outputs: Arrays) -> None:
    """Raises BadInputError if the source model `name` gives NaN or infinity: it cannot be what its user trained."""
    for output, value in outputs.items():
        if not np.isfinite(value).all():
            raise BadInputError(
                f"{name} produces NaN or Inf in output '{output}'; check its weights"
            )


def _require_fixed_shapes(path: Path, card: ModelCard, inputs: Arrays) -> None:
    """Raises BadInputError if an output's shape differs between samples of a batched model."""
    smallest, _, largest = card.batch_range
    seen: dict[str, tuple[int, ...]] = {}
    with PlainSession(path) as session:
        for batch, _ in split_batches(card, inputs, smallest) if largest > 1 else ():
            for name, value in session.run(batch).items():
                if (first := seen.setdefault(name, value.shape)) != value.shape:
                    problem = f"{card.name}: the shape of output '{name}' depends on the data"
                    shapes = f"{first} for one input, {value.shape} for another"
                    raise BadInputError(
                        f"{problem}: {shapes}\npad it to a fixed shape in the model, or leave it out"
                    )


def run_torch_model(module: Any, card: ModelCard, inputs: Arrays) -> dict[str, np.ndarray]:
    """The source model's outputs by name, in FP32 on the CPU, in batches that the profile allows.

    Among equal values, its selections take the lower index, as ONNX's do. Raises BadInputError with the module's error.
    """

    def run(batch: Arrays) -> Arrays:
        try:
            returned = module(*(torch.from_numpy(batch[spec.name]) for spec in card.inputs))
        except OptpipeError:
            raise
        except Exception as error:  # a user's code
            raise BadInputError(
                f"{card.name} fails on its inputs: {describe_user_error(error)}"
            ) from error
        flat = returned if isinstance(returned, tuple | list) else (returned,)
        values = [
            tensor.float().numpy() if tensor.is_floating_point() else tensor.numpy()
            for tensor in flat
        ]
        return dict(zip((spec.name for spec in card.outputs), values, strict=True))

    with torch.inference_mode(), open_stable_selection():
        return run_rows(card, inputs, run)


def _require_independence(
    module: Any, card: ModelCard, inputs: Arrays, outputs: Arrays, selection: Selection
) -> None:
    """Raises GateError if the source model gives other `outputs` in smaller batches, which an exported graph cannot."""
    for size in _choose_sizes(card, inputs)[:-1]:
        try:
            independent = run_torch_model(
                module, card, {name: value[:size] for name, value in inputs.items()}
            )
        except Exception as error:  # also if outputs cannot be joined
            why = first_line(error.__cause__ or error)
            raise GateError(
                f"{card.name} does not run at batch size {size}: {why}", remedy=BATCH_WAY_OUT
            ) from error
        independent = align_rows(
            outputs, independent, selection, TOLERATED_RELATIVE_ERROR[Precision.FP32]
        )
        for name, value in independent.items():
            expected = outputs[name][:size]
            if value.shape != expected.shape:
                problem = f"{card.name} at batch size {size}: output '{name}' is {value.shape}, not {expected.shape}"
                raise GateError(problem, remedy=BATCH_WAY_OUT)
            off = compute_output_error(name, expected, value).relative
            if off > TOLERATED_RELATIVE_ERROR[Precision.FP32]:
                problem = f"{card.name} gives other outputs at batch size {size}: '{name}' is off by {off:.2e}"
                raise GateError(problem, remedy=BATCH_WAY_OUT)


def _choose_sizes(card: ModelCard, inputs: Arrays) -> list[int]:
    """Batch sizes for comparing outputs, in ascending order."""
    smallest, usual, largest = card.batch_range
    sizes = {
        size for size in (1, 3, len(next(iter(inputs.values())))) if smallest <= size <= largest
    }
    return sorted(sizes) or [usual]


def _run_onnx_model(
    path: Path, card: ModelCard, inputs: Arrays, listener: Listener, selection: Selection
) -> dict[str, np.ndarray]:
    """The graph's outputs on all samples. Raises GateError if smaller batches give other outputs."""
    wanted = _choose_sizes(card, inputs)
    batches, dynamic = run_onnx_graph(path, card, inputs, *wanted), is_quantized_dynamically(path)
    tolerated = TOLERATED_RELATIVE_ERROR[Precision.INT8 if dynamic else Precision.FP32]
    for size, outputs in zip(wanted, batches, strict=True):
        errors = _compare_outputs(batches[-1], outputs, selection)
        worst = max(errors, key=lambda error: error.relative)
        if worst.relative > tolerated:
            off = f"output '{worst.name}' is off by {worst.relative:.2e}"
            undecided = f"whether the exported graph gives other outputs at batch size {size}"
            _require_decidable(path, card, inputs, f"{undecided} cannot be decided: {off}")
            problem = f"the exported graph gives other outputs at batch size {size}"
            raise GateError(f"{problem}: {off}", remedy=BATCH_WAY_OUT)
        if dynamic and worst.relative > TOLERATED_RELATIVE_ERROR[Precision.FP32]:
            cause = "its scales come from each whole batch, and its outputs depend on what shares a batch"
            change = f"{worst.relative:.1e} at batch size {size}"
            listener.warn(f"{card.name} is quantized dynamically: {cause} (by {change})")
    return batches[-1]


def _require_decidable(path: Path, card: ModelCard, inputs: Arrays, undecided: str) -> None:
    """Raises InconclusiveError if the graph in `path` selects among values that are equal up to rounding on `inputs`.

    Its outputs then differ between two right runtimes too.
    """
    graph = load_onnx(path)
    batches = (batch for batch, _ in split_batches(card, inputs))
    tie = next((said for batch in batches if (said := describe_tie(graph, batch))), None)
    if tie is not None:
        way_out = (
            f"{tie}, and another runtime may choose others; {TIE_WAY_OUT}, or give trained weights"
        )
        raise InconclusiveError(undecided, remedy=way_out)


def _compare_outputs(
    expected: Arrays, actual: Arrays, selection: Selection
) -> tuple[OutputError, ...]:
    """Compares common samples: a fixed batch size may have left out the last few. Selected rows are sets."""
    actual = align_rows(expected, actual, selection, TOLERATED_RELATIVE_ERROR[Precision.FP32])
    counts = {name: min(len(rows), len(actual[name])) for name, rows in expected.items()}
    return tuple(
        compute_output_error(name, expected[name][:n], actual[name][:n])
        for name, n in counts.items()
    )


def run_onnx_graph(
    path: Path, card: ModelCard, inputs: Arrays, *sizes: int
) -> list[dict[str, np.ndarray]]:
    """The graph's outputs in batches of each size, in one session; all sizes but the last get few samples."""
    counts = [max(size, SAMPLE_COUNT) if size < sizes[-1] else None for size in sizes]
    with PlainSession(path) as session:
        given = [{name: value[:count] for name, value in inputs.items()} for count in counts]
        return [
            run_rows(card, rows, session.run, size) for size, rows in zip(sizes, given, strict=True)
        ]


def _require_rewrites(
    entry: Entry[ModelInfo],
    source: Path,
    card: ModelCard,
    inputs: Arrays,
    outputs: Arrays,
    actual: Arrays,
    selection: Selection,
) -> tuple[OutputError, ...]:
    """The errors of the rewritten graph's outputs, `actual`, against those of the user's file.

    Raises GateError with the first tensor that differs.
    """
    rows = {name: value[: len(actual[name])] for name, value in outputs.items()}
    actual = align_rows(rows, actual, selection, EXACT_RELATIVE)
    if (worst := find_worst([rows], [actual])) is not None:
        batches = [batch for batch, _ in split_batches(card, inputs)]
        graphs = load_onnx(source), load_onnx(entry.file(ONNX))
        first = RewriteGuard(batches).find_difference(*graphs)
        if first is not None or worst.relative > TOLERATED_RELATIVE_ERROR[Precision.FP32]:
            undecided = f"{card.name}: whether the graph as optpipe rewrote it matches the file"
            _require_decidable(
                source, card, inputs, f"{undecided} cannot be decided: {first or worst}"
            )
            problem = f"{card.name}: the graph as optpipe rewrote it does not match the file"
            raise GateError(f"{problem} on these inputs: {first or worst}")
    return _compare_outputs(outputs, actual, selection)


def _check_parity(
    module: Any,
    path: Path,
    card: ModelCard,
    inputs: Arrays,
    expected: Arrays,
    actual: Arrays,
    selection: Selection,
) -> tuple[OutputError, ...]:
    """The errors of the exported graph's outputs, `actual`, against the module's, `expected`; selected rows are sets.

    Raises GateError beyond the tolerance, with the first tensor that differs and a selection among equal values, if there are.
    """
    tolerated = TOLERATED_RELATIVE_ERROR[Precision.FP32]
    errors = _compare_outputs(expected, actual, selection)
    for error in errors:
        if error.relative > TOLERATED_RELATIVE_ERROR[Precision.FP32]:
            problem = f"{card.name}: the exported graph does not match the source model"
            off = f"output '{error.name}' has a relative error of {error.relative:.2e}"
            tolerance = f"the tolerance is {TOLERATED_RELATIVE_ERROR[Precision.FP32]:.0e}"
            from optpipe.models.export.divergence import find_first_divergence

            batch = next(batch for batch, _ in split_batches(card, inputs))
            first = find_first_divergence(module, card, path, batch, tolerated)
            where = "" if first is None else f"; the first tensor that differs is {first}"
            undecided = f"{card.name}: whether the exported graph matches the source model"
            _require_decidable(path, card, inputs, f"{undecided} cannot be decided: {off}{where}")
            raise GateError(f"{problem}: {off}; {tolerance}{where}")
    return errors
