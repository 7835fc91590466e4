"""Everything that a machine with TensorRT 10 or 11 can show of optpipe, in one command: see docs/how-to/tensorrt-host.md.

usage: python examples/tensorrt-host/tensorrt_host.py [--model digits] [--precision fp32,fp16,int8] [--batch 1,16] [--output DIR]
       python examples/tensorrt-host/tensorrt_host.py --dry-run     the same steps with ONNX Runtime on the CPU, without trtexec

Builds, reads the precision back, evaluates, measures beside trtexec on the same engine file with the clocks watched, signs off, and
packs all of it. A step that fails is named with its log, and the others go on. Needs optpipe's environment and nothing else.
"""

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROUNDS = 3
"""Turns of optpipe and trtexec on each engine and batch size."""
CLOCK_TOLERANCE = 0.02
"""Median SM clocks further apart than this make two times incomparable."""
POLICY = """schema = 1
name = "TensorRT host kit"
model = "{model}"

[build]
backend = "{backend}"
precision = "{precision}"

[[speedup]]
minimum = "0.5 times"
over = "fp32"
batch_size = {batch}

[accuracy]
maximum_drop = "2 points"

[precision]
{limit} = "80%"
"""


@dataclass
class Report:
    """What was run, and what came of it: `report.json`."""

    versions: dict[str, str] = field(default_factory=dict)
    steps: dict[str, str] = field(default_factory=dict)
    """`done`, `not run: …`, or the exit status with the log."""
    beside_trtexec: list[dict[str, object]] = field(default_factory=list)


@dataclass
class Kit:
    arguments: argparse.Namespace
    report: Report = field(default_factory=Report)

    @property
    def output(self) -> Path:
        return self.arguments.output

    @property
    def backend(self) -> list[str]:
        if self.arguments.dry_run:
            return ["--backend", "onnxruntime", "--device", "cpu"]
        return ["--backend", "tensorrt"]

    @property
    def workspace(self) -> Path:
        return self.output / "workspace"

    def run_optpipe(self, name: str, *words: str, accept: Sequence[int] = (0,)) -> dict:
        """The JSON document of a command; its output goes to NAME.json and NAME.log. Empty if it failed."""
        command = [sys.executable, "-m", "optpipe", *words, "--workspace", str(self.workspace)]
        with (self.output / f"{name}.log").open("w") as log:
            done = subprocess.run([*command, "--json"], stdout=subprocess.PIPE, stderr=log)
        (self.output / f"{name}.json").write_bytes(done.stdout)
        done_well = done.returncode in accept
        self.report.steps[name] = (
            f"done ({done.returncode})"
            if done_well
            else f"exit status {done.returncode}: {name}.log"
        )
        print(f"{name}: {self.report.steps[name]}", flush=True)
        return json.loads(done.stdout) if done_well and done.stdout else {}

    def skip(self, name: str, why: str) -> None:
        self.report.steps[name] = f"not run: {why}"
        print(f"{name}: not run: {why}", flush=True)

    def write_report(self) -> None:
        (self.output / "report.json").write_text(json.dumps(asdict(self.report), indent=1) + "\n")


def main() -> int:
    """Exits with 0 if every step that can run here ended as it should, and with 4 if one failed."""
    kit = make_kit()
    kit.report.versions |= find_versions()
    for name, run in STEPS.items():
        if name not in kit.arguments.steps:
            continue
        run(kit)
        kit.write_report()
    failed = [name for name, state in kit.report.steps.items() if state.startswith("exit status")]
    print(
        f"{len(failed)} steps failed: {', '.join(failed)}"
        if failed
        else "all steps that can run here ended as they should"
    )
    return 4 if failed else 0


def make_kit() -> Kit:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="digits")
    parser.add_argument("--precision", default="fp32,fp16,int8")
    parser.add_argument("--batch", default="1,16")
    parser.add_argument("--output", type=Path, default=Path("tensorrt-host"))
    parser.add_argument("--calibration", help="data for INT8; by default the model card's")
    parser.add_argument("--data", help="labeled data; by default the model card's")
    parser.add_argument("--trtexec", default="trtexec", help="its path, if it is not on PATH")
    parser.add_argument("--steps", type=lambda text: text.split(","), default=list(STEPS))
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    if unknown := set(arguments.steps) - {*STEPS}:
        parser.error(f"unknown step {min(unknown)}; steps are {', '.join(STEPS)}")
    if arguments.dry_run:
        arguments.precision = ",".join(
            each for each in arguments.precision.split(",") if each in ("fp32", "int8")
        )
    elif find_tensorrt() is None:
        parser.error(
            "this Python imports no tensorrt: `uv sync --extra tensorrt` (11) or"
            " `uv sync --no-dev --extra tensorrt10` (10); --dry-run tries the steps without it"
        )
    arguments.output.mkdir(parents=True, exist_ok=True)
    return Kit(arguments)


