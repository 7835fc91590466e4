"""Every comparison of outputs takes the rows that a graph selects as sets, and a wrong row stays wrong in each."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from tests.fakes.graphs import onnx_model
from tests.unit.deploy.test_recheck import RECORD

from optpipe.backends.onnxruntime_session import OnnxRuntimeSession
from optpipe.backends.plain_session import PlainSession, mark_source
from optpipe.backends.rewrites import RewriteGuard
from optpipe.backends.selections import read_selection
from optpipe.core.card import InputSpec, ModelCard, Task, TensorSpec
from optpipe.core.errors import GateError
from optpipe.core.precision import EXACT_DB
from optpipe.deploy import proof
from optpipe.deploy.recheck import list_output_changes
from optpipe.deploy.requests import Expected
from optpipe.evaluate.evaluate import EvaluatedArtifact, predict_samples, score_artifacts
from optpipe.evaluate.layers import choose_tensors, compare_tensors
from optpipe.measure.worker.checks import check_outputs
from optpipe.models.inputs.tensor_set import tensor_set_from_parts
from optpipe.quantize import sensitivity
from optpipe.stats.selected_rows import EMPTY, Selection

SELECTION = Selection({"boxes": (0,), "labels": (0,)}, (7,))
RANDOM = np.random.default_rng(0)
BOXES = RANDOM.standard_normal((3, 7, 4)).astype(np.float32)
LABELS = np.arange(21).reshape(3, 7)
OUTPUTS: dict[str, Any] = {"boxes": BOXES, "labels": LABELS}


def swap(outputs):
    """Two rows of each sample in each other's place, as equal scores have them in another runtime."""
    order = [1, 0, *range(2, 7)]
    return {name: value[:, order] for name, value in outputs.items()}


def spoil(outputs):
    """The same with a box that is not the model's."""
    found = {name: value.copy() for name, value in swap(outputs).items()}
    found["boxes"][0, 3] += 5
    return found


def test_a_recheck_calls_swapped_rows_unchanged() -> None:
    changes = list(list_output_changes(OUTPUTS, swap(OUTPUTS), SELECTION, classifies=False))
    assert [each.changed for each in changes] == [0, 0]
    in_order = list(list_output_changes(OUTPUTS, swap(OUTPUTS), classifies=False))
    assert all(each.changed for each in in_order)
    boxes, _ = list_output_changes(OUTPUTS, spoil(OUTPUTS), SELECTION, classifies=False)
    assert boxes.changed >= 4
    assert boxes.relative_error > 0.1


def check(found, selection):
    kept = [(0, found)]
    reference = {name: value[:3] for name, value in OUTPUTS.items()}
    axes = dict.fromkeys(OUTPUTS, 0)
    rows = [np.arange(3)]
    return check_outputs(
        kept, [OUTPUTS], reference, rows, 1e-3, "the source model", axes, selection
    )


def test_a_bench_passes_swapped_rows_and_no_wrong_ones() -> None:
    assert check(swap(OUTPUTS), SELECTION).passed
    assert not check(swap(OUTPUTS), EMPTY).passed
    assert not check(spoil(OUTPUTS), SELECTION).passed


def test_rows_along_another_batch_axis_stay_in_order() -> None:
    axes = {"boxes": 1, "labels": 1}
    found = check_outputs(
        [(0, swap(OUTPUTS))], [OUTPUTS], {}, [np.arange(7)], 1e-3, "", axes, SELECTION
    )
    assert not found.passed


def judge(got, **changes):
    record = SimpleNamespace(
        tolerance=RECORD.tolerance, selection=changes.get("selection", SELECTION)
    )
    expected = Expected("m", {}, source=OUTPUTS, outputs=OUTPUTS)
    return max(
        proof._judge(cast("Any", record), "request 1", expected, name, got) for name in OUTPUTS
    )


def test_a_server_may_swap_rows_and_may_not_change_them() -> None:
    assert judge(swap(OUTPUTS)) == 0
    with pytest.raises(GateError, match="is not the signed-off one"):
        judge(swap(OUTPUTS), selection=EMPTY)
    with pytest.raises(GateError, match="is not the signed-off one"):
        judge(spoil(OUTPUTS))


CARD = ModelCard(
    "m",
    "m.onnx",
    Task.OTHER,
    (InputSpec("x", "float32", (1, 2), (3, 2), (3, 2), batch=0),),
    (
        TensorSpec("boxes", "float32", ("batch", 7, 4), batch=0),
        TensorSpec("labels", "int64", ("batch", 7), batch=0),
    ),
)


def predict(outputs):
    samples = tensor_set_from_parts("s", [{"x": np.zeros((3, 2), np.float32)}])
    task: Any = SimpleNamespace(
        decode=lambda rows, *_: rows["boxes"][:, 0, 0].tolist(),
        join_rows=lambda rows, _: rows,
        class_axis=None,
        needs_finite=False,
    )
    kept = SELECTION.outputs
    return predict_samples(cast("Any", None), CARD, samples, task, lambda _: outputs, keep=kept)


