"""The library with real parts: a module in memory, ONNX Runtime, and everything that follows from it."""

import copy
import doctest
import importlib
import os
import pickle
import random
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import polars as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import optpipe as op
from optpipe.backends.registry import load_artifact
from optpipe.core.entries import ModelInfo
from optpipe.evaluate import evaluate as evaluation_room
from optpipe.models.sources.in_memory import ModuleSource

pytestmark = pytest.mark.slow
CPU: dict[str, Any] = {"backend": "onnxruntime", "device": "cpu"}
UNTIMED = {"trust.environment": "nothing is timed"}


class Net(torch.nn.Module):
    """A small convolutional classifier with a plain attribute in its forward."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(3, 16, 3)
        self.norm = torch.nn.BatchNorm2d(16)
        self.dropout = torch.nn.Dropout()
        self.last = torch.nn.Linear(16, classes)
        self.scale = 2.0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found = torch.relu(self.norm(self.first(images))) * self.scale
        return self.last(self.dropout(found.mean((2, 3))))


class Pair(torch.nn.Module):
    """Two inputs, of which one has its batch on axis 1, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.linear(x) + state.sum(0)
        return {"logits": found, "largest": found.amax(1)}


def images(count: int = 4, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> op.Workspace:
    return op.Workspace(tmp_path_factory.mktemp("library"), listener=op.Listener())


@pytest.fixture(scope="module")
def net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture(scope="module")
def held(net: Net) -> op.Data:
    x = images(300, seed=3)
    with torch.no_grad():
        labels = copy.deepcopy(net).eval()(x).argmax(1)
    return op.Data(DataLoader(TensorDataset(x, labels), batch_size=50))


@pytest.fixture(scope="module")
def builds(workspace: op.Workspace, net: Net) -> op.Builds:
    loader = DataLoader(TensorDataset(images(64, seed=2), torch.arange(64)), batch_size=16)
    model = op.Model(net, example=images(), batch=(1, 8, 64), trained=True, workspace=workspace)
    return model.build(["fp32", "int8", "fp8"], calibration=op.Data(loader, count=48), **CPU)


def test_a_module_is_built_called_and_left_as_it_was(workspace, net) -> None:
    net.train()
    handle = net.register_full_backward_hook(lambda *_: None)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    torch.manual_seed(5)
    random.seed(5)
    states = (
        torch.get_rng_state(),
        random.getstate(),
        np.random.get_state(legacy=False)["state"]["key"].tolist(),
    )
    example = images()
    torch.set_default_dtype(torch.float64)
    try:
        model = op.Model(net, example=example, batch=(1, 8, 64), workspace=workspace)
        build = model.build("fp32", **CPU)["fp32"]
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (
        random.getstate(),
        np.random.get_state(legacy=False)["state"]["key"].tolist(),
    )
    assert all(each.training for each in net.modules())
    assert all(each.requires_grad for each in net.parameters())
    assert net._backward_hooks
    handle.remove()
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    with torch.no_grad():
        expected = copy.deepcopy(net).eval()(images())
    torch.testing.assert_close(build(images()), expected, atol=1e-5, rtol=1e-4)


def test_builds_hold_proof_verification_and_failures(builds) -> None:
    assert list(builds) == ["fp32", "int8", "fp8"]
    build = builds["int8"]
    assert build.ok
    assert build.precision.proven
    assert build.verification.passed
    assert build.verification.samples > 0
    assert build.path.stat().st_size <= build.size
    assert builds["fp8"].ok is False
    assert "fp8" in builds["fp8"].reason
    with pytest.raises(op.StageError, match="was not built"):
        builds["fp8"](images())
    with pytest.raises(KeyError, match="fp32, int8, fp8"):
        builds["fp16"]
    for shown in (builds._repr_html_(), build._repr_html_()):
        assert "<table>" in shown
        assert "int8" in shown


def test_arrays_give_arrays_and_tensors_give_tensors(builds) -> None:
    build = builds["fp32"]
    tensor = images()
    assert isinstance(build(tensor.numpy()), np.ndarray)
    assert torch.equal(build(tensor), torch.from_numpy(build(tensor.numpy())))
    assert torch.equal(build(images=tensor), build({"images": tensor}))
    strided = tensor.transpose(2, 3)
    torch.testing.assert_close(build(strided), build(strided.contiguous()))
    with build as opened:
        opened(tensor)
    assert build(tensor).shape == (4, 4)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda x: (x.double(),), "float64"),
        (lambda x: (x.numpy().astype(np.float16),), "float16"),
        (lambda x: (x[:, :2],), "4x2x16x16"),
        (lambda x: (x.repeat(20, 1, 1, 1),), "80x3x16x16"),
        (lambda x: (x[0],), "3x16x16"),
        (lambda x: (x.tolist(),), "list"),
        (lambda x: (x, x), "2 inputs"),
        (lambda _: (), "missing"),
        (lambda x: ({"pictures": x},), "'pictures'"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_and_never_cast(builds, given, said) -> None:
    with pytest.raises(op.BadInputError, match=said) as error:
        builds["fp32"](*given(images()))
    assert len(str(error.value).splitlines()) <= 2


def test_tensors_without_plain_values_are_refused(builds) -> None:
    build, x = builds["fp32"], images()
    build(x)  # a type, shape, and device that fitted
    with pytest.raises(op.BadInputError, match="give a dense tensor"):
        build(x.to_sparse())
    with pytest.raises(op.BadInputError, match="outside of torch's transformations"):
        torch.vmap(lambda image: build(image[None])[0])(x)


def test_a_copied_and_a_pickled_build_are_the_same_build(builds) -> None:
    build, x = builds["fp32"], images()
    for again in (copy.deepcopy(build), pickle.loads(pickle.dumps(build))):
        assert again.id == build.id
        assert torch.equal(again(x), build(x))


def test_threads_take_turns(builds) -> None:
    build = builds["fp32"]
    batches = [images(4, seed) for seed in range(8)]
    expected = [build(each) for each in batches]
    found: dict[int, list[torch.Tensor]] = {}

    def call(number: int) -> None:
        found[number] = [build(each) for each in batches * 5]

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(found) == 4
    for outputs in found.values():
        assert all(map(torch.equal, outputs, expected * 5))


def test_a_bound_call_reads_and_writes_where_it_was_bound(builds) -> None:
    build = builds["fp32"]
    one, other = images(4, seed=5), images(4, seed=6)
    expected, of_other = build(one), build(other)
    given = one.clone()
    step = build.bind(given)
    found = step()
    torch.testing.assert_close(found, expected)
    assert torch.equal(build(other), of_other)  # which has memory of its own
    torch.testing.assert_close(found, expected)
    given.copy_(other)
    torch.testing.assert_close(step(), of_other)
    build.close()
    with pytest.raises(op.BadInputError, match="closed"):
        step()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x: x.numpy(), "give tensors"),
        (lambda x: x.transpose(2, 3), "not contiguous"),
        (lambda x: x.to_sparse(), "dense"),
        (lambda x: x.double(), "float64"),
        (lambda x: x.repeat(20, 1, 1, 1), "80x3x16x16"),
    ],
)
def test_what_cannot_be_bound_is_refused(builds, change, said) -> None:
    with pytest.raises(op.BadInputError, match=said) as error:
        builds["fp32"].bind(change(images()))
    assert len(str(error.value).splitlines()) <= 2


