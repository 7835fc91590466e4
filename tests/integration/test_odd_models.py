"""ONNX files such as people have them, third-party ones too, and data of theirs that a build is verified on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from tests.fakes.dossiers import examine
from tests.fakes.graphs import onnx_model
from tests.integration.conftest import Ran, optpipe

QUICK = (
    "--processes", "1", "--min-time", "0.2", "--percentile", "90", "--set", "warm-up=0.1", "--set", "max-warm-up=1",
    "--max-time", "2", "--json",
)  # fmt: skip

X, Y = {"x": ["N", 8]}, {"y": ["N", 4]}
THROUGH = ("MatMul", "x w", "z")


def saved(path: Path, nodes, inputs, outputs, **constants) -> Path:
    onnx_model(nodes, inputs, outputs, path=path, **constants)
    return path


def weights(seed=0):
    return np.random.default_rng(seed).standard_normal((8, 4)).astype(np.float32)


def linear(path: Path, seed=0) -> Path:
    return saved(path, [("MatMul", "x w", "y")], X, Y, w=weights(seed))


@pytest.fixture
def built(inside, tmp_path):
    """`built(model, workspace, ...)` in this process: most of a command's time would be imports."""
    options = ("--precision", "fp32", "--backend", "onnxruntime", "--device", "cpu")
    return lambda path, workspace, *more: inside(
        "build", path, *options, *more, "--workspace", workspace, cwd=tmp_path
    )


def with_external_data(path: Path) -> Path:
    onnx.save(
        onnx.load(path), path, save_as_external_data=True, location="net.bin", size_threshold=0
    )
    return path


def behind_a_card(path: Path) -> Path:
    card = path.with_name("twin.toml")
    card.write_text('name = "twin"\nsource = "net.onnx"\n', encoding="utf-8")
    return card


@pytest.mark.parametrize("give", [lambda path: path, with_external_data, behind_a_card])
def test_two_files_of_one_name_are_not_taken_for_each_other(tmp_path, give, built):
    given = [
        give(linear(tmp_path / name / "net.onnx", seed)) for name, seed in (("a", 1), ("b", 2))
    ]
    ids = [
        built(each, tmp_path / "work", "--json").document["artifacts"][0]["id"] for each in given
    ]
    for path, expected in zip(given, ids, strict=True):
        found = optpipe("bench", path, "--batch", "1", *QUICK, workspace=tmp_path / "work").document
        assert [each["subject"]["artifact"] for each in found["measurements"]] == [expected]
    first = give(linear(tmp_path / "a" / "net.onnx", 3))
    changed = optpipe("bench", first, "--batch", "1", *QUICK, workspace=tmp_path / "work").expect(2)
    assert "they are of another file" in changed.stderr
    assert f"optpipe build {first}" in changed.stderr


