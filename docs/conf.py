"""Builds the documentation: `uv run sphinx-build -EWnq -b html docs docs/_build`. Needs no network."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from generated import copy_reports, expand
from sphinx.application import Sphinx

project = "optpipe"
author = "The optpipe maintainers"
extensions = ["myst_parser"]
exclude_patterns = ["_build", "README.md"]
html_theme = "furo"
html_title = "optpipe"
html_show_copyright = False
myst_enable_extensions = ["attrs_inline"]
myst_heading_anchors = 3  # a link to an unknown heading is a warning, and -W makes it an error
highlight_language = "text"
smartquotes = False  # they make a dash of the two hyphens of an option


def setup(app: Sphinx) -> None:
    app.connect(
        "source-read", lambda _, page, source: source.__setitem__(0, expand(page, source[0]))
    )
    app.connect(
        "build-finished", lambda builder, error: error or copy_reports(Path(builder.outdir))
    )
