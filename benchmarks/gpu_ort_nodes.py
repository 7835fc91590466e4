"""Which kernels ONNX Runtime's nodes launch, on a machine with an NVIDIA GPU: what a recording and its own profile hold.

usage: python3 benchmarks/gpu_ort_nodes.py OUTPUT_DIRECTORY [digits|resnet50 …]     (about a minute)

ResNet-50 fp16 at batch 1 and `digits` fp16, three iterations each without a CUDA graph, recorded by nsys and by ONNX
Runtime at once. Writes for each: the exported recording without the process environment (.sqlite.gz), ONNX Runtime's
profile as it wrote it (.json.gz), the clock's anchors and the graph's node names (.json), and `profile --json`'s answer.
"""

import gzip
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

WORKER = """
import json, sys, time
from pathlib import Path
import numpy as np, torch
from optpipe.backends.onnxruntime import OnnxRuntime
from optpipe.backends.onnxruntime_session import OnnxRuntimeSession
from optpipe.core.entries import ArtifactInfo
from optpipe.workspace.store import Store
from optpipe.trace.nsys import CAPTURE_RANGE, ITERATION_RANGE, LAYERS_RANGE
from optpipe.trace.nsys import mark_range
workspace, artifact, batch, target = sys.argv[1:]
entry = Store(Path(workspace)).find(artifact, ArtifactInfo)
target = Path(target)
with torch.cuda.stream(torch.cuda.Stream()):
    options = {**OnnxRuntime().runtime_options("cuda"), "cuda_graph": False}
    profile = target.with_name(target.name + "-ort")
    details, file = entry.info.details, entry.file(entry.info.file)
    session = OnnxRuntimeSession(file, "cuda", options, tensor_cores=details["tensor_cores"], profile=profile)
    spec = session.inputs[0]
    shape = tuple(int(batch) if axis == 0 else size for axis, size in enumerate(spec.shape))
    binding = session.bind({spec.name: np.random.default_rng(0).standard_normal(shape).astype(spec.dtype)})
    synchronize = torch.cuda.current_stream().synchronize
    for _ in range(3):
        binding.launch(); synchronize()
    anchors = []
    with mark_range(CAPTURE_RANGE), mark_range(LAYERS_RANGE):
        for _ in range(3):
            before = time.time_ns()
            with mark_range(ITERATION_RANGE):
                entered = time.time_ns()
                binding.launch(); synchronize()
                leaving = time.time_ns()
            anchors.append([before, entered, leaving, time.time_ns()])
    started, profile = session.end_profiling()
target.with_suffix(".json").write_text(json.dumps({"anchors": anchors, "started_ns": started, "profile": str(profile)}))
"""
MODELS = {
    "resnet50": ("resnet50", "--weights", "random", "--batch", "1:8:64"),
    "digits": ("digits",),
}
BEGAN = time.monotonic()


def step(name: str, command: list[str], limit_s: float = 60) -> "subprocess.CompletedProcess[str]":
    """Runs a command and says how it went; its failure is reported and survived."""
    started = time.monotonic()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=limit_s, check=False
        )
    except (subprocess.TimeoutExpired, OSError) as error:
        print(f"== {name}: {error}", flush=True)
        return subprocess.CompletedProcess(command, 124, "", str(error))
    took, so_far = time.monotonic() - started, time.monotonic() - BEGAN
    print(f"== {name}: exit {done.returncode}, {took:.1f} s, {so_far:.0f} s so far", flush=True)
    if done.returncode:
        print((done.stderr or done.stdout).strip()[-800:], flush=True)
    return done


def shrunk(source: Path, target: Path) -> None:
    """Compresses `source` into `target`."""
    with source.open("rb") as raw, gzip.open(target, "wb", compresslevel=9) as small:
        shutil.copyfileobj(raw, small)


def kept_export(source: Path, target: Path) -> None:
    """The export without anything but the tables of events, the strings that they use, and the GPU."""
    import sqlite3

    shutil.copyfile(source, target)
    with sqlite3.connect(target) as copy:
        tables = [
            row[0] for row in copy.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        ]
        for table in tables:
            if not table.startswith(
                ("CUPTI_ACTIVITY_KIND_", "NVTX_EVENTS", "StringIds", "TARGET_INFO_GPU")
            ):
                copy.execute(f"DROP TABLE {table}")
        copy.execute(
            "DELETE FROM StringIds WHERE id NOT IN (SELECT demangledName FROM CUPTI_ACTIVITY_KIND_KERNEL UNION "
            "SELECT nameId FROM CUPTI_ACTIVITY_KIND_RUNTIME UNION SELECT textId FROM NVTX_EVENTS WHERE textId NOT NULL)"
        )
        copy.commit()
        copy.execute("VACUUM")
    shrunk(target, target.with_name(target.name + ".gz"))
    target.unlink()


