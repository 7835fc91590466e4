"""Ranges of tensors: statistics from one pass of calibration data, four methods, and the table of a method's ranges.

The model runs once per batch in ONNX Runtime with the tensors as extra outputs; memory is that of one batch, whatever the
number of images. On a GPU the outputs stay in its memory, where the extremes and histograms are computed.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optpipe.backends.base import Device
from optpipe.backends.onnx_graph import expose_tensors, load_onnx
from optpipe.backends.onnx_mends import separate_int8_constants
from optpipe.backends.onnx_quantized import find_quantized_operators
from optpipe.backends.onnxruntime_session import (
    create_inference_session,
    get_level,
    translate_runtime_errors,
)
from optpipe.core import LazyModule, onnx, torch
from optpipe.core.entries import SampleSetSummary
from optpipe.core.errors import BadInputError, escape
from optpipe.core.files import hash_text, open_user_file
from optpipe.core.records import json_from_record, read_record
from optpipe.core.wording import Call

ort = LazyModule("onnxruntime")


@dataclass(frozen=True, eq=False)
class TensorStatistics:
    """One tensor's smallest and largest value and, for the histogram methods, the counts of `count_magnitudes`."""

    low: float
    high: float
    counts: NDArray[np.int64] | None = None

    @property
    def amax(self) -> float:
        return max(abs(self.low), abs(self.high))


FORMAT = "optpipe.calibration-table/1"


class BadRangeError(BadInputError, ValueError):
    """A range that cannot be quantized; a ValueError, so that the error of a table names its place."""


