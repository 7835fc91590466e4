"""Requests of any batch size through CUDA graphs give what the session gives without."""

import numpy as np
import pytest
from tests.fakes.entries import artifact_info

from optpipe.core.card import TensorSpec
from optpipe.core.errors import BadInputError
from optpipe.deploy.session_process import CapturedSession, can_capture


def test_captured_batches_are_those_of_the_session():
    import torch

    from optpipe.backends.torch_program import TorchSession

    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 3).cuda().eval()
    tensors = {
        "inputs": [TensorSpec("x", "float32", ("batch", 8)).to_dict()],
        "outputs": [TensorSpec("y", "float32", ("batch", 3)).to_dict()],
    }
    info = artifact_info(backend="torch", device="cuda", details=tensors)
    session = TorchSession(lambda given: (layer(given).relu(),), info, {"cuda_graph": True})
    assert can_capture(session)
    captured, draw = CapturedSession(session, 12), np.random.default_rng(0)
    for sizes in ([1], [3], [2, 5], [12], [1, 1, 1]):
        requests = [{"x": draw.standard_normal((size, 8), np.float32)} for size in sizes]
        whole = session.run({"x": np.concatenate([each["x"] for each in requests])})["y"]
        np.testing.assert_allclose(captured.run(requests)["y"], whole, rtol=1e-5, atol=1e-6)
    with pytest.raises(BadInputError, match="13 samples exceed the largest batch, 12"):
        captured.run([{"x": np.zeros((13, 8), np.float32)}])
    with pytest.raises(BadInputError, match=r"input 'x' is \[1, 1\]"):
        captured.run([{"x": np.zeros((1, 1), np.float32)}])
