"""Operators whose meaning or form changed between opsets: every version of a file gives what the file gives."""

import numpy as np
import onnx
import pytest
from tests.fakes.bare import measure_snr, run_bare
from tests.fakes.graphs import onnx_model

from optpipe.backends.onnxruntime import OnnxRuntime
from optpipe.backends.rewrites import RewriteGuard
from optpipe.build.build import build_model
from optpipe.build.plan import BuildPlan
from optpipe.core.entries import WeightsRequest
from optpipe.core.errors import BadInputError
from optpipe.core.events import SilentListener
from optpipe.core.precision import Precision
from optpipe.models.export import source_graph
from optpipe.models.export.exported import (
    Model,
    compute_reference,
    export_model,
    reference_from_file,
)
from optpipe.models.export.opsets import raise_opset
from optpipe.models.sources.onnx_file import OnnxFileSource
from optpipe.quantize.precision_graph import convert_to_precision
from optpipe.workspace.file_names import ONNX, REFERENCE
from optpipe.workspace.store import Store

RANDOM = np.random.default_rng(0)
NEWEST = 26
"""The newest that ONNX Runtime runs."""
X = {"x": [2, 4, 8, 8]}
ANY = {"y": [None] * 4}


def normal(*shape):
    return RANDOM.standard_normal(shape).astype(np.float32)


FEEDS = {"x": normal(2, 4, 8, 8)}


def resize(opset, mode, scale, given="x", made="y"):
    """The nodes and constants that enlarge or shrink the last two axes, as exporters of that opset wrote them."""
    scales = np.array([1, 1, scale, scale], np.float32)
    if opset < 9:
        return [("Upsample", given, made, {"mode": mode, "scales": scales.tolist()})], {}
    operator = "Upsample" if opset == 9 else "Resize"
    if opset < 11:
        return [(operator, [given, "scales"], [made], {"mode": mode})], {"scales": scales}
    names = [given, "roi" if opset < 13 else "", "scales"]
    empty = {"roi": np.array([], np.float32)} if opset < 13 else {}
    return [("Resize", names, [made], {"mode": mode})], {"scales": scales, **empty}


def by_attribute(operator, changed, attributes, constants):
    """A node that takes `attributes` before opset `changed`, and `constants` as inputs from then on."""

    def make(opset):
        if opset < changed:
            return [(operator, "x", "y", attributes)], {}
        inputs = ["x", *constants]
        rest = {name: value for name, value in attributes.items() if name in ("mode", "keepdims")}
        return [(operator, inputs, ["y"], rest)], constants

    return make


def constant(*nodes, **constants):
    return lambda _: (list(nodes), constants)


SCALES = {"a": normal(4), "b": normal(4), "m": normal(4), "v": np.abs(normal(4)) + 0.5}
PADS = [0, 0, 1, 2, 0, 0, 0, 1]
CASES = {
    **{
        f"Resize {mode} {scale}": lambda opset, mode=mode, scale=scale: resize(opset, mode, scale)
        for mode in ("nearest", "linear")
        for scale in (2.0, 1.5, 2.7, 0.5, 0.4)
    },
    "Pad": by_attribute("Pad", 11, {"pads": PADS, "mode": "reflect"}, {"p": np.array(PADS)}),
    "Slice": by_attribute(
        "Slice",
        10,
        {"starts": [1, -3], "ends": [3, 9999], "axes": [1, 3]},
        {"s": np.array([1, -3]), "e": np.array([3, 9999]), "a": np.array([1, 3])},
    ),
    "BatchNormalization": constant(
        ("BatchNormalization", "x a b m v", "y", {"epsilon": 1e-3}), **SCALES
    ),
    "Dropout": constant(("Dropout", "x", "y")),
    "Clip": by_attribute(
        "Clip", 11, {"min": -0.3, "max": 0.6}, {"l": np.float32(-0.3), "h": np.float32(0.6)}
    ),
    **{
        f"{operator} {axis}": constant((operator, "x", "y", {} if axis is None else {"axis": axis}))
        for operator in ("Softmax", "LogSoftmax", "Hardmax")
        for axis in (None, 0, 1, 2, 3, -1, -2)
    },
    "Squeeze": lambda opset: (
        [("Unsqueeze", "x", "z", {"axes": [0]}), ("Squeeze", "z", "y", {"axes": [0]})]
        if opset < 13
        else [("Unsqueeze", "x a", "z"), ("Squeeze", "z a", "y")],
        {} if opset < 13 else {"a": np.array([0])},
    ),
    "ReduceSum": by_attribute(
        "ReduceSum", 13, {"axes": [1, 2], "keepdims": 1}, {"a": np.array([1, 2])}
    ),
    **{
        operator: by_attribute(
            operator, 18, {"axes": [1, 2], "keepdims": 1}, {"a": np.array([1, 2])}
        )
        for operator in ("ReduceMean", "ReduceMax", "ReduceL2", "ReduceLogSumExp")
    },
    "GroupNormalization": lambda opset: (
        [("GroupNormalization", "x s t", "y", {"num_groups": 2})],
        {"s": SCALES["a"][: 2 if opset < 21 else 4], "t": SCALES["b"][: 2 if opset < 21 else 4]},
    ),
}
NOT_RUN = {  # ONNX Runtime has no kernel that shrinks in Upsample
    (case, opset) for case in CASES if " 0." in case for opset in (7, 8, 9)
} | {("GroupNormalization", opset) for opset in range(7, 18)}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_raised_opset_means_the_same(case) -> None:
    for opset in range(7, NEWEST):
        if (case, opset) in NOT_RUN:
            continue
        nodes, constants = CASES[case](opset)
        model = onnx_model(nodes, X, ANY, opset=opset, **constants)
        expected = run_bare(model, FEEDS)["y"]
        for least in (13, 19, 22):
            found = run_bare(raise_opset(model, least), FEEDS)["y"]
            assert measure_snr(expected, found) > 100, (opset, least)


