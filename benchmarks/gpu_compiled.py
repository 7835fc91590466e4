"""Compiled programs in FP16 and INT8 against torch.compile in FP16, in turns in one process on a GPU; and how near they stay to FP32.

usage: gpu_compiled.py OUT.json NETWORK:BATCH,BATCH…   (torchvision's names, random weights)

plain    AOTInductor's code of the exported program in FP16, for one batch size
fused    the same with optpipe's steps in place of layers that they compute, tuned
int8     the same in INT8
compile  torch.compile, FP16, channels last
max      the same with max-autotune, but cuDNN's convolutions alone

All are replayed from CUDA graphs. A process for each network, MOST at a time, builds a cell's variants and times them. Only one at a
time uses the GPU to tune or to time, and while one times, the others are stopped. No build starts later than WAIT_S seconds after START
(a time in seconds, else the start), and LAST_S seconds after it builds are given up, so that what is built is still timed.
PROFILE names cells such as swin_t:64 whose longest kernels are kept. Without a GPU everything but tuning and CUDA graphs runs on
the CPU, to try the script.
"""

import gc
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import torch
import torchvision
from tests.fakes.fp8_models import measure_ranges, run_onnx

from optpipe.backends.base import BuildRequest, Device
from optpipe.backends.inductor_packages import Compilation, load_package
from optpipe.backends.torch_layers import tuning
from optpipe.backends.torch_layers.lowering import lower_program
from optpipe.backends.torch_program import export_program, export_rewritten, layers_from_program, set_assembler
from optpipe.core.card import InputSpec, ModelCard, Task
from optpipe.core.precision import Precision, prove_precision
from optpipe.models.export.onnx_export import complete_card, onnx_from_torch
from optpipe.quantize.qdq import place_qdq, qdq_from_onnx
from optpipe.workspace.environment import list_gpus

ROUNDS = 20
ENERGY_S = float(os.environ.get("ENERGY_S", "0.8"))
ENERGY_FROM = 64
"""The least batch size whose energy is measured."""
VARIANTS = os.environ.get("VARIANTS", "fused int8 compile").split()
MOST = int(os.environ.get("MOST", "7"))
START, WAIT_S = float(os.environ.get("START", time.time())), float(os.environ.get("WAIT_S", "10000"))
LAST_S = float(os.environ.get("LAST_S", "10000"))
DEVICE: Device = "cuda" if torch.cuda.is_available() else "cpu"
PIXELS = int(os.environ.get("PIXELS", "224"))


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
    for function in functions.values():
        for _ in range(5):
            function()
    for _ in range(ROUNDS):
        for name in order.permutation(list(functions)):
            times[name].append(time_calls(functions[name], 3))
    return times


def time_calls(function, count):
    if DEVICE == "cpu":
        begun = time.perf_counter()
        for _ in range(count):
            function()
        return (time.perf_counter() - begun) * 1e3 / count
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begun.record()
    for _ in range(count):
        function()
    ended.record()
    ended.synchronize()
    return begun.elapsed_time(ended) / count


def measure_energy(function, batch):
    """Millijoules per image by the GPU's counter, which counts everything that the GPU does meanwhile."""
    import pynvml

    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByIndex(list_gpus()[0].index)  # NVML counts hidden GPUs too
    read = pynvml.nvmlDeviceGetTotalEnergyConsumption
    for _ in range(20):
        function()
    torch.cuda.synchronize()
    calls, begun, joules = 0, time.monotonic(), read(gpu)
    while time.monotonic() - begun < ENERGY_S:
        for _ in range(20):
            function()
        torch.cuda.synchronize()
        calls += 20
    return round((read(gpu) - joules) / (calls * batch), 2)


