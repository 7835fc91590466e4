"""`build --precision auto` against torch.compile (max-autotune, FP16, channels last) on one GPU, network by network, in turns.

usage: python benchmarks/gpu_auto.py OUT.json [--networks resnet50,vit_b_16] [--batches 1,8,64] [--seconds 400] [--total 1700]
       python benchmarks/gpu_auto.py OUT.json --build ...    the FP16 builds alone, all networks side by side: nothing is timed
       python benchmarks/gpu_auto.py OUT.json --device cpu --networks digits --batches 1,8   everything but the GPU

Weights are random (those of `digits` its own), so builds must keep an SNR alone. Networks come by importance and have a time
limit; a row is printed, and OUT.json written anew, as soon as a batch size is done: what was done stays when time is up, and the same
command goes on with the cells that are left. Per network on an H200: 1 to 2 min to build (30 s after --build), 15 to 65 s more for
INT8, 2 min to race. max-autotune times slow convolutions for long: EfficientNet-B0 at batch 64 was not compiled after 5 min. In each
row both sides run in one process, replayed from CUDA graphs, in turns in an order drawn for each round; the ratio has Student's
interval over the rounds.
"""

import json
import os
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median
from threading import Timer
from typing import Any, cast

from optpipe.core.decision import Decision
from optpipe.stats.ratio import ratio_from_rounds
from optpipe.workspace.store import Store

NETWORKS = (
    "resnet50", "vit_b_16", "convnext_tiny", "efficientnet_b0", "mobilenet_v3_large", "resnext50_32x4d", "bert_base"
)  # fmt: skip
IN_FP8 = ("vit_b_16", "convnext_tiny", "bert_base")
"""Their MACs are in linear layers; the others are tried in INT8."""
CUDNN_ONLY = ("convnext_tiny", "efficientnet_b0", "mobilenet_v3_large")
"""torch.compile takes cuDNN's convolutions for these, without timing its own: for depthwise ones they took minutes, and the fastest of
them 430 times as long (17.9 against 0.042 ms; EfficientNet-B0, 1,152 channels, 5×5, batch 64)."""
FLOOR_DB = 20.0
"""Weights are random: INT8 keeps 32 dB or more, E4M3 with its three bits of mantissa 23 dB of BERT's outputs."""
ROUNDS, TIMED_S, WARM_UP_S = 10, 0.15, 0.3
LONGEST_KERNELS = 12
HEAD = (
    "network",
    "batch",
    "winner",
    "winner ms",
    "torch.compile ms",
    "speed of the winner",
    "code for all sizes ms",
    "others",
)
BERT = """
import torch
from transformers import BertConfig, BertModel
class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.bert = BertModel(BertConfig(attn_implementation="sdpa"), add_pooling_layer=False).eval()
    def forward(self, input_ids):
        return self.bert(input_ids=input_ids, attention_mask=torch.ones_like(input_ids)).last_hidden_state
def bert_base():
    return Encoder().eval()
"""
CARD = """
name = "bert_base"
source = "bert.py:bert_base"
[[inputs]]
name = "input_ids"
dtype = "int64"
min = [1, 128]
opt = [8, 128]
max = [64, 128]
below = 30522
[[outputs]]
name = "hidden"
"""


def main() -> None:
    """Builds, times and prints, one network after the other."""
    parser = ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--batches", default="1,8,64")
    parser.add_argument("--seconds", type=float, default=400.0, help="for each network")
    parser.add_argument(
        "--rounds", type=int, default=4, help="of the comparison between the fastest builds; `build` takes 8"
    )
    parser.add_argument("--total", type=float, default=1700.0)
    parser.add_argument("--calibration", type=Path, help="images for INT8 and FP8; default: these are left out")
    parser.add_argument("--build", action="store_true", help="only build: FP16 and FP8, which time no kernels")
    parser.add_argument("--low", action="store_true", help="of a process that main() starts: build FP8")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--option", default="", help="of the builds, such as inductor.max_autotune=true")
    parser.add_argument("--one", help="of a process that main() starts: this network, rows to standard output")
    given = parser.parse_args()
    sizes = {int(each) for each in given.batches.split(",")}
    if given.one:
        measure_one(given.one, sorted(sizes), given)
        return
    if given.build:
        build_side_by_side(given)
        return
    begun, rows = time.monotonic(), read_finished_rows(given.out)
    print("| " + " | ".join(HEAD) + " |\n|" + "---|" * len(HEAD), flush=True)
    for name in given.networks.split(","):
        done = [row["batch"] for row in rows if row["network"] == name]
        left = [size for size in sorted(sizes) if size not in done]
        if not left or time.monotonic() - begun > given.total:
            continue
        given.batches, given.limit = (
            ",".join(map(str, left)),
            min(given.seconds, given.total + begun - time.monotonic()),
        )
        for row in measure_network(name, given):
            rows.append(row)
            print(format_row(row), flush=True)
            given.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def read_finished_rows(out: Path) -> list[dict[str, Any]]:
    """The measured rows of an earlier start."""
    rows: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else []
    return [row for row in rows if "why_not" not in row]


