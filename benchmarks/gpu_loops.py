"""Independent timings on a GPU, written without optpipe's measuring code, to hold its figures against.

usage: gpu_loops.py WORKSPACE OUTPUT.json PRECISION[,PRECISION] [BATCH ...]

Each artifact gets a process of its own (a failed CUDA graph capture poisons the process it happens in). There, rounds
alternate between the tool's worker and a bare loop of CUDA events over the very same loaded session: cuDNN's search picks
kernels anew whenever a session loads, so two sessions of one artifact may differ by more than the measuring does. Beside
it stands a loop over the runtime's own API with a session of its own. torch.compile in mode reduce-overhead, FP16,
channels_last, is what most people would use instead; it is timed in the same run.
"""

import json
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from io import StringIO
from pathlib import Path
from statistics import median
from time import perf_counter

from optpipe.core.entries import ArtifactInfo

ROUNDS = 5


def event_loop(launch, stream, seconds):
    """Median ms between two CUDA events around one launch, synchronized each time."""
    import torch

    first, second = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times: list[float] = []
    with torch.cuda.stream(stream):
        end = perf_counter() + seconds
        while perf_counter() < end or len(times) < 20:
            first.record(stream)
            launch()
            second.record(stream)
            second.synchronize()
            times.append(first.elapsed_time(second))
    return median(times)


def warmed_loop(launch, stream, seconds=1.0):
    """The same after half a second of warm-up."""
    event_loop(launch, stream, 0.5)
    return event_loop(launch, stream, seconds)


def same_session(entry, store, batch, options, scratch):
    """(optpipe ms, bare loop ms) per round, medians of the compute part, in alternation on one session."""
    import torch

    from optpipe.core.load import LoadSpec
    from optpipe.measure.measure import BenchPlan, prepare_subject
    from optpipe.measure.process import WorkerPool
    from optpipe.measure.worker.__main__ import Worker
    from optpipe.measure.worker.checks import draw_rotation, pool_from_files
    from optpipe.measure.worker.messages import Point, frame_from_spool
    from optpipe.models.artifacts.lookup import find_artifacts

    load = LoadSpec(
        batch,
        min_seconds=0.4,
        max_seconds=3,
        percentile=50.0,
        warm_up_seconds=0.1,
        max_warm_up_seconds=1.0,
    )
    load = replace(load, cache_probes=0)
    artifact, pool = find_artifacts(entry, store)[0], WorkerPool(scratch)
    spec = prepare_subject(
        artifact, BenchPlan(load), store, pool, scratch / "inputs", scratch
    ).session
    spec = replace(spec, arguments={**spec.arguments, "options": options})
    rounds = []
    with ExitStack() as stack:
        worker = Worker(spec, stack)
        inputs = draw_rotation(pool_from_files(spec.inputs), batch, spec.seed).batches[0]
        with torch.cuda.stream(worker.streams[0]):
            binding = worker.sessions[0].bind(inputs)
        warmed_loop(binding.launch, worker.streams[0], 0.1)
        for turn in range(ROUNDS):
            spool = scratch / f"{turn}.spool"
            worker.measured(Point(f"r{turn}", str(spool), load), StringIO())
            samples = frame_from_spool(spool)
            tool = median(samples.filter(samples["phase"] == 1)["compute_ns"].to_list()) / 1e6
            rounds.append((tool, event_loop(binding.launch, worker.streams[0], 0.4)))
    return rounds


def own_api(info, path, batch, options):
    """Median ms of a loop over the runtime's own Python API, with a session of its own."""
    import torch

    from optpipe.backends.inductor_packages import load_package

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        if info.backend == "onnxruntime":
            return onnxruntime_loop(path, info, batch, options, stream)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = bool(
            info.get("tf32")
        )
        call = (
            load_package(path, "cuda")
            if info.backend == "inductor"
            else torch.export.load(path).module()
        )
        dtype = {"float16": torch.float16, "float32": torch.float32}[info.inputs[0]["dtype"]]
        return torch_loop(call, batch, dtype, stream, options.get("cuda_graph", False))


def onnxruntime_loop(path, info, batch, options, stream):
    """I/O binding on torch memory, a user stream, the same provider options."""
    import numpy as np
    import onnxruntime as ort
    import torch

    ort.preload_dlls()
    provider = {
        "user_compute_stream": str(stream.cuda_stream),
        "use_tf32": str(int(info.tensor_cores)),
        "prefer_nhwc": str(int(options["nhwc"])),
        "enable_cuda_graph": str(int(options["cuda_graph"])),
        "cudnn_conv_algo_search": options["cudnn_search"],
        "cudnn_conv_use_max_workspace": "1",
        "fuse_conv_bias": str(int(options["fuse_conv_bias"])),
    }
    left_out = [] if options["fuse_conv_bias"] else ["ConvAddFusion"]
    settings = ort.SessionOptions()
    settings.log_severity_level = 4
    settings.add_session_config_entry("session.disable_quant_qdq", "1")
    session = ort.InferenceSession(
        str(path),
        settings,
        providers=[("CUDAExecutionProvider", provider)],
        disabled_optimizers=left_out,
    )
    kinds = {
        "tensor(float)": (torch.float32, np.float32),
        "tensor(float16)": (torch.float16, np.float16),
    }
    name, answer = session.get_inputs()[0], session.get_outputs()[0]
    given = torch.randn(batch, 3, 224, 224, device="cuda").to(kinds[name.type][0])
    output = torch.empty(batch, 1000, device="cuda", dtype=kinds[answer.type][0])
    binding = session.io_binding()
    binding.bind_input(
        name.name, "cuda", 0, kinds[name.type][1], tuple(given.shape), given.data_ptr()
    )
    binding.bind_output(
        answer.name, "cuda", 0, kinds[answer.type][1], tuple(output.shape), output.data_ptr()
    )
    # as the tool does when it binds: once outside the graph. Without it the graph at batch 1 is a tenth slower
    outside = ort.RunOptions()
    outside.add_run_config_entry("gpu_graph_id", "-1")
    session.run_with_iobinding(binding, outside)
    run = ort.RunOptions()
    run.add_run_config_entry("disable_synchronize_execution_providers", "1")
    run.add_run_config_entry("gpu_graph_id", "1")
    return warmed_loop(lambda: session.run_with_iobinding(binding, run), stream)


