"""Which tries of a build a sign-off judges: those of all its bench runs, or of the runs since a time that the request names."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from optpipe.core.errors import BadInputError, escape
from optpipe.core.quantity import Dimension, format_quantity
from optpipe.core.verdict import Note
from optpipe.measure.groups import RecordedMeasurement, describe_tries, group_processes
from optpipe.workspace.runs import Run


def since_from_text(text: str) -> str:
    """Reads `--since` as a time in UTC. Raises BadInputError for text that is not a time, and for a time in the future."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise BadInputError(
            f"--since {escape(text)}: expected a date or time in UTC, such as 2026-11-21 or 2026-11-21T07:25"
        ) from error
    found = found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    if found > datetime.now(UTC):
        raise BadInputError(f"--since {escape(text)}: is in the future; nothing was measured since then")
    return found.isoformat(timespec="milliseconds")


def was_started_since(started_utc: str, since: str | None) -> bool:
    """Whether a run counts. Raises BadInputError where one of the two is not a time."""
    try:
        return since is None or datetime.fromisoformat(started_utc) >= datetime.fromisoformat(since)
    except (ValueError, TypeError) as error:
        raise BadInputError(f"a run started {escape(started_utc)}, to be judged since {escape(str(since))}") from error


def split_runs(runs: Sequence[Run], since: str | None) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
    """The runs that are judged, and the bench runs that are not. What is not a bench run is always judged."""
    judged = [run.kind != "bench" or was_started_since(run.manifest.started_utc, since) for run in runs]
    return (
        tuple(run for run, counts in zip(runs, judged, strict=True) if counts),
        tuple(run for run, counts in zip(runs, judged, strict=True) if not counts),
    )


def note_since(since: str | None, left_out: Sequence[RecordedMeasurement]) -> Iterator[Note]:
    """Names the tries that `--since` left out, and what they showed."""
    if since is None:
        return
    message = f"only bench runs since {since[:19].replace('T', ' ')} UTC are judged (--since)"
    tries = [
        f"{group.load} ({', '.join(dict.fromkeys(one.run for one in group.tries))}): {describe_tries(group)}"
        + _describe_range([each for run in group.list_values("p50") for each in run])
        for group in group_processes(left_out)
    ]
    message += f"; left out: {'; '.join(tries)}" if tries else "; there are no earlier ones of this build"
    yield Note("since", message, "omit --since to judge all tries")


def _describe_range(p50: Sequence[float]) -> str:
    if not p50:
        return ""
    low, high = (format_quantity(each, Dimension.TIME) for each in (min(p50), max(p50)))
    return f", p50 {low}" if low == high else f", p50 {low} to {high}"
