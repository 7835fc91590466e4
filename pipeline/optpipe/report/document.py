"""Parts of every report: sentences, tables, figures, and sections.

A document holds content and its importance, not its looks: the terminal, Markdown, and HTML render the same values.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from optpipe.core.entries import WeightsRecord
from optpipe.core.errors import escape
from optpipe.core.precision import MixedPrecision, Placement, PrecisionCost
from optpipe.core.quantity import Estimate, format_interval, format_quantity
from optpipe.core.verdict import CriterionResult


class Tone(StrEnum):
    PLAIN = "plain"
    GOOD = "pass"
    BAD = "fail"
    DOUBTFUL = "inconclusive"
    FAINT = "faint"
    STRONG = "strong"


TONES = {"PASS": Tone.GOOD, "FAIL": Tone.BAD, "INCONCLUSIVE": Tone.DOUBTFUL}


@dataclass(frozen=True, slots=True)
class Sentence:
    """A statement: `label  text`, its `details` below it, and `remedy`, the way out.

    With a label, `tone` marks the label; without one it marks the text.
    """

    text: str
    tone: Tone = Tone.PLAIN
    label: str = ""
    details: tuple[str, ...] = ()
    remedy: str = ""


class ColumnKind(StrEnum):
    TEXT = "text"
    FIGURE = "figure"
    """Aligned to the right, never cut or wrapped; sorted by `Cell.value`."""
    STATE = "state"
    """One of a few words, by which a page can filter."""
    NAME = "name"
    """An identifier, set as code."""


TEXT_ONLY, PAGE_ONLY = 3, 9
"""Ranks of columns that only the terminal and Markdown show, and of those that only a page shows."""


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    kind: ColumnKind = ColumnKind.TEXT
    unit: str = ""
    rank: int = 1
    """On a narrow terminal, columns of the highest rank move below their row first; those of rank 0 never move."""
    shared: bool = False
    """A value that all rows share may stand above the table instead."""
    below: bool = False
    """A page shows it in small print below the cell on its left."""

    @property
    def heading(self) -> str:
        return self.name + " " + self.unit if self.unit else self.name


@dataclass(frozen=True, slots=True)
class Gauge:
    """An observed value with its interval and its limit."""

    value: float
    low: float
    high: float
    limit: float
    at_least: bool
    tone: Tone


@dataclass(frozen=True, slots=True)
class Cell:
    text: str
    tone: Tone = Tone.PLAIN
    note: str = ""
    """An addition to the value, such as its interval."""
    value: float | None = None
    """Sort key; None sorts by `text`."""
    gauge: Gauge | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """Columns that are empty in every row are not shown."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    title: str = ""
    caption: str = ""
    id: str = ""
    row_counts: tuple[int, ...] = ()
    """The number of things in each row, such as criteria that share one; empty if each row is one."""

    def count_rows(self) -> tuple[int, ...]:
        """The number of things in each row."""
        return self.row_counts or (1,) * len(self.rows)

    def list_columns(self, *, page: bool = False) -> list[int]:
        """Positions of the columns with text that a page, or the terminal and Markdown, have room for."""
        return [
            at
            for at, column in enumerate(self.columns)
            if (
                column.below or column.rank not in range(TEXT_ONLY, PAGE_ONLY)
                if page
                else column.rank < PAGE_ONLY
            )
            and any(row[at].text for row in self.rows)
        ]


@dataclass(frozen=True, slots=True)
class RawFile:
    """A file with the data of a figure; `path` is relative to the report."""

    path: str
    sha256: str
    size_bytes: int


RawFiles = tuple[RawFile, ...]
Legend = tuple[tuple[str, str, str], ...]
"""Label, CSS color (`var(--series-1)`), and mark of each entry."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A drawing and its data files; `image` is SVG, or a picture as a `data:` URI."""

    title: str
    caption: str
    image: str
    files: RawFiles = ()
    legend: Legend = ()
    """The page sets it outside the drawing so that names wrap."""
    finding: str = ""
    """A sentence that states what the drawing shows; it is the heading, if there is one."""


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    parts: "tuple[Part, ...]"
    id: str = ""
    folded: bool = False
    """A page shows only the title until it is opened."""


Part = Sentence | Table | Figure | Section
Document = tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Page:
    """A separate report: the answer first, then sections, then the machine and the files."""

    title: str
    answer: str
    sections: tuple[Section, ...]
    verdict: str = ""
    tally: tuple[tuple[str, int], ...] = ()
    """Number of criteria with each verdict."""
    alerts: tuple[Sentence, ...] = ()
    highlights: tuple[tuple[str, str, str], ...] = ()
    """Key figures: `Lowest p99 latency`, `1.20 ms`, and the build that has it."""
    files: RawFiles = ()
    created_utc: str = ""
    optpipe: str = ""
    identity: tuple[str, ...] = ()
    """When, on what and by which engine it was measured."""
    next_step: str = ""
    caution: str = ""
    """What the page cannot show, beside the answer."""


def clean_text(text: str) -> str:
    """Escapes all control characters except line breaks, so that none reaches a terminal, a page, or XML."""
    return text if text.isprintable() else "\n".join(map(escape, text.split("\n")))


Row = Sequence[Cell | str | None]
"""Cells or plain texts; None is a value that was not measured."""


def make_document(parts: Iterable[Part | None]) -> Document:
    return tuple(part for part in parts if part is not None)


