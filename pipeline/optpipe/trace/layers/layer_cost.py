"""What a layer computes and moves, and whether Tensor Cores can take it."""

from dataclasses import dataclass, replace

from optpipe.trace.layers.peaks import Peaks

ALIGNMENT = {"fp16": 8, "bf16": 8, "tf32": 4, "int8": 16, "fp8": 16}
"""Of what number a matrix layer's channels are to be multiples, by type (NVIDIA, "Matrix Multiplication Background")."""


@dataclass(frozen=True, slots=True)
class LayerCost:
    """What a layer computes and moves at one batch size."""

    name: str
    op: str
    type: str
    macs: int
    bytes: int
    channels: tuple[int, int] | None = None
    """Input and output channels of a matrix layer, for the alignment that Tensor Cores need."""
    fused_bytes: int | None = None
    """What is left of `bytes` where elementwise operators are fused, with those of the operators that join this layer:
    0 for one that joins another layer. None: nothing is fused."""

    @property
    def is_fused_away(self) -> bool:
        """Whether it needs no kernel of its own where elementwise operators are fused."""
        return self.fused_bytes == 0 and not self.macs

    def math_ns(self, peaks: Peaks) -> float:
        """The time the arithmetic takes at the peak of the layer's type."""
        return 2 * self.macs / peaks.flops(self.type) * 1e9

    def memory_ns(self, peaks: Peaks) -> float:
        """The time the layer's bytes take at the peak of the memory."""
        return self.bytes / peaks.bytes_per_s * 1e9

    def bound_ns(self, peaks: Peaks) -> float:
        """The larger of the two, for the layer as a node on its own."""
        return max(self.math_ns(peaks), self.memory_ns(peaks))

    def fused(self) -> "LayerCost":
        """The layer with the elementwise operators that join it."""
        return self if self.fused_bytes is None else replace(self, bytes=self.fused_bytes)

    @property
    def ineligible(self) -> str | None:
        """Why Tensor Cores cannot take a matrix layer as it is: its type, or channels that are not aligned."""
        multiple = ALIGNMENT.get(self.type)
        if multiple is None:
            return f"there are no Tensor Cores for {self.type}; use fp16 or tf32"
        if self.channels and any(channels % multiple for channels in self.channels):
            return f"channels {self.channels[0]} and {self.channels[1]} are not multiples of {multiple}"
        return None
