"""On a real GPU: calibration in its memory, captured requests, AOTInductor's single batch sizes, and cuDNN's fused convolutions."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.fakes.entries import artifact_info
from tests.fakes.fp8_models import VIT, draw, make_request
from tests.fakes.graphs import onnx_model

from optpipe.backends.inductor import Inductor
from optpipe.backends.inductor_packages import GENERAL, name_static_package
from optpipe.core.card import TensorSpec
from optpipe.core.entries import ArtifactInfo, WeightsRecord
from optpipe.core.errors import BadInputError, StageError
from optpipe.core.precision import Precision, prove_precision
from optpipe.deploy.session_process import CapturedSession, can_capture
from optpipe.quantize.ranges import METHODS, Collector, compute_range

X = np.random.default_rng(0).standard_normal((24, 16, 32, 32)).astype(np.float32)
TENSORS = ("x", "r", "c")


def collect(collector, batches):
    for each in batches:
        collector.add(each)
    return collector.statistics()


@pytest.fixture
def graph(tmp_path):
    weight = np.random.default_rng(1).standard_normal((32, 16, 3, 3)).astype(np.float32) / 12
    nodes = [
        ("Conv", "x w", "c", {"name": "conv", "pads": [1, 1, 1, 1]}),
        ("Relu", "c", "r", {"name": "relu"}),
        ("GlobalAveragePool", "r", "y", {"name": "pool"}),
    ]
    shapes = {"x": ["n", 16, 32, 32]}, {"y": ["n", 32, 1, 1]}
    onnx_model(nodes, *shapes, path=tmp_path / "m.onnx", w=weight)
    return tmp_path / "m.onnx"


def test_statistics_are_those_of_the_cpu(graph) -> None:
    parts = [{"x": X[:10]}, {"x": X[10:]}]
    on_gpu, on_cpu = (
        collect(Collector(graph, TENSORS, histograms=True, device=device), parts)
        for device in ("cuda", "cpu")
    )
    assert np.array_equal(on_gpu["x"].counts, on_cpu["x"].counts)
    for name in TENSORS:
        assert on_gpu[name].counts.sum() == on_cpu[name].counts.sum()
        assert on_gpu[name].low == pytest.approx(on_cpu[name].low, rel=1e-4, abs=1e-5)
        assert on_gpu[name].high == pytest.approx(on_cpu[name].high, rel=1e-4)
    for method in METHODS:
        gpu, cpu = (
            {name: compute_range(each, method) for name, each in seen.items()}
            for seen in (on_gpu, on_cpu)
        )
        assert gpu == pytest.approx(cpu, rel=0.02)


def test_what_is_not_finite_is_named(graph) -> None:
    poisoned = X.copy()
    poisoned[3, 0, 0, 0] = np.nan
    with pytest.raises(StageError, match="tensor 'x' contains NaN or Inf"):
        Collector(graph, TENSORS, histograms=True, device="cuda").add({"x": poisoned})


def test_captured_batches_are_those_of_the_session():

    from optpipe.backends.torch_session import TorchSession

    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 3).cuda().eval()
    tensors = {
        "inputs": [TensorSpec("x", "float32", ("batch", 8)).to_dict()],
        "outputs": [TensorSpec("y", "float32", ("batch", 3)).to_dict()],
    }
    info = artifact_info(backend="torch", device="cuda", details=tensors)
    session = TorchSession(lambda given: (layer(given).relu(),), info, {"cuda_graph": True})
    assert can_capture(session)
    captured, draw = CapturedSession(session, 12), np.random.default_rng(0)
    for sizes in ([1], [3], [2, 5], [12], [1, 1, 1]):
        requests = [{"x": draw.standard_normal((size, 8), np.float32)} for size in sizes]
        whole = session.run({"x": np.concatenate([each["x"] for each in requests])})["y"]
        np.testing.assert_allclose(captured.run(requests)["y"], whole, rtol=1e-5, atol=1e-6)
    with pytest.raises(BadInputError, match="13 samples exceed the largest batch, 12"):
        captured.run([{"x": np.zeros((13, 8), np.float32)}])
    with pytest.raises(BadInputError, match=r"input 'x' is \[1, 1\]"):
        captured.run([{"x": np.zeros((1, 1), np.float32)}])


def test_code_for_single_batch_sizes_gives_the_same_outputs_and_stays_where_it_is_faster(tmp_path):
    wanted = replace(
        make_request(VIT, tmp_path, "cuda"),
        precision=Precision.FP16,
        options={"static_batches": "1,8"},
    )
    built = Inductor().build(wanted)
    kept = built.details["static_batches"]
    assert {each.name for each in wanted.directory.glob("*.pt2")} == {
        GENERAL,
        *map(name_static_package, kept),
    }
    assert [f"batch {size} runs" in "; ".join(built.remarks) for size in (1, 8)] == [
        size not in kept for size in (1, 8)
    ]
    info = ArtifactInfo(
        wanted.card.name,
        wanted.card.source,
        "inductor",
        Precision.FP16,
        "cuda",
        GENERAL,
        WeightsRecord("random", ""),
        prove_precision(Precision.FP16, built.layers),
        options=built.options,
        details=built.details,
    )
    general = replace(info, details={**built.details, "static_batches": []})
    rows = np.concatenate([draw(wanted.card.inputs[0]).numpy()] * 8)[:8]
    name = wanted.card.inputs[0].name
    with (
        Inductor().load(wanted.directory, info, {}) as own,
        Inductor().load(wanted.directory, general, {}) as all_sizes,
    ):
        for size in (1, 8, 3):
            found, expected = ({**each.run({name: rows[:size]})} for each in (own, all_sizes))
            for output, values in expected.items():
                np.testing.assert_allclose(found[output], values, atol=0.02 * np.abs(values).max())
