"""The names that a session uses exist in TensorRT 11: without a GPU no test calls them (those of a build are called)."""

import ast
from importlib import metadata
from pathlib import Path

import pytest

import optpipe.backends

SOURCES = ("tensorrt.py", "tensorrt_builder.py", "tensorrt_session.py")
OURS = {
    "name", "library", "package", "install", "ahead_of_time", "first_error", "precision", "card", "inputs", "graph", "directory",
    "options", "outputs", "device", "dtype", "shape", "macs", "type", "node", "min", "opt", "max", "glob", "parent", "read_bytes",
}  # fmt: skip
LIBRARY_OBJECTS = {
    "trt", "engine", "runtime", "builder", "network", "parser", "config", "profile", "layer", "data", "context",
    "_engine", "_context", "_runtime",
}  # fmt: skip


def names_used() -> set[str]:
    """Attributes that our code takes of TensorRT's objects, found by the variables that hold them."""
    found = set()
    for source in SOURCES:
        tree = ast.parse((Path(optpipe.backends.__path__[0]) / source).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                holder = node.value
                names = {getattr(part, "attr", None) or getattr(part, "id", None) for part in ast.walk(holder)}
                if names & LIBRARY_OBJECTS:
                    found.add(node.attr)
    return {name for name in found - OURS - LIBRARY_OBJECTS if not name.startswith("__") and not hasattr(str, name)}


RTX_ONLY = {
    "ComputeCapability",
    "num_compute_capabilities",
    "set_compute_capability",
    "create_runtime_cache",
    "set_runtime_cache",
}
"""Of TensorRT-RTX, reached only where it is the library."""


def bindings_binary() -> bytes:
    try:
        files = metadata.files("tensorrt-cu13-bindings") or []
    except metadata.PackageNotFoundError:
        pytest.skip("the wheel tensorrt-cu13-bindings is not installed")
    library = next(
        (Path(str(file.locate())) for file in files if file.suffix == ".so" and "tensorrt" in file.name), None
    )
    if library is None:
        pytest.skip("the wheel tensorrt-cu13-bindings has no shared object for this Python")
    return library.read_bytes()


def test_every_name_that_we_use_exists_in_tensorrt_11() -> None:
    binary = bindings_binary()
    used = names_used()
    assert {"create_engine_inspector", "get_engine_information", "deserialize_cuda_engine"} <= used
    assert {"build_serialized_network", "parse_from_file", "execute_async_v3", "set_shape", "set_input_shape"} <= used
    # the linker lets "Builder" share the end of "IBuilder", so only the end of a name is certain
    assert sorted(name for name in used - RTX_ONLY if name.encode() + b"\0" not in binary) == []


def test_what_only_tensorrt_rtx_has_exists_there() -> None:
    trt = pytest.importorskip("tensorrt_rtx", reason="needs the wheel tensorrt-rtx-cu13")
    assert names_used() >= RTX_ONLY
    assert set(dir(trt)) | set(dir(trt.IBuilderConfig)) | set(dir(trt.IRuntimeConfig)) >= RTX_ONLY


def test_names_that_tensorrt_11_removed_are_not_found() -> None:
    binary = bindings_binary()
    assert [name for name in (b"int8_calibrator", b"build_engine", b"execute_async_v2") if name + b"\0" in binary] == []
