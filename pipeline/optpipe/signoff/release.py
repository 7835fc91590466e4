"""Measures the evidence that a policy needs, and makes a finished dossier with its reports from it.

`optpipe run` takes all steps, `optpipe signoff` the missing ones.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from itertools import chain, count
from math import hypot, log, log1p
from pathlib import Path
from random import Random
from time import monotonic

from optpipe import __version__
from optpipe.backends.registry import BACKENDS, find_missing_release, verify_for_loading
from optpipe.build.build import BuildPlan, build_model, require_artifacts
from optpipe.build.records import BuiltArtifact, ModelBuild
from optpipe.core.entries import ArtifactInfo, ModelInfo
from optpipe.core.errors import (
    BadInputError,
    GateError,
    MissingError,
    OptpipeError,
    StageError,
    require_existing,
)
from optpipe.core.events import Listener
from optpipe.core.files import Files, hash_value
from optpipe.core.measurement import MAX_CV, LoadSpec, Mode, Scenario
from optpipe.core.metrics.sections import SPEEDUP, Evidence
from optpipe.core.quantity import Dimension, format_quantity, share_to_text
from optpipe.core.records import group_pairs, json_from_record, plain_from_record, record_from_json
from optpipe.core.verdict import Blocker, CriterionResult, StepRecord, Verdict, VerdictRecord
from optpipe.core.wording import Argument, Call
from optpipe.evaluate.evaluate import run_evaluation
from optpipe.evaluate.tasks import TASKS
from optpipe.measure.bench import bench_artifacts
from optpipe.measure.groups import ProcessGroup, find_environment_differences
from optpipe.measure.measure import BenchPlan
from optpipe.measure.turns import measure_turns
from optpipe.models.artifacts.lookup import (
    explain_changed_source,
    find_artifacts,
    hash_engine,
    judged_build_from_entry,
)
from optpipe.models.export.exported import (
    Model,
    explain_other_export,
    find_stored_model,
    prepare_model,
    read_card,
    read_tokenizer,
)
from optpipe.models.export.onnx_export import read_outputs_early
from optpipe.models.inputs.task_data import hash_data, load_sample_set, resolve_texts
from optpipe.models.stored_card import read_stored_card
from optpipe.preprocess.preprocess import PreprocessRequest, choose_dali_plan, derive_preprocessing
from optpipe.report.document import format_observed
from optpipe.signoff.build_evidence import evidence_from_runs, is_of_other_file, select_groups
from optpipe.signoff.collect import (
    SignoffRequest,
    collect_evidence,
    find_judged_artifact,
    is_run_about,
    register_policy,
    require_valid_request,
)
from optpipe.signoff.dossier import finish_dossier, read_dossier, split_runs
from optpipe.signoff.evidence import JUDGED_RUNS, find_kind, observe
from optpipe.signoff.judge import judge_criteria, judge_dossier
from optpipe.signoff.loosened import describe_loosened, find_loosest_limits
from optpipe.signoff.policy import Criterion, LoadFilter
from optpipe.signoff.reports import list_drawing_versions, render_dossier, write_reports
from optpipe.signoff.verify import VerifiedDossier
from optpipe.stats.means import MIN_VALUES
from optpipe.trace.nsys import ProfilePlan, Stage, find_nsys
from optpipe.trace.profile_model import profile_model
from optpipe.workspace.entry import MANIFEST, Entry, Run
from optpipe.workspace.environment import describe_environment
from optpipe.workspace.file_names import VERDICT
from optpipe.workspace.files import write_bytes, write_json
from optpipe.workspace.places import require_unused_path
from optpipe.workspace.runs import RUNS, list_runs
from optpipe.workspace.seal import require_key, require_sizes
from optpipe.workspace.store import NOTES, Store
from optpipe.workspace.timestamp import require_authority, stamp_folder


def loads_from_criteria(
    criteria: Iterable[Criterion], min_seconds: float, max_seconds: float, *, energy: bool = True
) -> list[tuple[LoadSpec, tuple[int, ...]]]:
    """Loads with their batch sizes; batch 1 if no criterion names a load.

    A criterion without scenario or mode means single-stream compute, and one without any filter means all loads. Percentiles
    decide the sample count, and energy the time, if `energy` can be measured.
    """
    needed: dict[object, LoadSpec] = {}
    able = [each for each in criteria if each.table.is_measured]
    wanted = [each for each in able if energy or not each.find_metric().least_seconds]
    named = [each.where for each in criteria if each.where] or [LoadFilter()]
    for load in (_load(where, min_seconds, max_seconds) for where in named):
        needed.setdefault(load.key, load)
        about = (
            each for each in wanted if not each.where or _load(each.where, 0, 0).key == load.key
        )
        for criterion in about:
            known, metric = needed[load.key], criterion.find_metric()
            least = max(known.min_seconds, metric.least_seconds)
            needed[load.key] = replace(
                known,
                min_seconds=least,
                max_seconds=max(known.max_seconds, least),
                percentile=max(known.percentile, metric.percent),
            )
    groups = group_pairs((replace(load, batch_size=1), load.batch_size) for load in needed.values())
    return [
        (replace(load, batch_size=min(sizes)), tuple(sorted(sizes)))
        for load, sizes in groups.items()
    ]


def _load(where: LoadFilter, min_seconds: float, max_seconds: float) -> LoadSpec:
    return LoadSpec(
        batch_size=where.batch_size or 1,
        scenario=where.scenario or Scenario.SINGLE_STREAM,
        mode=where.mode or Mode.COMPUTE,
        streams=where.streams or 1,
        rate_per_s=where.rate,
        min_seconds=min_seconds,
        max_seconds=max(max_seconds, min_seconds),
        length=where.length,
    )


def require_evaluable(
    model: Model, data: Path, store: Store, listener: Listener, *, truncate: bool
) -> None:
    """Raises BadInputError, before the export, for data that are missing or do not fit the model."""
    require_existing(data, "data")
    model, stored = prepare_model(model, store, listener)
    card = read_card(model, stored)
    resolve_texts(
        data,
        card,
        read_tokenizer(model, stored),
        store.workspace / "calibration",
        truncate=truncate,
    )
    shown = card if stored else read_outputs_early(model.load())
    if card.tokenization is None and card.task in TASKS and shown is not None:
        task = TASKS[card.task]
        task.require_model(shown)
        task.read_truths(
            load_sample_set(stored, card, data, None, 0, listener)[0],
            shown,
            task.count_classes(shown),
        )


TURNS_MIN_SECONDS, TURNS_WARM_UP_SECONDS = 0.05, 1.0
"""Of a process that takes turns: its trials are short, and need no steady speed."""
MAX_SECONDS = 300.0
"""Stops a hanging load; the highest percentile decides the time, because fewer samples would show less drift."""


def run_bench_step(
    artifacts: Sequence[Entry],
    criteria: Sequence[Criterion],
    wanted: SignoffRequest,
    store: Store,
    listener: Listener,
    backend: str = "",
) -> list[Path]:
    """Measures every load of `criteria` on every artifact, those of `backend` with the policy's options; returns the runs."""
    criteria = [one for one in criteria if find_kind(one.section) == "bench"]
    found = tuple(artifact for each in artifacts for artifact in find_artifacts(each.id, store))
    on_gpu = any(each.info.device != "cpu" for each in artifacts)
    runs = []
    for load, batches in loads_from_criteria(
        criteria, wanted.min_seconds, MAX_SECONDS, energy=on_gpu
    ):
        plan = BenchPlan(
            load=load,
            batches=batches,
            lengths=None if load.length is None else (load.length,),
            limits={"max_cv": wanted.max_cv},
            options={backend: wanted.policy.options} if backend else {},
            keep_going=False,
        )
        result = bench_artifacts(found, plan, store, listener)
        if result.interrupted:
            raise KeyboardInterrupt
        runs.append(Path(result.run_dir))
    return runs


