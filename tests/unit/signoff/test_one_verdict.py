"""What is waived, counted, and met means the same to the judge, every report, `require_pass`, and the independent verifier."""

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree as Xml

from hypothesis import given
from hypothesis import strategies as st

from optpipe.core.comparison import Comparison
from optpipe.core.errors import BadInputError, GateError
from optpipe.core.verdict import (
    CriterionResult,
    JudgedArtifact,
    PolicyReference,
    Verdict,
    VerdictRecord,
)
from optpipe.report.html import render_html
from optpipe.report.markdown import render_page
from optpipe.signoff.bill import _summarize as summarize_bill
from optpipe.signoff.judge import decide_overall_verdict, require_waivable
from optpipe.signoff.junit import render_junit
from optpipe.signoff.reports import page_from_verdict, summarize_verdict
from optpipe.signoff.verify import require_pass

VERIFIER = runpy.run_path(str(Path(__file__).parents[3] / "verifier" / "verify_dossier.py"))
REASONS = (
    "agreed with the client", "x", "é", "中", "2 GPUs are missing",
    "", " ", "\u200b", "\u2060", "\u115f", "\u3164 \u3164", "…", "1 + 1", "\x1b[31mno", "a\nb", "\u202eabc",
)  # fmt: skip
"""Reasons that tell a reader something, and others that are invisible, have no letter, or more than a line."""


@st.composite
def draw_cases(draw):
    """Verdicts by the names of criteria, and waivers of some of them."""
    judged = draw(st.lists(st.sampled_from([*Verdict]), min_size=1, max_size=6))
    verdicts = {f"size.c{number}": verdict for number, verdict in enumerate(judged)}
    some = st.dictionaries(st.sampled_from([*verdicts]), st.sampled_from(REASONS))
    return verdicts, draw(some)


def is_accepted(waivers, names):
    """Whether optpipe takes the waivers of a request."""
    policy: Any = SimpleNamespace(criteria=[SimpleNamespace(name=name) for name in names])
    try:
        require_waivable(waivers, policy)
    except BadInputError:
        return False
    return True


def make_record(verdicts, waivers):
    criteria = tuple(
        CriterionResult(name, verdict, f"because of {name}", waived=waivers.get(name))
        for name, verdict in verdicts.items()
    )
    return VerdictRecord(
        verdict=decide_overall_verdict(criteria),
        dossier_name="net-torch-fp16-20260101T000000",
        model="net",
        artifact=JudgedArtifact("0" * 12, "torch", "fp16", None, None, None),
        policy=PolicyReference("policy", "0" * 64),
        criteria=criteria,
        notes=(),
        baseline=None,
        expires_if=(),
        runs=(),
        created_utc="2026-01-01T00:00:00Z",
        optpipe="0",
    )


def passes_gate(record):
    try:
        require_pass(Path("dossier"), record, None, "deploy it")
    except GateError:
        return False
    return True


@given(draw_cases())
def test_judge_report_gate_and_verifier_agree(case):
    verdicts, waivers = case
    accepted = is_accepted(waivers, verdicts)
    assert accepted == all(map(VERIFIER["is_reason"], waivers.values()))
    if not accepted:
        return
    record = make_record(verdicts, waivers)
    assert str(record.verdict) == VERIFIER["decide"](
        {name: str(verdict) for name, verdict in verdicts.items()}, waivers
    )

    counted = [verdict for name, verdict in verdicts.items() if name not in waivers]
    suite = Xml.fromstring(render_junit(record))[0]
    told = {name: int(suite.get(name)) for name in ("failures", "errors", "skipped")}
    assert told["skipped"] == len(waivers) == len(record.waived)
    assert told["failures"] == counted.count(Verdict.FAIL)
    assert told["errors"] == counted.count(Verdict.INCONCLUSIVE) + (not counted)
    met = record.verdict is Verdict.PASS
    assert met == (not told["failures"] and not told["errors"])
    assert met == summarize_verdict(record).startswith("Ship ")

    page = page_from_verdict(record, Comparison((), {}, {}), (), (), (), ())
    tally = dict(page.tally)
    assert tally.pop("WAIVED", 0) == len(waivers) == len(page.alerts)
    assert tally == {str(each): counted.count(each) for each in Verdict if each in counted}
    for text in (render_html(page), render_page(page)):
        assert all(reason in text for reason in waivers.values())

    assert passes_gate(record) == (met and not waivers) == (summarize_bill(record) == "PASSED")
