"""How far a timed output may be from the source model's, and what a run that failed leaves."""

import pytest
from tests.fakes.entries import artifact_info, proof

from optpipe.core.errors import BadInputError
from optpipe.core.events import SilentListener
from optpipe.core.precision import Precision
from optpipe.measure.session_plan import _find_coarsest_precision, offer_recovery
from optpipe.workspace.runs import begin_run


def test_a_model_that_came_quantized_has_the_tolerance_of_int8() -> None:
    plain = artifact_info(precision="fp32", precision_proof=proof("fp32", 1.0))
    quantized = artifact_info(precision="fp32", precision_proof=proof("int8", 0.2))
    assert _find_coarsest_precision(plain) is Precision.FP32
    assert _find_coarsest_precision(quantized) is Precision.INT8


@pytest.mark.parametrize("left", [True, False])
def test_a_run_that_failed_before_it_wrote_anything_leaves_no_folder(tmp_path, left):
    run, listener = begin_run(tmp_path, "bench"), SilentListener()
    if left:
        (run.path / "samples").mkdir()
        (run.path / "samples" / "m000.spool").touch()
    with pytest.raises(BadInputError), offer_recovery(run, listener):
        raise BadInputError("no reference")
    assert run.path.exists() == bool(listener.warnings) == left
