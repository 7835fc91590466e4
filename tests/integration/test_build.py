import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from optpipe.workspace.places import find_shipped_folder
from tests.fakes.graphs import onnx_model
from tests.integration.conftest import Ran, optpipe

Run = Callable[..., Ran]


def test_the_document_has_what_it_promises(digits: Path) -> None:
    document = json.loads((digits / "build.json").read_text())
    assert document["model"] == "digits"
    assert document["weights"]["trained"]
    assert {(each["backend"], each["precision"]) for each in document["artifacts"]} == {
        ("tensorrt-rtx", "fp32"),
        ("tensorrt-rtx", "fp16"),
        ("onnxruntime", "fp32"),
    }
    for each in document["artifacts"]:
        assert each["precision_proof"]["share"]["macs"] == {each["precision"]: 1.0}
        assert each["precision_proof"]["proven"]
        assert (digits / each["path"]).stat().st_size == each["size_bytes"]
    ran_here = next(each for each in document["artifacts"] if each["backend"] == "onnxruntime")
    assert ran_here["parity"]["passed"]
    assert ran_here["parity"]["samples"] == 800
    assert ran_here["parity"]["top1_accuracy"] > 0.98
    assert ran_here["parity"]["top1_agreement"] == 1.0
    assert any("in fp32 instead" in warning for warning in document["warnings"])


def test_a_stored_model_is_built_again_without_torch(tmp_path: Path) -> None:
    build = [
        "build",
        "torchvision:squeezenet1_1",
        "--weights",
        "random",
        "--precision",
        "fp32",
        "--backend",
        "onnxruntime",
    ]
    optpipe(*build, cwd=tmp_path)
    program = (
        f"import sys; sys.argv = ['optpipe', *{build!r}]\n"
        "from optpipe.__main__ import main\n"
        "try: main()\n"
        "finally: assert not {'torch', 'torchvision', 'onnxruntime'} & set(sys.modules)\n"
    )
    again = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert again.returncode == 0, again.stderr


def test_a_corrupted_entry_is_named_by_show_and_rebuilt_by_build(digits: Path) -> None:
    entries = optpipe("store", "ls", "--json", cwd=digits).document["entries"]
    artifact = next(each for each in entries if each["backend"] == "onnxruntime")
    graph = digits / artifact["path"] / "model.onnx"
    graph.write_bytes(graph.read_bytes()[:-1] + b"\0\0")
    shown = optpipe("store", "show", artifact["id"], cwd=digits).expect(4)
    assert "damaged" in shown.stderr
    ran = optpipe(
        "build", "digits", "--precision", "fp32", "--backend", "onnxruntime", "--json", cwd=digits
    ).expect(0)
    assert any("being rebuilt" in warning for warning in ran.document["warnings"])


BAD_INPUT = {
    "unknown model": (["resnet5"], "did you mean resnet50"),
    "truncated": (["truncated.onnx"], "truncated"),
    "unknown input": (["digits", "--shape", "pixels=1x3x32x32"], "has inputs image"),
    "unknown option": (
        ["digits", "--backend", "onnxruntime", "--option", "onnxruntime.x=1"],
        "no option 'x'",
    ),
    "a pickle as weights": (["digits", "--weights", "evil.pt"], "would run code"),
    "INT8 without data": (
        ["fine.onnx", "--precision", "int8", "--backend", "tensorrt-rtx"],
        "needs real inputs to calibrate",
    ),
    "a workspace that is a file": (["digits", "--workspace", "text.onnx"], "--workspace"),
    "unknown operator": (
        ["strange.onnx", "--precision", "fp32", "--backend", "onnxruntime"],
        "some.where::Strange",
    ),
}


@pytest.fixture(scope="module")
def bad_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import pickle

    import numpy as np

    folder = tmp_path_factory.mktemp("bad")
    (folder / "text.onnx").write_text("this is no ONNX file\n" * 50)
    values = ({name: ["n", 3, 8, 8]} for name in "xyxy")
    weight, opsets = np.ones((3, 3, 1, 1), np.float32), {"": 17, "some.where": 1}
    onnx_model(
        [("Conv", "x w", "y")], next(values), next(values), path=folder / "fine.onnx", w=weight
    )
    strange = [("Strange", "x", "y", {"domain": "some.where"})]
    onnx_model(strange, next(values), next(values), opset=opsets, path=folder / "strange.onnx")
    content = (folder / "fine.onnx").read_bytes()
    (folder / "truncated.onnx").write_bytes(content[: len(content) // 2])
    (folder / "evil.pt").write_bytes(pickle.dumps(print))
    return folder


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_gives_one_clear_message(name: str, bad_files: Path, inside: Run) -> None:
    arguments, expected = BAD_INPUT[name]
    ran = inside("build", *arguments, cwd=bad_files)
    text = ran.stderr + ran.stdout
    assert expected in text, text
    assert ran.status == 2, text
    message = [line for line in ran.stderr.splitlines() if line.startswith("optpipe: ")]
    assert len(message) <= 1
    assert not list(bad_files.glob(".optpipe/tmp/*"))


def test_corrected_labels_are_read(tmp_path):
    for name in ("models", "calibration"):
        (tmp_path / name).mkdir()
    for name in ("models/digits", "models/digits.toml", "calibration/digits"):
        found = find_shipped_folder("models").parent / name
        (shutil.copytree if found.is_dir() else shutil.copy)(found, tmp_path / name)
    command = (
        "build",
        "models/digits.toml",
        "--precision",
        "fp32",
        "--backend",
        "onnxruntime",
        "--json",
    )
    before = optpipe(*command, cwd=tmp_path).document["artifacts"][0]["parity"]
    manifest = tmp_path / "calibration" / "digits" / "validation.json"
    value = json.loads(manifest.read_text())
    for each in value["files"]:
        each["label"] = str((int(each["label"]) + 1) % 10)
    manifest.write_text(json.dumps(value))
    after = optpipe(*command, cwd=tmp_path).document["artifacts"][0]["parity"]
    assert before["top1_accuracy"] > 0.9
    assert after["top1_accuracy"] < 0.1
