"""A new metric is one class, here or in another distribution: measured, shown, limited by a policy, judged, and verified."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest
from tests.fakes.console import text_of
from tests.fakes.dossiers import edit, examine, seal_anew
from tests.fakes.extensions.optpipe_spread import Spread

from optpipe.api.bench import Bench
from optpipe.core.entries import Environment
from optpipe.core.errors import BadInputError, MissingError
from optpipe.core.load import LoadSpec
from optpipe.core.measurement import ProcessFigure
from optpipe.core.metrics import registry
from optpipe.core.metrics.contract import Metric, Window
from optpipe.core.quantity import Dimension, format_quantity
from optpipe.core.verdict import Verdict
from optpipe.measure.document import document_from_bench
from optpipe.measure.figures import SampledWindow, measurements_from_run
from optpipe.measure.groups import group_processes, summarize_group
from optpipe.measure.pair import BenchRecord
from optpipe.signoff.collect import require_metrics
from optpipe.signoff.policy import policy_from_toml
from optpipe.signoff.verify import check_dossier


class Raising(Spread):
    def compute(self, window: Window) -> float:
        raise ZeroDivisionError("nothing to divide")


class NotANumber(Spread):
    def compute(self, window: Window) -> float:
        return float("nan")


class Negative(Spread):
    def compute(self, window: Window) -> float:
        return -1.0


class Wordy(Spread):
    def compute(self, window: Window) -> Any:
        return [1.0, 2.0]


class Leaving(Spread):
    def compute(self, window: Window) -> float:
        raise SystemExit(3)


POLICY = """schema = 1
[metrics.spread]
maximum = "%s"
batch_size = 1
"""
NAME = "metrics.spread.maximum.b1"


@pytest.fixture
def plug_in(monkeypatch):
    """Registers a metric as a distribution does."""

    def register(plugin):
        metric = registry.read_metric_plugin("spread", plugin)
        monkeypatch.setitem(registry.PLUGINS, "spread", metric)
        monkeypatch.setitem(registry.METRICS, "spread", metric)

    def remove():
        monkeypatch.delitem(registry.PLUGINS, "spread")
        monkeypatch.delitem(registry.METRICS, "spread")

    return SimpleNamespace(add=register, remove=remove)


def make_window(latencies_ns):
    ends = np.cumsum(latencies_ns)
    samples = {"start_ns": ends - latencies_ns, "scheduled_ns": ends - latencies_ns, "end_ns": ends}
    return SampledWindow(LoadSpec(1), pl.DataFrame(samples), pl.DataFrame())


BLANK = {"spread": ProcessFigure(None, Dimension.TIME, "an unknown distribution")}


def sign_off(workspace, folder, limit="3 ms", **how):
    """The criterion's result and the dossier, on which the independent verifier agrees."""
    workspace.bench(workspace.artifact("fp32"), figures=BLANK, **how)
    record, dossier = workspace.sign_off(POLICY % limit, folder)
    found, verdict = examine(dossier)
    assert (found.differs, found.open, verdict) == ([], [], record.verdict)
    assert check_dossier(dossier).problems == ()
    return next(one for one in record.criteria if one.name == NAME), dossier


def test_a_plug_in_s_figure_is_computed_from_the_raw_samples(plug_in):
    plug_in.add(Spread)
    latencies_ns = np.full(1000, 1_000_000)
    latencies_ns[-20:] = 3_000_000
    found = registry.compute_recorded_figures(make_window(latencies_ns), {})["spread"]
    assert (found.value, found.unit, found.why_not) == (2_000_000.0, Dimension.TIME, None)
    found = registry.compute_recorded_figures(make_window(latencies_ns[:9]), {})["spread"]
    assert (found.value, found.why_not) == (None, "9 queries are fewer than 100")


@pytest.mark.parametrize("plugin", [Raising, NotANumber, Negative, Wordy, Leaving])
def test_a_plug_in_that_raises_or_gives_no_number_withholds_its_figure(plug_in, plugin):
    plug_in.add(plugin)
    found = registry.compute_recorded_figures(make_window(np.full(1000, 10**6)), {})["spread"]
    assert found.value is None
    assert "spread" in found.why_not


@pytest.mark.slow  # several dossiers of ten processes, judged by both verifiers
def test_a_policy_limits_a_plug_in_s_metric(plug_in, workspace, tmp_path):
    plug_in.add(Spread)
    criterion, _ = sign_off(workspace, tmp_path / "first", "1000 s", processes=10)
    assert criterion.verdict is Verdict.PASS
    low, high = criterion.ci
    assert 0 < low < criterion.observed < high
    for limit_ns, verdict in ((low / 3, Verdict.FAIL), (criterion.observed, Verdict.INCONCLUSIVE)):
        record, _ = workspace.sign_off(POLICY % f"{limit_ns} ns", tmp_path / verdict)
        assert next(one for one in record.criteria if one.name == NAME).verdict is verdict


