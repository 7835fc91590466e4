"""Which layers of a module's program are in INT8, their outputs against the Q/DQ graph in ONNX Runtime, and their tactics."""

import json
import os
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
import torch
from tests.fakes.emulation import compute_step, register_emulation
from tests.fakes.entries import artifact_info
from tests.fakes.fp8_models import draw, run_onnx
from tests.fakes.int8_network import NETWORKS, SPEC, make_int8_request
from torch.nn import functional

from optpipe.backends.inductor import Inductor
from optpipe.backends.torch_layers import LOWERING, attention, tuning
from optpipe.backends.torch_layers.lowering import lower_program
from optpipe.backends.torch_products import layers_from_program
from optpipe.backends.torch_program import export_rewritten
from optpipe.core.precision import Precision, prove_precision
from optpipe.kernels import tuner
from optpipe.kernels.steps import Block, step_from_text
from optpipe.kernels.tactics import list_tactics, tactics_from_text

register_emulation()
GOLDEN = Path(__file__).parents[3] / "golden" / "int8"
SPARED = {"varied": (1,)}
"""Layers that stay in floating point by request."""
FAST = ("residual", "tokens")
"""Networks of the fast tier: the others take as long again."""


def spread(*rows):
    """The rows of a parametrization, of which all but those of the FAST networks are slow."""
    return [pytest.param(*row, marks=() if row[0] in FAST else pytest.mark.slow) for row in rows]


@pytest.fixture(scope="module", params=spread(*((name,) for name in NETWORKS)))
def lowered(request, tmp_path_factory):
    wanted = make_int8_request(
        request.param, tmp_path_factory.mktemp("int8"), keep=SPARED.get(request.param, ())
    )
    program, missed = lower_program(wanted)
    single = export_rewritten(program, replace(wanted, card=wanted.card.with_batch(1)))
    return request.param, wanted, program, single, missed


def measure_snr(expected, found):
    return 10 * np.log10(np.square(expected).sum() / np.square(found - expected).sum())


@pytest.mark.slow
def test_outputs_are_those_of_the_qdq_graph_and_logits_are_as_frozen(lowered):
    """Logits vary between CPUs by what layers in FP16 round to another integer."""
    name, wanted, program, single, _ = lowered
    batch = draw(SPEC)
    expected = run_onnx(onnx.load(wanted.graph), batch)[0]
    with torch.inference_mode():
        found, alone = program(batch)[0].numpy(), single.module()(batch[:1])[0].numpy()
    assert measure_snr(expected, found) > 40
    np.testing.assert_allclose(alone, found[:1], atol=1e-2 * np.abs(found).max())
    path = GOLDEN / f"{name}.json"
    if "OPTPIPE_FREEZE" in os.environ:
        path.write_text(
            json.dumps([[round(value, 4) for value in row] for row in found.tolist()]) + "\n"
        )
    frozen = json.loads(path.read_text())
    np.testing.assert_allclose(found, frozen, rtol=0, atol=0.02 * np.abs(frozen).max())


@pytest.mark.slow
def test_the_proof_counts_what_the_program_executes_and_names_what_no_kernel_takes(lowered):
    name, wanted, _, single, missed = lowered
    layers = layers_from_program(single, Precision.INT8)
    counted = sum(each.type == "int8" and each.op == "Convolution" for each in layers)
    inputs = [
        node.input
        for node in onnx.load(wanted.graph).graph.node
        if node.op_type in ("Conv", "Gemm", "MatMul")
    ]
    made = {
        name: each.op_type for each in onnx.load(wanted.graph).graph.node for name in each.output
    }
    joined = 2 if name == "attending" else 0  # queries, keys, and values are one layer
    assert (
        counted
        == sum(made.get(names[1]) == "DequantizeLinear" for names in inputs) - len(missed) - joined
    )
    assert bool(missed) == (name == "varied")
    assert all("its stride" in each for each in missed)
    if name == "residual":
        macs = {"fp16": 32 * 147 * 256, "int8": 64 * 64 * (288 + 32 + 576 + 576) + 640}
        share = prove_precision(Precision.INT8, layers).share.macs["int8"]
        assert share == pytest.approx(macs["int8"] / sum(macs.values()))
    if (
        name == "varied"
    ):  # the first of 3 channels, the spared one, and the one whose strides fit no kernel
        assert sum(each.op == "convolution" and each.type == "fp16" for each in layers) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kinds", "left"),
    spread(
        ("residual", {"Stem": 1, "MaxPool": 1, "Convolution": 4, "added": 2}, 0),
        ("bottleneck", {"Stem": 1, "Convolution": 7, "added": 2}, 0),
        ("narrow", {"Convolution": 1}, 5),
        ("varied", {"Convolution": 7}, 2),
        ("gated", {"Stem": 1, "Depthwise": 2, "Convolution": 5, "added": 1}, 0),
        ("tokens", {"Convolution": 1}, 1),
        ("attending", {"Attention": 3}, 0),
    ),
)
def test_convolutions_in_fp16_are_steps_and_give_the_module_s_outputs(name, kinds, left, tmp_path):
    wanted = replace(make_int8_request(name, tmp_path), precision=Precision.FP16)
    program, missed = lower_program(wanted)
    nodes = [node for node in program.graph.nodes if "optpipe" in str(node.target)]
    found = [step_from_text(node.args[5]) for node in nodes]
    assert all(
        node.args[3] == 1 for node in nodes if node.args[1] is not None
    )  # cuDNN's kernel adds without a scale
    counted = Counter(type(each).__name__ for each in found) + Counter(
        "added" for each in found if getattr(each, "added", False)
    )
    assert (counted, missed) == (kinds, ())
    assert sum("conv" in str(node.target) for node in program.graph.nodes) == left
    batch = draw(SPEC)
    with torch.inference_mode():
        expected, got = wanted.module().eval()(batch).numpy(), program(batch)[0].numpy()
    assert measure_snr(expected, got) > 45
    layers = layers_from_program(export_rewritten(program, wanted), Precision.FP16)
    assert prove_precision(Precision.FP16, layers).share.macs == {"fp16": 1.0}


