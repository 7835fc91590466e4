"""What a CI service reads: GitHub's step summary, where its environment variable names a file."""

import os
from pathlib import Path


def write_step_summary(markdown: str) -> None:
    """Appends `markdown` to GitHub's step summary; does nothing elsewhere."""
    path = os.environ.get("GITHUB_STEP_SUMMARY")
    if path:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(markdown + "\n")
