"""Describes where each build stands after a race, and why."""

from collections.abc import Collection, Mapping, Sequence

from optpipe.build.budget import find_flaw
from optpipe.build.records import BuiltArtifact
from optpipe.core.entries import ArtifactInfo
from optpipe.core.precision import Budget
from optpipe.core.wording import Argument, join_texts
from optpipe.measure.race import Race
from optpipe.models.artifacts.decisions import (
    Candidate,
    CandidateAccuracy,
    CandidateTimes,
    Standing,
)
from optpipe.stats.ratio import Change


def list_candidates(
    judged: Sequence[BuiltArtifact],
    races: Mapping[int, Race],
    failures: Mapping[str, str],
    budget: Budget,
    hopeless: Collection[str] = (),
) -> tuple[Candidate, ...]:
    """Winners first, then by time at the first batch size; then those without a time, in the given order."""
    infos = {build.entry.id: build.entry.info for build in judged}
    candidates = []
    for build in judged:
        id, info = build.entry.id, build.entry.info
        standing, reason = _explain(build, races, failures, infos, budget)
        standing = Standing.DROPPED if id in hopeless else standing
        times = []
        for size, race in races.items():
            if id in race.times and ((own := race.times[id]).race or own.final):
                slowdown = None if id == race.winner else race.compute_slowdown(id)
                times.append(
                    CandidateTimes(
                        size, tuple(own.race), tuple(own.final), race.ratios.get(id), slowdown
                    )
                )
        candidates.append(
            Candidate(
                id,
                info.backend,
                info.precision,
                info.device,
                standing,
                reason,
                build.accuracy,
                tuple(times),
            )
        )

    def rank(candidate: Candidate) -> tuple[int, float]:
        slowdown = candidate.times[0].slowdown if candidate.times else None
        return _ORDER.index(candidate.standing), 1.0 if slowdown is None else slowdown

    return tuple(sorted(candidates, key=rank))


_ORDER = (
    Standing.CHOSEN, Standing.NO_DIFFERENCE, Standing.SLOWER, Standing.DROPPED, Standing.NOT_SHOWN,
    Standing.OVER_BUDGET, Standing.NOT_PROVEN, Standing.FAILED,
)  # fmt: skip


def _explain(
    judged: BuiltArtifact,
    races: Mapping[int, Race],
    failures: Mapping[str, str],
    infos: Mapping[str, ArtifactInfo],
    budget: Budget,
) -> tuple[Standing, str]:
    accuracy, id = judged.accuracy, judged.entry.id
    if accuracy is None:
        return Standing.NOT_PROVEN, find_flaw(judged) or ""
    if not accuracy.keeps:
        standing = Standing.NOT_SHOWN if accuracy.keeps is None else Standing.OVER_BUDGET
        return standing, _explain_accuracy(accuracy, budget)
    won = [size for size, race in races.items() if race.winner == id]
    if won:
        return Standing.CHOSEN, "; ".join(_explain_lead(size, races[size], infos) for size in won)
    behind = [
        (size, race)
        for size, race in races.items()
        if id in race.times and race.compute_slowdown(id) is not None
    ]
    if not behind:
        return Standing.FAILED, failures.get(id, "no batch size could be measured")
    changes = {race.ratios[id].change if id in race.ratios else None for _, race in behind}
    reason = "; ".join(_explain_lag(size, race, id) for size, race in behind)
    if changes == {Change.SLOWER}:
        return Standing.SLOWER, reason
    return (Standing.NO_DIFFERENCE if Change.NO_DIFFERENCE in changes else Standing.DROPPED), reason


def _explain_accuracy(accuracy: CandidateAccuracy, budget: Budget) -> str:
    if budget.unit == "dB" and accuracy.keeps is None:
        annotated = "judge it on annotated images (" + Argument("data") + ")"
        return "its outputs are compared as boxes, which have no SNR: " + annotated
    if budget.unit == "dB":
        return f"SNR {accuracy.snr_db or 0:.1f} dB is below {budget}"
    if accuracy.drop_ci is None:
        return "its accuracy could not be measured"
    low, high = (100 * bound for bound in accuracy.drop_ci)
    exceeds = "exceeds" if accuracy.keeps is False else "may exceed"
    share = accuracy.calibrated_share
    hidden = (
        f", which the {share:.1%} of samples used for calibration may understate," if share else ""
    )
    return f"drop of {low:+.2f} to {high:+.2f} points{hidden} {exceeds} {budget}"


def _explain_lead(size: int, race: Race, infos: Mapping[str, ArtifactInfo]) -> str:
    """The winner's lead over the best slower build, and over those that the race cannot distinguish from it."""
    if not race.ratios:
        alone = "in the race" if len(race.times) == 1 else "with a time in every round"
        return f"batch {size}: the only build {alone}"
    equal = {
        name: ratio for name, ratio in race.ratios.items() if ratio.change is Change.NO_DIFFERENCE
    }
    slower = {name: ratio for name, ratio in race.ratios.items() if name not in equal}
    nearest = sorted(slower, key=lambda name: slower[name].value)[:1]
    said = [f"{slower[name]} times as fast as {infos[name].label}" for name in nearest]
    said += [
        f"as fast as {infos[name].label} within the error, {ratio} times"
        for name, ratio in equal.items()
    ]
    own = infos[race.winner].precision if race.winner else None
    first = "first in " + Argument("backend", "auto") + "'s order"
    preferred = {"more precise" if infos[name].precision != own else first for name in equal}
    why = join_texts(" and ", sorted(preferred, reverse=True))
    tie = "; preferred as " + why if preferred else ""
    return f"batch {size}: " + ", ".join(said) + tie


def _explain_lag(size: int, race: Race, artifact: str) -> str:
    ratio, rounds = race.ratios.get(artifact), len(race.times[artifact].race)
    if ratio is not None:
        doubt = "" if ratio.change is Change.SLOWER else ", within the error"
        return f"batch {size}: {ratio} times the winner's time{doubt}"
    known = f"{race.compute_slowdown(artifact):.2f} times the winner's time"
    rounded = f"{rounds} round{'s' if rounds > 1 else ''}"
    return f"batch {size}: dropped after {rounded} at {known}, too few for an interval"
