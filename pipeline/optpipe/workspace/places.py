"""Checks that a user's output location can be written before anything long runs, and moves results there."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import EACCES, EDQUOT, EEXIST, ELOOP, ENAMETOOLONG, ENOENT, ENOSPC, ENOTDIR, EPERM, EROFS
from pathlib import Path
from tempfile import TemporaryFile
from typing import Literal

from optpipe.core.errors import BadInputError, MissingError, StageError
from optpipe.core.wording import Argument, Call


def require_writable_folder(folder: Path, name: str) -> None:
    """Raises BadInputError if no file can be made in `folder`, which need not exist; creates nothing. `name` is its argument's.

    Raises StageError on a full disk, as everything does that finds one later.
    """
    _require_room(folder, Argument(name, folder))


def require_writable_file(file: Path, name: str) -> None:
    """Raises BadInputError if `file` cannot be created or overwritten."""
    if os.path.isdir(file):  # noqa: PTH112 - Path.is_dir raises where a folder on the way cannot be searched
        raise BadInputError(Argument(name, file) + " is a folder; specify a file")
    if not os.path.exists(file):  # noqa: PTH110 - for the same reason
        _require_room(file, Argument(name, file))
    elif not os.access(file, os.W_OK):
        raise BadInputError(Argument(name, file) + " is not writable")


def require_unused_path(target: Path, name: str = "output") -> None:
    """Raises BadInputError if `target` exists or cannot be created."""
    if os.path.lexists(target):
        raise BadInputError(f"{target} already exists; choose another " + Argument(name))
    _require_room(target, Argument(name, target))


def _require_room(path: Path, argument: Argument) -> None:
    nearest = path
    try:
        with suppress(PermissionError):
            path.exists()  # raises for a name that is too long
        nearest = next(ancestor for ancestor in (path, *path.parents) if os.path.lexists(ancestor))
        with TemporaryFile(dir=nearest) as file:
            file.write(b"0")
    except NotADirectoryError:
        raise BadInputError(f"{nearest} is not a folder", argument=argument) from None
    except OSError as error:
        if error.errno in (ENOSPC, EDQUOT):
            raise StageError(
                f"no space left at {nearest}; free disk space, or choose another location",
                argument=argument,
            ) from error
        why = (
            "" if error.errno == ENOENT else f" ({error.strerror})"
        )  # the error of /proc, which misleads
        raise BadInputError(f"{nearest} is not writable{why}", argument=argument) from error


def move_folder(folder: Path, target: Path) -> None:
    """Moves `folder` to the unused path `target` in one step and makes it readable for all, since scratch files are private."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    target.parent.mkdir(parents=True, exist_ok=True)
    require_unused_path(target)
    beside = target.with_name(f".{target.name}.{folder.name}")  # a move to another disk is a copy
    try:
        shutil.move(folder, beside)
        beside.rename(target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


@contextmanager
def explain_os_errors(workspace: Path) -> Iterator[None]:
    """Turns errors of the file system below `workspace`, or while creating it, into messages with a way out."""
    try:
        yield
    except OSError as error:
        if error.errno in (ENOSPC, EDQUOT):
            raise StageError(
                f"no space left for workspace {workspace}; free disk space (`"
                + Call("store gc")
                + "`) or pass "
                + Argument("workspace", "DIR")
            ) from error
        if _is_refusal(error, workspace.absolute()):
            raise BadInputError(
                f"workspace {workspace} is not writable ({error.strerror}); pass "
                + Argument("workspace", "DIR")
            ) from error
        raise


def _is_refusal(error: OSError, workspace: Path) -> bool:
    if error.filename is None:
        return False
    place = Path(os.fsdecode(error.filename)).absolute()
    if workspace.is_relative_to(place):  # cannot be created; /proc reports ENOENT
        return error.errno in (ENOENT, *REFUSED)
    return place.is_relative_to(workspace) and error.errno in REFUSED


REFUSED = (EROFS, EACCES, EPERM, ENOTDIR, EEXIST, ENAMETOOLONG, ELOOP)


_PACKAGE = Path(__file__).resolve().parent.parent


def find_shipped_folder(name: Literal["models", "calibration", "verifier"]) -> Path:
    """Raises MissingError if the installation lacks the folder."""
    in_wheel = _PACKAGE / "_data" / name
    in_checkout = _PACKAGE.parent.parent / name
    for folder in (in_wheel, in_checkout):
        if folder.is_dir():
            return folder
    raise MissingError(
        f"folder {name}/ is missing from this installation (searched {in_wheel} and {in_checkout}); reinstall optpipe"
    )


def format_extra(name: str) -> str:
    """The command that installs an extra of optpipe here: `uv sync --extra timm` in a clone, otherwise with pip."""
    in_clone = (_PACKAGE.parent.parent / "pyproject.toml").is_file()
    return f"uv sync --extra {name}" if in_clone else f"pip install 'optpipe[{name}]'"
