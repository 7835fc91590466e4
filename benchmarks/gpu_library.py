"""What a call of a build costs on a GPU against its bare session, and the lines of the library there.

usage: PYTHONPATH=pipeline python3 benchmarks/gpu_library.py FOLDER [--parts calls,steps,figures,lines,notebook,compiled] [--network NAME]
       … FOLDER --device cpu   (anywhere: a dry run in about two minutes)

The parts run in the order in which they are named, each prints its table when it is done, and FOLDER/library.json holds what is
known so far; so the first part, which takes less than a minute, stays if a later one is killed.

calls      times `build(tensor)` and `build.bind(tensor)` of a small network in turns with what they wrap: ONNX Runtime with a binding
           of fixed buffers and without synchronization, and torch's program. "alone" waits for the GPU after each call, "queued"
           after many. Counts the runtime's copies and waits in each call by torch's profiler.
steps      times what a call of the small network consists of, each alone: the checks, the outputs' memory, a binding, the launch, and
           the events that order a stream of torch's own with the session's. None of these waits for the GPU.
figures    measures the load time and, on a GPU, the power and energy of the small network's builds in four processes, limits them by a
           policy, and verifies the dossier with both verifiers.
lines      runs LINES in this process.
notebook   runs LINES in a Jupyter kernel, where nbclient and ipykernel are installed; writes lines.ipynb and kernel.log.
compiled   as calls, of the package of AOTInductor, whose build takes longer.
network    as calls, of a --network of torchvision.

Exits with 1 if a line or a call failed.
"""

import argparse
import json
import math
import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

GOAL, TIMED_S = 1.02, 0.03
FEWEST_ROUNDS, MOST_S = 5, 5.0
"""A busy machine gets fewer rounds than asked for after so many seconds of one comparison."""
BATCHES = (1, 16)
WAITS_AND_COPIES = ("Memcpy", "Synchronize")
"""Parts of the names of the runtime's calls that copy or wait."""

LINES = (
    """
import torch
import optpipe as op

torch.manual_seed(0)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(3, 32, 3, 2, 1), torch.nn.ReLU(),
            torch.nn.Conv2d(32, 64, 3, 2, 1), torch.nn.ReLU(),
            torch.nn.Flatten(), torch.nn.Linear(64 * 8 * 8, 4),
        )

    def forward(self, images):
        return self.layers(images)


def draw(count):
    labels, images = torch.randint(4, (count,)), 0.5 * torch.randn(count, 3, 32, 32)
    for image, label in zip(images, labels.tolist()):
        row, column = divmod(label, 2)
        image[:, 16 * row : 16 * row + 16, 16 * column : 16 * column + 16] += 0.5
    return images, labels


net = Net().to(DEVICE)
optimizer = torch.optim.Adam(net.parameters(), 1e-3)
for _ in range(60):
    images, labels = (each.to(DEVICE) for each in draw(64))
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(net(images), labels).backward()
    optimizer.step()
loaders = [
    torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*draw(count)), batch_size=50)
    for count in (600, 2000)
]
""",
    """
ws = op.Workspace(FOLDER + "/work")
model = op.Model(net, example=images[:8], batch=(1, 8, 64), trained=True, workspace=ws)
calib = op.Data(loaders[0], count=512)
held = op.Data(loaders[1])
""",
    """
builds = model.build(PRECISIONS, calibration=calib, backend="onnxruntime", device=DEVICE)
build = builds["int8"]
build.precision, build.verification, build.size, build.path
""",
    """
y = build(images)
assert y.device == images.device and y.shape == (64, 4)
agreement = (y.argmax(1) == net(images).argmax(1)).float().mean().item()
assert agreement > 0.9, agreement
""",
    """
bench = builds.bench(batch=[1, 16], **BENCH)
bench.frame()
""",
    """
def top1(outputs, label):
    return float(outputs.argmax() == label)


scores = builds.evaluate(held, metric=op.Metric(top1, range=(0, 1)))
scores.frame()
""",
    """
policy = op.Policy(**LIMITS)
verdict = build.signoff(policy, evaluation=scores, output=FOLDER + "/" + DOSSIER)
verdict
""",
    """
try:
    verdict.require_pass()
    reasons = ""
except Exception as error:  # noqa: BLE001 - the table says it, and the rest goes on
    reasons = str(error)
outcome = verdict.dossier.verify().outcome
""",
    """
loaded = op.load(verdict.dossier.path, workspace=ws)
assert torch.equal(loaded(images), y)
""",
)