def test_an_evaluation_gives_swapped_rows_no_error_and_does_not_reorder_predictions() -> None:
    source, swapped, spoiled = (predict(each(OUTPUTS)) for each in (dict, swap, spoil))
    assert swapped.values == BOXES[:, 1, 0].tolist()
    entry: Any = SimpleNamespace(
        id="a", info=SimpleNamespace(backend="b", precision="fp32", device="cpu")
    )
    rows = [EvaluatedArtifact(None, source)]
    rows += [EvaluatedArtifact(entry, each) for each in (swapped, spoiled)]
    task: Any = SimpleNamespace(compute_parity=lambda *_: None)

    def score(selection):
        hidden = pytest.MonkeyPatch()
        hidden.setattr("optpipe.evaluate.evaluate.hash_engine", lambda _: "0")
        with hidden.context():
            found = score_artifacts(
                rows, None, task, (), 0, None, trained=True, selection=selection
            )
            result = [each.snr_db for each in found][1:]
        hidden.undo()
        return result

    alike, wrong = score(SELECTION)
    assert alike is None
    assert wrong is not None
    assert wrong < 10
    assert score(EMPTY)[0] is not None


SELECTOR = [
    ("Mul", "x near", "s"),
    ("TopK", "s k", ["v", "i"], {"axis": 1}),
    ("Mul", "x apart", "z"),
    ("GatherElements", "z i", "y", {"axis": 1}),
]


def write_selector(step):
    """Four rows by a score that grows with the place by `step`, so that of two equal ones the later one is first."""
    near, apart = (1 + np.arange(9) * each for each in (step, 1.0))
    constants = {
        name: value.astype(np.float32) for name, value in (("near", near), ("apart", apart))
    }
    return onnx_model(SELECTOR, {"x": ["n", 9]}, {"y": ["n", 4]}, k=np.array([4]), **constants)


def test_a_rewrite_may_swap_rows_and_may_not_take_others() -> None:
    x = np.tile(np.array([3, 1, 2, 2.5, 0, 5, 5, 4, 1], np.float32), (2, 1))
    before, after, other = (write_selector(each) for each in (0, 1e-6, 0.5))
    answers = []
    for graph in (before, after):
        with PlainSession(graph) as session:
            answers.append(session.run({"x": x})["y"])
    assert not np.allclose(answers[0], answers[1])
    assert RewriteGuard([{"x": x}]).find_difference(before, after) is None
    assert RewriteGuard([{"x": x}]).find_difference(before, other) is not None


def test_layers_behind_a_selection_are_compared_as_sets(tmp_path) -> None:
    """Rows of two columns: the second one tells which of two equal scores was taken first."""
    nodes = [
        ("ReduceMax", "x", "s", {"axes": [2], "keepdims": 0}),
        ("Add", "s ramp", "r"),
        ("TopK", "r k", ["v", "i"], {"axis": 1}),
        ("Unsqueeze", "i last", "u"),
        ("Expand", "u size", "e"),
        ("GatherElements", "x e", "chosen", {"axis": 1}),
        ("Neg", "chosen", "y"),
    ]
    x = RANDOM.standard_normal((1, 9, 2)).astype(np.float32) - 9
    x[0, :, 0] = [3, 1, 2, 2, 0, 5, 5, 4, 1]
    fixed = {"k": np.array([4]), "last": np.array([2]), "size": np.array([1, 4, 2])}
    paths = [tmp_path / f"{name}.onnx" for name in ("source", "build")]
    for path, step in zip(paths, (0, 1e-4), strict=True):
        ramp = (np.arange(9) * step).astype(np.float32)
        onnx_model(nodes, {"x": [1, 9, 2]}, {"y": [1, 4, 2]}, path=path, ramp=ramp, **fixed)
    specs = (InputSpec("x", "float32", x.shape, x.shape, x.shape),)
    source, build = (mark_source(path, specs) for path in paths)
    tensors = choose_tensors(source, build)

    def compare(selection):
        with OnnxRuntimeSession(paths[1], "cpu", {}) as session:
            found, _ = compare_tensors(
                source, build, [{"x": x}], tensors, session.run, selection=selection
            )
        return {each.tensor: each.error.relative for each in found}

    assert compare(EMPTY)["y"] > 0.1
    assert compare(read_selection(paths[0], inside=True))["y"] < 1e-3


def test_the_cost_of_a_layer_is_not_that_of_swapped_rows(monkeypatch, tmp_path) -> None:
    onnx_model(
        [("Identity", "x", "boxes")],
        {"x": ["n", 7, 4]},
        {"boxes": ["n", 7, 4]},
        path=tmp_path / "m.onnx",
    )
    answers = iter([dict(OUTPUTS), swap(OUTPUTS), spoil(OUTPUTS)])
    monkeypatch.setattr(sensitivity, "read_stored_card", lambda _: CARD)
    monkeypatch.setattr(sensitivity, "read_selection", lambda _: SELECTION)

    def open_session(*_: object) -> Any:
        outputs = next(answers)
        return SimpleNamespace(run=lambda names, _: [outputs[name] for name in names])

    monkeypatch.setattr(sensitivity, "open_model_session", open_session)
    model: Any = SimpleNamespace(file=lambda _: tmp_path / "m.onnx")
    samples = tensor_set_from_parts("s", [{"x": np.zeros((3, 2), np.float32)}])
    reference = sensitivity.Fp32Reference(model, samples)
    assert reference.measure_cost(None).snr_db == EXACT_DB
    wrong = reference.measure_cost(None).snr_db
    assert wrong is not None
    assert wrong < 10
