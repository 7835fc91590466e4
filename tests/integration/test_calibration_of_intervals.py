"""The audit of `benchmarks/calibration_of_intervals.py` with fewer draws: same simulations, same thresholds, fixed seeds."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "calibration_of_intervals.py"
PARTS = [
    "percentiles",
    "processes",
    "criteria",
    "signoffs",
    "two_speeds",
    "looks",
    "tables",
    "other_runs",
    "requests",
    "accuracy",
    "tasks",
    "throughput",
    "interleaving",
    "validity",
    "server",
    "tuning",
]


@pytest.fixture(scope="module")
def audit():
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    module = sys.modules[SCRIPT.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_nothing_errs_more_often_than_it_claims(audit, part):
    assert set(audit.PARTS) == set(PARTS)
    rows = audit.simulated([part], scale=0.1)[part]
    assert rows
    assert not [row.text for row in rows if not row.kept]