def find_tensorrt() -> str | None:
    """Asked in a process of its own, since a broken library may end the process."""
    program = "import tensorrt; print(tensorrt.__version__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def find_versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0], "tensorrt": find_tensorrt() or "none"}
    for name in ("optpipe", "torch", "onnx"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    for query in ("name", "driver_version"):
        found[f"gpu {query}"] = ask_gpu(query) or "none"
    return found


def ask_gpu(query: str) -> str | None:
    """The first GPU's answer to `nvidia-smi`; None without one."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout else None


def build(kit: Kit) -> None:
    data = ["--calibration", kit.arguments.calibration] if kit.arguments.calibration else []
    words = ["build", kit.arguments.model, "--precision", kit.arguments.precision, *kit.backend]
    kit.run_optpipe("build", *words, *data)


def read_back(kit: Kit) -> None:
    """The precision of each build as its network has it; on a GPU the engine inspector's JSON is kept too."""
    for place in list_builds(kit):
        kit.run_optpipe(
            f"read-back-{place.name}", "store", "show", place.name.removeprefix("artifact-")
        )
        if (inspector := place / "inspector.json").is_file():
            shutil.copyfile(inspector, kit.output / f"inspector-{place.name}.json")


def list_builds(kit: Kit) -> list[Path]:
    return sorted((kit.workspace / "store").glob("artifact-*"))


def evaluate(kit: Kit) -> None:
    data = ["--data", kit.arguments.data] if kit.arguments.data else []
    kit.run_optpipe("evaluate", "evaluate", kit.arguments.model, *data)


def measure_beside_trtexec(kit: Kit) -> None:
    """optpipe and trtexec take turns on each engine file: GPU compute time of the same batches, each with its SM clock."""
    if kit.arguments.dry_run:
        kit.skip("beside-trtexec", "it needs TensorRT and a GPU")
        return
    if shutil.which(kit.arguments.trtexec) is None:
        kit.skip("beside-trtexec", f"no {kit.arguments.trtexec} on PATH (--trtexec PATH)")
        return
    for place in list_builds(kit):
        info = json.loads((place / "manifest.json").read_bytes())["info"]
        for batch in map(int, kit.arguments.batch.split(",")):
            kit.report.beside_trtexec.append(take_turns(kit, place, info, batch))


def take_turns(kit: Kit, place: Path, info: Mapping, batch: int) -> dict[str, object]:
    name = f"{info['precision']}-b{batch}"
    ours, theirs = [], []
    for turn in range(ROUNDS):
        with Clock() as clock:
            found = run_bench(kit, f"bench-{name}-{turn}", place, batch)
        if found is not None:
            ours.append((found, clock.median_mhz))
        with Clock() as clock:
            found = run_trtexec(kit, f"trtexec-{name}-{turn}", place / str(info["file"]), batch)
        if found is not None:
            theirs.append((found, clock.median_mhz))
    return {"engine": place.name, "build": name} | compare(ours, theirs)


def run_bench(kit: Kit, name: str, place: Path, batch: int) -> float | None:
    """optpipe's median GPU compute time in ms."""
    artifact = place.name.removeprefix("artifact-")
    words = ["bench", artifact, "--batch", str(batch), "--mode", "compute", "--processes", "3"]
    document = kit.run_optpipe(name, *words, accept=(0, 5))
    parts = [one.get("parts_ns", {}).get("compute") for one in document.get("measurements", ())]
    medians = [part["median"] / 1e6 for part in parts if part]
    return statistics.median(medians) if medians else None


def run_trtexec(kit: Kit, name: str, engine: Path, batch: int) -> float | None:
    """trtexec's median GPU compute time in ms, without transfers, with a CUDA graph, spinning, as optpipe measures."""
    shapes = read_shapes(kit, batch)
    command = [kit.arguments.trtexec, f"--loadEngine={engine}", f"--shapes={shapes}"]
    command += [
        "--noDataTransfers",
        "--useCudaGraph",
        "--useSpinWait",
        "--warmUp=500",
        "--duration=5",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    (kit.output / f"{name}.log").write_text(done.stdout + done.stderr)
    found = parse_compute_ms(done.stdout)
    if done.returncode or found is None:
        kit.report.steps[name] = f"exit status {done.returncode}: {name}.log"
        return None
    kit.report.steps[name] = "done (0)"
    return found


def read_shapes(kit: Kit, batch: int) -> str:
    """`images:16x1x28x28`: the inputs of the stored model for this batch size."""
    (model,) = (kit.workspace / "store").glob("model-*")
    inputs = json.loads((model / "manifest.json").read_bytes())["info"]["card"]["inputs"]
    sizes = ([batch, *each["opt"][1:]] for each in inputs)
    return ",".join(
        f"{each['name']}:{'x'.join(map(str, size))}"
        for each, size in zip(inputs, sizes, strict=True)
    )


def parse_compute_ms(text: str) -> float | None:
    """The median of trtexec's line `GPU Compute Time: min = 1.2 ms, …, median = 1.3 ms, …`."""
    found = re.search(r"GPU Compute Time:.*?median = ([0-9.]+) ms", text)
    return float(found[1]) if found else None


class Clock:
    """Reads the GPU's SM clock twice a second while something runs."""

    def __enter__(self) -> "Clock":
        self.readings: list[float] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()

    def _read(self) -> None:
        while not self._end.wait(0.5):
            if (found := ask_gpu("clocks.sm")) is not None and found.isdecimal():
                self.readings.append(float(found))

    @property
    def median_mhz(self) -> float | None:
        return statistics.median(self.readings) if self.readings else None


Turn = tuple[float, float | None]
"""Median time in ms, and the median SM clock in MHz while it was measured."""


def compare(ours: Sequence[Turn], theirs: Sequence[Turn]) -> dict[str, object]:
    """The ratio of the medians, or why there is none: a side without a time, or clocks that differ."""
    found: dict[str, object] = {"optpipe": list(ours), "trtexec": list(theirs)}
    if not ours or not theirs:
        return found | {"ratio": None, "why_not": "one side has no time"}
    clocks = [[mhz for _, mhz in side if mhz is not None] for side in (ours, theirs)]
    if not all(clocks):
        return found | {"ratio": None, "why_not": "the SM clock could not be read"}
    first, second = map(statistics.median, clocks)
    if abs(first / second - 1) > CLOCK_TOLERANCE:
        why = f"the SM clocks differ: {first:.0f} and {second:.0f} MHz; lock them (nvidia-smi -lgc)"
        return found | {"ratio": None, "why_not": why}
    ratio = statistics.median(ms for ms, _ in ours) / statistics.median(ms for ms, _ in theirs)
    return found | {"ratio": ratio, "why_not": None}


def sign_off(kit: Kit) -> None:
    """The last precision over FP32; any verdict is a result."""
    names = kit.arguments.precision.split(",")
    text = POLICY.format(
        model=kit.arguments.model,
        backend=kit.backend[1],
        precision=names[-1],
        limit=names[-1],
        batch=kit.arguments.batch.split(",")[-1],
    )
    (kit.output / "policy.toml").write_text(text)
    dossier = kit.output / "dossier"
    shutil.rmtree(dossier, ignore_errors=True)
    words = ["--policy", str(kit.output / "policy.toml"), "--output", str(dossier)]
    kit.run_optpipe("signoff", "signoff", kit.arguments.model, *words, accept=(0, 1, 5))
    if dossier.is_dir():
        kit.run_optpipe("verify", "verify", str(dossier), accept=(0, 1, 5))


def pack(kit: Kit) -> None:
    """One archive of the dossier, the logs, and the report; the workspace stays here."""
    kit.write_report()
    archive = kit.output.with_name(f"{kit.output.name}-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz")
    with tarfile.open(archive, "w:gz") as tar:
        for path in sorted(kit.output.iterdir()):
            if path != kit.workspace:
                tar.add(path, arcname=f"{kit.output.name}/{path.name}")
    print(f"pack: {archive} ({archive.stat().st_size / 2**20:.1f} MiB)", flush=True)


STEPS: Mapping[str, Callable[[Kit], None]] = {
    "build": build,
    "read-back": read_back,
    "evaluate": evaluate,
    "beside-trtexec": measure_beside_trtexec,
    "signoff": sign_off,
    "pack": pack,
}
"""The steps in their order, by the names that `--steps` takes."""


if __name__ == "__main__":
    sys.exit(main())