REFUSED: dict[str, Any] = {
    "one value for a batch": (
        [("ReduceMean", "z", "y", {"keepdims": 0})], {"y": []}, "output 'y' is a single value for a whole batch",
    ),
    "no numbers": ([("Sub", "z z", "n"), ("Div", "n n", "y")], Y, "produces NaN or Inf in output 'y'"),
    "drawn at random": ([("RandomNormalLike", "z", "r"), ("Add", "z r", "y")], Y, "is not deterministic (output 'y')"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_compared_input_by_input_is_said_of_the_model(tmp_path, case, built):
    nodes, outputs, words = REFUSED[case]
    path = saved(
        tmp_path / "net.onnx", [THROUGH, *nodes], X, outputs, w=weights(), zero=np.float32(0)
    )
    ran = built(path, tmp_path / "work")
    assert ran.status in (1, 2)
    assert words in ran.stderr
    assert "Warning" not in ran.stderr


MEASURED: dict[str, Any] = {
    "several inputs": ([("Add", "x b", "s"), ("MatMul", "s w", "y")], {**X, "b": ["N", 8]}, Y),
    "bytes in": ([("Cast", "x", "f", {"to": 1}), ("MatMul", "f w", "y")], {"x": ("UINT8", ["N", 8])}, Y),
    "identifiers in": (
        [("Gather", "w x", "e"), ("ReduceMax", "e", "y", {"axes": [1], "keepdims": 0})], {"x": ("INT64", ["N", 5])}, Y,
    ),
    "classes out": ([THROUGH, ("ArgMax", "z", "y", {"axis": 1, "keepdims": 0})], X, {"y": ("INT64", ["N"])}),
}  # fmt: skip


@pytest.mark.parametrize("case", MEASURED)
def test_inputs_and_outputs_that_are_no_images_and_no_logits_are_measured_and_checked(
    tmp_path, case, built
):
    nodes, inputs, outputs = MEASURED[case]
    path = saved(tmp_path / "net.onnx", nodes, inputs, outputs, w=weights())
    assert built(path, tmp_path / "work", "--batch", "1:2:4").status == 0
    found = optpipe("bench", path, "--batch", "4", *QUICK, workspace=tmp_path / "work").document[
        "measurements"
    ][0]
    assert found["output_check"]["passed"]
    assert "source model" in found["output_check"]["reference"]
    assert found["inputs"]["kind"] == "synthetic"
    assert not found["load"]["images"]


DEPENDS_ON_THE_BATCH = """import torch

INPUTS = [{"name": "x", "dtype": "float32", "min": [1, 8], "opt": [4, 8], "max": [16, 8]}]


class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 10)

    def forward(self, x):
        y = self.layer(x)
        if x.shape[0] == 1:
            BRANCH
        return y


def make():
    return Branches()
"""


@pytest.mark.parametrize(
    ("branch", "said"),
    [
        ("y = y * 2", "gives other outputs at batch size 1: "),
        ("y = y.squeeze()", "is (10,), not (1, 10)"),
        (
            "raise ValueError('one is not enough')",
            "does not run at batch size 1: one is not enough",
        ),
    ],
)
def test_a_module_that_depends_on_the_batch_size_is_refused_and_built_for_one(
    tmp_path, branch, said, built
):
    file = tmp_path / "branches.py"
    file.write_text(DEPENDS_ON_THE_BATCH.replace("BRANCH", branch), encoding="utf-8")
    ran = built(f"{file}:make", tmp_path / "work").expect(1)
    assert said in ran.stderr
    assert ran.stderr.strip().endswith("build it for one: --batch N")
    assert built(f"{file}:make", tmp_path / "work", "--batch", "8").status == 0


def network(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    v, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((8, 64), (64, 4)))
    nodes = [
        ("MatMul", ["x", "v"], ["h"], {}),
        ("Relu", ["h"], ["r"], {}),
        ("MatMul", ["r", "w"], ["y"], {}),
    ]
    return saved(folder / "net.onnx", nodes, X, Y, v=v, w=w)


def data(folder: Path, count: int) -> Path:
    """Unlike normal noise: never negative, far from zero."""
    x = np.random.default_rng(1).uniform(5, 9, (count, 8))
    np.savez(folder / "given.npz", x=x.astype(np.float32))
    return folder / "given.npz"


def compute_snr(model: Path, artifact: Path, x: np.ndarray) -> float:
    expected, got = (
        onnxruntime.InferenceSession(each).run(None, {"x": x})[0] for each in (model, artifact)
    )
    return float(-20 * np.log10(np.linalg.norm(got - expected) / np.linalg.norm(expected)))


@pytest.mark.parametrize(
    ("option", "count", "seen"),
    [("--calibration", 512, (128, "given.npz, held out from calibration")),
     ("--calibration", 12, (12, "given.npz, which INT8 and FP8 are calibrated on"))],
)  # fmt: skip
def test_the_snr_is_that_of_the_given_tensors(tmp_path, option, count, seen, built):
    path, given = network(tmp_path), data(tmp_path, count)
    ran = built(path, tmp_path / "work", "--precision", "int8", option, given, "--json").expect(0)
    artifact = ran.document["artifacts"][0]
    assert (artifact["parity"]["samples"], artifact["parity"]["data"]) == seen
    snr = compute_snr(path, Path(artifact["path"]), np.load(given)["x"])
    assert artifact["parity"]["snr_db"] == pytest.approx(
        snr, abs=1.0
    )  # that of the samples held out scatters
    shown = built(path, tmp_path / "work", "--precision", "int8", option, given)
    assert f"{seen[0]} samples of {seen[1]}" in " ".join(shown.stdout.split())


def test_a_low_snr_is_a_warning_and_a_lower_one_fails_unless_it_is_allowed(tmp_path, built):
    path, given = network(tmp_path), data(tmp_path, 64)
    for snr, status in (("200dB", 1), ("1dB", 0)):
        ran = built(
            path,
            tmp_path / "work",
            "--precision",
            "int8",
            "--calibration",
            given,
            "--min-snr",
            snr,
            "--json",
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


def test_a_policy_judges_the_outputs_without_labels(tmp_path, built, inside):
    path, given = network(tmp_path), data(tmp_path, 512)
    assert built(path, tmp_path / "work", "--precision", "int8", "--calibration", given).status == 0
    verdicts = {}
    for name, limits in {
        "loose": {"snr": "15 dB", "cosine": 0.9, "error": 1e6},
        "tight": {"snr": "90 dB", "cosine": 0.9999999, "error": 1e-6},
    }.items():
        (tmp_path / f"{name}.toml").write_text(POLICY.format(**limits), encoding="utf-8")
        options = (
            "--policy",
            f"{name}.toml",
            "--output",
            name,
            "--no-measure",
            "--json",
            "--workspace",
            "work",
        )
        criteria = inside("signoff", path.stem, *options, cwd=tmp_path).document["criteria"]
        verdicts[name] = {
            one["name"]: one["verdict"] for one in criteria if one["name"].startswith("outputs.")
        }
        checked = inside("verify", name, "--json", cwd=tmp_path)
        assert checked.document["intact"], checked.stdout
        found, _ = examine(tmp_path / name)
        assert (found.differs, found.open) == ([], [])
    names = ["minimum_snr", "minimum_cosine", "minimum_agreement.y", "maximum_abs_error.y"]
    # the largest value lies at the same place for every sample: their agreement shows nothing
    assert [verdicts["loose"][f"outputs.{each}"] for each in names] == [
        "PASS",
        "PASS",
        "INCONCLUSIVE",
        "PASS",
    ]
    # a few dozen samples that all lose a little do not exclude that others lose nothing
    assert [verdicts["tight"][f"outputs.{each}"] for each in names] == [
        "FAIL",
        "INCONCLUSIVE",
        "INCONCLUSIVE",
        "FAIL",
    ]
    errors = next((tmp_path / "loose").glob("builds/verification-*/errors.parquet"))
    errors.write_bytes(errors.read_bytes()[:-1] + b"?")
    assert inside("verify", "loose", cwd=tmp_path).status != 0


Run = Callable[..., Ran]
LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"


CHOOSES_AMONG_EQUALS = """import torch

INPUTS = [{"name": "x", "dtype": "float32", "min": [1, 64, 8], "opt": [4, 64, 8], "max": [8, 64, 8]}]


class Queries(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.score, self.box = torch.nn.Linear(8, 3), torch.nn.Linear(8, 4)
        self.mixed = torch.nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        level = x.mean(-1)
        best = torch.where(level > 0.3, level, torch.zeros_like(level)).topk(20).indices
        chosen = x.gather(1, best[..., None].expand(-1, -1, 8))
        chosen = chosen + self.mixed(chosen, chosen, chosen)[0]
        return self.score(chosen), self.box(chosen)


def make():
    return Queries()
"""


def test_rows_chosen_among_equal_scores_are_those_of_the_module(tmp_path, inside) -> None:
    """As in RT-DETR: most anchors are masked, so that the edge of TopK lies among equal scores."""
    (tmp_path / "net.py").write_text(CHOOSES_AMONG_EQUALS)
    rows = np.random.default_rng(0).standard_normal((32, 64, 8)).astype(np.float32)
    np.savez(tmp_path / "rows.npz", x=rows)
    options = ("--weights", "random", "--backend", "onnxruntime", "--device", "cpu", "--json")
    more = ("--calibration", "rows.npz", "--min-snr", "0dB", "--workspace", tmp_path / "work")
    ran = inside(
        "build", "net.py:make", "--precision", "fp32,int8", *options, *more, cwd=tmp_path
    ).expect(0)
    exact, quantized = (each["parity"] for each in ran.document["artifacts"])
    assert exact["passed"]
    assert exact["snr_db"] is None or exact["snr_db"] > 100
    assert quantized["snr_db"] > 20


@pytest.mark.parametrize("name", ["squeezenet", "shufflenet", "inception_v2"])
def test_third_party_onnx_files(name: str, run: Run) -> None:
    """Old IR, opset 8 or 9, weights listed as inputs; the larger ones are left to a run by hand, for their time."""
    ran = run("build", LIGHT / f"light_{name}.onnx", "--precision", "fp32", "--json").expect(0)
    assert {each["backend"] for each in ran.document["artifacts"]} == {
        "tensorrt-rtx",
        "onnxruntime",
    }


def test_an_onnx_file_with_external_data_and_two_inputs(run: Run, tmp_path: Path) -> None:
    import numpy as np

    weight = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
    inputs = {name: ["n", 64] for name in ("left", "right")}
    model = onnx_model(
        [("Add", "left right", "sum"), ("MatMul", "sum w", "out")],
        inputs,
        {"out": ["n", 32]},
        w=weight,
    )
    onnx.save(
        model,
        tmp_path / "two.onnx",
        save_as_external_data=True,
        location="two.bin",
        size_threshold=0,
    )
    run("build", "two.onnx", "--precision", "fp32", "--json").expect(0)
    (tmp_path / "two.bin").unlink()
    missing = run("build", "two.onnx", "--precision", "fp32").expect(2)
    assert "external data" in missing.stderr


def test_published_weights_that_cannot_be_had(run: Run) -> None:
    """Without a network the build goes on with random weights and says so; with one it has real weights."""
    ran = run(
        "build", "squeezenet1_1", "--precision", "fp32", "--backend", "onnxruntime", "--json"
    ).expect(0)
    weights = ran.document["weights"]
    assert weights["trained"] == (ran.document["fallback_reason"] is None)
    assert weights["trained"] == (
        not any("random weights" in warning for warning in ran.document["warnings"])
    )


def test_an_image_model_of_hugging_face(run: Run, tmp_path: Path) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="needs transformers: uv sync --extra hf"
    )
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        num_labels=3,
        image_size=32,
        patch_size=8,
    )
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "model")
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(
        tmp_path / "model"
    )
    ran = run("build", "hf:model", "--precision", "fp32", "--json").expect(0)
    assert all(
        each["parity"] is None or each["parity"]["passed"] for each in ran.document["artifacts"]
    )
