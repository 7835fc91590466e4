"""Images for people: the reference, DALI's, and their difference made visible, side by side."""

import io
from pathlib import Path
from typing import TYPE_CHECKING

from optpipe.core.transform import Transform
from optpipe.preprocess.parity.pixels import ComparedImage
from optpipe.preprocess.parity.records import WorstImage
from optpipe.workspace.runs import write_bytes

if TYPE_CHECKING:
    import numpy as np

GAP = 8
VISIBLE = 128
"""Levels that the largest difference is stretched to."""


def save_side_by_side(path: Path, compared: ComparedImage, transform: Transform) -> WorstImage:
    """Writes reference | DALI | difference as PNG. Raises StageError where it cannot be written."""
    import numpy as np
    from PIL import Image

    reference, got = (_levels_from_tensor(each, transform) for each in (compared.reference, compared.got))
    difference = np.abs(reference - got)
    factor = max(1.0, VISIBLE / max(float(difference.max()), 1e-6)) if difference.max() > 0.01 else 1.0
    panels = [reference, got, difference * factor]
    gap = np.full((reference.shape[0], GAP, 3), 255.0)
    row = np.concatenate([panels[0], gap, panels[1], gap, panels[2]], axis=1)
    png = io.BytesIO()
    Image.fromarray(np.clip(row + 0.5, 0, 255).astype(np.uint8)).save(png, "PNG")
    write_bytes(path, png.getvalue())
    return WorstImage(compared.name, compared.mean_levels, compared.max_levels, path.name, factor)


def _levels_from_tensor(tensor: "np.ndarray", transform: Transform) -> "np.ndarray":
    """A packed tensor back in 8-bit levels, (height, width, 3)."""
    import numpy as np

    pixels = np.moveaxis(tensor, 0, -1) if transform.pack.order == "CHW" else tensor
    values = pixels.astype(np.float64)
    if transform.normalize:
        values = values * np.asarray(transform.normalize.std) + np.asarray(transform.normalize.mean)
    if transform.rescale:
        values = (values - transform.rescale.offset) * transform.rescale.divisor
    return values if values.shape[2] == 3 else np.repeat(values, 3, axis=2)
