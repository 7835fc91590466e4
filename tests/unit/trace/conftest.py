"""Golden traces as analyses."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.golden.nsys_export import Recording

from optpipe.trace.findings.report import Profile, profile_from_trace
from optpipe.trace.recording.frames import Trace
from optpipe.trace.recording.read import trace_from_sqlite

SAMPLE = Path(__file__).parents[2] / "golden" / "traces" / "h200-resnet50-fp16-b8.sqlite"


@pytest.fixture
def read(tmp_path: Path) -> Callable[[Recording], Trace]:
    """Writes a recording as an export and reads it back."""
    return lambda recording: trace_from_sqlite(recording.write(tmp_path / "trace.sqlite"))


@pytest.fixture
def judged(read: Callable[[Recording], Trace]) -> Callable[[Recording], Profile]:
    return lambda recording: profile_from_trace(read(recording))


@pytest.fixture(scope="session")
def sample() -> Profile:
    return profile_from_trace(trace_from_sqlite(SAMPLE))
