"""The documents of verdicts, and the reports in a dossier and on a comparison.

Reports are computed only from raw files, so that `verify` renders the same bytes.
"""

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from optpipe import __version__
from optpipe.backends.registry import list_runtime_packages
from optpipe.core.comparison import Comparison, Goal, Levels
from optpipe.core.entries import Environment
from optpipe.core.measurement import read_measurements
from optpipe.core.metrics.sections import DROP, SECTIONS, list_tiles
from optpipe.core.quantity import format_bytes
from optpipe.core.records import json_from_record, record_from_files
from optpipe.core.verdict import (
    CriterionResult,
    PreviousSignoff,
    StepRecord,
    Verdict,
    VerdictRecord,
    VerificationRecord,
)
from optpipe.core.wording import Argument, Call
from optpipe.measure.compare import compare_measurements
from optpipe.measure.compare_workspace import collect_build_facts
from optpipe.measure.document import (
    draw_measurements,
    list_comparison_parts,
    list_raw_files,
    summarize_comparison,
)
from optpipe.measure.figures import measurements_from_run
from optpipe.measure.groups import RecordedMeasurement, find_environment_differences
from optpipe.models.artifacts.judged_build import judged_build_from_entry
from optpipe.preprocess.proof import PreprocessRecord
from optpipe.report.document import (
    PAGE_ONLY,
    TONES,
    Cell,
    Column,
    ColumnKind,
    Document,
    Figure,
    Gauge,
    Page,
    Part,
    RawFiles,
    Row,
    Section,
    Sentence,
    Table,
    Tone,
    figure_column,
    format_observed,
    make_document,
    make_table,
    tabulate_results,
)
from optpipe.report.html import render_html
from optpipe.report.markdown import render_page
from optpipe.signoff.build_evidence import BuildEvidence
from optpipe.signoff.dossier import Dossier
from optpipe.signoff.judge import find_drop_limit
from optpipe.signoff.junit import render_junit
from optpipe.signoff.loosened import describe_loosened
from optpipe.signoff.previous import describe_since
from optpipe.trace.differences import ProfileDifference
from optpipe.trace.document import draw_profile
from optpipe.trace.document_details import draw_details, list_difference_parts
from optpipe.trace.report import (
    StageProfile,
    analyze_stage,
    has_tables,
    read_profile,
    recompute_stage,
)
from optpipe.workspace.entry import Run
from optpipe.workspace.file_names import PREPROCESSING, PROFILE, ROWS
from optpipe.workspace.files import write_bytes
from optpipe.workspace.runs import newest_runs
from optpipe.workspace.seal import SIGNATURE

NOT_RECOMPUTED = "changed before it was sealed, or made by a different version of optpipe: measure and sign off again"
_VOUCHED = "that samples were not reordered or trimmed, that predictions were not edited, and that this engine gave them"
UNSIGNED = (
    "Unsigned: the files are consistent with each other, but nothing proves who made them or where. A signature names who vouches "
    f"{_VOUCHED}."
)
SEALED = (
    f"The seal alone does not show {_VOUCHED}: a signature names who vouches for it. `"
    + Call("verify", ".")
    + "` in this folder says whether this dossier is signed, and by whom."
)
"""Of a report, which is sealed before it is signed."""
LARGE_FIGURES, MAX_TILES = 3, 4
UNKNOWN = (
    "Anybody can sign with their own key: name those you trust with "
    + Argument("allowed_signers", "FILE")
    + "."
)


def summarize_verdict(record: VerdictRecord) -> str:
    """Tells whether to ship, how many criteria are not met, and the first of them."""
    build = f"{record.model} ({record.artifact.backend} {record.artifact.precision})"
    counted = record.counted
    worst = [
        criterion
        for criterion in _order_criteria(record)
        if criterion in counted and criterion.verdict is record.verdict
    ]
    tail = _name_waivers(record)
    share = f"{len(worst)} of {len(counted)} criteria {'is' if len(worst) == 1 else 'are'}"
    if record.loosened:
        tail += f" It rests on {describe_loosened(record.loosened)}."
    if not counted:
        return f"Do not ship {build} yet: no criteria remain to be judged.{tail}"
    if record.verdict is Verdict.PASS:
        return f"Ship {build}: {'the criterion is' if len(counted) == 1 else f'all {len(counted)} criteria are'} met.{tail}"
    load = f", {_name_load(worst[0])}" if worst[0].about else ""
    first = f"{_name_criterion(worst[0].name)}{load}: " + worst[0].reason + "."
    yet, state = ("", "not met") if record.verdict is Verdict.FAIL else (" yet", "undecided")
    return f"Do not ship {build}{yet}: {share} {state}. {first}{tail}"


