"""Which images a derived pipeline is proven on, and their labels."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from optpipe.core.card import ModelCard, Task
from optpipe.core.events import Listener
from optpipe.models.inputs.images import ImageFolder, find_readable_images, format_unreadable
from optpipe.models.inputs.samples import read_labeled_files
from optpipe.workspace.environment import count_cores
from optpipe.workspace.shipped import find_shipped_folder


def find_usable_images(folder: Path, limit: int | None, max_unreadable: int | None, listener: Listener) -> ImageFolder:
    """The readable images of a folder; says what is left out. Raises BadInputError where that is too much."""
    found = find_readable_images(folder, limit, max_unreadable, threads=count_cores())
    if found.unreadable:
        listener.warn(
            f"{len(found.unreadable)} of {len(found.paths) + len(found.unreadable)} images cannot be read and are skipped:"
            f" {format_unreadable(found.unreadable)}"
        )
    if found.left_out:
        listener.warn(f"{found.left_out} images exceed --limit {limit} and are not used")
    return found


def choose_images(
    card: ModelCard, given: ImageFolder | None, limit: int | None, max_unreadable: int | None, listener: Listener
) -> tuple[ImageFolder, Sequence[int] | None]:
    """The images and their labels: those given, else the card's validation images, else the photographs that ship.

    A classifier's labels are the names of a folder's sub-folders where all of them are labels of the card.
    """
    truth: Mapping[Path, str] = {}
    if given is not None:
        found = given
    elif "validation" in card.data:
        pairs = list(read_labeled_files(Path(card.data["validation"])))
        truth = dict(pairs)
        folder = Path(os.path.commonpath([path.parent for path, _ in pairs]))
        found = find_usable_images(folder, limit, max_unreadable, listener)
    else:
        found = find_usable_images(find_shipped_folder("calibration") / "samples", limit, max_unreadable, listener)
    if card.task is not Task.CLASSIFICATION:
        return found, None
    labels = [truth.get(path, path.parent.name) for path in found.paths]
    missing = sorted(set(labels) - set(card.labels))
    if not missing:
        return found, [card.labels.index(label) for label in labels]
    if card.labels and any(path.parent != found.folder for path in found.paths):
        names = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        listener.warn(
            f"accuracy not computed: subfolders must be named after labels of {card.name}; not labels: {names}"
        )
    return found, None
