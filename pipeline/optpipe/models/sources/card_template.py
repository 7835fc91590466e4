"""Writes a model card for a module or an ONNX file, as `build MODEL --init CARD.toml` does.

What the model states is written: its inputs, outputs, and factory. The task follows from the first output and the data, and the
preprocessing is the usual one of the input's size. What only the training knows, the mean and standard deviation, is left to the
user, in a comment at its place.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from optpipe.core.card import InputSpec, ModelCard, Task
from optpipe.core.errors import BadInputError
from optpipe.core.transform import CenterCrop, Decode, Pack, Rescale, Resize, Transform
from optpipe.core.wording import Argument
from optpipe.models.inputs.image_set import image_set_from_path

NORMALIZE = """\
# normalize: the mean and standard deviation of the training; without them the input is from 0 to 1
# [[preprocessing.steps]]
# step = "normalize"
# mean = [0.485, 0.456, 0.406]
# std = [0.229, 0.224, 0.225]
"""
TOKENIZER = """\
# For texts; or "file.py:function", which takes a text and returns its token identifiers.
# tokenizer = "tokenizer.json"
# pad_id = 0
"""
HEAD = """\
# A guess from the shapes of the outputs, as is the task; models/README.md lists the layouts. Remove both if
# this is no detector."""
LETTERBOXED, GRAY = ("yolov5", "yolov8", "boxes6"), 114
"""Layouts of YOLO, which keeps the sides' ratio and fills the rest of the square with this gray."""
SHRINK = 0.875
"""The usual part of the shorter side that the crop keeps."""


def make_card_text(
    card: ModelCard, target: Path, data: Path | None, *, detector: str | None = None
) -> str:
    """The text of a card in `target` for a model whose outputs are known; `data` is a folder of images.

    `detector` is the layout of the head whose shapes the outputs have, if any.

    Raises BadInputError for images where the model takes none.
    """
    image = card.inputs[0] if len(card.inputs) == 1 and card.inputs[0].is_image else None
    if data is not None and not data.exists():
        raise BadInputError("no such file or folder", argument=Argument("images", data))
    if data is not None and image is None:
        inputs = ", ".join(f"{spec.name} {spec.format_profile()}" for spec in card.inputs)
        raise BadInputError(
            f"{card.name} takes no images ({inputs})", argument=Argument("images", data)
        )
    labels = list(card.labels) or _list_labels(card, data)
    task = _guess_task(card, has_labels=bool(labels), detector=detector)
    file, _, factory = card.source.rpartition(":")
    source = os.path.relpath(file if factory else card.source, target.parent.resolve())
    lines = [
        "# Model card; the fields are explained in models/README.md. Paths are relative to this file.",
        f"name = {_dump(card.name)}",
        f"task = {_dump(str(task))}  # {', '.join(Task)}",
        f"source = {_dump(f'{source}:{factory}' if factory else source)}",
        f"labels = {_dump(labels)}"
        if labels
        else '# labels = ["…"]  # in the order of the outputs',
    ]
    if _takes_tokens(card):
        lines += TOKENIZER.splitlines()
    for spec in card.inputs:
        lines += ["", "[[inputs]]", *_list_values(spec.to_dict())]
    for output in card.outputs:
        lines += ["", "[[outputs]]", f"name = {_dump(output.name)}"]
    if image is not None:
        lines += [
            "",
            *_list_steps(
                card.transform or _guess_transform(image, detector),
                given=card.transform is not None,
            ),
        ]
    if detector is not None:
        lines += [HEAD, "[head]", f"layout = {_dump(detector)}"]
    lines += [
        "",
        "# [data]",
        '# calibration = "calibration.json"',
        '# validation = "validation.json"',
        "",
    ]
    return "\n".join(lines)


def _takes_tokens(card: ModelCard) -> bool:
    """Whether the first input may hold the token identifiers of texts: integers (texts, tokens)."""
    first = card.inputs[0]
    return first.dtype in ("int64", "int32") and len(first.opt) == 2


def _list_labels(card: ModelCard, data: Path | None) -> list[str]:
    """The folders of `data`, if they are as many as the classes."""
    if data is None:
        return []
    folders = sorted(image_set_from_path(data)[0].labels)
    classes = card.outputs[0].classes if card.outputs else None
    return folders if len(folders) == classes else []


def _guess_task(card: ModelCard, *, has_labels: bool, detector: str | None) -> Task:
    if card.task is not Task.OTHER:
        return card.task
    if detector is not None:
        return Task.DETECTION
    classes = card.outputs[0].classes if card.outputs else None
    takes_images = card.inputs[0].is_image
    return (
        Task.CLASSIFICATION if has_labels or (takes_images and (classes or 0) > 1) else Task.OTHER
    )


def _guess_transform(image: InputSpec, detector: str | None) -> Transform:
    """Resize, crop, and rescale to the input's usual size; a detector sees the whole image."""
    shape = image.sample
    last = shape[0] not in (1, 3)
    height, width = shape[:2] if last else shape[1:]
    channels = shape[2] if last else shape[0]
    scale: tuple[Resize | CenterCrop, ...] = (
        Resize((round(min(height, width) / SHRINK),), "short"),
        CenterCrop(height, width),
    )
    if detector is not None:
        is_letterbox = height == width and detector in LETTERBOXED
        whole = (Resize((height,), "long"), CenterCrop(height, width, fill=GRAY))
        scale = whole if is_letterbox else (Resize((height, width), "exact"),)
    return Transform(
        (
            Decode("L" if channels == 1 else "RGB"),
            *scale,
            *((Rescale(),) if image.dtype == "float32" else ()),
            Pack(order="HWC" if last else "CHW", dtype=image.dtype),  # type: ignore[arg-type]
        )
    )


def _list_steps(transform: Transform, *, given: bool) -> Iterator[str]:
    if not given:
        yield "# The usual steps for this size; compare them with the training's."
    stated = transform.to_dict()["steps"]
    for step in stated:
        if step["step"] == "pack" and not given:
            yield NORMALIZE
        yield "[[preprocessing.steps]]"
        yield from _list_values(step)
        yield ""


def _list_values(table: Mapping[str, Any]) -> Iterator[str]:
    for name, value in table.items():
        if value is not None:
            yield f"{name} = {_dump(value)}"


def _dump(value: Any) -> str:
    """A TOML value: texts, numbers, and lists are written as in JSON, except for characters that TOML escapes otherwise."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
