"""A re-check on the terminal."""

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from optpipe.report.records import VERDICT_STYLES
from optpipe.report.tables import make_table

if TYPE_CHECKING:
    from optpipe.deploy.recheck_record import RecheckRecord


def render_recheck(found: "RecheckRecord") -> RenderableType:
    """The verdict, why, and what changed: versions, outputs, latency."""
    lines: list[RenderableType] = [
        Text.assemble((found.verdict, f"bold {VERDICT_STYLES[found.verdict]}"), f"  {found.dossier}"),
        *(Text(f"  {each}") for each in found.reasons),
    ]
    versions = make_table("changed", "old", "new")
    for each in found.versions:
        versions.add_row(each.name, each.old, each.new)
    lines.append(versions if found.versions else Text("versions: nothing changed"))
    for one in found.outputs:
        text = "equal" if not one.changed else f"{one.changed:,} of {one.values:,} values changed"
        lines.append(Text(f"output {one.name}: {text}, relative error {one.relative_error:.2g} ({found.outputs_how})"))
    latency = found.latency
    lines.append(
        Text(
            f"latency {latency.metric}, {latency.load}: {latency.ratio:.3f} times the old ({latency.ci[0]:.3f} to "
            f"{latency.ci[1]:.3f} at {latency.confidence:.0%}), {latency.change}; {latency.how}"
        )
    )
    lines.append(Text(f"precision: {found.precision}", style="dim"))
    return Group(*lines)
