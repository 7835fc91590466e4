from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from optpipe.core.card import Task
from optpipe.core.entries import OutputError
from optpipe.core.errors import escape
from optpipe.core.metrics.scores import F1, RECALL
from optpipe.core.params import make_call
from optpipe.core.quantity import format_snr
from optpipe.evaluate.layers import BuildDivergence, LayerComparison
from optpipe.evaluate.result import ClassScore, EvaluatedModel, Evaluation
from optpipe.evaluate.tasks.box_agreement import PARITY_SCORE
from optpipe.report.charts import FEWEST_POINTS, Point, draw_points
from optpipe.report.document import (
    TONES,
    Cell,
    Column,
    ColumnKind,
    Document,
    Figure,
    Page,
    Row,
    Section,
    Sentence,
    Table,
    Tone,
    figure_columns,
    format_drop,
    make_document,
    make_table,
    warn_of_weights,
)

MENTIONED_DROP, MENTIONED_CLASSES = 0.001, 5
SHOWN_TENSORS = 30
WITHOUT_INTERVAL = (
    "brackets are 95% intervals over samples; those of the other scores are in the JSON document;"
    " an SNR is that of these samples alone"
)
INDEPENDENT = (
    "if samples share a source (a clip, a patient, a document), name it in a column `group`"
)


def document_from_evaluation(evaluation: Evaluation, states: Mapping[str, OutputError]) -> Document:
    """`states` are those of `list_states`."""
    evaluated = [row.artifact for row in evaluation.results if row.artifact and not row.why_not]
    unlabeled = "no labels: agreement with the source model only, no accuracy"
    return make_document(
        [
            Sentence(f"{evaluation.model} on {evaluation.dataset.identify()}"),
            Sentence(INDEPENDENT, Tone.FAINT) if evaluation.dataset.groups is None else None,
            Sentence(evaluation.scoring, Tone.FAINT) if evaluation.scoring else None,
            _tabulate(evaluation),
            _tabulate_sampled(evaluation),
            Sentence(WITHOUT_INTERVAL, Tone.FAINT) if evaluation.dataset.labeled else None,
            *_list_class_drops(evaluation),
            *_list_detection_changes(evaluation),
            *(
                Sentence(f"{artifact}, {state.name}: {_format_error(state)}", Tone.FAINT)
                for artifact, state in states.items()
                if artifact in evaluated
            ),
            *(
                Sentence(
                    f"{row.backend} {row.precision}: " + row.why_not,
                    Tone.BAD if row.failed else Tone.FAINT,
                    "failed" if row.failed else "not evaluated",
                )
                for row in evaluation.results
                if row.why_not
            ),
            None if evaluation.dataset.labeled else Sentence(unlabeled, Tone.DOUBTFUL),
            *warn_of_weights(evaluation.weights),
            Sentence(f"predictions and manifest in {evaluation.run_dir}", Tone.FAINT),
            Sentence(make_call("bench", *evaluated), Tone.STRONG, "next") if evaluated else None,
        ]
    )


def document_from_layers(
    comparison: LayerComparison, states: Mapping[str, OutputError]
) -> Document:
    parts: list[Sentence | Section | None] = [
        Sentence(f"{comparison.model} on {comparison.samples} samples of {comparison.data}")
    ]
    for build in comparison.builds:
        reached = [state for at, state in states.items() if at == build.artifact]
        contents: tuple[Sentence | Table, ...] = (
            _describe_first(build),
            _tabulate_tensors(build),
            *_list_causes(build),
            _describe_reading(build, reached),
            *_list_remedies(build),
        )
        parts.append(Section(build.build, contents))
    reasons = comparison.not_compared.items()
    return make_document(
        [
            *parts,
            *(Sentence(f"{build}: " + why, Tone.FAINT, "not compared") for build, why in reasons),
        ]
    )


def _describe_first(build: BuildDivergence) -> Sentence:
    """The first tensor below the limit."""
    first, limit = build.first, format_snr(build.limit_db)
    if first is None:
        return Sentence(f"every tensor has an SNR of at least {limit}", Tone.GOOD)
    text = f"{first.tensor} ({first.layer}) is the first tensor below {limit}: {_format_error(first.error)}"
    return Sentence(f"{text}, {_format_error(first.own)} by its layer alone", Tone.BAD)


