"""Compares the intermediate tensors of builds with those of the source model: the accumulated error, and that of each layer alone.

Both networks give the same tensors, in groups of limited size and one sample at a time. A layer's own error is that of its output
on the source's tensors.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optpipe.backends.base import BuildRequest, MarkedNetwork, Run
from optpipe.backends.registry import BACKENDS, load_artifact, verify_for_loading
from optpipe.backends.rewrites import EXACT_RELATIVE
from optpipe.backends.selections import read_selection
from optpipe.core.card import ModelCard
from optpipe.core.entries import ArtifactInfo, OutputError
from optpipe.core.errors import BadInputError, OptpipeError, require_existing
from optpipe.core.events import UNWATCHED, Listener, ProgressStep
from optpipe.core.suggestions import suggest_names
from optpipe.core.wording import Argument
from optpipe.evaluate.evaluate import list_model_artifacts
from optpipe.evaluate.result import EvaluatedModel
from optpipe.models.export.exported import Model, export_model, prepare_model, read_card
from optpipe.models.inputs.program_data import store_python_file
from optpipe.models.inputs.rows import split_batches
from optpipe.models.inputs.sample_set import draw_subset
from optpipe.models.inputs.samples import NOISE, SAMPLE_COUNT, choose_samples, load_sample_inputs
from optpipe.models.stored_card import read_stored_card
from optpipe.stats.paired import TOLERATED_RELATIVE_ERROR, pool_sums, sum_errors
from optpipe.stats.ratio import Ratio
from optpipe.stats.selected_rows import EMPTY, Selection, align_rows
from optpipe.workspace.entry import Entry
from optpipe.workspace.file_names import ONNX
from optpipe.workspace.store import Store

GROUP_VALUES = 1 << 26
"""Values of the tensors that are read together, of one sample; 0.25 GB in FP32 for each network."""
WORST = 5
COMPILER_LOSS_DB = 6.0
"""A compiled subgraph with twice the error of the same one without the compiler is the compiler's fault."""
CLIPPED = 1e-3
"""Share of clipped values from which a range saturates."""
OUTLIER = 32
"""A channel this many times as large as the median leaves the others 3 of 8 bits."""


@dataclass(frozen=True, slots=True)
class TensorDivergence:
    tensor: str
    layer: str
    """The operator or module that computes it."""
    error: OutputError
    own: OutputError
    """The error if its layer gets the source's tensors."""
    clipped: float | None
    """Share of the source's values outside the tensor's range; None if it is not quantized."""
    channel: int | None
    """The channel with the most clipped values, or else with the largest one."""
    outlier: float | None
    """The largest magnitude over that of the median channel; None if the tensor is not quantized."""

    @property
    def range_loss(self) -> str:
        """The loss by its range, in words; empty if that is little."""
        if not self.error.finite:
            return "overflow: values leave the range of the precision"
        if (self.clipped or 0) >= CLIPPED:
            return f"saturation: {self.clipped:.2%} of the values are outside its range, most in channel {self.channel}"
        if (self.outlier or 0) >= OUTLIER:
            times = f"{self.outlier:.0f} times those of the median channel"
            return f"outliers: values of channel {self.channel} are {times}"
        return ""


@dataclass(frozen=True, slots=True)
class Remedy:
    """A build that was tried in place of one that diverges."""

    command: str
    kept: tuple[str, ...]
    """The layers in floating point, the costliest first."""
    share: float
    """Share of its MACs in the requested precision."""
    result: EvaluatedModel
    rival: str = ""
    """A stored build in another precision, for the same backend and device."""
    speed: Ratio | None = None
    """The p50 of this build over that of `rival`, at the least batch size; None if it was not measured."""


