"""What a build refuses before anything is loaded or built, and how outputs at each batch size are compared."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.graphs import onnx_model

from optpipe.backends.inductor import Inductor
from optpipe.backends.inductor_packages import parse_static_batches
from optpipe.backends.onnxruntime import OnnxRuntime
from optpipe.backends.registry import BACKENDS
from optpipe.backends.torch_eager import TorchEager
from optpipe.build.build import build_model
from optpipe.build.candidates import order_cpu_builds, order_gpu_builds
from optpipe.build.choose import choose_build
from optpipe.build.plan import BuildPlan
from optpipe.build.verify import Trajectory, fill_batches, verify_session
from optpipe.core.card import card_from_dict
from optpipe.core.entries import ModelInfo, ReferenceInfo, weights_from_text
from optpipe.core.errors import BadInputError, MissingError
from optpipe.core.events import SilentListener
from optpipe.core.precision import Budget, Precision
from optpipe.models.export.exported import Model, Reference
from optpipe.models.sources.resolve import source_from_text
from optpipe.workspace.places import find_shipped_folder
from optpipe.workspace.store import Store

FP32_AND_INT8 = OnnxRuntime()


class Unloadable:
    """In place of a model that must not be touched."""

    def __getattr__(self, name):
        raise AssertionError(f"{name} of the model is read")


def test_precisions_that_no_backend_has_are_refused_at_once(tmp_path):
    plan = BuildPlan((Precision.FP16, Precision.BF16), (OnnxRuntime(),), named=True, device="cpu")
    with pytest.raises(MissingError) as refused:
        build_model(
            cast("Any", Unloadable()), plan, Store(tmp_path / "workspace"), SilentListener()
        )
    assert str(refused.value) == (
        "nothing can be built: onnxruntime has no fp16 kernels on cpu, only fp32, int8;"
        " onnxruntime has no bf16 kernels on cpu, only fp32, int8"
    )
    assert not (tmp_path / "workspace").exists()


def refuse(
    tmp_path,
    error,
    said,
    precision=Precision.FP32,
    source="digits",
    backend=FP32_AND_INT8,
    **changes,
):
    model = Model(source_from_text(source, {}), weights_from_text("default", 0))
    plan = BuildPlan((precision,), (backend,), named=True, device="cpu", **changes)
    store = Store(tmp_path / "workspace")
    with pytest.raises(error, match=said) as refused:
        build_model(model, plan, store, SilentListener())
    assert not list(store.list_entries(ModelInfo))
    return str(refused.value)


def test_a_budget_is_refused_where_the_whole_module_is_cast(tmp_path):
    said = "casts the whole PyTorch module to fp16, where --budget cannot keep layers"
    refuse(
        tmp_path,
        MissingError,
        said,
        Precision.FP16,
        backend=BACKENDS["torch"],
        budget=Budget(90, "dB"),
    )


CARD = """name = "flat"
source = "flat.onnx"
task = "{task}"

