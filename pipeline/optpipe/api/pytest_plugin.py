"""A pytest plug-in: the fixture `optpipe`, whose verdicts fail or skip a test.

    def test_ship(optpipe):
        build = optpipe.Model(net, example=images, trained=True).build("int8", calibration=calib)["int8"]
        optpipe.signoff(build, "policy.toml", data=held, metric=metric).require_pass()

FAIL fails the test. INCONCLUSIVE fails it too, or skips it with `--optpipe-inconclusive=skip`. The reasons are shown without a
traceback, and the dossier is attached to the run: as the property `optpipe_dossier` (JUnit XML), and in the terminal's summary.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import pytest

if TYPE_CHECKING:
    from optpipe.api.build import Build
    from optpipe.api.model import Model
    from optpipe.api.verdict import Verdict

Handling = Literal["fail", "skip"]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("optpipe")
    group.addoption(
        "--optpipe-inconclusive",
        choices=("fail", "skip"),
        default=None,
        help="What an INCONCLUSIVE verdict does to a test; default: the setting optpipe_inconclusive, or fail.",
    )
    group.addoption(
        "--optpipe-workspace",
        metavar="DIR",
        default=None,
        help="Workspace of the fixture optpipe; default: OPTPIPE_WORKSPACE, or .optpipe.",
    )
    parser.addini(
        "optpipe_inconclusive", "fail or skip a test whose verdict is INCONCLUSIVE", default="fail"
    )


def pytest_configure(config: pytest.Config) -> None:
    if (said := config.getini("optpipe_inconclusive")) not in ("fail", "skip"):
        raise pytest.UsageError(f"optpipe_inconclusive = {said}: choose fail or skip")


class TestedVerdict:
    """A verdict whose `require_pass` fails or skips the test; everything else is the verdict's."""

    __test__ = False

    def __init__(self, verdict: "Verdict", inconclusive: Handling) -> None:
        self.verdict, self._inconclusive = verdict, inconclusive

    def require_pass(self) -> "TestedVerdict":
        """Returns itself for PASS; otherwise ends the test with the reasons."""
        if self.verdict.outcome == "PASS":
            return self
        lines = [f"{self.verdict.outcome}: {self.verdict.dossier.report}", *self.verdict.reasons]
        text = "\n".join(lines)
        if self.verdict.outcome == "INCONCLUSIVE" and self._inconclusive == "skip":
            pytest.skip(text)
        pytest.fail(text, pytrace=False)

    def __bool__(self) -> bool:
        return bool(self.verdict)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.verdict, name)

    def __str__(self) -> str:
        return str(self.verdict)


class OptpipeFixture:
    """The library with one workspace for all tests; `signoff` attaches the dossier to the test."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        from optpipe.api.workspace import Workspace

        self._request, config = request, request.config
        self.workspace: Workspace = Workspace(config.getoption("--optpipe-workspace"))
        said = config.getoption("--optpipe-inconclusive") or config.getini("optpipe_inconclusive")
        self._inconclusive = cast("Handling", said)

    def Model(self, source: Any, example: Any = None, **options: Any) -> "Model":
        """As `optpipe.Model`, in the fixture's workspace."""
        from optpipe.api.model import Model

        return Model(source, example, **{"workspace": self.workspace, **options})

    def signoff(self, build: "Build", policy: Any, **options: Any) -> TestedVerdict:
        """As `build.signoff(policy, ...)`; the dossier becomes a property of the test and a section of its report."""
        verdict = build.signoff(policy, **options)
        item = self._request.node
        item.user_properties.append(("optpipe_dossier", str(verdict.dossier.path)))
        item.user_properties.append(("optpipe_verdict", verdict.outcome))
        item.add_report_section("call", "optpipe", str(verdict))
        return TestedVerdict(verdict, self._inconclusive)


@pytest.fixture
def optpipe(request: pytest.FixtureRequest) -> OptpipeFixture:
    """The library, in the workspace of `--optpipe-workspace`: `optpipe.signoff(build, policy).require_pass()`."""
    return OptpipeFixture(request)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Lists the verdicts of all tests, also of those that other processes ran."""
    rows = []
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", "") != "call":
                continue
            properties = dict(getattr(report, "user_properties", ()))
            if "optpipe_dossier" in properties:
                rows.append(
                    (properties["optpipe_verdict"], report.nodeid, properties["optpipe_dossier"])
                )
    if rows:
        terminalreporter.section("optpipe")
        for verdict, test, dossier in rows:
            terminalreporter.line(f"{verdict}  {test}  {Path(dossier) / 'report.html'}")