def measure_network(name: str, given: Any) -> Iterator[dict[str, Any]]:
    """A row for each batch size as it comes, from a process of its own that may take `given.limit` seconds."""
    batches = [int(each) for each in given.batches.split(",")]
    command = list_command(name, given)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout
    # with the workers and compilers that it started
    clock = Timer(given.limit, lambda: os.killpg(process.pid, signal.SIGKILL))
    clock.start()
    done = set()
    for line in process.stdout:
        if line.startswith("{"):
            row = json.loads(line)
            done.add(row["batch"])
            yield row
    clock.cancel()
    why = "time is up" if process.wait() == -signal.SIGKILL else f"exit status {process.returncode}"
    yield from ({"network": name, "batch": size, "why_not": why} for size in batches if size not in done)


def build_side_by_side(given: Any) -> None:
    """A process for each network and precision, which leaves its builds in the workspace where the measurement finds them."""
    processes = {}
    if "bert_base" in given.networks:
        Path("auto-bert_base").mkdir(exist_ok=True)
        write_bert(Path("auto-bert_base"))
    for name in given.networks.split(","):
        processes[name] = subprocess.Popen(list_command(name, given))
        if given.calibration and name in IN_FP8:
            processes[f"{name} fp8"] = subprocess.Popen([*list_command(name, given), "--low"])
    for name, process in processes.items():
        print(f"{name}: exit status {process.wait()}", flush=True)


def list_command(name: str, given: Any) -> list[str]:
    """Of the process that builds and measures one network."""
    command = [sys.executable, __file__, str(given.out), "--one", name, "--batches", given.batches]
    command += ["--rounds", str(given.rounds), "--device", given.device, "--option", given.option]
    command += ["--calibration", str(given.calibration)] if given.calibration else []
    return [*command, "--build"] if given.build else command