@dataclass(frozen=True, slots=True)
class BuildDivergence:
    build: str
    artifact: str
    limit_db: float
    """The least SNR that verification tolerates in the build's precision."""
    tensors: tuple[TensorDivergence, ...]
    """In the network's order."""
    left_out: int
    """Tensors of the source that do not exist in the build, such as those inside fused layers."""
    hidden: str
    marked: OutputError
    """The outputs while tensors are read, compared with those of the stored build."""
    evaluated: EvaluatedModel | None = None
    """The build on the samples that its remedies were tried on."""
    remedies: tuple[Remedy, ...] = ()
    compiled: OutputError | None = None
    """If the compiler is at fault: the error of the smallest subgraph that shows it."""
    uncompiled: OutputError | None = None
    """The error of the same subgraph without the compiler."""
    reproducer: str = ""
    """The folder with that subgraph, its inputs, and a program."""

    @property
    def range_losses(self) -> list[TensorDivergence]:
        """The tensors at the divergence that lose by their range."""
        ends = ([] if self.first is None else [self.first]) + self.worst
        return [
            tensor
            for at, tensor in enumerate(ends)
            if tensor not in ends[:at] and tensor.range_loss
        ]

    @property
    def first(self) -> TensorDivergence | None:
        """The first tensor below the limit."""
        below = (
            tensor
            for tensor in self.tensors
            if tensor.error.snr_db is not None and tensor.error.snr_db < self.limit_db
        )
        return next(below, None)

    @property
    def worst(self) -> list[TensorDivergence]:
        """The tensors whose layers lose most by themselves."""
        return sorted(
            self.tensors,
            key=lambda tensor: math.inf if tensor.own.snr_db is None else tensor.own.snr_db,
        )[:WORST]


@dataclass(frozen=True, slots=True)
class LayerComparison:
    model: str
    data: str
    samples: int
    builds: tuple[BuildDivergence, ...]
    not_compared: Mapping[str, str]
    """By build, the reason."""
    warnings: tuple[str, ...] = ()


def choose_tensors(
    source: MarkedNetwork, build: MarkedNetwork, wanted: Sequence[str] = ()
) -> list[str]:
    """The tensors of both networks, or `wanted` of them. Raises BadInputError, with the nearest name, for an unknown one."""
    both = [name for name in source.layers if name in build.layers]
    for name in (name for name in wanted if name not in both):
        why = (
            "it is inside a fused layer of the build" if name in source.layers else "no such tensor"
        )
        raise BadInputError(
            f"{why}; {suggest_names(name, both, similarity=0.0)}",
            argument=Argument("layers", name),
        )
    return [name for name in both if not wanted or name in wanted]


def group_tensors(
    tensors: Sequence[str], sizes: Mapping[str, int], part: float = 1.0
) -> list[list[str]]:
    """`sizes` are those of the profile's `opt` batch, of which a sample is a `part`."""
    groups, room = list[list[str]](), 0.0
    for name in tensors:
        if not groups or sizes[name] * part > room:
            groups.append([])
            room = GROUP_VALUES
        groups[-1].append(name)
        room -= sizes[name] * part
    return groups


def compare_tensors(
    source: MarkedNetwork,
    build: MarkedNetwork,
    samples: Sequence[Mapping[str, NDArray[Any]]],
    tensors: Sequence[str],
    plain: Run,
    step: ProgressStep = UNWATCHED,
    part: float = 1.0,
    selection: Selection = EMPTY,
) -> tuple[tuple[TensorDivergence, ...], OutputError]:
    """The divergence of `tensors` on all samples, and the difference of the marked network's outputs from those of `plain`.

    `step` counts groups times samples. Rows of the source's `selection`, outputs and tensors inside, are compared as sets.
    """
    rows, marked, both = list[TensorDivergence](), [], choose_tensors(source, build)
    answers = [plain(inputs) for inputs in samples]
    for group in group_tensors(tensors, source.sizes, part):
        needed, run_alone = build.cut(group, both)
        _, run_source = source.cut(dict.fromkeys([*group, *needed]))
        _, run_build = build.cut(dict.fromkeys([*build.outputs, *group]))
        errors: dict[str, list[Any]] = {name: [] for name in group}
        clipped: dict[str, NDArray[np.intp]] = {}
        largest: dict[str, NDArray[Any]] = {}
        for inputs, outputs in zip(samples, answers, strict=True):
            expected, actual = run_source(inputs), run_build(inputs)
            alone = run_alone({**inputs, **expected})
            answer = align_rows(outputs, actual, selection, EXACT_RELATIVE)
            actual = align_rows(expected, actual, selection, EXACT_RELATIVE)
            alone = align_rows(expected, alone, selection, EXACT_RELATIVE)
            for name, sums in errors.items():
                value = expected[name]
                sums.append((sum_errors(value, actual[name]), sum_errors(value, alone[name])))
                if name in build.ranges:
                    low, high = build.ranges[name]
                    channel = 1 if value.ndim > 3 else value.ndim - 1
                    others = tuple(axis for axis in range(value.ndim) if axis != channel)
                    outside = np.count_nonzero((value < low) | (value > high), axis=others)
                    clipped[name] = clipped.get(name, 0) + outside
                    largest[name] = np.maximum(largest.get(name, 0), np.abs(value).max(axis=others))
            marked += [sum_errors(value, answer[name]) for name, value in outputs.items()]
            step.advance()
        for name, sums in errors.items():
            whole, own = (np.concatenate(parts) for parts in zip(*sums, strict=True))
            share = float(np.sum(clipped[name]) / whole[:, 0].sum()) if name in clipped else None
            channel = (
                int(np.argmax(clipped[name] if share else largest[name]))
                if name in clipped
                else None
            )
            usual = float(np.median(largest[name])) if name in largest else 0.0
            outlier = float(np.max(largest[name])) / usual if usual else None
            layer, error, alone_error = (
                source.layers[name],
                pool_sums(name, whole),
                pool_sums(name, own),
            )
            rows.append(TensorDivergence(name, layer, error, alone_error, share, channel, outlier))
    return tuple(rows), pool_sums("outputs", np.concatenate(marked))


