import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree as Xml

from optpipe import __version__
from optpipe.core.comparison import Comparison
from optpipe.core.entries import Environment
from optpipe.core.measurement import name_sample
from optpipe.core.quantity import Dimension, choose_dimension, format_bytes, format_quantity
from optpipe.core.verdict import StepRecord, Verdict, VerdictRecord, VerificationRecord
from optpipe.measure.document import list_comparison_parts, summarize_comparison
from optpipe.report.document import (
    TONES,
    Cell,
    Column,
    ColumnKind,
    Document,
    Figure,
    Gauge,
    Page,
    Part,
    RawFile,
    Section,
    Sentence,
    Table,
    Tone,
    clean_text,
    format_observed,
    make_document,
    make_table,
)
from optpipe.trace.records import TraceProfile

NOT_RECOMPUTED = "changed before it was sealed, or made by a different version of optpipe: measure and sign off again"
UNSIGNED = "This dossier is not signed: it proves that the folder agrees with itself, not who made it or where it was measured."
UNKNOWN = "Anybody can sign with their own key: name those you trust with --allowed-signers FILE."


def summarize_verdict(record: VerdictRecord) -> str:
    """Tells whether to ship, how many criteria are not met, and the first of them."""
    build = f"{record.model} ({record.artifact.backend} {record.artifact.precision})"
    counted, waived = record.counted, len(record.waived)
    worst = [one for one in counted if one.verdict is record.verdict]
    tail = f" {waived} criteri{'on was' if waived == 1 else 'a were'} waived." if waived else ""
    share = f"{len(worst)} of {len(counted)} criteria"
    if not counted:
        return f"Do not ship {build} yet: no criteria remain to be judged.{tail}"
    if record.verdict is Verdict.PASS:
        return f"Ship {build}: all {len(counted)} criteria are met with evidence.{tail}"
    first = f"{_name_criterion(worst[0].name)}: {worst[0].reason}."
    if record.verdict is Verdict.FAIL:
        return f"Do not ship {build}: {share} {'is' if len(worst) == 1 else 'are'} not met. {first}{tail}"
    return f"Do not ship {build} yet: the evidence does not decide {share}. {first}{tail}"


_NAMES = {
    "trust.weights": "Weights",
    "trust.precision": "Precision",
    "trust.outputs": "Outputs",
    "trust.environment": "Measurement environment",
    "throughput.minimum": "Throughput",
    "regression.throughput": "Throughput regression",
    "memory.maximum": "Memory",
    "energy.maximum": "Energy",
    "stability.maximum_cv": "Stability",
    "accuracy.maximum_drop": "Accuracy drop",
    "accuracy.minimum_score": "Score",
    "accuracy.minimum_top1": "Top-1 accuracy",
    "accuracy.minimum_agreement": "Agreement with the source model",
    "preprocessing.minimum_agreement": "Preprocessing agreement",
    "preprocessing.minimum_snr": "Preprocessing SNR",
    "outputs.minimum_snr": "Output SNR",
    "outputs.minimum_cosine": "Output cosine",
    "outputs.minimum_agreement": "Output agreement",
    "outputs.maximum_abs_error": "Output error",
    "size.maximum": "Engine size",
    "tensor_cores.minimum_share": "Tensor Core use",
}


def _name_criterion(name: str) -> str:
    """The words for a criterion: `p99 latency` for `latency.p99.b8`."""
    section, metric, *_ = name.replace("mean_", "mean ").split(".")
    known = {"latency": f"{metric} latency", "regression": f"{metric} regression", "precision": f"Share of {metric}"}
    return _NAMES.get(f"{section}.{metric}") or known.get(section) or f"{section} {metric}".capitalize()


def document_from_verdict(record: VerdictRecord, dossier: Path | None) -> Document:
    return make_document(_list_verdict_parts(record, dossier))


def _list_verdict_parts(record: VerdictRecord, dossier: Path | None) -> Iterator[Part]:
    yield Sentence(summarize_verdict(record), TONES[record.verdict], record.verdict)
    yield from list_waivers(record)
    yield tabulate_criteria(record)
    yield from list_notes(record)
    if dossier is not None:
        yield Sentence(str(dossier), Tone.STRONG, "dossier")
        yield Sentence(shlex.join(["optpipe", "verify", str(dossier)]), Tone.FAINT, "verify it anywhere")


def list_waivers(record: VerdictRecord) -> Iterator[Sentence]:
    for one in record.waived:
        yield Sentence(f"`{one.name}` is {one.verdict} and does not count: {one.waived}", Tone.BAD, "WAIVED")


