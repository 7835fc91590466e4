"""Makes a folder of JPEG photographs of about 500×430 out of the shipped ones: crops, flips, scales, qualities.

usage: python benchmarks/photographs.py FOLDER COUNT
"""

import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image, ImageEnhance

SAMPLES = Path(__file__).resolve().parent.parent / "calibration" / "samples"


def make(folder: Path, index: int) -> None:
    """Writes picture `index`: its random choices depend on the index alone."""
    random = np.random.default_rng(index)
    sources = sorted(SAMPLES.glob("*.jpg"))
    with Image.open(sources[index % len(sources)]) as opened:
        picture = opened.convert("RGB")
    width, height = (int(side * random.uniform(0.85, 1.15)) for side in (500, 430))
    part = random.uniform(0.55, 1.0)
    box_width, box_height = picture.width * part, picture.height * part
    left, top = (
        random.uniform(0, picture.width - box_width),
        random.uniform(0, picture.height - box_height),
    )
    picture = picture.resize(
        (width, height), Image.Resampling.BICUBIC, (left, top, left + box_width, top + box_height)
    )
    if random.random() < 0.5:
        picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    picture = ImageEnhance.Brightness(picture).enhance(random.uniform(0.7, 1.2))
    noise = random.normal(
        0, random.uniform(0, 6), (height, width, 3)
    )  # sensor noise gives files their usual size
    pixels = np.clip(np.asarray(picture) + noise, 0, 255).astype(np.uint8)
    Image.fromarray(pixels).save(folder / f"{index:05}.jpg", quality=int(random.integers(85, 96)))


def main(folder: Path, count: int) -> None:
    """Writes `count` pictures with all cores."""
    folder.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor() as pool:
        list(pool.map(partial(make, folder), range(count), chunksize=32))
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{count} photographs in {folder}, {size / count / 1e3:.0f} kB each")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
