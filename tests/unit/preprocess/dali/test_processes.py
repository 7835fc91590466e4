import pytest

from optpipe.measure.worker.jobs import JobFailure
from optpipe.preprocess.dali_pipeline import explain_failure

REFUSED = """RuntimeError: Critical error in pipeline:
Error in CPU operator `nvidia.dali.fn.decoders.image`,
which was used in the pipeline definition with the following traceback:

encountered:

nvImageCodec failure: '#4'
Current pipeline object is no longer valid.
"""


@pytest.mark.parametrize(
    ("stderr", "status", "said"),
    [
        ("RuntimeError: CUDA out of memory. Tried to allocate", 1, "out of memory; use a smaller"),
        ("CUDA runtime API error cudaErrorMemoryAllocation (2)", 1, "out of memory"),
        ("Traceback\n  x\nValueError: no such thing\n", 1, "ValueError: no such thing"),
        ("", -9, "killed by signal 9 (out of host memory?)"),
        ("Traceback", None, "timed out after 20 s"),
        (REFUSED, 1, "DALI: the decoder does not support this format (nvImageCodec status 4); `optpipe preprocess"),
    ],
)
def test_a_failed_process_gives_its_reason_in_one_line(stderr, status, said):
    assert said in explain_failure(JobFailure(stderr, status), 20)
