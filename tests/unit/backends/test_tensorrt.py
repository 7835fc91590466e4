"""TensorRT without a GPU: its options, and what TensorRT-RTX's own parser makes of a graph."""

import ast
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.entries import artifact_info
from tests.fakes.graphs import onnx_model
from tests.fakes.tensorrt_api.build_case import SPEC

import optpipe.backends
from optpipe.backends.base import BuildRequest
from optpipe.backends.onnx_graph import load_onnx
from optpipe.backends.registry import BACKENDS, find_missing_release
from optpipe.backends.tensorrt import TENSORRT_RTX, _find_stripped_weights
from optpipe.backends.tensorrt_engine import (
    choose_profile,
    describe_in_key,
    list_profile_shapes,
    options_from_given,
    write_timing_cache,
)
from optpipe.backends.tensorrt_layers import layers_from_network
from optpipe.core.card import InputSpec, ModelCard, Task, batch_ranges_from_text
from optpipe.core.errors import BadInputError, MissingError, StageError
from optpipe.core.files import hash_file
from optpipe.core.precision import Precision, prove_precision

RANGES = st.lists(st.integers(1, 256), min_size=3, max_size=3).map(sorted).map(tuple)


@pytest.fixture
def library():
    return pytest.importorskip("tensorrt_rtx", reason="needs the wheel tensorrt-rtx-cu13")


def request_for(folder, spec=SPEC, precision=Precision.FP32, **options):
    card = ModelCard("net", "net.onnx", Task.OTHER, (spec,))
    return BuildRequest(card, precision, folder / "model.onnx", None, "cuda", options, folder)


# options


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=list(BACKENDS))
def test_every_option_is_described_and_has_its_own_default(backend) -> None:
    for device in backend.devices():
        options = backend.describe_options(device)
        assert len({each.name for each in options}) == len(options)
        assert {
            each.name: each.default for each in options if not each.builds
        } == backend.runtime_options(device)
        assert all(each.help and not each.help.endswith(".") for each in options)
        assert all(each.default in each.choices for each in options if each.choices)


def test_options_at_their_defaults_rename_no_artifact() -> None:
    defaults = {"workspace_bytes": 0, "optimization_level": -1}
    assert describe_in_key(options_from_given({}, "tensorrt", "tensorrt")) == defaults
    assert describe_in_key(options_from_given({"profiles": ""}, "tensorrt", "tensorrt")) == defaults


@given(st.lists(RANGES, min_size=1, max_size=4), st.integers(1, 300))
def test_a_shape_runs_in_a_profile_that_holds_it(ranges, size) -> None:
    low, usual, high = (
        min(each[0] for each in ranges),
        ranges[0][1],
        max(each[2] for each in ranges),
    )
    text = ",".join(":".join(map(str, each)) for each in ranges)
    assert batch_ranges_from_text(text) == tuple(ranges)
    shapes = list_profile_shapes(
        {"profiles": text}, (InputSpec("x", "float32", (low, 3), (usual, 3), (high, 3)),)
    )
    assert [(each.min[0], each.opt[0], each.max[0]) for (each,) in shapes] == list(ranges)
    chosen = choose_profile(
        [{"x": tuple((edge, 3) for edge in each)} for each in ranges], {"x": (size, 3)}
    )
    holding = [index for index, (low, _, high) in enumerate(ranges) if low <= size <= high]
    assert (chosen in holding) if holding else chosen is None
    exact = [index for index in holding if ranges[index][1] == size]
    assert not exact or ranges[chosen][1] == size, (
        "where one is tuned for just this size, it is taken"
    )


# the layers of a network that TensorRT-RTX parsed


