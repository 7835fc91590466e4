"""A binding's buffers are its own: what a caller writes into them must not change the arrays it was bound with."""

import numpy as np
import torch
from tests.fakes.entries import artifact_info

from optpipe.backends.torch_session import TorchSession

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
