"""The history of a model: its runs in order, and where its figures changed."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from optpipe.api.arguments import check_arguments
from optpipe.api.door import speak
from optpipe.api.workspace import Workspace, resolve_workspace
from optpipe.core import pl
from optpipe.core.errors import BadInputError, GateError, InconclusiveError
from optpipe.core.history import Finding, HistoryRun, HistorySeries
from optpipe.core.history import History as HistoryRecord

if TYPE_CHECKING:
    import altair as alt


class History:
    """Every bench, evaluation, and sign-off of a model in order, with the changes of its figures.

    `frame()` has a row for each figure of each run, `changes()` one for each change, with the runs between which it lies and what
    differs there. `record` is what `optpipe compare --history MODEL --json` prints.

    >>> import torch, optpipe as op
    >>> model = op.Model(torch.nn.Linear(8, 4), example=torch.randn(2, 8), workspace="work")
    >>> builds = model.build("fp32", backend="onnxruntime", device="cpu")
    >>> _ = builds.bench(batch=1, processes=1, min_time=0.05, keep_going=True)
    >>> past = op.history("linear", workspace="work")
    >>> past.finding, len(past.runs)
    ('too few runs', 1)
    """

    def __init__(self, record: HistoryRecord) -> None:
        self.record = speak(record)

    @property
    def finding(self) -> str:
        """`regression`, `no regression`, or `too few runs`."""
        return str(self.record.finding)

    @property
    def runs(self) -> tuple[HistoryRun, ...]:
        return self.record.runs

    @property
    def series(self) -> tuple[HistorySeries, ...]:
        return self.record.series

    @property
    def warnings(self) -> tuple[str, ...]:
        return self.record.warnings

    def require_no_regression(self) -> "History":
        """Returns itself. Raises GateError for a regression, InconclusiveError if too few runs could show one."""
        from optpipe.measure.history_document import summarize_history

        if self.record.finding is Finding.REGRESSION:
            raise GateError(summarize_history(self.record))
        if self.record.finding is Finding.TOO_FEW:
            raise InconclusiveError(summarize_history(self.record))
        return self

    def frame(self) -> "pl.DataFrame":
        """A row for each figure of each run.

        `build`, `about` (the load, or the data), `machine`, `metric`, `unit`, `run`, `started_utc`, `artifact`, `value` with the
        bounds `low` and `high` of its 95% interval, and `level`, which counts the changes before the run.
        """
        from optpipe.measure.history_document import frame_from_history

        return frame_from_history(self.series)

    def changes(self) -> "pl.DataFrame":
        """A row for each change: the figure, the levels `before` and `after`, `worse`, `recovered`, `last_before` and
        `first_after`, the runs between which it lies, and `differences`, a list of texts."""
        from optpipe.measure.history_document import frame_from_changes

        return frame_from_changes(self.series)

    @check_arguments
    def plot(self, metric: str = "p50") -> "alt.LayerChart":
        """An Altair chart of a figure run by run, with its intervals. Raises BadInputError for a figure that no run has."""
        import altair as alt

        frame = self.frame()
        rows = frame.filter(pl.col("metric") == metric).to_dicts()
        if not rows:
            known = ", ".join(frame["metric"].unique(maintain_order=True)) or "none"
            raise BadInputError(f"metric {metric!r}: no run has it; there are {known}")
        label = "datum.build + ', ' + datum.about"
        base = (
            alt.Chart(alt.InlineData(rows))
            .transform_calculate(series=label)
            .encode(x=alt.X("started_utc:T", title="run"), color=alt.Color("series:N", title=None))
        )
        points = base.mark_line(point=True).encode(
            y=alt.Y("value:Q", title=f"{metric} ({rows[0]['unit']})", scale=alt.Scale(zero=False)),
            detail="level:N",
            tooltip=["run:N", "series:N", "value:Q", "artifact:N"],
        )
        return alt.layer(base.mark_rule().encode(y="low:Q", y2="high:Q"), points)

    def _document(self) -> Any:
        from optpipe.measure.history_document import document_from_history

        return speak(document_from_history(self.record))

    def __str__(self) -> str:
        from optpipe.report.terminal import text_from_document

        return text_from_document(self._document())

    def __repr__(self) -> str:
        return f"History({self.record.model}, {len(self.runs)} runs: {self.finding})"

    def _repr_html_(self) -> str:
        from optpipe.report.notebook import html_from_document

        return html_from_document(self._document())


@check_arguments
def history(
    model: str,
    *,
    workspace: Workspace | str | os.PathLike[str] | None = None,
    more: Sequence[str | os.PathLike[str]] = (),
    across: bool = False,
    since: str | None = None,
    length: int | None = None,
) -> History:
    """The history of `model`, a name, a file, or an ID, in a workspace and in `more` of them.

    `across` joins runs of different machines and clocks; `since` is a date or time in UTC; `length` selects a sequence length.
    Raises BadInputError if nothing of the model was measured, or if a folder is no workspace.
    """
    from optpipe.signoff.dossier import since_from_text
    from optpipe.signoff.history import collect_history

    known = resolve_workspace(workspace)
    stores = [known.store, *(Workspace(folder).store for folder in more)]
    with known.call("history", model=model) as listener:
        record = collect_history(
            model,
            stores,
            listener,
            across=across,
            since=None if since is None else since_from_text(since),
            length=length,
        )
    return History(record)
