"""Independent timings on a GPU, written without optpipe's measuring code, to hold its figures against.

usage: gpu_loops.py WORKSPACE OUTPUT.json [BATCH ...]
For every ResNet-50 artifact in the workspace: a bare loop of CUDA events over the runtime's own API. And in the same process,
so in the same conditions, torch.compile in mode reduce-overhead, FP16 channels_last: what most people would use instead.
"""

import json
import sys
from pathlib import Path
from statistics import median

import numpy as np
import torch

sys.path.insert(0, "pipeline")


def event_loop(launch, stream, seconds=1.0):
    """Median ms between two events around one launch, synchronized each time, after 0.5 s of warm-up."""
    from time import perf_counter

    first, second = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(stream):
        end = perf_counter() + 0.5
        while perf_counter() < end:
            launch()
            stream.synchronize()
        times, end = [], perf_counter() + seconds
        while perf_counter() < end or len(times) < 20:
            first.record(stream)
            launch()
            second.record(stream)
            second.synchronize()
            times.append(first.elapsed_time(second))
    return median(times)


def onnxruntime_loop(path, info, batch, options, stream):
    """ONNX Runtime by its own Python API: I/O binding on torch memory, a user stream, the same provider options."""
    import onnxruntime as ort

    ort.preload_dlls()
    provider = {
        "user_compute_stream": str(stream.cuda_stream),
        "use_tf32": str(int(bool(info.get("tf32")))),
        "prefer_nhwc": str(int(options["nhwc"])),
        "enable_cuda_graph": str(int(options["cuda_graph"])),
        "cudnn_conv_algo_search": options["cudnn_search"],
        "cudnn_conv_use_max_workspace": "1",
    }
    settings = ort.SessionOptions()
    settings.log_severity_level = 4
    session = ort.InferenceSession(str(path), settings, providers=[("CUDAExecutionProvider", provider)])
    name = session.get_inputs()[0]
    kind = {"tensor(float)": torch.float32, "tensor(float16)": torch.float16}
    given = torch.randn(batch, 3, 224, 224, device="cuda").to(kind[name.type])
    answer = session.get_outputs()[0]
    output = torch.empty(batch, 1000, device="cuda", dtype=kind[answer.type])
    binding = session.io_binding()
    numpy_kind = {torch.float32: np.float32, torch.float16: np.float16}
    binding.bind_input(name.name, "cuda", 0, numpy_kind[given.dtype], tuple(given.shape), given.data_ptr())
    binding.bind_output(answer.name, "cuda", 0, numpy_kind[output.dtype], tuple(output.shape), output.data_ptr())
    run = ort.RunOptions()
    run.add_run_config_entry("disable_synchronize_execution_providers", "1")
    return event_loop(lambda: session.run_with_iobinding(binding, run), stream)


def torch_loop(call, batch, dtype, stream, graph):
    """A torch callable, in a CUDA graph if the tool used one."""
    given = torch.randn(batch, 3, 224, 224, device="cuda").to(dtype)
    with torch.inference_mode(), torch.cuda.stream(stream):
        for _ in range(4):
            call(given)
        stream.synchronize()
        if not graph:
            return event_loop(lambda: call(given), stream)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, stream=stream):
            call(given)
        return event_loop(captured.replay, stream)


def artifact_loop(entry, batch, options):
    """One stored artifact by the bare API of its runtime."""
    info, stream = entry.info, torch.cuda.Stream()
    path = entry.path / info["file"]
    with torch.cuda.stream(stream):
        if info["backend"] == "onnxruntime":
            return onnxruntime_loop(path, info, batch, options, stream)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = bool(info.get("tf32"))
        call = (
            torch._inductor.aoti_load_package(str(path))
            if info["backend"] == "inductor"
            else torch.export.load(path).module()
        )
        dtype = {"float16": torch.float16, "float32": torch.float32}[info["inputs"][0]["dtype"]]
        return torch_loop(call, batch, dtype, stream, options.get("cuda_graph", False))


def compiled_baseline(batch):
    """torch.compile(mode="reduce-overhead"), FP16, channels_last: ms per batch."""
    import torchvision

    torch.manual_seed(0)
    model = torchvision.models.resnet50(weights=None).eval().half().cuda().to(memory_format=torch.channels_last)
    compiled = torch.compile(model, mode="reduce-overhead")
    given = torch.randn(batch, 3, 224, 224, device="cuda").half().to(memory_format=torch.channels_last)
    with torch.inference_mode():
        for _ in range(5):
            compiled(given)
        torch.cuda.synchronize()
        return event_loop(lambda: compiled(given), torch.cuda.current_stream())


def read(path):
    try:
        return json.loads(path.read_text()).get("measurements", [])
    except ValueError:
        return []


def main() -> None:
    from optpipe.core.store import Store

    workspace, target = Path(sys.argv[1]), Path(sys.argv[2])
    batches = [int(text) for text in sys.argv[3:]] or [1, 64, 256]
    sweeps = [target.parent / f"sweep-{name}.json" for name in ("ort", "torch")]
    measured = [row for path in sweeps if path.exists() for row in read(path)]
    rows = []
    for entry in Store(workspace).entries():
        if entry.manifest.kind != "artifact" or entry.info["device"] != "cuda" or entry.info["model"] != "resnet50":
            continue
        for batch in batches:
            tool = [
                row
                for row in measured
                if row["artifact"] == entry.id and row["batch_size"] == batch and row["parts_ms"]
            ]
            options = tool[0]["subject"]["options"] if tool else entry.info.get("options", {})
            row = {"backend": entry.info["backend"], "precision": entry.info["precision"], "batch_size": batch}
            try:
                row["loop_ms"] = artifact_loop(entry, batch, options)
            except Exception as error:  # noqa: BLE001  one that fails must not stop the others
                row["error"] = f"{type(error).__name__}: {str(error)[:200]}"
            row["optpipe_ms"] = (
                tool[0]["parts_ms"]["compute"]["p50"]["value"]
                if tool and "p50" in tool[0]["parts_ms"]["compute"]
                else None
            )
            if row.get("loop_ms") and row["optpipe_ms"]:
                row["optpipe_over_loop"] = row["optpipe_ms"] / row["loop_ms"]
            rows.append(row)
            print(json.dumps(row), flush=True)
            target.write_text(json.dumps({"loops": rows}, indent=1))
    baseline = []
    for batch in batches:
        try:
            ms = compiled_baseline(batch)
            baseline.append({"batch_size": batch, "ms": ms, "images_per_s": batch / ms * 1e3})
        except Exception as error:  # noqa: BLE001
            baseline.append({"batch_size": batch, "error": f"{type(error).__name__}: {str(error)[:200]}"})
        print(json.dumps({"torch.compile reduce-overhead fp16": baseline[-1]}), flush=True)
        target.write_text(json.dumps({"loops": rows, "torch_compile_reduce_overhead_fp16": baseline}, indent=1))


main()
