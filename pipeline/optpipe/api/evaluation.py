"""Scores of builds and of the source model on the same samples."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optpipe.api.calling import make_tuple_type
from optpipe.api.data import Data, resolve_data_argument
from optpipe.api.door import speak
from optpipe.api.metric import Metric, require_metric
from optpipe.core import pl
from optpipe.core.card import ModelCard
from optpipe.core.errors import BadInputError, StageError
from optpipe.core.events import Listener

if TYPE_CHECKING:
    from optpipe.api.build import Build
    from optpipe.api.builds import Builds
    from optpipe.api.workspace import Workspace
    from optpipe.core.metrics.sampled import SampleScore
    from optpipe.evaluate.result import Evaluation as EvaluationRecord


class Evaluation:
    """One evaluation: the score of each build and of the source model, and the drop on paired predictions.

    The run lies in the workspace, and is what a verdict recomputes.

    >>> import torch, optpipe as op
    >>> net, images = torch.nn.Linear(8, 4), torch.randn(64, 8)
    >>> model = op.Model(net, example=images[:2], trained=True, workspace="work")
    >>> builds = model.build("fp32", backend="onnxruntime", device="cpu")
    >>> top1 = op.Metric(lambda outputs, label: float(outputs.argmax() == label), range=(0, 1), name="top1")
    >>> scores = builds.evaluate((images, net(images).argmax(1)), metric=top1)
    >>> scores.frame().select("build", "value", "drop").rows()
    [('source', 1.0, 0.0), ('onnxruntime fp32', 1.0, 0.0)]
    """

    def __init__(self, workspace: "Workspace", record: "EvaluationRecord") -> None:
        self.workspace, self.record = workspace, speak(record)

    @property
    def run(self) -> str:
        return Path(self.record.run_dir).name

    @property
    def warnings(self) -> tuple[str, ...]:
        return self.record.warnings

    @property
    def artifacts(self) -> tuple[str, ...]:
        """IDs of the builds that were scored."""
        return tuple(
            row.artifact for row in self.record.results if row.artifact and not row.why_not
        )

    def frame(self) -> "pl.DataFrame":
        """A row for each build and score: `build` (`source` for the model itself), `artifact`, `score` (the metric's name), `value`,
        `low`, `high`, `drop`, `drop_low`, `drop_high` as fractions with 95% intervals, `samples`, `verdict`, `why_not`; null where
        nothing was scored.
        """
        rows = []
        for row in self.record.results:
            build = "source" if row.artifact is None else f"{row.backend} {row.precision}"
            common = {"build": build, "artifact": row.artifact, "samples": row.samples}
            end = {
                "verdict": row.verdict and str(row.verdict),
                "why_not": row.why_not or _explain_no_scores(self.record),
            }
            scores = [] if row.scores is None else list(row.scores.scores)
            figures: list[Any] = [
                (self._name_score(score.name), score.value, score.ci, score.drop, score.drop_ci)
                for score in scores
            ]
            if row.accuracy is not None:
                own = row.accuracy
                figures.append(("top1", own.top1, own.top1_ci, own.drop, own.drop_ci))
            nothing = (None, None)
            figures += [
                (
                    name,
                    score.value,
                    score.ci or nothing,
                    score.drop,
                    score.drop_ci or nothing,
                    score.why_not,
                )
                for name, score in row.sampled.items()
            ]
            for name, value, ci, drop, drop_ci, *withheld in figures or [
                (None, None, nothing, None, nothing)
            ]:
                rows.append(
                    {
                        **common,
                        "score": name,
                        "value": value,
                        "low": ci[0],
                        "high": ci[1],
                        "drop": drop,
                        "drop_low": drop_ci[0],
                        "drop_high": drop_ci[1],
                        **end,
                        **({"why_not": withheld[0]} if any(withheld) else {}),
                    }
                )
        numbers = ("value", "low", "high", "drop", "drop_low", "drop_high")
        texts = ("artifact", "score", "verdict", "why_not")
        return pl.DataFrame(
            rows,
            schema_overrides=dict.fromkeys(numbers, pl.Float64) | dict.fromkeys(texts, pl.String),
            infer_schema_length=None,
        )

    def _name_score(self, name: str) -> str:
        """The metric or the user's task for its only score, which the record calls `score`."""
        from optpipe.evaluate.tasks.user_file import PREFIX, StoredScores

        return self.record.task.removeprefix(PREFIX) if name in StoredScores.scores else name

    def _document(self) -> Any:
        from optpipe.evaluate.document import document_from_evaluation
        from optpipe.evaluate.evaluate import list_states

        return speak(document_from_evaluation(self.record, list_states(self.workspace.store)))

    def __str__(self) -> str:
        from optpipe.report.terminal import text_from_document

        return text_from_document(self._document())

    def __repr__(self) -> str:
        return f"Evaluation({self.run}, {self.record.dataset.describe()})"

    def _repr_html_(self) -> str:
        from optpipe.report.notebook import html_from_document

        return html_from_document(self._document())


def evaluate_builds(
    builds: "Builds",
    data: Any,
    metric: Metric | None,
    scores: "Sequence[SampleScore | Metric]",
    accuracy_budget: str | None,
    *,
    truncate: bool,
) -> Evaluation:
    from dataclasses import replace

    from optpipe.core.quantity import drop_from_text
    from optpipe.evaluate.evaluate import EvaluationRequest, run_evaluation

    require_metric(metric)
    own = read_scores(scores)
    workspace, built = builds.workspace, builds.require_built()
    samples = resolve_data_argument(data)
    with workspace.call(
        "Builds.evaluate",
        builds=[build.id for build in built],
        data=samples and (samples.path or samples.sha256[:12]),
        metric=metric and metric.name,
        scores=[metric.name for metric in own] or None,
    ) as listener:
        model = find_source(built[0])
        card = built[0].card
        if metric is None and card.task == "other":
            way = 'metric=Metric(function, range=(0, 1)), or Model(..., task="classification")'
            raise BadInputError(f"{card.name} has no task that optpipe scores\ngive {way}")
        if samples is None and metric is not None and "validation" not in card.data:
            raise BadInputError(
                f"metric '{metric.name}' needs data with truths\ngive data=Data((inputs, labels))"
            )
        path, task = _place_samples(samples, metric, card, workspace, listener)
        budget = (
            None
            if accuracy_budget is None
            else drop_from_text(accuracy_budget, "accuracy_budget") / 100
        )
        record = run_evaluation(
            model,
            EvaluationRequest(
                data=path,
                budget=budget,
                task=task,
                only=[build.stored.entry for build in built],
                scores=[make_sampled_score(metric, card) for metric in own],
                truncate=truncate,
            ),
            workspace.store,
            listener,
        )
        _report_failures(record, listener)
        return Evaluation(workspace, replace(record, warnings=tuple(listener.warnings)))


def read_scores(scores: Any) -> "list[SampleScore | Metric]":
    """Raises BadInputError for anything but scores and metrics, and for one that breaks the contract."""
    from optpipe.core.metrics.sampled import SampleScore, is_score_name, require_score

    if isinstance(scores, SampleScore | Metric | str | bytes) or not isinstance(scores, Iterable):
        raise BadInputError(f"scores={scores!r}: expected a list of scores, such as [Top3()]")
    own = list(scores)
    for score in own:
        if isinstance(score, type) and issubclass(score, SampleScore):
            raise BadInputError(
                f"scores: {score.__name__} is a class\ngive an instance: {score.__name__}()"
            )
        if isinstance(score, SampleScore):
            require_score(score)
        elif not isinstance(score, Metric):
            raise BadInputError(
                f"scores: a {type(score).__name__} is not a score\ngive instances of a subclass of SampleScore, or a Metric"
            )
        elif not is_score_name(score.name):
            raise BadInputError(
                f"scores: {score.name!r} cannot name a score\ngive it a name of lowercase letters, digits, - and _ that optpipe does "
                'not use: Metric(..., name="word-error")'
            )
    return own


def make_sampled_score(score: "SampleScore | Metric", card: ModelCard) -> "SampleScore":
    """A metric as a score, whose value is its share of the metric's range."""
    from optpipe.core.metrics.sampled import SampleScore
    from optpipe.evaluate.tasks.callable import MetricScore

    if isinstance(score, SampleScore):
        return score
    limits = float(score.range[0]), float(score.range[1])
    larger = score.larger_is_better
    return MetricScore(
        score.name, score.function, limits, make_packer(card), larger_is_better=larger
    )


def make_packer(card: ModelCard) -> Any:
    """Makes the outputs of one sample, by name, into what a callable takes."""
    names = tuple(spec.name for spec in card.outputs)

    def pack(own: Any) -> Any:
        values = [own[name] for name in names]
        return values[0] if len(values) == 1 else make_tuple_type(names)(*values)

    return pack


def _report_failures(record: "EvaluationRecord", listener: Listener) -> None:
    """Warns about each build that could not run, and if nothing is scored. Raises StageError if no build could run."""
    builds = [row for row in record.results if row.artifact is not None]
    failures = [
        f"{row.backend} {row.precision} ({row.artifact}) was not scored: " + (row.why_not or "")
        for row in builds
        if row.failed
    ]
    if len(failures) == len(builds):
        raise StageError("; ".join(failures))
    for failure in failures:
        listener.warn(failure)
    if (reason := _explain_no_scores(record)) is not None:
        listener.warn("nothing is scored: " + reason)


def _explain_no_scores(record: "EvaluationRecord") -> str | None:
    """Why samples with truths have no scores; None if they have."""
    if record.weights.trained or not record.dataset.labeled:
        return None
    if record.weights.source == "random":
        return "the weights are random"
    return "nobody asserts that the weights are trained; give Model(..., trained=True)"


def _place_samples(
    samples: Data | None,
    metric: Metric | None,
    card: ModelCard,
    workspace: "Workspace",
    listener: Any,
) -> tuple[Path | None, Any]:
    """The path of the samples, and the task that scores them by a metric."""
    from optpipe.evaluate.tasks.callable import CallableTask

    path, stored = None, None
    if samples is not None:
        path, stored = samples.store_for(card, workspace.store, listener)
    if metric is None:
        return path, None
    task = CallableTask(
        metric.name,
        metric.function,
        (float(metric.range[0]), float(metric.range[1])),
        make_packer(card),
        None if stored is None else stored.truths,
        larger_is_better=metric.larger_is_better,
    )
    return path, task


def find_source(build: "Build") -> Any:
    """The model that a build was made from. Raises BadInputError for a module in memory that this program does not hold."""
    from optpipe.models.artifacts.named import model_from_text
    from optpipe.models.sources.in_memory import PREFIX

    if (model := build.model()) is not None:
        return model
    source = build.card.source
    if source.startswith(f"{PREFIX}:"):
        raise BadInputError(
            f"{build.label} was built from {source}, a module in memory, which is not here\nmake it and build it again: Model(module, "
            "example=...).build(...)"
        )
    return model_from_text(source, build.workspace.store)
