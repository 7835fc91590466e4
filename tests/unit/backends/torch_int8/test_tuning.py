"""A program's layers are measured once for each shape, and carry what was chosen; on a clock that gives planted times."""

import pytest
import torch
from tests.fakes.fp8_models import draw
from tests.fakes.int8_network import SPEC, make_int8_request

from optpipe.backends.torch_int8 import tuning
from optpipe.backends.torch_int8.emulation import compute_step
from optpipe.backends.torch_int8.lowering import lower_program
from optpipe.backends.torch_int8.tactics import list_tactics, tactics_from_text


@pytest.fixture
def planted(monkeypatch):
    """The last tactic of each step is the fastest; steps are computed by the emulation."""
    launched = []

    def launch(step, given, tactic=None):
        launched.append((step, tactic))
        return compute_step(step, given)

    def time_launch(launch):
        step, given, tactic = launch.args
        return 1.0 if tactic == [*list_tactics(step, given.data)][-1] else 2.0

    monkeypatch.setattr(tuning, "launch_step", launch)
    monkeypatch.setattr(tuning, "time_launch", time_launch)
    monkeypatch.setattr(tuning, "compile_side_by_side", lambda _: None)
    return launched


def test_every_layer_runs_its_fastest_tactic_at_the_nearest_batch_size(tmp_path, planted):
    program, _ = lower_program(make_int8_request("residual", tmp_path))
    drawn = {size: (draw(SPEC)[:size],) for size in (1, 4)}
    measured = tuning.tune_program(program, drawn)
    layers = [node for node in program.graph.nodes if "optpipe" in str(node.target)]
    assert {size: len(found) for size, found in measured.items()} == {1: len(layers), 4: len(layers)}
    assert {each.microseconds for found in measured.values() for each in found} == {1.0}
    assert all(tactics_from_text(node.args[6]).keys() == {1, 4} for node in layers)
    summary = tuning.summarize_choices(measured)
    assert sum(summary["4"]["kernels"].values()) == summary["4"]["sum_us"] == len(layers)
    with torch.inference_mode():
        assert program(*drawn[4])[0].shape == (4, 10)  # the text of the tactics is read on a GPU alone
