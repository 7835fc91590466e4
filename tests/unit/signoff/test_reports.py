"""Every form of a report says the same verdict; text from outside cannot become markup."""

import hashlib
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as Xml

import pytest
from tests.fakes.console import assert_golden, text_of

from optpipe.core.comparison import Comparison, Goal
from optpipe.core.errors import BadInputError
from optpipe.core.events import SilentListener
from optpipe.core.files import Files
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
from optpipe.report.document import Figure
from optpipe.report.html import render_html
from optpipe.report.markdown import render_page
from optpipe.signoff.collect import SignoffRequest
from optpipe.signoff.dossier import read_dossier
from optpipe.signoff.judge import judge_dossier
from optpipe.signoff.junit import render_junit
from optpipe.signoff.policy import policy_from_toml
from optpipe.signoff.release import sign_off
from optpipe.signoff.reports import (
    compare_dossier,
    document_from_pipeline_run,
    document_from_verdict,
    document_from_verification,
    make_dossier_page,
    page_from_verdict,
)
from optpipe.signoff.verify import verify_dossier
from optpipe.trace.differences import Change, Difference, ProfileDifference, Side, StageDifference

POLICY = """schema = 1
name = "<script>alert('x')</script> & co"
[build]
precision = "fp16"
[[latency]]
p99 = "%s ms"
batch_size = 1
[size]
maximum = "1 KiB"
"""


def signed(workspace, folder=None, waivers=None, **options):
    policy = policy_from_toml((POLICY % "50").encode())
    wanted = SignoffRequest("digits", policy, None, waivers or {})
    return sign_off(
        wanted, workspace.store, folder, options.pop("key", None), SilentListener(), **options
    )


@pytest.fixture(scope="module")
def measured_once(make_workspace, tmp_path_factory):
    workspace = make_workspace(tmp_path_factory.mktemp("reporters") / "workspace")
    workspace.bench(workspace.artifact("fp16"), batches=(1, 4))
    return workspace


@pytest.fixture(scope="module")
def failed(measured_once):
    return signed(measured_once, figures=False)


@pytest.fixture(scope="module")
def drawn(measured_once):
    return signed(measured_once)


def page_of(signed):
    dossier = read_dossier(Files(signed[1]))
    compared = compare_dossier(dossier, judge_dossier(dossier)[1])
    return make_dossier_page(dossier, signed[0], *compared, figures=True)


def test_all_forms_say_the_same(failed):
    assert failed[0].verdict == "FAIL"
    html = (failed[1] / "report.html").read_text()
    assert "<title>FAIL: " in html
    assert (
        "Do not ship digits (onnxruntime fp16): 1 of 6 criteria is not met. Size, exact, of the file: "
        in html
    )
    markdown = (failed[1] / "report.md").read_text()
    assert markdown.startswith("## ❌ FAIL: digits: &lt;script>")
    suite = Xml.fromstring((failed[1] / "junit.xml").read_text())[0]
    assert (suite.get("failures"), suite.get("errors"), suite.get("tests")) == ("1", "0", "6")
    assert json.loads((failed[1] / "verdict.json").read_text())["verdict"] == "FAIL"
    assert verify_dossier(failed[1]).problems == ()


def test_every_report_says_what_a_seal_alone_does_not_show(failed):
    for name in ("report.html", "report.md"):
        text = (failed[1] / name).read_text()
        told = text[text.index("The seal alone does not show") :]
        for forgery in ("reordered or trimmed", "predictions were not edited", "this engine gave"):
            assert forgery in told.partition("who vouches")[0]
        assert "says whether this dossier is signed" in told
    assert "vouches" in text_of(document_from_verdict(failed[0], failed[1]))


def test_names_from_a_policy_cannot_become_markup(failed):
    html = (failed[1] / "report.html").read_text()
    assert "<script>alert" not in html
    assert "&lt;script&gt;alert(" in html


@pytest.mark.slow
def test_the_page_is_the_same_each_time_and_asks_nothing_of_the_network(drawn):
    page = render_html(page_of(drawn))
    assert page == (drawn[1] / "report.html").read_text()
    without_names = page.replace("http://www.w3.org/", "")
    assert "http://" not in without_names
    assert "https://" not in without_names
    assert "<link" in page
    assert 'href="data:,"' in page


def test_a_waiver_is_loud_everywhere(measured_once):
    found = signed(measured_once, waivers={"size.maximum": "known"}, figures=False)
    assert found[0].verdict == "PASS"
    assert "1 criterion was waived: size.maximum (FAIL)" in (found[1] / "report.html").read_text()
    assert "**WAIVED** `size.maximum` is FAIL" in (found[1] / "report.md").read_text()
    assert '<skipped message="WAIVED (FAIL): known"' in (found[1] / "junit.xml").read_text()


def test_two_dossiers_of_one_second_are_both_kept(measured_once, monkeypatch):
    signed(measured_once, figures=False)  # the policy is first used now, not in the year below
    monkeypatch.setattr(
        "optpipe.signoff.collect.get_utc_time", lambda *_: "2101-02-03T04:05:06.000000Z"
    )
    folders = [signed(measured_once, figures=False)[1] for _ in range(3)]
    name = "digits-onnxruntime-fp16-21010203T040506"
    assert [folder.name for folder in folders] == [name, f"{name}-2", f"{name}-3"]