def _tabulate_tensors(build: BuildDivergence) -> Table:
    first, worst = build.first, build.worst
    columns: list[Column | str] = ["tensor", "layer"]
    columns += figure_columns("SNR", "cosine", "largest error", "SNR of the layer alone")
    rows: list[Row] = [
        (
            Cell(tensor.tensor, Tone.BAD if tensor is first else Tone.PLAIN),
            tensor.layer,
            _format_error(tensor.error),
            f"{tensor.error.cosine:.6f}",
            f"{tensor.error.max_abs:.3g}",
            Cell(_format_error(tensor.own), Tone.STRONG if tensor in worst else Tone.PLAIN),
        )
        for tensor in build.tensors
        if len(build.tensors) <= SHOWN_TENSORS or tensor is first or tensor in worst
    ]
    return make_table(columns, rows)


def _list_causes(build: BuildDivergence) -> Iterator[Sentence]:
    """Ranges that lose, and a fault of the compiler."""
    for tensor in build.range_losses:
        yield Sentence(f"{tensor.tensor}: {tensor.range_loss}", Tone.DOUBTFUL, "range")
    if build.compiled is not None and build.uncompiled is not None:
        text = f"{build.compiled.name} has {_format_error(build.compiled)} compiled and {_format_error(build.uncompiled)} without"
        yield Sentence(
            f"{text} the compiler, in the same precision and on the same inputs",
            Tone.BAD,
            "compiler",
            remedy=f"python {build.reproducer}/reproduce.py",
        )


def _describe_reading(build: BuildDivergence, states: Sequence[OutputError]) -> Sentence:
    """What was read of a build, and what that changes; `states` are those that its trajectory reached."""
    same = "does not change the outputs"
    if build.marked.snr_db is not None:
        same = f"changes the fusion and the outputs ({_format_error(build.marked)})"
    facts = []
    if build.left_out:
        facts.append(f"{build.left_out} tensors of the source do not exist in the build")
    if build.hidden:
        facts.append(f"not read: {build.hidden}")
    facts.append(f"reading tensors {same}")
    facts.append("figures are of these samples alone, without an interval")
    facts += [f"{state.name}: {_format_error(state)}" for state in states]
    return Sentence("; ".join(facts), Tone.FAINT)


def page_from_layers(comparison: LayerComparison, states: Mapping[str, OutputError]) -> Page:
    """The document with a plot for each build: the SNR of its tensors along the network."""
    title, *parts = document_from_layers(comparison, states)
    sections = [part for part in parts if isinstance(part, Section)]
    drawn = []
    for at, (section, build) in enumerate(zip(sections, comparison.builds, strict=True)):
        verdict, table, *notes = section.parts
        assert isinstance(table, Table)
        folded = Section("Tensors", (replace(table, id=f"tensors-{at}"),))
        drawn.append(
            replace(
                section, id=f"build-{at}", parts=(verdict, *_draw_divergence(build), *notes, folded)
            )
        )
    assert isinstance(title, Sentence)
    alerts = tuple(part for part in parts if isinstance(part, Sentence))
    return Page(f"Layers of {comparison.model}", title.text, tuple(drawn), alerts=alerts)


def _draw_divergence(build: BuildDivergence) -> Iterator[Figure]:
    points = [
        Point(
            series,
            f"{tensor.tensor} ({tensor.layer}): {_format_error(error)}",
            at,
            error.snr_db,
            group=series,
        )
        for at, tensor in enumerate(build.tensors, start=1)
        for series, error in (("up to this tensor", tensor.error), ("its layer alone", tensor.own))
        if error.snr_db is not None and error.finite
    ]
    limit = [(1.0, build.limit_db), (float(max(2, len(build.tensors))), build.limit_db)]
    caption = f"The line is the limit of {format_snr(build.limit_db)}; tensors that equal the source's are left out."
    title, across = f"SNR along {build.build}", "tensor, in the order of the network"
    if len(points) >= FEWEST_POINTS:  # the table lists fewer
        yield draw_points(title, caption, points, across, "SNR in dB", limit=limit, linear=True)


