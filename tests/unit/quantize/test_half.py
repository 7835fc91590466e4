"""What ModelOpt cannot convert is said with a way out."""

import pytest

from optpipe.core.precision import Precision
from optpipe.errors import StageError
from optpipe.quantize.half import _convert_in
from optpipe.workspace.file_names import MODELOPT_LOG


def test_a_conversion_that_fails_names_its_reason_and_a_way_out(tmp_path) -> None:
    (tmp_path / MODELOPT_LOG).write_text("[modelopt] - ERROR - Graph must be in SSA form\n")
    said = r"net to fp16: Graph must be in SSA form\nleave fp16 out of --precision"
    with pytest.raises(StageError, match=said), _convert_in("net", Precision.FP16, tmp_path):
        raise RuntimeError("1")
