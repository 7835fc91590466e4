"""A verdict as JUnit XML, for CI: FAIL is a failure, INCONCLUSIVE an error, a waived criterion is skipped with its reason."""

from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree as Xml

from optpipe.reporters.records import format_observed


def render_junit(verdict: Mapping[str, Any]) -> str:
    """The XML text."""
    criteria = verdict["criteria"]
    counted = [one for one in criteria if not one["waived"]]
    suite = Xml.Element(
        "testsuite",
        name=f"optpipe signoff {verdict['model']}",
        tests=str(len(criteria)),
        failures=str(sum(one["verdict"] == "FAIL" for one in counted)),
        errors=str(sum(one["verdict"] == "INCONCLUSIVE" for one in counted)),
        skipped=str(len(criteria) - len(counted)),
        timestamp=str(verdict["created_utc"]),
        time="0",
    )
    for one in criteria:
        _add_case(suite, verdict, one)
    if not counted:
        case = Xml.SubElement(suite, "testcase", classname=str(verdict["model"]), name="verdict", time="0")
        Xml.SubElement(case, "error", message="no criteria remain to be judged", type="INCONCLUSIVE")
    root = Xml.Element("testsuites")
    root.append(suite)
    Xml.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + Xml.tostring(root, encoding="unicode") + "\n"


def _add_case(suite: Xml.Element, verdict: Mapping[str, Any], one: Mapping[str, Any]) -> None:
    build = verdict["artifact"]
    name = f"{verdict['model']}.{build['backend']}.{build['precision']}"
    case = Xml.SubElement(suite, "testcase", classname=name, name=one["name"], time="0")
    text = f"observed {format_observed(one)}, limit {one['limit']}\n{one['reason']}\n{one['remedy'] or ''}".strip()
    if one["waived"]:
        Xml.SubElement(case, "skipped", message=f"WAIVED ({one['verdict']}): {one['waived']}")
    elif one["verdict"] == "FAIL":
        Xml.SubElement(case, "failure", message=one["reason"], type="FAIL").text = text
    elif one["verdict"] == "INCONCLUSIVE":
        Xml.SubElement(case, "error", message=one["reason"], type="INCONCLUSIVE").text = text
