"""Tactics that are compared within the program; the emulation computes the steps, and the times are planted."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from tests.fakes.emulation import compute_step, register_emulation
from tests.fakes.fp8_models import draw
from tests.fakes.int8_network import SPEC, make_int8_request

from optpipe.backends.torch_layers import in_place, tuning
from optpipe.backends.torch_layers.lowering import lower_program
from optpipe.kernels import tuner
from optpipe.kernels.tactics import LIBRARIES, Tactic, tactics_from_text

register_emulation()


@pytest.fixture(scope="module")
def lowered(tmp_path_factory):
    return lower_program(make_int8_request("residual", tmp_path_factory.mktemp("int8")))[0]


class FakeGpu:
    """Gives each tactic of a step a time alone and another one in the program, and counts what runs."""

    def __init__(self, monkeypatch, folder, alone, within, refuses=()):
        self.within, self.refuses = within, refuses
        self.running, self.clock = [], []
        self.generator = np.random.default_rng(0)
        monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
        monkeypatch.setattr(tuner, "CHOSEN", {})
        for module in (tuner, tuning, in_place):
            monkeypatch.setattr(module, "launch_step", self.launch)
        monkeypatch.setattr(tuner, "time_launch", lambda launch: alone(launch.args[2]))
        monkeypatch.setattr(in_place, "BUDGET_S", 3600.0)  # a busy machine's time decides nothing
        monkeypatch.setattr(in_place, "capture_launches", self.capture)
        monkeypatch.setattr(in_place, "time_replay", self.time)

    def launch(self, step, given, tactic=None):
        self.running.append(tactic)
        return compute_step(step, given)

    def capture(self, launch, _count):
        self.running.clear()
        launch()
        if any(each.kernel in self.refuses for each in self.running):
            raise RuntimeError("operation not permitted when stream is capturing")
        total = sum(map(self.within, self.running))
        return lambda: self.clock.append(total)

    def time(self, replay):
        self.clock.clear()
        replay()
        return sum(self.clock) * np.exp(0.001 * self.generator.standard_normal())


def is_gathered(tactic):
    return "gathered" in tactic.kernel


def settle(lowered):
    program, batch = deepcopy(lowered), draw(SPEC)
    drawn = {size: (batch[:size],) for size in (1, 4)}
    choices = tuning.choose_tactics(program, drawn)
    before = {size: dict(each) for size, each in choices.items()}
    return program, before, choices, in_place.settle_tactics(program, drawn, choices)


def list_tactics_in_use(program):
    return [
        tactic
        for node in program.graph.nodes
        if "optpipe" in str(node.target)
        for tactic in tactics_from_text(node.args[6]).values()
    ]


def test_a_rival_that_is_faster_in_the_program_replaces_the_fastest_alone_and_is_recorded(
    lowered, monkeypatch, tmp_path
):
    FakeGpu(
        monkeypatch,
        tmp_path,
        alone=lambda tactic: 1.2 if is_gathered(tactic) else 1.0,
        within=lambda tactic: 20.0 if "boxes" in tactic.kernel else 10.0,
    )
    program, before, choices, found = settle(lowered)
    in_use = list_tactics_in_use(program)
    assert any(map(is_gathered, in_use))
    assert found.keys() == {"1", "4"}
    for size, each in found.items():
        assert each["changes"]
        for change in each["changes"]:
            assert change["before"].startswith("wgmma_convolution_boxes")
            assert change["after"].startswith("wgmma_convolution_gathered")
            assert 1 < change["speed"][1] <= change["speed"][0] <= change["speed"][2]
        changed = [
            node for node, choice in choices[int(size)].items() if choice != before[int(size)][node]
        ]
        assert sum(each["layers"] for each in each["changes"]) == len(changed)
        for node in changed:
            tactic, _ = choices[int(size)][node]
            assert tactics_from_text(node.args[6])[int(size)] == tactic
    with torch.inference_mode():
        assert torch.equal(program(draw(SPEC))[0], lowered(draw(SPEC))[0])


@pytest.mark.parametrize("case", ["equal", "no time", "refused", "far"])
def test_the_fastest_alone_stays_unless_a_rival_is_shown_to_be_faster(
    lowered, case, monkeypatch, tmp_path
):
    FakeGpu(
        monkeypatch,
        tmp_path,
        alone=lambda tactic: (2.0 if case == "far" else 1.2) if is_gathered(tactic) else 1.0,
        within=lambda tactic: 10.0 if is_gathered(tactic) and case != "equal" else 20.0,
        refuses=("wgmma_convolution_gathered",) if case == "refused" else (),
    )
    if case == "no time":
        monkeypatch.setattr(in_place, "BUDGET_S", 0.0)
    _, before, choices, found = settle(lowered)
    for size, each in found.items():
        assert "why_not" in each or each["changes"] == []
        assert (each.get("left", 0) > 0) is (case == "no time" and "why_not" not in each)
        assert choices[int(size)] == before[int(size)]


def test_a_program_that_cannot_be_captured_keeps_its_tactics_and_says_why(
    lowered, monkeypatch, tmp_path
):
    FakeGpu(monkeypatch, tmp_path, lambda _: 1.0, lambda _: 1.0, refuses=("wgmma_product",))
    _, before, choices, found = settle(lowered)
    assert before == choices
    assert {each["why_not"] for each in found.values()} == {
        "operation not permitted when stream is capturing"
    }


@pytest.mark.parametrize(
    ("times", "rivals"),
    [
        ({"wgmma_product": 1.0, "wgmma_convolution_boxes": 1.7, LIBRARIES[0]: 9.0}, [LIBRARIES[0]]),
        (
            {"wgmma_product": 1.0, "wgmma_convolution_boxes": 1.5, LIBRARIES[0]: 9.0},
            [LIBRARIES[0], "wgmma_convolution_boxes"],
        ),
        ({LIBRARIES[0]: 100.0, "wgmma_product": 109.0}, ["wgmma_product"]),
        ({LIBRARIES[0]: 100.0, "wgmma_product": 111.0}, []),
    ],
)
def test_rivals_are_a_library_s_call_and_what_is_a_few_microseconds_slower_alone(times, rivals):
    group = in_place._Group(tuple((Tactic(name, {}), time) for name, time in times.items()), 1)
    assert [tactic.kernel for tactic, _ in group.list_rivals()] == rivals
