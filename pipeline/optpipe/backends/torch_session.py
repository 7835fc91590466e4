"""Sessions of torch programs, eager or compiled by AOTInductor."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

from optpipe.backends.base import Binding
from optpipe.backends.torch_program import set_float32_products
from optpipe.core.card import tensor_from_dict
from optpipe.core.entries import ArtifactInfo
from optpipe.core.errors import StageError, first_line, is_out_of_memory
from optpipe.core.precision import Precision

if TYPE_CHECKING:
    import numpy as np
    import torch

    from optpipe.backends.base import Device


class TorchSession:
    def __init__(self, call: Callable[..., Any], info: ArtifactInfo, options: Mapping[str, Any]) -> None:
        import torch

        self.device = info.device
        self.inputs = tuple(map(tensor_from_dict, info.details["inputs"]))
        self.outputs = tuple(map(tensor_from_dict, info.details["outputs"]))
        self._call = call
        self._options = options
        if info.device == "cpu" and options.get("threads"):
            torch.set_num_threads(int(options["threads"]))
        set_float32_products(tf32=info.precision is Precision.TF32)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        del self._call

    def run(self, inputs: Mapping[str, "np.ndarray"]) -> dict[str, "np.ndarray"]:
        binding = self._bind_buffers(inputs)
        binding.launch()
        return {name: tensor.cpu().numpy() for name, tensor in binding.tensors.items()}

    def bind(self, inputs: Mapping[str, "np.ndarray"]) -> Binding:
        """Captures a CUDA graph on a GPU unless `cuda_graph` is off."""
        binding = self._bind_buffers(inputs)
        binding.launch()
        if self.device == "cuda" and self._options["cuda_graph"]:
            return CudaGraphBinding(binding)
        return binding

    def _bind_buffers(self, inputs: Mapping[str, "np.ndarray"]) -> "_TorchBinding":
        import torch

        tensors = {each.name: torch.from_numpy(inputs[each.name]).to(self.device, copy=True) for each in self.inputs}
        return _TorchBinding(self._call, tensors, tuple(each.name for each in self.outputs), self.device)


class _TorchBinding:
    def __init__(
        self, call: Callable[..., Any], tensors: "dict[str, torch.Tensor]", outputs: tuple[str, ...], device: "Device"
    ) -> None:
        self._call, self._inputs, self._names, self._device = call, tensors, outputs, device
        self.inputs = self._show(tensors)
        self.tensors: dict[str, torch.Tensor] = {}

    @property
    def outputs(self) -> Mapping[str, Any]:
        return self._show(self.tensors)

    def _show(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        return {name: tensor.numpy() for name, tensor in tensors.items()} if self._device == "cpu" else tensors

    def launch(self) -> None:
        """Calls the program, which allocates new outputs each time.

        Raises `StageError` with torch's reason, for example if the export specialized on a size that these inputs do not have.
        """
        import torch

        try:
            with torch.inference_mode():
                outputs = self._call(*self._inputs.values())
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise StageError(
                f"torch could not run the program: {first_line(error)}\ntry another backend, such as onnxruntime"
            ) from error
        flat = outputs if isinstance(outputs, tuple | list) else (outputs,)
        self.tensors = dict(zip(self._names, flat, strict=True))


WARM_UP_LAUNCHES = 3
"""Lazy initialization has to happen before capture (PyTorch documentation, "CUDA Graphs")."""


class CudaGraphBinding:
    """A CUDA graph of `binding.launch` with the same buffers."""

    def __init__(self, binding: Binding) -> None:
        import torch

        self.inputs = binding.inputs
        self._binding = binding  # keeps the buffers alive that the graph writes to
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_LAUNCHES):
                binding.launch()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            binding.launch()
        # the captured launch may have allocated new outputs, to which the graph writes
        self.outputs = binding.outputs

    def launch(self) -> None:
        """Replays the graph on torch's current stream."""
        self._graph.replay()