class Brightness(torch.nn.Module):
    """The mean of an image, of which an image of mean zero gives a rounding error."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.mean((1, 2, 3))


def test_a_module_that_reads_the_mean_of_an_image_is_verified_without_data(workspace) -> None:
    model = op.Model(Brightness(), images(), batch=(1, 4, 8), workspace=workspace)
    build = model.build("fp32", **CPU)["fp32"]
    assert build.ok
    assert build.verification.passed
    assert max(each.relative for each in build.verification.outputs) < 1e-4


def test_two_threads_may_build_at_once(workspace) -> None:
    found, errors = {}, []

    def build(width: int) -> None:
        try:
            model = op.Model(
                torch.nn.Linear(8, width), example=torch.zeros(2, 8), workspace=workspace
            )
            found[width] = model.build("fp32", **CPU)["fp32"](torch.zeros(1, 8)).shape
        except Exception as error:  # noqa: BLE001 - whatever a thread raises
            errors.append(error)

    threads = [threading.Thread(target=build, args=(width,)) for width in (3, 5, 7)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not errors
    assert found == {3: (1, 3), 5: (1, 5), 7: (1, 7)}


def test_other_batch_axes_and_several_outputs(workspace) -> None:
    torch.manual_seed(1)
    module, x, state = Pair().eval(), torch.randn(3, 4), torch.randn(2, 3, 4)
    with pytest.raises(op.BadInputError, match="different batch sizes"):
        op.Model(module, example=(x, state), workspace=workspace)
    model = op.Model(
        module,
        example={"x": x, "state": state},
        axes={"state": 1},
        batch=(1, 4, 8),
        workspace=workspace,
    )
    build = model.build("fp32", **CPU)["fp32"]
    found = build(x, state)
    assert found._fields == ("logits", "largest")
    with torch.no_grad():
        torch.testing.assert_close(found.logits, module(x, state)["logits"])
    with pytest.raises(op.BadInputError, match="different batch sizes"):
        build(x, torch.randn(2, 2, 4))


def test_a_build_whose_file_was_removed_says_so(tmp_path) -> None:
    model = op.Model(torch.nn.Linear(8, 4), example=torch.zeros(2, 8), workspace=tmp_path)
    build = model.build("fp32", **CPU)["fp32"]
    build(torch.zeros(1, 8))
    shutil.rmtree(build.path.parent)
    with pytest.raises(op.StageError, match="was removed"):
        build(torch.zeros(1, 8))
    again = model.build("fp32", **CPU)["fp32"]
    again.path.write_bytes(b"something else")
    with pytest.raises(op.StageError, match="damaged"):
        again(torch.zeros(1, 8))


def evaluate(build):
    return build.evaluate(
        (torch.zeros(4, 8), torch.arange(4)), metric=op.Metric(lambda *_: 1.0, range=(0, 1))
    )


USES = {
    "call": lambda build: build(torch.zeros(1, 8)),
    "bench": lambda build: build.bench(batch=1, processes=1, min_time=0.05, keep_going=True),
    "time": lambda build: build.time(seconds=0.01),
    "evaluate": evaluate,
    "signoff": lambda build: build.signoff(op.Policy(size={"maximum": "1 MiB"}), figures=False),
}


@pytest.fixture(scope="module")
def spare(tmp_path_factory) -> op.Model:
    folder = tmp_path_factory.mktemp("spare")
    return op.Model(torch.nn.Linear(8, 4), example=torch.zeros(2, 8), workspace=folder)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("loaded", [True, False])
def test_any_use_of_a_removed_build_says_so(spare, use, loaded) -> None:
    build = spare.build("fp32", **CPU)["fp32"]
    if loaded:
        build(torch.zeros(1, 8))
    shutil.rmtree(build.path.parent)
    with pytest.raises(op.StageError, match=r"was removed from .*\nbuild it again: Model\.build"):
        USES[use](build)
    again = spare.build("fp32", **CPU)["fp32"]
    assert again.id == build.id
    assert build(torch.zeros(1, 8)).shape == (1, 4)


@pytest.mark.parametrize("use", USES)
def test_any_use_of_a_damaged_build_says_so(spare, use) -> None:
    build = spare.build("fp32", **CPU)["fp32"]
    build.path.write_bytes(b"something else")
    with pytest.raises(op.StageError, match="is damaged") as error:
        USES[use](build)
    shown = str(error.value)
    assert "in Python" in shown
    assert "`" not in shown
    assert len(shown.splitlines()) <= 2


def test_of_several_builds_a_damaged_one_is_a_warning_and_the_others_are_scored(tmp_path) -> None:
    x = torch.randn(64, 8)
    model = op.Model(torch.nn.Linear(8, 4), example=x[:2], trained=True, workspace=tmp_path)
    builds = model.build(["fp32", "int8"], calibration=x, **CPU)
    builds["fp32"].path.write_bytes(b"something else")
    scores = evaluate(builds)
    assert [row["value"] for row in scores.frame().to_dicts()] == [1.0, None, 1.0]
    assert any("onnxruntime fp32" in each and "damaged" in each for each in scores.warnings)


def test_a_precision_that_no_backend_here_has_is_in_the_builds_with_its_reason(spare) -> None:
    builds = spare.build(["fp32", "fp16"], device="cpu")
    assert list(builds) == ["fp32", "fp16"]
    assert builds["fp32"].ok
    assert not builds["fp16"].ok
    assert "no fp16 kernels on cpu" in builds["fp16"].reason
    with pytest.raises(op.StageError, match="fp16 was not built"):
        builds["fp16"](torch.zeros(1, 8))


def test_warnings_are_those_of_one_call(tmp_path) -> None:
    workspace = op.Workspace(tmp_path, listener=op.Listener())
    model = op.Model(torch.nn.Linear(8, 4), example=torch.zeros(2, 8), workspace=workspace)
    first = model.build("fp16", device="cpu").warnings
    assert any("fp16" in each for each in first)
    assert not model.build("fp32", **CPU).warnings
    assert model.build("fp16", device="cpu").warnings == first
    assert workspace.listener.warnings == list(first)


@pytest.mark.parametrize(
    ("trained", "said"), [(None, "trained=True"), (False, "random"), (True, None)]
)
def test_weights_that_are_not_trained_are_not_scored_and_the_frame_says_why(
    trained, said, tmp_path
) -> None:
    net = torch.nn.Linear(8, 4)
    model = op.Model(net, example=torch.zeros(2, 8), trained=trained, workspace=tmp_path)
    scores = evaluate(model.build("fp32", **CPU))
    reasons = scores.frame()["why_not"].to_list()
    if said is None:
        assert reasons == [None, None]
        assert not any("scored" in each for each in scores.warnings)
    else:
        assert all(said in each for each in reasons)
        assert any(said in each for each in scores.warnings)


def test_a_metric_changes_nothing_but_its_copies(builds, held) -> None:
    def spoil(outputs, label):
        score = float(np.argmax(outputs) == label)
        outputs[:] = 0
        return score

    spoiled = builds.evaluate(held, metric=op.Metric(spoil, range=(0, 1)))
    snr = [each.snr_db for each in spoiled.record.results if each.artifact]
    assert all(each is not None and each < 200 for each in snr)


class Undefined(torch.nn.Module):
    """Gives NaN for samples whose first value is below zero."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + 0 * torch.sqrt(x[:, :1])


