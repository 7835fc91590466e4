"""What a node says of its GPU, and how `--node` asks for it."""

import pytest
from tests.unit.sweep.test_slots import two_gpus  # noqa: F401 # a fixture

from optpipe.core.errors import BadInputError
from optpipe.sweep.cluster import describe_node, selector_from_text
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
