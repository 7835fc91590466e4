"""Programs of torch.export are refused with a way out, and the way out keeps their ranges."""

from importlib import import_module

import numpy as np
import onnx
import pytest
import torch

from optpipe.core.errors import BadInputError
from optpipe.models.sources.resolve import source_from_text

SCALE, ZERO = 0.0371, 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_way_out_keeps_scales_and_zero_points(tmp_path) -> None:
    import_module("torch.ao.quantization.fx._decomposed")  # registers the operators
    operators = torch.ops.quantized_decomposed

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(16, 8)

        def forward(self, x):
            grid = (SCALE, ZERO, -128, 127, torch.int8)
            integers = operators.quantize_per_tensor(x, *grid)
            return self.layer(operators.dequantize_per_tensor(integers, *grid))

    example = (torch.zeros(2, 16),)
    file = tmp_path / "qat.pt2"
    torch.export.save(torch.export.export(Network().eval(), example), file)
    with pytest.raises(BadInputError) as refused:
        source_from_text(str(file))
    assert "int8-lost-accuracy.md" in str(refused.value)

    net = tmp_path / "net.onnx"
    torch.onnx.export(torch.export.load(file).module(), example, net, dynamo=True, verbose=False)
    graph = onnx.load(net).graph
    held = {each.name: onnx.numpy_helper.to_array(each) for each in graph.initializer}
    (quantize,) = (node for node in graph.node if node.op_type == "QuantizeLinear")
    assert held[quantize.input[1]].reshape(()) == np.float32(SCALE)
    assert held[quantize.input[2]].reshape(()) == ZERO
