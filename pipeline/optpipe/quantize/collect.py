"""One pass of calibration data through a model that accumulates the statistics of every tensor to be quantized.

The model runs once per batch in ONNX Runtime with the tensors as extra outputs; memory is that of one batch, whatever the
number of images. On a GPU the outputs stay in its memory, where the extremes and histograms are computed.
"""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from optpipe.backends.base import Device
from optpipe.backends.onnx_graph import expose_tensors
from optpipe.backends.onnxruntime_session import HostBinding, create_inference_session, translate_runtime_errors
from optpipe.core.errors import StageError
from optpipe.core.plan import for_workspace
from optpipe.quantize.ranges import BINS, TensorStatistics, count_magnitudes, count_on_device

if TYPE_CHECKING:
    from numpy.typing import NDArray

BATCH_BYTES = 160 << 20
"""Limit of the extra outputs of one batch, which determines the batch size."""
COUNTING_THREADS = min(4, os.cpu_count() or 1)
"""Each finds the extremes and counts of one tensor."""
MAX_BATCH = {"cpu": 16, "cuda": 64}

Batch = Mapping[str, "NDArray[Any]"]


class Collector:
    def __init__(self, graph: Path, tensors: tuple[str, ...], histograms: bool, device: Device = "cpu") -> None:
        self.tensors, self.histograms, self.device = tensors, histograms, device
        self._low: dict[str, float] = {}
        self._high: dict[str, float] = {}
        self._counts: dict[str, Any] = {}
        self._bound: HostBinding | None = None
        self._session = open_exposed_session(graph, tensors, device)
        self._fed = {each.name for each in self._session.get_inputs()} & set(tensors)
        self._outputs = tuple(name for name in tensors if name not in self._fed)

    def add(self, batch: Batch) -> None:
        """Raises StageError for the first tensor that is not finite, BadInputError for inputs that the graph rejects."""
        with translate_runtime_errors():
            if self.device == "cuda":
                self._add_on_device(batch)
            else:
                self._add_on_host(batch)

    def _add_on_host(self, batch: Batch) -> None:
        found = {**{name: np.asarray(batch[name]) for name in self._fed}, **self._outputs_on_host(batch)}
        values = [found[name].astype(np.float32, copy=False) for name in self.tensors]
        with ThreadPoolExecutor(COUNTING_THREADS) as pool:
            extremes = pool.map(lambda value: (float(value.min()), float(value.max())), values)
            for name, (low, high) in zip(self.tensors, extremes, strict=True):
                self._extremes(name, low, high)
            if self.histograms:
                list(pool.map(self._count, self.tensors, values))

    def _count(self, name: str, value: "NDArray[np.float32]") -> None:
        counts = self._counts.setdefault(name, np.zeros((2, BINS), np.int64))
        counts += count_magnitudes(value)

    def _outputs_on_host(self, batch: Batch) -> Batch:
        """Reuses the memory while the shapes stay: new pages for every batch cost a sixth of a forward pass."""
        if not self._outputs:
            return {}
        bound = self._bound
        if bound is None or any(value.shape != batch[name].shape for name, value in bound.inputs.items()):
            bound = self._bound = None  # free the old memory first
            values = self._session.run(list(self._outputs), dict(batch))
            self._bound = HostBinding(self._session, batch, dict(zip(self._outputs, values, strict=True)))
            return self._bound.outputs
        for name, value in bound.inputs.items():
            np.copyto(value, batch[name])
        bound.launch()
        return bound.outputs

    def _add_on_device(self, batch: Batch) -> None:
        import torch

        inputs = {name: torch.from_numpy(np.ascontiguousarray(value)).cuda() for name, value in batch.items()}
        found = {**inputs, **run_on_device(self._session, inputs, self._outputs)}
        kept = [found[name].float() for name in self.tensors]
        extremes = torch.stack([torch.stack(torch.aminmax(value)) for value in kept]).double().cpu().tolist()
        for name, value, (low, high) in zip(self.tensors, kept, extremes, strict=True):
            self._extremes(name, low, high)
            if self.histograms:
                if name not in self._counts:
                    self._counts[name] = torch.zeros(2 * BINS + 1, dtype=torch.int64, device="cuda")
                count_on_device(value, self._counts[name][:-1])
                self._counts[name][-1] += value.numel()

    def _extremes(self, name: str, low: float, high: float) -> None:
        if not (np.isfinite(low) and np.isfinite(high)):
            raise StageError(
                f"tensor '{name}' contains NaN or Inf on the calibration data, so it has no range\n"
                f"check the preprocessing and weights; `{for_workspace('optpipe build MODEL --precision fp32')}` verifies the source model"
            )
        self._low[name] = min(low, self._low.get(name, low))
        self._high[name] = max(high, self._high.get(name, high))

    def statistics(self) -> dict[str, TensorStatistics]:
        return {
            name: TensorStatistics(self._low[name], self._high[name], self._read_counts(name)) for name in self.tensors
        }

    def _read_counts(self, name: str) -> Any:
        if not self.histograms:
            return None
        if self.device == "cpu":
            return self._counts[name]
        found = self._counts[name].cpu().numpy()
        whole = found[:-1].reshape(2, BINS)
        whole[0, 0] += found[-1] - whole.sum()  # the zeros, which the device does not count
        return whole