def _name_waivers(record: VerdictRecord) -> str:
    """` 1 criterion was waived: latency.p99.b8 (FAIL).`; empty without waivers."""
    names = [f"{criterion.name} ({criterion.verdict})" for criterion in record.waived]
    if not names:
        return ""
    return f" {len(names)} criteri{'on was' if len(names) == 1 else 'a were'} waived: {', '.join(names)}."


ACRONYMS = ("cv", "f1", "gpu", "cpu", "snr")


def _name_criterion(name: str) -> str:
    """The words for a criterion: `p99 latency` for `latency.p99.b8`, `Accuracy drop` for `accuracy.maximum_drop`."""
    section, metric, *_ = name.split(".")
    words = [word for word in metric.split("_") if word not in ("minimum", "maximum")]
    table = SECTIONS.get(section)
    if table is not None and table.names_key_first:
        return " ".join((*words, section))
    if table is not None and table.is_open:
        key = name.split(".")[2] if name.count(".") > 1 else ""
        return f"{words[0]} drop" if key == DROP else words[0]
    words = [*section.split("_"), *words] if table else words  # a criterion of trust has no table
    words = [word.upper() if word in ACRONYMS else word for word in words]
    return " ".join((words[0].title(), *words[1:]))


def document_from_verdict(record: VerdictRecord, dossier: Path | None) -> Document:
    return make_document(_list_verdict_parts(record, dossier))


def _list_verdict_parts(record: VerdictRecord, dossier: Path | None) -> Iterator[Part]:
    yield Sentence(summarize_verdict(record), TONES[record.verdict], record.verdict)
    yield from list_waivers(record)
    yield tabulate_criteria(record)
    yield from list_notes(record)
    if dossier is not None:
        yield Sentence(str(dossier), Tone.STRONG, "dossier")
        if not (dossier / SIGNATURE).is_file():
            yield Sentence(UNSIGNED, Tone.FAINT)
        yield Sentence(Call("verify", dossier), Tone.FAINT, "verify it anywhere")
        yield Sentence(_find_next_step(record, dossier), Tone.STRONG, "next")


def _find_next_step(record: VerdictRecord, dossier: Path) -> str:
    """The remedy of the criterion that decides; how to deploy a build that passes."""
    if record.verdict is Verdict.PASS:
        return Call("deploy", dossier)
    remedies = (
        criterion.remedy
        for criterion in _order_criteria(record)
        if criterion.remedy and criterion.counts
    )
    return next(remedies, "measure what the policy requires")


def list_waivers(record: VerdictRecord) -> Iterator[Sentence]:
    for criterion in record.waived:
        yield Sentence(
            f"`{criterion.name}` is {criterion.verdict} and does not count: {criterion.waived}",
            Tone.BAD,
            "WAIVED",
        )


def list_notes(record: VerdictRecord) -> Iterator[Sentence]:
    return (
        Sentence(note.message, Tone.DOUBTFUL, "note", remedy=note.remedy) for note in record.notes
    )


def _name_load(criterion: CriterionResult) -> str:
    """`batch 8, single-stream, compute`, without the processes."""
    return criterion.about.partition(";")[0]


def _order_criteria(record: VerdictRecord) -> list[CriterionResult]:
    """FAIL, INCONCLUSIVE, waived, PASS; those of trust last, because they often repeat the reason of another."""
    rank = {Verdict.FAIL: 0, Verdict.INCONCLUSIVE: 1, Verdict.PASS: 2}
    return sorted(
        record.criteria,
        key=lambda criterion: (
            rank[criterion.verdict] if criterion.counts else 1.5,
            "trust." in criterion.name,
        ),
    )


