"""`optpipe calibrate`, and INT8 and FP8 graphs: the best method's table, and the layers that a budget keeps in floating point."""

import json
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from optpipe.backends.base import Device
from optpipe.backends.onnx_graph import load_onnx
from optpipe.core.card import ModelCard
from optpipe.core.entries import (
    CalibrationInfo,
    GraphInfo,
    ModelInfo,
    RecoveryStep,
    SampleSetSummary,
    SkippedLayer,
    WeightsRecord,
)
from optpipe.core.errors import BadInputError
from optpipe.core.events import Listener, SilentListener
from optpipe.core.precision import CALIBRATED, Budget, Precision, PrecisionCost
from optpipe.core.quantity import format_count
from optpipe.core.wording import Argument, Call
from optpipe.evaluate.tasks import require_fitting_task
from optpipe.models.export.exported import (
    Model,
    export_model,
    prepare_model,
    read_card,
    read_tokenizer,
)
from optpipe.models.export.source_graph import make_probe
from optpipe.models.inputs.program_data import store_python_file
from optpipe.models.inputs.sample_set import (
    FEW_SAMPLES,
    SampleSet,
    Unusable,
    draw_subset,
    refuse_overlap,
)
from optpipe.models.inputs.task_data import (
    drop_unknown_labels,
    fit_batch_size,
    iterate_input_batches,
    load_sample_set,
    resolve_texts,
    suggest_card,
)
from optpipe.models.inputs.tensor_files import FORMS, holds_tensors
from optpipe.models.inputs.tensor_set import read_tensor_set
from optpipe.models.stored_card import read_stored_card
from optpipe.quantize.faithful import require_faithful, require_half_step
from optpipe.quantize.modelopt import round_rest_to_half
from optpipe.quantize.qdq import Target, place_qdq, quantize_graph
from optpipe.quantize.ranges import (
    METHODS,
    CalibrationTable,
    Collector,
    TensorRange,
    choose_batch_size,
    compute_range,
    is_table,
    read_table,
    write_table,
)
from optpipe.quantize.sensitivity import (
    LayerCost,
    MethodsInfo,
    SelectionInfo,
    SensitivityInfo,
    compare_methods,
    count_layer_macs,
    describe_mixed,
    lower_by_table,
    rank_layers,
    require_lowered,
    select_kept_layers,
)
from optpipe.report.document import (
    Column,
    Document,
    Section,
    Sentence,
    Table,
    Tone,
    figure_column,
    figure_columns,
    format_cost_snr,
    format_drop,
    make_document,
    make_table,
    warn_of_weights,
)
from optpipe.workspace.entry import Entry
from optpipe.workspace.environment import get_package_version, list_gpus
from optpipe.workspace.file_names import CALIBRATION_SET, ONNX
from optpipe.workspace.places import require_writable_folder
from optpipe.workspace.store import Store

CALIBRATION_REVISION = 5
TARGETS: tuple[Target, ...] = ("tensorrt", "cpu")


def load_calibration_data(
    model: Entry[ModelInfo],
    source: Path | None,
    count: int | None,
    seed: int,
    listener: Listener,
    held_out: Collection[str] = (),
) -> tuple[SampleSet, tuple[Unusable, ...]]:
    """The samples of `source`, or of the model's card, without those whose hash is in `held_out`; and the unreadable ones.

    Raises BadInputError if there is no set, it was drawn for another model, or it has validation samples.
    """
    card = read_stored_card(model)
    own = card.data.get("calibration")
    if source is None:
        require_calibration(card, remedy="as " + Argument("data"))
    samples, unreadable = load_sample_set(
        model, card, source or Path(str(own)), count, seed, listener
    )
    _require_own(samples, card, model)
    samples = replace(
        samples, files=tuple(file for file in samples.files if file.sha256 not in held_out)
    )
    if len(samples.files) < FEW_SAMPLES:
        listener.warn(
            f"only {len(samples.files)} calibration {samples.kind}; use {FEW_SAMPLES} or more for stable ranges"
        )
    return drop_unknown_labels(samples, card, listener), unreadable