@pytest.mark.slow
def test_every_figure_links_to_a_file_that_is_there_with_its_hash(drawn):
    page = page_of(drawn)
    figures = [
        part for section in page.sections for part in section.parts if isinstance(part, Figure)
    ]
    files = [file for figure in figures for file in figure.files]
    assert files
    for file in (*files, *page.files):
        assert hashlib.sha256((drawn[1] / file.path).read_bytes()).hexdigest() == file.sha256


def test_a_dossier_is_never_written_over(measured_once, tmp_path):
    signed(measured_once, tmp_path / "dossier", figures=False)
    with pytest.raises(BadInputError, match="already exists; choose another"):
        signed(measured_once, tmp_path / "dossier", figures=False)
    assert not list((measured_once.path / "tmp").iterdir()), "nothing half-made is left"


def test_a_signed_dossier_is_accepted_from_an_allowed_key_only(measured_once, tmp_path):
    for name in ("ours", "theirs"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True
        )
        public = (tmp_path / f"{name}.pub").read_text()
        (tmp_path / f"{name}.allowed").write_text(f"release@example.org {public}")
    found = signed(measured_once, tmp_path / "dossier", key=tmp_path / "ours", figures=False)
    assert verify_dossier(found[1]).problems == ()
    assert verify_dossier(found[1], tmp_path / "ours.allowed").problems == ()
    assert "is not in" in verify_dossier(found[1], tmp_path / "theirs.allowed").problems[0]


DOSSIER = Path("optpipe-out/dossiers/digits-onnxruntime-int8-20261122T104716")
ABOUT, BUILD = "batch 8, single-stream, compute", "builds/artifact-39697758b8e2/manifest.json"
TRUST = CriterionResult("trust.weights", Verdict.PASS, "trained weights (file)", source=BUILD)
SLOW = CriterionResult(
    "latency.p99.b8", Verdict.FAIL, f"16.0 ms [15.5 ms, 17.0 ms] exceeds the limit of 15.0 ms ({ABOUT})",
    "at most 15.0 ms", "`optpipe profile …` identifies the bottleneck", 16e6, (15.5e6, 17e6), 15e6, Dimension.TIME,
    ABOUT, "bench-20261122T104342-c59155",
)  # fmt: skip
MISSING = CriterionResult(
    "energy.maximum", Verdict.INCONCLUSIVE, "not measured: this build", "at most 54 mJ/image", "optpipe bench digits",
    threshold=0.054, unit=Dimension.ENERGY,
)  # fmt: skip
LARGE = CriterionResult(
    "size.maximum", Verdict.FAIL, "189 KiB exceeds the limit of 100 KiB", "at most 100 KiB",
    "use a lower precision for a smaller engine", 193368.0, None, 102400.0, Dimension.SIZE, source=BUILD,
    waived="known, ticket 12",
)  # fmt: skip
RECORD = VerdictRecord(
    Verdict.FAIL, DOSSIER.name, "digits",
    JudgedArtifact("39697758b8e2", "onnxruntime", "int8", "961f7dde0960", 193368, "file"),
    PolicyReference("release <1> | x", "67581c3da897"), (TRUST, SLOW, MISSING, LARGE),
    (Note("int8-alone", "no higher precision was measured", "optpipe bench digits --precision fp32"),), None,
    ("the engine's sha256 is no longer 961f7dde0960",), ("bench-20261122T104342-c59155",), "2026-11-22T10:47:16+00:00",
    "0.1.0",
)  # fmt: skip
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
    problems = ("verdict.json: changed",)
    return verification(
        intact=False, as_sealed=as_sealed, problems=problems, verdict=None, recomputed=None
    )


def report(record):
    nothing = Comparison((), dict.fromkeys(Goal), dict.fromkeys(Goal, "nothing"))
    return page_from_verdict(record, nothing, (), (), (), ())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("signoff", lambda: text_of(document_from_verdict(RECORD, DOSSIER), width=140)),
        ("signoff-narrow", lambda: text_of(document_from_verdict(RECORD, DOSSIER), width=80)),
        ("run", lambda: text_of(document_from_pipeline_run(STEPS, PASSED, DOSSIER), width=140)),
        ("verify", lambda: text_of(document_from_verification(verification()), width=140)),
        (
            "verify-signed",
            lambda: text_of(
                document_from_verification(verification(signature="signed")), width=140
            ),
        ),
        (
            "verify-forged",
            lambda: text_of(document_from_verification(broken(as_sealed=True)), width=140),
        ),
        (
            "verify-changed",
            lambda: text_of(document_from_verification(broken(as_sealed=False)), width=140),
        ),
        ("report-fail", lambda: render_page(report(RECORD))),
        ("report-pass", lambda: render_page(report(PASSED))),
        ("report-junit", lambda: render_junit(RECORD)),
    ],
)
def test_reports_are_as_they_were_read_and_approved(name, text):
    assert_golden(text(), f"{name}.txt")


def test_a_page_has_the_difference_of_its_profile() -> None:
    side = Side(1.0, 2000.0, 10.0)
    row = Difference("time", side, side, 0.0, (-5.0, 5.0), Change.SAME)
    stage = StageDifference(
        "a", "b", ("batch size: 1 before, 8 after",), True, (5, 5), (row,), (), (), ()
    )
    difference = ProfileDifference("profile-1", (stage,), ("preprocess (before)",))
    page = render_html(
        page_from_verdict(RECORD, Comparison((), {}, {}), (), (), (), (), difference)
    )
    for words in ("The profile against profile-1", "batch size: 1 before, 8 after", "preprocess"):
        assert words in page