def tabulate_criteria(record: VerdictRecord) -> Table:
    """The decisive criteria first; those of trust that pass share one row."""
    passed = [
        criterion
        for criterion in record.counted
        if criterion.verdict is Verdict.PASS and criterion.name.startswith("trust.")
    ]
    trusted = passed if len(passed) > 1 else []
    rows = [
        _list_criterion_cells(criterion)
        for criterion in _order_criteria(record)
        if criterion not in trusted
    ]
    if trusted:
        names = ", ".join(_name_criterion(criterion.name) for criterion in trusted).capitalize()
        why = "; ".join(criterion.reason for criterion in trusted)
        rows.append(
            (names, "trust.*", Cell(Verdict.PASS, Tone.GOOD), "", trusted[0].limit, "", why)
        )
    columns = (
        Column("name", rank=PAGE_ONLY),
        Column("criterion", ColumnKind.NAME, rank=0, below=True),
        Column("verdict", ColumnKind.STATE, rank=0),
        figure_column("observed", rank=0),
        Column("limit"),
        Column("measured", rank=2, below=True),
        Column("why", rank=2),
    )
    counts = [1] * len(rows)
    if trusted:
        counts[-1] = len(trusted)
    return make_table(columns, rows, id="criteria", row_counts=counts)


def _list_criterion_cells(criterion: CriterionResult) -> Row:
    observed, tone, gauge = format_observed(criterion), TONES[criterion.verdict], None
    value = criterion.observed if isinstance(criterion.observed, int | float) else None
    if value is not None and isinstance(criterion.threshold, int | float):
        gauge = Gauge(
            value,
            *(criterion.ci or (value, value)),
            criterion.threshold,
            criterion.limit.startswith("at least"),
            tone,
        )
    text, _, interval = observed.partition(" [")
    why = "" if text != "–" and observed in criterion.reason else criterion.reason
    return (
        _name_criterion(criterion.name),
        criterion.name,
        Cell(criterion.verdict, tone, "" if criterion.counts else "waived"),
        Cell(
            "" if text == "–" else text,
            note=f"[{interval}" if interval else "",
            value=value,
            gauge=gauge,
        ),
        criterion.limit,
        criterion.about,
        Cell(why, note="→ " + criterion.remedy if criterion.remedy else ""),
    )


def document_from_pipeline_run(
    steps: Sequence[StepRecord], record: VerdictRecord, dossier: Path
) -> Document:
    texts = (
        f"{step.status:<8} {step.name:<11} {step.seconds:.1f} s"
        + ("  " + step.reason if step.reason else "")
        for step in steps
    )
    return make_document([*map(Sentence, texts), *_list_verdict_parts(record, dossier)])


def document_from_verification(verification: VerificationRecord) -> Document:
    if verification.recomputed is None:
        more = len(verification.problems) - 20
        rest = (f"and {more} more",) if more > 0 else ()
        why = (
            ": the seal is intact, but not every figure follows from the raw files"
            if verification.as_sealed
            else ""
        )
        remedy = NOT_RECOMPUTED if verification.as_sealed else ""
        text = f"{verification.dossier}{why}"
        return make_document(
            [Sentence(text, Tone.BAD, "NOT INTACT", (*verification.problems[:20], *rest), remedy)]
        )
    stated = "; ".join(
        statement.partition(": stated by ")[0] for statement in verification.unbacked
    )
    audit = Sentence(
        f"measured again on this machine, drawn by seed {verification.audit_seed}",
        Tone.STRONG,
        "audit",
    )
    return make_document(
        [
            *_list_verdict_parts(verification.recomputed, None),
            *(Sentence(text, Tone.DOUBTFUL, "not compared") for text in verification.not_compared),
            Sentence(stated, Tone.FAINT, "not recomputable (taken from the manifests)")
            if stated
            else None,
            Sentence(
                f"{verification.files} files, {format_bytes(verification.size_bytes)}, {verification.signature}",
                Tone.GOOD,
                "intact",
            ),
            Sentence(UNSIGNED, Tone.DOUBTFUL)
            if verification.signature.startswith("not signed")
            else None,
            Sentence(UNKNOWN, Tone.DOUBTFUL) if "unknown key" in verification.signature else None,
            *((audit, tabulate_results(verification.audit)) if verification.audit else ()),
        ]
    )