def run_turns_step(
    over: str,
    where: LoadFilter,
    judged: Entry[ArtifactInfo],
    wanted: SignoffRequest,
    store: Store,
    listener: Listener,
) -> Path:
    """Raises BadInputError if no build, or only the judged one, is called `over`."""
    mine, model = judged.info, judged.manifest.parents[0]
    others = [
        one
        for one in store.list_entries(ArtifactInfo)
        if one.id != judged.id and one.manifest.parents[:1] == (model,)
        if one.id == over
        or (
            (str(one.info.precision), one.info.backend, one.info.device)
            == (over, mine.backend, mine.device)
        )
    ]
    if not others:
        problem = f"the policy's [speedup] is over {over}, but {wanted.model} has no such build"
        raise BadInputError(problem + "; run `" + Call("build", wanted.model, precision=over) + "`")
    load = _load(where, TURNS_MIN_SECONDS, MAX_SECONDS)
    plan = BenchPlan(
        load=replace(load, max_warm_up_seconds=TURNS_WARM_UP_SECONDS),
        batches=(load.batch_size,),
        lengths=None if load.length is None else (load.length,),
        options={mine.backend: wanted.policy.options},
    )
    (one,), (other,) = (find_artifacts(each.id, store) for each in (others[-1], judged))
    return measure_turns(one, other, plan, store, listener).path


