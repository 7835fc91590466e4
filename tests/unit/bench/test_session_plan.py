"""How far a timed output may be from the source model's."""

from tests.fakes.entries import artifact_info, proof

from optpipe.bench.session_plan import _find_coarsest_precision
from optpipe.core.precision import Precision


def test_a_model_that_came_quantized_has_the_tolerance_of_int8() -> None:
    plain = artifact_info(precision="fp32", precision_proof=proof("fp32", 1.0))
    quantized = artifact_info(precision="fp32", precision_proof=proof("int8", 0.2))
    assert _find_coarsest_precision(plain) is Precision.FP32
    assert _find_coarsest_precision(quantized) is Precision.INT8