def test_outputs_that_are_no_numbers_are_a_warning(tmp_path) -> None:
    x = torch.rand(64, 8) + 0.1
    model = op.Model(Undefined(), example=x[:2], workspace=tmp_path)
    build = model.build("fp32", data=x, **CPU)["fp32"]
    x[:5, 0] = -1
    warned = build.evaluate(
        (x, torch.arange(64)), metric=op.Metric(lambda *_: 1.0, range=(0, 1))
    ).warnings
    assert sum("source model gives NaN for 5 of 64" in each for each in warned) == 1


def test_a_build_that_gives_nan_where_its_source_does_not_is_not_scored(
    builds, held, monkeypatch
) -> None:
    load = load_artifact

    @contextmanager
    def spoil(entry, store):
        with load(entry, store) as session:

            def run(batch):
                outputs = {name: value.copy() for name, value in session.run(batch).items()}
                for value in outputs.values() if entry.info.precision == "int8" else ():
                    value[:1] = np.nan  # in every batch, such as an overflow for some inputs
                return outputs

            yield SimpleNamespace(run=run)

    monkeypatch.setattr(evaluation_room, "load_artifact", spoil)
    right = op.Metric(lambda output, label: float(np.argmax(output) == label), range=(0, 1))
    scores = builds.evaluate(held, metric=right)
    rows = {row.precision: row for row in scores.record.results}
    assert rows["fp32"].scores is not None
    assert rows["int8"].scores is None
    assert "gives NaN for 10 of 300" in str(rows["int8"].why_not)
    assert any("gives NaN for 10 of 300" in each for each in scores.warnings)
    policy = op.Policy(accuracy={"maximum_drop": "50 points"})
    with pytest.raises(op.BadInputError, match="did not score onnxruntime int8"):
        builds["int8"].signoff(policy, evaluation=scores, waive=UNTIMED, figures=False)