def _require_own(
    samples: SampleSet, card: ModelCard, model: Entry[ModelInfo] | None = None
) -> None:
    """Raises BadInputError for a set that has samples of the card's validation set: images, texts, or tensors.

    Only texts need the exported `model`, for its tokenizer.
    """
    validation = Path(card.data.get("validation", ""))
    if "validation" in card.data and validation.exists():
        others, _ = load_sample_set(
            model, card, validation, None, 0, SilentListener(), truncate=True
        )
        refuse_overlap(samples, others)


def resolve_data(
    source: Path,
    card: ModelCard,
    tokenizer: str | None,
    store: Store,
    *,
    calibrates: bool,
    truncate: bool = False,
    count: int | None = None,
    seed: int = 0,
) -> Path:
    """`source`, the stored samples of a Python file's `CALIBRATION`, `count` of them at most, or the manifest of truncated texts.

    What `calibrates` may have no sample of the validation set.
    `tokenizer` is the content of a text model's. Raises BadInputError, before any computation, for inputs that the model rejects.
    """
    source = store_python_file(source, card, store, SilentListener(), count, seed)
    if holds_tensors(source):
        for rows in read_tensor_set(source, card.inputs).parts:
            for name, values in rows.items():
                if values.dtype.kind == "f" and not np.isfinite(values).all():
                    raise BadInputError(
                        f"{source}: input '{name}' contains NaN or Inf; give finite values"
                    )
    elif card.transform is None and card.tokenization is None and not is_table(source):
        way = suggest_card(card)
        raise BadInputError(
            f"{source} holds no inputs of {card.name} ({', '.join(spec.name for spec in card.inputs)})",
            remedy=f"give {FORMS}"
            + ("; images and texts need a model card: " + way if way else ""),
        )
    if is_table(source):
        return source
    if card.transform is not None and not holds_tensors(source) and calibrates:
        _require_own(load_sample_set(None, card, source, None, 0, SilentListener())[0], card)
    return resolve_texts(
        source, card, tokenizer, store.workspace / "calibration", truncate=truncate
    )


def require_calibration(
    card: ModelCard, precision: Precision = Precision.INT8, *, remedy: str | None = None
) -> None:
    """Raises BadInputError if a model's card names no calibration data; `remedy` is that of a build if it is None."""
    if "calibration" in card.data:
        return
    what = (
        "a JSON Lines file"
        if card.tokenization
        else "a folder of images"
        if card.transform
        else FORMS
    )
    raise BadInputError(
        f"{precision.upper()} needs real inputs to calibrate {card.name} on: give {what}",
        remedy=remedy
        or "as "
        + Argument("calibration")
        + f", or leave {precision} out of "
        + Argument("precision"),
    )


def calibrate_model(
    model: Entry[ModelInfo],
    samples: SampleSet,
    methods: tuple[str, ...],
    targets: tuple[Target, ...],
    store: Store,
    listener: Listener,
) -> tuple[Entry[CalibrationInfo], bool]:
    """The store entry `calibration`: `set.json` and a table for each of `methods`; complete or absent."""
    device: Device = "cuda" if list_gpus() else "cpu"
    card = read_stored_card(model)
    about = SampleSetSummary(samples.name, samples.sha256, len(samples.files), samples.seed)
    recipe = {
        "revision": CALIBRATION_REVISION,
        "model": model.id,
        "set": samples.sha256,
        "transform": card.preprocessing_sha256,
        "methods": list(methods),
        "targets": list(targets),
        "provider": device,
        "onnxruntime": get_package_version("onnxruntime-gpu"),
    }

    def make(directory: Path) -> CalibrationInfo:
        ranges = _compute_ranges(model, card, samples, methods, targets, device, listener)
        for method, ranges_of in ranges.items():
            table = CalibrationTable(
                method=method,
                model=card.name,
                graph_sha256=model.sha256(ONNX),
                set=about,
                transform_sha256=card.preprocessing_sha256,
                ranges=ranges_of,
            )
            write_table(directory / name_table_file(method), table)
        manifest = json.dumps(samples.to_dict(directory), indent=1)
        (directory / CALIBRATION_SET).write_text(manifest + "\n", encoding="utf-8")
        return CalibrationInfo(card.name, about, methods, len(ranges[methods[0]]))

    return store.produce(CalibrationInfo, recipe, make, parents=(model.id,), listener=listener)


