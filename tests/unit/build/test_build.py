"""What a build refuses before anything is loaded, or before anything is built."""

from dataclasses import replace
from typing import Any, cast

import pytest
from tests.fakes.graphs import onnx_model

from optpipe.backends.onnxruntime import OnnxRuntime
from optpipe.backends.registry import BACKENDS
from optpipe.build.build import BuildPlan, build_model
from optpipe.build.choose import ChoicePlan, choose_build
from optpipe.core.entries import ModelInfo, weights_from_text
from optpipe.core.errors import BadInputError, MissingError
from optpipe.core.events import SilentListener
from optpipe.core.precision import Budget, Precision
from optpipe.models.export.model import Model
from optpipe.models.sources.resolve import source_from_text
from optpipe.workspace.places import find_shipped_folder
from optpipe.workspace.store import Store


class Unloadable:
    """In place of a model that must not be touched."""

    def __getattr__(self, name):
        raise AssertionError(f"{name} of the model is read")


def test_precisions_that_no_backend_has_are_refused_at_once(tmp_path):
    plan = BuildPlan((Precision.FP16, Precision.BF16), (OnnxRuntime(),), named=True, device="cpu")
    with pytest.raises(MissingError) as refused:
        build_model(cast("Any", Unloadable()), plan, Store(tmp_path / "workspace"), SilentListener())
    assert str(refused.value) == (
        "nothing can be built: onnxruntime has no fp16 kernels on cpu, only fp32, int8;"
        " onnxruntime has no bf16 kernels on cpu, only fp32, int8"
    )
    assert not (tmp_path / "workspace").exists()


def test_a_budget_is_refused_where_the_whole_module_is_cast(tmp_path):
    model = Model(source_from_text("digits", {}), weights_from_text("default", 0), None)
    plan = BuildPlan((Precision.FP16,), (BACKENDS["torch"],), named=True, device="cpu", budget=Budget(90, "dB"))
    with pytest.raises(MissingError, match="casts the whole PyTorch module to fp16, where --budget cannot keep layers"):
        build_model(model, plan, Store(tmp_path / "workspace"), SilentListener())
    assert not (tmp_path / "workspace").exists()


DIGITS = find_shipped_folder("calibration") / "digits" / "calibration.json"


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


NEEDED = {"segmentation": "(n, classes, height, width)", "detection": "logits", "text-classification": "takes images"}


@pytest.mark.parametrize(("task", "needed"), NEEDED.items())
def test_outputs_that_do_not_fit_the_task_are_refused_with_the_task_that_fits(tmp_path, task, needed):
    shapes: Any = {"image": ["n", 3, 4, 4]}, {"logits": ["n", 48]}
    onnx_model([("Flatten", "image", "logits")], *shapes, path=tmp_path / "flat.onnx")
    (tmp_path / "flat.toml").write_text(CARD.format(task=task))
    model = Model(source_from_text(str(tmp_path / "flat.toml"), {}), weights_from_text("default", 0))
    plan = BuildPlan((Precision.FP32,), (OnnxRuntime(),), named=True, device="cpu")
    store = Store(tmp_path / "workspace")
    with pytest.raises(BadInputError) as refused:
        build_model(model, plan, store, SilentListener())
    assert needed in str(refused.value)
    assert '; task = "classification" would fit' in str(refused.value)
    assert not list(store.list_entries(ModelInfo))


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
        "calibration": find_shipped_folder("calibration") / "digits" / "validation.json",
    }
    model = Model(source_from_text("digits", {}), weights_from_text("default", 0))
    plan = BuildPlan((Precision.INT8,), (OnnxRuntime(),), named=True, device="cpu")
    store = Store(tmp_path / "workspace")
    with pytest.raises(BadInputError, match=said):
        build_model(model, replace(plan, **{given: data[given]}), store, SilentListener())
    assert not list(store.list_entries(ModelInfo))


def test_auto_refuses_points_of_random_weights_before_the_export(tmp_path):
    model = Model(source_from_text("digits", {}), weights_from_text("random", 0))
    plan = ChoicePlan(BuildPlan((), (OnnxRuntime(),), named=True, device="cpu"), Budget(0.5, "points"))
    store = Store(tmp_path / "workspace")
    with pytest.raises(BadInputError, match=r"--budget 0\.5 ?points cannot be judged: the weights are random"):
        choose_build(model, plan, "random", store, SilentListener())
    assert not list(store.list_entries(ModelInfo))