def measure_one(name: str, batches: list[int], given: Any) -> None:
    """Chooses a build as `--precision auto` does, then times it and torch.compile in turns; a JSON line for each size.

    Candidates are FP16 (on a CPU FP32) and, with calibration data, INT8 or FP8: wider types only cost time here. With --build the
    first are built and that is all.
    """
    from optpipe.backends.registry import BACKENDS
    from optpipe.build.build import BuildPlan, build_model
    from optpipe.build.choose.candidates import ChoicePlan, add_static_batches
    from optpipe.build.choose.choose import choose_build
    from optpipe.commands.parsing import options_from_text
    from optpipe.commands.terminal import Terminal
    from optpipe.core.card import card_from_file
    from optpipe.core.mixed_precision import Budget
    from optpipe.core.precision import Precision
    from optpipe.core.weights import weights_from_text
    from optpipe.export.exported import export_model
    from optpipe.export.model import Model
    from optpipe.sources.resolve import source_from_text
    from optpipe.workspace.file_names import CARD as CARD_FILE
    from optpipe.workspace.store import Store

    workspace = Path(f"auto-{name}")
    workspace.mkdir(exist_ok=True)
    batch, images = (min(batches), sorted(batches)[len(batches) // 2], max(batches)), given.calibration
    if name == "bert_base":
        write_bert(workspace)
        batch, images = None, images and workspace / "tokens.npz"
    wide = Precision.FP16 if given.device == "cuda" else Precision.FP32
    low = Precision.FP8 if name in IN_FP8 else Precision.INT8
    precisions = (wide, low) if images else (wide,)
    if given.build:
        precisions = (low,) if given.low else (wide,)
    backends = tuple(each for each in BACKENDS.values() if each.probe_capability(given.device).builds)
    options = options_from_text([each for each in given.option.split() if each])
    build = BuildPlan(precisions, backends, named=False, device=given.device, calibration=images, options=options)
    weights = choose_weights(name)
    model = Model(source_from_text(name_source(name, workspace), {}), weights_from_text(weights, 0), batch)
    with Terminal() as terminal:
        if given.build:
            card = export_model(model, Store(workspace), terminal)[0].file(CARD_FILE)
            build_model(model, add_static_batches(build, card_from_file(card), batches), Store(workspace), terminal)
            return
        plan = ChoicePlan(build, Budget(FLOOR_DB, "dB"), tuple(batches), given.rounds)
        decision = choose_build(model, plan, weights, Store(workspace), terminal).decision
    for size in reversed(batches):
        print(json.dumps(compare(name, size, decision, workspace, given.device)), flush=True)


def write_bert(workspace: Path) -> None:
    """BERT-base for 128 tokens as a model of its own, and tokens to calibrate it."""
    import numpy as np

    if (workspace / "tokens.npz").exists():
        return
    (workspace / "bert.py").write_text(BERT, encoding="utf-8")
    (workspace / "bert.toml").write_text(CARD, encoding="utf-8")
    np.savez(workspace / "tokens.npz", input_ids=np.random.default_rng(0).integers(30522, size=(64, 128)))


def name_source(name: str, workspace: Path) -> str:
    """MODEL."""
    return str(workspace / "bert.toml") if name == "bert_base" else name


def choose_weights(name: str) -> str:
    """Nothing can be downloaded where this runs."""
    return "default" if name in ("digits", "bert_base") else "random"  # BERT draws its own


def compare(name: str, size: int, decision: Decision, workspace: Path, device: str) -> dict[str, Any]:
    """The row of one batch size."""
    winner = decision.winners.get(size)
    if winner is None:
        return {"network": name, "batch": size, "why_not": "no build keeps the floor"}
    source, weights = name_source(name, workspace), choose_weights(name)
    if name in CUDNN_ONLY:
        from torch._inductor import config

        config.max_autotune_conv_backends = "ATEN"
    sides = list(load_both(source, winner, size, workspace, device, "max-autotune", weights))
    if any_size := load_code_for_all_sizes(decision, size, workspace):
        sides.append(any_size)
    ours, theirs, *general = time_in_turns(sides, device)
    ratio = ratio_from_rounds(ours, theirs)
    others = {}
    for each in decision.candidates:
        found = next((one for one in each.times if one.batch_size == size), None)
        if each.artifact != winner:
            others[f"{each.backend} {each.precision}"] = found.slowdown if found else str(each.standing)
    chosen = next(each for each in decision.candidates if each.artifact == winner)
    return {
        "network": name,
        "batch": size,
        "winner": f"{chosen.backend} {chosen.precision}",
        "winner_ms": median(ours),
        "compiled_ms": median(theirs),
        "speed": ratio.value,
        "speed_ci": ratio.ci,
        "code_for_all_sizes_ms": median(general[0]) if general else None,
        "longest_kernels": [list_longest_kernels(each) for each in sides]
        if ratio.value < 1 and device == "cuda"
        else None,
        "others": others,
        "snr_db": {
            f"{each.backend} {each.precision}": each.accuracy and each.accuracy.snr_db for each in decision.candidates
        },
        "left_out": [[each.backend, each.precision, each.reason] for each in decision.left_out],
    }


def load_code_for_all_sizes(decision: Decision, size: int, workspace: Path) -> Callable[[], None] | None:
    """AOTInductor's build that comes first, without its code for single sizes; None where it has none."""
    from optpipe.artifacts.lookup import find_artifacts

    for each in decision.candidates:
        if each.backend == "inductor":
            found = find_artifacts(each.artifact, Store(workspace))[0]
            details = dict(found.entry.info.details)
            if details.pop("static_batches", None):
                binding, _ = load_artifact(found, size, details)
                return cast("Callable[[], None]", binding.launch)
    return None


def load_artifact(found: Any, size: int, details: Any = None) -> tuple[Any, dict[str, Any]]:
    """Its binding at a batch size, and the inputs that it was given; `details` in place of its own."""
    from optpipe.backends.registry import BACKENDS
    from optpipe.export.reference import reference_from_file
    from optpipe.inputs.pool import vary_inputs
    from optpipe.workspace.file_names import REFERENCE

    assert found.reference is not None
    arrays = vary_inputs(dict(reference_from_file(found.reference.file(REFERENCE)).inputs), size, 0, frozenset())
    arrays = {key: each[:size] for key, each in arrays.items()}
    info = found.entry.info if details is None else replace(found.entry.info, details=details)
    return BACKENDS[info.backend].load(found.entry.path, info, {}).bind(arrays), arrays


def load_both(
    source: str, artifact: str, size: int, workspace: Path, device: str, mode: str, weights: str
) -> tuple[Callable[[], None], Callable[[], None]]:
    """The artifact and `source` compiled as functions that enqueue one inference, on a GPU from CUDA graphs."""
    import torch

    from optpipe.artifacts.lookup import find_artifacts
    from optpipe.core.weights import weights_from_text
    from optpipe.sources.resolve import source_from_text

    found = find_artifacts(artifact, Store(workspace))[0]
    binding, arrays = load_artifact(found, size)
    module = source_from_text(source, {}).load(weights_from_text(weights, 0)).module
    dtype = torch.float16 if device == "cuda" else torch.float32
    module = module.to(device, dtype).to(memory_format=torch.channels_last).eval()
    inputs = [torch.from_numpy(arrays[each.name]).to(device) for each in found.card.inputs]
    half = {"dtype": dtype}
    inputs = [
        each.to(**half, memory_format=torch.channels_last)
        if each.dim() == 4
        else each.to(**half)
        if each.is_floating_point()
        else each
        for each in inputs
    ]
    torch.compiler.reset()  # else a second batch size would be compiled for all sizes
    compiled = torch.compile(module, mode=mode if device == "cuda" else "default", dynamic=False)

    def launch() -> None:
        with torch.inference_mode():
            torch.compiler.cudagraph_mark_step_begin()
            compiled(*inputs)

    return binding.launch, launch


def time_in_turns(sides: Sequence[Callable[[], None]], device: str) -> list[list[float]]:
    """ms per inference of each round, around as many launches as take TIMED_S: by CUDA events, on a CPU by its clock."""
    import torch

    if device == "cpu":
        return _take_turns(sides, _time_on_cpu, lambda: None)
    with torch.cuda.stream(torch.cuda.Stream()):
        return _take_turns(sides, _time_on_gpu, torch.cuda.synchronize)


def _take_turns(sides: Sequence[Callable[[], None]], clock: Any, wait: Any) -> list[list[float]]:
    order, counts = Random(0), []
    times: list[list[float]] = [[] for _ in sides]
    for each in sides:
        each()
        wait()
        begun, count = time.monotonic(), 0
        while time.monotonic() - begun < WARM_UP_S:
            each()
            wait()
            count += 1
        counts.append(max(5, int(count * TIMED_S / WARM_UP_S)))
    for _ in range(ROUNDS):
        for side in order.sample(range(len(sides)), len(sides)):
            times[side].append(clock(sides[side], counts[side]) / counts[side])
    return times


def list_longest_kernels(launch: Callable[[], None]) -> list[tuple[str, float, int]]:
    """Name, µs and launches in one inference of the kernels that take most."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        launch()
        torch.cuda.synchronize()
    found = sorted(recorded.key_averages(), key=lambda each: -each.self_device_time_total)
    return [(each.key[:100], each.self_device_time_total, each.count) for each in found[:LONGEST_KERNELS]]


def _time_on_gpu(launch: Any, count: int) -> float:
    import torch

    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(count):
        launch()
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last))


def _time_on_cpu(launch: Any, count: int) -> float:
    begun = time.perf_counter()
    for _ in range(count):
        launch()
    return 1e3 * (time.perf_counter() - begun)


def format_row(row: dict[str, Any]) -> str:
    """A line of the table."""
    if "why_not" in row:
        return f"| {row['network']} | {row['batch']} | {row['why_not']} | | | | | |"
    low, high = row["speed_ci"]
    general = "" if row["code_for_all_sizes_ms"] is None else f"{row['code_for_all_sizes_ms']:.3f}"
    others = ", ".join(
        f"{name} {value}" if isinstance(value, str) else f"{name} × {value:.2f}"
        for name, value in row["others"].items()
        if value is not None
    )
    return (
        f"| {row['network']} | {row['batch']} | {row['winner']} | {row['winner_ms']:.3f} | {row['compiled_ms']:.3f} | "
        f"{row['speed']:.3f} ({low:.3f} to {high:.3f}) | {general} | {others} |"
    )


if __name__ == "__main__":
    main()
