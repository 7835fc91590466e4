"""Where the data that ships with optpipe lies: beside the package in a wheel, at the top level in a checkout."""

from pathlib import Path
from typing import Literal

from optpipe.core.errors import MissingError

_PACKAGE = Path(__file__).resolve().parent.parent


def find_shipped_folder(name: Literal["models", "calibration"]) -> Path:
    """The folder `name`. Raises MissingError where the installation lacks it."""
    in_wheel = _PACKAGE / "_data" / name
    in_checkout = _PACKAGE.parent.parent / name
    for folder in (in_wheel, in_checkout):
        if folder.is_dir():
            return folder
    raise MissingError(
        f"folder {name}/ is missing from this installation (searched {in_wheel} and {in_checkout}); reinstall optpipe"
    )