def list_kernels(function):
    """The 25 longest kernels of one call: name, microseconds, launches."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for _ in range(3):
            function()
        torch.cuda.synchronize()
    rows = [
        (each.key[:150], round(each.self_device_time_total / 3, 1), each.count // 3) for each in found.key_averages()
    ]
    return sorted(rows, key=lambda row: -row[1])[:25]


def compute_snr(expected, found):
    return round(float(10 * np.log10(np.square(expected).sum() / np.square(found - expected).sum())), 1)


class Network:
    """A network's graphs and reference, from which its programs are made for one batch size."""

    def __init__(self, name, batches, folder, alone):
        self.name, self.folder, self.alone = name, folder, alone
        shapes = (1, 3, PIXELS, PIXELS), (4, 3, PIXELS, PIXELS), (max(4, *batches), 3, PIXELS, PIXELS)
        card = ModelCard(name, f"{name}.py:make", Task.OTHER, (InputSpec("image", "float32", *shapes, batch=0),))
        self.data = torch.randn(shapes[1], generator=torch.Generator().manual_seed(2))
        onnx_from_torch(make_network(name), card, folder / "model.onnx")
        self.card, model = complete_card(card, folder / "model.onnx"), onnx.load(folder / "model.onnx")
        self.reference = run_onnx(model, self.data)[0]
        if "int8" in VARIANTS:
            placed = place_qdq(model, "tensorrt")
            graph = qdq_from_onnx(model, placed, measure_ranges(model, placed.tensors, self.data))
            onnx.save(graph, folder / "int8.onnx")

    def make_program(self, variant, batch, given):
        """The exported program, and what is recorded about it."""
        precision = Precision.INT8 if variant == "int8" else Precision.FP16
        card = self.card.with_profile((batch, batch, batch), {})
        wanted = BuildRequest(
            card, precision, self.folder / "int8.onnx", lambda: make_network(self.name), DEVICE, {}, self.folder
        )
        if variant == "plain":
            return export_program(wanted), {}
        program, missed = lower_program(wanted)
        measured = self.tune(program, batch, given) if DEVICE == "cuda" else {}
        exported = export_rewritten(program, wanted)
        share = prove_precision(precision, layers_from_program(exported, precision)).share.macs
        return exported, {"tactics": tuning.summarize_choices(measured), "macs": share, "missed": list(missed)}

    def tune(self, program, batch, given):
        """Compiles kernels beside other processes, and times them alone."""
        tuning.compile_tactics(program, {batch: (given,)})
        with self.alone():
            return tuning.choose_tactics(program, {batch: (given,)})

    def build(self, variant, batch):
        """What is recorded, and the function that is timed."""
        started = time.monotonic()
        given = torch.randn(batch, 3, PIXELS, PIXELS, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        if variant in ("compile", "max"):
            module = make_network(self.name).to(DEVICE)
            module = module.half() if DEVICE == "cuda" else module
            image = given.to(next(module.parameters()).dtype, memory_format=torch.channels_last)
            module = module.to(memory_format=torch.channels_last)
            mode = "max-autotune-no-cudagraphs" if variant == "max" and DEVICE == "cuda" else "default"
            wide = torch.compile(module, mode=mode, dynamic=False)
            with torch.inference_mode():
                wide(image)
                with self.alone():
                    replay = capture(lambda: wide(image))
            return {"build_s": round(time.monotonic() - started)}, replay
        exported, about = self.make_program(variant, batch, given)
        package = self.folder / f"{variant}-{batch}.pt2"
        Compilation(exported, package, {}).run()
        call = load_package(package, DEVICE)
        rows = min(len(self.data), batch)
        with torch.inference_mode(), self.alone():
            near = call(torch.cat([self.data] * ((batch + 3) // 4))[:batch].to(DEVICE))[0][:rows].float().cpu().numpy()
            replay = capture(lambda: call(given))
        snr = compute_snr(self.reference[:rows], near)
        return {**about, "snr_db": snr, "build_s": round(time.monotonic() - started)}, replay


def capture(call):
    """The function that replays `call`, and keeps what its CUDA graph reads."""
    replay = tuning.capture_launches(call, 1) if DEVICE == "cuda" else call
    return lambda _=call: replay()


class TimeIsUpError(BaseException):
    """No Exception, so that autotuning does not take it for a kernel that failed."""


@contextmanager
def give_up_in_time():
    """Raises TimeIsUpError in the block, which runs in the main thread, LAST_S seconds after START."""

    def stop(*_):
        raise TimeIsUpError(f"not ready after {LAST_S:.0f} s")

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(0.1, START + LAST_S - time.time()))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def work(name, batches, lock, slots, workers, pipe):
    """A process for one network."""

    @contextmanager
    def alone():
        """No other process uses the GPU: others are stopped."""
        others = [each for each in workers if each and each != os.getpid()]
        with lock:
            for each in others:
                with suppress(ProcessLookupError):
                    os.kill(each, signal.SIGSTOP)
            time.sleep(0.05)
            try:
                yield
            finally:
                for each in others:
                    with suppress(ProcessLookupError):
                        os.kill(each, signal.SIGCONT)

    cores = sorted(os.sched_getaffinity(0))
    first = sum(map(ord, name))
    os.sched_setaffinity(0, {cores[(first + each) % len(cores)] for each in range(max(1, len(cores) // 2))})
    with TemporaryDirectory() as scratch, slots:
        network = Network(name, batches, Path(scratch), alone)
        for batch in batches:
            cell, functions = {"network": name, "batch": batch}, {}
            for variant in VARIANTS:
                if time.time() - START < WAIT_S:
                    try:
                        with give_up_in_time():
                            cell[variant], functions[variant] = network.build(variant, batch)
                    except (Exception, TimeIsUpError) as error:  # noqa: BLE001 - what fails is printed, the rest goes on
                        traceback.print_exc()
                        cell[variant] = {"failed": f"{type(error).__name__}: {error}"[:300]}
                gc.collect()
                torch.cuda.empty_cache()
            with torch.inference_mode(), alone():
                measure(cell, functions)
            pipe.send(cell)
            functions.clear()
            torch._dynamo.reset()
    pipe.close()


def measure(cell, functions):
    times = measure_in_turns(functions)
    for variant, function in functions.items():
        cell[variant] |= {"ms": round(median(times[variant]), 4), "times_ms": times[variant]}
        if DEVICE == "cuda" and cell["batch"] >= ENERGY_FROM and ENERGY_S:
            cell[variant]["mj_per_image"] = measure_energy(function, cell["batch"])
        if DEVICE == "cuda" and f"{cell['network']}:{cell['batch']}" in os.environ.get("PROFILE", "").split():
            cell[variant]["kernels"] = list_kernels(function)
    brief = [f"{name} {each.get('ms', each.get('failed'))}" for name, each in cell.items() if isinstance(each, dict)]
    print(cell["network"], cell["batch"], ", ".join(brief), flush=True)


def main():
    set_assembler()
    os.environ.setdefault("START", str(time.time()))
    os.environ["TORCHINDUCTOR_MAX_AUTOTUNE_CONV_BACKENDS"] = "ATEN"
    networks = {}
    for spec in sys.argv[2:]:
        name, _, batch = spec.partition(":")
        networks.setdefault(name, []).extend(map(int, batch.split(",")))
    context, rows, pipes = multiprocessing.get_context("spawn"), [], []
    lock, slots, workers = context.Lock(), context.BoundedSemaphore(MOST), context.Array("i", len(networks))
    for at, (name, batches) in enumerate(networks.items()):
        here, there = context.Pipe()
        process = context.Process(target=work, args=(name, batches, lock, slots, workers, there), daemon=True)
        process.start()
        workers[at] = process.pid
        there.close()
        pipes.append(here)
    about = {"device": torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu", "torch": torch.__version__}
    while pipes:
        for each in [pipe for pipe in pipes if pipe.poll(0.1)]:
            try:
                rows.append(each.recv())
            except EOFError:  # its process ended
                pipes.remove(each)
            Path(sys.argv[1]).write_text(json.dumps({**about, "rows": rows}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
