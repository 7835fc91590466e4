"""Tensor Cores are allowed where that rounds no FP32 product to TF32 unasked."""

import pytest

from optpipe.backends.onnxruntime import may_use_tensor_cores
from optpipe.core.precision import LayerType


def layers(*types: str) -> tuple[LayerType, ...]:
    return (LayerType("scale", "Mul", "fp32", 0), *(LayerType(f"conv_{kind}", "Conv", kind, 10) for kind in types))


@pytest.mark.parametrize(
    ("types", "allowed"),
    [
        (("fp16", "fp16"), True),
        (("bf16",), True),
        (("tf32",), True),
        (("int8", "fp16"), True),
        (("fp32",), False),
        (("fp16", "fp32"), False),
    ],
)
def test_only_products_count(types: tuple[str, ...], *, allowed: bool) -> None:
    assert may_use_tensor_cores(layers(*types)) is allowed
