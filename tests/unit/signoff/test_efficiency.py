"""Performance per watt: one over the energy everywhere, in both verifiers, and judged as the energy is."""

import pytest
from tests.fakes.dossiers import examine

from optpipe.core.quantity import Estimate
from optpipe.signoff.verify import check_dossier


@pytest.mark.parametrize(
    ("energy", "efficiency"),
    [
        (Estimate(0.05, 0.04, 0.0625), (20.0, 16.0, 25.0)),
        (Estimate(0.05), (20.0, None, None)),
        (Estimate(0.05, 0.0, 0.1), (20.0, None, None)),
        (Estimate(0.0), None),
    ],
)
def test_an_interval_is_turned_over(energy, efficiency):
    found = energy.invert()
    shown = None if found is None else (found.value, found.low, found.high)
    assert shown == (None if efficiency is None else pytest.approx(efficiency))


POLICY = """schema = 1
[energy]
maximum = "{maximum} J/image"
[efficiency]
minimum = "{minimum} images/s/W"
"""


def find(record, name):
    return next(one for one in record.criteria if one.name == name)


@pytest.fixture(scope="module")
def measured(make_workspace, tmp_path_factory):
    workspace = make_workspace(tmp_path_factory.mktemp("efficiency") / "workspace")
    workspace.bench(workspace.artifact(), mean_ms=10.0, processes=4, power=200.0, batches=(4,))
    return workspace


@pytest.mark.parametrize("share", [0.5, 0.99, 1.01, 2.0])
def test_a_limit_decides_as_the_reciprocal_limit_on_energy(measured, tmp_path, share):
    first, _ = measured.sign_off(POLICY.format(maximum=1, minimum=1), tmp_path / "first")
    value = find(first, "energy.maximum").observed
    policy = POLICY.format(maximum=repr(value * share), minimum=repr(1 / (value * share)))
    record, dossier = measured.sign_off(policy, tmp_path / "one")
    energy, efficiency = (find(record, name) for name in ("energy.maximum", "efficiency.minimum"))
    assert energy.verdict is efficiency.verdict
    assert efficiency.observed == pytest.approx(1 / energy.observed, rel=1e-12)
    assert efficiency.ci == pytest.approx((1 / energy.ci[1], 1 / energy.ci[0]), rel=1e-12)
    checked, verdict = examine(dossier)
    assert (checked.differs, checked.open, verdict) == ([], [], record.verdict)
    assert check_dossier(dossier).problems == ()


def test_without_a_counter_it_is_not_measured(make_workspace, tmp_path):
    workspace = make_workspace(tmp_path / "workspace")
    workspace.bench(workspace.artifact(), processes=4)
    record, dossier = workspace.sign_off(
        "schema = 1\n[efficiency]\nminimum = '1 samples/s/W'\n", tmp_path / "one"
    )
    assert "the energy was not measured" in find(record, "efficiency.minimum").reason
    assert examine(dossier)[0].differs == []