def list_notes(record: VerdictRecord) -> Iterator[Sentence]:
    return (Sentence(note.message, Tone.DOUBTFUL, "note", remedy=note.remedy) for note in record.notes)


def tabulate_criteria(record: VerdictRecord) -> Table:
    order = (Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.PASS)
    rows = []
    for one in record.criteria:
        observed, tone, gauge = format_observed(one), TONES[one.verdict], None
        value = one.observed if isinstance(one.observed, int | float) else None
        if value is not None and isinstance(one.threshold, int | float):
            low, high = one.ci or (value, value)
            gauge = Gauge(value, low, high, one.threshold, one.limit.startswith("at least"), tone)
        only_repeats = one.observed is not None and observed in one.reason
        rows.append(
            (
                one.name,
                Cell(one.verdict, tone, "waived" if one.waived else "", order.index(one.verdict)),
                Cell(observed, note=one.about, value=value, gauge=gauge),
                one.limit,
                Cell("" if only_repeats else one.reason, note=f"→ {one.remedy}" if one.remedy else ""),
            )
        )
    columns = (
        Column("criterion", ColumnKind.NAME), Column("verdict", ColumnKind.STATE, rank=0), "observed", "limit", "why",
    )  # fmt: skip
    return make_table(columns, rows, id="criteria")


def document_from_pipeline_run(steps: Sequence[StepRecord], record: VerdictRecord, dossier: Path) -> Document:
    lines = [
        Sentence(f"{one.status:<8} {one.name:<11} {one.seconds:.1f} s" + (f"  {one.reason}" if one.reason else ""))
        for one in steps
    ]
    return make_document([*lines, *_list_verdict_parts(record, dossier)])


def document_from_verification(found: VerificationRecord) -> Document:
    if found.recomputed is None:
        more = len(found.problems) - 20
        rest = (f"and {more} more",) if more > 0 else ()
        why = ": the seal is intact, but not every figure follows from the raw files" if found.as_sealed else ""
        remedy = NOT_RECOMPUTED if found.as_sealed else ""
        text = f"{found.dossier}{why}"
        return make_document([Sentence(text, Tone.BAD, "NOT INTACT", (*found.problems[:20], *rest), remedy)])
    return make_document(
        [
            Sentence(f"{found.files} files, {format_bytes(found.size_bytes)}, {found.signature}", Tone.GOOD, "intact"),
            *(Sentence(one, Tone.DOUBTFUL, "not compared") for one in found.not_compared),
            *(Sentence(one, Tone.FAINT, "no raw file") for one in found.unbacked),
            Sentence(UNSIGNED, Tone.DOUBTFUL) if found.signature == "not signed" else None,
            Sentence(UNKNOWN, Tone.DOUBTFUL) if "unknown key" in found.signature else None,
            *_list_verdict_parts(found.recomputed, None),
        ]
    )


def page_from_verdict(
    record: VerdictRecord,
    comparison: Comparison,
    figures: Sequence[Figure],
    pictures: Sequence[Figure],
    profile: TraceProfile | None,
    files: tuple[RawFile, ...],
) -> Page:
    counted = [one.verdict for one in record.counted]
    tally = [(str(name), counted.count(name)) for name in Verdict if name in counted]
    proven = (
        "PASS and FAIL are proven, whether the build is judged once or again and again: of builds that are exactly on a limit at most"
        " 2.5 % ever pass and at most 2.5 % ever fail wrongly (at a confidence of 95 %), and everything else is INCONCLUSIVE. "
        "A percentile above p50 is that of all requests over the processes that may serve them; p50, rates and energy are means over"
        " processes. Both hold for this machine in the state in which it was measured, not for others."
    )
    recompute = (
        "Recompute every number and this verdict, offline and without a GPU: `optpipe verify .` in this folder. "
        "To check only the hashes: `sha256sum -c SHA256SUMS`."
    )
    findings = () if profile is None else profile.findings[:8]
    sections = [
        Section("Criteria", (Sentence(proven), tabulate_criteria(record), *list_notes(record)), "criteria"),
        _make_builds_section(comparison),
        Section("Figures", tuple(figures), "figures"),
        Section("Preprocessing, side by side", tuple(pictures), "parity"),
        Section(
            "What limits performance",
            tuple(Sentence(one.advice, Tone.STRONG, one.rule) for one in findings),
            "profile",
        ),
        Section(
            "Evidence",
            (Sentence(recompute), Section("Void if", tuple(map(Sentence, record.expires_if)), folded=True)),
            "evidence",
        ),
    ]
    return Page(
        f"{record.model}: {record.policy.name}",
        summarize_verdict(record),
        tuple(section for section in sections if section.parts),
        record.verdict,
        (*tally, *([("WAIVED", len(record.waived))] if record.waived else [])),
        tuple(list_waivers(record)),
        tuple(_highlight_judged_build(record, comparison)),
        tuple(_list_facts(comparison.environment)),
        files,
        record.created_utc,
        record.optpipe,
    )


