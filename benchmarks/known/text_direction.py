"""Text direction: PaddleOCR's classifier (RapidOCR's file) says which printed lines are upside down."""

from typing import Any

import numpy as np
from benchmarks.known.lettering import draw_lines, fit_line
from benchmarks.known.packages import fetch_file
from benchmarks.known.sign_off import Candidate, Tensors, read_target, sign_off

import optpipe as op

NAME = "text-direction"
HEIGHT, WIDTH = 48, 192
PACKAGE = "rapidocr-onnxruntime==1.4.4"
FILE = "ch_ppocr_mobile_v2.0_cls_infer.onnx"
SHA256 = "e47acedf663230f8863ff1ab0e64dd2d82b838fceb5957146dab185a89d6215c"


def make_data(count: int, seed: int) -> Tensors:
    """Lines, every second one turned by 180 degrees, label 1."""
    lines = [line for _, line in draw_lines(count, HEIGHT, seed)]
    labels = np.arange(count) // 20 % 2  # every typeface both ways
    turned = [
        line[::-1, ::-1] if label else line for line, label in zip(lines, labels, strict=True)
    ]
    rows = [fit_line(np.ascontiguousarray(line), WIDTH) for line in turned]
    return {"x": np.stack(rows), "labels": labels}


def is_right(outputs: Any, truth: Any) -> float:
    """Whether the larger of both outputs is the direction."""
    return float(np.argmax(outputs) == truth)


def make_candidate() -> Candidate:
    """The model, its data, and its score."""
    path = fetch_file(PACKAGE, FILE, SHA256, "pp-ocr-direction.onnx")
    least, usual, most = ((batch, 3, HEIGHT, WIDTH) for batch in (1, 8, 64))
    calibration = make_data(80, seed=3)
    return Candidate(
        name=NAME,
        source=path,
        model=op.Model(path, shape={"x": (least, usual, most)}),
        calibration=calibration,
        held_out=make_data(2000, seed=4),
        metric=op.Metric(is_right, range=(0, 1), name="top1"),
    )


def main() -> None:
    sign_off(make_candidate(), read_target(__doc__, NAME))


if __name__ == "__main__":
    main()