Step = Callable[[Sequence[Criterion]], list[Path]]
"""Measures the evidence for some criteria; returns the new runs."""


def make_steps(
    wanted: SignoffRequest,
    judged: BuiltArtifact,
    artifacts: Sequence[Entry],
    made_of: Entry,
    model: Callable[[], Model],
    store: Store,
    listener: Listener,
    plan: BuildPlan,
    data: Path | None = None,
) -> dict[str, Step]:
    """The steps by kind of run, in their order. `artifacts` are measured, and `judged` is profiled with the options of `plan`.

    `made_of` is the entry of its model, and `model` resolves the model's source.
    """

    def evaluate(_criteria: Sequence[Criterion]) -> list[Path]:
        return [
            Path(
                run_evaluation(
                    model(), data, None, 0, None, store, listener, truncate=plan.truncate
                ).run_dir
            )
        ]

    def preprocess(_criteria: Sequence[Criterion]) -> list[Path]:
        request = PreprocessRequest(
            images=plan.images, plan=choose_dali_plan("auto"), throughput=False
        )
        return [Path(derive_preprocessing(model(), request, store, listener).run_dir)]

    def bench(criteria: Sequence[Criterion]) -> list[Path]:
        if judged.entry.id not in {each.id for each in artifacts}:
            label = f"{judged.entry.info.backend} {judged.entry.info.precision}"
            raise MissingError(f"the judged build ({label}) cannot run on this machine")
        return run_bench_step(
            artifacts, criteria, wanted, store, listener, judged.entry.info.backend
        )

    def profile(_criteria: Sequence[Criterion]) -> list[Path]:
        """Profiles inference at the largest batch size and length of the policy."""
        lengths = {one.where.length for one in wanted.policy.criteria if one.where.length}
        capture = ProfilePlan(
            stage=(Stage.INFERENCE,),
            batch_size=(
                max((one.where.batch_size or 1 for one in wanted.policy.criteria), default=1),
            ),
            length=(max(lengths),) if lengths else None,
        )
        find_nsys()
        return [profile_model(capture, [judged], made_of, store, listener, plan.options).run_dir]

    def turns(criteria: Sequence[Criterion]) -> list[Path]:
        """Compares the judged build with each build that a speedup is over."""
        loads = dict.fromkeys((one.over, one.where) for one in criteria if one.is_of(SPEEDUP))
        return [
            run_turns_step(str(over), where, judged.entry, wanted, store, listener)
            for over, where in loads
        ]

    return {
        "evaluate": evaluate,
        "preprocess": preprocess,
        "bench": bench,
        "turns": turns,
        "profile": profile,
    }