[[inputs]]
name = "image"
dtype = "float32"
min = [1, 3, 4, 4]
opt = [2, 3, 4, 4]
max = [8, 3, 4, 4]
"""


NEEDED = {
    "segmentation": "(n, classes, height, width)",
    "detection": "logits",
    "text-classification": "takes images",
}


@pytest.mark.parametrize(("task", "needed"), NEEDED.items())
def test_outputs_that_do_not_fit_the_task_are_refused(tmp_path, task, needed):
    shapes: Any = {"image": ["n", 3, 4, 4]}, {"logits": ["n", 48]}
    onnx_model([("Flatten", "image", "logits")], *shapes, path=tmp_path / "flat.onnx")
    (tmp_path / "flat.toml").write_text(CARD.format(task=task))
    refuse(tmp_path, BadInputError, needed, source=str(tmp_path / "flat.toml"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("calibration", "800 of 800 calibration images are also in the validation set"),
        ("images", "1 of 1 images cannot be read"),
    ],
)
def test_images_that_do_not_fit_are_refused_before_the_export(tmp_path, given, said):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.png").touch()
    data = {
        "images": tmp_path / "empty",
        "calibration": find_shipped_folder("calibration") / "digits/validation.json",
    }
    refuse(tmp_path, BadInputError, said, Precision.INT8, **{given: data[given]})


def test_auto_refuses_points_of_random_weights_before_the_export(tmp_path):
    model = Model(source_from_text("digits", {}), weights_from_text("random", 0))
    plan = BuildPlan((), (OnnxRuntime(),), named=True, device="cpu", budget=Budget(0.5, "points"))
    store = Store(tmp_path / "workspace")
    with pytest.raises(
        BadInputError, match=r"--budget 0\.5 ?points cannot be judged: the weights are random"
    ):
        choose_build(model, plan, "random", store, SilentListener())
    assert not list(store.list_entries(ModelInfo))


def test_auto_builds_on_a_gpu_only_what_may_win():
    """Wide types and eager code if FP16 is not enough, and ONNX Runtime's other types if TF32 is not hopeless."""
    compiled, bounded, eager = (Inductor(),), (OnnxRuntime(),), (TorchEager(),)
    on_gpu = BuildPlan(tuple(Precision), compiled + bounded + eager, named=True, device="cuda")
    wide, kinds = (
        (Precision.FP32, Precision.TF32, Precision.BF16),
        (Precision.FP16, Precision.INT8, Precision.FP8),
    )
    order = order_gpu_builds(on_gpu, named=False, has_module=True)
    (first,) = order.first
    assert (first.precisions, first.backends) == (kinds, compiled)
    assert [(plan.precisions, plan.backends) for plan in order.bounded] == [(kinds, bounded)]
    spared = {name: builds.plan for name, builds in order.spared.items()}
    assert {name: (plan.precisions, plan.backends) for name, plan in spared.items()} == {
        "": (wide, compiled + bounded + eager),
        "inductor": (kinds, eager),
    }

    order = order_gpu_builds(on_gpu, named=True, has_module=True)
    (first,) = order.first
    assert (first.backends, order.bounded) == (on_gpu.backends, ())
    assert order.spared.keys() == {""}

    # without a module there is no rival
    assert order_gpu_builds(on_gpu, named=False, has_module=False).bounded == ()
    alone = replace(on_gpu, precisions=wide, backends=eager)
    assert order_gpu_builds(alone, named=False, has_module=True).spared == {}


def test_auto_builds_on_a_cpu_last_what_may_be_ruled_out():
    """Compiled and 16-bit builds of torch, if nobody named the backends; every combination is in the order once."""
    others, of_torch = (OnnxRuntime(),), (Inductor(), TorchEager())
    plan = BuildPlan(tuple(Precision), others + of_torch, named=True, device="cpu")

    def list_pairs(plans):
        return [
            (one.name, kind) for each in plans for one in each.backends for kind in each.precisions
        ]

    order = order_cpu_builds(plan, named=False, has_module=True)
    compiled, narrow = order.doubtful
    assert {name for name, _ in list_pairs(compiled)} == {"inductor"}
    assert {kind for _, kind in list_pairs(narrow)} == {Precision.FP16, Precision.BF16}
    in_order = [*order.first, *compiled, *narrow]
    assert sorted(list_pairs(in_order)) == sorted(list_pairs([plan]))

    for asked in ({"named": True, "has_module": True}, {"named": False, "has_module": False}):
        assert order_cpu_builds(plan, **asked).first == (plan,)
    # without FP32 there is nothing to compare with
    half = replace(plan, precisions=(Precision.FP16,))
    assert order_cpu_builds(half, named=False, has_module=True).first == (half,)


DOUBLE = card_from_dict(
    {
        "name": "double",
        "source": "double.onnx",
        "inputs": [{"name": "x", "dtype": "float32", "min": [1, 3], "opt": [4, 3], "max": [16, 3]}],
        "outputs": [{"name": "y", "dtype": "float32", "shape": ["batch", 3]}],
    }
)


ABOUT = ReferenceInfo("tensors", 0, "", "test", ())


def make_reference(samples):
    rows = np.random.default_rng(samples).normal(size=(samples, 3)).astype(np.float32)
    return Reference({"x": rows}, {"y": 2 * rows})


def answer(inputs, wrong=()):
    """A session's outputs; the last row of a batch of a size in `wrong` is off."""
    outputs = 2 * inputs["x"]
    if len(outputs) in wrong:
        outputs[-1] += 1
    return {"y": outputs}