def page_from_comparison(comparison: Comparison, figures: Sequence[Figure], files: tuple[RawFile, ...]) -> Page:
    names = {"latency": "Lowest latency", "throughput": "Highest throughput", "efficiency": "Least energy"}
    sections = [
        _make_builds_section(comparison),
        Section("Figures", tuple(figures), "figures"),
        Section("Evidence", (Sentence("The files that the figures were computed from."),), "evidence"),
    ]
    return Page(
        "Comparison",
        summarize_comparison(comparison),
        tuple(section for section in sections if section.parts),
        highlights=tuple(
            (names[goal], comparison.best_reason[goal], comparison.row(row).label)
            for goal, row in comparison.best.items()
            if row is not None
        ),
        facts=tuple(_list_facts(comparison.environment)),
        files=files,
        optpipe=__version__,
    )


def _make_builds_section(comparison: Comparison) -> Section:
    return Section("Builds", tuple(list_comparison_parts(comparison)), "builds")


def _highlight_judged_build(record: VerdictRecord, comparison: Comparison) -> Iterator[tuple[str, str, str]]:
    rows = [row for row in comparison.rows if row.artifact == record.artifact.id and row.valid]
    percentile = "p99" if any("p99" in row.latency_ns for row in rows) else "p50"
    sample = name_sample(row.load.sample for row in rows)
    if timed := [(row.latency_ns[percentile].value, row.label) for row in rows if percentile in row.latency_ns]:
        value, label = min(timed)
        yield f"Lowest {percentile} latency", format_quantity(value, Dimension.TIME), label
    if counted := [(row.throughput_images_per_s.value, row.label) for row in rows if row.throughput_images_per_s]:
        value, label = max(counted)
        yield "Highest throughput", format_quantity(value, choose_dimension(Dimension.RATE, sample)), label
    if metered := [(row.energy_j_per_image.value, row.label) for row in rows if row.energy_j_per_image]:
        value, label = min(metered)
        energy = format_quantity(value, choose_dimension(Dimension.ENERGY, sample))
        yield "Least energy", f"≈ {energy}", label
    if size := record.artifact.size_bytes:
        yield "Engine", format_bytes(size), f"sha256 {str(record.artifact.sha256)[:12]}"


def _list_facts(environment: Environment) -> Iterator[tuple[str, str]]:
    for gpu in environment.gpus:
        yield "GPU", f"{gpu.name}, driver {gpu.driver}"
    if not environment.gpus:
        yield "GPU", "none"
    yield "CPU", f"{environment.cpu}, {environment.cpu_count} cores"
    yield "Python", environment.python
    yield from environment.packages.items()


def render_junit(record: VerdictRecord) -> str:
    """JUnit XML for CI: FAIL is a failure, INCONCLUSIVE an error, and a waived criterion is skipped with its reason."""
    counted = record.counted
    suite = Xml.Element(
        "testsuite",
        name=f"optpipe signoff {record.model}",
        tests=str(len(record.criteria)),
        failures=str(sum(one.verdict is Verdict.FAIL for one in counted)),
        errors=str(sum(one.verdict is Verdict.INCONCLUSIVE for one in counted)),
        skipped=str(len(record.waived)),
        timestamp=record.created_utc,
        time="0",
    )
    build = f"{record.model}.{record.artifact.backend}.{record.artifact.precision}"
    for one in record.criteria:
        case = Xml.SubElement(suite, "testcase", classname=build, name=one.name, time="0")
        text = f"observed {format_observed(one)}, limit {one.limit}\n{one.reason}\n{one.remedy or ''}".strip()
        if one.waived:
            Xml.SubElement(case, "skipped", message=f"WAIVED ({one.verdict}): {one.waived}")
        elif one.verdict is not Verdict.PASS:
            kind = "failure" if one.verdict is Verdict.FAIL else "error"
            Xml.SubElement(case, kind, message=one.reason, type=str(one.verdict)).text = text
    if not counted:
        case = Xml.SubElement(suite, "testcase", classname=record.model, name="verdict", time="0")
        Xml.SubElement(case, "error", message="no criteria remain to be judged", type="INCONCLUSIVE")
    root = Xml.Element("testsuites")
    root.append(suite)
    Xml.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + clean_text(Xml.tostring(root, encoding="unicode")) + "\n"
