"""Sessions of torch programs, whose calls are bound to buffers and captured into CUDA graphs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

from optpipe.backends.base import (
    Binding,
    BuildRequest,
    Device,
)
from optpipe.core import np, torch
from optpipe.core.card import TensorSpec, tensor_from_dict
from optpipe.core.entries import ArtifactInfo
from optpipe.core.errors import (
    BadInputError,
    StageError,
    first_line,
    is_out_of_memory,
)
from optpipe.core.precision import Precision


def set_float32_products(*, tf32: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32


def record_tensors(request: BuildRequest) -> dict[str, Any]:
    card = request.card
    return {
        "inputs": [spec.tensor.to_dict() for spec in card.inputs],
        "outputs": [spec.to_dict() for spec in card.outputs],
    }


def list_recorded_tensors(info: ArtifactInfo, name: str) -> tuple[TensorSpec, ...]:
    """The `inputs` or `outputs` that a build's record names. Raises BadInputError if it names none that can be read."""
    try:
        return tuple(map(tensor_from_dict, info.details[name]))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        problem = (
            f"the record of {info.model} {info.backend} {info.precision} does not name its {name}"
        )
        raise BadInputError(f"{problem} ({first_line(error)})\nbuild it again") from error


class TorchSession:
    def __init__(
        self, call: Callable[..., Any], info: ArtifactInfo, options: Mapping[str, Any]
    ) -> None:
        self.device = info.device
        self.inputs = list_recorded_tensors(info, "inputs")
        self.outputs = list_recorded_tensors(info, "outputs")
        self._call = call
        self._options = options
        if info.device == "cpu" and options.get("threads"):
            torch.set_num_threads(int(options["threads"]))
        set_float32_products(tf32=info.precision is Precision.TF32)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        del self._call

    def mark_layers(self) -> bool:
        """Opens an NVTX range around each layer from now on, if the program names its modules."""
        from optpipe.backends.torch_marks import mark_layers

        return hasattr(self._call, "graph") and bool(mark_layers(self._call))

    def run(self, inputs: Mapping[str, "np.ndarray"]) -> dict[str, "np.ndarray"]:
        binding = self._bind_buffers(inputs)
        binding.launch()
        return {name: tensor.cpu().numpy() for name, tensor in binding.tensors.items()}

    def bind(self, inputs: Mapping[str, "np.ndarray"]) -> Binding:
        binding = self._bind_buffers(inputs)
        binding.launch()
        if self.device == "cuda" and self._options["cuda_graph"]:
            return CudaGraphBinding(binding)
        return binding

    def run_on(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Compiled code reads inputs in the layout of its example, so others are made contiguous.

        The outputs are ordinary tensors, which may be changed in place; those of inference mode may not.
        """
        ordered = [inputs[spec.name].contiguous() for spec in self.inputs]
        with torch.no_grad():
            outputs = call_program(self._call, ordered)
        return {spec.name: value for spec, value in zip(self.outputs, outputs, strict=True)}

    def prepare(self, inputs: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
        """As `run_on`, without looking at the inputs again."""
        ordered, names = (
            [inputs[spec.name] for spec in self.inputs],
            [spec.name for spec in self.outputs],
        )

        def call() -> dict[str, Any]:
            with torch.no_grad():
                outputs = call_program(self._call, ordered)
            return dict(zip(names, outputs, strict=True))

        return call

    def _bind_buffers(self, inputs: Mapping[str, "np.ndarray"]) -> "_TorchBinding":
        tensors = {
            spec.name: torch.from_numpy(inputs[spec.name]).to(self.device, copy=True)
            for spec in self.inputs
        }
        return _TorchBinding(
            self._call, tensors, tuple(spec.name for spec in self.outputs), self.device
        )


def call_program(call: Callable[..., Any], inputs: Iterable[Any]) -> Sequence[Any]:
    """The program's outputs.

    Raises `StageError` with torch's reason, for example if the export specialized on a size that these inputs do not have.
    """
    try:
        outputs = call(*inputs)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise StageError(
            f"torch could not run the program: {first_line(error)}\ntry another backend, such as onnxruntime"
        ) from error
    return outputs if isinstance(outputs, tuple | list) else (outputs,)


class _TorchBinding:
    def __init__(
        self,
        call: Callable[..., Any],
        tensors: "dict[str, torch.Tensor]",
        outputs: tuple[str, ...],
        device: Device,
    ) -> None:
        self._call, self._inputs, self._names, self._device = call, tensors, outputs, device
        self.inputs = self._show(tensors)
        self.tensors: dict[str, torch.Tensor] = {}

    @property
    def outputs(self) -> Mapping[str, Any]:
        return self._show(self.tensors)

    def _show(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        return (
            {name: tensor.numpy() for name, tensor in tensors.items()}
            if self._device == "cpu"
            else tensors
        )

    def launch(self) -> None:
        """Calls the program, which allocates new outputs each time; raises as `call_program`."""
        with torch.inference_mode():
            outputs = call_program(self._call, self._inputs.values())
        self.tensors = dict(zip(self._names, outputs, strict=True))


WARM_UP_LAUNCHES = 3
"""Lazy initialization has to happen before capture (PyTorch documentation, "CUDA Graphs")."""


class CudaGraphBinding:
    def __init__(self, binding: Binding) -> None:
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
        self._graph.replay()