def measure_missing_evidence(
    wanted: SignoffRequest, model: Callable[[], Model], store: Store, listener: Listener
) -> list[Path]:
    """Takes the steps whose evidence is missing for the judged build; returns the new runs. `model` resolves its source.

    A load with too few VALID processes for an interval is measured again, as is one that was measured for lower percentiles; all
    tries count.
    """
    judged = find_judged_artifact(wanted, store)
    first_used = register_policy(wanted.policy, store)
    registered = first_used if wanted.policy.preregistered else None
    runs, _ = split_runs(_list_present(judged, store), wanted.since, registered)
    needed = list(_list_needed(wanted, judged, runs))
    if not needed:
        return []
    if (why_not := BACKENDS[judged.info.backend].find_run_blocker(judged.info)) is not None:
        listener.warn(
            f"nothing was measured: the judged build cannot run on this machine ({why_not})"
        )
        return []
    store.require_writable()

    def source() -> Model:
        """Refuses a model other than the built one: with other weights the accuracy would differ."""
        found = model()
        stored = find_stored_model(found, store)
        if stored is not None and stored.id in judged.manifest.parents:
            return found
        built_of = store.find(judged.manifest.parents[0], ModelInfo)
        how, only_exporter = explain_other_export(found, built_of)
        what = how or "other options"
        problem = f"build {judged.id} was exported from {wanted.model} with {what} than now"
        way = "run " + Call("evaluate", wanted.model) + " or " + Call("preprocess", wanted.model)
        remedy = way + " with the options of the build"
        if how and only_exporter:
            again = Call("build", wanted.model, precision=judged.info.precision)
            remedy = "build it again: `" + again + "`"
        raise BadInputError(problem + "; " + remedy)

    return list(_measure(needed, runs, wanted, judged, source, store, listener))


def _measure(
    needed: Sequence[Criterion],
    present: Sequence[Run],
    wanted: SignoffRequest,
    judged: Entry[ArtifactInfo],
    model: Callable[[], Model],
    store: Store,
    listener: Listener,
) -> Iterator[Path]:
    """Takes the steps of the criteria that `present` runs do not show; a step that fails is a warning."""
    made_of, blank = (
        store.find(judged.manifest.parents[0], ModelInfo),
        BuildPlan((), (), named=True),
    )
    built = BuiltArtifact(judged, None, None)
    steps = make_steps(wanted, built, [judged], made_of, cache(model), store, listener, blank)
    for kind, criteria in _group_by_kind(needed, present):
        try:
            yield from steps[kind](criteria)
        except OptpipeError as error:
            listener.warn(f"{kind} was skipped: {error}")


def _list_present(judged: Entry[ArtifactInfo], store: Store) -> list[Run]:
    """The runs about the judged build, without those of another file under its id."""
    build = judged_build_from_entry(judged)
    present = (
        run
        for run in list_runs(store.workspace)
        if run.kind in JUDGED_RUNS and is_run_about(run, judged)
    )
    return [run for run in present if not is_of_other_file(run, build)]


def _list_needed(wanted: SignoffRequest, judged: Entry, runs: Sequence[Run]) -> Iterator[Criterion]:
    evidence = evidence_from_runs(judged_build_from_entry(judged), runs, wanted.policy)
    for criterion in wanted.policy.criteria:
        if criterion.is_loss:  # without a baseline it is always missing
            if not select_groups(criterion.where, evidence.measured):
                yield criterion
            continue
        few = isinstance(observe(criterion, evidence), Blocker)
        if not few and criterion.table.is_measured:
            groups = select_groups(
                criterion.where, evidence.measured
            )  # an interval needs enough VALID processes
            few = min((_count(criterion, group) for group in groups), default=0) < MIN_VALUES
        if few:
            yield criterion


def _count(criterion: Criterion, group: ProcessGroup) -> int:
    """The processes that were to show the criterion's metric."""
    name = criterion.find_metric().name
    return group.count_tried(name) if criterion.table.is_open else group.count_requested(name)


def _group_by_kind(
    needed: Sequence[Criterion], runs: Sequence[Run]
) -> Iterator[tuple[str, list[Criterion]]]:
    """The criteria that each kind of run would show; only timings are made again."""
    present = {run.kind for run in runs}
    for kind in JUDGED_RUNS:
        criteria = [one for one in needed if find_kind(one.section) == kind]
        if criteria and (kind in (Evidence.BENCH, Evidence.TURNS) or kind not in present):
            yield kind, criteria


