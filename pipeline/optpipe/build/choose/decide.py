"""From races to a decision: who wins at which batch size, by how much, and the reason of every other build."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from optpipe.build.records import BuiltArtifact
from optpipe.core.bench_record import Change, Ratio
from optpipe.core.decision import Candidate, CandidateAccuracy, CandidateTimes, Standing
from optpipe.core.entries import ArtifactInfo
from optpipe.core.mixed_precision import Budget
from optpipe.core.units import format_snr
from optpipe.measure.race import RaceResult


@dataclass(frozen=True, slots=True)
class Judged:
    """A build before the race."""

    built: BuiltArtifact
    accuracy: CandidateAccuracy | None
    """None where it has a flaw."""

    @property
    def id(self) -> str:
        """The artifact's."""
        return self.built.entry.id

    @property
    def keeps(self) -> bool:
        """Whether it may win."""
        return self.accuracy is not None and self.accuracy.keeps is True


def find_flaw(built: BuiltArtifact) -> str | None:
    """Why a build cannot be a candidate whatever the budget: it does not run here, or is not what was asked for."""
    if built.why_not is not None:
        return built.why_not
    proof, verified = built.entry.info.precision_proof, built.verification
    if not proof.proven:
        return proof.reason
    if verified is not None and verified.info.passed is False:
        return f"outputs differ from the source model's: SNR {format_snr(verified.info.snr_db or 0)}"
    return None


def list_candidates(
    judged: Sequence[Judged], races: Mapping[int, RaceResult], failures: Mapping[str, str], budget: Budget
) -> tuple[Candidate, ...]:
    """Winners first, then by time at the first batch size; then those that were not timed, in the order given."""
    infos = {each.id: each.built.entry.info for each in judged}
    found = [_describe(each, races, *_explain(each, races, failures, infos, budget)) for each in judged]
    order = {standing: index for index, standing in enumerate(_ORDER)}
    return tuple(sorted(found, key=lambda each: (order[each.standing], _get_slowdown(each))))


_ORDER = (
    Standing.CHOSEN, Standing.NO_DIFFERENCE, Standing.SLOWER, Standing.NOT_SHOWN, Standing.OVER_BUDGET,
    Standing.NOT_PROVEN, Standing.FAILED,
)  # fmt: skip


def _get_slowdown(candidate: Candidate) -> float:
    first = next(iter(candidate.times), None)
    return 1.0 if first is None or first.slowdown is None else first.slowdown


def _describe(judged: Judged, races: Mapping[int, RaceResult], standing: Standing, reason: str) -> Candidate:
    info = judged.built.entry.info
    times = tuple(_collect_times(judged.id, size, race) for size, race in races.items() if judged.id in race.times)
    return Candidate(
        judged.id, info.backend, info.precision, info.device, standing, reason, judged.accuracy,
        tuple(each for each in times if each.race_ns),
    )  # fmt: skip


def _collect_times(artifact: str, size: int, race: RaceResult) -> CandidateTimes:
    own = race.times[artifact]
    slowdown = None if artifact == race.winner else race.compute_slowdown(artifact)
    ratio, dropped = race.ratios.get(artifact), race.dropped.get(artifact)
    return CandidateTimes(size, tuple(own.race), tuple(own.final), ratio, slowdown, dropped)


def _explain(
    judged: Judged,
    races: Mapping[int, RaceResult],
    failures: Mapping[str, str],
    infos: Mapping[str, ArtifactInfo],
    budget: Budget,
) -> tuple[Standing, str]:
    accuracy = judged.accuracy
    if accuracy is None:
        return Standing.NOT_PROVEN, find_flaw(judged.built) or ""
    if not accuracy.keeps:
        standing = Standing.NOT_SHOWN if accuracy.keeps is None else Standing.OVER_BUDGET
        return standing, _explain_accuracy(accuracy, budget)
    won = [size for size, race in races.items() if race.winner == judged.id]
    if won:
        return Standing.CHOSEN, "; ".join(_explain_lead(size, races[size], infos) for size in won)
    behind = [(size, race) for size, race in races.items() if race.compute_slowdown(judged.id) is not None]
    if not behind:
        return Standing.FAILED, failures.get(judged.id, "no batch size could be measured")
    slower = all(_is_slower(race.ratios.get(judged.id) or race.dropped.get(judged.id)) for _, race in behind)
    reason = "; ".join(_explain_lag(size, race, judged.id) for size, race in behind)
    return (Standing.SLOWER if slower else Standing.NO_DIFFERENCE), reason


def _is_slower(ratio: Ratio | None) -> bool:
    return ratio is not None and ratio.change is Change.SLOWER


def _is_equal(ratio: Ratio | None) -> bool:
    return ratio is not None and ratio.change is Change.NO_DIFFERENCE


def _explain_accuracy(accuracy: CandidateAccuracy, budget: Budget) -> str:
    if budget.unit == "dB":
        return f"SNR {accuracy.snr_db or 0:.1f} dB is below {budget}"
    if accuracy.drop_ci is None:
        return "its accuracy could not be measured"
    low, high = (100 * each for each in accuracy.drop_ci)
    exceeds = "exceeds" if accuracy.keeps is False else "may exceed"
    share = accuracy.calibrated_share
    hidden = f", which the {share:.1%} of samples used for calibration may understate," if share else ""
    return f"drop of {low:+.2f} to {high:+.2f} points{hidden} {exceeds} {budget}"


def _explain_lead(size: int, race: RaceResult, infos: Mapping[str, ArtifactInfo]) -> str:
    """By how much the winner leads: over the best that is slower, and over those that are not told from it."""
    if not race.ratios:
        alone = "within the budget" if len(race.times) == 1 else "with a time in every round"
        return f"batch {size}: the only build {alone}"
    equal = {name: ratio for name, ratio in race.ratios.items() if _is_equal(ratio)}
    slower = {name: ratio for name, ratio in race.ratios.items() if name not in equal}
    nearest = sorted(slower, key=lambda name: slower[name].value)[:1]
    said = [f"{slower[name]} times as fast as {infos[name].label}" for name in nearest]
    said += [f"as fast as {infos[name].label} within the error, {ratio} times" for name, ratio in equal.items()]
    own = infos[race.winner].precision if race.winner else None
    preferred = {
        "more precise" if infos[name].precision != own else "first in --backend auto's order" for name in equal
    }
    tie = f"; preferred as {' and '.join(sorted(preferred, reverse=True))}" if preferred else ""
    return f"batch {size}: " + ", ".join(said) + tie


def _explain_lag(size: int, race: RaceResult, artifact: str) -> str:
    ratio, dropped = race.ratios.get(artifact), race.dropped.get(artifact)
    if ratio is not None:
        return f"batch {size}: {ratio} times the winner's time{_format_doubt(ratio)}"
    rounds = dropped.rounds if dropped else len(race.times[artifact].race)
    known = f"from {rounds} round{'s' if rounds > 1 else ''}"
    if dropped is None or race.scatter is None:
        slowdown = race.compute_slowdown(artifact)
        return f"batch {size}: {slowdown:.2f} times the winner's time, {known}; how much rounds scatter is not known"
    known += f" at {race.scatter.sd:.1%} scatter"
    return f"batch {size}: {dropped} times the winner's time, {known}{_format_doubt(dropped)}"


def _format_doubt(ratio: Ratio) -> str:
    return "" if _is_slower(ratio) else ", within the error"
