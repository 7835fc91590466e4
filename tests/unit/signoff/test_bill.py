"""The CycloneDX ML-BOM of a dossier: valid by its own schema, and filled from the verdict."""

import json

import pytest

from optpipe.core.files import Files
from optpipe.signoff.bill import make_bill
from optpipe.signoff.dossier import read_dossier
from optpipe.signoff.verify import check_dossier

POLICY = """schema = 1
[build]
precision = "fp16"
[[latency]]
p50 = "50 ms"
batch_size = 1
[size]
maximum = "%s"
[accuracy]
maximum_drop = "3 points"
[precision]
fp16 = "80%%"
"""


@pytest.fixture(scope="module")
def judged(make_workspace, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bill")
    workspace = make_workspace(folder / "workspace")
    fp16 = workspace.artifact("fp16")
    workspace.bench(fp16, count=200, processes=3)
    workspace.evaluate(fp16, lost=3, n=400)
    waived = {"trust.environment": "one machine"}
    return {
        name: workspace.sign_off(POLICY % size, folder / name, **wanted)[1]
        for name, size, wanted in (
            ("PASSED", "1 GiB", {}),
            ("FAILED", "1 B", {}),
            ("WARNED", "1 GiB", {"waivers": waived}),
        )
    }


def read_bill(folder):
    checked = check_dossier(folder)
    content, verdict, _ = checked.require_intact()
    return json.loads(make_bill(content, verdict)), verdict


@pytest.mark.parametrize("result", ["PASSED", "FAILED", "WARNED"])
def test_the_bill_is_valid_by_the_schema_of_cyclonedx(judged, result):
    pytest.importorskip("cyclonedx", reason="cyclonedx-python-lib is not installed")
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    bill, _ = read_bill(judged[result])
    problem = JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(bill))
    assert problem is None, problem
    properties = bill["metadata"]["component"]["properties"]
    assert {"name": "optpipe:result", "value": result} in properties


def test_each_judged_figure_has_its_confidence_interval(judged):
    bill, verdict = read_bill(judged["PASSED"])
    component = bill["metadata"]["component"]
    card = component["modelCard"]
    shown = {
        one["type"].partition(" ")[0]: one
        for one in card["quantitativeAnalysis"]["performanceMetrics"]
    }
    figures = {one.name: one for one in verdict.criteria if isinstance(one.observed, float)}
    assert shown.keys() == figures.keys() >= {"latency.p50.b1", "accuracy.maximum_drop"}
    for name, one in figures.items():
        bounds = shown[name].get("confidenceInterval", {})
        assert float(shown[name]["value"]) == one.observed
        assert tuple(map(float, bounds.values())) == (one.ci or ())
    assert component["hashes"][0]["content"] == verdict.artifact.sha256
    data = {each["bom-ref"] for each in bill["components"]}
    assert {each["ref"] for each in card["modelParameters"]["datasets"]} == data != set()


def test_one_dossier_gives_one_bill(judged):
    folder = judged["PASSED"]
    content, verdict, _ = check_dossier(folder).require_intact()
    again = read_dossier(Files(folder, kept={}))
    assert make_bill(content, verdict) == make_bill(again, verdict)