@pytest.mark.parametrize(("op", "gates"), [("LSTM", 4), ("GRU", 3), ("RNN", 1)])
@pytest.mark.parametrize("directions", [1, 2])
def test_the_products_of_a_recurrent_node_are_its_own(
    tmp_path, library, op, gates, directions
) -> None:
    """x (5 steps, batch, 6) through one recurrent node of 4 hidden values, and a product behind it."""
    shapes = {"w": (directions, gates * 4, 6), "r": (directions, gates * 4, 4), "m": (4, 3)}
    how = {"hidden_size": 4, "direction": "bidirectional" if directions == 2 else "forward"}
    onnx_model(
        [(op, "x w r", "all last", how), ("MatMul", "last m", "y")],
        {"x": [5, "batch", 6]},
        {"y": [directions, "batch", 3]},
        path=tmp_path / "model.onnx",
        **{name: np.ones(shape, np.float32) / 9 for name, shape in shapes.items()},
    )
    logger = library.Logger(library.Logger.ERROR)
    network = library.Builder(logger).create_network(
        1 << int(library.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    )
    assert library.OnnxParser(network, logger).parse_from_file(str(tmp_path / "model.onnx"))
    spec = InputSpec("x", "float32", (5, 1, 6), (5, 2, 6), (5, 4, 6), batch=1)
    layers = layers_from_network(
        library, network, load_onnx(tmp_path / "model.onnx"), request_for(tmp_path, spec)
    )
    assert prove_precision(Precision.FP32, layers).proven
    products = directions * 2 * 4 * 3
    assert sum(each.macs for each in layers) == 5 * 2 * directions * gates * 4 * (6 + 4) + products


def test_an_asymmetric_graph_is_refused_with_a_way_out_in_two_lines(tmp_path, library) -> None:
    onnx_model(
        [("QuantizeLinear", "x scale zero", "q"), ("DequantizeLinear", "q scale zero", "y")],
        {"x": [4, 8]},
        {"y": [4, 8]},
        path=tmp_path / "model.onnx",
        scale=np.float32(0.1),
        zero=np.int8(3),
    )
    request = request_for(
        tmp_path, InputSpec("x", "float32", (4, 8), (4, 8), (4, 8)), Precision.INT8
    )
    with pytest.raises(StageError) as refused:
        TENSORRT_RTX.build(request)
    problem, way_out = str(refused.value).splitlines()
    assert "QuantizeLinear (q): its zero point" in problem
    assert "--backend onnxruntime" in way_out


# the names that a session uses exist in TensorRT 11: without a GPU no test calls them (those of a build are called)

SOURCES = ("tensorrt.py", "tensorrt_engine.py", "tensorrt_engine.py")
OURS = {
    "name", "library", "package", "install", "ahead_of_time", "first_error", "precision", "card", "inputs", "graph", "directory",
    "options", "outputs", "device", "dtype", "shape", "macs", "type", "node", "min", "opt", "max", "glob", "parent", "read_bytes",
}  # fmt: skip
LIBRARY_OBJECTS = {
    "trt", "engine", "runtime", "builder", "network", "parser", "config", "profile", "layer", "data", "context",
    "_engine", "_context", "_runtime",
}  # fmt: skip
RTX_ONLY = {"ComputeCapability", "num_compute_capabilities", "set_compute_capability"}


def names_used():
    """Attributes that our code takes of TensorRT's objects, found by the variables that hold them."""
    found = set()
    for source in SOURCES:
        tree = ast.parse((Path(optpipe.backends.__path__[0]) / source).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                names = {
                    getattr(part, "attr", None) or getattr(part, "id", None)
                    for part in ast.walk(node.value)
                }
                if names & LIBRARY_OBJECTS:
                    found.add(node.attr)
    return {
        name
        for name in found - OURS - LIBRARY_OBJECTS
        if not name.startswith("__") and not hasattr(str, name)
    }


@pytest.fixture
def bindings():
    """The library of the wheel tensorrt-cu13-bindings."""
    try:
        files = metadata.files("tensorrt-cu13-bindings") or []
    except metadata.PackageNotFoundError:
        files = []
    found = [
        Path(str(file.locate()))
        for file in files
        if file.suffix == ".so" and "tensorrt" in file.name
    ]
    if not found:
        pytest.skip("the wheel tensorrt-cu13-bindings is not installed for this Python")
    return found[0].read_bytes()


def test_every_name_that_we_use_exists_in_tensorrt_11_and_none_that_it_removed(bindings) -> None:
    used = names_used()
    assert {"create_engine_inspector", "get_engine_information", "deserialize_cuda_engine"} <= used
    assert {
        "build_serialized_network",
        "parse_from_file",
        "execute_async_v3",
        "set_shape",
        "set_input_shape",
    } <= used
    # the linker lets "Builder" share the end of "IBuilder", so only the end of a name is certain
    assert sorted(name for name in used - RTX_ONLY if name.encode() + b"\0" not in bindings) == []
    removed = (b"int8_calibrator", b"build_engine", b"execute_async_v2")
    assert [name for name in removed if name + b"\0" in bindings] == []


def test_what_only_tensorrt_rtx_has_exists_there(library) -> None:
    assert names_used() >= RTX_ONLY
    assert set(dir(library)) | set(dir(library.IBuilderConfig)) >= RTX_ONLY


def test_an_unsupported_operator_is_one_reason() -> None:
    from optpipe.backends.tensorrt_refusals import list_parser_reasons

    plugin = "Assertion failed: creator && Plugin not found"
    errors = [
        ("Det", "a", plugin),
        ("Det", "b", plugin),
        ("Det", "b", plugin),
        ("Det", "a", "Assertion failed: convert(ctx, node)"),
        ("Unique", "c", plugin),
    ]
    assert list_parser_reasons(errors) == [f"Det (a and 1 more): {plugin}", f"Unique (c): {plugin}"]


# the timing cache: the library's is a set of words here

MARK = b"ptrtd\0\0\0"


class Cache:
    """As TensorRT's ITimingCache: it combines with one of the same GPU, and refuses another's."""

    def __init__(self, content):
        self.gpu, *words = content.removeprefix(MARK).decode().split()
        self.words = set(words)

    def serialize(self):
        return MARK + " ".join([self.gpu, *sorted(self.words)]).encode()

    def combine(self, other, ignore_mismatch):
        assert not ignore_mismatch
        if other.gpu != self.gpu:
            return False
        self.words |= other.words
        return True


def make_config(gpu, *words):
    cache = Cache(MARK + " ".join([gpu, *words]).encode())
    return SimpleNamespace(create_timing_cache=Cache, get_timing_cache=lambda: cache)


def test_builds_at_once_lose_no_timings_and_another_gpus_change_none(tmp_path):
    file = tmp_path / "timings"
    with ThreadPoolExecutor(8) as pool:
        configs = [make_config("h200", f"kernel{number}") for number in range(40)]
        assert {*pool.map(lambda each: write_timing_cache(each, file), configs)} == {""}
    before = file.read_bytes()
    assert Cache(before).words == {f"kernel{number}" for number in range(40)}
    assert "of another GPU" in write_timing_cache(make_config("l40s", "two"), file)
    assert file.read_bytes() == before


# engines that need more than their file


def describe_stripped(graph):
    return {
        "builder": {"strip_plan": True},
        "weights": {"graph": graph.parent.name, "sha256": hash_file(graph)},
    }


@pytest.mark.parametrize("state", ["here", "changed", "gone", "led out"])
def test_the_weights_of_a_stripped_engine_are_those_that_it_was_built_from(tmp_path, state):
    graph = tmp_path / "store" / "graph-1" / "model.onnx"
    engine = tmp_path / "store" / "artifact-1"
    for folder in (graph.parent, engine):
        folder.mkdir(parents=True)
    graph.write_bytes(b"weights")
    info = artifact_info(backend="tensorrt", details=describe_stripped(graph))
    if state == "here":
        assert _find_stripped_weights(engine, info) == graph
        assert _find_stripped_weights(engine, artifact_info()) is None
        return
    if state == "changed":
        graph.write_bytes(b"others")
    if state == "gone":
        graph.unlink()
    if state == "led out":
        info.details["weights"]["graph"] = "../store/graph-1"
    with pytest.raises(StageError if state == "changed" else MissingError, match="build it again"):
        _find_stripped_weights(engine, info)


@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt-rtx"])
def test_what_no_server_can_load_is_refused_by_deploy_alone(tmp_path, backend):
    stripped = artifact_info(backend=backend, details={"builder": {"strip_plan": True}})
    with pytest.raises(BadInputError, match="build it without strip_plan"):
        BACKENDS[backend].serving(stripped, {}, "11.4")
    assert find_missing_release(stripped, "11.4") is None
    plugged = artifact_info(backend=backend, more_files=("plugin-0-a.so",))
    if backend == "tensorrt-rtx":
        assert BACKENDS[backend].serving(plugged, {}, "1.7").own_session
    else:
        with pytest.raises(BadInputError, match="build it without plugins"):
            BACKENDS[backend].serving(plugged, {}, "11.4")
    assert BACKENDS[backend].list_files(plugged) == ("model.engine", "plugin-0-a.so")


def test_options_at_their_defaults_rename_no_artifact_and_a_plugin_counts_by_its_bytes(tmp_path):
    def describe(**given):
        return describe_in_key(options_from_given(given, "tensorrt", "tensorrt"))

    assert describe(sparse_weights="false", plugins="") == {
        "workspace_bytes": 0,
        "optimization_level": -1,
    }
    for folder, content in (("a", b"one"), ("b", b"one"), ("c", b"two")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "plugin.so").write_bytes(content)
    keys = [describe(plugins=str(tmp_path / folder / "plugin.so")) for folder in "abc"]
    assert keys[0] == keys[1] != keys[2]