def probe(name: str, arguments: tuple[str, ...], work: Path, out: Path) -> None:
    """Builds, records by hand, and asks `optpipe profile` for its answer."""
    python, workspace = sys.executable, work / "workspace"
    common = [
        *arguments,
        "--precision",
        "fp16",
        "--backend",
        "onnxruntime",
        "--device",
        "cuda",
        "--workspace",
        str(workspace),
    ]
    built = step(f"{name} build", [python, "-m", "optpipe", "build", *common, "--json"], 90)
    (out / f"{name}-build.log").write_text(built.stderr[-4000:])
    if built.returncode:
        return
    artifact = json.loads(built.stdout)["artifacts"][0]["id"]
    recording = work / name
    recorded = step(
        f"{name} nsys",
        [
            "nsys",
            "profile",
            "-o",
            str(recording),
            "--force-overwrite",
            "true",
            "-t",
            "nvtx,cuda,cudnn,cublas",
            "--sample",
            "none",
            "--cpuctxsw",
            "none",
            "--capture-range",
            "nvtx",
            "--nvtx-capture",
            "optpipe.capture",
            "--capture-range-end",
            "stop",
            "--kill",
            "none",
            "--env-var",
            "NSYS_NVTX_PROFILER_REGISTER_ONLY=0",
            python,
            "-c",
            WORKER,
            str(workspace),
            artifact,
            "1",
            str(recording),
        ],
    )
    (out / f"{name}-nsys.log").write_text((recorded.stdout + recorded.stderr)[-4000:])
    found = recording.with_suffix(".json")
    if not found.is_file():
        return
    facts = json.loads(found.read_text())
    events = json.loads(Path(facts["profile"]).read_text())
    print("   events by category:", dict(Counter(event.get("cat") for event in events)), flush=True)
    shrunk(Path(facts.pop("profile")), out / f"{name}-ort-profile.json.gz")
    graphs = {
        path.parent.name: _nodes(path)
        for path in sorted((workspace / "store").glob("*/model.onnx"))
    }
    (out / f"{name}-facts.json").write_text(
        json.dumps({**facts, "artifact": artifact, "graphs": graphs})
    )
    step(
        f"{name} export",
        [
            "nsys",
            "export",
            "--type",
            "sqlite",
            "--force-overwrite",
            "true",
            "-o",
            str(recording.with_suffix(".sqlite")),
            str(recording.with_suffix(".nsys-rep")),
        ],
    )
    if recording.with_suffix(".sqlite").is_file():
        kept_export(recording.with_suffix(".sqlite"), out / f"{name}.sqlite")
    judged = step(
        f"{name} profile",
        [
            python,
            "-m",
            "optpipe",
            "profile",
            *common,
            "--stage",
            "inference",
            "--iterations",
            "10",
            "--json",
        ],
    )
    (out / f"{name}-profile.json").write_text(judged.stdout)
    (out / f"{name}-profile.log").write_text(judged.stderr[-4000:])
    if not judged.returncode:
        _say(json.loads(judged.stdout)["stages"][0]["profile"]["tensor_cores"])


def _nodes(path: Path) -> list[list[str]]:
    import onnx

    model = onnx.load(path, load_external_data=False)
    return [[node.name, node.op_type, *node.output] for node in model.graph.node]


def _say(cores: dict) -> None:
    whole = cores.get("kernel_ns") or 1
    print(
        f"   by {cores.get('basis')}: {cores.get('used')} of {cores.get('eligible')} eligible use Tensor Cores, "
        f"{cores.get('named_ns', 0) / whole:.0%} of kernel time in a layer, {len(cores.get('layers', []))} layers"
    )
    for row in cores.get("layers", [])[:8]:
        print(
            f"   {row['share']:6.1%} {row['op']} {row['name']} eligible={row['eligible']} used={row['used']} {row['kernel']}"
        )


def main() -> None:
    """Both models; one that fails does not stop the other."""
    out = Path(sys.argv[1]).resolve()
    out.mkdir(parents=True, exist_ok=True)
    pipeline = str(Path(__file__).resolve().parents[1] / "pipeline")
    sys.path.insert(0, pipeline)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [pipeline, *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    work = Path(os.environ.get("TMPDIR", "/tmp")) / f"ort-nodes-{os.getpid()}"
    work.mkdir(mode=0o700)
    try:
        wanted = sys.argv[2:] or ["digits", "resnet50"]
        for name in wanted:
            if name in MODELS:
                probe(name, MODELS[name], work, out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    for path in sorted(out.iterdir()):
        print(f"   {path.stat().st_size:>9} {path.name}")


if __name__ == "__main__":
    main()
