"""Measures some criteria of a dossier again on this machine: `optpipe verify --audit`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import hypot, log, log1p
from random import Random

from optpipe.backends.registry import BACKENDS, verify_for_loading
from optpipe.core.bench_defaults import MAX_CV
from optpipe.core.errors import BadInputError, MissingError
from optpipe.core.events import Listener
from optpipe.core.quantity import Dimension, format_quantity, share_to_text
from optpipe.core.verdict import CriterionResult, Verdict
from optpipe.core.wording import Argument
from optpipe.measure.groups import find_environment_differences
from optpipe.models.artifacts.engine_files import hash_engine
from optpipe.models.artifacts.judged_build import judged_build_from_entry
from optpipe.models.export.exported import Model
from optpipe.report.document import format_observed
from optpipe.signoff.build_evidence import evidence_from_runs
from optpipe.signoff.collect import SignoffRequest, find_judged_artifact
from optpipe.signoff.evidence import JUDGED_RUNS, find_kind, observe
from optpipe.signoff.judge import judge_criteria
from optpipe.signoff.loosened import find_loosest_limits
from optpipe.signoff.missing import measure_criteria
from optpipe.signoff.policy import Criterion
from optpipe.signoff.verify import VerifiedDossier
from optpipe.workspace.environment import describe_environment
from optpipe.workspace.runs import list_runs
from optpipe.workspace.store import Store

AUDIT_TOLERANCES: Mapping[Dimension | None, tuple[float, bool]] = {
    Dimension.TIME: (0.1, True),
    Dimension.RATE: (0.1, True),
    Dimension.ENERGY: (0.1, True),
    Dimension.POWER: (0.1, True),
    Dimension.EFFICIENCY: (0.1, True),
    Dimension.SIZE: (0.05, True),
    Dimension.SHARE: (0.005, False),
    Dimension.POINTS: (0.5, False),
    Dimension.DECIBEL: (1.0, False),
}
"""Tolerated difference of two machines of one kind, and whether it is relative.

Processes of one host already differ by up to 5%; scores differ by inputs at a decision boundary.
"""


def audit_dossier(
    checked: VerifiedDossier,
    count: int,
    seed: int,
    model: Callable[[], Model],
    store: Store,
    listener: Listener,
) -> Iterator[CriterionResult]:
    """Measures `count` criteria, drawn by `seed`, again on this machine: PASS agrees with the dossier, FAIL differs.

    The workspace must have the judged build. Raises BadInputError if it does not, or if no criterion can be measured.
    """
    dossier, verdict, _ = checked.require_intact()
    known = {
        criterion.name: criterion
        for criterion in verdict.criteria
        if isinstance(criterion.observed, float)
    }
    able = [
        criterion
        for criterion in dossier.policy.criteria
        if criterion.name in known
        and criterion.dimension in AUDIT_TOLERANCES
        and find_kind(criterion.section) in JUDGED_RUNS
        if criterion.table.can_repeat
    ]
    if not able:
        raise BadInputError(f"{checked.folder} has no figure that can be measured again")
    drawn = Random(f"audit {seed}").sample(able, min(count, len(able)))
    for criterion in drawn:
        listener.inform(f"seed {seed} draws {criterion.name}, {_describe_tolerance(criterion)}")
    policy = replace(dossier.policy, criteria=tuple(drawn))
    max_cv = find_loosest_limits(dossier)["max_cv"]
    wanted = SignoffRequest(verdict.model, policy, dossier.artifact.id, max_cv=max_cv)
    valid = ""
    if max_cv != MAX_CV:
        valid = "; VALID as in the dossier: " + Argument("max_cv", share_to_text(max_cv))
    judged = find_judged_artifact(wanted, store)
    verify_for_loading(judged, store)
    if hash_engine(judged) != hash_engine(dossier.artifact):
        listener.warn(
            f"artifact {judged.id} has other bytes here: the audit measures a build of the same recipe"
        )
    if (blocker := BACKENDS[judged.info.backend].find_run_blocker(judged.info)) is not None:
        raise MissingError(f"artifact {judged.id} cannot be measured here: " + blocker)
    names = {
        path.name for path in measure_criteria(drawn, (), wanted, judged, model, store, listener)
    }
    runs = [run for run in list_runs(store.workspace) if run.name in names]
    evidence = evidence_from_runs(judged_build_from_entry(judged), runs, policy)
    observed = [(criterion, observe(criterion, evidence)) for criterion in drawn]
    again = judge_criteria(observed, policy.confidence, evidence.looks)
    then = next(
        (run.manifest.environment for run in dossier.runs if run.name in verdict.runs), None
    )
    elsewhere = find_environment_differences(then, describe_environment()) if then else []
    for criterion, now in zip(drawn, again, strict=True):
        audited = judge_audit(criterion, known[criterion.name], now, elsewhere)
        yield replace(
            audited,
            reason=audited.reason + (valid if find_kind(criterion.section) == "bench" else ""),
        )


def _describe_tolerance(criterion: Criterion) -> str:
    tolerance, relative = AUDIT_TOLERANCES[criterion.dimension]
    assert criterion.dimension is not None
    return f"tolerance {f'{tolerance:.0%}' if relative else format_quantity(tolerance, criterion.dimension)}"


def judge_audit(
    criterion: Criterion, before: CriterionResult, now: CriterionResult, elsewhere: Sequence[str]
) -> CriterionResult:
    """Compares by intervals; scores on the same data and shares of layers have none, because nothing in them is drawn."""
    timed = find_kind(criterion.section) == "bench"
    if (
        not isinstance(now.observed, float)
        or not isinstance(before.observed, float)
        or (timed and elsewhere)
    ):
        why = (
            now.reason
            if not isinstance(now.observed, float)
            else f"this is another machine: {elsewhere[0]}"
        )
        return replace(now, verdict=Verdict.INCONCLUSIVE, reason="undecided: " + why)
    tolerance, relative = AUDIT_TOLERANCES[criterion.dimension]

    def convert(criterion: CriterionResult) -> list[float]:
        """The value and its bounds."""
        values = (
            float(criterion.observed or 0.0),
            *((criterion.ci if timed else None) or [float(criterion.observed or 0.0)] * 2),
        )
        return [log(number) if relative else number for number in values]

    old, new, limit = convert(before), convert(now), log1p(tolerance) if relative else tolerance
    (now_value, now_low, now_high), (then_value, then_low, then_high) = new, old
    change = now_value - then_value
    # the interval of a difference of independent figures (Zou & Donner, Statistics in Medicine 2008, "MOVER")
    low = change - hypot(now_value - now_low, then_high - then_value)
    high = change + hypot(now_high - now_value, then_value - then_low)
    word, verdict = "undecided", Verdict.INCONCLUSIVE
    if -limit <= low and high <= limit:
        word, verdict = "agreed", Verdict.PASS
    elif low > limit or high < -limit:
        word, verdict = "differs", Verdict.FAIL
    why = f"{word}: the dossier has {format_observed(before)}, {_describe_tolerance(criterion)}"
    return replace(now, verdict=verdict, reason=why, remedy=None, limit=before.limit)