@pytest.mark.parametrize("metric", ["top1", lambda *_: 1.0, 3])
def test_what_is_no_metric_is_refused(builds, held, metric) -> None:
    with pytest.raises(op.BadInputError, match=r"metric=Metric\("):
        builds.evaluate(held, metric=metric)
    with pytest.raises(op.BadInputError, match=r"metric=Metric\("):
        builds["fp32"].signoff(
            op.Policy(accuracy={"maximum_drop": "1 point"}), data=held, metric=metric
        )


def hooked():
    module = Net()
    module.first.register_forward_hook(lambda *_: None)
    return module


def on_meta():
    return Net().to("meta")


@pytest.mark.parametrize(
    ("module", "example", "said"),
    [
        (hooked, images, "forward hook"),
        (on_meta, images, "meta"),
        (lambda: torch.jit.trace(Net().eval(), images()), images, "torch.jit"),
        (lambda: Net, images, "make an instance: Net"),
        (lambda: 7, images, "expected a torch.nn.Module"),
        (Net, lambda: None, "needs an example"),
        (Net, lambda: "text", "is a str"),
        (Net, lambda: torch.zeros(4, 2, 16, 16), "fails on its example"),
        (Net, lambda: images().double(), "float64"),
        (Net, lambda: images()[:0], "empty"),
        (Net, lambda: {"pictures": images()}, "no argument 'pictures'"),
        (Net, lambda: images().to("meta"), "on meta"),
        (Net, lambda: images().to_sparse(), "to_dense"),
        (Net, lambda: np.array([None], dtype=object), "objects, the first of type NoneType"),
        (Net, lambda: np.array(["text"]), "array of strings"),
        (Net, lambda: (images(), torch.arange(4)), "2 inputs are given, and forward takes 1"),
        (lambda: torch.nn.Linear(8, 4), lambda: [torch.zeros(2, 8)] * 3, "3 inputs are given"),
    ],
)
def test_a_module_or_example_that_cannot_be_used_is_refused_in_two_lines(
    module, example, said, tmp_path
) -> None:
    with pytest.raises(op.OptpipeError, match=said) as error:
        op.Model(module(), example=example(), workspace=tmp_path)
    assert len(str(error.value).splitlines()) <= 2
    assert not list(tmp_path.iterdir())


def test_the_modules_own_error_is_the_cause(tmp_path) -> None:
    with pytest.raises(op.BadInputError) as error:
        op.Model(Net(), example=torch.zeros(4, 2, 16, 16), workspace=tmp_path)
    assert isinstance(error.value.__cause__, RuntimeError)