HEAD = ("network", "backend", "precision", "batch", "side")
PARTS = ("calls", "steps", "figures", "lines", "notebook", "compiled")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--parts", default=None, help=f"by commas, from {', '.join(PARTS)}, network"
    )
    parser.add_argument("--network", default=None, help="of torchvision, or none")
    given = parser.parse_args()
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    begun = time.perf_counter()
    named = given.network not in (None, "none")
    parts = given.parts.split(",") if given.parts else [*PARTS, *(["network"] if named else [])]
    if wrong := set(parts) - {*PARTS, "network"}:
        parser.error(f"--parts {min(wrong)}: choose from {', '.join(PARTS)}, network")
    if "network" in parts and not named:
        parser.error("--parts network needs --network NAME")

    document: dict[str, Any] = {"device": given.device, "seconds": {}}
    values = set_values(given.device, folder)
    for part in parts:
        started = time.perf_counter()
        if part == "lines":
            document[part] = run_lines({**values, "DOSSIER": choose_unused(folder, "dossier")})
        elif part == "notebook":
            dossier = choose_unused(folder, "dossier-of-notebook")
            document[part] = run_notebook({**values, "DOSSIER": dossier}, folder)
        elif part == "steps":
            document[part] = list_steps(folder, given)
        elif part == "figures":
            document[part] = list_figures(folder, given)
        else:
            document[part] = list_calls(part, folder, given)
        document["seconds"][part] = time.perf_counter() - started
        save(folder, document)
        print(f"\n{part}, {document['seconds'][part]:.0f} s")
        print(render(part, document[part]), flush=True)
    print(f"\n{time.perf_counter() - begun:.0f} s")
    return int(any(map(has_failed, parts, (document[part] for part in parts))))


def choose_unused(folder: Path, name: str) -> str:
    """The name, with a number if an earlier run left such a folder."""
    names = (name, *(f"{name}-{number}" for number in range(2, 1000)))
    return next(each for each in names if not (folder / each).exists())


def has_failed(part: str, found: Any) -> bool:
    if part == "notebook":
        return bool(found.startswith("failed"))
    return any(each.get("error") for each in found)


def list_calls(part: str, folder: Path, given: Any) -> list[dict[str, Any]]:
    """The rows of calls of a part; a network is built by ONNX Runtime alone."""
    import torch

    import optpipe

    torch.manual_seed(0)
    workspace = optpipe.Workspace(folder / "calls")
    if part == "network":
        module, shape = make_torchvision(given.network), (3, 224, 224)
    else:
        module, shape = make_small(), (3, 32, 32)
    images = torch.randn(max(BATCHES), *shape)
    name = given.network if part == "network" else "small"
    model = optpipe.Model(module, images[:2], batch=(1, 8, 64), name=name, workspace=workspace)
    backends = {"calls": ("onnxruntime", "torch"), "compiled": ("inductor",)}
    return [
        row
        for backend in backends.get(part, ("onnxruntime",))
        for row in measure_calls(name, model, images.to(given.device), backend, given)
    ]


def make_small() -> Any:
    """The network of LINES, with random weights."""
    import torch

    nn = torch.nn
    layers = [nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 8 * 8, 4)).eval()


def make_torchvision(name: str) -> Any:
    import torchvision

    return torchvision.models.get_model(name, weights=None).eval()


def set_values(device: str, folder: Path) -> dict[str, Any]:
    """The names that LINES use beside their own; a dry run measures less."""
    quick = {"processes": 2, "min_time": 0.1, "max_time": 1.0, "max_cv": "900%"}
    limits: dict[str, Any] = {"accuracy": {"maximum_drop": "2 points"}, "size": {"maximum": "2 MB"}}
    if device == "cuda":
        limits["latency"] = {"p99": "10 ms", "batch_size": 1}
    return {
        "DEVICE": device,
        "FOLDER": str(folder),
        "PRECISIONS": ["fp32", "int8", "fp16"] if device == "cuda" else ["fp32", "int8"],
        "BENCH": {} if device == "cuda" else quick,
        "LIMITS": limits,
    }


