"""Figures that records of earlier versions lack: load time, which the worker sees, and power, which follows from the readings."""

import importlib
import sys
from dataclasses import replace
from time import sleep
from typing import Any

import numpy as np
import polars as pl
import pytest
from tests.fakes.dossiers import examine

from optpipe.core.errors import BadInputError
from optpipe.core.load import LoadSpec
from optpipe.core.measurement import MACHINE_COLUMNS, ProcessFigure
from optpipe.core.metrics.contract import Metric
from optpipe.core.metrics.measured import BUILD_TIME, ENERGY, LOAD_TIME, POWER
from optpipe.core.metrics.registry import OWN, compute_recorded_figures, recompute_figures
from optpipe.core.metrics.sections import SECTIONS
from optpipe.core.quantity import Dimension, Estimate, format_quantity
from optpipe.core.verdict import Verdict
from optpipe.measure.figures import SampledWindow
from optpipe.measure.worker.loading import LoadClock, draw_smallest_batch
from optpipe.measure.worker.messages import SessionSpec
from optpipe.signoff.policy import policy_from_toml
from optpipe.signoff.verify import check_dossier

SECONDS = 20


def make_window(watts: float = 250.0) -> SampledWindow:
    times_ns = np.arange(0, SECONDS * 10**9, 2 * 10**8)
    wobble = 1 + 0.01 * np.sin(np.arange(len(times_ns)))
    joules = np.concatenate([[0.0], np.cumsum(0.2 * watts * wobble)[:-1]])
    machine: dict[str, Any] = {name: [None] * len(times_ns) for name in MACHINE_COLUMNS}
    machine |= {"time_ns": times_ns, "gpu_energy_mj": (1e3 * joules).astype(int)}
    ends = np.arange(1, 2001) * (SECONDS * 10**9 // 2000)
    samples = {"start_ns": ends - 10**6, "scheduled_ns": ends - 10**6, "end_ns": ends}
    frame = pl.DataFrame(samples | {"images": np.full(len(ends), 4)})
    return SampledWindow(LoadSpec(4), frame, pl.DataFrame(machine))


def estimate(metric: Metric, window: SampledWindow) -> Estimate:
    found = metric.compute(window)
    assert isinstance(found, Estimate)
    return found


def test_power_and_energy_are_one_reading():
    window = make_window()
    power, energy = (estimate(each, window) for each in (POWER, ENERGY))
    assert power.value == pytest.approx(250, rel=0.01)
    assert energy.value == pytest.approx(power.value * window.seconds / window.images)
    assert power.interval is not None
    assert power.interval[0] <= power.value <= power.interval[1]


def test_without_a_counter_power_says_why():
    window = make_window()
    found = compute_recorded_figures(replace(window, machine=pl.DataFrame()), {})[POWER.name]
    assert found.value is None
    assert "NVIDIA GPU" in found.why_not


def test_records_of_earlier_versions_stay_as_they_are():
    again = compute_recorded_figures(make_window(), {})
    assert recompute_figures({}, again) == {}


def test_a_forged_power_is_recomputed_and_a_load_time_is_kept():
    forged = {
        POWER.name: ProcessFigure(1.0, Dimension.POWER, OWN),
        LOAD_TIME.name: ProcessFigure(5e8, Dimension.TIME, OWN),
    }
    found = recompute_figures(forged, compute_recorded_figures(make_window(), forged))
    assert found[POWER.name].value == pytest.approx(250, rel=0.01)
    assert found[LOAD_TIME.name] == forged[LOAD_TIME.name]


@pytest.mark.parametrize(
    "figure",
    [
        ProcessFigure(-1.0, Dimension.TIME, OWN),
        ProcessFigure(1.0, Dimension.SIZE, OWN),
        ProcessFigure(1.0, Dimension.TIME, "optpipe-other 1.0"),
    ],
)
def test_an_impossible_load_time_is_dropped(figure):
    assert recompute_figures({LOAD_TIME.name: figure}, {}) == {}


def judge(workspace, folder, section, limit):
    """The only criterion's result, on which the independent verifier agrees, and what that one calls stated."""
    policy = f'schema = 1\n[{section}]\nmaximum = "{limit}"\nbatch_size = 1\n'
    record, dossier = workspace.sign_off(policy, folder)
    found, verdict = examine(dossier)
    assert (found.differs, found.open, verdict) == ([], [], record.verdict)
    assert check_dossier(dossier).problems == ()
    criterion = next(each for each in record.criteria if each.name.startswith(section))
    return criterion, "\n".join(found.stated)


@pytest.mark.parametrize(("limit", "verdict"), [("1 s", Verdict.PASS), ("10 ms", Verdict.FAIL)])
def test_both_verifiers_judge_a_load_time(workspace, tmp_path, limit, verdict):
    workspace.bench(workspace.artifact("fp32"), load_ns=5e7)
    criterion, stated = judge(workspace, tmp_path / "dossier", LOAD_TIME.name, limit)
    assert criterion.verdict is verdict
    assert criterion.ci[0] < 5.1e7 < criterion.ci[1]
    assert LOAD_TIME.name in stated


@pytest.mark.parametrize(("limit", "verdict"), [("1 kW", Verdict.PASS), ("10 W", Verdict.FAIL)])
def test_both_verifiers_recompute_a_power(workspace, tmp_path, limit, verdict):
    blank = {POWER.name: ProcessFigure(None, Dimension.POWER, OWN)}
    workspace.bench(workspace.artifact("fp32"), power=300.0, count=2000, figures=blank)
    criterion, _ = judge(workspace, tmp_path / "dossier", POWER.name, limit)
    assert criterion.verdict is verdict
    assert criterion.ci[0] < 300 < criterion.ci[1]


@pytest.mark.parametrize("metric", [LOAD_TIME, POWER])
def test_a_record_without_it_is_inconclusive(workspace, tmp_path, metric):
    workspace.bench(workspace.artifact("fp32"))
    limit = format_quantity(1e9, metric.dimension)
    criterion, _ = judge(workspace, tmp_path / "dossier", metric.name, limit.replace(",", ""))
    assert criterion.verdict is Verdict.INCONCLUSIVE
    assert "not measured" in criterion.reason


def test_a_build_time_is_in_no_table_of_a_policy():
    assert not any(BUILD_TIME in each.metrics.values() for each in SECTIONS.values())
    with pytest.raises(BadInputError, match="decides nothing"):
        policy_from_toml(b'schema = 1\n[metrics.build_time]\nmaximum = "1 s"\n')


def test_imports_do_not_count(tmp_path, monkeypatch):
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(0.5)\n")
    monkeypatch.syspath_prepend(tmp_path)
    clock = LoadClock()
    bootstrap: Any = vars(importlib)["_bootstrap"]
    usual = bootstrap._find_and_load
    with clock.run():
        importlib.import_module("slow_to_import")
        sleep(0.05)
    del sys.modules["slow_to_import"]
    assert 0.05 <= clock.elapsed_ns / 1e9 < 0.5
    assert bootstrap._find_and_load is usual


def test_the_smallest_batch_repeats_a_small_pool():
    spec = SessionSpec("", {}, {}, {}, smallest=3, input_axes={"x": 1, "scale": None})
    batch = draw_smallest_batch({"x": np.arange(8).reshape(2, 4), "scale": np.array([7, 7])}, spec)
    assert batch["x"].shape == (4, 3)
    assert batch["x"][:, 2].tolist() == batch["x"][:, 0].tolist()
    assert batch["scale"] == 7