def find_compiler_fault(
    source: MarkedNetwork,
    compiled: MarkedNetwork,
    plain: MarkedNetwork,
    inputs: Mapping[str, NDArray[Any]],
    tensor: str,
    limit_db: float,
    folder: Path,
) -> tuple[OutputError, OutputError] | None:
    """Errors of the fewest layers up to `tensor` that lose by compilation alone, with and without it; writes them into `folder`.

    The number of layers is doubled until they show it, then bisected. None if they do not show it.
    """
    both = choose_tensors(source, compiled)
    at = both.index(tensor)

    def measure(width: int) -> tuple[OutputError, OutputError] | None:
        given = [*both[: at + 1 - width], *both[at + 1 :]]
        (needed, run), (_, run_plain) = (
            network.cut([tensor], given) for network in (compiled, plain)
        )
        expected = source.cut(dict.fromkeys([tensor, *needed]))[1](inputs)
        answers = (execute({**inputs, **expected})[tensor] for execute in (run, run_plain))
        errors = [pool_sums(tensor, sum_errors(expected[tensor], answer)) for answer in answers]
        snr_db, without = (math.inf if error.snr_db is None else error.snr_db for error in errors)
        shows = snr_db < min(limit_db, without - COMPILER_LOSS_DB)
        if shows:
            compiled.save(tensor, given, {**inputs, **expected}, folder)
        return (errors[0], errors[1]) if shows else None

    fails, shown, width = 0, None, 1
    while shown is None and fails < at + 1:
        shown = measure(width)
        fails, width = (fails, width) if shown else (width, min(2 * width, at + 1))
    while shown and width - fails > 1:
        middle = (fails + width) // 2
        better = measure(middle)
        fails, width, shown = (fails, middle, better) if better else (middle, width, shown)
    return shown