def _list_remedies(build: BuildDivergence) -> Iterator[Sentence]:
    """The build, then each remedy with its SNR, its accuracy if there are labels, and the command."""
    for number, remedy in enumerate(build.remedies):
        if number == 0 and build.evaluated is not None:
            yield Sentence(f"this build: {_format_quality(build.evaluated)}", Tone.FAINT, "tried")
        kept = (
            f"; {len(remedy.kept)} layers in floating point: {escape(', '.join(remedy.kept))}"
            if remedy.kept
            else ""
        )
        said = f"{_format_quality(remedy.result)}; {remedy.share:.0%} of the MACs in {remedy.result.precision}{kept}"
        if remedy.speed is not None:
            low, high = remedy.speed.ci
            said += f"; p50 {remedy.speed.value:.2f} times that of {remedy.rival} [{low:.2f}, {high:.2f}]"
        yield Sentence(said, Tone.GOOD, "tried", remedy=remedy.command)


def _format_quality(row: EvaluatedModel) -> str:
    snr = "equal" if row.snr_db is None and row.same_sizes else format_snr(row.snr_db or 0.0)
    if row.accuracy is not None:
        return f"SNR {snr}, top-1 {row.accuracy.top1:.2%}, drop {format_drop(row.accuracy.drop, row.accuracy.drop_ci)}"
    if row.scores is not None:
        first = row.scores.scores[0]
        return f"SNR {snr}, {first.name} {first.value:.2%}, drop {format_drop(first.drop, first.drop_ci)}"
    agreement = f", {row.agreement.share:.2%} agree" if row.agreement else ""
    return f"SNR {snr} on {row.samples} samples{agreement}"


def _format_error(error: OutputError) -> str:
    return (
        "equal"
        if error.snr_db is None
        else format_snr(error.snr_db)
        if error.finite
        else "not finite"
    )


def _tabulate(evaluation: Evaluation) -> Table:
    classifies, texts = (
        evaluation.task in (Task.CLASSIFICATION, Task.TEXT_CLASSIFICATION),
        evaluation.dataset.kind == "texts",
    )
    scored = next((row.scores for row in evaluation.results if row.scores is not None), None)
    names = [score.name for score in scored.scores] if scored else []
    figures = [*names, f"{names[0]} drop, points" if names else "drop"]
    if classifies:
        second = ["macro F1", "macro F1 drop, points"] if texts else ["top-5"]
        figures = ["top-1", *second, "drop, points", "lost / won"]
    columns: list[Column | str] = [
        "artifact",
        "backend",
        "precision",
        *figure_columns(*figures, "agreement", "SNR"),
        Column("verdict", ColumnKind.STATE, rank=0),
    ]
    rows: list[Row] = []
    for row in evaluation.results:
        if row.why_not:
            continue
        values = (
            _format_accuracy(row, texts=texts) if classifies else _format_scores(row, len(names))
        )
        if row.artifact is None:
            rows.append(("source model", "", "", *values, "", "", ""))
            continue
        agreement = f"{row.agreement.share:.2%}" if row.agreement else ""
        snr = (
            format_snr(row.snr_db) if row.snr_db is not None else "equal" if row.same_sizes else ""
        )
        verdict = Cell(row.verdict or "", TONES.get(row.verdict or "", Tone.PLAIN))
        rows.append(
            (
                row.artifact,
                f"{row.backend} ({row.device})",
                row.precision,
                *values,
                agreement,
                snr,
                verdict,
            )
        )
    return make_table(columns, rows)