@given(st.integers(1, 9), st.sets(st.integers(1, 16), max_size=3))
def test_a_wrong_row_at_one_batch_size_fails_the_whole_artifact(samples, sizes):
    def verify(wrong):
        session = SimpleNamespace(run=lambda inputs: answer(inputs, wrong))
        return verify_session(session, DOUBLE, 1e-3, make_reference(samples), ABOUT, sorted(sizes))[
            0
        ]

    right = verify(())
    assert right.passed
    assert right.samples == samples
    for size in sizes:
        assert verify({size}).passed is False


@pytest.mark.parametrize(
    ("change", "agreement"), [("order", 1.0), ("one of four boxes", 0.75), ("every box", 0.0)]
)
def test_rows_that_the_graph_selects_are_compared_as_boxes(tmp_path, change, agreement):
    onnx_model(
        [("TopK", "x k", "found places", {"axis": 1})],
        {"x": ["batch", 4, 6]},
        {"found": ["batch", 4, 6]},
        k=np.array([4]),
        path=tmp_path / "graph.onnx",
    )
    place = {"name": "x", "dtype": "float32", "min": [1, 4, 6], "opt": [4, 4, 6], "max": [16, 4, 6]}
    output = {"name": "found", "dtype": "float32", "shape": ["batch", 4, 6]}
    card = card_from_dict(
        {"name": "d", "source": "d", "task": "detection", "inputs": [place], "outputs": [output]}
    )
    best = np.arange(4, 0, -1)[:, None]
    boxes = np.hstack(
        [best * 20, best * 20, best * 20 + 9, best * 20 + 9, best / 5 + 0.1, best]
    ).astype(np.float32)
    moved = {"order": 0, "one of four boxes": 1, "every box": 4}[change]

    def answer_in_another_order(inputs):
        found = inputs["x"].copy()
        found[:, :moved, :4] += 200
        return {"found": found[:, ::-1]}

    reference = Reference({"x": np.stack([boxes] * 5)}, {"found": np.stack([boxes] * 5)})
    session = SimpleNamespace(run=answer_in_another_order)
    info, rows = verify_session(session, card, 0.3, reference, ABOUT, graph=tmp_path / "graph.onnx")
    assert info.box_agreement == pytest.approx(agreement)
    assert (info.passed, info.snr_db) == (agreement > 0.7, None)
    assert (info.selected, info.outputs, rows) == (("found",), (), {})


@given(st.integers(1, 9), st.integers(1, 16))
def test_samples_are_repeated_as_whole_until_they_fill_batches(samples, size):
    filled = fill_batches(make_reference(samples), size)
    assert len(filled.inputs["x"]) % size == 0
    assert len(filled.inputs["x"]) % samples == 0
    np.testing.assert_array_equal(2 * filled.inputs["x"], filled.outputs["y"])


@given(
    st.integers(1, 9), st.integers(1, 40), st.floats(-2, 2), st.sampled_from(("float32", "int64"))
)
def test_a_trajectory_ends_where_its_steps_lead(samples, steps, rate, kind):
    time = {"name": "t", "dtype": kind, "min": [1], "opt": [4], "max": [16]}
    card = card_from_dict({**DOUBLE.to_dict(), "inputs": [*DOUBLE.to_dict()["inputs"], time]})
    start, seen = make_reference(samples).inputs["x"], []

    def move(inputs):
        seen.append(inputs["t"][0])
        return {"y": np.float32(rate) * inputs["x"]}

    rows = {"x": start, "t": np.zeros(samples, kind)}
    trajectory = Trajectory(steps, "x", "y", "t", 1000.0, card, rows, Path())
    found = trajectory.run(SimpleNamespace(run=move))
    np.testing.assert_allclose(found, start * (1 - rate / steps) ** steps, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(
        seen, 1000 * (1 - np.arange(steps) / steps), atol=0.5 if kind == "int64" else 1e-3
    )


@pytest.mark.parametrize(
    ("text", "sizes"), [("", ()), ("none", ()), ("64,1", (1, 64)), (" 8, 8", (8,))]
)
def test_static_batches_are_read_in_any_order(text, sizes):
    assert parse_static_batches(text) == sizes


@pytest.mark.parametrize("text", ["0", "1,x", "-4", "1.5"])
def test_what_is_no_batch_size_is_refused(text):
    with pytest.raises(BadInputError, match="is not a batch size; example: 1,64"):
        parse_static_batches(text)
