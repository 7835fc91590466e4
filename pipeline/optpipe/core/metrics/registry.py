"""The metrics by name: those of optpipe, and those of other distributions (entry points of the group `optpipe.metrics`).

A plug-in's figure is the mean of the processes' figures, as throughput is: with an allowance for a speed that no process had,
and withheld if a VALID process lacks it. So a verifier can judge it from the processes' figures, without the plug-in's code.
"""

import re
from collections.abc import Mapping
from math import isfinite
from typing import Any

from optpipe.core.errors import BadInputError, first_line
from optpipe.core.measurement import ProcessFigure
from optpipe.core.metrics.contract import Metric, Window
from optpipe.core.metrics.measured import OTHERS, RECORDED, SHOWN, Percentile
from optpipe.core.metrics.scores import SCORE_NAMES
from optpipe.core.metrics.sections import SECTIONS
from optpipe.core.percentile_names import percent_from_name
from optpipe.core.plugins import Group, Registry, list_entry_points, load_plugins
from optpipe.core.quantity import Dimension, Estimate

METRICS: Registry[Metric] = Registry(
    "metric", {metric.name: metric for metric in (*SHOWN, *OTHERS)}
)
_FIXED = tuple(
    name
    for name, value in vars(Metric).items()
    if not name.startswith("_")
    and isinstance(value, bool | float)
    and name not in ("higher_is_better", "needs_longer", "in_history")
)
"""How processes are joined, which a plug-in cannot choose."""
_NAME = re.compile(r"[a-z][a-z0-9_-]*")


class RecordedMetric(Metric):
    """A metric of a plug-in that this installation does not have: its figures can be judged, not measured."""

    def __init__(self, name: str) -> None:
        self.name = self.title = name


def read_metric_plugin(name: str, plugin: Any) -> Metric:
    """Raises BadInputError for an object that is no metric, or that another rule would have to judge."""
    metric = plugin() if isinstance(plugin, type) else plugin
    if not isinstance(metric, Metric):
        raise BadInputError("is not an optpipe.core.metrics.contract.Metric")
    if getattr(metric, "name", None) != name or not _NAME.fullmatch(name):
        raise BadInputError(
            f"is registered as '{name}', and its name is {getattr(metric, 'name', None)!r}: both"
            " must be the same, of lowercase letters, digits, - and _"
        )
    if not isinstance(getattr(metric, "dimension", None), Dimension):
        raise BadInputError("has no dimension, such as Dimension.TIME")
    if type(metric).compute is Metric.compute:
        raise BadInputError("has no compute(window)")
    chosen = next((name for name in _FIXED if getattr(metric, name) != getattr(Metric, name)), None)
    if chosen or type(metric).read is not Metric.read:
        raise BadInputError(
            f"sets {chosen or 'read'}: a plug-in's figure is the mean of the processes' figures"
        )
    if not getattr(metric, "title", ""):
        metric.title = name
    return metric


PLUGINS: Mapping[str, Metric] = load_plugins(
    "optpipe.metrics", (*METRICS, *SECTIONS, *SCORE_NAMES), read_metric_plugin
)
METRICS.update(PLUGINS)


def find_metric(name: str) -> Metric:
    """The metric called `name`, such as `p99.95`; one that only reads records if no distribution here brings it."""
    if name in METRICS:
        return METRICS[name]
    return Percentile(name) if percent_from_name(name) else RecordedMetric(name)


OWN = "optpipe"
"""The distribution of figures that optpipe itself computes, in every version."""
_RECORDED: Mapping[str, Metric] = {metric.name: metric for metric in RECORDED}


def compute_recorded_figures(
    window: Window, known: Mapping[str, ProcessFigure]
) -> dict[str, ProcessFigure]:
    """The figures without a field of their own: of `known` those that only the worker saw, and all that follow from the raw data.

    A plug-in that raises, or gives no number, withholds its figure with the reason.
    """
    figures = {}
    for name, metric in {**_RECORDED, **PLUGINS}.items():
        if not metric.is_witnessed:
            figures[name] = _compute_figure(metric, window)
        elif name in known:
            figures[name] = known[name]
    return figures


def figure_from_witness(metric: Metric, value: float | None, why_not: str | None) -> ProcessFigure:
    """The figure of one process that only its worker saw."""
    return ProcessFigure(value, metric.dimension, OWN, why_not)


def recompute_figures(
    stored: Mapping[str, ProcessFigure], again: Mapping[str, ProcessFigure]
) -> dict[str, ProcessFigure]:
    """The `stored` figures that a record can have, as they follow from its raw data; earlier versions stored fewer.

    A plug-in's figure can be computed `again` only where the same version of it is installed.
    """
    return {
        name: figure
        if (figure := again.get(name)) and figure.distribution == kept.distribution
        else kept
        for name, kept in stored.items()
        if _is_possible(name, kept)
    }


def _is_possible(name: str, figure: ProcessFigure) -> bool:
    """Whether a record can have it: no other figure has its name, and it is a number of at least 0."""
    if figure.value is not None and not (isfinite(figure.value) and figure.value >= 0):
        return False
    if name in _RECORDED:
        return figure.unit is _RECORDED[name].dimension and figure.distribution == OWN
    taken = (name in METRICS and name not in PLUGINS) or percent_from_name(name) > 0
    return not taken and _NAME.fullmatch(name) is not None


def _compute_figure(metric: Metric, window: Window) -> ProcessFigure:
    value, why_not = None, None
    try:
        computed = metric.compute(window)
    except (Exception, SystemExit) as error:  # noqa: BLE001, a stranger's code may raise anything
        why_not = f"{metric.name} raised {type(error).__name__}: {first_line(error)}"
    else:
        value = computed.value if isinstance(computed, Estimate) else computed
        if isinstance(value, str):
            value, why_not = None, value or "no reason given"
        elif isinstance(value, bool) or not isinstance(value, int | float):
            value, why_not = None, f"{metric.name} gave a {type(value).__name__}, not an Estimate"
        elif not isfinite(value) or value < 0:
            value, why_not = None, f"{metric.name} gave {value!r}, not a number of at least 0"
    number = None if value is None else float(value)
    ours = metric.name in _RECORDED
    distribution = OWN if ours else name_distribution("optpipe.metrics", metric.name)
    return ProcessFigure(number, metric.dimension, distribution, why_not)


def name_distribution(group: Group, name: str) -> str:
    """`optpipe-jitter 1.0`: the distribution that registers a plug-in."""
    entries = (entry for entry in list_entry_points(group) if entry.name == name)
    distribution = next((entry.dist for entry in entries if entry.dist is not None), None)
    return (
        "an unknown distribution"
        if distribution is None
        else f"{distribution.name} {distribution.version}"
    )
