"""A TensorRT or TensorRT-RTX engine at run time, on torch's CUDA memory and streams."""

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from optpipe.backends.base import Binding, merge_options
from optpipe.backends.cuda_graph import CudaGraphBinding
from optpipe.core.tensors import TensorSpec
from optpipe.errors import BadInputError, StageError

if TYPE_CHECKING:
    import numpy as np

    from optpipe.backends.base import Device

_DTYPES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "INT8": "int8",
    "INT32": "int32",
    "INT64": "int64",
    "UINT8": "uint8",
    "BOOL": "bool",
}
OPTIONS = {"cuda_graph": True}


class TensorRTSession:
    """One engine with one execution context."""

    device: "Device" = "cuda"

    def __init__(self, trt: Any, engine: Path, options: Mapping[str, Any]) -> None:
        self._options = merge_options(options, OPTIONS, "tensorrt")
        self._logger = trt.Logger(trt.Logger.ERROR)
        self._runtime = trt.Runtime(self._logger)
        self._engine = self._runtime.deserialize_cuda_engine(engine.read_bytes())
        if self._engine is None:
            raise StageError(
                f"{trt.__name__} {trt.__version__} cannot load {engine.name}: it was built for another version or GPU; rebuild it"
            )
        self._context = self._engine.create_execution_context()
        names = [self._engine.get_tensor_name(index) for index in range(self._engine.num_io_tensors)]
        inputs = [name for name in names if self._engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
        self.inputs = tuple(self._spec(name) for name in inputs)
        self.outputs = tuple(self._spec(name) for name in names if name not in inputs)

    def _spec(self, name: str) -> TensorSpec:
        shape = tuple(
            int(size) if size >= 0 else f"dim{axis}" for axis, size in enumerate(self._engine.get_tensor_shape(name))
        )
        return TensorSpec(name, _DTYPES[str(self._engine.get_tensor_dtype(name)).rpartition(".")[2]], shape)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del self._context, self._engine, self._runtime

    def run(self, inputs: Mapping[str, "np.ndarray"]) -> dict[str, "np.ndarray"]:
        """Host to host, without a CUDA graph."""
        import torch

        binding = self._bind_buffers(inputs)
        binding.launch()
        torch.cuda.current_stream().synchronize()
        return {name: tensor.cpu().numpy() for name, tensor in binding.outputs.items()}

    def bind(self, inputs: Mapping[str, "np.ndarray"]) -> Binding:
        """Fixed buffers; captured into a CUDA graph unless `cuda_graph` is off."""
        binding = self._bind_buffers(inputs)
        return CudaGraphBinding(binding) if self._options["cuda_graph"] else binding

    def _bind_buffers(self, inputs: Mapping[str, "np.ndarray"]) -> "_EngineBinding":
        import torch

        on_device = {name: torch.from_numpy(array).cuda() for name, array in inputs.items()}
        for name, tensor in on_device.items():
            if not self._context.set_input_shape(name, tuple(tensor.shape)):
                raise BadInputError(f"{name} {tuple(tensor.shape)} is outside the engine's optimization profile")
        if self._context.infer_shapes():
            raise StageError("the engine's output shapes depend on its inputs' values; it can be built but not bound")
        outputs = {
            each.name: torch.empty(
                tuple(self._context.get_tensor_shape(each.name)), dtype=getattr(torch, each.dtype), device="cuda"
            )
            for each in self.outputs
        }
        return _EngineBinding(self._context, on_device, outputs)


class _EngineBinding:
    def __init__(self, context: Any, inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
        self.inputs, self.outputs = inputs, outputs
        self._context = context
        for name, tensor in {**inputs, **outputs}.items():
            context.set_tensor_address(name, tensor.data_ptr())

    def launch(self) -> None:
        """Enqueues on torch's current stream."""
        import torch

        if not self._context.execute_async_v3(torch.cuda.current_stream().cuda_stream):
            raise StageError("the engine could not be enqueued; see the CUDA error above")