@pytest.mark.slow
def test_attention_over_many_tokens_reads_queries_keys_and_values_without_copies(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(attention, "MOST_TOKENS", 8)
    wanted = replace(make_int8_request("attending", tmp_path), precision=Precision.FP16)
    program, _ = lower_program(wanted)
    roots = []
    for node in program.graph.nodes:
        if "scaled_dot_product" in str(node.target):
            for given in node.args[:3]:
                while "linear" not in str(given.target):
                    assert "clone" not in str(given.target)
                    given = given.args[0]
                roots.append(given)
    assert [len(roots), len(set(roots))] == [6, 2]


class Shifted(torch.nn.Module):
    """Patches with an activation after them, and a convolution to which a number is added."""

    def __init__(self):
        super().__init__()
        self.patches, self.wide = torch.nn.Conv2d(3, 16, 4, 4), torch.nn.Conv2d(16, 16, 1)

    def forward(self, image):
        return functional.relu6(self.wide(self.patches(image).relu()) + 3)


@pytest.mark.slow
def test_what_follows_patches_and_a_number_after_a_convolution_stay(tmp_path):
    torch.manual_seed(0)
    module, batch = Shifted().eval(), draw(SPEC)
    wanted = replace(
        make_int8_request("residual", tmp_path),
        precision=Precision.FP16,
        module=lambda: deepcopy(module),
    )
    with torch.inference_mode():
        assert measure_snr(module(batch).numpy(), lower_program(wanted)[0](batch)[0].numpy()) > 45


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "padding", "pooled", "kinds"),
    [(11, 2, True, ["Stem", "MaxPool"]), (7, 3, False, ["Stem"]), (14, 0, False, [])],
)
def test_first_convolutions_of_large_strides_are_steps_or_products_over_patches(
    kernel, padding, pooled, kinds, tmp_path
):
    """As in AlexNet, SegFormer, and ConvMixer, whose patches have no multiple of 16 bytes."""
    torch.manual_seed(0)
    first = torch.nn.Conv2d(3, 64, kernel, 4 if padding else kernel, padding)
    more = [torch.nn.ReLU(), torch.nn.MaxPool2d(3, 2)] if pooled else [torch.nn.Sigmoid()]
    module, batch = torch.nn.Sequential(first, *more).eval(), draw(SPEC)
    wanted = replace(
        make_int8_request("residual", tmp_path),
        precision=Precision.FP16,
        module=lambda: deepcopy(module),
    )
    program, _ = lower_program(wanted)
    found = [str(each.args[5]) for each in program.graph.nodes if "optpipe" in str(each.target)]
    assert [each.split()[0] for each in found] == kinds
    assert all("conv" not in str(each.target) for each in program.graph.nodes)
    with torch.inference_mode():
        assert measure_snr(module(batch).numpy(), program(batch)[0].float().numpy()) > 45


