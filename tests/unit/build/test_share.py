"""A build states the share of its precision; a share is required of it only if the user says so."""

from types import SimpleNamespace
from typing import Any

import pytest
from tests.fakes.console import text_of
from tests.fakes.entries import artifact_info

from optpipe.build.budget import find_flaw
from optpipe.build.records import (
    ArtifactResult,
    BuildResult,
    BuiltArtifact,
    ModelBuild,
    document_from_build,
)
from optpipe.core.entries import WeightsRecord
from optpipe.core.errors import ExitStatus
from optpipe.core.precision import LayerType, PlacedNode, Placement, Precision, prove_precision


def built(precision, shares, required=None, elsewhere=0.0):
    """A build with the given MACs by type (None: not known), of which the share `elsewhere` runs on another provider."""
    layers = [LayerType(kind, "Conv", kind, macs) for kind, macs in shares.items()]
    node = PlacedNode("odd", "Loop", "CPU", elsewhere)
    placement = Placement("CUDA", 4, 1, elsewhere, (node,)) if elsewhere else None
    proof = prove_precision(Precision(precision), layers, placement)
    info = artifact_info(precision=precision, precision_proof=proof)
    entry: Any = SimpleNamespace(id="aaaa", info=info)
    return BuiltArtifact(entry, None, None, required_share=required)


CASES = {
    "77% int8": (built("int8", {"int8": 77, "fp32": 23}), None),
    "1% int8": (built("int8", {"int8": 1, "fp32": 99}), None),
    "no int8": (built("int8", {"fp32": 100}), "0.0% of MACs in int8"),
    "no fp16": (built("fp16", {"fp32": 100}), "0.0% of MACs in fp16"),
    "77% of 80%": (
        built("int8", {"int8": 77, "fp32": 23}, 0.8),
        "77.0% of MACs in int8, 80% required",
    ),
    "77% of 77%": (built("int8", {"int8": 77, "fp32": 23}, 0.77), None),
    "fp32": (built("fp32", {"fp32": 100}), None),
    "fp32 with fp16": (built("fp32", {"fp32": 99, "fp16": 1}), "100% required"),
    "fp32 with tf32": (built("fp32", {"fp32": 99, "tf32": 1}), "100% required"),
    "fp32 with unknown": (built("fp32", {"fp32": 99, "unattributed": 1}), None),
    "fp32 with int8 of unknown cost": (built("fp32", {"fp32": 99, "int8": None}), "100% required"),
    "fp32 with products of unknown cost": (built("fp32", {"fp32": 9, "unattributed": None}), None),
    "int8 with products of unknown cost": (built("int8", {"int8": 9, "unattributed": None}), None),
    "80% of what is known": (
        built("int8", {"int8": 100, "fp32": None}, 0.8),
        "100.0% of the known MACs in int8 and 1 product of unknown cost: Conv, 80% required",
    ),
    "80% whatever the cost is": (built("int8", {"int8": None}, 0.8), None),
    "no int8, whatever the cost is": (built("int8", {"fp32": None}), "80% required"),
    "elsewhere": (built("fp16", {"fp16": 100}, elsewhere=0.5), "run outside CUDA"),
}


@pytest.mark.parametrize("kind", CASES)
def test_only_another_precision_than_asked_for_fails_a_build(kind) -> None:
    each, reason = CASES[kind]
    result = ModelBuild(each.entry, None, [each])
    assert (result.status is ExitStatus.FAIL) == (reason is not None)
    assert (reason or "") in (each.shortfall or "")
    assert find_flaw(each) == each.shortfall


@pytest.mark.parametrize(
    ("precision", "layers", "bounds", "settled"),
    [
        ("fp16", {"fp16": 90, "fp32": 10}, (0.9, 0.9), True),
        ("fp16", {"fp16": 90, "fp32": None}, (0.0, 1.0), None),
        ("fp16", {"fp16": None, "fp32": 10}, (0.0, 1.0), None),
        ("fp16", {"fp16": 90, "unattributed": None}, (0.0, 1.0), None),
        ("fp16", {"fp16": 50, "unattributed": 50}, (0.5, 1.0), None),
        ("fp16", {"fp16": 10, "fp32": 60, "unattributed": 30}, (0.1, 0.4), False),
        ("fp16", {"fp16": None}, (1.0, 1.0), True),
        ("fp16", {"fp32": None}, (0.0, 0.0), False),
        ("fp16", {"fp32": None, "int8": 5}, (0.0, 0.0), False),
        ("fp32", {"fp32": 90, "unattributed": None}, (0.0, 1.0), None),
    ],
)
def test_products_of_unknown_cost_bound_a_share(precision, layers, bounds, settled) -> None:
    proof = built(precision, layers).entry.info.precision_proof
    assert proof.share.find_bounds(precision) == pytest.approx(bounds)
    assert proof.settle(Precision(precision)) is settled
    assert proof.proven == (settled is True)


def test_a_product_of_unknown_cost_on_another_provider_is_unattributed() -> None:
    layers = [LayerType("a", "Conv", "fp16", 100), LayerType("odd", "Rfft", "fp16", None)]
    placement = Placement("CUDA", 4, 1, 0.0, (PlacedNode("odd", "Rfft", "CPU", 0.0),))
    assert prove_precision(Precision.FP16, layers).proven
    assert not prove_precision(Precision.FP16, layers, placement).proven


def test_a_share_below_the_usual_is_not_called_proven() -> None:
    proof = built("int8", {"int8": 77, "fp32": 23}).entry.info.precision_proof
    assert not proof.proven


def describe(kind, shares, operator):
    """The first line of the result of a build with the given MACs by type."""
    layers = [LayerType(name, operator, name, macs) for name, macs in shares.items()]
    proof = prove_precision(Precision(kind), layers, None)
    artifact = ArtifactResult(
        "aaaa", "onnxruntime", Precision(kind), "cpu", "p", "0", 1, 1.0, None, proof, None
    )
    weights = WeightsRecord("random", "0" * 64)
    found = BuildResult(
        "net", "net.py", "m", weights, "", None, (artifact,), (), (), (), ExitStatus.DONE
    )
    return text_of(document_from_build(found)).splitlines()[0]


def test_int8_of_next_to_nothing_is_the_first_line() -> None:
    """As of an LSTM, which no runtime here has in INT8: its head alone is quantized."""
    first = describe("int8", {"int8": 8, "fp32": 992}, "LSTM")
    assert "0.8% of its MACs in int8 and 99.2% in fp32 (LSTM)" in first
    assert "not an INT8 build" in first
    assert "not an FP8 build" in describe("fp8", {"fp8": 1, "fp16": 99}, "MatMul")
    for shares in ({"int8": 77, "fp32": 23}, {"int8": 100}, {"int8": 1, "unattributed": None}):
        assert "not an INT8 build" not in describe("int8", shares, "Conv")
