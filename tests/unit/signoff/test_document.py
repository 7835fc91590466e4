"""What signoff, verify and run print, and the reports in text, whole."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.fakes.console import text_of
from tests.fakes.golden import assert_golden

from optpipe.core.comparison import Comparison, Goal
from optpipe.core.quantity import Dimension
from optpipe.core.verdict import (
    CriterionResult,
    JudgedArtifact,
    Note,
    PolicyReference,
    StepRecord,
    Verdict,
    VerdictRecord,
    VerificationRecord,
)
from optpipe.report.html import render_html
from optpipe.report.markdown import render_page
from optpipe.signoff.document import (
    document_from_pipeline_run,
    document_from_verdict,
    document_from_verification,
    page_from_verdict,
    render_junit,
)

DOSSIER = Path("optpipe-out/dossiers/digits-onnxruntime-int8-20261122T104716")
ABOUT, BUILD = "batch 8, single-stream, compute", "builds/artifact-39697758b8e2/manifest.json"
TRUST = CriterionResult("trust.weights", Verdict.PASS, "trained weights (file)", source=BUILD)
SLOW = CriterionResult(
    "latency.p99.b8",
    Verdict.FAIL,
    f"16.0 ms [15.5 ms, 17.0 ms] exceeds the limit of 15.0 ms ({ABOUT})",
    "at most 15.0 ms",
    "`optpipe profile …` identifies the bottleneck",
    16e6,
    (15.5e6, 17e6),
    15e6,
    Dimension.TIME,
    ABOUT,
    "bench-20261122T104342-c59155",
)
MISSING = CriterionResult(
    "energy.maximum",
    Verdict.INCONCLUSIVE,
    "not measured: this build",
    "at most 54 mJ/image",
    "optpipe bench digits",
    threshold=0.054,
    unit=Dimension.ENERGY,
)
LARGE = CriterionResult(
    "size.maximum",
    Verdict.FAIL,
    "189 KiB exceeds the limit of 100 KiB",
    "at most 100 KiB",
    "use a lower precision for a smaller engine",
    193368.0,
    None,
    102400.0,
    Dimension.SIZE,
    source=BUILD,
    waived="known, ticket 12",
)
RECORD = VerdictRecord(
    Verdict.FAIL,
    DOSSIER.name,
    "digits",
    JudgedArtifact("39697758b8e2", "onnxruntime", "int8", "961f7dde0960", 193368, "file"),
    PolicyReference("release <1> | x", "67581c3da897"),
    (TRUST, SLOW, MISSING, LARGE),
    (Note("int8-alone", "no higher precision was measured", "optpipe bench digits --precision fp32"),),
    None,
    ("the engine's sha256 is no longer 961f7dde0960",),
    ("bench-20261122T104342-c59155",),
    "2026-11-22T10:47:16+00:00",
    "0.1.0",
)
PASSED = replace(RECORD, verdict=Verdict.PASS, criteria=(TRUST,), notes=())
STEPS = (
    StepRecord("build", "done", 12.31),
    StepRecord("evaluate", "resumed", runs=("evaluate-1",)),
    StepRecord("profile", "skipped", 0.02, reason="nsys is not installed"),
)


def verification(**changes):
    found = VerificationRecord(
        str(DOSSIER),
        intact=True,
        as_sealed=True,
        problems=(),
        unbacked=(f"trust.weights: stated by {BUILD}",),
        not_compared=("report.html: its figures were drawn by altair 5 (here: 6)",),
        verdict=Verdict.PASS,
        recomputed=PASSED,
        signature="not signed",
        files=34,
        size_bytes=440_000,
    )
    return replace(found, **changes)


def broken(*, as_sealed):
    return verification(
        intact=False, as_sealed=as_sealed, problems=("verdict.json: changed",), verdict=None, recomputed=None
    )


def report(record):
    nothing = Comparison((), dict.fromkeys(Goal), dict.fromkeys(Goal, "nothing"))
    return page_from_verdict(record, nothing, (), (), None, ())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("signoff", lambda: text_of(document_from_verdict(RECORD, DOSSIER), width=140)),
        ("signoff-narrow", lambda: text_of(document_from_verdict(RECORD, DOSSIER), width=80)),
        ("run", lambda: text_of(document_from_pipeline_run(STEPS, PASSED, DOSSIER), width=140)),
        ("verify", lambda: text_of(document_from_verification(verification()), width=140)),
        ("verify-signed", lambda: text_of(document_from_verification(verification(signature="signed")), width=140)),
        ("verify-forged", lambda: text_of(document_from_verification(broken(as_sealed=True)), width=140)),
        ("verify-changed", lambda: text_of(document_from_verification(broken(as_sealed=False)), width=140)),
        ("report-fail", lambda: render_page(report(RECORD))),
        ("report-pass", lambda: render_page(report(PASSED))),
        ("report-junit", lambda: render_junit(RECORD)),
    ],
)
def test_reports_are_as_they_were_read_and_approved(name, text):
    assert_golden(text(), f"{name}.txt")


@pytest.mark.parametrize(
    "render",
    [
        lambda record: text_of(document_from_verdict(record, Path("a\x1b[2Jb")), width=140),
        lambda record: render_page(report(record)),
        lambda record: render_html(report(record)),
        render_junit,
    ],
)
def test_no_control_character_of_a_file_leaves_a_report(render):
    odd = replace(SLOW, name="latency.p99.b8\x1b]0;x\x07", reason="slow\x9b2J", remedy="\x08run", source="\x00")
    shown = render(replace(RECORD, model="digits\x1b[31m", criteria=(odd,)))
    assert "\\x1b" in shown
    assert all(each.isprintable() or each == "\n" for each in shown)
