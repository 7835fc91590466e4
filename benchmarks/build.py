"""The cold build of ResNet-50 FP16 against the bare library calls it makes, the warm build, and `--help`.

usage: uv run python benchmarks/build.py [ROUNDS]

Each figure is the wall time of a fresh process, the two taken in turn; peak memory is the child's own high-water mark.
The bare calls do what the build's result needs and nothing else: load, export, simplify, check, AutoCast, TensorRT-RTX,
ONNX Runtime's optimizer, and one run of each graph over the same eight images.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BARE = """
import sys, numpy as np, torch, torchvision, onnx, onnxslim, onnxruntime as ort, tensorrt_rtx as trt
from modelopt.onnx.autocast import convert_to_mixed_precision
from pathlib import Path
from PIL import Image
folder, images = Path(sys.argv[1]), sorted(Path(sys.argv[2]).glob("*.jpg"))[:8]
torch.manual_seed(0)
module = torchvision.models.resnet50(weights=None).eval()
preset = torchvision.models.ResNet50_Weights.DEFAULT.transforms()
batch = torch.stack([preset(Image.open(path).convert("RGB")) for path in images])
with torch.inference_mode():
    module(batch)
dynamic = ({0: torch.export.Dim("batch", min=1, max=64)},)
torch.onnx.export(module, (batch,), dynamo=True, dynamic_shapes=dynamic, input_names=["images"], verbose=False).save(
    folder / "model.onnx", external_data=False)
onnx.save(onnxslim.slim(onnx.load(folder / "model.onnx")), folder / "model.onnx")
onnx.checker.check_model(str(folder / "model.onnx"), full_check=True)
np.savez(folder / "samples.npz", images=batch.numpy())
half = convert_to_mixed_precision(
    str(folder / "model.onnx"), low_precision_type="fp16", keep_io_types=True, calibration_data=str(folder / "samples.npz"))
onnx.save(half, folder / "half.onnx")
ort.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"]).run(None, {"images": batch.numpy()})
logger = trt.Logger(trt.Logger.ERROR)
builder = trt.Builder(logger)
network = builder.create_network(0)
parser = trt.OnnxParser(network, logger)
assert parser.parse_from_file(str(folder / "half.onnx"))
config, profile = builder.create_builder_config(), builder.create_optimization_profile()
profile.set_shape("images", (1, 3, 224, 224), (8, 3, 224, 224), (64, 3, 224, 224))
config.add_optimization_profile(profile)
(folder / "model.engine").write_bytes(builder.build_serialized_network(network, config))
options = ort.SessionOptions()
options.optimized_model_filepath = str(folder / "optimized.onnx")
options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
ort.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"]).run(None, {"images": batch.numpy()})
"""


def timed(command: list[str], folder: Path) -> tuple[float, float]:
    """Wall seconds and peak memory in GiB of one process."""
    started = time.monotonic()
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        sys.exit(f"{' '.join(command)[:80]} ended with status {status}")
    return time.monotonic() - started, usage.ru_maxrss / (1 << 20)


def main() -> None:
    """Prints one row per kind of process and the ratio of the medians."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    samples = Path(__file__).resolve().parents[1] / "calibration" / "samples"
    build = [
        sys.executable,
        "-m",
        "optpipe",
        "build",
        "resnet50",
        "--weights",
        "random",
        "--precision",
        "fp16",
    ]
    figures: dict[str, list[tuple[float, float]]] = {
        "bare calls": [],
        "cold build": [],
        "warm build": [],
        "--help": [],
    }
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            figures["bare calls"].append(
                timed([sys.executable, "-c", BARE, name, str(samples)], folder)
            )
            figures["cold build"].append(timed(build, folder))
            figures["warm build"].append(timed(build, folder))
            figures["--help"].append(timed([sys.executable, "-m", "optpipe", "--help"], folder))
    print(f"| {'':10} | median s | min s | max s | peak GiB |\n|---|---|---|---|---|")
    for kind, found in figures.items():
        seconds, memory = [each[0] for each in found], max(each[1] for each in found)
        print(
            f"| {kind:10} | {statistics.median(seconds):.2f} | {min(seconds):.2f} | {max(seconds):.2f} | {memory:.2f} |"
        )
    ratios = [
        cold[0] / bare[0]
        for cold, bare in zip(figures["cold build"], figures["bare calls"], strict=True)
    ]
    print(
        f"cold build / bare calls, pair by pair: median {statistics.median(ratios):.2f} ({', '.join(f'{r:.2f}' for r in ratios)})"
    )


if __name__ == "__main__":
    main()