CHOICE_SAMPLES = 64
"""Samples on which the method is chosen whose graph keeps the outputs nearest to FP32's."""
HELD_OUT_FROM = 4 * CHOICE_SAMPLES
"""In a smaller set they give ranges too: ranges from fewer samples cost more than the choice on others gains (`benchmarks/README.md`)."""


def hold_out(samples: SampleSet, methods: Sequence[str]) -> tuple[SampleSet, SampleSet]:
    """The samples that give the ranges, and those that choose between `methods`."""
    judge = draw_subset(samples, CHOICE_SAMPLES)
    if len(methods) == 1 or len(samples.files) < HELD_OUT_FROM:
        return samples, judge
    judging = {*judge.files}
    return replace(
        samples, files=tuple(file for file in samples.files if file not in judging)
    ), judge


def name_table_file(method: str) -> str:
    return f"table-{method}.json"


def tables_from_entry(entry: Entry[CalibrationInfo]) -> dict[str, CalibrationTable]:
    return {
        method: read_table(entry.file(name_table_file(method))) for method in entry.info.methods
    }


def _compute_ranges(
    model: Entry[ModelInfo],
    card: ModelCard,
    samples: SampleSet,
    methods: tuple[str, ...],
    targets: tuple[Target, ...],
    device: Device,
    listener: Listener,
) -> dict[str, dict[str, TensorRange]]:
    if (own := model.info.own_precision) in CALIBRATED:
        raise BadInputError(
            f"{card.name} is quantized already; `"
            + Call("build")
            + "` with "
            + Argument("precision", own)
            + " builds it as it is"
        )
    graph = load_onnx(model.file(ONNX))
    placed = [place_qdq(graph, target) for target in targets]
    wanted = {name for layer in placed for name in layer.tensors}
    if not wanted:
        why = "; ".join(sorted({skip.reason for skip in placed[0].skipped})[:3])
        raise BadInputError(
            f"{card.name} has no layer that benefits from INT8 or FP8{f' ({why})' if why else ''}\n"
            "build it in fp32 or fp16"
        )
    order = [value.name for value in graph.graph.input] + [
        name for node in graph.graph.node for name in node.output
    ]
    tensors = tuple(name for name in order if name in wanted)
    smallest, _, size = card.batch_range
    if smallest < size:
        first, _ = next(iterate_input_batches(model, card, samples, 1))
        size = fit_batch_size(card, choose_batch_size(model.file(ONNX), tensors, first, device))
    samples = hold_out(samples, methods)[0]
    collector = Collector(model.file(ONNX), tensors, set(methods) != {"max"}, device)
    with listener.step(
        f"calibrate on {len(samples.files)} {samples.kind}", total=len(samples.files)
    ) as step:
        for batch, count in iterate_input_batches(model, card, samples, size, by_length=True):
            collector.add(batch)
            step.advance(count)
    statistics, ranges = collector.statistics(), dict[str, dict[str, TensorRange]]()
    with listener.step(
        f"ranges of {len(tensors)} tensors", total=len(tensors) * len(methods)
    ) as step:
        for method in methods:
            ranges[method] = {}
            for name, counts in statistics.items():
                ranges[method][name] = TensorRange(
                    compute_range(counts, method), counts.low, counts.high
                )
                step.advance()
    return ranges


REVISION = 6
TABLE = "calibration-table.json"


