"""A binding's buffers are its own: what a caller writes into them must not change the arrays it was bound with."""

import re

import numpy as np
import pytest
import torch
from tests.fakes.entries import artifact_info

from optpipe.backends.torch_session import TorchSession
from optpipe.core.errors import StageError

INFO = artifact_info(
    backend="torch",
    details={
        "inputs": [{"name": "x", "dtype": "float32", "shape": ["batch", 3]}],
        "outputs": [{"name": "y", "dtype": "float32", "shape": ["batch", 3]}],
    },
)


def test_writing_into_a_bound_input_leaves_the_given_array_alone() -> None:
    given = np.ones((2, 3), np.float32)
    session = TorchSession(lambda x: x + torch.ones_like(x), INFO, {})
    binding = session.bind({"x": given})
    binding.inputs["x"][...] = 5
    binding.launch()
    assert (binding.outputs["y"] == 6).all()
    assert (given == 1).all()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("Runtime assertion failed for expression u5 >= 2 on node 'ge_5'\nmore"), StageError),
        (AssertionError("Guard failed: x.size()[0] <= 3"), StageError),
        (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError),  # whoever measures tells it apart
    ],
)
def test_what_torch_refuses_to_run_is_a_stage_that_failed(error: Exception, expected: type[Exception]) -> None:
    def refuse(_: torch.Tensor) -> torch.Tensor:
        raise error

    with pytest.raises(expected, match=re.escape(str(error).splitlines()[0])) as found:
        TorchSession(refuse, INFO, {}).run({"x": np.ones((2, 3), np.float32)})
    assert "more" not in str(found.value)
