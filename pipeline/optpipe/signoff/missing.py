"""Measures what a policy asks for and no run in the workspace shows yet; what cannot be measured here is said."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

from optpipe.artifacts.facts import build_of
from optpipe.bench.recompute import measured_in
from optpipe.build.build import BuiltArtifact
from optpipe.core.events import Listener
from optpipe.core.observation import Missing
from optpipe.errors import BadInputError, OptpipeError
from optpipe.evaluate.recompute import accuracy_figures
from optpipe.export.exported import stored_model
from optpipe.export.model import Model
from optpipe.preprocess.recompute import preprocessing_figures
from optpipe.profile.recompute import tensor_core_figure
from optpipe.signoff.collect import (
    JUDGED_KINDS,
    Wanted,
    concerns,
    judged_artifact,
)
from optpipe.signoff.evidence import (
    Evidence,
    matching,
    measured_with,
    observe,
)
from optpipe.signoff.policy import SECTIONS, Criterion
from optpipe.signoff.steps import (
    Pace,
    bench_step,
    evaluate_step,
    preprocess_step,
    profile_step,
)
from optpipe.workspace.runs import Run, list_runs
from optpipe.workspace.store import Entry, Store


def measured_missing(
    wanted: Wanted, model: Callable[[], Model], pace: Pace, store: Store, listener: Listener
) -> list[Path]:
    """Takes the steps whose evidence is missing for the judged build; returns the new runs. `model` resolves its source.

    A figure that is there is never measured again, INVALID or not: `optpipe bench` does that on request.
    """
    from optpipe.backends.registry import BACKENDS

    judged = judged_artifact(wanted, store)
    runs = [run for run in list_runs(store.workspace) if run.kind in JUDGED_KINDS and concerns(run, judged)]
    needed = list(_needed(wanted, judged, runs))
    if not needed:
        return []
    why_not = BACKENDS[judged.info["backend"]].runnable(judged.info, judged.info["device"])
    if why_not is not None:
        listener.warn(f"nothing is measured: the judged build cannot run here ({why_not})")
        return []
    done: list[Path] = []
    for kind, criteria in _by_kind(needed, runs):
        try:
            done += _steps(wanted, judged, model, pace, store, listener)[kind](criteria)
        except OptpipeError as error:
            listener.warn(f"{kind} is left out: {error}")
    return done


def _needed(wanted: Wanted, judged: Entry, runs: Sequence[Run]) -> Iterator[Criterion]:
    build, confidence = build_of(judged.manifest), wanted.policy.confidence
    evidence = Evidence(
        build,
        measured=tuple(measured_with(wanted.policy.options, measured_in(runs, confidence, build.artifact))),
        options=wanted.policy.options,
        accuracy=accuracy_figures(runs, build, confidence),
        preprocessing=preprocessing_figures(runs, build),
        tensor_core_share=tensor_core_figure(runs, build),
    )
    for criterion in wanted.policy.criteria:
        if criterion.section == "regression":  # without a baseline it is missing whatever is measured
            if not matching(criterion.where, evidence.measured):
                yield criterion
        elif isinstance(observe(criterion, evidence), Missing):
            yield criterion


KINDS = {"accuracy": "evaluate", "preprocessing": "preprocess", "tensor_cores": "profile", "environment": "bench"}
"""Which run shows a section that is not about measurements; `size` and `precision` are shown by the build itself."""


def _by_kind(needed: Sequence[Criterion], runs: Sequence[Run]) -> Iterator[tuple[str, list[Criterion]]]:
    """The criteria that each kind of run would show; one that was made and does not show them is not made again."""
    present = {run.kind for run in runs}
    for kind in ("evaluate", "preprocess", "bench", "profile"):
        criteria = [one for one in needed if _kind(one) == kind]
        if criteria and (kind == "bench" or kind not in present):
            yield kind, criteria


def _kind(criterion: Criterion) -> str | None:
    section = SECTIONS.get(criterion.section)
    return "bench" if section is not None and section.measured else KINDS.get(criterion.section)


def _steps(
    wanted: Wanted, judged: Entry, model: Callable[[], Model], pace: Pace, store: Store, listener: Listener
) -> dict[str, Callable[[list[Criterion]], list[Path]]]:
    @cache
    def source() -> Model:
        """The model, where it is the one that was built: with other weights its accuracy would be another's."""
        found = model()
        stored = stored_model(found, store)
        if stored is not None and stored.id in judged.manifest.parents:
            return found
        raise BadInputError(
            f"{wanted.model} was built with other options than its defaults; give them to optpipe evaluate or preprocess"
        )

    made_of = store.find(f"model-{judged.manifest.parents[0]}")
    built = BuiltArtifact(judged, None, None)
    return {
        "evaluate": lambda _: evaluate_step(source(), None, store, listener),
        "preprocess": lambda _: preprocess_step(source(), None, store, listener),
        "bench": lambda criteria: bench_step(
            [judged], criteria, pace, store, listener, options={judged.info["backend"]: wanted.policy.options}
        ),
        "profile": lambda _: profile_step(built, made_of, wanted.policy.criteria, store, listener),
    }