def make_calibrated_graph(
    precision: Precision,
    target: Target,
    model: Entry[ModelInfo],
    calibration: Path | None,
    store: Store,
    listener: Listener,
    budget: Budget | None = None,
    held_out: Collection[str] = (),
    half: bool = True,
    recover: Sequence[str] = (),
) -> tuple[Entry[GraphInfo], bool]:
    """The store entry `graph` in INT8 or FP8 with Q/DQ pairs in the form `target`.

    The other layers of an INT8 graph are FP16 if `half` is set and the form is TensorRT's, and FP32 otherwise.

    `calibration` is a folder of images, an image-set manifest, or a calibration table; default: the card's set, without the
    samples whose hash is in `held_out`. With a `budget`, the fewest layers that exceed it stay in floating point, after
    the steps `recover` of an INT8 graph. Raises
    BadInputError for a budget with a table, and for FP8 with too few linear layers.
    """
    half = half and target == "tensorrt"
    if target == "fp8":
        _require_linear_layers(model)
    if calibration is not None and is_table(calibration):
        if recover:
            raise BadInputError(
                Argument("recover")
                + f" needs calibration data to learn from, and {calibration} is a finished calibration table"
            )
        if budget is not None:
            raise BadInputError(
                Argument("budget")
                + f" needs calibration data to search on, and {calibration} is a finished calibration table"
            )
        return graph_from_table(
            model, read_table(calibration), target, (), store, listener, half=half
        )
    samples, _ = load_calibration_data(model, calibration, None, 0, listener, held_out)
    steps: tuple[RecoveryStep, ...] = ()
    source = model
    if recover and precision is Precision.INT8:
        from optpipe.quantize.recovery.recover import recover_accuracy

        def calibrate(altered: Entry[ModelInfo], learn: SampleSet) -> CalibrationTable:
            return _calibrate_best(model, altered, learn, target, store, listener)[0]

        recovered = recover_accuracy(
            model, recover, samples, target, budget, calibrate, store, listener
        )
        source, best, steps, made_of = (
            recovered.source,
            recovered.table,
            recovered.steps,
            recovered.parents,
        )
    else:
        best, made_of = _calibrate_best(model, model, samples, target, store, listener)
    if budget is None:
        return graph_from_table(
            source, best, target, made_of, store, listener, half=half, recovery=steps
        )
    lowering = lower_by_table(source, best, target)
    chosen, _ = select_kept_layers(model, lowering, samples, budget, store, listener)
    require_lowered(chosen.info, precision)
    ranking = (
        rank_layers(model, lowering, samples, store, listener)[0].info.layers
        if chosen.info.keep
        else ()
    )
    best, parents = replace(best, keep=chosen.info.keep), (*made_of, chosen.id)
    return graph_from_table(
        source,
        best,
        target,
        parents,
        store,
        listener,
        (chosen, ranking),
        half=half,
        recovery=steps,
    )


def _calibrate_best(
    model: Entry[ModelInfo],
    altered: Entry[ModelInfo],
    samples: SampleSet,
    target: Target,
    store: Store,
    listener: Listener,
) -> tuple[CalibrationTable, tuple[str, ...]]:
    """The table of `altered`, a graph of `model`, that keeps the outputs nearest to those of `model`, and the entries it is made of."""
    entry, _ = calibrate_model(altered, samples, tuple(METHODS), (target,), store, listener)
    tables = tables_from_entry(entry)
    judge = hold_out(samples, tuple(METHODS))[1]
    compared, _ = compare_methods(model, tables, judge, target, store, listener, altered)
    return tables[compared.info.best], (entry.id, compared.id)


def _require_linear_layers(model: Entry[ModelInfo]) -> None:
    """Checked before calibration. Raises BadInputError if FP8 fits no layer."""
    graph = load_onnx(model.file(ONNX))
    macs, placed = (
        count_layer_macs(graph, read_stored_card(model)),
        place_qdq(graph, "fp8"),
    )
    share = sum(macs.get(name, 0) for name in placed.layers) / max(sum(macs.values()), 1)
    if share == 0:
        largest = max(placed.skipped, key=lambda layer: macs.get(layer.layer, 0), default=None)
        why = f" ({largest.layer}: {largest.reason})" if largest else ""
        raise BadInputError(
            f"FP8 fits no layer of {model.info.name}{why}\nbuild it in fp16 or int8"
        )


