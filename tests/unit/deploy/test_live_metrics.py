"""Metrics of a live check: what Prometheus reads is what the check found, and the example alerts and dashboard use what is written."""

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from optpipe.core.quantity import Dimension
from optpipe.core.verdict import CriterionResult, Verdict
from optpipe.deploy.live_metrics import render_metrics
from optpipe.deploy.records import DeploymentRecord, ProofRecord

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "reports" / "examples" / "monitoring"
HOSTILE = 'a "b" \\n\\ \n é\u2028'


@dataclass
class Deployed:
    """What the metrics take of a deployment's record."""

    model: str = HOSTILE
    artifact: str = "a1b2"


CRITERIA = (
    CriterionResult("server", Verdict.PASS, "answers"),
    CriterionResult(
        "latency.p99.b1", Verdict.FAIL, "", observed=6e6, ci=(5.5e6, 6.5e6), threshold=5e6, unit=Dimension.TIME
    ),
    CriterionResult("latency.p50.b1", Verdict.INCONCLUSIVE, "not shown", threshold=5e6),
)  # fmt: skip


def render(verdict=Verdict.FAIL, criteria=CRITERIA):
    proof = ProofRecord(f"server {HOSTILE}", {}, (), (), verdict, criteria)
    return render_metrics(proof, cast("DeploymentRecord", Deployed())).decode()


def read_samples(text):
    """(metric, the label that is not of every metric) to value."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            own = sample.labels.get("criterion") or sample.labels.get("verdict")
            found[sample.name.removeprefix("optpipe_check_"), own] = sample.value
            assert (sample.labels["model"], sample.labels["server"]) == (
                HOSTILE,
                f"server {HOSTILE}",
            )
    return found


def find_promtool():
    """Prometheus's own checker. Skips the test if it is not installed."""
    found = os.environ.get("OPTPIPE_PROMTOOL") or shutil.which("promtool")
    if not found:
        pytest.skip("promtool is not installed: .ci/install-promtool")
    return found


@pytest.mark.parametrize("verdict", list(Verdict))
def test_every_verdict_and_figure_is_read_as_it_was_found(verdict):
    found = read_samples(render(verdict))
    assert {each: found["verdict", each] for each in Verdict} == {
        each: float(each is verdict) for each in Verdict
    }
    names = ("latency", "latency_low", "latency_high", "limit")
    assert [found[f"{name}_seconds", "latency.p99.b1"] for name in names] == [
        0.006,
        0.0055,
        0.0065,
        0.005,
    ]
    assert [found["criterion_passed", each.name] for each in CRITERIA] == [1, 0, 0]
    assert ("latency_seconds", "latency.p50.b1") not in found, "a figure that is not there is not 0"


@pytest.mark.slow
def test_prometheus_itself_accepts_the_metrics_and_each_alert_says_what_its_examples_expect():
    promtool = find_promtool()
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=render(), capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    for words in (("check", "rules", "alerts.yml"), ("test", "rules", "alerts.test.yml")):
        ran = subprocess.run(
            [promtool, *words], cwd=EXAMPLES, capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr


def list_queries():
    """Every PromQL expression of the dashboard and the alerts."""
    dashboard = json.loads((EXAMPLES / "grafana-dashboard.json").read_text())
    panels = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    groups = yaml.safe_load((EXAMPLES / "alerts.yml").read_text())["groups"]
    return panels, [rule["expr"] for group in groups for rule in group["rules"]]


def test_the_dashboard_and_the_alerts_ask_for_metrics_that_are_written():
    written = {family.name for family in text_string_to_metric_families(render())}
    panels, alerts = list_queries()
    asked = set(re.findall(r"optpipe_\w+", " ".join(panels + alerts)))
    assert asked <= written
    assert written <= set(re.findall(r"optpipe_\w+", " ".join(panels)))


def test_grafana_reads_the_dashboard():
    """By Grafana's own types: what they do not know would be lost on the way through them."""
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard

    given = json.loads((EXAMPLES / "grafana-dashboard.json").read_text())
    read = json.loads(JSONEncoder(sort_keys=True).encode(Dashboard.from_json(given)))
    assert find_lost(given, read) == []
    areas = [panel["gridPos"] for panel in given["panels"]]
    cells = [(x, y) for a in areas for x in range(a["x"], a["x"] + a["w"]) for y in range(a["y"], a["y"] + a["h"])]  # fmt: skip
    assert len(cells) == len(set(cells)), "panels overlap"
    assert max(x for x, _ in cells) < 24


def find_lost(given, read, path=""):
    """Paths of what is in `given` and not, or not the same, in `read`."""
    if isinstance(given, dict):
        return [
            lost
            for key, value in given.items()
            for lost in (
                find_lost(value, read[key], f"{path}.{key}") if key in read else [f"{path}.{key}"]
            )
        ]
    if isinstance(given, list):
        return [
            lost
            for at, value in enumerate(given)
            for lost in (
                find_lost(value, read[at], f"{path}[{at}]") if at < len(read) else [f"{path}[{at}]"]
            )
        ]
    return [] if given == read else [path]


@pytest.mark.slow
def test_prometheus_reads_every_query_of_the_dashboard(tmp_path):
    promtool, (panels, _) = find_promtool(), list_queries()
    rules = [
        {"record": f"panel:{at}", "expr": each.replace("$model", ".+")}
        for at, each in enumerate(panels)
    ]
    file = Path(tmp_path, "rules.yml")
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    ran = subprocess.run(
        [promtool, "check", "rules", file], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
