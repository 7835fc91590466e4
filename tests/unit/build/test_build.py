"""What a build refuses before anything is loaded."""

from typing import Any, cast

import pytest

from optpipe.backends.onnxruntime import OnnxRuntime
from optpipe.build.build import BuildPlan, build_model
from optpipe.core.events import SilentListener
from optpipe.core.precision import Precision
from optpipe.errors import MissingError
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