AUDIT_TOLERANCES: Mapping[Dimension | None, tuple[float, bool]] = {
    Dimension.TIME: (0.1, True),
    Dimension.RATE: (0.1, True),
    Dimension.ENERGY: (0.1, True),
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
    known = {one.name: one for one in verdict.criteria if isinstance(one.observed, float)}
    able = [
        each
        for each in dossier.policy.criteria
        if each.name in known
        and each.dimension in AUDIT_TOLERANCES
        and find_kind(each.section) in JUDGED_RUNS
        if each.table.can_repeat
    ]
    if not able:
        raise BadInputError(f"{checked.folder} has no figure that can be measured again")
    drawn = Random(f"audit {seed}").sample(able, min(count, len(able)))
    for each in drawn:
        listener.inform(f"seed {seed} draws {each.name}, {_describe_tolerance(each)}")
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
        raise MissingError(f"artifact {judged.id} cannot be measured here: {blocker}")
    names = {path.name for path in _measure(drawn, (), wanted, judged, model, store, listener)}
    runs = [run for run in list_runs(store.workspace) if run.name in names]
    evidence = evidence_from_runs(judged_build_from_entry(judged), runs, policy)
    observed = [(each, observe(each, evidence)) for each in drawn]
    found = judge_criteria(observed, policy.confidence, evidence.looks)
    then = next(
        (run.manifest.environment for run in dossier.runs if run.name in verdict.runs), None
    )
    elsewhere = find_environment_differences(then, describe_environment()) if then else []
    for criterion, now in zip(drawn, found, strict=True):
        one = judge_audit(criterion, known[criterion.name], now, elsewhere)
        yield replace(
            one, reason=one.reason + (valid if find_kind(criterion.section) == "bench" else "")
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
        return replace(now, verdict=Verdict.INCONCLUSIVE, reason=f"undecided: {why}")
    tolerance, relative = AUDIT_TOLERANCES[criterion.dimension]

    def convert(one: CriterionResult) -> list[float]:
        """The value and its bounds."""
        values = (
            float(one.observed or 0.0),
            *((one.ci if timed else None) or [float(one.observed or 0.0)] * 2),
        )
        return [log(each) if relative else each for each in values]

    old, new, limit = convert(before), convert(now), log1p(tolerance) if relative else tolerance
    change = new[0] - old[0]
    low, high = (
        change - hypot(new[0] - new[1], old[2] - old[0]),
        change + hypot(new[2] - new[0], old[0] - old[1]),
    )
    word, verdict = "undecided", Verdict.INCONCLUSIVE
    if -limit <= low and high <= limit:
        word, verdict = "agreed", Verdict.PASS
    elif low > limit or high < -limit:
        word, verdict = "differs", Verdict.FAIL
    why = f"{word}: the dossier has {format_observed(before)}, {_describe_tolerance(criterion)}"
    return replace(now, verdict=verdict, reason=why, remedy=None, limit=before.limit)


def require_possible(
    wanted: SignoffRequest,
    store: Store,
    output: Path | None,
    key: Path | None,
    authority: str | None = None,
) -> None:
    """Raises BadInputError, before anything is built or measured, if the sign-off could not be written."""
    require_valid_request(wanted, store)
    if output is not None:
        require_unused_path(output)
    if key is not None:
        require_key(key)
    if authority is not None:
        require_authority(authority)


def sign_off(
    wanted: SignoffRequest,
    store: Store,
    output: Path | None,
    key: Path | None,
    listener: Listener,
    *,
    figures: bool = True,
    authority: str | None = None,
) -> tuple[VerdictRecord, Path]:
    """Gathers the evidence, judges it, writes the reports, and seals the dossier; returns the verdict and its folder.

    An RFC 3161 `authority` (URL) that gives no token is a warning: the verdict and its dossier stay.
    """
    with store.scratch("dossier") as scratch:
        with listener.step("gather evidence"):
            collect_evidence(
                wanted, store, scratch, drawn_with=list_drawing_versions() if figures else {}
            )
        with listener.step("judge"):
            files = Files(scratch, kept={})
            require_sizes(files)
            dossier = read_dossier(files)
            if (changed := explain_changed_source(dossier.artifact, store)) is not None:
                listener.warn(changed)
            verdict, evidence = judge_dossier(dossier)
            write_bytes(scratch / VERDICT, json_from_record(verdict))
        if looser := describe_loosened(verdict.loosened):
            listener.warn(looser)
        package = BACKENDS[dossier.artifact.info.backend].package
        for version in {
            one.environment.get_fact(f"packages.{package}") for one in evidence.measured
        }:
            if missing := find_missing_release(dossier.artifact.info, version):
                listener.inform(missing)
        with listener.step("write the report"):
            write_reports(render_dossier(dossier, verdict, figures=figures), scratch)
        usual = (
            store.workspace / "dossiers" / verdict.dossier_name
        )  # one build may be judged twice within a second
        numbered = chain([usual], (usual.with_name(f"{usual.name}-{n}") for n in count(2)))
        target = output or next(path for path in numbered if not path.exists())
        finish_dossier(scratch, target, key)
    if authority is not None:
        try:
            with listener.step("ask for a timestamp"):
                stamp_folder(target, authority)
        except OptpipeError as error:
            again = Call("signoff stamp", target, timestamp=authority)
            listener.warn(
                "the dossier has no timestamp: " + error.message + "\nlater: `" + again + "`"
            )
    return verdict, target


def run_pipeline(
    model: Model,
    wanted: SignoffRequest,
    plan: BuildPlan,
    data: Path | None,
    left_out: Collection[str],
    store: Store,
    listener: Listener,
) -> tuple[list[StepRecord], Path]:
    """Builds `model` and takes the steps that are not `left_out`; a sign-off judges what they measured.

    A step that this machine cannot do leaves its criteria INCONCLUSIVE. Also returns the file of the finished steps, which is
    needed until the sign-off. Raises the errors of building, and BadInputError if the policy does not select one of several builds.
    """
    started = monotonic()
    if data is not None:
        require_evaluable(model, data, store, listener, truncate=plan.truncate)
    built = build_model(model, plan, store, listener)
    require_artifacts(built)
    judged = find_judged_artifact(wanted, store)
    register_policy(wanted.policy, store)
    steps = [StepRecord("build", "done", round(monotonic() - started, 3))]
    notes = _place_notes(wanted, plan, data, built, store)
    artifacts = [each.entry for each in built.artifacts if each.why_not is None]
    build = next(
        (each for each in built.artifacts if each.entry.id == judged.id),
        BuiltArtifact(judged, None, None),
    )
    work = make_steps(
        wanted, build, artifacts, built.model, lambda: model, store, listener, plan, data
    )
    if not any(one.is_of(SPEEDUP) for one in wanted.policy.criteria):
        del work["turns"]  # nothing to compare with
    taken = {
        name: partial(step, wanted.policy.criteria)
        for name, step in work.items()
        if name not in left_out
    }
    steps += [_run_step(name, step, notes, listener) for name, step in taken.items()]
    return steps, notes


def _run_step(
    name: str, work: Callable[[], list[Path]], notes: Path, listener: Listener
) -> StepRecord:
    """Runs a step, or takes its runs from the notes of an interrupted pipeline; an error of the step is only recorded."""
    done: dict[str, list[str]] = {}
    with suppress(OSError, BadInputError):
        done = record_from_json(notes.read_bytes(), dict[str, list[str]], notes)
    known = done.get(name, [])
    if known and all((notes.parent.parent / RUNS / run / MANIFEST).is_file() for run in known):
        with listener.step(name) as step:
            step.cached()
        return StepRecord(name, "resumed", runs=tuple(known))
    started = monotonic()
    try:
        runs = work()
    except (MissingError, BadInputError, StageError, GateError) as error:
        skipped = isinstance(error, MissingError | BadInputError)
        listener.warn(f"{name} {'was skipped' if skipped else 'failed'}: {error}")
        status = "skipped" if skipped else "failed"
        return StepRecord(name, status, round(monotonic() - started, 3), reason=str(error))
    names = [path.name for path in runs]
    write_json(notes, done | {name: names})
    return StepRecord(name, "done", round(monotonic() - started, 3), tuple(names))


def _place_notes(
    wanted: SignoffRequest, plan: BuildPlan, data: Path | None, built: ModelBuild, store: Store
) -> Path:
    """The file of exactly this pipeline's finished steps. Raises BadInputError for data that cannot be read."""
    own = read_stored_card(built.model).data.get("validation")
    validation = Path(own) if own and Path(own).exists() else None
    decisive = {
        "optpipe": __version__,
        "artifacts": sorted(each.entry.id for each in built.artifacts),
        "policy": wanted.policy.sha256,
        "options": {name: dict(given) for name, given in plan.options.items()},
        "settings": [wanted.min_seconds, wanted.max_cv, plan.truncate],
        "data": [
            each and hash_data(each) for each in (data or validation, plan.images or validation)
        ],
        "environment": plain_from_record(describe_environment()),
    }
    return store.workspace / NOTES / f"steps-{hash_value(decisive)[:12]}.json"