def make_table(
    columns: Iterable[Column | str],
    rows: Iterable[Row],
    *,
    title: str = "",
    caption: str = "",
    id: str = "",
    row_counts: Sequence[int] = (),
) -> Table:
    heads = tuple(Column(column) if isinstance(column, str) else column for column in columns)
    cells = tuple(
        tuple(cell if isinstance(cell, Cell) else Cell(cell or "") for cell in row) for row in rows
    )
    return Table(heads, cells, title, caption, id, tuple(row_counts))


def figure_column(name: str, unit: str = "", rank: int = 1) -> Column:
    return Column(name, ColumnKind.FIGURE, unit, rank)


def figure_columns(*names: str) -> list[Column]:
    return [figure_column(name) for name in names]


def warn_of_weights(weights: WeightsRecord) -> list[Sentence]:
    """Says that weights are random, with those that a factory draws, or of another type than the user's."""
    sentences = []
    if (own := weights.converted_from) is not None:
        text = f"converted from {own} to float32; outputs are compared with those of the module in {own}"
        sentences.append(Sentence(text, Tone.DOUBTFUL, "weights"))
    if not weights.trained:
        which = f" ({weights.drawn})" if weights.drawn else ""
        state = f"random{which}" if weights.source == "random" else "not asserted to be trained"
        text = f"weights are {state}: these results say nothing about accuracy"
        sentences.append(Sentence(text, Tone.DOUBTFUL))
    return sentences


def cell_from_estimate(
    figure: Estimate | None, form: str, *, scale: float = 1.0, interval: bool = False
) -> Cell:
    """A figure times `scale` in the format `form`; `interval` adds its interval, without the unit."""
    if figure is None:
        return Cell("")
    shown = figure.scale(scale)
    note = ""
    if interval and shown.low is not None and shown.high is not None:
        note = (
            f"[{', '.join(form.format(bound).rstrip('%×') for bound in (shown.low, shown.high))}]"
        )
    return Cell(form.format(shown.value), note=note, value=shown.value)


def cell_from_latency(ns: Estimate | None) -> Cell:
    return cell_from_estimate(ns, "{:.3g}", scale=1e-6)


def format_observed(criterion: CriterionResult) -> str:
    """The observed value of a criterion with its interval, or a dash."""
    if criterion.unit is None or not isinstance(criterion.observed, float):
        return "–" if criterion.observed is None else str(criterion.observed)
    text = format_quantity(criterion.observed, criterion.unit)
    return (
        text
        if criterion.ci is None or criterion.ci[0] == criterion.ci[1]
        else f"{text} {format_interval(*criterion.ci, criterion.unit, text)}"
    )


def tabulate_results(results: Iterable[CriterionResult]) -> Table:
    """A row for each criterion in the given order, with its verdict and reason."""
    return make_table(
        (
            "criterion",
            Column("verdict", ColumnKind.STATE),
            *figure_columns("observed"),
            "limit",
            "why",
        ),
        [
            (
                criterion.name,
                Cell(criterion.verdict, TONES[criterion.verdict]),
                format_observed(criterion),
                criterion.limit,
                Cell(criterion.reason, note="→ " + criterion.remedy if criterion.remedy else ""),
            )
            for criterion in results
        ],
    )


def format_rate_interval(ci: Sequence[float] | None) -> str:
    """None if too few batches were timed for an interval, or if all are equal."""
    return f"[{ci[0]:,.0f}, {ci[1]:,.0f}]" if ci else "no interval"


def format_drop(drop: float, interval: tuple[float, float]) -> str:
    """A drop of a share in percentage points, with its interval."""
    low, high = interval
    return f"{100 * drop:+.2f} [{100 * low:+.2f}, {100 * high:+.2f}]"


def format_cost_snr(cost: PrecisionCost) -> str:
    """`31.2 dB`; a dash if outputs differ in size."""
    return "–" if cost.snr_db is None else f"{cost.snr_db:.1f} dB"


def name_score(score: str) -> str:
    return {"top1": "top-1 accuracy"}.get(score, score)


def format_mixed(mixed: MixedPrecision) -> str:
    """A build within a budget in one line."""
    of = " SNR" if mixed.metric == "snr" else f" of {name_score(mixed.metric)}"
    kept = f"{len(mixed.kept)} layer{'' if len(mixed.kept) == 1 else 's'} kept"
    cost, share = mixed.cost, sum(layer.macs for layer in mixed.kept) / max(mixed.total_macs, 1)
    drop = (
        ""
        if cost.drop is None or cost.drop_ci is None
        else f", drop {format_drop(cost.drop, cost.drop_ci)}"
    )
    outputs = f"SNR {format_cost_snr(cost)}{drop}" if cost.finite else "NaN or Inf in the outputs"
    return f"{kept}, {share:.1%} of MACs, for a budget of {mixed.budget}{of}: {outputs} on {mixed.samples} samples"


def format_placement(placement: Placement) -> str:
    """`1 of 61 nodes, 0.0% of MACs, does not run on CUDAExecutionProvider: top (TopK, CPUExecutionProvider, 0.0%)`."""
    named = [
        f"{node.name} ({node.op}, {node.provider}, {node.share:.1%})"
        for node in placement.elsewhere
    ]
    more = placement.count - len(named)
    return (
        f"{placement.count} of {placement.nodes} nodes, {placement.share:.1%} of {placement.unit}, "
        f"{'does' if placement.count == 1 else 'do'} not run on {placement.provider}: "
        + ", ".join(named)
        + (f" and {more} more" if more > 0 else "")
    )
