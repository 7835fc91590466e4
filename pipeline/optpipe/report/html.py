"""The report as one HTML file: the answer first, everything inside it, nothing fetched."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

from optpipe.core.comparison import Comparison, ComparisonRow
from optpipe.core.environment import Environment as MachineEnvironment
from optpipe.core.estimate import Estimate
from optpipe.core.measurement import Mode, name_sample
from optpipe.core.quantity import Dimension, choose_dimension, format_quantity
from optpipe.core.units import format_bytes
from optpipe.core.verdict import CriterionResult, Verdict, VerdictRecord
from optpipe.report.answer import format_summary
from optpipe.report.gauge import draw_gauge
from optpipe.report.records import explain_beside_figures, format_observed, scale_to_ms
from optpipe.report.report import Report

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

    from optpipe.report.drawing import Figure

MARKS = {Verdict.PASS: "✓", Verdict.FAIL: "✕", Verdict.INCONCLUSIVE: "?"}


@dataclass(frozen=True, slots=True)
class Column:
    """A table's column."""

    name: str
    unit: str = ""
    numeric: bool = False


@dataclass(frozen=True, slots=True)
class Cell:
    """What is shown, and what it is sorted by."""

    html: "Markup"
    sort: str


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row with the group that the filter buttons choose by."""

    cells: tuple[Cell, ...]
    group: str
    tone: str = ""


@dataclass(frozen=True, slots=True)
class Tile:
    """One key figure."""

    name: str
    value: str
    note: str


def render_html(report: Report, *, with_figures: bool = True) -> str:
    """The page. The same report gives the same bytes."""
    verdict = report.verdict
    drawn = _draw_figures(report) if with_figures else []
    criteria = () if verdict is None else verdict.criteria
    columns, rows = _drop_empty_columns(
        _list_build_columns(report.comparison),
        [_render_build(row, report.comparison) for row in report.comparison.rows],
    )
    macro = _make_environment().get_template("table.html.j2").module.table  # type: ignore[attr-defined]
    return (
        _make_environment()
        .get_template("report.html.j2")
        .render(
            report=report,
            css=_read_page_file("report.css"),
            js=_read_page_file("report.js"),
            table=macro,
            tone="plain" if verdict is None else verdict.verdict.lower(),
            marks=MARKS,
            answer=format_summary(report),
            tally=_count_verdicts(verdict),
            waived=() if verdict is None else verdict.waived,
            tiles=list(_make_tiles(report)),
            criteria_columns=CRITERIA_COLUMNS,
            criteria_rows=[_render_criterion(one) for one in criteria],
            build_columns=columns,
            build_rows=rows,
            builds_note=_format_builds_note(report),
            figures=drawn,
            findings=report.profile.findings[:8] if report.profile else (),
            facts=list(_list_facts(report.environment)),
            files_size=format_bytes(sum(file.size_bytes for file in report.files)),
            sections=list(_list_sections(report, bool(drawn))),
        )
    )


def _draw_figures(report: Report) -> "list[Figure]":
    from optpipe.report.charts import draw_figures

    return draw_figures(report)


@cache
def _make_environment() -> "Environment":
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

    loader = PackageLoader("optpipe.report", "page")
    escape = select_autoescape(["html.j2", "j2"])
    made = Environment(
        loader=loader, autoescape=escape, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    made.filters["code"] = _mark_code
    return made


def _mark_code(text: str) -> "Markup":
    """The text, with what stands between backticks as code."""
    from markupsafe import Markup

    parts = text.split("`")
    if len(parts) % 2 == 0:
        return Markup("{}").format(text)
    return Markup("").join(Markup("<code>{}</code>" if at % 2 else "{}").format(part) for at, part in enumerate(parts))


def _read_page_file(name: str) -> "Markup":
    from markupsafe import Markup

    return Markup(resources.files("optpipe.report").joinpath("page", name).read_text(encoding="utf-8"))


def _list_sections(report: Report, drawn: bool) -> Iterator[tuple[str, str]]:
    if report.verdict:
        yield "criteria", "Criteria"
    if report.comparison.rows:
        yield "builds", "Builds"
    if drawn:
        yield "figures", "Figures"
    if report.pictures:
        yield "parity", "Preprocessing"
    if report.profile and report.profile.findings:
        yield "profile", "Bottleneck"
    yield "evidence", "Evidence"


def _count_verdicts(record: VerdictRecord | None) -> list[tuple[str, int]]:
    if record is None:
        return []
    counted = [one.verdict for one in record.counted]
    found = [(str(name), counted.count(name)) for name in Verdict if name in counted]
    return [*found, ("WAIVED", len(record.waived))] if record.waived else found


def _make_tiles(report: Report) -> Iterator[Tile]:
    """The best figures of the judged artifact; of a plain comparison, those of the best builds."""
    comparison, record = report.comparison, report.verdict
    if record is None:
        names = {"latency": "Lowest latency", "throughput": "Highest throughput", "efficiency": "Least energy"}
        for goal, row_id in comparison.best.items():
            if row_id is not None:
                yield Tile(names[goal], comparison.best_reason[goal], comparison.row(row_id).label)
        return
    rows = [row for row in comparison.rows if row.artifact == record.artifact.id and row.valid]
    percentile = "p99" if any("p99" in row.latency_ns for row in rows) else "p50"
    sample = name_sample(row.load.sample for row in rows)
    if timed := [row for row in rows if percentile in row.latency_ns]:
        best = min(timed, key=lambda row: row.latency_ns[percentile].value)
        yield Tile(
            f"Lowest {percentile} latency",
            format_quantity(best.latency_ns[percentile].value, Dimension.TIME),
            best.label,
        )
    if counted := [(row.throughput_images_per_s.value, row.label) for row in rows if row.throughput_images_per_s]:
        value, label = max(counted)
        yield Tile("Highest throughput", format_quantity(value, choose_dimension(Dimension.RATE, sample)), label)
    if metered := [(row.energy_j_per_image.value, row.label) for row in rows if row.energy_j_per_image]:
        value, label = min(metered)
        energy = format_quantity(value, choose_dimension(Dimension.ENERGY, sample))
        yield Tile("Least energy", f"≈ {energy}", label)
    if record.artifact.size_bytes:
        yield Tile("Engine", format_bytes(record.artifact.size_bytes), f"sha256 {str(record.artifact.sha256)[:12]}")


CRITERIA_COLUMNS = (Column("Criterion"), Column("Verdict"), Column("Observed"), Column("Limit"), Column("Why"))


def _render_criterion(one: CriterionResult) -> TableRow:
    from markupsafe import Markup

    order = str((Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.PASS).index(one.verdict))
    chip = Markup('<span class="chip {}">{} {}</span>').format(one.verdict.lower(), MARKS[one.verdict], one.verdict)
    if one.waived:
        chip += Markup(' <span class="chip waived">WAIVED</span>')
    why = Markup("{}").format(explain_beside_figures(one))
    if one.remedy:
        why += Markup('<span class="remedy">→ {}</span>').format(_mark_code(one.remedy))
    about = Markup("<small>{}</small>").format(one.about) if one.about else ""
    observed = f"{one.observed:.9g}" if isinstance(one.observed, float) else one.observed or ""
    cells = (
        Cell(Markup("<code>{}</code>").format(Markup(".<wbr>").join(one.name.split("."))), one.name),
        Cell(chip, order),
        Cell(Markup("{}{}{}").format(format_observed(one), about, draw_gauge(one)), observed),
        Cell(Markup("{}").format(one.limit), one.limit),
        Cell(why, one.reason),
    )
    return TableRow(cells, one.verdict, "waived-row" if one.waived else "")


def _list_build_columns(comparison: Comparison) -> tuple[Column, ...]:
    sample = name_sample(row.load.sample for row in comparison.rows)
    return (
        Column("Build"),
        Column("Standing"),
        Column("Batch", "and load", numeric=True),
        Column("p50", "ms", numeric=True),
        Column("p99", "ms", numeric=True),
        Column("Throughput", f"{sample}s/s", numeric=True),
        Column("Speed-up", "of p50", numeric=True),
        Column(f"{sample.title()}s/J", numeric=True),
        Column("Top-1", numeric=True),
        Column("Memory", numeric=True),
        Column("Size", numeric=True),
    )


def _render_build(row: ComparisonRow, comparison: Comparison) -> TableRow:
    from markupsafe import Markup

    standing = "frontier" if row.on_frontier else "dominated" if row.valid else "INVALID"
    why = "" if row.valid else ", ".join(row.reason_codes)
    beaten = f"by {comparison.row(row.dominated_by.split(': ', 1)[0]).label}" if row.dominated_by else why
    mode = [] if row.load.mode == Mode.COMPUTE else [row.load.mode]
    load = ", ".join([*row.load.list_lengths(), row.scenario, *mode])
    energy = row.energy_j_per_image
    cells = (
        Cell(Markup("{}<small>{}</small>").format(row.configuration, row.artifact[:12]), row.configuration),
        Cell(
            Markup('<span class="chip {}">{}</span><small>{}</small>').format(standing.lower(), standing, beaten),
            standing,
        ),
        Cell(Markup("{}<small>{}</small>").format(row.load.batch_size, load), str(row.load.batch_size)),
        _format_interval(scale_to_ms(row.latency_ns.get("p50")), "{:.3g}"),
        _format_interval(scale_to_ms(row.latency_ns.get("p99")), "{:.3g}"),
        _format_interval(row.throughput_images_per_s, "{:,.0f}"),
        _format_interval(row.speedup, "{:.2f}×", row.change or ""),
        _format_number(
            "–" if energy is None else f"{1 / energy.value:.3g}", None if energy is None else 1 / energy.value
        ),
        _format_interval(row.top1, "{:.1%}"),
        _format_number(format_bytes(row.memory_bytes) if row.memory_bytes else "–", row.memory_bytes),
        _format_number(format_bytes(row.size_bytes) if row.size_bytes else "–", row.size_bytes),
    )
    return TableRow(cells, standing)


def _drop_empty_columns(columns: tuple[Column, ...], rows: list[TableRow]) -> tuple[list[Column], list[TableRow]]:
    """Leaves out the columns that no row has anything in."""
    kept = [at for at in range(len(columns)) if any(row.cells[at].sort for row in rows)]
    return [columns[at] for at in kept], [replace(row, cells=tuple(row.cells[at] for at in kept)) for row in rows]


def _format_number(text: str, value: float | None) -> Cell:
    from markupsafe import Markup

    return Cell(Markup("{}").format(text), "" if value is None else f"{value:.9g}")


def _format_interval(figure: Estimate | None, form: str, note: str = "") -> Cell:
    from markupsafe import Markup

    if figure is None:
        return Cell(Markup("–"), "")
    bounds = ""
    if figure.low is not None and figure.high is not None:
        bounds = f"[{form.format(figure.low)}, {form.format(figure.high)}]"
    lines = Markup("").join(Markup("<small>{}</small>").format(line) for line in (bounds, note) if line)
    return Cell(Markup("{}{}").format(form.format(figure.value), lines), f"{figure.value:.9g}")


def _format_builds_note(report: Report) -> str:
    comparison = report.comparison
    parts = [f"{len(comparison.rows)} measurements, {len(comparison.frontier)} on the frontier."]
    if comparison.baseline:
        parts.append(f"Baseline: {comparison.baseline.name}.")
    if comparison.slo:
        parts.append(f"Best under {comparison.slo}.")
    return " ".join([*parts, "Brackets are confidence intervals; a dash means not measured."])


def _list_facts(environment: MachineEnvironment) -> Iterator[tuple[str, str]]:
    for gpu in environment.gpus:
        yield "GPU", f"{gpu.name}, driver {gpu.driver}"
    if not environment.gpus:
        yield "GPU", "none"
    yield "CPU", f"{environment.cpu}, {environment.cpu_count} cores"
    yield "Python", environment.python
    yield from environment.packages.items()
