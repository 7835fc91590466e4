"""A build states the share of its precision; a share is required of it only if the user says so."""

from types import SimpleNamespace
from typing import Any

import pytest
from tests.fakes.entries import artifact_info

from optpipe.build.choose import find_flaw
from optpipe.build.records import BuiltArtifact, ModelBuild
from optpipe.core.errors import ExitStatus
from optpipe.core.precision import LayerType, PlacedNode, Placement, Precision, prove_precision


def built(precision, shares, required=None, elsewhere=0.0):
    """A build with the given MACs by type, of which the share `elsewhere` runs on another provider."""
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
    "elsewhere": (built("fp16", {"fp16": 100}, elsewhere=0.5), "run outside CUDA"),
}


@pytest.mark.parametrize("kind", CASES)
def test_only_another_precision_than_asked_for_fails_a_build(kind) -> None:
    each, reason = CASES[kind]
    result = ModelBuild(each.entry, None, [each])
    assert (result.status is ExitStatus.FAIL) == (reason is not None)
    assert (reason or "") in (each.shortfall or "")
    assert find_flaw(each) == each.shortfall


def test_a_share_below_the_usual_is_not_called_proven() -> None:
    proof = built("int8", {"int8": 77, "fp32": 23}).entry.info.precision_proof
    assert not proof.proven