def compare_layers(
    model: Model,
    data: Path | None,
    count: int | None,
    wanted: Sequence[str],
    store: Store,
    listener: Listener,
    *,
    truncate: bool = False,
) -> LayerComparison:
    """Compares the tensors of every stored build of `model` that runs here, or `wanted` of them.

    Raises BadInputError without builds, and for a tensor that no build has.
    """
    require_existing(data, "data")
    model, stored = prepare_model(model, store, listener)
    artifacts = list_model_artifacts(model, read_card(model, stored), store)
    exported, _ = export_model(model, store, listener, stored)
    card = read_stored_card(exported)
    if data is not None:
        data = store_python_file(data, card, store, listener, count)
    chosen = choose_samples(card, data, None, exported, listener, truncate=truncate)
    if chosen.drawn is None:
        real = "give real inputs with " + Argument("data")
        listener.warn(f"no data: {card.name} is compared on {NOISE}; " + real)
    else:
        chosen = replace(chosen, drawn=draw_subset(chosen.drawn, count or SAMPLE_COUNT))
    rows = load_sample_inputs(card, chosen, exported)
    samples = [batch for batch, _ in split_batches(card, rows, card.batch_range[0])][:count]
    given = model.load().onnx or exported.file(ONNX)
    comparing = _Comparing(model, card, samples, given, read_selection(given, inside=True), wanted)
    builds: list[BuildDivergence] = []
    refused: dict[str, str] = {}
    unknown = ""
    for entry in artifacts:
        label = entry.info.label
        if (why_not := BACKENDS[entry.info.backend].find_run_blocker(entry.info)) is not None:
            refused[label] = why_not
            continue
        # a foreign or damaged build ends the command; what fails later leaves out this build alone
        request = comparing.make_request(entry, store)
        try:
            diverged, networks = comparing.compare_build(entry, request, store, listener)
        except OptpipeError as error:
            refused[label] = error.message
            if isinstance(error, BadInputError):
                unknown = unknown or error.message
            continue
        builds.append(comparing.blame_compiler(diverged, networks, store, listener))
    if not builds and wanted:
        raise BadInputError(unknown or next(iter(refused.values())))
    return LayerComparison(card.name, chosen.data, len(samples), tuple(builds), refused)


@dataclass(frozen=True, slots=True)
class _Comparing:
    """What every build of a comparison is compared with."""

    model: Model
    card: ModelCard
    samples: Sequence[Mapping[str, NDArray[Any]]]
    graph: Path
    """The user's ONNX file, or the exported graph."""
    selection: Selection
    wanted: Sequence[str]
    """Tensors; all if empty."""

    def make_request(self, entry: Entry[ArtifactInfo], store: Store) -> BuildRequest:
        """Raises what the verification of a stored build raises."""
        info = entry.info
        graph = store.find(entry.manifest.parents[-1])
        return BuildRequest(
            self.card,
            info.precision,
            graph.file(ONNX),
            self.model.fresh_module,
            info.device,
            info.options,
            verify_for_loading(entry, store).path,
        )

    def compare_build(
        self, entry: Entry[ArtifactInfo], request: BuildRequest, store: Store, listener: Listener
    ) -> tuple[BuildDivergence, tuple[MarkedNetwork, MarkedNetwork]]:
        """The divergence of a build, and the networks of the source and the build."""
        info = entry.info
        part = self.card.batch_range[0] / self.card.batch_range[1]
        with load_artifact(entry, store) as session:
            source, build = BACKENDS[info.backend].open_marked(info, request, self.graph)
            tensors = choose_tensors(source, build, self.wanted)
            total = len(group_tensors(tensors, source.sizes, part)) * len(self.samples)
            with listener.step(f"{len(tensors)} tensors of {info.label}", total=total) as step:
                divergences, outputs = compare_tensors(
                    source, build, self.samples, tensors, session.run, step, part, self.selection
                )
        diverged = BuildDivergence(
            build=info.label,
            artifact=entry.id,
            limit_db=-20 * math.log10(TOLERATED_RELATIVE_ERROR[info.precision]),
            tensors=divergences,
            left_out=len([name for name in source.layers if name not in build.layers]),
            hidden=build.hidden,
            marked=outputs,
        )
        return diverged, (source, build)

    def blame_compiler(
        self,
        diverged: BuildDivergence,
        networks: tuple[MarkedNetwork, MarkedNetwork],
        store: Store,
        listener: Listener,
    ) -> BuildDivergence:
        """`diverged` with the fault of the compiler at its first tensor, if it is one and the build can be opened apart."""
        (source, build), first = networks, diverged.first
        if first is None or build.open_apart is None:
            return diverged
        folder = store.workspace / "reproducers" / diverged.artifact
        with listener.step(f"compile {first.tensor} apart"):
            fault = find_compiler_fault(
                source,
                *build.open_apart(),
                self.samples[0],
                first.tensor,
                diverged.limit_db,
                folder,
            )
        if fault is None:
            return diverged
        compiled, uncompiled = fault
        return replace(diverged, compiled=compiled, uncompiled=uncompiled, reproducer=str(folder))
