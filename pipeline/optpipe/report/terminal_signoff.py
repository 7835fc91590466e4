"""A verdict and a verification on the terminal."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from optpipe.core.units import format_bytes
from optpipe.core.verdict import StepRecord, VerdictRecord, VerificationRecord
from optpipe.report.answer import format_verdict_summary
from optpipe.report.records import VERDICT_STYLES, explain_beside_figures, format_observed
from optpipe.report.tables import make_table


def render_verdict(record: VerdictRecord, dossier: Path | None) -> RenderableType:
    """The verdict, why, and what to do."""
    color = VERDICT_STYLES[record.verdict]
    lines: list[RenderableType] = [
        Text.assemble((record.verdict, f"bold {color}"), "  ", format_verdict_summary(record))
    ]
    lines += [
        Text(f"WAIVED  {one.name} is {one.verdict} and does not count: {one.waived}", style="bold red")
        for one in record.waived
    ]
    table = make_table("criterion", "verdict", "observed", "limit", "why")
    for one in record.criteria:
        why = Text(explain_beside_figures(one))
        if one.remedy:
            why.append("\n" if why else "").append(f"→ {one.remedy}", style="dim")
        said = Text(one.verdict, style=VERDICT_STYLES[one.verdict])
        said.append(" waived" if one.waived else "", style="bold red")
        observed = format_observed(one) + (f"\n{one.about}" if one.about else "")
        table.add_row(one.name, said, observed, one.limit, why)
    lines.append(table)
    for note in record.notes:
        lines.append(Text.assemble((f"note  {note.message}", "yellow"), (f"\n→ {note.remedy}", "dim")))
    if dossier is not None:
        lines.append(Text(f"dossier  {dossier}"))
        lines.append(Text(f"verify it anywhere  {shlex.join(['optpipe', 'verify', str(dossier)])}", style="dim"))
    return Group(*lines)


def render_pipeline_run(steps: Sequence[StepRecord], record: VerdictRecord, dossier: Path) -> RenderableType:
    """The verdict, after what became of each step."""
    lines = [
        Text(f"{one.status:<8} {one.name:<11} {one.seconds:.1f} s" + (f"  {one.reason}" if one.reason else ""))
        for one in steps
    ]
    return Group(*lines, render_verdict(record, dossier))


NOT_RECOMPUTED = "→ changed before it was sealed, or made by a different version of optpipe: measure and sign off again"


UNSIGNED = "This dossier is not signed: it proves that the folder agrees with itself, not who made it or where it was measured."


def render_verification(found: VerificationRecord) -> RenderableType:
    """Whether a dossier is intact, and the verdict that its raw files give."""
    if found.recomputed is None:
        problems = [Text(f"  {one}") for one in found.problems[:20]]
        more = len(found.problems) - 20
        tail = [Text(f"  and {more} more", style="dim")] if more > 0 else []
        why = ": the seal is intact, but not every figure follows from the raw files" if found.as_sealed else ""
        advice = [Text(NOT_RECOMPUTED)] if found.as_sealed else []
        return Group(Text(f"NOT INTACT  {found.dossier}{why}", style="bold red"), *problems, *tail, *advice)
    head = Text.assemble(
        ("intact", "green"), f"  {found.files} files, {format_bytes(found.size_bytes)}, {found.signature}"
    )
    notes = [Text(f"not compared  {one}", style="yellow") for one in found.not_compared]
    notes += [Text(f"no raw file  {one}", style="dim") for one in found.unbacked]
    notes += [Text(UNSIGNED, style="yellow")] if found.signature == "not signed" else []
    return Group(head, *notes, render_verdict(found.recomputed, None))