def run_lines(space: dict[str, Any]) -> list[dict[str, Any]]:
    """The seconds of each block and its error; nothing runs after a failure."""
    import __main__

    rows = []
    space = vars(__main__) | space  # a class made here is __main__'s, as in a notebook
    for number, block in enumerate(LINES, 1):
        begun, error = time.perf_counter(), ""
        try:
            exec(compile(block, f"<block {number}>", "exec"), space)
        except Exception:  # noqa: BLE001 - the table says it
            error = traceback.format_exc()
        rows.append({"block": number, "seconds": time.perf_counter() - begun, "error": error})
        if error:
            print(error, file=sys.stderr)
            break
    seen = {name: str(space[name]) for name in ("verdict", "outcome", "reasons") if name in space}
    rows[-1] |= seen | {"builds": repr(space.get("builds"))}
    return rows


def run_notebook(values: dict[str, Any], folder: Path) -> str:
    """LINES in a kernel: `done`, why it was not run, or the error."""
    try:
        import ipykernel  # noqa: F401 - whether there is a kernel to start
        import nbformat
        from nbclient import NotebookClient
    except ImportError as error:
        return f"not run: {error}"
    import optpipe

    places = (str(Path(optpipe.__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", ""))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, places))
    head = "\n".join(f"{name} = {value!r}" for name, value in values.items())
    cells = [nbformat.v4.new_code_cell(each.strip()) for each in (head, *LINES)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    where = {"metadata": {"path": str(folder)}}
    log = folder / "kernel.log"
    client = NotebookClient(notebook, timeout=500, kernel_name="python3", resources=where)
    try:
        with log.open("wb") as output:
            client.execute(stdout=output, stderr=output)
    except Exception as error:  # noqa: BLE001 - the table says it, and the rest goes on
        return describe_kernel_failure(error, log)
    finally:
        nbformat.write(notebook, folder / "lines.ipynb")
    return "done"


def describe_kernel_failure(error: Exception, log: Path) -> str:
    """The error with its type, since some have no text, where it was raised, and the last that the kernel wrote."""
    text = str(error).strip()[-2000:] or "without a text"
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    places = ", ".join(f"{Path(each.filename).name}:{each.lineno} {each.name}" for each in frames)
    written = log.read_text(encoding="utf-8", errors="replace").strip()[-2000:] or "nothing"
    return (
        f"failed: {type(error).__name__}: {text}\nraised in {places}\nthe kernel wrote: {written}"
    )


def measure_calls(name: str, model: Any, images: Any, backend: str, given: Any) -> list[dict]:
    """A row for each precision, batch size, and way of waiting."""
    rows = []
    precisions = ["fp32", "fp16"] if given.device == "cuda" else ["fp32"]
    try:
        builds = model.build(precisions, backend=backend, device=given.device)
    except Exception as error:  # noqa: BLE001 - the table says it, and the rest goes on
        return [{"network": name, "backend": backend, "error": str(error)}]
    for precision, build in builds.items():
        for batch in BATCHES:
            row = {"network": name, "backend": backend, "precision": precision, "batch": batch}
            try:
                rows += [row | each for each in compare_with_session(build, images[:batch], given)]
            except Exception as error:  # noqa: BLE001 - the table says it, and the rest goes on
                print(traceback.format_exc(), file=sys.stderr)
                rows.append(row | {"error": str(error) or type(error).__name__})
    return rows


def compare_with_session(build: Any, images: Any, given: Any) -> list[dict[str, Any]]:
    import torch

    on_gpu = given.device == "cuda"
    wait = torch.cuda.synchronize if on_gpu else (lambda: None)
    build(images)
    bound = build.bind(images)
    ways_of_calling: dict[str, Callable[[], Any]] = {
        "call": lambda: build(images),
        "bound call": bound,
        "session": bind_session(build, images),
    }
    counts: dict[str, Any] = dict.fromkeys(ways_of_calling)
    if on_gpu:
        counts = {name: count_waits_and_copies(side) for name, side in ways_of_calling.items()}
        torch.cuda.set_sync_debug_mode("error")
        try:
            build(images)
            bound()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    rows = []
    for way in ("alone", "queued") if on_gpu else ("alone",):
        sides = tuple(ways_of_calling.values())
        times = time_in_turns(sides, wait, given.rounds, each_waits=way == "alone")
        *ours, session = times
        for name, own in zip(ways_of_calling, ours, strict=False):
            ratios = [math.log(call / least) for call, least in zip(own, session, strict=True)]
            middle, half = summarize(ratios)
            rows.append(
                {
                    "side": name,
                    "way": way,
                    "call_us": 1e6 * sorted(own)[len(ratios) // 2],
                    "session_us": 1e6 * sorted(session)[len(ratios) // 2],
                    "ratio": [math.exp(each) for each in (middle, middle - half, middle + half)],
                    "calls_of_runtime": counts[name],
                    "calls_of_runtime_bare": counts["session"],
                    "rounds_s": [own, session],
                }
            )
    return rows


def list_steps(folder: Path, given: Any) -> list[dict[str, Any]]:
    """Microseconds of the host for each step of a call of the small network by ONNX Runtime; the fastest of the rounds."""
    import torch

    import optpipe

    workspace = optpipe.Workspace(folder / "calls")
    torch.manual_seed(0)
    images = torch.randn(max(BATCHES), 3, 32, 32)
    model = optpipe.Model(
        make_small(), images[:2], batch=(1, 8, 64), name="small", workspace=workspace
    )
    x = images[:1].to(given.device)
    build = model.build("fp32", backend="onnxruntime", device=given.device)["fp32"]
    build(x)
    session = build._session
    name = session.inputs[0].name
    outputs = session.run_on({name: x})
    (y,) = outputs.values()
    bare = session.bind_in_place({name: x}, outputs)
    steps: dict[str, Callable[[], Any]] = {
        "types and shapes": lambda: build._contract.read((x,), {}),
        "whether the file is there": build._require_file,
        "memory of the output": lambda: torch.empty(y.shape, dtype=y.dtype, device=y.device),
        "a new binding": lambda: session.bind_in_place({name: x}, outputs),
        "bare launch": bare.launch,
        "the session's run_on": lambda: session.run_on({name: x}),
        "bound call": build.bind(x),
        "call": lambda: build(x),
    }
    rows = [{"step": step, "us": time_step(run, given)} for step, run in steps.items()]
    if given.device == "cuda":
        with torch.cuda.stream(torch.cuda.Stream()):
            row = {"step": "call on a stream of torch's own", "us": time_step(steps["call"], given)}
        rows.append(row)
    return rows


def list_figures(folder: Path, given: Any) -> list[dict[str, Any]]:
    """A row for each build with the figures over its processes, and one for each criterion, with what both verifiers say."""
    import subprocess

    import torch

    import optpipe

    on_gpu = given.device == "cuda"
    workspace = optpipe.Workspace(folder / "figures")
    torch.manual_seed(0)
    images = torch.randn(2, 3, 32, 32)
    model = optpipe.Model(
        make_small(), images, batch=(1, 8, 64), name="small", trained=True, workspace=workspace
    )
    builds = model.build("fp32", backend=["onnxruntime", "torch"], device=given.device)
    options = {"energy": True} if on_gpu else {"max_time": 1.0, "min_time": 0.1, "max_cv": "900%"}
    bench = builds.bench(batch=1, processes=4, keep_going=True, **options)
    wanted = ("build", "verdict", "processes", "load_time_ns", "power_w", "energy_j", "reasons")
    frame = bench.frame()
    shown = [each for each in frame.columns if each.removesuffix("_low") in wanted]
    rows: list[dict[str, Any]] = frame.select(shown).to_dicts()
    limits: dict[str, Any] = {"load_time": {"maximum": "10 s", "batch_size": 1}}
    if on_gpu:
        limits["power"] = {"maximum": "1 kW", "batch_size": 1}
    verdict = builds.built[0].signoff(
        optpipe.Policy(**limits), measure=False, output=folder / choose_unused(folder, "figures-of")
    )
    rows += [
        {"criterion": each.name, "verdict": str(each.verdict), "reason": each.reason}
        for each in verdict.criteria
    ]
    verifier = Path(__file__).resolve().parents[1] / "verifier" / "verify_dossier.py"
    done = subprocess.run(
        [sys.executable, str(verifier), str(verdict.dossier.path)], capture_output=True, text=True
    )
    again = verdict.dossier.verify().outcome
    rows.append({"optpipe verify": again, "verifier": done.returncode, "said": done.stdout[-600:]})
    return rows


def time_step(step: Callable[[], Any], given: Any, count: int = 200) -> float:
    """Microseconds of the host; the GPU has done its work before each round."""
    import torch

    fastest = math.inf
    for _ in range(max(given.rounds, FEWEST_ROUNDS)):
        if given.device == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(count):
            step()
        fastest = min(fastest, (time.perf_counter() - begun) / count)
    return 1e6 * fastest


def bind_session(build: Any, images: Any) -> Callable[[], Any]:
    """The build's own session, called without the library."""
    import torch

    session = build._session
    if not hasattr(session, "_session"):  # torch's and AOTInductor's

        def call() -> Any:
            with torch.no_grad():
                return session._call(images)

        return call
    if images.device.type == "cpu":
        arrays = {session.inputs[0].name: images.numpy()}
        return lambda: session._session.run(None, arrays)
    outputs = session.run_on({session.inputs[0].name: images})
    binding = session.bind_in_place({session.inputs[0].name: images}, outputs)  # as calls, no graph
    launch: Callable[[], Any] = binding.launch
    return launch


def time_in_turns(
    sides: Any, wait: Callable[[], None], rounds: int, *, each_waits: bool
) -> list[list[float]]:
    """Seconds per call of each side and round; the sides' order is drawn for each round."""

    def run(side: Callable[[], Any], count: int) -> float:
        begun = time.perf_counter()
        for _ in range(count):
            side()
            if each_waits:
                wait()
        wait()
        return (time.perf_counter() - begun) / count

    order, times = random.Random(0), [[] for _ in sides]
    for side in sides:
        run(side, 20)
    count = max(10, int(TIMED_S / run(sides[-1], 20)))
    begun = time.perf_counter()
    for number in range(rounds):
        if number >= FEWEST_ROUNDS and time.perf_counter() - begun > MOST_S:
            break
        for at in order.sample(range(len(sides)), len(sides)):
            times[at].append(run(sides[at], count))
    return times


def summarize(values: list[float]) -> tuple[float, float]:
    """Mean and half the width of its 95% interval over rounds."""
    from scipy.stats import t

    mean = sum(values) / len(values)
    spread = math.sqrt(sum((each - mean) ** 2 for each in values) / (len(values) - 1))
    return mean, float(t.ppf(0.975, len(values) - 1)) * spread / math.sqrt(len(values))


def count_waits_and_copies(side: Callable[[], Any]) -> dict[str, float]:
    """Calls of the runtime in one call: by the difference of 11 calls and one, since the profiler itself waits."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    def count(calls: int) -> dict[str, int]:
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
            for _ in range(calls):
                side()
        return {
            each.key: each.count
            for each in recorded.key_averages()
            if any(part in each.key for part in WAITS_AND_COPIES)
        }

    count(1)
    one, eleven = count(1), count(11)
    return {
        name: (eleven[name] - one.get(name, 0)) / 10
        for name in eleven
        if eleven[name] != one.get(name, 0)
    }


def save(folder: Path, document: dict[str, Any]) -> None:
    (folder / "library.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def render(part: str, found: Any) -> str:
    if part == "notebook":
        return str(found)
    if part == "figures":
        return "\n".join(json.dumps(each, default=str) for each in found)
    if part == "steps":
        return "\n".join(f"{each['step']}: {each['us']:.1f} µs" for each in found)
    return render_lines(found) if part == "lines" else render_calls(found)


def render_lines(rows: list[dict[str, Any]]) -> str:
    lines = []
    for each in rows:
        state = each["error"].strip().splitlines()[-1] if each["error"] else "done"
        lines.append(f"block {each['block']}: {each['seconds']:.1f} s, {state}")
    last = rows[-1]
    lines += [f"{name}: {last[name]}" for name in ("builds", "outcome", "reasons") if name in last]
    return "\n".join(lines)


def render_calls(found: list[dict[str, Any]]) -> str:
    from optpipe.report.markdown import render_table_lines

    rows = []
    for each in found:
        head = [str(each.get(name, "")) for name in HEAD]
        if each.get("error"):
            rows.append([*head, "", "", "", each["error"].splitlines()[0][:80], ""])
            continue
        ratio, low, high = each["ratio"]
        within = "yes" if high <= GOAL else "no" if low > GOAL else "undecided"
        shown = f"{ratio:.3f} ({low:.3f} to {high:.3f})"
        extra = ", ".join(
            f"{name} {count:g}" for name, count in (each["calls_of_runtime"] or {}).items()
        )
        rows.append(
            [
                *head,
                each["way"],
                f"{each['call_us']:.1f}",
                f"{each['session_us']:.1f}",
                f"{shown}, {within}",
                extra or "none",
            ]
        )
    titles = (
        *(*HEAD, "way", "call µs", "session µs"),
        *(f"ratio, ≤ {GOAL}", "waits and copies in a call"),
    )
    return "\n".join(render_table_lines(titles, rows, right=range(6, 8)))


if __name__ == "__main__":
    sys.exit(main())
