"""The decision of `build --precision auto` on the terminal."""

from statistics import median
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from optpipe.core.decision import Candidate, CandidateAccuracy, Decision, Standing
from optpipe.core.units import format_duration, format_snr
from optpipe.report.records import format_drop, format_random_weights, name_score

if TYPE_CHECKING:
    from optpipe.build.choose import ChoiceResult

_STYLES = {Standing.CHOSEN: "green", Standing.FAILED: "red", Standing.NOT_PROVEN: "red"}


def render_choice(result: "ChoiceResult") -> RenderableType:
    """The winner first, then every loser with its reason, then what was not built."""
    decision, weights = result.decision, result.build.weights
    lines: list[RenderableType] = [
        Text(f"{decision.model}: builds with {_format_budget(decision)}, judged on {decision.judged_on}"),
        _render_table(decision),
        *_render_verdict(decision),
    ]
    lines += [
        Text(f"failed  {each.backend} {each.precision}: {each.reason}", style="red")
        for each in decision.left_out
        if each.failed
    ]
    lines += [Text(f"not built  {text}", style="dim") for text in _group_left_out(decision)]
    if not weights.trained:
        lines.append(Text(format_random_weights(weights.drawn), style="yellow"))
    return Group(*lines, Text(f"run {result.run_dir}", style="dim"))


def _format_budget(decision: Decision) -> str:
    if decision.budget.endswith("dB"):
        return f"an SNR of at least {decision.budget}"
    return f"a drop in {name_score(decision.score)} of at most {decision.budget}"


def _render_table(decision: Decision) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("artifact", "backend", "precision"):
        table.add_column(name, no_wrap=True)
    table.add_column("SNR" if decision.budget.endswith("dB") else "drop (95 %)", justify="right")
    for size in decision.batch_sizes:
        table.add_column(f"batch {size}", justify="right")
    table.add_column("outcome", overflow="fold")
    for each in decision.candidates:
        table.add_row(
            each.artifact,
            f"{each.backend} ({each.device})",
            each.precision,
            _format_accuracy(each.accuracy),
            *(_format_time(each, size) for size in decision.batch_sizes),
            Text(f"{each.standing}: {each.reason}", style=_STYLES.get(each.standing, "")),
        )
    return table


def _format_accuracy(accuracy: CandidateAccuracy | None) -> str:
    if accuracy is None:
        return ""
    if accuracy.drop is not None and accuracy.drop_ci is not None:
        return format_drop(accuracy.drop, accuracy.drop_ci)
    return "equal" if accuracy.snr_db is None else format_snr(accuracy.snr_db)


def _format_time(candidate: Candidate, size: int) -> str:
    found = next((each for each in candidate.times if each.batch_size == size), None)
    return "" if found is None else format_duration(median(found.final_ns or found.race_ns))


def _render_verdict(decision: Decision) -> list[Text]:
    if decision.winners:
        labels = {each.artifact: each.label for each in decision.candidates}
        return [
            Text(f"batch {size}: {labels[winner]}, artifact {winner}{_format_ties(decision, size)}", style="green")
            for size, winner in decision.winners.items()
        ]
    judged = [each.standing for each in decision.candidates]
    nearest = decision.nearest
    if Standing.FAILED in judged or nearest is None:
        return [Text("no build could be measured", style="red")]
    said = (
        f"no build is shown to keep {decision.budget}: more labeled data or a wider --budget would decide"
        if Standing.NOT_SHOWN in judged
        else f"FAIL  no build keeps {decision.budget}"
    )
    return [Text(f"{said}; the nearest is {nearest.label} with {_format_accuracy(nearest.accuracy)}", style="red")]


def _format_ties(decision: Decision, size: int) -> str:
    equal = [
        f"{each.label}, artifact {each.artifact}"
        for each in decision.candidates
        if any(time.batch_size == size and time.is_equal for time in each.times)
    ]
    return f"; equally fast within the error: {'; '.join(equal)}" if equal else ""


def _group_left_out(decision: Decision) -> list[str]:
    """`fp16, int8 on tensorrt: why`, one line for each reason."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for each in decision.left_out:
        if not each.failed:
            reasons.setdefault((each.backend, each.reason), []).append(each.precision)
    return [
        f"{' on '.join(part for part in (', '.join(filter(None, precisions)), backend) if part)}: {reason}"
        for (backend, reason), precisions in reasons.items()
    ]