class Locked(torch.nn.Module):
    """Cannot be copied: a lock, and a tensor that is no leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 4)
        self.lock = threading.Lock()
        self.shift = self.linear.bias * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.lock:
            return self.linear(x) + self.shift.detach()


class Plain(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 4)
        self.dropout = torch.nn.Dropout()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.linear(x))


class Unlocked(Plain):
    """Cannot be copied, and can be exported."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


@pytest.mark.parametrize("wrap", [torch.compile, torch.nn.DataParallel, lambda each: each])
def test_wrapped_modules_are_unwrapped(wrap, workspace) -> None:
    torch.manual_seed(2)
    module = Plain()
    found = op.Model(wrap(module), example=torch.zeros(2, 8), workspace=workspace)
    assert found.name == "Plain"
    assert found.id == op.Model(module, example=torch.zeros(2, 8), workspace=workspace).id


def test_a_module_that_cannot_be_copied_is_exported_instead(workspace) -> None:
    module = Unlocked()
    model = op.Model(module, example=torch.zeros(2, 8), workspace=workspace)
    assert module.training
    assert module.dropout.training
    x = torch.randn(5, 8)
    with torch.no_grad():
        torch.testing.assert_close(model.build("fp32", **CPU)["fp32"](x), module.linear(x))


def make(scale=2.0, classes=4, attribute=None):
    torch.manual_seed(0)
    module = Net(classes)
    module.scale = scale
    if attribute is not None:
        module.note = attribute
    return module


def test_the_id_is_that_of_the_content(workspace) -> None:
    def identify(module, example=None):
        return op.Model(
            module, example=images() if example is None else example, workspace=workspace
        ).id

    own = identify(make())
    assert identify(make(), images(1)) == own
    assert identify(make(attribute="renamed")) == own
    assert identify(make().eval()) == own
    changed = make()
    with torch.no_grad():
        changed.first.weight[0, 0, 0, 0] += 1e-6
    different = [identify(make(scale=3.0)), identify(changed), identify(make(classes=5))]
    assert len({own, *different}) == 4


def test_weights_that_change_after_the_snapshot_are_noticed(workspace) -> None:
    module = torch.nn.Linear(8, 4)
    model = op.Model(module, example=torch.zeros(2, 8), workspace=workspace)
    model.build("fp32", **CPU)
    with torch.no_grad():
        module.bias.add_(1)
    with pytest.raises(op.BadInputError, match="has changed since"):
        model.build("fp32", **CPU)
    with torch.no_grad():
        module.bias.sub_(1)


FACTORY = """
import torch
INPUTS = [{"name": "input", "min": [1, 8], "opt": [8, 8], "max": [64, 8]}]
def make():
    torch.manual_seed(0)
    return torch.nn.Linear(8, 4)
"""


def test_a_file_and_a_module_in_memory_have_one_id(workspace, tmp_path) -> None:
    (tmp_path / "net.py").write_text(FACTORY)
    torch.manual_seed(0)
    module = torch.nn.Linear(8, 4)
    model = op.Model(module, example=torch.zeros(2, 8), workspace=workspace)
    same = op.Model(f"{tmp_path / 'net.py'}:make", workspace=workspace)
    called = op.Model(
        module,
        example=torch.zeros(3, 8),
        batch=(1, 2, 4),
        name="Other",
        trained=True,
        workspace=workspace,
    )
    assert model.id == same.id == called.id
    with torch.no_grad():
        module.bias.add_(1)
    with pytest.raises(op.BadInputError, match="has changed since"):
        _ = model.id
    moved = op.Model(module, example=torch.zeros(2, 8), workspace=workspace)
    assert moved.id != same.id


def test_calibration_in_another_order_is_the_same_build(workspace, net, builds) -> None:
    x = images(64, seed=2)[:48]
    turned = op.Data((x.flip(0), torch.arange(48).flip(0)))
    model = op.Model(net, example=images(), batch=(1, 8, 64), trained=True, workspace=workspace)
    assert model.build("int8", calibration=turned, **CPU)["int8"].id == builds["int8"].id


def test_other_doors(workspace, tmp_path) -> None:
    target = tmp_path / "line.onnx"
    torch.onnx.export(
        torch.nn.Linear(8, 4), (torch.zeros(2, 8),), target, dynamo=True, verbose=False
    )
    build = op.Model(target, workspace=workspace).build("fp32", **CPU)["fp32"]
    assert build(np.zeros((2, 8), np.float32)).shape == (2, 4)
    assert onnx.load(build.path).graph.input
    with pytest.raises(op.BadInputError, match="example is for a module in memory"):
        op.Model(target, example=torch.zeros(2, 8), workspace=workspace)
    with pytest.raises(op.BadInputError, match="no such file"):
        op.Model(tmp_path / "absent.onnx", workspace=workspace)
    (found,) = workspace.builds("line").built
    assert found.id == build.id