def page_from_verdict(
    record: VerdictRecord,
    comparison: Comparison,
    figures: Sequence[Figure | Sentence],
    pictures: Sequence[Figure],
    limits: Sequence[Sentence],
    files: RawFiles,
    difference: ProfileDifference | None = None,
    previous: PreviousSignoff | None = None,
) -> Page:
    counted = [criterion.verdict for criterion in record.counted]
    tally = [(str(name), counted.count(name)) for name in Verdict if name in counted]
    proven = (
        "p90 and p99 pool all requests; other figures average processes. The verdict holds for this machine as it was measured,"
        " not for others."
    )
    recompute = (
        "Recompute every number and this verdict, and check the signature, offline and without a GPU: `"
        + Call("verify", ".")
        + "` in this folder. To check only the hashes: `sha256sum -c SHA256SUMS`."
    )
    expiry = Section("Sign off again if", tuple(map(Sentence, record.expires_if)), folded=True)
    sections = [
        Section(
            "Criteria",
            (
                *([] if previous is None else [describe_since(previous, record)]),
                tabulate_criteria(record),
                *list_notes(record),
                Sentence(proven),
            ),
            "criteria",
        ),
        *_list_comparison_sections(comparison, figures),
        Section("Preprocessing, side by side", tuple(pictures), "parity"),
        Section("What limits performance", tuple(limits), "profile"),
        *_list_difference(difference),
        _make_evidence_section(recompute, comparison.environment, expiry),
    ]
    return Page(
        f"{record.model}: {record.policy.name}",
        summarize_verdict(record),
        tuple(section for section in sections if section.parts),
        record.verdict,
        (*tally, *([("WAIVED", len(record.waived))] if record.waived else [])),
        tuple(list_waivers(record)),
        tuple(_quote_criteria(record)),
        files,
        record.created_utc,
        record.optpipe,
        tuple(_identify_build(record, comparison.environment)),
        ("in this folder: " if record.verdict is Verdict.PASS else "")
        + _find_next_step(record, Path()),
        SEALED,
    )


def _list_difference(difference: ProfileDifference | None) -> Iterator[Section]:
    if difference is not None:
        title = f"The profile against {difference.against}"
        caution = (
            "The profile states this; the one that it was compared with is not in this dossier."
        )
        parts = (Sentence(caution, Tone.DOUBTFUL), *list_difference_parts(difference))
        yield Section(title, parts, "difference", folded=True)


def _identify_build(record: VerdictRecord, environment: Environment) -> Iterator[str]:
    yield f"{record.created_utc[:16].replace('T', ' ')} UTC"
    yield from (f"{gpu.name}, driver {gpu.driver}" for gpu in environment.gpus[:1])
    if not environment.gpus and environment.packages:
        yield environment.cpu
    packages = next((group.subject.packages for group in record.groups), ())
    packages = packages or list_runtime_packages(record.artifact.backend)
    for package in packages[:1] if environment.packages else ():
        yield f"{package} {environment.get_fact(f'packages.{package}')}"
    if record.artifact.sha256:
        yield f"engine sha256 {record.artifact.sha256[:12]}"


def page_from_comparison(
    comparison: Comparison, figures: Sequence[Figure | Sentence], files: RawFiles
) -> Page:
    names = {
        Goal.LATENCY: "Lowest latency",
        Goal.THROUGHPUT: "Highest throughput",
        Goal.EFFICIENCY: "Least energy",
    }
    evidence = _make_evidence_section(
        "The files that the figures were computed from.", comparison.environment
    )
    sections = [*_list_comparison_sections(comparison, figures), evidence]
    return Page(
        "Comparison",
        summarize_comparison(comparison),
        tuple(section for section in sections if section.parts),
        highlights=tuple(
            (names[Goal(goal)], comparison.best_reason[goal], comparison.row(row).label)
            for goal, row in comparison.best.items()
            if row is not None
        ),
        files=files,
        optpipe=__version__,
    )


def _list_comparison_sections(
    comparison: Comparison, figures: Sequence[Figure | Sentence]
) -> Iterator[Section]:
    yield Section("Builds", tuple(list_comparison_parts(comparison)), "builds")
    stated = tuple(part for part in figures if isinstance(part, Sentence))
    drawn = tuple(part for part in figures if isinstance(part, Figure))
    yield Section("Figures", (*drawn[:LARGE_FIGURES], *stated), "figures")
    yield Section("Diagnostics", drawn[LARGE_FIGURES:], "diagnostics", folded=True)


def _make_evidence_section(text: str, environment: Environment, *more: Section) -> Section:
    packages = ", ".join(f"{name} {number}" for name, number in environment.packages.items())
    host = Sentence(
        f"{environment.cpu}, {environment.cpu_count} cores; Python {environment.python}; {packages}"
    )
    listed = Section(f"CPU, Python, and {len(environment.packages)} packages", (host,), folded=True)
    return Section("Evidence", (Sentence(text), *more, *([listed] if packages else [])), "evidence")


