"""The documents of sweeps and merges."""

from collections.abc import Iterator, Sequence

from optpipe.core.load import Mode, Scenario, name_sample
from optpipe.core.metrics.measured import P50, P99, THROUGHPUT
from optpipe.core.quantity import format_duration
from optpipe.core.records import group_pairs
from optpipe.report.document import (
    Cell,
    Column,
    ColumnKind,
    Document,
    Sentence,
    Table,
    Tone,
    cell_from_estimate,
    cell_from_latency,
    figure_column,
    make_document,
    make_table,
)
from optpipe.sweep.ledger import MergeRecord
from optpipe.sweep.plan import SweepRecord, SweepRow

_TONES = {
    "done": Tone.GOOD,
    "invalid": Tone.BAD,
    "failed": Tone.BAD,
    "impossible": Tone.DOUBTFUL,
    "elsewhere": Tone.DOUBTFUL,
}


def document_from_sweep(record: SweepRecord) -> Document:
    return make_document([_tabulate_cells(record), *_list_reasons(record.rows), *_sum_up(record)])


def _tabulate_cells(record: SweepRecord) -> Table:
    columns: list[Column | str] = [
        Column("GPU", shared=True),
        Column("model", shared=True),
        "build",
        "load",
        figure_column("p50", "ms"),
        figure_column("p99", "ms"),
        figure_column(f"{name_sample(row.sample for row in record.rows)}s/s"),
        figure_column("processes", rank=2),
        Column("state", ColumnKind.STATE, rank=0),
        Column("run", rank=3),
    ]
    rows = []
    for row in record.rows:
        recipe, load, figures = row.cell.recipe, row.cell.load, row.figures or {}
        usual = load.scenario is Scenario.SINGLE_STREAM and load.mode is Mode.COMPUTE
        state = f"{row.state} (stored)" if row.stored and row.state != "stored" else row.state
        rows.append(
            (
                row.cell.kind,
                recipe.model,
                " ".join(
                    [
                        recipe.backend,
                        recipe.precision,
                        *(option.partition(".")[2] for option in row.cell.options),
                    ]
                ),
                load.size if usual else str(load),
                cell_from_latency(figures.get(P50.name)),
                cell_from_latency(figures.get(P99.name) if load.percentile >= 99 else None),
                cell_from_estimate(figures.get(THROUGHPUT.name), "{:,.0f}"),
                str(row.processes or ""),
                Cell(state, _TONES.get(row.state, Tone.PLAIN)),
                row.run,
            )
        )
    return make_table(columns, rows)


def _list_reasons(rows: Sequence[SweepRow]) -> Iterator[Sentence]:
    """One line for each reason, however many cells have it; then earlier attempts."""
    told = (row for row in rows if row.reason and row.state != "done")
    same = group_pairs(((row.state, row.reason), row.cell.label) for row in told)
    for (state, reason), labels in same.items():
        more = f" and {len(labels) - 1} more" if len(labels) > 1 else ""
        yield Sentence(f"{labels[0]}{more}: " + reason, _TONES.get(state, Tone.FAINT), state)
    for row in rows:
        yield from (
            Sentence(f"{row.cell.label}: " + why, Tone.DOUBTFUL, "tried again")
            for why in row.attempts
        )


def _sum_up(record: SweepRecord) -> Iterator[Sentence]:
    counts = ", ".join(f"{count} {state}" for state, count in record.counts.items())
    slots = f"{len(record.slots)} slot{'' if len(record.slots) == 1 else 's'}"
    yield Sentence(
        f"{len(record.rows)} cell{'' if len(record.rows) == 1 else 's'} on {slots}: {counts}"
    )
    if record.dry_run:
        left = record.counts.get("to run", 0)
        known = (
            "unknown, no earlier jobs"
            if record.estimate_s is None
            else format_duration(record.estimate_s * 1e9)
        )
        text = f"{left} job{'' if left == 1 else 's'} to run; estimated time: {known}"
        yield Sentence(text if left else "nothing to run")
        return
    yield Sentence(f"took {format_duration(record.seconds * 1e9)}")


def document_from_merge(record: MergeRecord) -> Document:
    count = len(record.conflicts)
    total = f"{len(record.sources)} workspace{'' if len(record.sources) == 1 else 's'}"
    conflicts = f"{count} conflict{'' if count == 1 else 's'}"
    return make_document(
        [
            *(Sentence(conflict, Tone.DOUBTFUL, "conflict") for conflict in record.conflicts),
            *(Sentence(problem, Tone.BAD, "not merged") for problem in record.damaged),
            Sentence(f"{total}: {record.added} added, {record.present} already here, {conflicts}"),
        ]
    )
