"""The backend as a user meets it: real builds, read back, verified, evaluated, measured, and judged."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

PRECISIONS = ("fp32", "int8")


def run(*words, folder, status=0):
    command = [sys.executable, "-P", "-m", "optpipe", *map(str, words), "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == status, done.stderr
    return json.loads(done.stdout) if done.stdout else done.stderr


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("openvino")
    document = run(
        *("build", "digits", "--precision", ",".join(PRECISIONS), "--backend", "openvino"),
        folder=folder,
    )
    return folder, {each["precision"]: each for each in document["artifacts"]}


def read_manifest(folder, artifact):
    path = folder / ".optpipe" / "store" / f"artifact-{artifact}" / "manifest.json"
    return json.loads(path.read_text())


def test_the_precision_is_read_from_the_compiled_model(workspace):
    folder, built = workspace
    for precision in PRECISIONS:
        info = read_manifest(folder, built[precision]["id"])["info"]
        assert info["precision_proof"]["share"]["macs"] == {precision: 1.0}


def test_int8_keeps_its_accuracy_on_this_processor(workspace):
    folder, _ = workspace
    document = run("evaluate", "digits", folder=folder)
    assert "openvino" in json.dumps(document)


def test_the_version_of_the_runtime_is_evidence(workspace):
    import openvino

    folder, built = workspace
    manifest = read_manifest(folder, built["int8"]["id"])
    assert manifest["info"]["packages"] == ["openvino"]
    recorded = manifest["environment"]["packages"]["openvino"]
    assert openvino.__version__.startswith(recorded)


def test_it_is_measured_in_processes_of_its_own(workspace):
    folder, built = workspace
    ids = [built[precision]["id"] for precision in PRECISIONS]
    document = run(
        "bench", *ids, "--batch", "1", "--processes", "1", "--max-time", "1", folder=folder
    )
    assert "openvino" in json.dumps(document)


def test_layers_can_be_compared(workspace):
    folder, _ = workspace
    document = run("evaluate", "digits", "--layers", "all", folder=folder)
    assert "Conv" in json.dumps(document)


def test_half_precision_is_refused_where_the_processor_lacks_it(workspace):
    from optpipe_openvino.runtime import list_capabilities

    if "FP16" in list_capabilities():
        pytest.skip("this processor computes FP16")
    folder, _ = workspace
    words = ("build", "digits", "--precision", "fp16", "--backend", "openvino")
    run(*words, folder=folder, status=3)


def test_inputs_that_do_not_fit_are_refused(workspace):
    from optpipe_openvino.runtime import OpenVinoSession

    from optpipe.core.errors import BadInputError
    from optpipe.core.precision import Precision

    folder, built = workspace
    path = folder / ".optpipe" / "store" / f"artifact-{built['fp32']['id']}" / "model.xml"
    with OpenVinoSession(path, Precision.FP32, {}) as session:
        images = np.ones((2, 3, 32, 32), np.float32)
        bound = session.bind({"image": images})
        bound.launch()
        np.testing.assert_array_equal(
            bound.outputs["logits"], session.run({"image": images})["logits"]
        )
        for wrong in ({"image": images[:, :2]}, {"other": images}):
            with pytest.raises(BadInputError):
                session.run(wrong)


def test_a_file_that_is_no_model_is_refused(tmp_path):
    from optpipe_openvino.runtime import OpenVinoSession

    from optpipe.core.errors import StageError
    from optpipe.core.precision import Precision

    path = Path(tmp_path / "model.xml")
    path.write_text("<net>")
    with pytest.raises(StageError):
        OpenVinoSession(path, Precision.FP32, {})
