"""Sessions of TensorRT and TensorRT-RTX engines on torch's CUDA memory and streams."""

import os
from collections.abc import Mapping, Sequence
from math import log, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from optpipe.backends.base import Binding, Option, merge_options
from optpipe.backends.tensorrt_builder import PLUGIN_PREFIX, create_logger, load_plugins
from optpipe.backends.torch_program import CudaGraphBinding
from optpipe.core.card import Shape, TensorSpec
from optpipe.core.errors import BadInputError, MissingError, StageError, escape

if TYPE_CHECKING:
    import numpy as np
    import torch

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
_CUDA_GRAPH = Option("cuda_graph", True, "captures an inference into a CUDA graph")
_RUNTIME_CACHE = Option(
    "runtime_cache",
    "",
    "file with the kernels that TensorRT-RTX compiled when it loaded engines; loads faster next time",
)


def list_session_options(library: str) -> tuple[Option, ...]:
    """The session options of `tensorrt` or `tensorrt_rtx`; only the latter compiles kernels when it loads."""
    return (_CUDA_GRAPH, _RUNTIME_CACHE) if library == "tensorrt_rtx" else (_CUDA_GRAPH,)


class TensorRTSession:
    device: "Device" = "cuda"

    def __init__(
        self,
        trt: Any,
        engine: Path,
        options: Mapping[str, Any],
        *,
        weights: Path | None = None,
        lean_runtime: bool = False,
    ) -> None:
        """Loads the plugin libraries in the engine's folder, then the engine.

        `weights` is the ONNX graph with the weights of an engine without weights. With `lean_runtime` the engine is
        version-compatible: it contains a runtime, whose code is run.
        """
        known = {each.name: each.default for each in list_session_options(trt.__name__)}
        self._options = merge_options(options, known, trt.__name__)
        cache = Path(str(self._options.get("runtime_cache", "")))
        if not cache.parent.is_dir():
            raise BadInputError(f"option runtime_cache={cache}: its folder does not exist")
        self._logger = create_logger(trt)
        self._runtime = trt.Runtime(self._logger)
        load_plugins(
            self._runtime.get_plugin_registry(),
            sorted(engine.parent.glob(f"{PLUGIN_PREFIX}*")),
            trt.__name__,
            self._logger,
        )
        if lean_runtime:
            self._runtime.engine_host_code_allowed = True
        self._engine = self._runtime.deserialize_cuda_engine(engine.read_bytes())
        if self._engine is None:
            raise StageError(
                f"{trt.__name__} {trt.__version__} cannot load {engine.name}: {escape(self._logger.first_error)[:200]}\n"
                "an engine loads only with the version and on the GPU it was built for; otherwise build it again"
            )
        if weights is not None:
            if not weights.is_file():
                raise MissingError(f"the engine holds no weights, and their graph {weights} is gone; build it again")
            refitter = trt.Refitter(self._engine, self._logger)
            refit = trt.OnnxParserRefitter(refitter, self._logger)
            if not refit.refit_from_file(str(weights)) or not refitter.refit_cuda_engine():
                missing = refitter.get_missing_weights()[:5]
                raise StageError(f"{trt.__name__} cannot refit the engine from {weights}: {missing}")
        self._context = self._create_context()
        names = [self._engine.get_tensor_name(index) for index in range(self._engine.num_io_tensors)]
        inputs = [name for name in names if self._engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
        self.inputs = tuple(self._spec(name) for name in inputs)
        self.outputs = tuple(self._spec(name) for name in names if name not in inputs)

    def _create_context(self) -> Any:
        if not self._options.get("runtime_cache"):
            return self._engine.create_execution_context()
        file = Path(str(self._options["runtime_cache"]))
        config = self._engine.create_runtime_config()
        self._cache = config.create_runtime_cache()
        if file.is_file() and not self._cache.deserialize(file.read_bytes()):
            raise BadInputError(f"option runtime_cache={file}: not a runtime cache of this version; give another file")
        config.set_runtime_cache(self._cache)
        return self._engine.create_execution_context(config)

    def _spec(self, name: str) -> TensorSpec:
        shape = tuple(
            int(size) if size >= 0 else f"dim{axis}" for axis, size in enumerate(self._engine.get_tensor_shape(name))
        )
        return TensorSpec(name, _DTYPES[str(self._engine.get_tensor_dtype(name)).rpartition(".")[2]], shape)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._options.get("runtime_cache"):
            file = Path(str(self._options["runtime_cache"]))
            part = file.with_name(f".{file.name}.{os.getpid()}")
            part.write_bytes(self._cache.serialize())
            part.replace(file)
        del self._context, self._engine, self._runtime

    def run(self, inputs: Mapping[str, "np.ndarray"]) -> dict[str, "np.ndarray"]:
        import torch

        binding = self._bind_buffers(inputs)
        binding.launch()
        torch.cuda.current_stream().synchronize()
        return {name: tensor.cpu().numpy() for name, tensor in binding.outputs.items()}

    def bind(self, inputs: Mapping[str, "np.ndarray"]) -> Binding:
        binding = self._bind_buffers(inputs)
        return CudaGraphBinding(binding) if self._options["cuda_graph"] else binding

    def _bind_buffers(self, inputs: Mapping[str, "np.ndarray"]) -> "_EngineBinding":
        import torch

        on_device = {name: torch.from_numpy(array).cuda() for name, array in inputs.items()}
        self._select_profile({name: tuple(array.shape) for name, array in inputs.items()})
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

    def _select_profile(self, shapes: Mapping[str, Shape]) -> None:
        import torch

        count = self._engine.num_optimization_profiles
        if count < 2:
            return
        profiles = [
            {name: tuple(map(tuple, self._engine.get_tensor_profile_shape(name, index))) for name in shapes}
            for index in range(count)
        ]
        chosen = choose_profile(profiles, shapes)
        if chosen is None:
            raise BadInputError(f"shapes {dict(shapes)} are outside all {count} of the engine's optimization profiles")
        stream = torch.cuda.current_stream()
        if not self._context.set_optimization_profile_async(chosen, stream.cuda_stream):
            raise StageError(f"optimization profile {chosen} cannot be selected; see the CUDA error above")
        stream.synchronize()


def choose_profile(profiles: Sequence[Mapping[str, tuple[Shape, ...]]], shapes: Mapping[str, Shape]) -> int | None:
    """The index of the profile (min, opt, and max shape by input) that contains `shapes` and has the nearest opt size, or None."""

    def holds(profile: Mapping[str, tuple[Shape, ...]]) -> bool:
        return all(
            low <= size <= high
            for name, shape in shapes.items()
            for low, size, high in zip(profile[name][0], shape, profile[name][2], strict=True)
        )

    def measure_distance(index: int) -> float:
        return sum(abs(log(prod(profiles[index][name][1]) / prod(shape))) for name, shape in shapes.items())

    return min((index for index, each in enumerate(profiles) if holds(each)), key=measure_distance, default=None)


class _EngineBinding:
    def __init__(self, context: Any, inputs: "dict[str, torch.Tensor]", outputs: "dict[str, torch.Tensor]") -> None:
        self.inputs, self.outputs = inputs, outputs
        self._context = context
        for name, tensor in {**inputs, **outputs}.items():
            context.set_tensor_address(name, tensor.data_ptr())

    def launch(self) -> None:
        import torch

        if not self._context.execute_async_v3(torch.cuda.current_stream().cuda_stream):
            raise StageError("the engine could not be enqueued; see the CUDA error above")
