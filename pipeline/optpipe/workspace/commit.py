"""The commit of the working folder, which a run records: a history names those between which a figure changed."""

import os
import subprocess

DIRTY = "-dirty"
SECONDS = 10.0
"""A folder of a network that takes longer has no commit."""


def describe_commit() -> str:
    """The hash of the commit that is checked out in the working folder, with `-dirty` if files differ from it.

    Empty outside a repository, or without git. It names neither the repository nor its place.
    """
    quiet = {
        **os.environ,
        "GIT_OPTIONAL_LOCKS": "0",
    }  # another git of the user's may hold the index
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        found = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=SECONDS, env=quiet
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip() if found.returncode == 0 else ""
