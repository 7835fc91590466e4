"""Remedies of a build that diverges: other ranges, and layers in floating point, built and evaluated on the same samples."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from optpipe.backends.registry import BACKENDS
from optpipe.build.build import build_model
from optpipe.build.choose import SHORT_LOAD
from optpipe.build.plan import BuildPlan
from optpipe.core.card import Task
from optpipe.core.entries import ArtifactInfo, CalibrationInfo, GraphInfo, ModelInfo
from optpipe.core.errors import OptpipeError
from optpipe.core.events import Listener
from optpipe.core.metrics.measured import PairMetric
from optpipe.core.precision import BUDGETED, CALIBRATED, Budget, Precision
from optpipe.core.wording import Call, for_workspace
from optpipe.evaluate.evaluate import evaluate_artifacts, list_model_artifacts, score_artifacts
from optpipe.evaluate.layers import BuildDivergence, LayerComparison, Remedy
from optpipe.evaluate.result import EvaluatedModel
from optpipe.evaluate.tasks import TASKS
from optpipe.measure.measure import BenchPlan
from optpipe.measure.pair import FEWEST_ROUNDS, bench_pair
from optpipe.models.artifacts.lookup import find_artifacts
from optpipe.models.export.exported import Model, export_model, prepare_model
from optpipe.models.inputs.image_set import NothingJudgedError
from optpipe.models.inputs.program_data import store_python_file
from optpipe.models.inputs.sample_set import SampleSet, draw_subset
from optpipe.models.inputs.samples import choose_samples
from optpipe.models.sources.resolve import format_source
from optpipe.models.stored_card import read_stored_card
from optpipe.quantize.calibrated_graph import (
    CHOICE_SAMPLES,
    TABLE,
    name_table_file,
    tables_from_entry,
)
from optpipe.quantize.ranges import read_table, write_table
from optpipe.quantize.sensitivity import compare_methods, lower_by_table, select_kept_layers
from optpipe.stats.ratio import Ratio
from optpipe.workspace.entry import Entry
from optpipe.workspace.store import Store

GAIN_DB = 6.0
"""Without a budget, the error of the outputs shall be halved."""
Plans = Iterator[tuple[BuildPlan, tuple[str, ...]]]
"""Each build to try, with the layers that it keeps in floating point."""


def try_remedies(
    model: Model,
    comparison: LayerComparison,
    data: Path | None,
    budget: Budget | None,
    store: Store,
    listener: Listener,
    *,
    truncate: bool = False,
    count: int | None = None,
) -> LayerComparison:
    """`comparison` with the remedies of every build that diverges; unchanged on noise, which no range or layer can be chosen by.

    Without `budget` the error of the outputs shall be halved. `count` limits the samples of a Python file's `data`.
    """
    if all(build.first is None for build in comparison.builds):
        return comparison
    model, stored = prepare_model(model, store, listener)
    exported, _ = export_model(model, store, listener, stored)
    card = read_stored_card(exported)
    if data is not None:
        data = store_python_file(data, card, store, listener, count)
    samples = choose_samples(card, data, None, exported, truncate=truncate).drawn
    if samples is None:
        return comparison
    remedies = _Remedies(model, exported, samples, store, listener)
    builds = tuple(
        build if build.first is None else remedies.try_build(build, budget)
        for build in comparison.builds
    )
    return replace(comparison, builds=builds)


class _Remedies:
    """Builds and evaluates remedies for the builds of `model` on `samples`."""

    def __init__(
        self,
        model: Model,
        exported: Entry[ModelInfo],
        samples: SampleSet,
        store: Store,
        listener: Listener,
    ) -> None:
        self.model, self.exported, self.samples, self.store, self.listener = (
            model,
            exported,
            samples,
            store,
            listener,
        )

    def try_build(self, build: BuildDivergence, budget: Budget | None) -> BuildDivergence:
        artifact, remedies = self.store.find(build.artifact, ArtifactInfo), list[Remedy]()
        before = self._evaluate(artifact)
        wanted = budget or Budget(
            round(max(build.limit_db, (before.snr_db or 0.0) + GAIN_DB), 1), "dB"
        )
        for plan, kept in self._list_plans(artifact, build, wanted):
            command = _write_command(self.model, plan)
            try:
                made = build_model(self.model, plan, self.store, self.listener).artifacts[0].entry
            except (OptpipeError, IndexError) as error:
                why = error.message if isinstance(error, OptpipeError) else "nothing was built"
                self.listener.warn(f"{build.build}: `{command}` was tried and failed: " + why)
                continue
            result = self._evaluate(made)
            share = made.info.precision_proof.share.counted.get(made.info.precision, 0.0)
            remedies.append(Remedy(command, kept, share, result))
            if _meets(result, before, wanted):
                break
        card = read_stored_card(self.exported)
        for rival in list_model_artifacts(self.model, card, self.store) if remedies else ():
            alike = (rival.info.backend, rival.info.device) == (
                artifact.info.backend,
                artifact.info.device,
            )
            if alike and rival.info.precision is not artifact.info.precision:
                remedies[-1] = replace(
                    remedies[-1],
                    speed=_compare_speed(rival, made, self.store, self.listener),
                    rival=rival.info.label,
                )
                break
        return replace(build, evaluated=before, remedies=tuple(remedies))

    def _list_plans(
        self, artifact: Entry[ArtifactInfo], build: BuildDivergence, budget: Budget
    ) -> Plans:
        """The builds to try one after the other: each only if those before it do not meet the budget."""
        info, graph = artifact.info, self.store.find(artifact.manifest.parents[-1])
        backend = BACKENDS[info.backend]
        given = {
            option.name: info.options[option.name]
            for option in backend.describe_options(info.device)
            if option.builds
        }
        changed = {
            name: value
            for name, value in given.items()
            if value != backend.merge_options({}, info.device)[name]
        }
        plan = BuildPlan(
            (info.precision,),
            (backend,),
            named=True,
            device=info.device,
            options={backend.name: changed},
        )
        if (
            info.precision in CALIBRATED
            and graph.kind == GraphInfo.KIND
            and graph.info["method"] is not None
        ):
            yield from self._list_tables(graph, build, plan, budget)
        elif info.precision in BUDGETED and not backend.needs_module and info.mixed is None:
            yield replace(plan, budget=budget), ()
        else:
            known, finite = (
                backend.precisions(info.device),
                all(tensor.error.finite for tensor in build.tensors),
            )
            wider = [
                precision
                for precision in (Precision.FP16, Precision.TF32, Precision.FP32)
                if precision in known
            ]
            more = wider[wider.index(info.precision) + 1 :] if info.precision in wider else wider
            for precision in [*([] if finite else {Precision.BF16} & known), *more]:
                yield replace(plan, precisions=(precision,)), ()

    def _list_tables(
        self, graph: Entry, build: BuildDivergence, plan: BuildPlan, budget: Budget
    ) -> Plans:
        """For a range loss the best method's table; then that table with the costliest layers kept in floating point."""
        few, target = draw_subset(self.samples, CHOICE_SAMPLES), graph.info["target"]
        table = replace(read_table(graph.file(TABLE)), keep=())
        calibrated = [
            calibration
            for calibration in self.store.list_entries(CalibrationInfo)
            if self.exported.id in calibration.manifest.parents
        ]
        if build.range_losses and calibrated:
            tables = tables_from_entry(calibrated[-1])
            best = compare_methods(self.exported, tables, few, target, self.store, self.listener)[
                0
            ].info.best
            if tables[best].ranges != table.ranges:
                table = tables[best]
                yield replace(plan, calibration=calibrated[-1].file(name_table_file(best))), ()
        chosen, _ = select_kept_layers(
            self.exported,
            lower_by_table(self.exported, table, target),
            few,
            budget,
            self.store,
            self.listener,
        )
        if not chosen.info.keep or len(chosen.info.keep) == chosen.info.layers:
            return
        path = (
            self.store.workspace
            / "tables"
            / f"{table.model}-{chosen.id}"
            / f"table-{table.method}-spared.json"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        write_table(path, replace(table, keep=chosen.info.keep))
        yield replace(plan, calibration=path), chosen.info.keep

    def _evaluate(self, artifact: Entry[ArtifactInfo]) -> EvaluatedModel:
        """The build's SNR, and its accuracy if there are labels; without a task the largest output counts."""
        card = read_stored_card(self.exported)
        task, truths = TASKS.get(card.task, TASKS[Task.CLASSIFICATION]), None
        with suppress(NothingJudgedError):
            truths = task.read_truths(self.samples, card, task.count_classes(card))
        rows = evaluate_artifacts(
            self.model, self.exported, [artifact], self.samples, task, self.store, self.listener
        )
        classes, trained = task.count_classes(card) or 0, self.exported.info.weights.trained
        return [*score_artifacts(rows, truths, task, card.labels, classes, None, trained=trained)][
            1
        ]


def _compare_speed(
    rival: Entry[ArtifactInfo], made: Entry[ArtifactInfo], store: Store, listener: Listener
) -> Ratio | None:
    """The time of `made` over that of `rival`; None if it could not be measured."""
    try:
        old, new = (find_artifacts(build.id, store)[0] for build in (rival, made))
        plan = BenchPlan(SHORT_LOAD)
        compared = bench_pair(
            old, new, plan, FEWEST_ROUNDS, PairMetric.P50, store, listener
        ).comparison
    except OptpipeError as error:
        listener.warn(f"{made.info.label}: its speed was not measured: " + error.message)
        return None
    return None if compared is None else compared.ratio


def _meets(result: EvaluatedModel, before: EvaluatedModel, budget: Budget) -> bool:
    if budget.unit == "points" and result.drop_ci is not None:
        return 100 * result.drop_ci[1] <= budget.limit
    return result.snr_db is None or result.snr_db >= max(budget.limit, before.snr_db or 0.0)


def _write_command(model: Model, plan: BuildPlan) -> str:
    (backend,), (precision,) = plan.backends, plan.precisions
    options = plan.options[backend.name]
    command = Call(
        "build",
        format_source(model.source),
        backend=backend.name,
        device=plan.device,
        precision=precision,
        calibration=plan.calibration,
        budget=plan.budget and f"{plan.budget.limit:g}{plan.budget.unit}",
        option={backend.name: options} if options else None,
    )
    return for_workspace(command)