def _quote_criteria(record: VerdictRecord) -> Iterator[tuple[str, str, str]]:
    """The decisive figure of each section of the policy, as in the table of criteria."""
    figures = [
        criterion
        for criterion in _order_criteria(record)[::-1]
        if isinstance(criterion.observed, float)
    ]
    quoted = {criterion.name.partition(".")[0]: criterion for criterion in figures}
    for section in [table.name for table in list_tiles() if table.name in quoted][:MAX_TILES]:
        criterion = quoted[section]
        limit = f"{criterion.limit}{', ' if criterion.about else ''}{_name_load(criterion)}"
        yield _name_criterion(criterion.name), format_observed(criterion).partition(" [")[0], limit


REPORTS = HTML, MARKDOWN, JUNIT, COMPARISON = (
    "report.html",
    "report.md",
    "junit.xml",
    "comparison.json",
)
DRAWN_WITH = ("altair", "vl-convert-python")
"""Packages whose versions decide the bytes of a figure."""
MAX_IMAGES = 6


def render_dossier(
    dossier: Dossier, verdict: VerdictRecord, evidence: BuildEvidence, *, figures: bool
) -> dict[str, str]:
    """The reports by file name; `verdict` and `evidence` are those of `judge_dossier`."""
    comparison, measured = compare_dossier(dossier, evidence)
    page = make_dossier_page(dossier, verdict, comparison, measured, figures=figures)
    return _render_reports(page, comparison, verdict)


def make_dossier_page(
    dossier: Dossier,
    verdict: VerdictRecord,
    comparison: Comparison,
    measured: Sequence[RecordedMeasurement],
    *,
    figures: bool,
) -> Page:
    folder, runs = dossier.folder, dossier.every_run
    profiled = _find_profile(runs, folder)
    drawn = draw_measurements(comparison, measured, runs, folder) if figures else []
    if figures and profiled is not None:
        run, stage, profile_files = profiled
        measured_part = analyze_stage(run, stage)
        drawn += draw_profile(stage.profile, profile_files, measured_part)
        drawn += draw_details(stage, profile_files, measured_part)
    pictures, files = list(_list_pictures(runs, folder)), list_raw_files(runs, folder)
    limits = () if profiled is None else tuple(_list_limits(*profiled[:2]))
    difference = None if profiled is None else read_profile(profiled[0]).against
    previous = dossier.request.previous
    return page_from_verdict(
        verdict, comparison, drawn, pictures, limits, files, difference, previous
    )


def _list_limits(run: Run, stage: StageProfile) -> Iterator[Sentence]:
    """The largest findings of a stage, and who recomputes them."""
    findings = stage.profile.findings[:8]
    yield from (Sentence(finding.advice, Tone.STRONG, finding.rule) for finding in findings)
    if findings and has_tables(run, stage):
        yield Sentence(
            f"These follow from the trace of {run.name}: `"
            + Call("verify", ".")
            + "` recomputes them, the independent verifier does not."
        )
    elif findings:
        yield Sentence(
            f"{run.name} states these; its trace is too large for this dossier.", Tone.DOUBTFUL
        )


def write_comparison(
    comparison: Comparison,
    measured: Sequence[RecordedMeasurement],
    runs: Sequence[Run],
    folder: Path,
) -> list[Path]:
    figures = draw_measurements(comparison, measured, runs, folder)
    page = page_from_comparison(comparison, figures, list_raw_files(runs, folder))
    return write_reports(_render_reports(page, comparison, None), folder)


def write_reports(texts: Mapping[str, str], folder: Path) -> list[Path]:
    for name, text in texts.items():
        write_bytes(folder / name, text.encode())
    return [folder / name for name in texts]


def _render_reports(
    page: Page, comparison: Comparison, verdict: VerdictRecord | None
) -> dict[str, str]:
    texts = {HTML: render_html(page), MARKDOWN: render_page(page)}
    if verdict is not None:
        texts[JUNIT] = render_junit(verdict)
    return texts | {COMPARISON: json_from_record(comparison).decode()}


def list_drawing_versions() -> dict[str, str]:
    return {name: version(name) for name in DRAWN_WITH}


def explain_no_drawing(drawn_with: Mapping[str, str]) -> list[str]:
    """The reason why `report.html` cannot be rendered here with the same bytes; empty if it can."""
    here = list_drawing_versions()
    other = [
        f"{name} {used} (here: {here.get(name)})"
        for name, used in drawn_with.items()
        if used != here.get(name)
    ]
    return [f"{HTML}: its figures were drawn by {', '.join(other)}"] if other else []