def torch_loop(call, batch, dtype, stream, graph):
    """A torch callable, in a CUDA graph if the tool used one."""
    import torch

    given = torch.randn(batch, 3, 224, 224, device="cuda").to(dtype)
    with torch.inference_mode(), torch.cuda.stream(stream):
        for _ in range(4):
            call(given)
        stream.synchronize()
        if not graph:
            return warmed_loop(lambda: call(given), stream)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, stream=stream):
            call(given)
        return warmed_loop(captured.replay, stream)


def one_artifact(workspace, entry_id, batches, options):
    """Prints one JSON line per batch size."""
    from optpipe.workspace.store import Store

    store = Store(Path(workspace))
    entry = store.find(entry_id, ArtifactInfo)
    for batch in batches:
        row = {
            "artifact": entry.id,
            "backend": entry.info.backend,
            "precision": entry.info.precision,
        }
        row |= {"batch_size": batch, "options": options}
        with tempfile.TemporaryDirectory() as scratch:
            rounds = same_session(entry.id, store, batch, options, Path(scratch))
        row["optpipe_ms"], row["loop_ms"] = (median(side) for side in zip(*rounds, strict=True))
        row["optpipe_over_loop"] = median(tool / loop for tool, loop in rounds)
        row["rounds_ms"] = rounds
        print(json.dumps(row), flush=True)
        row["own_session_ms"] = own_api(entry.info, entry.path / entry.info.file, batch, options)
        print(json.dumps(row), flush=True)


def compiled_baseline(batches):
    """torch.compile(mode="reduce-overhead"), FP16, channels_last: prints ms per batch."""
    import torch
    import torchvision

    torch.manual_seed(0)
    model = (
        torchvision.models.resnet50(weights=None)
        .eval()
        .half()
        .cuda()
        .to(memory_format=torch.channels_last)
    )
    compiled = torch.compile(model, mode="reduce-overhead")
    for batch in batches:
        given = (
            torch.randn(batch, 3, 224, 224, device="cuda")
            .half()
            .to(memory_format=torch.channels_last)
        )
        with torch.inference_mode():
            for _ in range(5):
                compiled(given)
            torch.cuda.synchronize()
            ms = warmed_loop(lambda given=given: compiled(given), torch.cuda.current_stream())
        print(
            json.dumps({"batch_size": batch, "ms": ms, "images_per_s": batch / ms * 1e3}),
            flush=True,
        )


def in_process(*arguments, seconds):
    """The JSON lines that this file prints in a child process; the last of each batch size, and what it died of."""
    command = [sys.executable, __file__, *map(str, arguments)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
        said = done.stderr.strip().splitlines()[-1:] or ["no word on standard error"]
        output, failed = (
            done.stdout,
            [f"exit status {done.returncode}: {said[0]}"] if done.returncode else [],
        )
    except subprocess.TimeoutExpired as error:
        output, failed = (error.stdout or b"").decode(), [f"not finished in {seconds} s"]
    rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    last = list({row["batch_size"]: row for row in rows}.values())
    return last + [{"arguments": list(map(str, arguments)), "error": each[:300]} for each in failed]


def main() -> None:
    from optpipe.workspace.store import Store

    workspace, target = Path(sys.argv[1]), Path(sys.argv[2])
    precisions, batches = (
        sys.argv[3].split(","),
        [int(text) for text in sys.argv[4:]] or [1, 64, 256],
    )
    document = {
        "loops": [],
        "torch_compile_reduce_overhead_fp16": in_process("compiled", *batches, seconds=120),
    }
    print(json.dumps(document["torch_compile_reduce_overhead_fp16"]), flush=True)
    for entry in Store(workspace).list_entries(ArtifactInfo):
        if entry.info.device != "cuda":
            continue
        if entry.info.model != "resnet50" or entry.info.precision not in precisions:
            continue
        options = json.dumps(entry.info.options)
        found = in_process(
            "artifact", workspace, entry.id, options, *batches, seconds=60 * len(batches)
        )
        document["loops"] += found
        for row in found:
            print(
                json.dumps({key: value for key, value in row.items() if key != "rounds_ms"}),
                flush=True,
            )
        target.write_text(json.dumps(document, indent=1))


if sys.argv[1] == "artifact":
    one_artifact(
        sys.argv[2], sys.argv[3], [int(text) for text in sys.argv[5:]], json.loads(sys.argv[4])
    )
elif sys.argv[1] == "compiled":
    compiled_baseline([int(text) for text in sys.argv[2:]])
else:
    main()
