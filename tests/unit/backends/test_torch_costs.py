"""Multiply-adds and bytes of torch programs, compared with published counts and sums by hand."""

import pytest
import torch
from torch import nn

from optpipe.backends.base import NodeCost
from optpipe.backends.torch_eager import count_program_costs


def costs(module: nn.Module, *inputs: torch.Tensor) -> dict[str, NodeCost]:
    program = torch.export.export(module.eval(), inputs).module()
    named = {str(index): each for index, each in enumerate(inputs)}
    found = count_program_costs(program, named, lambda node: str(node.name))
    weights = sum(each.nbytes for each in module.parameters())
    assert found.edge_bytes > weights + sum(each.nbytes for each in inputs)
    return {row.name: row for row in found.nodes}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "macs"), [("resnet18", 1_814_073_344), ("vit_b_16", 17_563_828_224)])
def test_published_multiply_adds(name: str, macs: int) -> None:
    """torchvision's documentation says 1.81 and 17.56 GFLOPS, which it counts as multiply-adds."""
    import torchvision

    model = getattr(torchvision.models, name)(weights=None)
    assert sum(row.macs for row in costs(model, torch.randn(1, 3, 224, 224)).values()) == macs


def test_bytes_and_channels_of_a_convolution() -> None:
    (row,) = costs(nn.Conv2d(4, 8, 3, groups=2, bias=True), torch.randn(2, 4, 6, 6)).values()
    weights, given, answer = 8 * 2 * 9 + 8, 2 * 4 * 36, 2 * 8 * 16
    assert row.bytes == 4 * (weights + given + answer)
    assert row.macs == answer * 2 * 9
    assert (row.op, row.type, row.channels) == ("Conv", "fp32", (2, 4))


def test_views_move_nothing_and_what_changes_in_place_does() -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 2).relu_().view(4, 2)

    found = costs(Net(), torch.randn(2, 4))
    assert [row.bytes for row in found.values()] == [2 * 32, 2 * 32, 0]


def test_nodes_of_one_name_are_one_row() -> None:
    program = torch.export.export(nn.Sequential(nn.Linear(4, 8), nn.ReLU()).eval(), (torch.randn(3, 4),)).module()
    (row,) = count_program_costs(program, {"x": torch.randn(3, 4)}, lambda _node: "all").nodes
    assert (row.op, row.macs) == ("Gemm", 3 * 4 * 8)
    assert row.bytes == 4 * (3 * 4 + 4 * 8 + 8 + 3 * 8) + 4 * 2 * 3 * 8
