"""One measurement per GPU, across processes, users and workspaces of a host: a lock file per GPU UUID, freed by the kernel."""

import errno
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import monotonic

from optpipe.core.errors import StageError
from optpipe.sweep.slots import Slot
from optpipe.workspace.locks import try_lock

FOLDER = Path("/tmp/optpipe-locks")  # one place for all users; share it with containers of the host
QUIET = "quiet"
"""Held by whoever needs the host's processors to itself."""
TIMING = "timing"
"""Held while timing where GPUs disturb each other."""
_WHAT = {QUIET: "the CPU", TIMING: "timing on this host"}
POLL_S = 0.2
"""Between two tries to get a lock."""


class TakenError(StageError):
    """Somebody else held a lock for longer than we wait."""


def list_locks(slot: Slot, *, timing: bool, serialized: bool) -> list[tuple[str, bool]]:
    """The locks that a job needs, by name and whether shared, in the one order in which all take them."""
    found = [(slot.name, False)] if slot.gpu or slot.part else []
    if slot.gpu is None:
        found.append((QUIET, slot.part and timing))
    if serialized and timing:
        found.append((TIMING, False))
    return sorted(found)


@contextmanager
def hold_locks(
    names: Sequence[tuple[str, bool]], wait_s: float, folder: Path | None = None, stop: threading.Event | None = None
) -> Iterator[None]:
    """Holds all of `names` while the block runs. Raises TakenError, with the holder, after `wait_s`, StageError once `stop` is set."""
    stop = stop or threading.Event()
    deadline = monotonic() + wait_s
    with ExitStack() as stack:
        for name, shared in names:
            descriptor = _open_lock(folder or FOLDER, name)
            stack.callback(os.close, descriptor)
            while not try_lock(descriptor, shared=shared):
                if monotonic() > deadline:
                    raise TakenError(
                        f"{_WHAT.get(name, name)} has been in use by {_describe_holder(descriptor)} for more than {wait_s:.0f} s "
                        "(--set lock-timeout)"
                    )
                if stop.wait(POLL_S):
                    raise StageError("interrupted")
        yield


def _open_lock(folder: Path, name: str) -> int:
    """A descriptor of the lock's file. Reading is enough to lock, so that a file of another user does; a link is refused."""
    path = folder / name
    try:
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(stat.S_ISVTX | 0o777)
        try:
            return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:  # in a sticky folder O_CREAT on another user's file is refused
            return os.open(path, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except OSError as error:
        why = "is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise StageError(f"cannot lock {path}: {why}; without it measurements could disturb each other") from error


def _describe_holder(descriptor: int) -> str:
    """Who holds the lock, from the kernel's list, which shows processes of the own container."""
    inode = str(os.fstat(descriptor).st_ino)
    try:
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        lines = []
    for line in lines:
        words = line.split()
        if "FLOCK" in words and words[5].rpartition(":")[2] == inode:
            try:
                command = Path(f"/proc/{words[4]}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                command = ""
            return f"process {words[4]} {command.strip()[:80]}".strip()
    return "another process"