def test_bench_and_the_library_show_a_plug_in_s_metric(plug_in, workspace):
    plug_in.add(Spread)
    run = workspace.bench(workspace.artifact("fp32"), figures=BLANK, processes=3, seed=31)
    recorded = measurements_from_run(run)
    groups = tuple(map(summarize_group, group_processes(recorded)))
    rows = tuple(one.measurement for one in recorded)
    record = BenchRecord(str(run.path), run.name, rows, Environment(), 0, groups)
    value = groups[0].figures["spread"].estimate.value
    text = text_of(document_from_bench(record), width=240)
    assert "spread" in text
    assert format_quantity(value, Dimension.TIME) in text
    frame = Bench(None, record).frame()
    assert frame["spread"][0] == pytest.approx(value)
    assert frame["spread_low"][0] < value < frame["spread_high"][0]


@pytest.mark.slow
def test_a_dossier_is_verified_without_the_plug_in(plug_in, workspace, tmp_path):
    plug_in.add(Spread)
    _, dossier = sign_off(workspace, tmp_path / "one", seed=3)
    plug_in.remove()
    assert check_dossier(dossier).problems == ()
    with pytest.raises(MissingError, match="spread, a metric that is not installed"):
        require_metrics(policy_from_toml((POLICY % "1 ms").encode()))


@pytest.mark.slow
@pytest.mark.parametrize(("plugin", "seed"), [(Raising, 11), (NotANumber, 12)])
def test_a_withheld_figure_never_passes(plug_in, workspace, tmp_path, plugin, seed):
    plug_in.add(plugin)
    criterion, _ = sign_off(workspace, tmp_path / "one", "1000 s", seed=seed)
    assert criterion.verdict is Verdict.INCONCLUSIVE
    assert "spread" in criterion.reason


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value"), [("spread", -1.0), ("p99", 1.0), ("throughput", 1.0), ("mean_p50", 1.0)]
)
def test_no_figure_of_a_plug_in_stands_for_another(workspace, tmp_path, name, value):
    """Both verifiers refuse a dossier in which a plug-in's figure is impossible, or called as one of optpipe."""
    workspace.bench(workspace.artifact("fp32"))
    _, dossier = workspace.sign_off('schema = 1\n[latency]\np99 = "9 s"\n', tmp_path / "one")
    (record,) = dossier.glob("runs/*/measurements.json")
    forged = {name: {"value": value, "unit": "ns", "distribution": "forged 1", "why_not": None}}
    edit(record, "measurements", 0, "figures", value=forged)
    seal_anew(dossier)
    assert check_dossier(dossier).problems
    assert examine(dossier)[0].differs


@pytest.mark.slow
def test_figures_of_another_unit_are_not_judged(plug_in, workspace, tmp_path):
    plug_in.add(Spread)
    workspace.bench(workspace.artifact("fp32"), figures=BLANK, seed=21)
    plug_in.remove()
    policy = (POLICY % "1000 GiB").replace(".b1", "")
    record, dossier = workspace.sign_off(policy, tmp_path / "one")
    found, verdict = examine(dossier)
    assert (found.differs, verdict) == ([], record.verdict)
    assert {one.name: one.verdict for one in record.criteria}[NAME] is Verdict.INCONCLUSIVE


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"name": "other"}, "both must be the same"),
        ({"name": "Spread"}, "both must be the same"),
        ({"dimension": "ms"}, "no dimension"),
        ({"has_speeds": False}, "sets has_speeds"),
        ({"is_optional": True}, "sets is_optional"),
        ({"compute": Metric.compute}, "no compute"),
        ({"read": lambda _self, _measured: None}, "sets read"),
    ],
)
def test_a_plug_in_that_breaks_the_contract_is_refused(changes, problem):
    with pytest.raises(BadInputError, match=problem):
        registry.read_metric_plugin("spread", type("Broken", (Spread,), changes))


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ('[metrics.spread]\nminimum = "1 ms"', "better when lower; limit its maximum"),
        ('[metrics.spread]\nmaximum = "1 GiB"', "not a unit of a time"),
        ('[metrics.spread]\nmaximun = "1 ms"', "did you mean maximum"),
        ("[metrics.spread]\nbatch_size = 1", "sets no limit"),
        ('[metrics.p99]\nmaximum = "1 ms"', "metric of optpipe"),
        ("[metrics]\nspread = 3", "expected a table"),
        ("metrics = 3", "expected a table"),
        ('[metrics.spread]\nmaximum = "1 ms"\nscenario = "server"', "requires rate"),
    ],
)
def test_a_wrong_table_is_refused_with_its_place(plug_in, table, problem):
    plug_in.add(Spread)
    with pytest.raises(BadInputError, match=problem):
        policy_from_toml(f"schema = 1\n{table}\n".encode(), "policy.toml")