def test_scores_of_a_metric(builds, held, workspace) -> None:
    metric = op.Metric(
        lambda outputs, label: float(np.argmax(outputs) == label), range=(0, 1), name="top1"
    )
    scores = builds.evaluate(held, metric=metric)
    frame = scores.frame()
    assert frame["build"].to_list() == ["source", "onnxruntime fp32", "onnxruntime int8"]
    assert frame["value"][0] == 1.0
    assert set(frame["score"]) == {"top1"}
    assert pl.Null not in frame.dtypes
    assert frame.filter(pl.col("drop_low") > pl.col("drop")).is_empty()
    assert "not recomputable" in scores.record.scoring
    assert metric.source_sha256[:12] in scores.record.scoring
    error = op.Metric(
        lambda outputs, label: float(np.argmax(outputs) != label),
        range=(0, 2),
        larger_is_better=False,
    )
    assert builds.evaluate(held, metric=error).frame()["value"][0] == 1.0


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda *_: float("nan"), "nan"),
        (lambda *_: 2.0, "2.0"),
        (lambda *given: given[0], "array"),
        (lambda *_: None, "None"),
        (lambda *_: 1 / 0, "ZeroDivisionError"),
        (lambda *_: sys.exit(3), "SystemExit"),
    ],
)
def test_a_metric_that_gives_no_score_is_refused(builds, held, function, said) -> None:
    with pytest.raises(op.BadInputError, match=said) as error:
        builds.evaluate(held, metric=op.Metric(function, range=(0, 1)))
    assert len(str(error.value).splitlines()) <= 2


def test_a_verdict_on_the_outputs_of_untrained_weights_is_inconclusive(tmp_path, net) -> None:
    policy = op.Policy(size={"maximum": "10 MiB"})
    verdicts = {}
    for trained in (None, False, True):
        model = op.Model(net, example=images(), trained=trained, workspace=tmp_path)
        build = model.build("fp32", data=op.Data(images(64)), **CPU)["fp32"]
        verdicts[trained] = build.signoff(policy, waive=UNTIMED, figures=False)
    assert verdicts[True].outcome == "PASS"
    assert verdicts[True]
    assert verdicts[True].require_pass() is verdicts[True]
    for trained in (None, False):
        verdict = verdicts[trained]
        assert verdict.outcome == "INCONCLUSIVE"
        assert any(each.startswith("trust.weights") for each in verdict.reasons)
        with pytest.raises(op.InconclusiveError, match=r"trust\.weights"):
            bool(verdict)
        assert verdict.dossier.verify().outcome == "INCONCLUSIVE"