def graph_from_table(
    model: Entry[ModelInfo],
    table: CalibrationTable,
    target: Target,
    parents: tuple[str, ...],
    store: Store,
    listener: Listener,
    chosen: tuple[Entry[SelectionInfo], Sequence[LayerCost]] | None = None,
    *,
    half: bool = False,
    recovery: tuple[RecoveryStep, ...] = (),
) -> tuple[Entry[GraphInfo], bool]:
    """The store entry `graph` of `model` by `table`, with FP16 around the Q/DQ pairs if `half`; `chosen` is a budget's selection and
    its ranking.

    Raises BadInputError if the table is of another model or other preprocessing.
    """
    if table.model != model.info.name:
        raise BadInputError(
            f"the calibration table is for model {table.model}, not {model.info.name}"
        )
    own = read_stored_card(model).preprocessing_sha256
    if own is not None and table.transform_sha256 is not None and table.transform_sha256 != own:
        raise BadInputError(
            f"the calibration table was made for different preprocessing than {model.info.name}'s; "
            "pass the calibration data themselves"
        )
    if table.graph_sha256 != model.sha256(ONNX):
        listener.warn(
            "the calibration table is from a different export of this model; matching tensors by name"
        )
    precision = Precision.FP8 if target == "fp8" else Precision.INT8
    recipe = {
        "revision": REVISION,
        "model": model.id,
        "precision": str(precision),
        "target": target,
        "table": table.sha256,
        "tools": {name: get_package_version(name) for name in ("nvidia-modelopt", "onnx")},
        **({} if half or target != "tensorrt" else {"rest": "fp32"}),
        **({"selection": chosen[0].id} if chosen else {}),
    }

    def make(directory: Path) -> GraphInfo:
        import onnx

        source = onnx.load(model.file(ONNX))
        feeds = make_probe(read_stored_card(model), source)
        graph, placed = quantize_graph(onnx.load(model.file(ONNX)), table, target, widen=half)
        require_faithful(source, graph, placed, table.ranges, feeds, table.model)
        if half:
            graph = require_half_step(
                graph,
                source,
                lambda given: round_rest_to_half(given, table.model, directory),
                feeds,
                table.model,
            )
        onnx.save(graph, directory / ONNX)
        write_table(directory / TABLE, table)
        mixed = None
        if chosen:
            reasons = {skip.layer: skip.reason for skip in placed.skipped}
            mixed = describe_mixed(model, chosen[0].info, chosen[1], placed.layers, reasons)
        return GraphInfo(
            precision,
            target=target,
            method=table.method,
            set=table.set,
            int8_layers=placed.layers,
            kept=placed.skipped,
            mixed=mixed,
            recovery=recovery,
        )

    return store.produce(GraphInfo, recipe, make, parents=(model.id, *parents), listener=listener)


@dataclass(frozen=True, slots=True)
class CalibrationPlan:
    source: Path | None
    """A folder of images, a file of JSON lines, or a set's manifest; None for the card's set."""
    count: int | None
    seed: int
    methods: tuple[str, ...]
    target: Target = "tensorrt"
    """The Q/DQ placement in which methods and layers are compared; the tables serve all targets."""
    sensitivity: bool = False
    output: Path | None = None
    truncate: bool = False


@dataclass(frozen=True, slots=True)
class CalibrationResult:
    model: str
    model_id: str
    weights: WeightsRecord
    set: SampleSetSummary
    kind: str
    """The plural name of its samples."""
    set_path: str
    unreadable: tuple[str, ...]
    target: Target
    tables: Mapping[str, str]
    """Paths by method."""
    compared: MethodsInfo
    skipped: tuple[SkippedLayer, ...]
    sensitivity: SensitivityInfo | None = None
    warnings: tuple[str, ...] = ()


def run_calibration(
    model: Model, plan: CalibrationPlan, store: Store, listener: Listener
) -> CalibrationResult:
    if plan.output is not None:
        require_writable_folder(plan.output, "output")
    store.require_writable()
    model, stored = prepare_model(model, store, listener)
    require_fitting_task(model, stored)
    source = plan.source
    if source is not None:
        card, tokenizer = read_card(model, stored), read_tokenizer(model, stored)
        source = resolve_data(
            source,
            card,
            tokenizer,
            store,
            calibrates=True,
            truncate=plan.truncate,
            count=plan.count,
            seed=plan.seed,
        )
    exported, _ = export_model(model, store, listener, stored)
    samples, unreadable = load_calibration_data(exported, source, plan.count, plan.seed, listener)
    entry, _ = calibrate_model(exported, samples, plan.methods, TARGETS, store, listener)
    tables = tables_from_entry(entry)
    judge = hold_out(samples, plan.methods)[1]
    compared, _ = compare_methods(exported, tables, judge, plan.target, store, listener)
    _warn_of_drop(compared.info, listener)
    best = tables[compared.info.best]
    names = [CALIBRATION_SET, *(name_table_file(method) for method in plan.methods)]
    if plan.output is None:
        files = {name: store.verify_entry(entry).file(name) for name in names}
    else:
        plan.output.mkdir(parents=True, exist_ok=True)
        files = {
            name: Path(shutil.copyfile(entry.file(name), plan.output / name)) for name in names
        }
    sensitivity = None
    if plan.sensitivity:
        lowering = lower_by_table(exported, best, plan.target)
        sensitivity = rank_layers(exported, lowering, samples, store, listener)[0].info
    _, placed = quantize_graph(load_onnx(exported.file(ONNX)), best, plan.target)
    return CalibrationResult(
        model=exported.info.name,
        model_id=exported.id,
        weights=exported.info.weights,
        set=entry.info.set,
        kind=samples.kind,
        set_path=str(files[CALIBRATION_SET]),
        unreadable=tuple(str(path) for path, _ in unreadable),
        target=plan.target,
        tables={method: str(files[name_table_file(method)]) for method in plan.methods},
        compared=compared.info,
        skipped=placed.skipped,
        sensitivity=sensitivity,
    )


