"""`build --precision auto` against torch.compile (max-autotune, FP16, channels last) on one GPU, network by network, in turns.

usage: python benchmarks/gpu_auto.py OUT.json [--networks resnet50,vit_b_16] [--batches 1,8,64] [--seconds 400] [--total 1700]
       python benchmarks/gpu_auto.py OUT.json --build ...    first, all networks side by side: the FP16 and FP8 builds, and the kernels
                                                             that torch.compile will time, as machine code into the caches
       python benchmarks/gpu_auto.py OUT.json --device cpu --networks digits --batches 1,8   everything but the GPU

Weights are random (those of `digits` its own), so builds must keep an SNR alone. Each network has a time limit; a row is printed, and
OUT.json written anew, as soon as a batch size is done: what was done stays when time is up, and the same command goes on with the cells
that are left. Per network on an H200: 1 to 2 min to build (30 s after --build), 15 to 75 s more for INT8, 2 min to race. In each row
both sides run in one process, replayed from CUDA graphs, in turns in an order drawn for each round; the ratio has Student's interval
over the rounds.
"""

import json
import os
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from threading import Timer
from typing import Any, cast

from gpu_turns import compile_source, draw_arrays, list_longest_kernels, load_artifact, time_in_turns

from optpipe.stats.ratio import ratio_from_rounds
from optpipe.workspace.store import Store

NETWORKS = (
    "resnet50", "vit_b_16", "convnext_tiny", "efficientnet_b0", "mobilenet_v3_large", "resnext50_32x4d", "bert_base"
)  # fmt: skip
IN_FP8 = ("vit_b_16", "convnext_tiny", "bert_base")
"""Their MACs are in linear layers; the others are tried in INT8."""
CUDNN_ONLY = ("convnext_tiny", "efficientnet_b0", "mobilenet_v3_large", "resnet50", "resnext50_32x4d")
"""torch.compile takes cuDNN's convolutions for these, without timing its own, which took more than 3 min for ResNet-50 at one batch size.
Of depthwise ones the fastest took 430 times as long as cuDNN's (17.9 against 0.042 ms; EfficientNet-B0, 1,152 channels, 5×5, batch 64); of
ResNet-50's first four at batch 64 one was faster (0.039 against 0.047 ms)."""
FLOOR_DB = 20.0
"""Weights are random: INT8 keeps 32 dB or more, E4M3 with its three bits of mantissa 23 dB of BERT's outputs."""
HEAD = ("network", "batch", "winner", "winner ms", "torch.compile ms", "speed of the winner", "others, ms")
COMPILED = "torch.compile"
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
    parser.add_argument("--direct", action="store_true", help="no race: the winner is the fastest beside torch.compile")
    parser.add_argument("--low", action="store_true", help="of a process that main() starts: build FP8")
    parser.add_argument("--warm", action="store_true", help="of a process that main() starts: torch.compile alone")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--backends", help="default: all that build for the device")
    parser.add_argument("--option", default="", help="of the builds, such as inductor.max_autotune=true")
    parser.add_argument("--low-option", help="of the FP8 and INT8 builds; default: --option")
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
        if given.device == "cuda":
            processes[f"{name} torch.compile"] = subprocess.Popen([*list_command(name, given), "--warm"])
        if given.calibration and name in IN_FP8:
            processes[f"{name} fp8"] = subprocess.Popen([*list_command(name, given), "--low"])
    for name, process in processes.items():
        print(f"{name}: exit status {process.wait()}", flush=True)


def list_command(name: str, given: Any) -> list[str]:
    """Of the process that builds and measures one network."""
    command = [sys.executable, __file__, str(given.out), "--one", name, "--batches", given.batches]
    command += ["--rounds", str(given.rounds), "--device", given.device, "--option", given.option]
    for key in ("calibration", "backends", "low_option"):
        value = getattr(given, key)
        command += [] if value is None else [f"--{key.replace('_', '-')}={value}"]
    return command + [f"--{each}" for each in ("build", "direct") if getattr(given, each)]


def measure_one(name: str, batches: list[int], given: Any) -> None:
    """Chooses a build as `--precision auto` does, then times it and torch.compile in turns; a JSON line for each size.

    Candidates are FP16 (on a CPU FP32) and, with calibration data, INT8 or FP8: wider types only cost time here. With --build the
    first are built and that is all.
    """
    from optpipe.backends.registry import BACKENDS
    from optpipe.build.build import BuildPlan
    from optpipe.build.choose.candidates import ChoicePlan
    from optpipe.build.choose.choose import choose_build
    from optpipe.commands.parsing import options_from_text
    from optpipe.commands.terminal import Terminal
    from optpipe.core.mixed_precision import Budget
    from optpipe.core.precision import Precision
    from optpipe.core.weights import weights_from_text
    from optpipe.export.model import Model
    from optpipe.sources.resolve import source_from_text
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
    names = given.backends.split(",") if given.backends else list(BACKENDS)
    backends = tuple(BACKENDS[each] for each in names if BACKENDS[each].probe_capability(given.device).builds)
    options, low_options = (
        options_from_text(each.split()) for each in (given.option, given.low_option or given.option)
    )
    build = BuildPlan(precisions, backends, named=False, device=given.device, calibration=images, options=options)
    weights = choose_weights(name)
    model = Model(source_from_text(name_source(name, workspace), {}), weights_from_text(weights, 0), batch)
    with Terminal() as terminal:
        if given.warm:
            for size in reversed(batches):
                compile_rival(name, make_arrays(model, size, Store(workspace), terminal), workspace, given.device)()
            return
        winners: Mapping[int, str] = {}
        if given.build or given.direct:
            built = [
                each
                for kind in precisions
                for each in build_everything(
                    model,
                    replace(build, precisions=(kind,), options=low_options if kind is low else options),
                    batches,
                    Store(workspace),
                    terminal,
                )
            ]
            if given.build:
                return
            builds = list_builds(built)
        else:
            plan = ChoicePlan(build, Budget(FLOOR_DB, "dB"), tuple(batches), given.rounds)
            decision = choose_build(model, plan, weights, Store(workspace), terminal).decision
            builds = {each.artifact: f"{each.backend} {each.precision}" for each in decision.candidates if each.times}
            winners = decision.winners
    for size in reversed(batches):
        print(json.dumps(compare(name, size, builds, winners.get(size), workspace, given.device)), flush=True)


