"""`evaluate --layers` of a wrong INT8 build tries what mends it, and the build of the printed command keeps that quality."""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import optpipe

TENSOR = 6


@dataclass(frozen=True)
class Case:
    factor: float
    loss: str


@pytest.mark.parametrize(
    "case", [Case(1 / 40, "saturation"), Case(300, "")], ids=["saturated", "coarse"]
)
def test_a_wrong_range_has_a_remedy_that_was_tried(
    case: Case, exported: Any, tmp_path: Path
) -> None:
    workspace = exported(tmp_path / "workspace")
    optpipe(
        "calibrate", "digits", "--method", "max", "--output", tmp_path, workspace=workspace
    ).expect(0)
    path = tmp_path / "table-max.json"
    table = json.loads(path.read_text())
    planted = table["ranges"][list(table["ranges"])[TENSOR]]
    planted.update({end: value * case.factor for end, value in planted.items()})
    path.write_text(json.dumps(table))
    build = (
        "build",
        "digits",
        "--precision",
        "int8",
        "--backend",
        "onnxruntime",
        "--calibration",
        path,
    )
    optpipe(*build, workspace=workspace).expect(1)
    ran = optpipe("evaluate", "digits", "--layers", "all", "--json", workspace=workspace).expect(0)
    (found,) = (each for each in ran.document["builds"] if each["remedies"])
    last = found["remedies"][-1]
    assert found["evaluated"]["snr_db"] < 10 < 30 < last["result"]["snr_db"]
    assert last["result"]["accuracy"]["drop"] < 0.005 < found["evaluated"]["accuracy"]["drop"]
    assert last["rival"] == "onnxruntime fp32 (cpu)"
    assert last["speed"]["ci"][0] <= last["speed"]["value"] <= last["speed"]["ci"][1]
    assert bool(last["kept"]) == (not case.loss), "layers are kept only if no range mends it"
    assert bool(case.loss) == any((each["clipped"] or 0) > 0.1 for each in found["tensors"])
    assert optpipe(*shlex.split(last["command"])[1:]).expect(0), "the command builds it"


def test_an_unknown_tensor_is_named_although_other_builds_cannot_run(
    exported: Any, tmp_path: Path
) -> None:
    workspace = exported(tmp_path / "workspace")
    both = ("--precision", "fp32", "--backend", "tensorrt-rtx,onnxruntime")
    optpipe("build", "digits", *both, workspace=workspace).expect(0)
    ran = optpipe("evaluate", "digits", "--layers", "logitz", workspace=workspace).expect(2)
    assert "logits?" in ran.stderr
