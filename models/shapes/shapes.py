"""Images of circles, squares and triangles with their masks and boxes: what `segmenter` and `detector` are trained and judged on.

Shapes overlap, and some are small. Everything is drawn from a seed:

    python models/shapes/shapes.py images   # PNG files, masks, COCO annotations and manifests under calibration/shapes
"""

import hashlib
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

HERE = Path(__file__).resolve().parent
DATA = HERE.parent.parent / "calibration" / "shapes"
CLASSES = ("circle", "square", "triangle")
COUNT = {"calibration": 100, "validation": 250}
SEEDS = {"calibration": 1, "validation": 2}
SIDE = 64
"""The networks' input is SIDE × SIDE; the images are of other sizes."""


@dataclass(frozen=True)
class Drawing:
    """An image, its mask (0 is the background, 1 to 3 are CLASSES), and its shapes."""

    image: "Image.Image"
    mask: "Image.Image"
    shapes: list[tuple[int, tuple[float, float, float, float], int]]
    """Class index, box, and area in pixels of what is visible."""


def draw(rng: "np.random.Generator") -> Drawing:
    """One image of 56 to 104 pixels a side with one to five shapes."""
    import numpy as np
    from PIL import Image, ImageDraw

    width, height = (int(side) for side in rng.integers(56, 105, 2))
    base = rng.integers(40, 216, 3)
    blocks = (
        rng.normal(0, 10, (height // 8 + 1, width // 8 + 1, 1))
        .repeat(8, 0)
        .repeat(8, 1)[:height, :width]
    )
    image = Image.fromarray((base + blocks).clip(0, 255).astype(np.uint8))
    owner = Image.new("L", (width, height), 0)  # which shape is seen at a pixel
    kinds: list[int] = []
    for number in range(1, int(rng.integers(1, 6)) + 1):
        kind = int(rng.integers(0, 3))
        radius = float(rng.uniform(4, 8) if rng.random() < 0.35 else rng.uniform(8, 20))
        x, y = (
            rng.uniform(radius * 0.6, width - radius * 0.6),
            rng.uniform(radius * 0.6, height - radius * 0.6),
        )
        shade = (base + rng.choice([-1, 1]) * rng.uniform(30, 110, 3)).clip(0, 255).astype(int)
        corners = _list_corners(kind, x, y, radius, float(rng.uniform(0, 2 * math.pi)))
        ImageDraw.Draw(image).polygon(corners, fill=tuple(int(level) for level in shade))
        ImageDraw.Draw(owner).polygon(corners, fill=number)
        kinds.append(kind)
    pixels = np.asarray(image).astype(np.int16) + (
        4 * rng.integers(-3, 4, (height, width, 1))
    ).astype(np.int16)
    seen, shapes = np.asarray(owner), []
    for number, kind in enumerate(kinds, 1):
        rows, columns = np.nonzero(seen == number)
        if len(rows) >= 12:
            left, top = int(columns.min()), int(rows.min())
            box = (
                float(left),
                float(top),
                float(columns.max() + 1 - left),
                float(rows.max() + 1 - top),
            )
            shapes.append((kind, box, len(rows)))
    mask = np.array([0, *(kind + 1 for kind in kinds)], np.uint8)[seen]
    return Drawing(
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)), Image.fromarray(mask), shapes
    )


def _list_corners(
    kind: int, x: float, y: float, radius: float, turned: float
) -> list[tuple[float, float]]:
    count = (24, 4, 3)[kind]
    angles = [turned + 2 * math.pi * step / count for step in range(count)]
    return [(x + radius * math.cos(angle), y + radius * math.sin(angle)) for angle in angles]


def write_images() -> None:
    """Writes both splits as PNG files with PNG masks, COCO annotations and a manifest."""
    import numpy as np

    for split, count in COUNT.items():
        rng, images, annotations = np.random.default_rng(SEEDS[split]), [], []
        for folder in ("images", "masks"):
            (DATA / split / folder).mkdir(parents=True, exist_ok=True)
        for index in range(count):
            drawing, name = draw(rng), f"{index:04d}.png"
            drawing.image.save(DATA / split / "images" / name, optimize=True)
            drawing.mask.save(DATA / split / "masks" / name, optimize=True)
            width, height = drawing.image.size
            images.append({"id": index, "file_name": name, "width": width, "height": height})
            annotations += [
                {
                    "id": len(annotations) + 1 + place,
                    "image_id": index,
                    "category_id": kind + 1,
                    "bbox": box,
                    "area": area,
                    "iscrowd": 0,
                }
                for place, (kind, box, area) in enumerate(drawing.shapes)
            ]
        categories = [{"id": index + 1, "name": name} for index, name in enumerate(CLASSES)]
        document = {"images": images, "annotations": annotations, "categories": categories}
        (DATA / split / "annotations.json").write_text(
            json.dumps(document) + "\n", encoding="utf-8"
        )
        _write_manifest(split)


def _write_manifest(split: str) -> None:
    """The image-set manifest, with the SHA-256 of every image."""
    paths = sorted((DATA / split / "images").glob("*.png"))
    files = [
        {"path": f"images/{path.name}", "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in paths
    ]
    listing = "".join(f"{file['sha256']}  {file['path']}\n" for file in files)
    head = {
        "format": "optpipe.image-set/1",
        "name": f"shapes/{split}",
        "root": split,
        "seed": SEEDS[split],
        "count": len(files),
        "sha256": hashlib.sha256(listing.encode()).hexdigest(),
    }
    rows = ",\n".join(f"    {json.dumps(file)}" for file in files)
    text = json.dumps(head, indent=2)[:-2] + ',\n  "files": [\n' + rows + "\n  ]\n}\n"
    (DATA / f"{split}.json").write_text(text, encoding="utf-8")


def read_drawings(split: str) -> list[tuple["Image.Image", "Image.Image"]]:
    """The images of a split with their masks."""
    from PIL import Image

    paths = sorted((DATA / split / "images").glob("*.png"))
    return [
        (Image.open(path).convert("RGB"), Image.open(path.parent.parent / "masks" / path.name))
        for path in paths
    ]


if __name__ == "__main__":
    {"images": write_images}[sys.argv[1]]()