@dataclass(frozen=True, slots=True)
class TensorRange:
    """The bound `amax` of one tensor's symmetric range, and its smallest and largest value."""

    amax: float
    low: float
    high: float

    def __post_init__(self) -> None:
        if not (0 < self.amax < math.inf and math.isfinite(self.low) and math.isfinite(self.high)):
            raise BadRangeError(
                f"a range needs a finite positive amax and finite extremes; got {self.amax}, {self.low}, {self.high}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationTable:
    format: str = FORMAT
    method: str
    model: str
    graph_sha256: str
    transform_sha256: str | None
    set: SampleSetSummary
    keep: tuple[str, ...] = ()
    ranges: Mapping[str, TensorRange]
    """By tensor, in the graph's order."""

    @property
    def sha256(self) -> str:
        return hash_text(json_from_record(self).decode())


def write_table(path: Path, table: CalibrationTable) -> None:
    path.write_bytes(json_from_record(table))


def read_table(path: Path) -> CalibrationTable:
    """Raises BadInputError for another format or a range that cannot be quantized."""
    table = read_record(path, CalibrationTable)
    if table.format != FORMAT:
        raise BadInputError(
            f"{path} has format {table.format}; this version of optpipe reads {FORMAT}"
        )
    return table


def is_table(path: Path) -> bool:
    if not path.is_file():
        return False
    with open_user_file(path) as file:
        return FORMAT.partition("/")[0].encode() in file.read(200)


# A histogram of magnitudes whose bins need no range: the leading bits of the float.
#
# The bits of a positive float, read as an integer, grow with its value; dropping the last 14 leaves the exponent and nine
# bits of mantissa: 512 bins per octave, each 0.2% of its value wide or less. So one pass over the data is enough, bins
# never have to be rescaled, and histograms of parts add up exactly, whatever the order. INT8 at full scale has 64 levels
# in its top octave, eight times coarser than these bins.


SHIFT = 14
BINS = 1 << (31 - SHIFT)
LOWEST = (127 - 32) << (23 - SHIFT)
"""Magnitudes below 2**-32 count as zero."""
_CHUNK = 1 << 20
"""Elements per step on the CPU: the temporaries stay in the cache and memory does not depend on the tensor."""


def find_nonzero(
    counts: NDArray[np.int64],
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Lower edges, upper edges and counts of the nonempty bins above zero, in rising order."""
    index = LOWEST + np.flatnonzero(counts[LOWEST:])
    low, high = (
        (bits.astype(np.uint32) << SHIFT).view(np.float32).astype(np.float64)
        for bits in (index, index + 1)
    )
    return low, high, counts[index].astype(np.float64)


def count_magnitudes(values: NDArray[np.float32]) -> NDArray[np.int64]:
    """Counts |x| of finite `values` of any shape by bin, on the CPU."""
    counts = np.zeros(BINS, np.int64)
    flat = np.ascontiguousarray(values).reshape(-1).view(np.uint32)
    for start in range(0, flat.size, _CHUNK):
        binned = np.bincount(
            (flat[start : start + _CHUNK] >> SHIFT & BINS - 1).view(np.int32)
        )  # without the sign
        counts[: binned.size] += binned
    return counts


def count_on_device(values: Any, counts: Any) -> None:
    """Adds a torch float32 tensor's magnitudes to `counts`, (BINS,) int64, on its device, without synchronization.

    Zeros are not counted, so that half of the atomic additions after a ReLU do not queue at one address; they are the
    difference to the number of elements.
    """
    bins = (values.reshape(-1).view(torch.int32) >> SHIFT) & (BINS - 1)
    ones = (bins >= LOWEST).to(torch.int64)
    spread = torch.where(
        ones.bool(),
        bins,
        torch.arange(bins.numel(), device=bins.device, dtype=torch.int32) % LOWEST,
    )
    counts.scatter_add_(0, spread.to(torch.int64), ones)


def find_percentile(statistics: TensorStatistics, percent: float = 99.99) -> float:
    """The range's bound, interpolated inside its bin and never above the largest value."""
    assert statistics.counts is not None
    low, high, counts = find_nonzero(statistics.counts)
    if not counts.size:  # all values are smaller than the histogram's
        return statistics.amax
    rank = percent / 100 * int(statistics.counts.sum()) - int(statistics.counts[:LOWEST].sum())
    below = np.concatenate([[0.0], np.cumsum(counts)])
    index = min(max(int(np.searchsorted(below, rank, side="left")) - 1, 0), counts.size - 1)
    share = min(max((rank - below[index]) / counts[index], 0.0), 1.0)
    return min(float(low[index] + share * (high[index] - low[index])), statistics.amax)


# `mse`: the range whose INT8 grid has the smallest mean squared error, rounding and clipping together.
#
# It is the tensor's own error that is small, not the model's: outliers a thousand times higher than the rest outweigh
# it by their squares, however little the next layer makes of them. There `percentile` does better.


LEVELS = 127
_COARSE, _FINE, _SMALLEST = 96, 24, 1 / 1024


def find_least_error(statistics: TensorStatistics) -> float:
    """The range's bound: a geometric search over three decades below the largest value, then a finer one around the best."""
    assert statistics.counts is not None
    low, high, counts = find_nonzero(statistics.counts)
    if not counts.size:  # all values are smaller than the histogram's
        return statistics.amax
    values = (low + np.minimum(high, statistics.amax)) / 2
    coarse = statistics.amax * np.geomspace(_SMALLEST, 1.0, _COARSE)
    best = int(np.argmin(_compute_errors(values, counts, coarse)))
    around = np.geomspace(coarse[max(best - 1, 0)], coarse[min(best + 1, _COARSE - 1)], _FINE)
    return float(around[int(np.argmin(_compute_errors(values, counts, around)))])


def _compute_errors(
    values: NDArray[np.float64], counts: NDArray[np.float64], bounds: NDArray[np.float64]
) -> list[float]:
    """The sum of squared errors of `values`, each `counts` times, on the symmetric grid that ends at each of `bounds`."""
    scales = bounds / LEVELS
    return [
        float(counts @ (values - np.minimum(np.rint(values / scale), LEVELS) * scale) ** 2)
        for scale in scales
    ]


METHODS: Mapping[str, Callable[[TensorStatistics], float]] = {
    "max": lambda statistics: statistics.amax,
    "percentile-99.9": partial(find_percentile, percent=99.9),
    "percentile": find_percentile,
    "percentile-99.999": partial(find_percentile, percent=99.999),
    "mse": find_least_error,
}
MIN_AMAX = 2.0**-119
"""A range's lower bound: its INT8 step is the smallest normal FP32 number, so that no scale is ever zero.

A target that stores scales in a type with a shorter range limits them itself (`qdq.round_scale`).
"""


def compute_range(statistics: TensorStatistics, method: str) -> float:
    """The bound of a tensor's range by `method`: finite, and never below MIN_AMAX."""
    bound = METHODS[method](statistics)
    assert math.isfinite(bound), bound
    return max(bound, MIN_AMAX)


BATCH_BYTES = 160 << 20
"""Limit of the extra outputs of one batch, which determines the batch size."""
COUNTING_THREADS = min(4, os.cpu_count() or 1)
MAX_BATCH = {"cpu": 16, "cuda": 64}

Batch = Mapping[str, "NDArray[Any]"]


class Collector:
    """Adds up the extremes and histograms of tensors over batches. A tensor without any value in all of them counts as zero."""

    def __init__(
        self, graph: Path, tensors: tuple[str, ...], histograms: bool, device: Device = "cpu"
    ) -> None:
        self.tensors, self.histograms, self.device = tensors, histograms, device
        self._graph = graph
        self._low: dict[str, float] = {}
        self._high: dict[str, float] = {}
        self._counts: dict[str, Any] = {}
        self._session = open_exposed_session(graph, tensors, device)
        self._fed = {value.name for value in self._session.get_inputs()} & set(tensors)
        self._outputs = tuple(name for name in tensors if name not in self._fed)

    def add(self, batch: Batch) -> None:
        """Raises BadInputError for the first tensor that is not finite, and for inputs that the graph rejects."""
        add = self._add_on_device if self.device == "cuda" else self._add_on_host
        with translate_runtime_errors():
            broken = add(batch)
        if broken is not None:
            raise BadInputError(describe_nonfinite(self._graph, batch, broken))

    def _add_on_host(self, batch: Batch) -> str | None:
        """The first tensor that is not finite; None if all are."""
        outputs = self._session.run(list(self._outputs), dict(batch)) if self._outputs else ()
        tensors = dict(zip(self._outputs, outputs, strict=True)) | {
            name: np.asarray(batch[name]) for name in self._fed
        }
        values = {
            name: tensors[name].astype(np.float32, copy=False)
            for name in self.tensors
            if tensors[name].size
        }
        with ThreadPoolExecutor(COUNTING_THREADS) as pool:
            extremes = pool.map(
                lambda value: (float(value.min()), float(value.max())), values.values()
            )
            for name, (low, high) in zip(values, extremes, strict=True):
                if not self._widen(name, low, high):
                    return name
            if self.histograms:
                list(pool.map(self._count, values, values.values()))
        return None

    def _count(self, name: str, value: NDArray[np.float32]) -> None:
        counts = self._counts.setdefault(name, np.zeros(BINS, np.int64))
        counts += count_magnitudes(value)

    def _add_on_device(self, batch: Batch) -> str | None:
        """The first tensor that is not finite; None if all are."""
        inputs = {
            name: torch.from_numpy(np.ascontiguousarray(value)).cuda()
            for name, value in batch.items()
        }
        tensors = {**inputs, **run_on_device(self._session, inputs, self._outputs)}
        kept = {name: tensors[name].float() for name in self.tensors if tensors[name].numel()}
        if not kept:
            return None
        extremes = (
            torch.stack([torch.stack(torch.aminmax(value)) for value in kept.values()])
            .double()
            .cpu()
            .tolist()
        )
        for (name, value), (low, high) in zip(kept.items(), extremes, strict=True):
            if not self._widen(name, low, high):
                return name
            if self.histograms:
                if name not in self._counts:
                    self._counts[name] = torch.zeros(BINS + 1, dtype=torch.int64, device="cuda")
                count_on_device(value, self._counts[name][:-1])
                self._counts[name][-1] += value.numel()
        return None

    def _widen(self, name: str, low: float, high: float) -> bool:
        """Widens a tensor's extremes by those of a batch; False if these are not finite."""
        if not (np.isfinite(low) and np.isfinite(high)):
            return False
        self._low[name] = min(low, self._low.get(name, low))
        self._high[name] = max(high, self._high.get(name, high))
        return True

    def statistics(self) -> dict[str, TensorStatistics]:
        return {
            name: TensorStatistics(
                self._low.get(name, 0.0), self._high.get(name, 0.0), self._read_counts(name)
            )
            for name in self.tensors
        }

    def _read_counts(self, name: str) -> Any:
        if not self.histograms:
            return None
        if name not in self._counts:
            return np.zeros(BINS, np.int64)
        if self.device == "cpu":
            return self._counts[name]
        counts = self._counts[name].cpu().numpy()
        counts[0] += counts[-1] - counts[:-1].sum()  # the zeros, which the device does not count
        return counts[:-1]


NODES_AT_ONCE = 16
"""Nodes whose results are held in memory together, in the search for the first NaN."""


def describe_nonfinite(graph: Path, batch: Batch, tensor: str) -> str:
    """The message for a `tensor` with NaN or Inf: the first node that makes it, and what to do."""
    problem = (
        f"tensor '{escape(tensor)}' contains NaN or Inf on the calibration data, so it has no range"
    )
    given = [np.asarray(array) for array in batch.values()]
    if any(array.dtype.kind == "f" and not np.isfinite(array).all() for array in given):
        return f"{problem}\nthe data themselves contain NaN or Inf; check the preprocessing"
    remedy = "`" + Call("build", "MODEL", precision="fp32") + "` verifies the source model"
    for kind, is_broken in (("NaN", np.isnan), ("Inf", np.isinf)):
        origin = find_first_result(graph, batch, lambda value: bool(is_broken(value).any()))  # noqa: B023 - called in this round
        if origin is None:
            continue
        node, made = origin
        if kind == "NaN" and (earlier := _trace_infinity(graph, batch, node)) is not None:
            (node, made), kind = earlier, "Inf"
        where = f"{node.op_type} '{escape(node.name or made)}'"
        result = "" if made == tensor else f" (its result: '{escape(made)}')"
        return (
            f"{problem}: {where} is the first that makes {kind}{result}\n"
            f"check its weights, and what it divides by or takes the root or logarithm of; "
            + remedy
        )
    return f"{problem}\ncheck the preprocessing and weights; " + remedy  # overflows on a GPU alone


def _trace_infinity(graph: Path, batch: Batch, node: Any) -> tuple[Any, str] | None:
    """The node that made the Inf from which `node` makes NaN, and its result; None if `node` reads no Inf.

    Only what `node` reads is followed: an Inf elsewhere, such as in a mask, is no cause.
    """
    model = load_onnx(graph)
    makers = {name: node for node in model.graph.node for name in node.output if name}
    session = open_model_session(expose_tensors(model, makers))
    names, infinite = [*makers], set[str]()
    for start in range(0, len(names), NODES_AT_ONCE):
        part = names[start : start + NODES_AT_ONCE]
        for name, value in zip(part, session.run(part, dict(batch)), strict=True):
            array = np.asarray(value)
            if array.dtype.kind == "f" and np.isinf(array).any():
                infinite.add(name)
        if {*node.output} & {*part}:
            break  # what comes after the node is no cause
    origin = None
    while (name := next((name for name in node.input if name in infinite), None)) is not None:
        node = makers[name]
        origin = node, name
    return origin


def find_first_result(
    graph: Path, batch: Batch, fits: Callable[[NDArray[Any]], bool]
) -> tuple[Any, str] | None:
    """The first node in the graph's order with a floating-point result that `fits`, and that result's name."""
    model = load_onnx(graph)
    makers = [(node, name) for node in model.graph.node for name in node.output if name]
    session = open_model_session(expose_tensors(model, [name for _, name in makers]))
    for start in range(0, len(makers), NODES_AT_ONCE):
        part = makers[start : start + NODES_AT_ONCE]
        values = session.run([name for _, name in part], dict(batch))
        for (node, name), value in zip(part, values, strict=True):
            array = np.asarray(value)
            if array.dtype.kind == "f" and fits(array):
                return node, name
    return None


def open_exposed_session(graph: Path, tensors: Sequence[str], device: Device) -> Any:
    """An ONNX Runtime session of `graph` with `tensors` as additional outputs; on CUDA without TF32."""
    return open_model_session(expose_tensors(load_onnx(graph), tensors), device)


def open_model_session(model: Any, device: Device = "cpu") -> Any:
    """A session of a graph in memory.

    A graph without Q/DQ pairs is what others are compared with, and runs as it is written. One with them is optimized, so
    that the provider's integer kernels run; pairs that it does not fuse are computed in floating point.
    """
    if device == "cpu":
        separate_int8_constants(model)  # a target whose layers share INT8 weights runs here too
    options = ort.SessionOptions()
    if not find_quantized_operators(model):
        options.graph_optimization_level = get_level("disabled")
    elif any(
        tensor.data_type == onnx.TensorProto.FLOAT8E4M3FN for tensor in model.graph.initializer
    ):
        options.add_session_config_entry(
            "session.disable_quant_qdq", "1"
        )  # otherwise it moves FP8 to operators without FP8 kernels
        # at higher levels it drops a Relu before a QuantizeLinear with zero point 0, as if FP8 had no negative numbers
        options.graph_optimization_level = get_level("basic")
    return create_inference_session(model.SerializeToString(), device, options, {"use_tf32": "0"})


def run_on_device(
    session: Any, inputs: Mapping[str, Any], outputs: Sequence[str]
) -> dict[str, Any]:
    """Runs on CUDA tensors; the outputs are CUDA tensors too, which ONNX Runtime allocated."""
    binding = session.io_binding()
    for name, tensor in inputs.items():
        dtype = np.dtype(str(tensor.dtype).removeprefix("torch."))
        binding.bind_input(name, "cuda", 0, dtype, tuple(tensor.shape), tensor.data_ptr())
    for name in outputs:
        binding.bind_output(name, "cuda", 0)
    torch.cuda.current_stream().synchronize()
    session.run_with_iobinding(binding)
    binding.synchronize_outputs()
    results = {}
    for name, value in zip(outputs, binding.get_outputs(), strict=True):
        source = _DeviceArray(int(value.data_ptr()), tuple(value.shape()))
        # a copy, because the binding frees its memory
        results[name] = torch.as_tensor(source, device="cuda").clone()
    return results


class _DeviceArray:
    """GPU memory that torch reads without a copy: the CUDA array interface, version 3."""

    def __init__(self, address: int, shape: tuple[int, ...]) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": "<f4",
            "data": (address, False),
            "version": 3,
        }


def choose_batch_size(graph: Path, tensors: Sequence[str], sample: Batch, device: Device) -> int:
    """The number of samples that keeps `tensors` inside BATCH_BYTES, measured by running one sample on the CPU."""
    outputs = [name for name in tensors if name not in sample]
    values = (
        open_exposed_session(graph, tensors, "cpu").run(outputs, dict(sample)) if outputs else ()
    )
    room = BATCH_BYTES * (16 if device == "cuda" else 1)
    return max(
        1, min(MAX_BATCH[device], room // max(sum(int(value.nbytes) for value in values), 1))
    )
