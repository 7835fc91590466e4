"""`build --precision auto` against torch.compile (max-autotune, FP16, channels last) on one GPU, network by network, in turns.

usage: python benchmarks/gpu_auto.py OUT.json [--networks resnet50,vit_b_16] [--batches 1,8,64] [--seconds 400] [--total 1700]
       python benchmarks/gpu_auto.py OUT.json --side-by-side --calibration IMAGES --total 540 ...   all networks at once, without the race
       python benchmarks/gpu_auto.py OUT.json --device cpu --networks digits --batches 1,8          everything but the GPU

Weights are random (those of `digits` its own), so builds must keep an SNR alone. A row is printed, and OUT.json written anew, as soon as a
batch size is done: what was done stays when time is up, and the same command goes on with the cells that are left. In each row both
sides run in one process, replayed from CUDA graphs, in turns in an order drawn for each round; the ratio has Student's interval over the
rounds.

One network after the other, each has a time limit (--seconds). With --side-by-side there is a process for each network and precision that
builds, and one for each row: it compiles torch.compile's side on zeros, waits for the builds and times. All start at once and compile side
by side, what was named first before the rest; what times on the GPU takes turns (`gpu_alone.py`), and while a row is timed all others but
the compile workers stand still. They write to auto-NETWORK/PART.log. Threads are those of the environment
(TORCHINDUCTOR_COMPILE_THREADS, OMP_NUM_THREADS).
"""

import json
import os
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, Queue
from statistics import median
from threading import Thread, Timer
from typing import Any, cast

from gpu_alone import free_stopped, kill_all, make_environment
from gpu_turns import (
    compile_source,
    draw_arrays,
    list_longest_kernels,
    load_artifact,
    time_in_turns,
)

from optpipe.core.process import end_with_parent
from optpipe.stats.ratio import ratio_from_rounds
from optpipe.workspace.store import Store

NETWORKS = (
    "resnet50", "vit_b_16", "convnext_tiny", "efficientnet_b0", "mobilenet_v3_large", "resnext50_32x4d", "bert_base"
)  # fmt: skip
IN_FP8 = ("vit_b_16", "convnext_tiny", "bert_base")
"""Their MACs are in linear layers; the others are tried in INT8."""
CUDNN_ONLY = (
    "convnext_tiny",
    "efficientnet_b0",
    "mobilenet_v3_large",
    "resnet50",
    "resnext50_32x4d",
)
"""torch.compile takes cuDNN's convolutions for these, without timing its own, which took more than 3 min for ResNet-50 at one batch size.
Of depthwise ones the fastest took 430 times as long as cuDNN's (17.9 against 0.042 ms; EfficientNet-B0, 1,152 channels, 5×5, batch 64); of
ResNet-50's first four at batch 64 one was faster (0.039 against 0.047 ms)."""
FLOOR_DB = 20.0
"""Weights are random: INT8 keeps 32 dB or more, E4M3 with its three bits of mantissa 23 dB of BERT's outputs."""
HEAD = (
    "network",
    "batch",
    "winner",
    "winner ms",
    "torch.compile ms",
    "speed of the winner",
    "others, ms",
)
COMPILED = "torch.compile"
WIDE, LOW = "wide", "low"
"""Parts that build; the others are a batch size each."""
BESIDE = "compile workers of the other cells; whatever else might use the GPU was stopped"
POLL_S = 2.0
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


Rows = Generator[dict[str, Any], None, None]
Bind = Callable[[Iterable[Any]], Callable[[], None]]
Rival = tuple[Bind, float]
"""torch.compile's code, to be bound to arrays, and the seconds that it took."""


@dataclass(frozen=True)
class Network:
    """One network, and what is built of it."""

    name: str
    workspace: Path
    model: Any
    plan: Any
    batches: Sequence[int]

    @property
    def store(self) -> Store:
        return Store(self.workspace)