def test_a_verdict_its_dossier_and_its_build(builds, workspace, held, tmp_path) -> None:
    build = builds["int8"]
    policy = op.Policy(size={"maximum": "1 MiB"}, accuracy={"maximum_drop": "20 points"})
    metric = op.Metric(lambda outputs, label: float(np.argmax(outputs) == label), range=(0, 1))
    verdict = build.signoff(policy, data=held, metric=metric, waive=UNTIMED, figures=False)
    verdict.require_pass()
    assert "PASS" in str(verdict)
    assert "<table>" in verdict._repr_html_()
    again = build.signoff(policy, waive=UNTIMED, figures=False)
    assert again.dossier.path == verdict.dossier.path
    assert verdict.dossier.verify().outcome == "PASS"
    assert op.load(verdict.dossier.path, workspace=workspace)(images()).shape == (4, 4)
    result = verdict.dossier.deploy(tmp_path / "served", to="folder", because="a test")
    assert (tmp_path / "served").is_dir()
    assert result.deployment
    verifier = Path(__file__).parents[2] / "verifier" / "verify_dossier.py"
    done = subprocess.run(
        [sys.executable, str(verifier), str(verdict.dossier.path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with pytest.raises(op.BadInputError, match="is not in"):
        op.load(verdict.dossier, workspace=tmp_path / "elsewhere")
    tight = build.signoff(op.Policy(size={"maximum": "10 B"}), figures=False)
    assert not tight
    with pytest.raises(op.GateError, match=r"size\.maximum FAIL"):
        tight.require_pass()
    (verdict.dossier.path / "policy.toml").write_text("schema = 1\n")
    with pytest.raises(op.BadInputError, match="failed verification"):
        verdict.dossier.verify()


def test_a_limit_that_nothing_can_show_is_refused_before_anything_runs(workspace) -> None:
    model = op.Model(
        torch.nn.Linear(8, 4), example=torch.zeros(2, 8), workspace=workspace, name="bare"
    )
    build = model.build("fp32", **CPU)["fp32"]
    with pytest.raises(op.BadInputError, match="was never evaluated"):
        build.signoff(op.Policy(accuracy={"maximum_drop": "1 point"}))
    with pytest.raises(op.BadInputError, match="has no task"):
        build.evaluate((torch.zeros(4, 8), torch.arange(4)))
    for nothing in ({"precision": []}, {"backend": []}):
        with pytest.raises(op.BadInputError, match="nothing is given"):
            model.build(**CPU | {"precision": "fp32"} | nothing)


def test_a_bench_is_a_counted_try_and_a_time_is_none(builds, workspace) -> None:
    bench = builds.bench(batch=[1, 4], processes=1, min_time=0.05, keep_going=True)
    frame = bench.frame()
    assert frame.height == 4
    assert set(frame["batch_size"]) == {1, 4}
    assert pl.Null not in frame.dtypes
    assert {frame["p50_ns"].dtype, frame["p50_ns_low"].dtype} == {pl.Float64}
    invalid = frame.filter(pl.col("verdict") == "INVALID")
    assert invalid.filter(pl.col("p50_ns").is_not_null()).is_empty()
    assert all(each.len() for each in invalid["reasons"])
    samples = bench.samples()
    assert (samples["latency_ns"] > 0).all()
    assert set(samples["artifact"]) == {builds["fp32"].id, builds["int8"].id}
    assert bench.path.is_dir()
    if bench.valid:
        assert bench.plot().to_dict()["layer"]
    with pytest.raises(op.BadInputError, match="choose from"):
        bench.plot("p51_ns")
    with pytest.raises(op.BadInputError, match="no argument 'batches'"):
        builds.bench(batches=[1])
    with pytest.raises(op.BadInputError, match='scenario="server" requires rate'):
        builds.bench(scenario="server")
    with pytest.raises(op.BadInputError, match="expected CPUs from"):
        builds.bench(affinity=[4096])
    with pytest.raises(op.BadInputError, match="outside the profile"):
        builds.bench(batch=100)
    runs = sorted(each.name for each in (workspace.path / "runs").glob("bench-*"))
    times = builds["fp32"].time(batch=2, seconds=0.05)
    assert times.median_ns > 0
    assert times.path.is_dir()
    assert sorted(each.name for each in (workspace.path / "runs").glob("bench-*")) == runs


def test_nothing_prints_unless_asked(tmp_path, capfd) -> None:
    model = op.Model(torch.nn.Linear(8, 4), example=torch.zeros(2, 8), workspace=tmp_path)
    model.build("fp32", **CPU)["fp32"](torch.zeros(1, 8))
    assert capfd.readouterr() == ("", "")


def test_a_listener_hears_the_steps(tmp_path) -> None:
    class Ear(op.Listener):
        def __init__(self):
            super().__init__()
            self.steps = []

        def step(self, name, total=None):
            self.steps.append(name)
            return super().step(name, total)

    ear = Ear()
    workspace = op.Workspace(tmp_path, listener=ear)
    op.Model(torch.nn.Linear(8, 4), example=torch.zeros(2, 8), workspace=workspace).build(
        "fp32", **CPU
    )
    assert "export" in ear.steps


NOTEBOOK = """
import torch, optpipe as op
class Mine(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 4)
    def forward(self, x):
        return self.linear(x)
model = op.Model(Mine(), example=torch.zeros(2, 8), workspace="work")
builds = model.build("fp32", backend="onnxruntime", device="cpu")
print(builds.bench(batch=1, processes=2, min_time=0.05, keep_going=True).frame().height)
"""


def test_a_class_of_a_script_without_a_guard_is_built_and_measured(tmp_path) -> None:
    done = subprocess.run(
        [sys.executable, "-"],
        input=NOTEBOOK,
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert done.stdout == "1\n"
    assert done.stderr == ""
    shell = [sys.executable, "-m", "optpipe", "--workspace", "work"]
    listed = subprocess.run(
        [*shell, "store", "ls"], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert "Mine" in listed.stdout
    build = subprocess.run(
        [*shell, "build", "memory:Mine"], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert build.returncode == 2
    assert "in memory" in build.stderr


def test_an_interrupted_build_runs_again(tmp_path) -> None:
    class Stop(op.Listener):
        def step(self, name, total=None):
            if name.startswith("build"):
                raise KeyboardInterrupt
            return super().step(name, total)

    module = torch.nn.Linear(8, 4)
    broken = op.Workspace(tmp_path, listener=Stop())
    with pytest.raises(KeyboardInterrupt):
        op.Model(module, example=torch.zeros(2, 8), workspace=broken).build("fp32", **CPU)
    model = op.Model(module, example=torch.zeros(2, 8), workspace=tmp_path)
    assert model.build("fp32", **CPU)["fp32"].ok
    assert not list((tmp_path / "tmp").iterdir())


def test_the_origin_is_the_call(workspace, builds) -> None:
    entry = workspace.store.find(builds["int8"].id)
    assert entry.manifest.command.startswith(
        "python: Model.build(model=memory:Net,precision=fp32,int8,fp8"
    )
    exported = workspace.store.find(entry.manifest.parents[0], ModelInfo)
    assert exported.info.source == "memory:Net"


def test_a_source_gives_a_fresh_module_each_time(workspace) -> None:
    model = op.Model(
        torch.nn.Linear(8, 4), example=torch.zeros(2, 8), workspace=workspace
    ).exported()
    assert isinstance(model.source, ModuleSource)
    assert model.fresh_module() is not model.fresh_module()


PLUGIN = """
import torch
def test_ship(optpipe):
    model = optpipe.Model(torch.nn.Linear(8, 4), example=torch.zeros(2, 8), trained={trained})
    build = model.build("fp32", backend="onnxruntime", device="cpu", data=torch.randn(64, 8))["fp32"]
    optpipe.signoff(build, "{policy}", figures=False, waive={{"trust.environment": "nothing is timed"}}).require_pass()
"""


@pytest.mark.parametrize(
    ("trained", "limit", "option", "outcome"),
    [
        (True, "1 MiB", "fail", "passed"),
        (True, "10 B", "skip", "failed"),
        (None, "1 MiB", "skip", "skipped"),
        (None, "1 MiB", "fail", "failed"),
    ],
)
def test_the_pytest_plugin(trained, limit, option, outcome, tmp_path) -> None:
    policy = op.Policy(size={"maximum": limit}).save(tmp_path / "policy.toml")
    (tmp_path / "test_ship.py").write_text(PLUGIN.format(trained=trained, policy=policy))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "optpipe.api.pytest_plugin",
        f"--optpipe-inconclusive={option}",
    ]
    command += [
        "--optpipe-workspace=work",
        "--junit-xml=report.xml",
        "-rs",
        "-p",
        "no:cacheprovider",
        "--rootdir=.",
    ]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment
    )
    assert f"1 {outcome}" in done.stdout, done.stdout + done.stderr
    assert "Traceback" not in done.stdout
    assert "optpipe_dossier" in (tmp_path / "report.xml").read_text()
    assert "report.html" in done.stdout


class Nested(torch.nn.Module):
    """Takes a mapping of tensors, and computes in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 4)

    def forward(self, batch: dict, scale: torch.Tensor) -> tuple[torch.Tensor, dict]:
        found = self.linear(batch["x"]) * scale
        return found, {"shifted": found + batch["y"]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nested_inputs_and_other_types(workspace, dtype) -> None:
    torch.manual_seed(4)
    module = Nested().to(dtype)
    example = {"x": torch.zeros(2, 8, dtype=dtype), "y": torch.zeros(2, 4, dtype=dtype)}
    shared = torch.ones((), dtype=dtype)
    model = op.Model(module, example=(example, shared), workspace=workspace, batch=(1, 2, 4))
    assert [each.name for each in model.card.inputs] == ["batch.x", "batch.y", "scale"]
    build = model.build("fp32", **CPU)["fp32"]
    x, y = torch.randn(3, 8), torch.randn(3, 4)
    found = build(x, y, torch.tensor(2.0))
    with torch.no_grad():
        expected = module.float()({"x": x, "y": y}, torch.tensor(2.0))
    torch.testing.assert_close(found[0], expected[0], atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(found[1], expected[1]["shifted"], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    "module",
    ["workspace", "model", "data", "metric", "build", "bench", "evaluation", "policy", "verdict"],
)
def test_the_examples_of_the_docstrings_run(module, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = doctest.testmod(importlib.import_module(f"optpipe.api.{module}"))
    assert found.attempted
    assert not found.failed


def test_the_lines_of_the_readme_run(tmp_path, monkeypatch, net) -> None:
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    lines = text.partition("```python\n")[2].partition("```")[0]
    build, _, rest = lines.partition("verdict = ")
    assert rest
    x = images(600, seed=3)
    with torch.no_grad():
        labels = copy.deepcopy(net).eval()(x).argmax(1)
    names: dict[str, Any] = {
        "net": net,
        "images": images(),
        "loader": DataLoader(TensorDataset(x, labels), batch_size=50),
        "val_loader": DataLoader(TensorDataset(x, labels), batch_size=50),
        "top1": lambda outputs, label: float(np.argmax(outputs) == label),
    }
    exec(build.replace("batch=[1, 16]", "batch=[1, 16], processes=1, min_time=0.05"), names)
    verdict = names["builds"]["int8"].signoff(
        names["policy"], evaluation=names["scores"], measure=False, figures=False
    )
    assert verdict.outcome in ("PASS", "INCONCLUSIVE")