def _tabulate_sampled(evaluation: Evaluation) -> Table | None:
    """The scores of plug-ins and of Python programs, a row for each with its model; None without any."""
    rows: list[Row] = []
    for row in evaluation.results:
        model = row.artifact or "source model"
        build = f"{row.backend} {row.precision}" if row.artifact else ""
        for name, scored in row.sampled.items():
            if scored.value is None or scored.ci is None:
                rows.append((name, model, build, "", "", Cell(scored.why_not or "", Tone.DOUBTFUL)))
                continue
            low, high = scored.ci
            value = f"{scored.value:.2%} [{low:.2%}, {high:.2%}]"
            lost = row.artifact and scored.drop is not None and scored.drop_ci is not None
            drop = format_drop(scored.drop or 0.0, scored.drop_ci or (0.0, 0.0)) if lost else ""
            rows.append((name, model, build, value, drop, evaluation.sampled[name].title))
    columns: list[Column | str] = ["score", "artifact", "build"]
    columns += [*figure_columns("value", "drop, points"), "about"]
    return make_table(columns, rows) if rows else None


def _format_accuracy(row: EvaluatedModel, *, texts: bool) -> list[str]:
    """Figures of a classifier: top-1, top-5 or macro F1, and losses except for the source model."""
    accuracy = row.accuracy
    if accuracy is None:
        return [""] * (5 if texts else 4)
    top5 = "" if accuracy.top5 is None else f"{accuracy.top5:.2%}"
    f1_drop = format_drop(accuracy.macro_f1_drop, accuracy.macro_f1_drop_ci)
    lost = [format_drop(accuracy.drop, accuracy.drop_ci), f"{accuracy.lost} / {accuracy.won}"]
    if row.artifact is None:
        f1_drop, lost = "", ["", ""]
    return [
        f"{accuracy.top1:.2%}",
        *([f"{accuracy.macro_f1:.2%}", f1_drop] if texts else [top5]),
        *lost,
    ]


def _format_scores(row: EvaluatedModel, count: int) -> list[str]:
    if row.scores is None:
        return [""] * (count + 1)
    first = row.scores.scores[0]
    drop = "" if row.artifact is None else format_drop(first.drop, first.drop_ci)
    return [*(f"{score.value:.2%}" for score in row.scores.scores), drop]


def _list_detection_changes(evaluation: Evaluation) -> Iterator[Sentence]:
    """F1 and recall at the threshold of shown boxes, and how far the scores of matched boxes moved."""
    for row in (result for result in evaluation.results if result.artifact is not None):
        rates = [
            score
            for score in (row.scores.scores if row.scores else ())
            if score.name in (F1.name, RECALL.name)
        ]
        drops = [
            f"drop of {score.name} {format_drop(score.drop, score.drop_ci)}" for score in rates
        ]
        shift = row.agreement.score_shift if row.agreement else None
        if evaluation.task != Task.DETECTION or not (shift or drops):
            continue
        if shift is not None:
            mean = f"{shift['mean']:+.3f} [{shift['low']:+.3f}, {shift['high']:+.3f}]"
            moved = f"scores of {shift['boxes']:.0f} matched boxes shift by {mean}"
            drops.append(
                f"{moved}, 5% of them by {shift['p5']:+.3f} or less, 5% by {shift['p95']:+.3f} or more"
            )
        text = (
            f"{row.artifact}, boxes with a score of at least {PARITY_SCORE:g}: {'; '.join(drops)}"
        )
        yield Sentence(text, Tone.FAINT)


def _list_class_drops(evaluation: Evaluation) -> Iterator[Sentence]:
    for row in evaluation.results:
        if row.artifact is None or row.scores is None or row.scores.scores[0].drop < MENTIONED_DROP:
            continue
        worst = sorted(row.scores.classes or (), key=lambda score: -score.drop)[:MENTIONED_CLASSES]
        if worst:
            drops = ", ".join(map(_format_class_drop, worst))
            joint = f"their intervals hold for all {len(row.scores.classes)} classes together"
            text = f"{row.artifact}: drop by class, in points of {row.scores.scores[0].name} ({joint}): {drops}"
            yield Sentence(text, Tone.FAINT)


def _format_class_drop(score: ClassScore) -> str:
    """`cat +2.10 [-0.40, +4.80]`."""
    if score.drop_ci is None:
        return f"{score.label} {100 * score.drop:+.2f} (no sample has it: no interval)"
    low, high = (100 * bound for bound in score.drop_ci)
    return f"{score.label} {100 * score.drop:+.2f} [{low:+.2f}, {high:+.2f}]"
