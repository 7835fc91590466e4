"""Compiled programs in FP16 and INT8 against torch.compile in FP16, in turns in one process on a GPU; and how near they stay to FP32.

usage: gpu_compiled.py OUT.json NETWORK:BATCH,BATCH…[:VARIANT,…]   (names of gpu_networks.py, random weights)

plain    AOTInductor's code of the exported program in FP16, for one batch size
fused    the same with optpipe's steps in place of layers that they compute, tuned
alone    fused with the tactics that are fastest alone, not compared within the program
serial   alone without dependent launches: each kernel starts when the one before has ended
unready  alone whose kernels do not fetch their weights while they wait
int8     the same in INT8
fp8      the exported program with linear layers in FP8
fused+   the program of fused with products that the compiler tunes; likewise int8+ and fp8+
joules   int8 with the tactics that take the least energy
compile  torch.compile, FP16, channels last
cast     the same with FP32 inputs and outputs, as the builds have them; compile, which gets FP16, is the harder peer
max      the same with max-autotune, but cuDNN's convolutions alone

All are replayed from CUDA graphs; where one variant of a cell cannot be captured, all of them are called without, and the row says so.
`snr_db` compares each with the module in FP32; it is null where numbers are not finite, and such a variant is no peer.

A process for each network, MOST at a time, builds a cell's variants and times them. Only one at a time uses the GPU to tune or to time,
and while one times, the others are stopped. No build starts later than WAIT_S seconds after START (a time in seconds, else the start),
and LAST_S seconds after it builds are given up, so that what is built is still timed.
PROFILE names cells such as swin_t:64 whose longest kernels are kept. Without a GPU everything but tuning and CUDA graphs runs on
the CPU, to try the script. A file that exists is continued. A network may be named several times, to build its batch sizes side by side.
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
from benchmarks.gpu_networks import draw, get_input, make_network
from tests.fakes.fp8_models import measure_ranges

from optpipe.backends.base import BuildRequest, Device
from optpipe.backends.inductor import CONFIGS
from optpipe.backends.inductor_layouts import keep_right_layouts, takes_layouts
from optpipe.backends.inductor_packages import Compilation, load_package
from optpipe.backends.torch_fp8 import lower_fp8
from optpipe.backends.torch_layers import in_place, tuning
from optpipe.backends.torch_layers.lowering import lower_program
from optpipe.backends.torch_products import layers_from_program
from optpipe.backends.torch_program import cast_module, export_program, export_rewritten
from optpipe.core.card import InputSpec, ModelCard, Task
from optpipe.core.precision import Precision, prove_precision
from optpipe.kernels import launches, tuner
from optpipe.kernels.compilation import set_assembler
from optpipe.models.export.onnx_export import complete_card, onnx_from_torch
from optpipe.quantize.qdq import Target, place_qdq, qdq_from_onnx
from optpipe.workspace.environment import list_gpus

ROUNDS = 20
ENERGY_S = float(os.environ.get("ENERGY_S", "0.8"))
ENERGY_FROM = 64
"""The least batch size whose energy is measured."""
VARIANTS = os.environ.get("VARIANTS", "fused int8 compile").split()
MOST = int(os.environ.get("MOST", "7"))
START, WAIT_S = (
    float(os.environ.get("START", time.time())),
    float(os.environ.get("WAIT_S", "10000")),
)
LAST_S = float(os.environ.get("LAST_S", "10000"))
DEVICE: Device = "cuda" if torch.cuda.is_available() else "cpu"
PRECISIONS = {"int8": Precision.INT8, "joules": Precision.INT8, "fp8": Precision.FP8}
TARGETS: dict[str, Target] = {"int8": "tensorrt", "fp8": "fp8"}
"""Of the Q/DQ graphs."""


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


def measure_energy(function, batch, seconds=ENERGY_S):
    """Millijoules per image by the GPU's counter, which counts everything that the GPU does meanwhile."""
    import pynvml

    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByIndex(list_gpus()[0].index)  # NVML counts hidden GPUs too
    read = pynvml.nvmlDeviceGetTotalEnergyConsumption
    for _ in range(20):
        function()
    torch.cuda.synchronize()
    calls, begun, joules = 0, time.monotonic(), read(gpu)
    while time.monotonic() - begun < seconds:
        for _ in range(20):
            function()
        torch.cuda.synchronize()
        calls += 20
    return round((read(gpu) - joules) / (calls * batch), 5)


