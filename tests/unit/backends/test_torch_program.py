"""The layout of images follows precision and device."""

import pytest
import torch

from optpipe.backends.base import Device
from optpipe.backends.torch_program import cast_module, choose_image_layout
from optpipe.core.precision import Precision


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_a_program_s_answers_are_fp32_in_the_module_s_layout(precision: Precision) -> None:
    module = cast_module(precision, torch.nn.Conv2d(3, 8, 3), "cpu")
    (answer,) = module(torch.zeros(2, 3, 8, 8))
    assert answer.dtype == torch.float32
    assert answer.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("precision", "device", "layout"),
    [
        (Precision.FP32, "cpu", torch.channels_last),
        (Precision.FP32, "cuda", torch.contiguous_format),
        (Precision.TF32, "cuda", torch.channels_last),
        (Precision.FP16, "cuda", torch.channels_last),
    ],
)
def test_channels_first_where_tensor_cores_may_not_be_used(
    precision: Precision, device: Device, layout: torch.memory_format
) -> None:
    assert choose_image_layout(precision, device) is layout