@dataclass(frozen=True)
class Cell:
    """A batch size of a network, and the process that measures it."""

    network: str
    size: int
    process: "subprocess.Popen[str]"


def main() -> None:
    """Builds, times and prints, one network after the other or side by side."""
    parser = ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--batches", default="1,8,64")
    parser.add_argument(
        "--seconds", type=float, default=400.0, help="for each network, one after the other"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=4,
        help="of the comparison between the fastest builds; `build` takes 8",
    )
    parser.add_argument("--total", type=float, default=1700.0, help="seconds for all")
    parser.add_argument(
        "--calibration", type=Path, help="images for INT8 and FP8; default: these are left out"
    )
    parser.add_argument(
        "--direct",
        action="store_true",
        help="no race: the winner is the fastest beside torch.compile",
    )
    parser.add_argument(
        "--side-by-side", action="store_true", help="all networks and batch sizes at once, --direct"
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--backends", help="default: all that build for the device")
    parser.add_argument(
        "--option", default="", help="of the builds, such as inductor.max_autotune=true"
    )
    parser.add_argument(
        "--one", help="of a process that main() starts: this network, rows to standard output"
    )
    parser.add_argument(
        "--part", help="of a process that main() starts: wide or low to build, or a batch size"
    )
    given = parser.parse_args()
    if given.part:
        end_with_parent()
        do_part(given)
        return
    if given.one:
        measure_one(given)
        return
    rows = read_finished_rows(given.out)
    print("| " + " | ".join(HEAD) + " |\n|" + "---|" * len(HEAD), flush=True)
    measure = measure_side_by_side if given.side_by_side else measure_in_sequence
    with closing(measure(list_open_cells(rows, given), given)) as found:
        for row in found:
            rows.append(row)
            print(format_row(row), flush=True)
            given.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def read_finished_rows(out: Path) -> list[dict[str, Any]]:
    """The measured rows of an earlier start."""
    rows: list[dict[str, Any]] = (
        json.loads(out.read_text(encoding="utf-8")) if out.is_file() else []
    )
    return [row for row in rows if "why_not" not in row]


def list_open_cells(rows: Sequence[Mapping[str, Any]], given: Any) -> dict[str, list[int]]:
    """The batch sizes that have no row, by network; networks without any are left out."""
    done, sizes = {(row["network"], row["batch"]) for row in rows}, parse_batches(given)
    left = {
        name: [size for size in sizes if (name, size) not in done]
        for name in given.networks.split(",")
    }
    return {name: sizes for name, sizes in left.items() if sizes}


def parse_batches(given: Any) -> list[int]:
    """All of --batches, in ascending order."""
    return sorted({int(each) for each in given.batches.split(",")})


def measure_in_sequence(left: Mapping[str, list[int]], given: Any) -> Rows:
    """The rows, network by network."""
    begun = time.monotonic()
    for name, sizes in left.items():
        rest = given.total + begun - time.monotonic()
        if rest > 0:
            given.batches = ",".join(map(str, sizes))
            yield from measure_network(name, min(given.seconds, rest), given)


def measure_network(name: str, limit: float, given: Any) -> Iterator[dict[str, Any]]:
    """A row for each batch size as it comes, from a process of its own that may take `limit` seconds."""
    command, environment = list_command(name, given), {**os.environ, **list_caches(name, "all")}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    assert process.stdout
    # with the workers and compilers that it started
    clock = Timer(limit, lambda: os.killpg(process.pid, signal.SIGKILL))
    clock.start()
    done = set()
    for line in process.stdout:
        if line.startswith("{"):
            row = json.loads(line)
            done.add(row["batch"])
            yield row
    clock.cancel()
    why = "time is up" if process.wait() == -signal.SIGKILL else f"exit status {process.returncode}"
    yield from (
        {"network": name, "batch": size, "why_not": why}
        for size in parse_batches(given)
        if size not in done
    )


def measure_side_by_side(left: Mapping[str, list[int]], given: Any) -> Rows:
    """The rows as they come, from processes that all start at once; none is left when the time is up."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    deadline, lock = time.monotonic() + given.total, Path("gpu_auto.lock").absolute()
    found: Queue[dict[str, Any]] = Queue()
    try:
        cells = []
        for rank, (name, sizes) in enumerate(left.items()):
            given.batches = ",".join(map(str, sizes))
            cells += start_network(name, sizes, 4 * rank, lock, given)
        for cell in cells:
            Thread(target=read_rows, args=(cell, found), daemon=True).start()
        open_cells = {(each.network, each.size) for each in cells}
        while open_cells and time.monotonic() < deadline:
            with suppress(Empty):
                row = found.get(timeout=max(0.0, min(POLL_S, deadline - time.monotonic())))
                if (key := (row["network"], row["batch"])) in open_cells:
                    open_cells.remove(key)
                    yield row
            free_stopped(lock)
        yield from (
            {"network": name, "batch": size, "why_not": "time is up"}
            for name, size in sorted(open_cells)
        )
    finally:
        kill_all(lock)


def start_network(name: str, sizes: Sequence[int], nice: int, lock: Path, given: Any) -> list[Cell]:
    """Starts the processes that build one network and, somewhat nicer, those of its batch sizes; returns the latter."""
    workspace = Path(f"auto-{name}")
    workspace.mkdir(exist_ok=True)
    if name == "bert_base":
        write_bert(workspace)
    for part in (WIDE, LOW) if given.calibration else (WIDE,):
        start_part(name, part, nice, lock, given)
    return [Cell(name, size, start_part(name, str(size), nice + 5, lock, given)) for size in sizes]


def start_part(name: str, part: str, nice: int, lock: Path, given: Any) -> "subprocess.Popen[str]":
    """Starts one process, in a group of its own; what it prints of rows can be read, the rest goes to its log."""
    file = part if part in (WIDE, LOW) else f"batch-{part}"
    command = ["nice", "-n", str(nice), *list_command(name, given), f"--part={part}"]
    with Path(f"auto-{name}", f"{file}.log").open("w", encoding="utf-8") as log:
        return subprocess.Popen(
            command,
            stdout=log if part in (WIDE, LOW) else subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **make_environment(lock), **list_caches(name, file)},
            start_new_session=True,
        )


def list_caches(name: str, part: str) -> dict[str, str]:
    """Where torch's compiler keeps what it made and what it timed, in variables of the environment.

    Each process times for itself, but once for layers that are alike; machine code is for all.
    """
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(Path(f"auto-{name}", f"inductor-{part}").absolute()),
        "TRITON_CACHE_DIR": str(Path("triton").absolute()),
    }


def read_rows(cell: Cell, found: "Queue[dict[str, Any]]") -> None:
    """Hands over the row that the process of `cell` prints, then why there is none, which counts where there was none."""
    assert cell.process.stdout
    with suppress(ValueError):  # a line cut off by a kill
        for line in cell.process.stdout:
            if line.startswith("{"):
                found.put(json.loads(line))
    why = f"exit status {cell.process.wait()}"
    found.put({"network": cell.network, "batch": cell.size, "why_not": why})


def list_command(name: str, given: Any) -> list[str]:
    """Of the process that builds and measures one network, or a part of it."""
    command = [sys.executable, str(Path(__file__).absolute()), str(given.out), "--one", name]
    command += ["--batches", given.batches, "--rounds", str(given.rounds), "--device", given.device]
    for key in ("option", "calibration", "backends"):
        value = getattr(given, key)
        command += [] if value is None else [f"--{key}={value}"]
    return command + (["--direct"] if given.direct else [])


def do_part(given: Any) -> None:
    """Leaves builds in the workspace, or prints the row of one batch size as a JSON line."""
    from optpipe.report.progress import Terminal

    network = plan_network(given)
    with Terminal() as terminal:
        if given.part in (WIDE, LOW):
            wide, *low = network.plan.precisions
            build_everything(network, [wide] if given.part == WIDE else low, terminal)
            return
        size = int(given.part)
        rival = compile_rival(network, make_zeros(network, size, terminal))
        builds = list_builds(build_everything(network, network.plan.precisions, terminal))
        row = compare(network, size, builds, None, rival)
    print(json.dumps({**row, "beside": BESIDE}), flush=True)


def measure_one(given: Any) -> None:
    """Chooses a build as `--precision auto` does, then times it and torch.compile in turns; a JSON line for each size.

    Candidates are FP16 (on a CPU FP32) and, with calibration data, INT8 or FP8: wider types only cost time here.
    """
    from optpipe.build.choose import choose_build
    from optpipe.core.precision import Budget
    from optpipe.report.progress import Terminal

    network = plan_network(given)
    winners: Mapping[int, str] = {}
    with Terminal() as terminal:
        if given.direct:
            builds = list_builds(build_everything(network, network.plan.precisions, terminal))
        else:
            plan = replace(network.plan, budget=Budget(FLOOR_DB, "dB"))
            weights, sizes = choose_weights(network.name), tuple(network.batches)
            decision = choose_build(
                network.model, plan, weights, network.store, terminal, sizes, given.rounds
            ).decision
            builds = {
                each.artifact: f"{each.backend} {each.precision}"
                for each in decision.candidates
                if each.times
            }
            winners = decision.winners
    for size in reversed(network.batches):
        print(json.dumps(compare(network, size, builds, winners.get(size), None)), flush=True)


def plan_network(given: Any) -> Network:
    """What `--one` names, in the types that may win: FP16 (on a CPU FP32) and, with calibration data, INT8 or FP8."""
    from optpipe.backends.registry import BACKENDS, parse_options
    from optpipe.build.plan import BuildPlan
    from optpipe.core.entries import weights_from_text
    from optpipe.core.precision import Precision
    from optpipe.models.export.exported import Model
    from optpipe.models.sources.resolve import source_from_text

    name, batches, images = given.one, parse_batches(given), given.calibration
    workspace = Path(f"auto-{name}")
    workspace.mkdir(exist_ok=True)
    batch: tuple[int, int, int] | None = (batches[0], batches[len(batches) // 2], batches[-1])
    if name == "bert_base":
        write_bert(workspace)
        batch, images = None, images and workspace / "tokens.npz"
    wide = Precision.FP16 if given.device == "cuda" else Precision.FP32
    low = Precision.FP8 if name in IN_FP8 else Precision.INT8
    names = given.backends.split(",") if given.backends else list(BACKENDS)
    backends = tuple(
        BACKENDS[each] for each in names if BACKENDS[each].probe_capability(given.device).builds
    )
    options = parse_options(given.option.split())
    precisions = (wide, low) if images else (wide,)
    plan = BuildPlan(
        precisions, backends, named=False, device=given.device, calibration=images, options=options
    )
    source = source_from_text(name_source(name, workspace), {})
    model = Model(source, weights_from_text(choose_weights(name), 0), batch)
    return Network(name, workspace, model, plan, batches)


def build_everything(network: Network, precisions: Sequence[Any], listener: Any) -> list[Any]:
    """What `--precision auto` builds, without its choice; a precision that cannot be built is named and left out."""
    from optpipe.build.build import build_model
    from optpipe.build.candidates import add_static_batches
    from optpipe.core.errors import OptpipeError

    card, built = read_exported_card(network, listener), []
    for kind in precisions:
        plan = add_static_batches(replace(network.plan, precisions=(kind,)), card, network.batches)
        try:
            built += build_model(network.model, plan, network.store, listener).artifacts
        except OptpipeError as error:
            print(f"{network.name} {kind}: {error}", file=sys.stderr, flush=True)
    return built


def make_zeros(network: Network, size: int, listener: Any) -> list[Any]:
    """A batch of zeros for each input."""
    import numpy as np

    inputs = read_exported_card(network, listener).inputs
    shapes = [
        [size if axis == each.batch else usual for axis, usual in enumerate(each.opt)]
        for each in inputs
    ]
    return [np.zeros(shape, each.dtype) for shape, each in zip(shapes, inputs, strict=True)]


def read_exported_card(network: Network, listener: Any) -> Any:
    """The card of the exported model, which is exported first where it is not."""
    from optpipe.core.card import card_from_file
    from optpipe.models.export.exported import export_model
    from optpipe.workspace.file_names import CARD as CARD_FILE

    return card_from_file(export_model(network.model, network.store, listener)[0].file(CARD_FILE))


def write_bert(workspace: Path) -> None:
    """BERT-base for 128 tokens as a model of its own, and tokens to calibrate it."""
    import numpy as np

    if (workspace / "tokens.npz").exists():
        return
    (workspace / "bert.py").write_text(BERT, encoding="utf-8")
    (workspace / "bert.toml").write_text(CARD, encoding="utf-8")
    np.savez(
        workspace / "tokens.npz", input_ids=np.random.default_rng(0).integers(30522, size=(64, 128))
    )


def name_source(name: str, workspace: Path) -> str:
    """MODEL."""
    return str(workspace / "bert.toml") if name == "bert_base" else name


def choose_weights(name: str) -> str:
    """Nothing can be downloaded where this runs."""
    return "default" if name in ("digits", "bert_base") else "random"  # BERT draws its own


def list_builds(built: Sequence[Any]) -> dict[str, str]:
    """Labels by id of the builds that auto would race."""
    from optpipe.build.budget import find_flaw

    def keeps(each: Any) -> bool:
        snr = each.verification.info.snr_db
        return snr is None or snr >= FLOOR_DB

    whole = [each for each in built if find_flaw(each) is None and each.verification]
    return {
        each.entry.id: f"{each.entry.info.backend} {each.entry.info.precision}"
        for each in whole
        if keeps(each)
    }


def compare(
    network: Network, size: int, builds: Mapping[str, str], chosen: str | None, rival: Rival | None
) -> dict[str, Any]:
    """The row of one batch size: `builds`, labels by id, beside torch.compile; the winner is `chosen`, or the fastest here.

    `rival` is compiled here where there is none yet.
    """
    name, workspace, device = network.name, network.workspace, network.plan.device
    if not builds:
        return {"network": name, "batch": size, "why_not": "no build keeps the floor"}
    arrays = draw_arrays(next(iter(builds)), size, workspace).values()
    bind, seconds = rival or compile_rival(network, arrays)
    theirs = bind(arrays)
    theirs()
    sides = {
        **{each: load_artifact(each, size, workspace).launch for each in builds},
        COMPILED: theirs,
    }
    for each, label in builds.items():
        if label.startswith("inductor") and (
            general := load_code_for_all_sizes(each, size, workspace)
        ):
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
            builds.get(key, key): median(found)
            for key, found in times.items()
            if key not in (winner, COMPILED)
        },
        "longest_kernels": {
            builds.get(key, key): list_longest_kernels(each) for key, each in sides.items()
        }
        if lost
        else None,
        "compiled_in_s": seconds,
    }


def compile_rival(network: Network, arrays: Iterable[Any]) -> Rival:
    """torch.compile's max-autotune of one network for arrays of these shapes."""
    if network.name in CUDNN_ONLY:
        from torch._inductor import config

        config.max_autotune_conv_backends = "ATEN"
    begun = time.monotonic()
    source, weights = name_source(network.name, network.workspace), choose_weights(network.name)
    bind = cast("Bind", compile_source(source, network.plan.device, "max-autotune", weights))
    bind(arrays)()
    return bind, time.monotonic() - begun


def load_code_for_all_sizes(artifact: str, size: int, workspace: Path) -> Callable[[], None] | None:
    """AOTInductor's build without its code for single sizes; None where it has none for this one."""
    from optpipe.models.artifacts.lookup import find_artifacts

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
