"""NNCF's and Model Optimizer's INT8 of the networks and pictures of `recovery.py`, on the same validation pictures.

Each tool quantizes the FP32 graph that optpipe exported, calibrated on the same pictures. `nncf-accuracy` also gets the labels of the
calibration pictures and may lose half a point on them. Run it with a Python that has the tool, onnxruntime, and Pillow; adds its rows
to FOLDER/peers.json.

usage: PYTHON benchmarks/recovery_peers.py FOLDER NAME FP32.onnx nncf|nncf-accuracy|modelopt-max|modelopt-entropy|fp32|FILE.onnx
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from PIL import Image

MEAN, STD = 0.28, 0.30
MOST_DROP = 0.005
BATCH = 50


def read_pictures(folder: Path) -> tuple[Any, Any]:
    """(n, 3, 12, 20) normalized as the card does, and labels."""
    files = sorted(folder.glob("*/*.png"))
    pixels = np.stack([np.asarray(Image.open(file), np.float32) for file in files])
    images = ((pixels / 255 - MEAN) / STD)[:, None].repeat(3, axis=1).astype(np.float32)
    return images, np.array([int(file.parent.name) for file in files])


def predict(model: bytes, images: Any) -> Any:
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    parts = (images[start : start + BATCH] for start in range(0, len(images), BATCH))
    return np.concatenate([session.run(None, {name: part})[0] for part in parts])


def quantize_by_nncf(path: Path, images: Any, _labels: Any) -> bytes:
    import nncf

    model = onnx.load(path)
    name = model.graph.input[0].name
    data = nncf.Dataset([{name: row[None]} for row in images])
    made = nncf.quantize(model, data, preset=nncf.QuantizationPreset.MIXED, subset_size=len(images))
    return bytes(made.SerializeToString())


def quantize_by_nncf_with_accuracy(path: Path, images: Any, labels: Any) -> bytes:
    import nncf

    model = onnx.load(path)
    name = model.graph.input[0].name
    data = nncf.Dataset([{name: row[None]} for row in images])
    judged = nncf.Dataset([*zip(images, labels, strict=True)], lambda pair: pair[0])

    def validate(candidate: Any, _data: Any) -> tuple[float, None]:
        found = predict(candidate.SerializeToString(), images).argmax(1)
        return float((found == labels).mean()), None

    made = nncf.quantize_with_accuracy_control(
        model,
        data,
        judged,
        validate,
        max_drop=MOST_DROP,
        preset=nncf.QuantizationPreset.MIXED,
        subset_size=len(images),
    )
    return bytes(made.SerializeToString())


def quantize_by_modelopt(method: str) -> Callable[[Path, Any, Any], bytes]:
    def run(path: Path, images: Any, _labels: Any) -> bytes:
        from modelopt.onnx.quantization import quantize

        output = path.with_name(f"{path.stem}-{method}.onnx")
        quantize(
            str(path),
            quantize_mode="int8",
            calibration_data=images,
            calibration_method=method,
            calibration_eps=["cpu"],
            high_precision_dtype="fp32",
            output_path=str(output),
        )
        return output.read_bytes()

    return run


TOOLS: dict[str, Callable[[Path, Any, Any], bytes]] = {
    "nncf": quantize_by_nncf,
    "nncf-accuracy": quantize_by_nncf_with_accuracy,
    "modelopt-max": quantize_by_modelopt("max"),
    "modelopt-entropy": quantize_by_modelopt("entropy"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("name")
    parser.add_argument("model", type=Path)
    parser.add_argument("tools", nargs="+")
    given = parser.parse_args()
    images, labels = read_pictures(given.folder / "validation")
    source = predict(given.model.read_bytes(), images).argmax(1) == labels
    rows_file = given.folder / "peers.json"
    rows = json.loads(rows_file.read_text()) if rows_file.is_file() else []
    for tool in given.tools:
        started = time.monotonic()
        if tool in TOOLS:
            made = TOOLS[tool](given.model, *read_pictures(given.folder / "calibration"))
        else:
            made = (given.model if tool == "fp32" else Path(tool)).read_bytes()
        seconds = time.monotonic() - started
        (given.folder / f"{given.name}-by-{Path(tool).stem}.onnx").write_bytes(made)
        right = predict(made, images).argmax(1) == labels
        drop = source.astype(float) - right
        error = 1.96 * drop.std(ddof=1) / len(drop) ** 0.5
        rows.append(
            {
                "name": given.name,
                "tool": tool,
                "pictures": len(labels),
                "accuracy": float(right.mean()),
                "drop_points": 100 * float(drop.mean()),
                "drop_ci_points": [100 * float(drop.mean() + sign * error) for sign in (-1, 1)],
                "seconds": round(seconds, 1),
            }
        )
        print(rows[-1])
        rows_file.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