def build_everything(model: Any, plan: Any, batches: Sequence[int], store: Store, listener: Any) -> Sequence[Any]:
    """What `--precision auto` builds, without its choice."""
    from optpipe.build.build import build_model
    from optpipe.build.choose.candidates import add_static_batches
    from optpipe.core.card import card_from_file
    from optpipe.export.exported import export_model
    from optpipe.workspace.file_names import CARD as CARD_FILE

    card = card_from_file(export_model(model, store, listener)[0].file(CARD_FILE))
    return build_model(model, add_static_batches(plan, card, batches), store, listener).artifacts


def make_arrays(model: Any, size: int, store: Store, listener: Any) -> list[Any]:
    """A batch of zeros for each input."""
    import numpy as np

    from optpipe.core.card import card_from_file
    from optpipe.export.exported import export_model
    from optpipe.workspace.file_names import CARD as CARD_FILE

    card = card_from_file(export_model(model, store, listener)[0].file(CARD_FILE))
    shapes = [[size if axis == each.batch else usual for axis, usual in enumerate(each.opt)] for each in card.inputs]
    return [np.zeros(shape, each.dtype) for shape, each in zip(shapes, card.inputs, strict=True)]


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


def list_builds(built: Sequence[Any]) -> dict[str, str]:
    """Labels by id of the builds that auto would race."""
    from optpipe.build.choose.decide import find_flaw

    def keeps(each: Any) -> bool:
        snr = each.verification.info.snr_db
        return snr is None or snr >= FLOOR_DB

    whole = [each for each in built if find_flaw(each) is None and each.verification]
    return {each.entry.id: f"{each.entry.info.backend} {each.entry.info.precision}" for each in whole if keeps(each)}


def compare(
    name: str, size: int, builds: Mapping[str, str], chosen: str | None, workspace: Path, device: str
) -> dict[str, Any]:
    """The row of one batch size: `builds`, labels by id, beside torch.compile; the winner is `chosen`, or the fastest here."""
    if not builds:
        return {"network": name, "batch": size, "why_not": "no build keeps the floor"}
    begun = time.monotonic()
    theirs = compile_rival(name, draw_arrays(next(iter(builds)), size, workspace).values(), workspace, device)
    theirs()  # compiles
    seconds = time.monotonic() - begun
    sides = {**{each: load_artifact(each, size, workspace).launch for each in builds}, COMPILED: theirs}
    for each, label in builds.items():
        if label.startswith("inductor") and (general := load_code_for_all_sizes(each, size, workspace)):
            sides[f"{label} for all sizes"] = general
    times = dict(zip(sides, time_in_turns([*sides.values()], device), strict=True))
    winner = chosen or min(builds, key=lambda each: median(times[each]))
    ratio = ratio_from_rounds(times[winner], times[COMPILED])
    lost = ratio.value < 1 and device == "cuda"
    return {
        "network": name,
        "batch": size,
        "chosen": "by the race" if chosen else "as the fastest here",
        "winner": builds[winner],
        "winner_ms": median(times[winner]),
        "compiled_ms": median(times[COMPILED]),
        "speed": ratio.value,
        "speed_ci": ratio.ci,
        "others_ms": {
            builds.get(key, key): median(found) for key, found in times.items() if key not in (winner, COMPILED)
        },
        "longest_kernels": {builds.get(key, key): list_longest_kernels(each) for key, each in sides.items()}
        if lost
        else None,
        "compiled_in_s": seconds,
    }


def compile_rival(name: str, arrays: Iterable[Any], workspace: Path, device: str) -> Callable[[], None]:
    """torch.compile's max-autotune of one network."""
    if name in CUDNN_ONLY:
        from torch._inductor import config

        config.max_autotune_conv_backends = "ATEN"
    source, weights = name_source(name, workspace), choose_weights(name)
    return cast("Callable[[], None]", compile_source(source, arrays, device, "max-autotune", weights))


def load_code_for_all_sizes(artifact: str, size: int, workspace: Path) -> Callable[[], None] | None:
    """AOTInductor's build without its code for single sizes; None where it has none for this one."""
    from optpipe.artifacts.lookup import find_artifacts

    details = dict(find_artifacts(artifact, Store(workspace))[0].entry.info.details)
    if size not in details.pop("static_batches", ()):
        return None
    return cast("Callable[[], None]", load_artifact(artifact, size, workspace, details).launch)


def format_row(row: dict[str, Any]) -> str:
    """A line of the table."""
    if "why_not" in row:
        return f"| {row['network']} | {row['batch']} | {row['why_not']} | | | | |"
    low, high = row["speed_ci"]
    others = ", ".join(f"{name} {value:.3f}" for name, value in row["others_ms"].items())
    return (
        f"| {row['network']} | {row['batch']} | {row['winner']} | {row['winner_ms']:.3f} | {row['compiled_ms']:.3f} | "
        f"{row['speed']:.3f} ({low:.3f} to {high:.3f}) | {others} |"
    )


if __name__ == "__main__":
    main()
