"""In the profiled process: iterations that tell what each layer launches, apart from those that tell how long one takes."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optpipe.profile.record import InferenceJob, WorkerResult
from optpipe.trace.layers.ort_nodes import ClockAnchor, read_node_runs
from optpipe.trace.ranges import ITERATION_RANGE, mark_range
from optpipe.workspace.store import Entry

_CPU_RUNS = 5
_WARM_UP = 3


@dataclass(slots=True)
class LayerRecorder:
    """How to run an iteration by layers, and what came of it; without `iteration` the recording has none of its own."""

    iteration: Callable[[], None] | None = None
    anchors: list[ClockAnchor] = field(default_factory=list)
    found: WorkerResult = field(default_factory=WorkerResult)

    def run_marked(self) -> None:
        """One iteration in its range, with the system clock read on both sides of both its ends."""
        assert self.iteration is not None
        before_ns = time.time_ns()
        with mark_range(ITERATION_RANGE):
            entered_ns = time.time_ns()
            self.iteration()
            leaving_ns = time.time_ns()
        self.anchors.append(ClockAnchor(before_ns, entered_ns, leaving_ns, time.time_ns()))


@contextmanager
def record_layers(
    entry: Entry, bound: Mapping[str, Any], inputs: Mapping[str, Any], job: InferenceJob, scratch: Path
) -> Iterator[LayerRecorder]:
    """The way to the layers of one artifact; `found` is filled when the block ends.

    `bound` and `inputs` are its inputs by name, where the session reads them and as arrays on the host. torch's layers
    are ranges in the recording itself.
    """
    on_gpu = job.device == "cuda"
    if job.backend == "onnxruntime" and on_gpu:
        yield from _record_nodes_on_gpu(entry, inputs, job, scratch)
    elif job.backend == "onnxruntime":
        layers = LayerRecorder()
        yield layers
        layers.found = WorkerResult(layer_ns=_measure_node_times(entry, inputs, job, scratch))
    elif job.backend == "torch" and on_gpu and "tactics" in entry.info.details:
        yield _run_by_step(entry, bound)
    elif job.backend == "torch" and on_gpu:
        yield _run_by_module(entry, bound, job)
    else:
        yield LayerRecorder()


def _record_nodes_on_gpu(
    entry: Entry, inputs: Mapping[str, Any], job: InferenceJob, scratch: Path
) -> Iterator[LayerRecorder]:
    """A second session, which notes its nodes and launches them one by one: no node runs when a CUDA graph is replayed."""
    import torch

    with _open_profiling_session(entry, job, scratch) as session:
        binding = session.bind(inputs)

        def iteration() -> None:
            binding.launch()
            torch.cuda.current_stream().synchronize()

        for _ in range(_WARM_UP):
            iteration()
        layers = LayerRecorder(iteration)
        yield layers
        started_ns, profile = session.end_profiling()
    first = layers.anchors[0].before_ns if layers.anchors else 0
    runs = tuple(run for run in read_node_runs(profile, started_ns) if run.start_ns >= first)
    layers.found = WorkerResult(node_runs=runs, anchors=tuple(layers.anchors))


def _measure_node_times(entry: Entry, inputs: Mapping[str, Any], job: InferenceJob, scratch: Path) -> dict[str, float]:
    """Median time of each node on the CPU, in a session apart: noting slows what it measures."""
    with _open_profiling_session(entry, job, scratch) as session:
        for _ in range(_CPU_RUNS):
            session.run(inputs)
        started_ns, profile = session.end_profiling()
    times: dict[str, list[int]] = {}
    for run in read_node_runs(profile, started_ns):
        times.setdefault(run.name, []).append(run.end_ns - run.start_ns)
    return {name: float(statistics.median(values)) for name, values in times.items()}


def _open_profiling_session(entry: Entry, job: InferenceJob, scratch: Path) -> Any:
    from optpipe.backends.base import merge_options
    from optpipe.backends.onnxruntime import OPTIONS
    from optpipe.backends.onnxruntime_session import OnnxRuntimeSession

    # What was given on the command line is text until it is checked.
    options = merge_options(job.options, OPTIONS[job.device], job.backend)
    return OnnxRuntimeSession(
        entry.file(entry.info.file),
        job.device,
        {**options, "cuda_graph": False},
        tensor_cores=bool(entry.info.details.get("tensor_cores")),
        profile=scratch / "nodes",
    )


def _run_by_module(entry: Entry, inputs: Mapping[str, Any], job: InferenceJob) -> LayerRecorder:
    """The session's program run node by node, each in a range named after its module."""
    import torch

    from optpipe.backends.torch_costs import count_program_costs
    from optpipe.backends.torch_eager import load_program, resolve_session_options

    program = load_program(entry.file(entry.info.file), resolve_session_options(entry.info, job.options))

    class Marked(torch.fx.Interpreter):
        def run_node(self, n: Any) -> Any:
            if n.op != "call_function":
                return super().run_node(n)
            with mark_range(_get_layer_name(n)):
                return super().run_node(n)

    def iteration() -> None:
        with torch.inference_mode():
            Marked(program).run(*inputs.values())
        torch.cuda.synchronize()

    iteration()
    return LayerRecorder(iteration, found=WorkerResult(program=count_program_costs(program, inputs, _get_layer_name)))


def _run_by_step(entry: Entry, inputs: Mapping[str, Any]) -> LayerRecorder:
    """An INT8 network run step by step, each in a range named after its layer in the graph."""
    import torch

    from optpipe.backends.torch_int8.backend import load_program
    from optpipe.backends.torch_int8.costs import count_costs

    program, given = load_program(entry.path, entry.info), tuple(inputs.values())

    def iteration() -> None:
        with torch.inference_mode():
            program.run_marked(given, mark_range)
        torch.cuda.synchronize()

    iteration()
    return LayerRecorder(iteration, found=WorkerResult(program=count_costs(program, given)))


def _get_layer_name(node: Any) -> str:
    """The module that a node of an exported program comes from, such as `layer1.0.conv1`; else the node's own name."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    return path.removeprefix("L['self'].") or str(node.name)
