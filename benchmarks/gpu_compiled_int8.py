"""INT8 programs against torch.compile in FP16, in turns in one process on a GPU; and how near both stay to FP32.

usage: gpu_compiled_int8.py OUT.json NETWORK:BATCH…   (torchvision's names, random weights)

The INT8 program is what the `inductor` backend builds for one batch size: tuned on it, compiled ahead of time, in a CUDA graph. The other
is `torch.compile(mode="reduce-overhead")`, or the mode in MODE, in FP16 with channels last.
"""

import json
import multiprocessing
import os
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import torch
import torchvision
from tests.fakes.fp8_models import measure_ranges, run_onnx

from optpipe.backends.base import BuildRequest
from optpipe.backends.inductor_packages import Compilation, load_package
from optpipe.backends.torch_int8.lowering import lower_program
from optpipe.backends.torch_int8.tuning import capture_launches, summarize_choices, tune_program
from optpipe.backends.torch_program import export_rewritten, layers_from_program, set_assembler
from optpipe.core.card import InputSpec, ModelCard, Task
from optpipe.core.precision import Precision, prove_precision
from optpipe.models.export.onnx_export import complete_card, onnx_from_torch
from optpipe.quantize.placement import place_qdq
from optpipe.quantize.qdq import qdq_from_onnx

ROUNDS = 30
START, WAIT_S = float(os.environ.get("START", time.time())), float(os.environ.get("WAIT_S", 1e4))


def make_network(name):
    """Random weights whose activations neither vanish nor leave FP16's range, so that the outputs can be compared."""
    torch.manual_seed(0)
    module = torchvision.models.get_model(name, weights=None).eval()
    for layer in module.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.running_mean.normal_(0, 0.1)
        elif isinstance(layer, torch.nn.Linear) and not layer.weight.any():
            torch.nn.init.normal_(layer.weight, std=0.02)
    return module


def measure_in_turns(functions):
    """Milliseconds of each function by rounds of three calls, the order drawn for each round."""
    order = np.random.default_rng(0)
    times = {name: [] for name in functions}
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for function in functions.values():
        for _ in range(5):
            function()
    for _ in range(ROUNDS):
        for name in order.permutation(list(functions)):
            torch.cuda.synchronize()
            begun.record()
            for _ in range(3):
                functions[name]()
            ended.record()
            ended.synchronize()
            times[name].append(begun.elapsed_time(ended) / 3)
    return times


def compute_snr(expected, found):
    return round(float(10 * np.log10(np.square(expected).sum() / np.square(found - expected).sum())), 1)


def build(name, batches, lock):
    """A row for each batch size; what is to be measured in turns, the INT8 program and torch.compile's, by name; and what the INT8
    program's CUDA graph reads.
    """
    shapes = (1, 3, 224, 224), (4, 3, 224, 224), (max(4, *batches), 3, 224, 224)
    card = ModelCard(name, f"{name}.py:make", Task.OTHER, (InputSpec("image", "float32", *shapes, batch=0),))
    data = torch.randn(shapes[1], generator=torch.Generator().manual_seed(2))
    found = []
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        onnx_from_torch(make_network(name), card, folder / "model.onnx")
        card, model = complete_card(card, folder / "model.onnx"), onnx.load(folder / "model.onnx")
        placed, reference = place_qdq(model, "tensorrt"), run_onnx(model, data)[0]
        onnx.save(qdq_from_onnx(model, placed, measure_ranges(model, placed.tensors, data)), folder / "int8.onnx")
        qdq = run_onnx(onnx.load(folder / "int8.onnx"), data)[0]
        for batch in batches:
            fixed = card.with_profile((batch, batch, batch), {})
            wanted = BuildRequest(
                fixed, Precision.INT8, folder / "int8.onnx", lambda: make_network(name), "cuda", {}, folder
            )
            found.append(build_pair(name, batch, wanted, data, reference, qdq, lock))
    return found


def build_pair(name, batch, wanted, data, reference, qdq, lock):
    given = torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(1)).cuda()
    started = time.monotonic()
    program, missed = lower_program(wanted)
    with lock:
        measured = tune_program(program, {batch: (given,)})
    exported = export_rewritten(program, wanted)
    share = prove_precision(Precision.INT8, layers_from_program(exported, Precision.INT8)).share
    Compilation(exported, wanted.directory / f"{batch}.pt2", {}).run()
    call = load_package(wanted.directory / f"{batch}.pt2", "cuda")
    rows = min(len(data), batch)
    with torch.inference_mode(), lock:
        near = call(torch.cat([data] * ((batch + 3) // 4))[:batch].cuda())[0][:rows].float().cpu().numpy()
        replay = capture_launches(lambda: call(given), 1)
    int8_s, started = time.monotonic() - started, time.monotonic()
    module = make_network(name).cuda().half().to(memory_format=torch.channels_last)
    image = given.half().to(memory_format=torch.channels_last)
    wide = torch.compile(module, mode=os.environ.get("MODE", "reduce-overhead"), dynamic=False)
    with torch.inference_mode():
        wide(image)
    row = {
        "network": name, "batch": batch, "int8_macs_share": round(share.macs["int8"], 4), "stay_in_fp16": list(missed),
        "tactics": summarize_choices(measured), "snr_of_qdq_graph_db": compute_snr(reference, qdq),
        "snr_db": compute_snr(reference[:rows], near), "snr_to_qdq_graph_db": compute_snr(qdq[:rows], near),
        "int8_build_s": round(int8_s), "fp16_build_s": round(time.monotonic() - started),
    }  # fmt: skip
    return row, {"fp16": lambda: wide(image), "int8": replay}, (call, given)


def work(name, batches, lock, gate, pipe):
    """A process for one network: builds beside the others, then measures alone, once all have built or had WAIT_S for it."""
    try:
        found = build(name, batches, lock)
        with suppress(threading.BrokenBarrierError):
            gate.wait(max(1, WAIT_S - (time.time() - START)))
        for row, functions, _ in found:
            with torch.inference_mode(), lock:
                times = measure_in_turns(functions)
            fp16, int8 = (round(median(times[each]), 4) for each in ("fp16", "int8"))
            row |= {"fp16_compile_ms": fp16, "int8_compiled_ms": int8, "speedup": round(fp16 / int8, 3)}
            print(row, flush=True)
            row["times_ms"] = times
        pipe.send([row for row, *_ in found])
    except Exception:  # noqa: BLE001 - what fails is printed, the rest goes on
        traceback.print_exc()
        pipe.send([])


def main():
    set_assembler()
    os.environ.setdefault("START", str(time.time()))
    networks = {}
    for spec in sys.argv[2:]:
        name, _, batch = spec.partition(":")
        networks.setdefault(name, []).append(int(batch))
    context, rows, workers = multiprocessing.get_context("spawn"), [], []
    lock, gate = context.Lock(), context.Barrier(len(networks))
    for name, batches in networks.items():
        here, there = context.Pipe()
        context.Process(target=work, args=(name, batches, lock, gate, there), daemon=True).start()
        there.close()
        workers.append(here)
    device = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    while workers:
        for each in [pipe for pipe in workers if pipe.poll(0.1)]:
            workers.remove(each)
            with suppress(EOFError):  # its process ended early, and its log says why
                rows += each.recv()
        Path(sys.argv[1]).write_text(json.dumps({**device, "rows": rows}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
