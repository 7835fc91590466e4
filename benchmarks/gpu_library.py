"""The lines of the library on a GPU, and what a call of a build costs there against its bare session.

usage: PYTHONPATH=pipeline python3 benchmarks/gpu_library.py FOLDER [--rounds 30] [--network resnet50]
       … FOLDER --device cpu   (anywhere: a dry run in about two minutes)

Runs LINES in this process, and again in a Jupyter kernel where nbclient and ipykernel are installed. Then times `build(tensor)` in
turns with what it wraps: ONNX Runtime with a binding of fixed buffers and without synchronization, and the loaded package of
AOTInductor. "alone" waits for the GPU after each call, "queued" after many. Counts the runtime's copies and waits in each call by
torch's profiler. Writes library.json (and lines.ipynb) into FOLDER and prints a table last; exits with 1 if a line failed.
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

GOAL, TIMED_S = 1.02, 0.05
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


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--network", default=None, help="of torchvision, to time calls of it too")
    parser.add_argument("--backends", default=None, help="to time calls of, by commas")
    given = parser.parse_args()
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    begun = time.perf_counter()
    document: dict[str, Any] = {"device": given.device}

    values = set_values(given.device, folder)
    document["lines"], space = run_lines({**values, "DOSSIER": "dossier"})
    save(folder, document)
    document["notebook"] = run_notebook({**values, "DOSSIER": "dossier-of-notebook"}, folder)
    save(folder, document)

    backends = given.backends or (
        "onnxruntime,inductor" if given.device == "cuda" else "onnxruntime"
    )
    document["calls"] = []
    if "model" in space:
        models = {"Net": (space["model"], space["images"])}
        if given.network is not None:
            models[given.network] = make_network(given.network, space)
        for name, (model, images) in models.items():
            for backend in backends.split(","):
                document["calls"] += measure_calls(name, model, images, backend, given)
                save(folder, document)
    document["seconds"] = time.perf_counter() - begun
    save(folder, document)
    print(render(document))
    failed = any(each["error"] for each in document["lines"])
    failed |= any(each.get("error") for each in document["calls"])
    return int(failed or document["notebook"].startswith("failed"))


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


def run_lines(space: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The seconds of each block and its error, and the names that they made; nothing runs after a failure."""
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
    return rows, space


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
    try:
        NotebookClient(notebook, timeout=500, kernel_name="python3", resources=where).execute()
    except Exception as error:  # noqa: BLE001 - the table says it, and the rest goes on
        return f"failed: {str(error)[-2000:]}"
    finally:
        nbformat.write(notebook, folder / "lines.ipynb")
    return "done"


def make_network(name: str, space: dict[str, Any]) -> tuple[Any, Any]:
    """A model of torchvision's module with random weights, and images."""
    import torch
    import torchvision

    module = torchvision.models.get_model(name, weights=None).eval()
    images = torch.randn(max(BATCHES), 3, 224, 224)
    model = space["op"].Model(module, example=images[:2], batch=(1, 8, 64), workspace=space["ws"])
    return model, images.to(space["DEVICE"])


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
    bare = bind_session(build, images)
    sides: tuple[Callable[[], Any], Callable[[], Any]] = (lambda: build(images), bare)
    rows = []
    counts = [count_waits_and_copies(side) for side in sides] if on_gpu else [None, None]
    if on_gpu:
        torch.cuda.set_sync_debug_mode("error")
        try:
            build(images)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for way in ("alone", "queued") if on_gpu else ("alone",):
        times = time_in_turns(sides, wait, given.rounds, each_waits=way == "alone")
        ratios = [math.log(call / session) for call, session in zip(*times, strict=True)]
        middle, half = summarize(ratios)
        rows.append(
            {
                "way": way,
                "call_us": 1e6 * sorted(times[0])[len(ratios) // 2],
                "session_us": 1e6 * sorted(times[1])[len(ratios) // 2],
                "ratio": [math.exp(each) for each in (middle, middle - half, middle + half)],
                "calls_of_runtime": counts[0],
                "calls_of_runtime_bare": counts[1],
                "rounds_s": times,
            }
        )
    return rows


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
    count = max(10, int(TIMED_S / run(sides[1], 20)))
    for _ in range(rounds):
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


def render(document: dict[str, Any]) -> str:
    from optpipe.report.markdown import render_table_lines

    lines = []
    for each in document["lines"]:
        state = each["error"].strip().splitlines()[-1] if each["error"] else "done"
        lines.append(f"block {each['block']}: {each['seconds']:.1f} s, {state}")
    last = document["lines"][-1]
    lines += [f"{name}: {last[name]}" for name in ("builds", "outcome", "reasons") if name in last]
    lines.append(f"notebook: {document['notebook']}")
    rows = []
    for each in document["calls"]:
        head = [str(each.get(name, "")) for name in ("network", "backend", "precision", "batch")]
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
        *("network", "backend", "precision", "batch", "way", "call µs", "session µs"),
        *(f"ratio, ≤ {GOAL}", "waits and copies in a call"),
    )
    lines += render_table_lines(titles, rows, right=range(5, 7))
    return "\n".join([*lines, f"{document['seconds']:.0f} s"])


if __name__ == "__main__":
    sys.exit(main())
