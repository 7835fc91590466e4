"""Text recognition: PP-OCRv4's recognizer (RapidOCR's file) reads lines that are printed here in twenty typefaces.

The score of a line is one minus its character error rate: edits between what was read and what was printed, over the characters printed.
"""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from benchmarks.known.lettering import draw_lines, fit_line
from benchmarks.known.packages import fetch_file
from benchmarks.known.sign_off import Candidate, Tensors, read_target, sign_off

import optpipe as op

NAME = "text-lines"
HEIGHT, WIDTH = 48, 320
LONGEST = 20
PACKAGE = "rapidocr-onnxruntime==1.4.4"
FILE = "ch_PP-OCRv4_rec_infer.onnx"
SHA256 = "48fc40f24f6d2a207a2b1091d3437eb3cc3eb6b676dc3ef9c37384005483683b"


def read_alphabet(path: Path) -> str:
    """The character of each class: the blank of CTC (a NUL here), the file's own list, and the space."""
    stored = next(each.value for each in onnx.load(path).metadata_props if each.key == "character")
    return "\0" + "".join(stored.split("\n")) + " "


def make_data(count: int, seed: int) -> Tensors:
    """Lines, and their texts as code points that end with zeros."""
    lines = draw_lines(count, HEIGHT, seed)
    labels = np.zeros((count, LONGEST), np.int64)
    for row, (text, _) in zip(labels, lines, strict=True):
        row[: len(text)] = [*map(ord, text)]
    return {"x": np.stack([fit_line(line, WIDTH) for _, line in lines]), "labels": labels}


def count_edits(found: str, wanted: str) -> int:
    """Levenshtein's distance."""
    row = list(range(len(wanted) + 1))
    for place, one in enumerate(found, 1):
        diagonal, row[0] = row[0], place
        for at, other in enumerate(wanted, 1):
            diagonal, row[at] = (
                row[at],
                min(row[at] + 1, row[at - 1] + 1, diagonal + (one != other)),
            )
    return row[-1]


def make_metric(alphabet: str) -> op.Metric:
    def character_accuracy(outputs: Any, truth: Any) -> float:
        """One minus the character error rate of CTC's greedy reading, at least zero."""
        wanted = "".join(chr(each) for each in truth if each)
        classes = np.argmax(outputs, axis=-1)
        kept = classes[np.concatenate([[True], classes[1:] != classes[:-1]]) & (classes != 0)]
        found = "".join(alphabet[each] for each in kept)
        return max(0.0, 1 - count_edits(found, wanted) / len(wanted))

    return op.Metric(character_accuracy, range=(0, 1), name="character-accuracy")


def make_candidate() -> Candidate:
    """The model, its data, and its score."""
    path = fetch_file(PACKAGE, FILE, SHA256, "pp-ocrv4-recognizer.onnx")
    least, usual, most = ((batch, 3, HEIGHT, WIDTH) for batch in (1, 1, 8))
    calibration = make_data(64, seed=1)
    return Candidate(
        name=NAME,
        source=path,
        model=op.Model(path, shape={"x": (least, usual, most)}),
        calibration=calibration,
        held_out=make_data(300, seed=2),
        metric=make_metric(read_alphabet(path)),
    )


def main() -> None:
    sign_off(make_candidate(), read_target(__doc__, NAME))


if __name__ == "__main__":
    main()
