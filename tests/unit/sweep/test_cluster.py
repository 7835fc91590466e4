"""Ray: node labels, connections, clocks."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.sweeps import make_cell, make_record, make_slot
from tests.unit.sweep.test_slots import two_gpus  # noqa: F401 # a fixture

from optpipe.core.errors import BadInputError, MissingError
from optpipe.sweep.cluster import connect, describe_node, selector_from_text
from optpipe.sweep.plan import fill_rows, list_warnings, plan_sweep
from optpipe.sweep.sweep import CLOCKS_S, bound_clock_difference
from optpipe.workspace.environment import list_gpus


def test_a_node_says_everything_that_a_selector_may_ask_for(two_gpus, monkeypatch):  # noqa: F811
    labels = describe_node()
    assert labels == {
        "optpipe/kind": "NVIDIA_H200", "optpipe/fingerprint": labels["optpipe/fingerprint"], "optpipe/driver": "580.1",
        "optpipe/memory-gib": "140", "optpipe/mig": "unsupported", "optpipe/power-limit-w": "700",
    }  # fmt: skip
    for text in ("power-limit-w=700", "kind=NVIDIA H200", "mig!=on", "memory-gib = 140", "optpipe/driver=580.1"):
        assert selector_from_text(text).matches(labels), text
    for text in ("power-limit-w=350", "driver!=580.1", "rack=7"):
        assert not selector_from_text(text).matches(labels), text


def test_gpus_of_one_kind_that_differ_have_no_one_label(two_gpus, monkeypatch):  # noqa: F811
    monkeypatch.setattr(two_gpus, "nvmlDeviceGetEnforcedPowerLimit", lambda handle: 700_000 - 350_000 * handle)
    with pytest.raises(BadInputError, match="different power limits or MIG modes"):
        describe_node()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    list_gpus.cache_clear()
    assert describe_node()["optpipe/power-limit-w"] == "350"


def test_a_node_without_a_gpu_says_its_kind_and_environment():
    assert sorted(describe_node()) == ["optpipe/fingerprint", "optpipe/kind"]


def test_ray_reads_a_selector_as_we_do():
    assert (selector_from_text("mig=off").label, selector_from_text("mig=off").for_ray) == ("optpipe/mig", "off")
    assert (selector_from_text("ray.io/zone!=a").label, selector_from_text("x!=a").for_ray) == ("ray.io/zone", "!a")
    assert [str(selector_from_text(each)) for each in ("mig=off", "a/b!=c d")] == ["mig=off", "a/b!=c_d"]


@pytest.mark.parametrize("text", ["mig", "=off", "mig=", "!=x", ""])
def test_what_is_no_selector_is_refused(text):
    with pytest.raises(BadInputError, match="expected LABEL=VALUE or LABEL!=VALUE, such as"):
        selector_from_text(text)


class AuthenticationError(Exception):
    """As Ray's."""


@pytest.fixture
def calls(monkeypatch):
    """The addresses that were asked for; the first answers are `calls.errors`."""
    found = SimpleNamespace(addresses=[], errors=[])

    def init(address, **_):
        found.addresses.append(address)
        if found.errors:
            raise found.errors.pop(0)

    exceptions = SimpleNamespace(RayError=AuthenticationError)
    ray = SimpleNamespace(is_initialized=lambda: False, init=init, exceptions=exceptions)
    monkeypatch.setitem(sys.modules, "ray", ray)
    return found


def test_an_aborted_connection_is_tried_once_more(calls):
    calls.errors = [ConnectionAbortedError("Starting Ray client server failed.")]
    connect("ray://host:1")
    assert calls.addresses == ["ray://host:1", "ray://host:1"]
    calls.errors = [ConnectionAbortedError("failed"), ConnectionAbortedError("failed again")]
    with pytest.raises(
        MissingError, match="no Ray cluster at ray://host:1: failed again\nstart one with `ray start --head`"
    ):
        connect("ray://host:1")


seconds = st.floats(0, 1e6)


@given(st.floats(0, 2e9), seconds, seconds, st.floats(-1e6, 1e6))
def test_a_difference_is_never_overstated(sent, there, back, ahead):
    found = bound_clock_difference(sent, sent + there + ahead, sent + there + back)
    assert abs(found) <= abs(ahead) + 1e-3
    assert found * ahead >= 0
    if abs(ahead) > CLOCKS_S + there + back + 1:
        assert found != 0


def rows_of(*records):
    plan = plan_sweep([one.cell for one in records], [make_slot()], {})
    return fill_rows(plan, {one.cell.key: one for one in records})


def on_host(record, host, ahead):
    return replace(record, place=replace(record.place, host=host, clock_ahead_s=ahead))


def test_a_clock_that_is_off_is_said_once_for_each_host():
    records = [make_record(make_cell(batch=size)) for size in (1, 2, 4)]
    rows = rows_of(on_host(records[0], "a", 3600.0), on_host(records[1], "a", 3600.0), on_host(records[2], "b", -60.0))
    assert list_warnings(rows) == [
        f"the clock of host {host} is {said} this host's: the timestamps of its rows are off, durations are not affected"
        for host, said in (("a", "3,600 s ahead of"), ("b", "60 s behind"))
    ]
