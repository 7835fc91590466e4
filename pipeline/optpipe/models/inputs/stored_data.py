"""The store entry of samples that a Python program or file gave: where its tensors lie, and what they are called."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from optpipe.core.errors import OptpipeError
from optpipe.workspace.entry import MANIFEST, entry_from_folder

FILE = "tensors.npz"
FOLDER = "tensors"


@dataclass(frozen=True, slots=True)
class DataInfo:
    """Samples that a Python program gave: `tensors.npz`, or a folder of such files if their shapes differ."""

    KIND: ClassVar[str] = "data"

    name: str
    sha256: str
    """Over the samples' hashes, in ascending order, and their truths."""
    count: int
    labeled: bool


def name_source(source: Path) -> str:
    """What reports call the data in `source`: its file's or folder's name, or the name of the program's data that it stores.

    `net.py:CALIBRATION` rather than `tensors.npz`.
    """
    source = source.resolve()
    if source.name in (FILE, FOLDER) and (source.parent / MANIFEST).is_file():
        try:
            return entry_from_folder(source.parent, DataInfo).info.name
        except OptpipeError:  # another manifest, beside a user's own tensors.npz
            pass
    return source.name
