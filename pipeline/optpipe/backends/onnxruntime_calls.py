"""Calls of an ONNX Runtime session on torch tensors where they lie; what a call can find made by an earlier one is made once."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from optpipe.backends.cuda_streams import STREAMS
from optpipe.core import LazyModule, np, torch
from optpipe.core.card import TensorSpec
from optpipe.core.errors import BadInputError

ort = LazyModule("onnxruntime")

NO_GRAPH = -1
MOST_LAYOUTS, MOST_BINDINGS = 64, 64
"""Kept for calls: torch's allocator hands the same few addresses out again."""


def make_run_options(graph_id: int, *, waits: bool = True) -> Any:
    """Options of runs in the CUDA graph `graph_id`, or in none.

    The number is always given: ONNX Runtime 1.31 asks for it before each run with a binding, and options that lack it cost it
    an exception, 0.2 ms on a slow processor.
    """
    options = ort.RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(graph_id))
    if not waits:
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    return options


class Layout:
    """The outputs of inputs of certain shapes, and the bindings of the addresses where both lay."""

    def __init__(self, outputs: Sequence[tuple[tuple[int, ...], Any]]) -> None:
        self.outputs = outputs
        """Shape and torch's type of each."""
        self.bindings: dict[Any, Any] = {}


class TensorCalls:
    """Calls of one session. `run` is not for several threads at once."""

    def __init__(
        self,
        session: Any,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        stream: int,
        *,
        cuda_graph: bool,
    ) -> None:
        """`stream` is the handle of the session's stream on a GPU; 0 for a stream that only ONNX Runtime knows, and on the CPU."""
        self._session, self._inputs, self._outputs = session, inputs, outputs
        self._input_names = [spec.name for spec in inputs]
        self._output_names = [spec.name for spec in outputs]
        self._layouts: dict[Any, Layout] = {}
        self._places = _find_places(session)
        self._options = None
        if stream or cuda_graph:
            self._options = make_run_options(NO_GRAPH, waits=not stream)
        self._handle = stream
        self._in_order: tuple[int, ...] = ()
        """Handles of the callers' streams that are ordered with the session's without events."""
        if stream:
            self._stream = torch.cuda.ExternalStream(stream)
            self._given, self._done = torch.cuda.Event(), torch.cuda.Event()
            self._in_order = (stream, 0) if STREAMS.are_ordered(stream) else (stream,)

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The outputs, which are new tensors; `inputs` lie on the session's device.

        Raises BadInputError for an output whose size depends on the inputs' values.
        """
        given = [inputs[name].contiguous() for name in self._input_names]
        shapes = tuple([tensor.shape for tensor in given])
        layout = self._layouts.get(shapes) or self._make_layout(shapes)
        device = given[0].device
        made = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in layout.outputs]
        addresses = tuple([tensor.data_ptr() for tensor in (*given, *made)])
        bound = layout.bindings.get(addresses)
        if bound is None:
            bound = layout.bindings[addresses] = self._bind(given, made, layout)
        elif self._places != device.type:
            self._bind_inputs(bound, given)
        if device.type == "cpu" or self._is_in_order(device.index):
            self._session.run_with_iobinding(bound, self._options)
        else:
            self._launch_between(bound, torch.cuda.current_stream(device.index))
        return dict(zip(self._output_names, made, strict=True))

    def prepare(self, inputs: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
        """A call with one binding, whose outputs stay where they are and are overwritten by the next call.

        Raises BadInputError as `run`.
        """
        given = [inputs[name] for name in self._input_names]
        shapes = tuple([tensor.shape for tensor in given])
        layout = self._layouts.get(shapes) or self._make_layout(shapes)
        device = given[0].device
        made = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in layout.outputs]
        bound = self._bind(given, made, Layout(layout.outputs))
        outputs = dict(zip(self._output_names, made, strict=True))
        copies, on_host = self._places != device.type, device.type == "cpu"
        run, options = self._session.run_with_iobinding, self._options

        def call() -> dict[str, Any]:
            if copies:
                self._bind_inputs(bound, given)
            if on_host or self._is_in_order(device.index):
                run(bound, options)
            else:
                self._launch_between(bound, torch.cuda.current_stream(device.index))
            return outputs

        return call

    def _is_in_order(self, index: int) -> bool:
        """Whether nothing has to order a launch with the caller's work on that GPU."""
        if not self._in_order:
            return False
        return torch._C._cuda_getCurrentRawStream(index) in self._in_order

    def _launch_between(self, bound: Any, caller: Any) -> None:
        """Launches after what the caller's stream has been given, and before what it will be given.

        Memory that the caller frees is then used again only after the work is done. A stream that only ONNX Runtime knows is
        waited for.
        """
        if not self._handle:
            caller.synchronize()
            self._session.run_with_iobinding(bound, self._options)
            return
        self._given.record(caller)
        self._stream.wait_event(self._given)
        try:
            self._session.run_with_iobinding(bound, self._options)
        finally:
            self._done.record(self._stream)
            caller.wait_event(self._done)

    def _bind(self, inputs: Sequence[Any], outputs: Sequence[Any], layout: Layout) -> Any:
        """A binding of tensors at these addresses. It holds no memory: a tensor may be freed, and another one lie there."""
        if len(layout.bindings) >= MOST_BINDINGS:
            layout.bindings.clear()
        bound = self._session.io_binding()
        self._bind_inputs(bound, inputs)
        for name, tensor in zip(self._output_names, outputs, strict=True):
            bind_tensor(bound.bind_output, name, tensor)
        return bound

    def _bind_inputs(self, bound: Any, inputs: Sequence[Any]) -> None:
        """Copies, too, what a node on the CPU reads from a GPU."""
        for name, tensor in zip(self._input_names, inputs, strict=True):
            bind_tensor(bound.bind_input, name, tensor)

    def _make_layout(self, shapes: tuple[Any, ...]) -> Layout:
        sizes = {
            size: int(given)
            for spec, shape in zip(self._inputs, shapes, strict=True)
            for size, given in zip(spec.shape, shape, strict=True)
            if isinstance(size, str)
        }
        outputs = []
        for spec in self._outputs:
            known = [
                sizes.get(size, size) if isinstance(size, str) else size for size in spec.shape
            ]
            shape = tuple(size for size in known if isinstance(size, int))
            if len(shape) != len(known):
                raise BadInputError(
                    f"output '{spec.name}' has a size that depends on the inputs' values ({'x'.join(map(str, spec.shape))})\n"
                    "give arrays or CPU tensors"
                )
            outputs.append((shape, getattr(torch, spec.dtype)))
        if len(self._layouts) >= MOST_LAYOUTS:
            self._layouts.clear()
        layout = self._layouts[shapes] = Layout(outputs)
        return layout


def _find_places(session: Any) -> str:
    """The type of the device on which the session reads all inputs, as torch writes it; empty if they differ or are unknown.

    ONNX Runtime tells it since 1.23.
    """
    find = getattr(session, "get_input_memory_infos", None)
    names = {place.name.lower() for place in find()} if find is not None else set()
    return names.pop() if len(names) == 1 else ""


def bind_tensor(bind: Callable[..., None], name: str, tensor: Any) -> None:
    """Binds a contiguous torch tensor where it lies; `bind` is a binding's `bind_input` or `bind_output`."""
    place, element = tensor.device, _get_element_type(tensor.dtype)
    shape = tuple(tensor.shape)
    bind(name, place.type, place.index or 0, element, shape, tensor.data_ptr())


@cache
def _get_element_type(dtype: Any) -> Any:
    """The type of a torch tensor as a binding takes it: NumPy's, or ONNX's number for what NumPy lacks."""
    name = str(dtype).removeprefix("torch.")
    return _ONNX_BFLOAT16 if name == "bfloat16" else np.dtype(name)


_ONNX_BFLOAT16 = 16
"""TensorProto.DataType in onnx.proto."""
