"""Which layers of a module's program are in INT8, and their outputs against the Q/DQ graph in ONNX Runtime."""

import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from tests.fakes.entries import artifact_info
from tests.fakes.fp8_models import draw, run_onnx
from tests.fakes.int8_network import NETWORKS, SPEC, make_int8_request

from optpipe.backends.inductor import fix_batch
from optpipe.backends.torch_int8 import LOWERING, find_stale_lowering, steps
from optpipe.backends.torch_int8.lowering import layers_from_graph, lower_program
from optpipe.backends.torch_program import export_rewritten, layers_from_program
from optpipe.core.precision import Precision, prove_precision

GOLDEN = Path(__file__).parents[3] / "golden" / "int8"
FORMS = {
    "residual": "Convolution FP16, Convolution FP16 added, 2 Convolution INT8, Convolution INT8 added, MaxPool INT8, Stem INT8",
    "narrow": "3 Convolution FP16, Convolution FP16 added, 2 Convolution INT8",
    "varied": "2 Convolution FP16, 6 Convolution INT8",
    "gated": "5 Convolution FP16, Convolution INT8, Depthwise FP16, Depthwise INT8, Stem FP16",
    "tokens": "3 Convolution FP16, Convolution INT8",
}


@pytest.fixture(scope="module", params=NETWORKS)
def lowered(request, tmp_path_factory):
    wanted = make_int8_request(request.param, tmp_path_factory.mktemp("int8"))
    return request.param, wanted, *lower_program(wanted)


def list_steps(program):
    return [steps.step_from_text(node.args[5]) for node in program.graph.nodes if "optpipe" in str(node.target)]


def measure_snr(expected, found):
    return 10 * np.log10(np.square(expected).sum() / np.square(found - expected).sum())


def test_layers_hand_int8_to_those_that_take_it(lowered):
    name, _, program, _ = lowered
    found = Counter(
        f"{type(each).__name__} {'FP16' if each.half else 'INT8'}{' added' if getattr(each, 'added', False) else ''}"
        for each in list_steps(program)
    )
    assert FORMS[name] == ", ".join(form if count == 1 else f"{count} {form}" for form, count in sorted(found.items()))


def test_outputs_are_those_of_the_qdq_graph_at_every_batch_size(lowered):
    _, wanted, program, _ = lowered
    batch = draw(SPEC)
    expected = run_onnx(onnx.load(wanted.graph), batch)[0]
    single = export_rewritten(program, replace(wanted, card=fix_batch(wanted.card, 1))).module()
    with torch.inference_mode():
        found, alone = program(batch)[0].numpy(), single(batch[:1])[0].numpy()
    assert measure_snr(expected, found) > 40
    np.testing.assert_allclose(alone, found[:1], atol=1e-2 * np.abs(found).max())


def test_the_proof_counts_what_the_program_executes(lowered):
    name, wanted, program, missed = lowered
    layers = layers_from_program(export_rewritten(program, wanted), Precision.INT8)
    proof = prove_precision(Precision.INT8, layers)
    counted = sum(each.type == "int8" and each.op == "Convolution" for each in layers)
    assert counted == len(layers_from_graph(onnx.load(wanted.graph))) - len(missed)
    if name == "residual":
        macs = {"fp16": 32 * 147 * 256, "int8": 64 * 64 * (288 + 32 + 576 + 576) + 640}
        assert proof.share.macs["int8"] == pytest.approx(macs["int8"] / sum(macs.values()))


def test_weights_and_logits_are_as_frozen(lowered):
    """The weights are whole numbers; logits vary between CPUs by what layers in FP16 round to another integer."""
    name, wanted, program, _ = lowered
    sums = [[each.weight.size, int(each.weight.sum())] for each in layers_from_graph(onnx.load(wanted.graph))]
    with torch.inference_mode():
        logits = program(draw(SPEC))[0].numpy()
    path = GOLDEN / f"{name}.json"
    if "OPTPIPE_FREEZE" in os.environ:
        text = json.dumps([[round(value, 4) for value in row] for row in logits.tolist()])
        path.write_text(f'{{"weights": {json.dumps(sums)},\n"logits": {text}}}\n')
    frozen = json.loads(path.read_text())
    assert sums == frozen["weights"]
    np.testing.assert_allclose(logits, frozen["logits"], rtol=0, atol=0.02 * np.abs(frozen["logits"]).max())


def test_a_layer_that_no_kernel_takes_stays_in_fp16_and_is_named(lowered):
    name, _, _, missed = lowered
    assert bool(missed) == (name == "varied")
    assert all("3 groups of" in each for each in missed)


def test_a_spared_layer_stays_in_floating_point(tmp_path):
    program, missed = lower_program(make_int8_request("residual", tmp_path, keep=(3,)))
    names = [str(node.target) for node in program.graph.nodes]
    assert missed == ()
    assert names.count("aten.conv2d.default") == 1


def test_an_artifact_whose_operator_has_changed_is_not_run():
    tactics: dict[str, Any] = {"tactics": {}}
    older, current = (
        artifact_info(backend="inductor", details={**tactics, **each}) for each in ({}, {"lowering": LOWERING})
    )
    assert find_stale_lowering(older) == "built by an older version of the INT8 lowering; build it again"
    assert find_stale_lowering(current) is None
    assert find_stale_lowering(artifact_info(backend="inductor", details={})) is None


def test_a_step_and_its_text_are_the_same():
    for each in (
        steps.Convolution(64, (3, 1), 32, 7, activation="gelu", added=True),
        steps.MaxPool(16, (3, 3), 2, (1,) * 4),
    ):
        assert steps.step_from_text(steps.text_from_step(each)) == each
        assert steps.text_from_step(replace(each, stride=3)) != steps.text_from_step(each)
