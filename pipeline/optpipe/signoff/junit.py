"""The verdict as JUnit XML."""

from xml.etree import ElementTree as Xml

from optpipe.core.verdict import Verdict, VerdictRecord
from optpipe.report.document import clean_text, format_observed


def render_junit(record: VerdictRecord) -> str:
    """JUnit XML for CI: FAIL is a failure, INCONCLUSIVE an error, and a waived criterion is skipped with its reason."""
    counted = record.counted
    undecided = sum(criterion.verdict is Verdict.INCONCLUSIVE for criterion in counted)
    unjudged = 0 if counted else 1  # one more case
    root = Xml.Element("testsuites")
    suite = Xml.SubElement(
        root,
        "testsuite",
        name=f"optpipe signoff {record.model}",
        tests=str(len(record.criteria) + unjudged),
        failures=str(sum(criterion.verdict is Verdict.FAIL for criterion in counted)),
        errors=str(undecided + unjudged),
        skipped=str(len(record.waived)),
        timestamp=record.created_utc,
        time="0",
    )
    if record.loosened:
        properties = Xml.SubElement(suite, "properties")
        for limit in record.loosened:
            Xml.SubElement(
                properties, "property", name=f"loosened.{limit.name}", value=limit.message
            )
    build = f"{record.model}.{record.artifact.backend}.{record.artifact.precision}"
    for criterion in record.criteria:
        case = Xml.SubElement(suite, "testcase", classname=build, name=criterion.name, time="0")
        about = f" ({criterion.about})" if criterion.about else ""
        observed = f"observed {format_observed(criterion)}{about}, limit {criterion.limit}"
        text = "\n".join(filter(None, (observed, criterion.reason, criterion.remedy)))
        if not criterion.counts:
            Xml.SubElement(
                case, "skipped", message=f"WAIVED ({criterion.verdict}): {criterion.waived}"
            )
        elif criterion.verdict is not Verdict.PASS:
            kind = "failure" if criterion.verdict is Verdict.FAIL else "error"
            Xml.SubElement(
                case, kind, message=criterion.reason, type=str(criterion.verdict)
            ).text = text
    if unjudged:
        case = Xml.SubElement(suite, "testcase", classname=record.model, name="verdict", time="0")
        Xml.SubElement(
            case, "error", message="no criteria remain to be judged", type="INCONCLUSIVE"
        )
    Xml.indent(root)
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        + clean_text(Xml.tostring(root, encoding="unicode"))
        + "\n"
    )
