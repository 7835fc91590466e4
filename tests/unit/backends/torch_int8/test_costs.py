"""What the steps of an INT8 program move, on tensors without values."""

import numpy as np
import torch

from optpipe.backends.torch_int8 import steps
from optpipe.backends.torch_int8.program import Program, count_costs


def test_a_step_whose_scale_is_one_number_has_no_weights():
    bias = np.ones(4, np.float16)
    network = steps.Network(
        ("x",), ("z",), (steps.Dequantize("d", "x", "y", 0.5), steps.Floating("b", "Add", ("y", bias), "z"))
    )
    found = count_costs(Program(network, {}, "meta"), (torch.empty(3, 4, dtype=torch.int8, device="meta"),))
    assert [each.bytes for each in found.nodes] == [12 + 24, 24 + 24 + 8]
