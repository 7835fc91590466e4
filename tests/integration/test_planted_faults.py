"""Faults planted in the small trained models, each found by the verdict through `signoff`, by the criterion that it breaks.

All in this process, for most of a command's time would be imports; the models are ONNX files, which need no export.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from optpipe.cli.app import app
from optpipe.core.records import read_record
from optpipe.core.verdict import Verdict, VerdictRecord

MODELS = Path(__file__).parents[2] / "models"
POLICY = """schema = 1
name = "planted"
model = "planted.toml"

[build]
backend = "onnxruntime"
precision = "fp32"

[accuracy]
minimum_score = "{minimum}"
"""
MINIMUM = {"shapes-detector": "45 AP", "shapes-segmenter": "60 mIoU"}
Plant = Callable[[onnx.ModelProto], None]


def append_node(
    model: onnx.ModelProto, operator: str, constant: np.ndarray, **attributes: int
) -> None:
    """`constant` and the graph's output through one more node, under the output's old name."""
    graph = model.graph
    name = graph.output[0].name
    for node in graph.node:
        node.output[:] = [f"{each}_before" if each == name else each for each in node.output]
    graph.initializer.append(numpy_helper.from_array(constant, "planted"))
    graph.node.append(
        helper.make_node(operator, [f"{name}_before", "planted"], [name], **attributes)
    )


def shift_boxes(model: onnx.ModelProto) -> None:
    """To the right and down by 2 % of the image's sides."""
    append_node(model, "Add", np.array([1.28, 1.28, 0, 0, 0, 0, 0], np.float32)[None, :, None])


def swap_classes(first: int, channels: int) -> Plant:
    """The two channels from `first` on."""
    order = np.arange(channels)
    order[[first, first + 1]] = first + 1, first
    return lambda model: append_node(model, "Gather", order, axis=1)


def untrain_head(model: onnx.ModelProto) -> None:
    """The weights of the last convolution are drawn anew, with the same spread."""
    names = [node.input[1] for node in model.graph.node if node.op_type == "Conv"]
    weights = next(each for each in model.graph.initializer if each.name == names[-1])
    values = numpy_helper.to_array(weights)
    drawn = np.random.default_rng(0).normal(0, values.std(), values.shape).astype(values.dtype)
    weights.CopyFrom(numpy_helper.from_array(drawn, weights.name))


def leave(model: onnx.ModelProto) -> None:
    """Nothing is planted in the graph."""


RESIZE = 'size = [64, 64]\nfit = "exact"\ninterpolation = "bilinear"\nantialias = true\n'
CROP = """size = [96]
fit = "short"
interpolation = "bilinear"
antialias = true

[[preprocessing.steps]]
step = "center_crop"
height = 64
width = 64
"""
FAULTS: dict[str, tuple[str, Plant, tuple[str, str] | None]] = {
    "none in the detector": ("shapes-detector", leave, None),
    "boxes shifted by 2 %": ("shapes-detector", shift_boxes, None),
    "NMS with another threshold": ("shapes-detector", leave, ("nms_iou = 0.5", "nms_iou = 0.95")),
    "none in the segmenter": ("shapes-segmenter", leave, None),
    "two classes swapped": ("shapes-segmenter", swap_classes(1, 4), None),
    "untrained head": ("shapes-segmenter", untrain_head, None),
    "another resize": ("shapes-segmenter", leave, (RESIZE, CROP)),
}


@pytest.fixture(scope="module")
def graphs(
    tmp_path_factory: pytest.TempPathFactory, shapes: Callable[[str, Path], Path]
) -> dict[str, Path]:
    """The two models as ONNX files."""
    folder = tmp_path_factory.mktemp("graphs")
    return {
        name: next(shapes(name, folder / name).glob("store/model-*/model.onnx")) for name in MINIMUM
    }


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Path]:
    before = Path.cwd()
    os.chdir(tmp_path)
    yield tmp_path
    os.chdir(before)


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        app([*map(str, arguments)])
    return int(ended.value.code or 0)


def write_card(model: str, folder: Path, change: tuple[str, str] | None) -> None:
    """The shipped card, of the graph in `folder`, with one change."""
    lines = (
        (MODELS / f"{model}.toml")
        .read_text()
        .replace("../calibration", str(MODELS.parent / "calibration"))
    )
    if change is not None:
        assert change[0] in lines
        lines = lines.replace(*change)
    kept = [
        line
        for line in lines.splitlines()
        if not line.startswith(("source =", "weights", "weights_sha256"))
    ]
    kept.insert(kept.index("[license]"), 'source = "planted.onnx"\n')
    (folder / "planted.toml").write_text("\n".join(kept) + "\n")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_fails_by_its_criterion(
    graphs: dict[str, Path], here: Path, fault: str
) -> None:
    model, plant, change = FAULTS[fault]
    graph = onnx.load(graphs[model])
    plant(graph)
    onnx.save(graph, here / "planted.onnx")
    write_card(model, here, change)
    (here / "policy.toml").write_text(POLICY.format(minimum=MINIMUM[model]))
    assert run("build", "planted.toml", "--precision", "fp32", "--backend", "onnxruntime") == 0
    assert run("evaluate", "planted.toml", "--count", "80") == 0
    status = run(
        "signoff", "planted.toml", "--policy", "policy.toml", "--no-measure", "--no-figures"
    )
    found = read_record(
        next((here / ".optpipe" / "dossiers").glob("*/verdict.json")), VerdictRecord
    )
    verdicts = {each.name: each.verdict for each in found.criteria}
    criterion = f"accuracy.minimum_score.{MINIMUM[model].split()[1]}"
    if fault.startswith("none"):
        assert status == 5  # speed is not measured
        assert verdicts.pop("trust.environment") == Verdict.INCONCLUSIVE
        assert set(verdicts.values()) == {Verdict.PASS}
        assert criterion in verdicts
        return
    assert status == 1
    assert [name for name, verdict in verdicts.items() if verdict == Verdict.FAIL] == [criterion]
