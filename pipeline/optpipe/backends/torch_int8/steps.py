"""What a lowered INT8 network does, step by step: values, no torch.

Images are (images, channels, height, width), stored channels last; linear layers take (..., features). `given` and `output` name tensors.
An INT8 tensor with `scale` stands for `integer * scale`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

ACTIVATIONS = ("", "relu", "silu", "hardswish")
"""What a convolution may end in; the last two only in floating point."""
GATES = ("", "sigmoid", "hardsigmoid")
"""What may be between a gate and its product; the last is min(max(x + 3, 0), 6) / 6."""


@dataclass(frozen=True, slots=True)
class Convolution:
    """An INT8 convolution, or with `flat` a linear layer over the last axis, with all that is fused with it.

    With `sum` the INT32 sum of products: value = sum * scale + bias, + added * added_scale, activation; then rounded half to even
    and clamped to [-128, 127], or in FP16 with `half`. Scale and bias are in steps of the output.
    """

    name: str
    given: str
    output: str
    weight: NDArray[np.int8]
    """(output channels, kernel rows, kernel columns, input channels of a group)"""
    scale: NDArray[np.float32]
    bias: NDArray[np.float32]
    stride: int
    padding: tuple[int, int, int, int]
    """Zeros above, left, below and right of an image."""
    activation: str
    """One of ACTIVATIONS."""
    half: bool
    added: str | None = None
    added_scale: float = 0.0
    macs: int = 0
    """At the profile's `opt` shapes."""
    flat: bool = False
    dilation: int = 1
    groups: int = 1

    @property
    def kernel(self) -> tuple[int, int]:
        """Its rows and columns."""
        return self.weight.shape[1], self.weight.shape[2]

    @property
    def is_product(self) -> bool:
        """Whether it is one matrix product over all pixels."""
        return self.kernel == (1, 1) and self.stride == self.groups == 1 and not any(self.padding)

    @property
    def is_plain(self) -> bool:
        """Whether its kernel is square and dense, over all channels, with as many zeros on every side."""
        return self.kernel[0] == self.kernel[1] and self.dilation == self.groups == 1 and len(set(self.padding)) == 1


@dataclass(frozen=True, slots=True)
class Linear:
    """An INT8 linear layer over the last axis whose outputs are FP32: sum * scale + bias."""

    name: str
    given: str
    output: str
    weight: NDArray[np.int8]
    """(output features, input features)"""
    scale: NDArray[np.float32]
    bias: NDArray[np.float32]
    macs: int = 0


@dataclass(frozen=True, slots=True)
class Stem:
    """The first convolution, in FP16 with FP32 sums on few channels and stride 2, with bias and activation: FP16 out with `half`,
    else INT8.
    """

    name: str
    given: str
    output: str
    weight: NDArray[np.float16]
    """(output channels, input channels, kernel, kernel)"""
    bias: NDArray[np.float32]
    padding: int
    activation: str
    half: bool
    inverse_scale: float = 1.0
    macs: int = 0


@dataclass(frozen=True, slots=True)
class Depthwise:
    """A depthwise convolution in FP16 with FP32 sums, bias and activation: FP16 out with `half`, else INT8."""

    name: str
    given: str
    output: str
    weight: NDArray[np.float16]
    """(channels, kernel rows, kernel columns)"""
    bias: NDArray[np.float32]
    stride: int
    padding: tuple[int, int, int, int]
    """Zeros above, left, below and right of an image."""
    activation: str
    half: bool
    inverse_scale: float = 1.0
    spare: int = 0
    """Channels of zeros behind the others."""
    macs: int = 0

    @property
    def kernel(self) -> tuple[int, int]:
        """Its rows and columns."""
        return self.weight.shape[1], self.weight.shape[2]


@dataclass(frozen=True, slots=True)
class MaxPool:
    """Max pooling of INT8."""

    name: str
    given: str
    output: str
    kernel: int
    stride: int
    padding: int


@dataclass(frozen=True, slots=True)
class MeanPool:
    """The mean over all pixels of an FP16 tensor, quantized: (images, channels) in INT8, or (images, channels, 1, 1) with `keepdims`."""

    name: str
    given: str
    output: str
    inverse_scale: float
    keepdims: bool = False
    spare: int = 0
    """Channels of zeros behind the others."""


@dataclass(frozen=True, slots=True)
class Quantize:
    """FP16 to INT8, value * inverse_scale rounded half to even and clamped; of an image with a `gate` value * factor * inverse_scale."""

    name: str
    given: str
    output: str
    inverse_scale: float
    gate: str | None = None
    """FP16, (images, channels, 1, 1): the factors, or what `gate_activation` makes factors of."""
    gate_activation: str = ""
    """One of GATES."""
    spare: int = 0
    """Of an image with a gate, channels of zeros behind the others."""


@dataclass(frozen=True, slots=True)
class Dequantize:
    """INT8 to FP16."""

    name: str
    given: str
    output: str
    scale: float


@dataclass(frozen=True, slots=True)
class Floating:
    """One ONNX operator computed by torch in FP16."""

    name: str
    operator: str
    inputs: tuple[str | NDArray[Any] | None, ...]
    """Names of tensors, constants, and None for an optional one that is left out."""
    output: str
    attributes: Mapping[str, Any] = field(default_factory=dict)
    macs: int = 0
    on_host: bool = False
    """Whether it computes a shape, in the host's memory."""


Step = Convolution | Linear | Stem | Depthwise | MaxPool | MeanPool | Quantize | Dequantize | Floating


@dataclass(frozen=True, slots=True)
class Network:
    """The steps in the order in which they run; inputs and outputs are FP32."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    steps: tuple[Step, ...]


def list_tensors_read(step: Step) -> tuple[str, ...]:
    """The tensors a step reads."""
    match step:
        case Floating():
            return tuple(each for each in step.inputs if isinstance(each, str))
        case Convolution(added=str() as second) | Quantize(gate=str() as second):
            return step.given, second
        case _:
            return (step.given,)
