"""`import optpipe`: its names, what it costs, and what it leaves alone."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import optpipe

HEAVY = ("torch", "polars", "numpy", "onnx", "onnxruntime", "altair", "scipy", "msgspec", "rich")


def run(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return done.stdout


def test_importing_optpipe_imports_nothing_heavy() -> None:
    assert run(f"import sys, optpipe\nprint([n for n in {HEAVY!r} if n in sys.modules])") == "[]\n"


def test_the_pytest_plugin_imports_nothing_heavy() -> None:
    program = f"import sys, optpipe.api.pytest_plugin\nprint([n for n in {HEAVY!r} if n in sys.modules and n != 'rich'])"
    assert run(program) == "[]\n"


def test_every_public_name_is_declared_for_type_checkers_and_can_be_used() -> None:
    stub = Path(optpipe.__file__).with_suffix(".pyi")
    declared = {
        alias.asname
        for node in ast.parse(stub.read_text()).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert declared == set(optpipe.__all__)
    assert stub.with_name("py.typed").exists()
    for name in optpipe.__all__:
        assert (getattr(optpipe, name).__doc__ or "").strip(), name
    assert set(optpipe.__all__) <= set(dir(optpipe))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Models"):
        _ = optpipe.Models  # type: ignore[attr-defined]
