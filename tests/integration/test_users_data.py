"""A build is verified on the data that the user gave, and its SNR is that of a bare script."""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from tests.integration.conftest import optpipe
from tests.integration.test_odd_models import X, Y, built, saved


def network(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    v, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((8, 64), (64, 4)))
    nodes = [("MatMul", ["x", "v"], ["h"], {}), ("Relu", ["h"], ["r"], {}), ("MatMul", ["r", "w"], ["y"], {})]
    return saved(folder / "net.onnx", nodes, X, Y, v=v, w=w)


def data(folder: Path, count: int) -> Path:
    """Unlike normal noise: never negative, far from zero."""
    x = np.random.default_rng(1).uniform(5, 9, (count, 8))
    np.savez(folder / "given.npz", x=x.astype(np.float32))
    return folder / "given.npz"


def compute_snr(model: Path, artifact: Path, x: np.ndarray) -> float:
    expected, got = (onnxruntime.InferenceSession(each).run(None, {"x": x})[0] for each in (model, artifact))
    return float(-20 * np.log10(np.linalg.norm(got - expected) / np.linalg.norm(expected)))


@pytest.mark.parametrize(
    ("option", "count", "seen"),
    [("--calibration", 512, (128, "given.npz, held out from calibration")),
     ("--calibration", 12, (12, "given.npz, which INT8 and FP8 are calibrated on"))],
)  # fmt: skip
def test_the_snr_is_that_of_the_given_tensors(tmp_path, option, count, seen):
    path, given = network(tmp_path), data(tmp_path, count)
    ran = built(path, tmp_path / "work", "--precision", "int8", option, given, "--json")
    assert ran.status == 0, ran.stderr
    artifact = ran.document["artifacts"][0]
    assert (artifact["parity"]["samples"], artifact["parity"]["data"]) == seen
    snr = compute_snr(path, Path(artifact["path"]), np.load(given)["x"])
    assert artifact["parity"]["snr_db"] == pytest.approx(snr, abs=0.5)
    shown = built(path, tmp_path / "work", "--precision", "int8", option, given)
    assert f"{seen[0]} samples of {seen[1]}" in " ".join(shown.stdout.split())


def test_a_low_snr_is_a_warning_and_a_lower_one_fails_unless_it_is_allowed(tmp_path):
    path, given = network(tmp_path), data(tmp_path, 64)
    for least, status in (("200dB", 1), ("1dB", 0)):
        ran = built(
            path, tmp_path / "work", "--precision", "int8", "--calibration", given, "--min-snr", least, "--json"
        )
        assert ran.status == status
        assert ran.document["artifacts"][0]["parity"]["passed"] is (status == 0)


POLICY = """schema = 1
[[outputs]]
minimum_snr = "{snr}"
minimum_cosine = {cosine}
[[outputs]]
output = "y"
minimum_agreement = "80 %"
maximum_abs_error = {error}
"""


def test_a_policy_judges_the_outputs_without_labels(tmp_path):
    path, given = network(tmp_path), data(tmp_path, 512)
    assert built(path, tmp_path / "work", "--precision", "int8", "--calibration", given).status == 0
    verdicts = {}
    for name, limits in {
        "loose": {"snr": "15 dB", "cosine": 0.9, "error": 1e6},
        "tight": {"snr": "90 dB", "cosine": 0.9999999, "error": 1e-6},
    }.items():
        (tmp_path / f"{name}.toml").write_text(POLICY.format(**limits), encoding="utf-8")
        options = ("--policy", tmp_path / f"{name}.toml", "--output", tmp_path / name, "--no-measure", "--json")
        ran = optpipe("signoff", path.stem, *options, workspace=tmp_path / "work")
        criteria = ran.document["criteria"]
        verdicts[name] = {one["name"]: one["verdict"] for one in criteria if one["name"].startswith("outputs.")}
        checked = optpipe("verify", tmp_path / name, "--json")
        assert checked.document["intact"], checked.stdout
    names = ["minimum_snr", "minimum_cosine", "minimum_agreement.y", "maximum_abs_error.y"]
    # the largest value lies at the same place for every sample: their agreement shows nothing
    assert [verdicts["loose"][f"outputs.{each}"] for each in names] == ["PASS", "PASS", "INCONCLUSIVE", "PASS"]
    assert [verdicts["tight"][f"outputs.{each}"] for each in names] == ["FAIL", "FAIL", "INCONCLUSIVE", "FAIL"]
    errors = next((tmp_path / "loose").glob("builds/verification-*/errors.parquet"))
    errors.write_bytes(errors.read_bytes()[:-1] + b"?")
    assert optpipe("verify", tmp_path / "loose").status != 0
