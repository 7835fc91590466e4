"""What a CI service reads: GitHub's step summary, where its environment variable names a file."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optpipe.signoff.release import SignedDossier

STEP_SUMMARY = "GITHUB_STEP_SUMMARY"


def require_step_summary() -> None:
    """Raises BadInputError where the step summary could not be written."""
    from optpipe.workspace.places import require_writable_file

    if path := os.environ.get(STEP_SUMMARY):
        require_writable_file(Path(path), STEP_SUMMARY)


def write_ci_files(signed: "SignedDossier", junit: Path | None) -> None:
    """The verdict as JUnit XML where that is asked for, and the report as step summary."""
    from optpipe.signoff.reports import JUNIT, MARKDOWN

    if junit is not None:
        junit.parent.mkdir(parents=True, exist_ok=True)
        junit.write_text(signed.reports[JUNIT], encoding="utf-8")
    write_step_summary(signed.reports[MARKDOWN])


def write_step_summary(markdown: str) -> None:
    """Appends `markdown` to GitHub's step summary; does nothing elsewhere."""
    path = os.environ.get(STEP_SUMMARY)
    if path:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(markdown + "\n")