class Padded(torch.nn.Module):
    """Paddings as words, as in ConvMixer: even, odd, and dilated ones, and a kernel too large to unroll."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(3, 32, 4, 2, padding="valid"),
            torch.nn.Conv2d(32, 32, 9, padding="same", groups=32),
            torch.nn.Conv2d(32, 32, (3, 33), padding="same", groups=32),
            torch.nn.Conv2d(32, 32, 4, padding="same"),
            torch.nn.Conv2d(32, 32, 3, padding="same", dilation=2),
        )

    def forward(self, image):
        return self.layers(image)


@pytest.mark.slow
def test_convolutions_whose_padding_is_a_word_are_steps(tmp_path):
    torch.manual_seed(0)
    module, batch = Padded().eval(), draw(SPEC)
    wanted = replace(
        make_int8_request("residual", tmp_path),
        precision=Precision.FP16,
        module=lambda: deepcopy(module),
    )
    program, _ = lower_program(wanted)
    nodes = [node for node in program.graph.nodes if "optpipe" in str(node.target)]
    found = Counter(type(step_from_text(node.args[5])).__name__ for node in nodes)
    assert found == {"Stem": 1, "Depthwise": 1, "Convolution": 2}
    with torch.inference_mode():
        assert measure_snr(module(batch).numpy(), program(batch)[0].numpy()) > 45


class Bare(torch.nn.Module):
    """Parts of one layer attend twice, once causally, and the heads are the output."""

    def __init__(self):
        super().__init__()
        self.parts = torch.nn.Linear(96, 288)

    def forward(self, image):
        parts = self.parts(image.reshape(-1, 32, 96)).chunk(3, 2)
        queries, keys, values = (each.unflatten(2, (3, 32)).transpose(1, 2) for each in parts)
        attend = functional.scaled_dot_product_attention
        return attend(queries, keys, values) + attend(queries, keys, values, is_causal=True)


@pytest.mark.slow
def test_attention_whose_heads_are_an_output_is_a_step_and_causal_attention_stays(tmp_path):
    torch.manual_seed(0)
    module, batch = Bare().eval(), draw(SPEC)
    wanted = replace(
        make_int8_request("residual", tmp_path),
        precision=Precision.FP16,
        module=lambda: deepcopy(module),
    )
    program, _ = lower_program(wanted)
    assert sum("optpipe" in str(each.target) for each in program.graph.nodes) == 1
    with torch.inference_mode():
        assert measure_snr(module(batch).numpy(), program(batch)[0].numpy()) > 45


def plant_times(monkeypatch, time_launch, folder):
    """The emulation computes the steps."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    monkeypatch.setattr(tuner, "CHOSEN", {})
    for module in (tuner, tuning):
        monkeypatch.setattr(
            module, "launch_step", lambda step, given, _tactic=None: compute_step(step, given)
        )
    monkeypatch.setattr(tuner, "time_launch", time_launch)
    monkeypatch.setattr(tuning, "compile_side_by_side", lambda _: None)


@pytest.mark.parametrize("lowered", ["residual"], indirect=True)
def test_every_layer_runs_its_fastest_tactic_at_the_nearest_batch_size(
    lowered, monkeypatch, tmp_path
):
    """The last tactic of each step is planted as the fastest, and another process does not measure again."""
    _, wanted, program, _, _ = lowered

    def time_launch(launch):
        step, given, tactic = launch.args
        return 1.0 if tactic == [*list_tactics(step, given.data)][-1] else 2.0

    program, batch = deepcopy(program), draw(SPEC)
    for timed in (True, False):
        plant_times(
            monkeypatch,
            time_launch if timed else Mock(__name__="time_launch", side_effect=AssertionError),
            tmp_path,
        )
        choices = tuning.choose_tactics(program, {size: (batch[:size],) for size in (1, 4)})
    layers = [node for node in program.graph.nodes if "optpipe" in str(node.target)]
    assert all(tactics_from_text(node.args[6]).keys() == {1, 4} for node in layers)
    summary = tuning.summarize_choices(choices)
    assert all(sum(each.values()) == len(layers) for each in summary.values())
    exported = export_rewritten(program, wanted).module()
    with torch.inference_mode():
        torch.testing.assert_close(
            exported(batch[:2])[0], exported(batch)[0][:2], rtol=0, atol=1e-2
        )


@pytest.mark.parametrize("faster", [{1, 4}, {4}])
@pytest.mark.parametrize(
    "lowered", [pytest.param("bottleneck", marks=pytest.mark.slow)], indirect=True
)
def test_residual_blocks_are_one_step_where_it_is_faster_at_all_sizes_and_change_no_number(
    lowered, faster, monkeypatch, tmp_path
):
    _, wanted, program, _, _ = lowered

    def time_launch(launch):
        step, given, _ = launch.args
        return (
            1.0
            if isinstance(step, Block) and len(given.data) in faster
            else 3.0
            if isinstance(step, Block)
            else 1.0
        )

    plant_times(monkeypatch, time_launch, tmp_path)
    before, program, batch = program, deepcopy(program), draw(SPEC)
    choices = tuning.choose_tactics(program, {size: (batch[:size],) for size in (1, 4)})
    blocks = [node for node in program.graph.nodes if "Block" in str(node.args[5:6])]
    assert len(blocks) == (faster == {1, 4})  # the last block ends in FP16
    assert {len(each) for each in choices.values()} == {9 - 2 * len(blocks)}
    exported = export_rewritten(program, wanted)
    with torch.inference_mode():
        assert torch.equal(exported.module()(batch)[0], before(batch)[0])
    macs = [
        sum(each.macs for each in layers_from_program(one, Precision.INT8))
        for one in (exported, export_rewritten(before, wanted))
    ]
    assert macs[0] == macs[1] > 0


def test_an_artifact_whose_operator_has_changed_is_not_run():
    older, current, other = (
        artifact_info(backend="inductor", details=each)
        for each in ({"tactics": {}}, {"tactics": {}, "lowering": LOWERING}, {})
    )
    stale = "built by an older version of optpipe's kernels; build it again"
    assert Inductor().find_run_blocker(older) == stale
    assert stale not in (Inductor().find_run_blocker(current), Inductor().find_run_blocker(other))
