"""Everything a build is judged on, as one value. Nothing in it is a verdict."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from optpipe.core.observation import Observation
from optpipe.evaluate.recompute import has_evaluated_other_file, observe_accuracy
from optpipe.measure.groups import ProcessGroup, RecordedMeasurement, group_processes
from optpipe.measure.pair import RecordedPair
from optpipe.measure.recompute import has_measured_other_file
from optpipe.models.artifacts.facts import JudgedBuild
from optpipe.preprocess.recompute import observe_preprocessing
from optpipe.profile.recompute import has_profiled_other_file, observe_tensor_cores
from optpipe.signoff.policy import Policy
from optpipe.signoff.policy_format import LoadFilter
from optpipe.workspace.entry import Run

UNKNOWN = float("nan")
"""The value of an observation that could not be made; its blockers say why."""


@dataclass(frozen=True, slots=True)
class BuildEvidence:
    """What was gathered for one build."""

    build: JudgedBuild
    measured: tuple[RecordedMeasurement, ...] = ()
    baseline: tuple[RecordedMeasurement, ...] = ()
    baseline_name: str | None = None
    pairs: tuple[RecordedPair, ...] = ()
    """Interleaved comparisons of the build with the baseline's."""
    accuracy: Mapping[str, Observation] = field(default_factory=dict)
    """What `TaskContract.observe` says: `drop`, `agreement`, `score`, …, as fractions."""
    preprocessing: Mapping[str, Observation] = field(default_factory=dict)
    """`agreement` as a fraction, `snr` in dB."""
    tensor_core_share: Observation | None = None
    other_file: tuple[str, ...] = ()
    """Kinds of the runs that are of another file under the build's id and show nothing of it: `evaluate`, `profile`."""
    record: str = ""
    """Where the store's record of the build lies in the dossier."""
    options: Mapping[str, str] = field(default_factory=dict)
    """What all of `measured` ran with, because the policy asks for it."""
    confidence: float = 0.95
    """Of every interval."""


def select_groups(where: LoadFilter, measured: Sequence[RecordedMeasurement]) -> list[ProcessGroup]:
    """What `where` is about: of each load all processes with the settings that were measured last."""
    wanted = (where.batch_size, where.scenario, where.mode, where.streams, where.rate, where.length)
    newest: dict[object, ProcessGroup] = {}
    for group in group_processes(measured):
        if all(want is None or want == has for want, has in zip(wanted, group.load.key, strict=True)):
            newest[group.load.key] = group
    return list(newest.values())


def filter_by_options(
    options: Mapping[str, str], measured: Iterable[RecordedMeasurement]
) -> Iterator[RecordedMeasurement]:
    """Those of `measured` that ran with `options`, whatever others they had."""
    for one in measured:
        if options.items() <= one.measurement.subject.settings.items():
            yield one


def is_of_other_file(run: Run, build: JudgedBuild) -> bool:
    """Whether a run is of another file under the build's id. Raises BadInputError where its record cannot be read."""
    asked = {"bench": has_measured_other_file, "evaluate": has_evaluated_other_file, "profile": has_profiled_other_file}
    return run.kind in asked and asked[run.kind](run, build)


def evidence_from_runs(
    build: JudgedBuild, runs: Sequence[Run], policy: Policy, measured: Iterable[RecordedMeasurement]
) -> BuildEvidence:
    """What `runs` show of the build, and of `measured` what ran with the policy's options; without a baseline."""
    return BuildEvidence(
        build,
        measured=tuple(filter_by_options(policy.options, measured)),
        accuracy=observe_accuracy(runs, build, policy.confidence),
        preprocessing=observe_preprocessing(runs, build, policy.confidence),
        tensor_core_share=observe_tensor_cores(runs, build, policy.confidence),
        other_file=tuple(sorted({run.kind for run in runs if is_of_other_file(run, build)})),
        options=policy.options,
        confidence=policy.confidence,
    )