def _warn_of_drop(compared: MethodsInfo, listener: Listener) -> None:
    cost = compared.costs[compared.best]
    if cost.drop is None or cost.drop_ci is None or cost.drop_ci[0] <= 0:
        return
    way = "keep layers in floating point with build " + Argument("budget")
    if set(compared.costs) != set(METHODS):
        way = "compare the methods with " + Argument("method", "all") + ", or " + way
    listener.warn(
        f"INT8 by {compared.best} costs accuracy: {100 * cost.drop:.2f} [{100 * cost.drop_ci[0]:.2f},"
        f" {100 * cost.drop_ci[1]:.2f}] points; " + way
    )


MAX_LAYERS_LISTED = 12


def document_from_calibration(result: CalibrationResult) -> Document:
    samples, chosen = result.set, result.tables[result.compared.best]
    build = Call("build", result.model, precision="int8", calibration=chosen)
    return make_document(
        [
            Sentence(
                f"{result.model}: {samples.count} {result.kind} of {samples.name} ({samples.sha256[:12]}, seed {samples.seed})"
            ),
            _tabulate_methods(result),
            _tabulate_layers(result.sensitivity, result.kind) if result.sensitivity else None,
            _list_skipped(result),
            *warn_of_weights(result.weights),
            Sentence(build, Tone.STRONG, "next"),
        ]
    )


def _tabulate_methods(result: CalibrationResult) -> Table:
    best = result.compared.best if len(result.tables) > 1 else None
    rows = [
        (method, format_cost_snr(cost), _format_drop(cost), "best" if method == best else "")
        for method, cost in result.compared.costs.items()
    ]
    title = f"INT8 by method, on {result.compared.images} of the {result.kind}, Q/DQ for {result.target}"
    columns: list[Column | str] = [
        "method",
        figure_column("SNR vs. FP32"),
        figure_column("drop, points"),
        "",
    ]
    return make_table(columns, rows, title=title)


def _tabulate_layers(sensitivity: SensitivityInfo, kind: str) -> Table:
    rows = [
        (row.layer, format_cost_snr(row.cost), _format_drop(row.cost), format_count(row.macs))
        for row in sensitivity.layers[:MAX_LAYERS_LISTED]
    ]
    title = f"layers by the cost of quantizing each alone, on {sensitivity.images} {kind}"
    return make_table(["layer", *figure_columns("SNR", "drop, points", "MACs")], rows, title=title)


def _list_skipped(result: CalibrationResult) -> Section | None:
    if not result.skipped:
        return None
    lines = [
        Sentence(f"  {skip.layer}: {skip.reason}", Tone.FAINT)
        for skip in result.skipped[:MAX_LAYERS_LISTED]
    ]
    if (more := len(result.skipped) - MAX_LAYERS_LISTED) > 0:
        lines.append(
            Sentence(f"  and {more} more (" + Argument("json") + " lists them)", Tone.FAINT)
        )
    return Section("kept in floating point", tuple(lines))


def _format_drop(cost: PrecisionCost) -> str:
    if cost.drop is None or cost.drop_ci is None:
        return "predictions are constant"
    return format_drop(cost.drop, cost.drop_ci)