def measure_launch_energy(launch):
    """Microjoules of a launch; the counter moves in steps of some 20 ms."""
    replay = tuner.capture_launches(launch, tuner.LAUNCHES)
    return measure_energy(replay, tuner.LAUNCHES, 0.4) * 1e3


def list_kernels(function):
    """The 25 longest kernels of one call: name, microseconds, launches."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for _ in range(3):
            function()
        torch.cuda.synchronize()
    rows = [
        (each.key[:150], round(each.self_device_time_total / 3, 1), each.count // 3)
        for each in found.key_averages()
    ]
    return sorted(rows, key=lambda row: -row[1])[:25]


def time_serial(launch):
    """Another name than `time_launch`'s: Triton's cache keeps the times by it."""
    return tuner.time_replay(tuner.capture_launches(launch, tuner.LAUNCHES)) / tuner.LAUNCHES


def time_unready(launch):
    return time_serial(launch)


@contextmanager
def launch_as(variant):
    """How kernels of a variant are launched, while it is tuned and captured."""
    launches.DEPENDENT, launches.AHEAD = variant != "serial", variant != "unready"
    try:
        yield
    finally:
        launches.DEPENDENT = launches.AHEAD = True


CLOCKS = {"joules": measure_launch_energy, "serial": time_serial, "unready": time_unready}
"""What the tactics of a variant are chosen by, if not by `time_launch`."""


def compute_snr(expected, found):
    """Decibels, or None if a number is not finite."""
    if not np.isfinite(found).all():
        return None
    return round(
        float(10 * np.log10(np.square(expected).sum() / np.square(found - expected).sum())), 1
    )


class Network:
    """A network's graphs and reference, from which its programs are made for one batch size."""

    def __init__(self, name, batches, variants, folder, alone):
        self.name, self.folder, self.alone, self.programs = name, folder, alone, {}
        self.data = draw(name, 4, 2)
        shape, dtype = get_input(name)
        given = "input_ids" if dtype == "int64" else "image"
        shapes = [(size, *shape) for size in (1, 4, max(4, *batches))]
        self.card = ModelCard(
            name, f"{name}.py:make", Task.OTHER, (InputSpec(given, dtype, *shapes, batch=0),)
        )
        self.reference = self.compute_reference()
        kinds = {str(PRECISIONS[each]) for each in map(get_base, variants) if each in PRECISIONS}
        if kinds:
            onnx_from_torch(make_network(name), self.card, folder / "model.onnx")
            self.card = complete_card(self.card, folder / "model.onnx")
            model = onnx.load(folder / "model.onnx")
        for kind in kinds:
            placed = place_qdq(model, TARGETS[kind])
            graph = qdq_from_onnx(model, placed, measure_ranges(model, placed.tensors, self.data))
            onnx.save(graph, folder / f"{kind}.onnx")

    def compute_reference(self):
        """The first output of the module in FP32, without TF32."""
        module = make_network(self.name).to(DEVICE)
        with torch.inference_mode():
            found = module(self.data.to(DEVICE))
        first = found[0] if isinstance(found, tuple | list) else found
        return first.float().cpu().numpy()

    def make_program(self, variant, batch, given):
        """The exported program, and what is recorded about it."""
        precision = PRECISIONS.get(variant, Precision.FP16)
        card, graph = (
            self.card.with_profile((batch, batch, batch), {}),
            self.folder / f"{precision}.onnx",
        )
        wanted = BuildRequest(
            card, precision, graph, lambda: make_network(self.name), DEVICE, {}, self.folder
        )
        if variant == "plain":
            return export_program(wanted), {}
        kernels = DEVICE == "cuda"
        program, missed = (
            lower_fp8(wanted, kernels=kernels) if variant == "fp8" else lower_program(wanted)
        )
        tuned = self.tune(program, batch, given, variant) if kernels else tuning.Tuned({}, {})
        copies = tuning.measure_copies(program, (given,)) if kernels else []
        exported = export_rewritten(program, wanted)
        share = prove_precision(precision, layers_from_program(exported, precision)).share.macs
        return exported, {
            "tactics": tuning.summarize_choices(tuned.choices),
            "in_place": tuned.in_place,
            "macs": share,
            "missed": list(missed),
            "layout_copies": copies,
        }

    def tune(self, program, batch, given, variant):
        """Compiles kernels beside other processes, and times them alone."""
        tuning.compile_tactics(program, {batch: (given,)})
        before, drawn = tuner.time_launch, {batch: (given,)}
        tuner.CHOSEN.clear()  # of another variant
        try:
            tuner.time_launch = CLOCKS.get(variant, before)
            with self.alone():
                choices = tuning.choose_tactics(program, drawn)
                settles = variant not in (*CLOCKS, "alone")
                found = in_place.settle_tactics(program, drawn, choices) if settles else {}
            return tuning.Tuned(choices, found)
        finally:
            tuner.time_launch = before

    def build(self, variant, batch):
        """What is recorded, and the functions that can be timed: from a CUDA graph, and without."""
        with launch_as(variant):
            return self.build_as_it_is(variant, batch)

    def measure_nearness(self, call, batch):
        """The SNR of the first images of a batch."""
        rows = min(len(self.data), batch)
        found = call(torch.cat([self.data] * ((batch + 3) // 4))[:batch].to(DEVICE))
        first = found[0] if isinstance(found, tuple | list) else found
        return compute_snr(self.reference[:rows], first[:rows].float().cpu().numpy())

    def build_as_it_is(self, variant, batch):
        started = time.monotonic()
        given = draw(self.name, batch, 1).to(DEVICE)
        if variant in ("compile", "max", "cast"):
            module = make_network(self.name).to(DEVICE)
            module = module.half() if DEVICE == "cuda" else module
            kind = {"dtype": next(module.parameters()).dtype}
            if given.dim() == 4:
                kind["memory_format"] = torch.channels_last
            if variant == "cast":
                module = cast_module(Precision.FP16, module, DEVICE)
            elif given.dim() == 4:
                module = module.to(memory_format=torch.channels_last)
            takes = variant != "cast" and given.is_floating_point()
            mode = (
                "max-autotune-no-cudagraphs" if variant == "max" and DEVICE == "cuda" else "default"
            )
            wide = torch.compile(module, mode=mode, dynamic=False)
            given = given.to(**kind) if takes else given
            with torch.inference_mode():
                wide(given)
                with self.alone():
                    snr = self.measure_nearness(
                        lambda batch: wide(batch.to(**kind) if takes else batch), batch
                    )
                    replay, captured = capture(lambda: wide(given))
            about = {"snr_db": snr, "build_s": round(time.monotonic() - started), **captured}
            return about, (replay, lambda: wide(given))
        if (base := get_base(variant), batch) not in self.programs:
            self.programs[base, batch] = self.make_program(base, batch, given)
        exported, about = self.programs[base, batch]
        package = self.folder / f"{variant}-{batch}.pt2"
        tuned = (
            {"max_autotune_gemm": True, "max_autotune_conv_backends": "ATEN"}
            if variant != base
            else {}
        )
        compilation = Compilation(exported, package, {**CONFIGS[DEVICE], **tuned})
        compilation.run()
        if DEVICE == "cuda" and takes_layouts(exported):
            with self.alone():
                about = {**about, "layouts": keep_right_layouts(compilation, (given,))}
        call = load_package(package, DEVICE)
        with torch.inference_mode(), self.alone():
            snr = self.measure_nearness(call, batch)
            replay, captured = capture(lambda: call(given))
        about = {**about, "snr_db": snr, "build_s": round(time.monotonic() - started), **captured}
        return about, (replay, lambda: call(given))


def get_base(variant):
    return variant.removesuffix("+")


def capture(call):
    """The function that replays `call`, and keeps what its CUDA graph reads; and why there is none, if it cannot be captured."""
    if DEVICE == "cpu":
        return call, {}
    try:
        replay = tuner.capture_launches(call, 1)
    except torch.AcceleratorError as error:
        return None, {"not_captured": str(error).splitlines()[0]}
    return lambda _=call: replay(), {}


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


def work(name, batches, variants, lock, slots, workers, pipe):
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
    os.sched_setaffinity(
        0, {cores[(first + each) % len(cores)] for each in range(max(1, len(cores) // 2))}
    )
    with TemporaryDirectory() as scratch, slots:
        network = Network(name, batches, variants, Path(scratch), alone)
        for batch in batches:
            cell, functions = {"network": name, "batch": batch}, {}
            for variant in variants:
                if time.time() - START < WAIT_S:
                    try:
                        with give_up_in_time():
                            cell[variant], functions[variant] = network.build(variant, batch)
                    except (Exception, TimeIsUpError) as error:  # noqa: BLE001 - what fails is printed, the rest goes on
                        traceback.print_exc()
                        cell[variant] = {"failed": f"{type(error).__name__}: {error}"[:300]}
                gc.collect()
                torch.cuda.empty_cache()
            if all(each in cell for each in variants):  # otherwise the time was up
                with torch.inference_mode(), alone():
                    measure(cell, functions)
                pipe.send(cell)
            functions.clear()
            torch._dynamo.reset()
    pipe.close()


def measure(cell, functions):
    if lone := [name for name, (replay, _) in functions.items() if replay is None]:
        cell["without_graphs"] = lone
    functions = {name: call if lone else replay for name, (replay, call) in functions.items()}
    times = measure_in_turns(functions)
    for variant, function in functions.items():
        cell[variant] |= {"ms": round(median(times[variant]), 4), "times_ms": times[variant]}
        if DEVICE == "cuda" and cell["batch"] >= ENERGY_FROM and ENERGY_S:
            cell[variant]["mj_per_image"] = measure_energy(function, cell["batch"])
        if (
            DEVICE == "cuda"
            and f"{cell['network']}:{cell['batch']}" in os.environ.get("PROFILE", "").split()
        ):
            cell[variant]["kernels"] = list_kernels(function)
    brief = [
        f"{name} {each.get('ms', each.get('failed'))}"
        for name, each in cell.items()
        if isinstance(each, dict)
    ]
    print(cell["network"], cell["batch"], ", ".join(brief), flush=True)


def main():
    networks = []
    for spec in sys.argv[2:]:
        name, sizes, *variants = spec.split(":")
        networks.append(
            (
                name,
                [int(each) for each in sizes.split(",")],
                variants[0].split(",") if variants else VARIANTS,
            )
        )
    measure_networks(Path(sys.argv[1]), networks)


def measure_networks(file, networks):
    """Measures (name, batch sizes, variants), and adds a row for each cell to those in the file."""
    set_assembler()
    os.environ.setdefault("START", str(time.time()))
    os.environ["TORCHINDUCTOR_MAX_AUTOTUNE_CONV_BACKENDS"] = "ATEN"
    context, pipes = multiprocessing.get_context("spawn"), []
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"] if file.exists() else []
    lock, slots, workers = (
        context.Lock(),
        context.BoundedSemaphore(MOST),
        context.Array("i", len(networks)),
    )
    for at, (name, batches, variants) in enumerate(networks):
        here, there = context.Pipe()
        process = context.Process(
            target=work, args=(name, batches, variants, lock, slots, workers, there), daemon=True
        )
        process.start()
        workers[at] = process.pid
        there.close()
        pipes.append(here)
    about = {
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu",
        "torch": torch.__version__,
    }
    while pipes:
        for each in [pipe for pipe in pipes if pipe.poll(0.1)]:
            try:
                row = each.recv()
                cell = row["network"], row["batch"]
                rows = [old for old in rows if (old["network"], old["batch"]) != cell] + [row]
            except EOFError:  # its process ended
                pipes.remove(each)
            file.write_text(json.dumps({**about, "rows": rows}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