def compare_dossier(
    dossier: Dossier, evidence: BuildEvidence
) -> tuple[Comparison, tuple[RecordedMeasurement, ...]]:
    """Compares the builds in a dossier on the machine that measured the judged build last; returns their measurements too.

    Intervals and the allowed drop are those of the verdict, so that a report states one for each figure.
    """
    request = dossier.request
    bench = [run for run in dossier.runs if run.kind == "bench"]
    measured = tuple(
        process for run in bench for process in measurements_from_run(run, whole=False)
    )
    stated = sum(len(read_measurements(run.files)) for run in bench)
    mine = [
        process for process in measured if process.measurement.subject.artifact == request.artifact
    ]
    newest = max(
        mine or measured, key=lambda process: process.measurement.started_utc, default=None
    )
    place = newest.environment if newest else Environment()
    near = tuple(
        process
        for process in measured
        if not find_environment_differences(place, process.environment)
    )
    others = _find_namesakes(dossier)
    here = tuple(process for process in near if process.measurement.subject.artifact not in others)
    if not here:
        first = "first run " + Call("bench", request.model)
        reason = f"no measurements of {request.model}; " + first
        return Comparison(
            (), dict.fromkeys(Goal), dict.fromkeys(Goal, reason), environment=place
        ), ()
    levels = Levels(
        evidence.find_confidence("bench"),
        evidence.policy_confidence,
        evidence.find_confidence("evaluate"),
    )
    known = collect_build_facts(
        dossier.artifacts,
        dossier.runs,
        dossier.manifests,
        confidence=levels.top1,
        drop_limit=find_drop_limit(dossier.policy),
    )
    comparison = compare_measurements(here, known=known, levels=levels)
    earlier = sum(
        len(read_measurements(run.files)) for run in dossier.earlier_runs if run.kind == "bench"
    )
    notes = (
        (stated - len(measured), "not in this dossier: raw samples too large or missing"),
        (len(measured) - len(near), "excluded: from another machine"),
        (len(near) - len(here), "excluded: from another build or model with the same name"),
        (earlier, "excluded: earlier than " + Argument("since") + " or the policy"),
    )
    said = tuple(
        f"{count} measurement{'s are' if count > 1 else ' is'} " + why
        for count, why in notes
        if count
    )
    return replace(comparison, warnings=(*comparison.warnings, *said)), here


def _find_namesakes(dossier: Dossier) -> set[str]:
    """Builds that a table would show as the judged one, or as builds of its model, although they are not."""
    judged, exported = dossier.request.artifact, dossier.manifests
    labels = {build.id: build.info.label for build in dossier.artifacts}
    models = {
        build.id: judged_build_from_entry(build, exported).model_sha256
        for build in dossier.artifacts
    }
    of_its_label = {build for build in labels if labels[build] == labels.get(judged)}
    of_other_models = {build for build in models if models[build] != models.get(judged)}
    return (of_its_label | of_other_models) - {judged}


def _find_profile(runs: Sequence[Run], root: Path) -> tuple[Run, StageProfile, RawFiles] | None:
    """The run of the newest profile, its last inference, otherwise its last stage, and the files relative to `root`.

    The stage is recomputed from its trace, if that is there, with sentences that no one can have changed.
    """
    for run in newest_runs(runs, "profile"):
        if stages := read_profile(run).stages:
            shown = next(
                (stage for stage in stages[::-1] if stage.subject.kind == "inference"), stages[-1]
            )
            shown = recompute_stage(run, shown) or shown
            tables = [
                path for path in run.manifest.files if path.startswith(f"{shown.folder}/tables/")
            ]
            files = (
                file for name in (PROFILE, *tables) for file in list_raw_files((run,), root, name)
            )
            return run, shown, tuple(files)
    return None


def _list_pictures(runs: Sequence[Run], root: Path) -> Iterator[Figure]:
    """The images of the newest parity proof that differ most."""
    for run in newest_runs(runs, "preprocess")[:1]:
        worst = record_from_files(run.files, PREPROCESSING, PreprocessRecord).parity.worst
        for image in worst[:MAX_IMAGES]:
            if run.files.has(image.file):
                data = base64.b64encode(run.files.read(image.file)).decode()
                caption = (
                    f"The model's own, DALI's, and their difference (×{image.difference_times:.3g})"
                )
                files = (
                    *list_raw_files((run,), root, image.file),
                    *list_raw_files((run,), root, ROWS),
                )
                yield Figure(
                    Path(image.image).name, caption, f"data:image/png;base64,{data}", files
                )