def open_exposed_session(graph: Path, tensors: Sequence[str], device: Device) -> Any:
    """An ONNX Runtime session of `graph` with `tensors` as additional outputs; on CUDA without TF32."""
    import onnx

    return open_model_session(expose_tensors(onnx.load(graph), tensors), device)


def open_model_session(model: Any, device: Device = "cpu") -> Any:
    """A session of a graph in memory; Q/DQ pairs that the provider does not fuse are computed in floating point."""
    import onnx
    import onnxruntime as ort

    options = ort.SessionOptions()
    if any(each.data_type == onnx.TensorProto.FLOAT8E4M3FN for each in model.graph.initializer):
        options.add_session_config_entry(
            "session.disable_quant_qdq", "1"
        )  # otherwise it moves FP8 to operators without FP8 kernels
        # at higher levels it drops a Relu before a QuantizeLinear with zero point 0, as if FP8 had no negative numbers
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    return create_inference_session(model.SerializeToString(), device, options, {"use_tf32": "0"})


def run_on_device(session: Any, inputs: Mapping[str, Any], outputs: Sequence[str]) -> dict[str, Any]:
    """Runs on CUDA tensors; the outputs are CUDA tensors too, which ONNX Runtime allocated."""
    import torch

    binding = session.io_binding()
    for name, tensor in inputs.items():
        dtype = np.dtype(str(tensor.dtype).removeprefix("torch."))
        binding.bind_input(name, "cuda", 0, dtype, tuple(tensor.shape), tensor.data_ptr())
    for name in outputs:
        binding.bind_output(name, "cuda", 0)
    torch.cuda.current_stream().synchronize()
    session.run_with_iobinding(binding)
    binding.synchronize_outputs()
    found = {}
    for name, value in zip(outputs, binding.get_outputs(), strict=True):
        source = _DeviceArray(int(value.data_ptr()), tuple(value.shape()))
        found[name] = torch.as_tensor(source, device="cuda").clone()  # the binding frees its memory
    return found


class _DeviceArray:
    """GPU memory that torch reads without a copy: the CUDA array interface, version 3."""

    def __init__(self, address: int, shape: tuple[int, ...]) -> None:
        self.__cuda_array_interface__ = {"shape": shape, "typestr": "<f4", "data": (address, False), "version": 3}


def choose_batch_size(graph: Path, tensors: Sequence[str], sample: Batch, device: Device) -> int:
    """The number of samples that keeps `tensors` inside BATCH_BYTES, measured by running one sample on the CPU."""
    outputs = [name for name in tensors if name not in sample]
    values = open_exposed_session(graph, tensors, "cpu").run(outputs, dict(sample)) if outputs else ()
    room = BATCH_BYTES * (16 if device == "cuda" else 1)
    return max(1, min(MAX_BATCH[device], room // max(sum(int(value.nbytes) for value in values), 1)))
