"""The commit of the working folder, which a run records: a history names those between which a figure changed."""

import subprocess

COMMAND = "git", "rev-parse", "--verify", "--quiet", "HEAD^{commit}"
"""Reads references only. What compares files, such as `git describe --dirty`, runs programs that the folder's configuration names."""
SECONDS = 10.0
"""A folder of a network that takes longer has no commit."""


def describe_commit() -> str:
    """The hash of the commit that is checked out in the working folder; empty outside a repository, or without git.

    It names neither the repository nor its place, and does not tell whether files differ from the commit.
    """
    try:
        completed = subprocess.run(
            COMMAND, capture_output=True, text=True, check=False, timeout=SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return completed.stdout.strip() if completed.returncode == 0 else ""
