"""A binding captured into a CUDA graph: one launch call replays all of its kernels."""

from optpipe.backends.base import Binding

WARM_UP_LAUNCHES = 3
"""Lazy initialization has to happen before capture (PyTorch documentation, "CUDA Graphs")."""


class CudaGraphBinding:
    """Captures `binding.launch` once; has the same buffers."""

    def __init__(self, binding: Binding) -> None:
        import torch

        self.inputs = binding.inputs
        self._binding = binding  # its buffers live as long as the graph that writes to them
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_LAUNCHES):
                binding.launch()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            binding.launch()
        # a launch may have made new output tensors while it was captured; the graph writes to those
        self.outputs = binding.outputs

    def launch(self) -> None:
        """Replays the graph on torch's current stream."""
        self._graph.replay()
