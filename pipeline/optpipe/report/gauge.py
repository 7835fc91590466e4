"""A criterion as a drawing: the limit as a line, the observed interval as a bar, the forbidden side shaded."""

from typing import TYPE_CHECKING

from optpipe.core.verdict import CriterionResult

if TYPE_CHECKING:
    from markupsafe import Markup

GAUGE_WIDTH, GAUGE_HEIGHT = 120, 14


def draw_gauge(one: CriterionResult) -> "Markup":
    """The drawing of a criterion; nothing where there is no figure. Hidden from screen readers: it repeats the text."""
    from markupsafe import Markup

    value, limit = one.observed, one.threshold
    if not isinstance(value, int | float) or not isinstance(limit, int | float):
        return Markup("")
    low, high = one.ci or (value, value)
    top = 1.15 * max(value, limit, high)
    if top <= 0:
        return Markup("")
    at_least = one.limit.startswith("at least")
    line, left, right = (GAUGE_WIDTH * max(0.0, each) / top for each in (limit, low, high))
    left, right = max(0.0, min(left, GAUGE_WIDTH - 3)), max(right, left + 3)
    shaded = (0.0, line) if at_least else (line, GAUGE_WIDTH - line)
    tone = one.verdict.lower()
    return Markup(
        '<svg class="gauge" viewBox="0 0 {w} {h}" aria-hidden="true"><rect y="5" width="{w}" height="4" rx="2" fill="var(--line)"/>'
        '<rect x="{x:.1f}" y="5" width="{s:.1f}" height="4" rx="2" fill="var(--fail)" opacity=".35"/>'
        '<rect x="{l:.1f}" y="3" width="{b:.1f}" height="8" rx="2" fill="var(--{t})"/>'
        '<rect x="{m:.1f}" width="2" height="14" fill="var(--ink)"/></svg>'
    ).format(w=GAUGE_WIDTH, h=GAUGE_HEIGHT, x=shaded[0], s=shaded[1], l=left, b=right - left, m=line - 1, t=tone)
