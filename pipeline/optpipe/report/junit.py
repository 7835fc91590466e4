"""A verdict as JUnit XML, for CI: FAIL is a failure, INCONCLUSIVE an error, a waived criterion is skipped with its reason."""

from xml.etree import ElementTree as Xml

from optpipe.core.verdict import Verdict, VerdictRecord
from optpipe.report.document import clean_text, format_observed


def render_junit(record: VerdictRecord) -> str:
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
