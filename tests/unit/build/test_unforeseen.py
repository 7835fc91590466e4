"""An error that nobody foresaw in one candidate: the others are built, and its traceback is kept."""

import numpy as np
import onnx
import pytest
from tests.fakes.extensions.optpipe_toy import Toy
from tests.fakes.graphs import onnx_model

from optpipe.backends.registry import BACKENDS
from optpipe.build.build import build_model
from optpipe.build.combinations import require_sound_plan
from optpipe.build.plan import BuildPlan
from optpipe.core.entries import WeightsRequest
from optpipe.core.errors import ExitStatus, StageError
from optpipe.core.events import SilentListener
from optpipe.core.precision import Precision
from optpipe.models.export.exported import Model
from optpipe.models.sources.onnx_file import OnnxFileSource
from optpipe.workspace.store import NOTES, Store


class Broken(Toy):
    """A backend with a bug in the method `place`, in FP16 only."""

    name = "broken"

    def __init__(self, place, error):
        self.place, self.error = place, error

    def precisions(self, device):
        return frozenset((Precision.FP32, Precision.FP16))

    def find_obstacle(self, device, precision=None, *, anywhere=False, runs=True):
        if self.place == "find_obstacle" and precision is Precision.FP16:
            raise self.error

    def build(self, request):
        if self.place == "build" and request.precision is Precision.FP16:
            raise self.error
        return super().build(request)

    def find_run_blocker(self, info):
        if self.place == "find_run_blocker" and info.precision is Precision.FP16:
            raise self.error
        return super().find_run_blocker(info)

    def load(self, directory, info, options):
        if self.place == "load" and info.precision is Precision.FP16:
            raise self.error
        return super().load(directory, info, options)


def build(folder, backend):
    weight = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
    shapes = {"x": ["n", 4]}, {"y": ["n", 4]}
    onnx_model([("MatMul", "x w", "y", {"name": "m"})], *shapes, path=folder / "net.onnx", w=weight)
    model = Model(OnnxFileSource(folder / "net.onnx"), WeightsRequest())
    plan = BuildPlan((Precision.FP16, Precision.FP32), (backend,), named=True, device="cpu")
    store = Store(folder / "work")
    return build_model(model, plan, store, SilentListener()), store


@pytest.mark.parametrize("place", ["find_obstacle", "build", "find_run_blocker", "load"])
@pytest.mark.parametrize(
    "error",
    [
        ValueError("negative dimension\nand a second line"),
        onnx.checker.ValidationError("bad node"),
        KeyError("x"),
        AssertionError(),
        MemoryError(),
        RecursionError("too deep"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_the_other_candidates_are_built(tmp_path, monkeypatch, place, error) -> None:
    backend = Broken(place, error)
    monkeypatch.setitem(BACKENDS, "broken", backend)
    result, store = build(tmp_path, backend)
    (built,) = result.artifacts
    assert built.passed
    assert built.entry.info.precision is Precision.FP32
    (failed,) = result.failed
    assert (failed.precision, failed.status) == ("fp16", ExitStatus.STAGE_FAILED)
    assert result.status is ExitStatus.STAGE_FAILED
    assert len(failed.reason.splitlines()) == 2
    assert type(error).__name__ in failed.reason
    (log,) = (store.workspace / NOTES).glob("failed-*.log")
    assert str(log) in failed.reason
    text = log.read_text()
    assert text.startswith("Traceback")
    assert place in text


@pytest.mark.parametrize("question", ["find_obstacle", "recipe", "precisions", "choose_device"])
def test_a_backend_that_cannot_answer_is_named(tmp_path, monkeypatch, question) -> None:
    backend = Broken("nowhere", ValueError())

    def fail(*_, **__):
        raise ZeroDivisionError("a bug\nin a plug-in")

    monkeypatch.setattr(backend, question, fail)
    monkeypatch.setitem(BACKENDS, "broken", backend)
    options = {"broken": {"threads": "2"}} if question == "recipe" else {}
    plan = BuildPlan((Precision.FP32,), (backend,), named=True, device="cpu", options=options)

    def ask():
        require_sound_plan(plan, SilentListener())
        build(tmp_path, backend)

    with pytest.raises(StageError, match=r"backend broken.* failed: ZeroDivisionError: a") as error:
        ask()
    assert len(str(error.value).splitlines()) == 2


def test_an_interrupt_is_no_failure_of_a_candidate(tmp_path, monkeypatch) -> None:
    backend = Broken("build", KeyboardInterrupt())
    monkeypatch.setitem(BACKENDS, "broken", backend)
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path, backend)
