"""Golden traces as analyses."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.golden.nsys_export import Recording

from optpipe.trace.analysis import Analysis, analysis_from_trace, select_measured_part
from optpipe.trace.read import Trace, trace_from_sqlite
from optpipe.trace.report import TraceProfile, profile_from_trace
from optpipe.trace.roofline import GraphCosts
from optpipe.trace.rules import StageFacts

SAMPLE = Path(__file__).parents[2] / "golden" / "traces" / "h200-resnet50-fp16-b8.sqlite"
NO_FACTS = StageFacts()


@dataclass(frozen=True)
class Judged:
    """A profile, whose parts are also parts of this, with the analyses that it was made of."""

    whole: Analysis
    measured: Analysis
    profile: TraceProfile

    def __getattr__(self, name: str) -> Any:
        return getattr(self.profile, name)


def judge(
    trace: Trace,
    range_name: str | None = None,
    facts: StageFacts = NO_FACTS,
    graph: GraphCosts | None = None,
) -> Judged:
    whole = analysis_from_trace(trace)
    return Judged(
        whole,
        select_measured_part(whole, range_name),
        profile_from_trace(whole, range_name, facts, graph),
    )


@pytest.fixture
def read(tmp_path: Path) -> Callable[[Recording], Trace]:

    def read(recording: Recording) -> Trace:
        (tmp_path / "trace.sqlite").unlink(missing_ok=True)
        return trace_from_sqlite(recording.write(tmp_path / "trace.sqlite"))

    return read


@pytest.fixture
def judged(read: Callable[[Recording], Trace]) -> Callable[[Recording], Judged]:
    return lambda recording: judge(read(recording))


@pytest.fixture(scope="session")
def sample() -> Judged:
    return judge(trace_from_sqlite(SAMPLE))