def segmenter(path, opset, mode="linear", scale=2.0):
    """A convolution, an enlargement, a convolution; images of 16 channels."""
    nodes, constants = resize(opset, mode, scale, "c", "u")
    chain = [
        ("Conv", "x w1", "c", {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}),
        *nodes,
        ("Conv", "u w2", "y", {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}),
    ]
    weights = np.random.default_rng(3)
    constants["w1"] = weights.standard_normal((16, 16, 3, 3)).astype(np.float32)
    constants["w2"] = weights.standard_normal((16, 16, 3, 3)).astype(np.float32)
    outputs = {"y": ["N", 16, None, None]}
    onnx_model(chain, {"x": ["N", 16, 8, 8]}, outputs, path=path, opset=opset, **constants)
    return path


OLD = [
    (opset, mode, scale)
    for opset in (7, 8, 9, 10)
    for mode in ("linear", "nearest")
    for scale in (2.0, 1.5)
]


@pytest.mark.slow
@pytest.mark.parametrize(("opset", "mode", "scale"), OLD)
def test_an_old_enlargement_is_as_exact_in_int8_and_fp16_as_a_new_one(
    tmp_path, opset, mode, scale
) -> None:
    path = segmenter(tmp_path / "net.onnx", opset, mode, scale)
    images = np.random.default_rng(1).standard_normal((24, 16, 8, 8)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=images)
    model, store = Model(OnnxFileSource(path), WeightsRequest()), Store(tmp_path / ".optpipe")
    plan = BuildPlan(
        (Precision.FP32, Precision.INT8),
        (OnnxRuntime(),),
        named=True,
        device="cpu",
        calibration=tmp_path / "data.npz",
    )
    built = build_model(model, plan, store, SilentListener())
    assert not built.failed
    snrs = [each.verification.info.snr_db for each in built.artifacts]
    assert snrs[0] is None or snrs[0] > 100
    assert snrs[1] > 30

    found, _ = compute_reference(model, built.model, tmp_path / "data.npz", store, SilentListener())
    graph, _ = convert_to_precision(
        Precision.FP16, "cuda", built.model, found, None, store, SilentListener()
    )
    tensors = reference_from_file(found.file(REFERENCE))
    expected = run_bare(path, tensors.inputs)["y"]
    assert measure_snr(expected, tensors.outputs["y"]) > 140
    assert measure_snr(expected, run_bare(graph.file(ONNX), tensors.inputs)["y"]) > 50


def test_an_opset_that_cannot_be_raised_is_named_and_fp32_is_built(tmp_path, monkeypatch) -> None:
    path = segmenter(tmp_path / "net.onnx", 10)
    monkeypatch.setattr(source_graph, "raise_opset", onnx.version_converter.convert_version)
    model, store = Model(OnnxFileSource(path), WeightsRequest()), Store(tmp_path / ".optpipe")
    listener = SilentListener()
    entry, _ = export_model(model, store, listener)
    found, _ = compute_reference(model, entry, None, store, listener)
    assert [each for each in listener.warnings if "of Resize" in each]
    with pytest.raises(BadInputError, match=r"fp16: raising the opset.*\n.*export the model"):
        convert_to_precision(Precision.FP16, "cuda", entry, found, None, store, listener)


def test_a_rewrite_that_only_reorders_sums_is_accepted() -> None:
    """Sums that cancel lose more than 100 dB by their order alone."""
    large = normal(8, 256) * 1e4
    weights = np.concatenate([large, -large + 1e-3 * normal(8, 256)]).astype(np.float32)
    model = onnx_model([("MatMul", "x w", "y")], {"x": [4, 16]}, {"y": [4, 256]}, w=weights)
    row = normal(4, 8)
    guard = RewriteGuard([{"x": np.concatenate([row, row], axis=1)}])

    def split(graph):
        halves = {
            "w1": weights[::2],
            "w2": weights[1::2],
            "one": np.arange(0, 16, 2),
            "two": np.arange(1, 16, 2),
        }
        nodes = [
            ("Gather", "x one", "a", {"axis": 1}),
            ("Gather", "x two", "b", {"axis": 1}),
            ("MatMul", "a w1", "p"),
            ("MatMul", "b w2", "q"),
            ("Add", "p q", "y"),
        ]
        return onnx_model(nodes, {"x": [4, 16]}, {"y": [4, 256]}, **halves)

    rewritten, difference = guard.apply(model, split)
    assert difference is None
    assert rewritten is not model


def test_a_rewrite_that_changes_nothing_runs_nothing(monkeypatch) -> None:
    model = onnx_model([("Neg", "x", "y")], {"x": [4]}, {"y": [4]})
    guard = RewriteGuard([{"x": normal(4)}])
    monkeypatch.setattr(RewriteGuard, "run", lambda *_: pytest.fail("it ran"))
    assert guard.apply(model, lambda graph: graph) == (model, None)
