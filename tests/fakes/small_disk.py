"""A disk of a few MB that can really be full: a tmpfs, where this user may mount one."""

import os
import subprocess
from contextlib import contextmanager, suppress

import pytest


@contextmanager
def mount_small_disk(folder, megabytes=8):
    """Mounts it at `folder`; skips the test where mounting is not allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("needs mount")
    if done.returncode:
        pytest.skip(f"may not mount a tmpfs: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill_disk(folder, leave_bytes=0):
    """Takes all of it but `leave_bytes`."""
    descriptor = os.open(folder / "filler", os.O_CREAT | os.O_WRONLY)
    try:
        for size in (1 << 16, 512):
            with suppress(OSError):
                while True:
                    os.write(descriptor, bytes(size))
        os.ftruncate(descriptor, os.fstat(descriptor).st_size - leave_bytes)
    finally:
        os.close(descriptor)


def free_disk(folder):
    """Gives back what `fill_disk` took."""
    (folder / "filler").unlink()
