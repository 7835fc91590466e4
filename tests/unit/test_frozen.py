"""Snapshots of what must stay as it is: every `--help`, and what an emulated INT8 layer computes.

`OPTPIPE_FREEZE=1 uv run pytest tests/unit/test_frozen.py` rewrites them.
"""

import hashlib
import json
import os
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fakes.emulation import compute_step
from tests.fakes.int8_network import random_convolution
from typer.main import get_command

from optpipe.cli.app import app

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
WIDTH = {"terminal_width": 100, "max_content_width": 100}


def list_contexts(context):
    yield context
    for name, command in getattr(context.command, "commands", {}).items():
        below = command.make_context(name, [], parent=context, resilient_parsing=True, **WIDTH)
        yield from list_contexts(below)


OPTPIPE: Any = get_command(app)
HELP = {
    context.command_path.replace(" ", "-"): context
    for context in list_contexts(
        OPTPIPE.make_context("optpipe", [], resilient_parsing=True, **WIDTH)
    )
}


@pytest.mark.parametrize("name", sorted(HELP))
def test_help_is_as_frozen(name):
    require_frozen(GOLDEN / "help" / f"{name}.txt", HELP[name].get_help().rstrip() + "\n")


def test_every_frozen_help_is_of_a_command():
    assert {path.stem for path in (GOLDEN / "help").iterdir()} == set(HELP)


def require_frozen(path, text):
    if "OPTPIPE_FREEZE" in os.environ:
        path.write_text(text)
    assert text == path.read_text()


def test_documents_have_the_shape_that_is_published_under_their_version():
    """A changed shape needs another SCHEMA_VERSION; only then OPTPIPE_FREEZE=1 writes the schemas."""
    schemas = runpy.run_path(str(ROOT / ".ci" / "schemas.py"))
    if "OPTPIPE_FREEZE" in os.environ:
        schemas["write_files"]()
    assert {path: path.read_text() for path in schemas["list_files"]()} == schemas["list_files"]()


def test_an_int8_convolution_gives_the_frozen_integers():
    """Sums of products of integers are exact, and so are their scales in FP64: the same on every CPU."""
    found = {}
    for activation, added, stride in (("", False, 1), ("relu", True, 2), ("hardswish", False, 1)):
        step, given = random_convolution(seed=5, activation=activation, added=added, stride=stride)
        whole = compute_step(step, given).contiguous().numpy()
        assert whole.dtype == np.int8
        found[f"{activation or 'linear'} stride {stride}"] = hashlib.sha256(
            whole.tobytes()
        ).hexdigest()
    require_frozen(GOLDEN / "int8" / "convolutions.json", json.dumps(found, indent=1) + "\n")
