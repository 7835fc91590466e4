"""Blocks of generative models as ordinary models: inputs of different rank, a time input, and the error after a trajectory."""

import sys
from pathlib import Path
from subprocess import run

import numpy as np
import pytest

from tests.fakes import blocks
from tests.fakes.graphs import onnx_model
from tests.integration.conftest import ROOT, optpipe

BATCH, COUNT = [1, 8, 16], 32
FLOAT, INT = "float32", "int64"
INPUTS = {
    "whisper_encoder": {"input_features": (FLOAT, [16, 40])},
    "text_encoder": {"input_ids": (INT, [12]), "attention_mask": (INT, [12])},
    "denoiser": {
        "sample": (FLOAT, [4, 8, 8]),
        "timestep": (INT, []),
        "encoder_hidden_states": (FLOAT, [6, 32]),
    },
    "vae_decoder": {"sample": (FLOAT, [4, 8, 8])},
}


def describe(name: str, dtype: str, shape: list[int], *, shared: bool) -> dict[str, object]:
    if shared:
        return {
            "name": name,
            "dtype": dtype,
            "min": shape,
            "opt": shape,
            "max": shape,
            "batch": "none",
        }
    sizes = zip(("min", "opt", "max"), BATCH, strict=True)
    return {"name": name, "dtype": dtype, **{key: [size, *shape] for key, size in sizes}}


def write_block(folder: Path, block: str, time: tuple[str, bool] = (INT, False)) -> str:
    """The model's file and its data; the type of the timestep, and whether a batch shares it."""
    inputs = INPUTS[block] | ({"timestep": (time[0], [])} if "timestep" in INPUTS[block] else {})
    listed = [
        describe(name, *each, shared=name == "timestep" and time[1])
        for name, each in inputs.items()
    ]
    (folder / "block.py").write_text(
        f"{Path(blocks.__file__).read_text()}\n\nINPUTS = {{{block!r}: {listed!r}}}\n"
    )
    for file, seed in (("calibration", 0), ("validation", 1)):
        rng = np.random.default_rng(seed)
        arrays: dict[str, np.ndarray] = {}
        for name, (dtype, shape) in inputs.items():
            arrays[name] = rng.standard_normal((COUNT, *shape), dtype=np.float32)
            if name == "timestep":
                arrays[name] = np.repeat(rng.integers(1, 1000, COUNT // 8), 8).astype(dtype)
            elif dtype == INT:
                arrays[name] = rng.integers(1, 99, (COUNT, *shape))
        if "attention_mask" in arrays:
            arrays["attention_mask"] = (np.arange(12) <= rng.integers(4, 12, (COUNT, 1))).astype(
                np.int64
            )
            arrays["input_ids"][:, 3] = 99  # the end of the text, which the encoder pools
        np.savez(folder / f"{file}.npz", **arrays)  # type: ignore[arg-type]
    return f"block.py:{block}"


def build(inside, folder: Path, model: str, *more: object):
    given = (
        "--calibration",
        "calibration.npz",
        "--data",
        "validation.npz",
        "--workspace",
        "work",
        "--json",
    )
    ran = inside("build", model, "--device", "cpu", *given, *more, cwd=folder)
    assert ran.status == 0, ran.stdout + ran.stderr
    return {each["precision"]: each for each in ran.document["artifacts"]}


@pytest.mark.parametrize("block", INPUTS)
def test_a_block_is_built_and_verified_in_fp32_and_int8(tmp_path, inside, block):
    if block in ("whisper_encoder", "text_encoder"):
        pytest.importorskip("transformers", reason="needs transformers: uv sync --extra hf")
    model = write_block(tmp_path, block)
    built = build(inside, tmp_path, model, "--precision", "fp32,int8", "--backend", "onnxruntime")
    assert {name: each["parity"]["passed"] for name, each in built.items()} == {
        "fp32": True,
        "int8": True,
    }
    assert built["int8"]["parity"]["samples"] == COUNT
    assert built["fp32"]["parity"]["snr_db"] > 100
    assert all(each["precision_proof"]["proven"] for each in built.values())


@pytest.mark.parametrize("time", [("float32", False), ("float32", True), ("int64", True)])
def test_a_denoiser_takes_its_time_as_a_vector_and_as_one_number(tmp_path, inside, time):
    model = write_block(tmp_path, "denoiser", time)
    options = ("--precision", "int8", "--backend", "onnxruntime", "--steps", "4")
    parity = build(inside, tmp_path, model, *options)["int8"]["parity"]
    (state,) = parity["trajectory"]
    start = 1000 if time[0] == "int64" else 1
    assert (parity["steps"], state["name"]) == (4, f"sample after 4 steps (timestep from {start})")
    assert parity["passed"]
    assert 0 < state["relative"] < 0.5
    shown = inside(
        "evaluate",
        model,
        "--layers",
        "all",
        "--data",
        "validation.npz",
        "--workspace",
        "work",
        cwd=tmp_path,
    )
    assert f"{state['name']}: {state['snr_db']:.0f}" in " ".join(shown.stdout.split())


def test_fp16_of_a_denoiser_is_built_for_tensorrt_and_runs_in_inductor(tmp_path, inside):
    model = write_block(tmp_path, "denoiser")
    ran = optpipe(
        "build", model, "--precision", "fp16", "--backend", "tensorrt-rtx", "--json", cwd=tmp_path
    ).expect(0)
    assert ran.document["artifacts"][0]["precision_proof"]["proven"]
    parity = build(
        inside, tmp_path, model, "--precision", "fp16", "--backend", "inductor", "--steps", "4"
    )["fp16"]
    assert parity["parity"]["snr_db"] > 40
    assert parity["parity"]["trajectory"][0]["snr_db"] > 40


VERIFIER = ROOT / "verifier" / "verify_dossier.py"
POLICY = """schema = 1
[build]
precision = "int8"
[[outputs]]
minimum_snr = "10 dB"
[[outputs]]
steps = {steps}
minimum_snr = "{snr} dB"
"""


def test_a_policy_limits_the_state_after_the_steps(tmp_path, inside):
    rng = np.random.default_rng(0)
    weights = {"v": rng.standard_normal((8, 64)), "w": rng.standard_normal((64, 8)) / 64}
    onnx_model(
        [("MatMul", "x v", "h"), ("Relu", "h", "r"), ("MatMul", "r w", "u"), ("Mul", "u t", "y")],
        {"x": ["N", 8], "t": ["N", 1]},
        {"y": ["N", 8]},
        path=tmp_path / "flow.onnx",
        **{name: value.astype(np.float32) for name, value in weights.items()},
    )
    for file in ("calibration", "validation"):
        x = rng.standard_normal((512, 8), dtype=np.float32)
        np.savez(tmp_path / f"{file}.npz", x=x, t=rng.random((512, 1), dtype=np.float32))
    options = ("--precision", "int8", "--backend", "onnxruntime")
    built = build(inside, tmp_path, "flow.onnx", *options, "--steps", "8")["int8"]["parity"]
    build(inside, tmp_path, "flow.onnx", *options)  # a newer comparison, without a trajectory
    state = built["trajectory"][0]["snr_db"]
    for name, steps, snr, verdict in (
        ("kept", 8, state - 6, "PASS"),
        ("broken", 8, state + 6, "FAIL"),
        ("other", 9, 1, "INCONCLUSIVE"),
    ):
        (tmp_path / f"{name}.toml").write_text(POLICY.format(steps=steps, snr=f"{snr:.2f}"))
        given = (
            "--policy",
            f"{name}.toml",
            "--output",
            name,
            "--no-measure",
            "--json",
            "--workspace",
            "work",
        )
        criteria = inside("signoff", "flow", *given, cwd=tmp_path).document["criteria"]
        judged = {one["name"]: one for one in criteria if one["name"].startswith("outputs.")}
        assert [one["verdict"] for one in judged.values()] == ["PASS", verdict]
        assert inside("verify", name, "--json", cwd=tmp_path).document["intact"]
        independent = run(
            [sys.executable, VERIFIER, tmp_path / name], capture_output=True, text=True, check=False
        )
        assert independent.returncode == 0, independent.stdout + independent.stderr
        found = judged[f"outputs.minimum_snr.{steps}-steps"]
        assert (
            ("--steps 9" in found["remedy"])
            if name == "other"
            else found["observed"] == pytest.approx(state)
        )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0", "expected N"),
        ("4:x:t:soon", "expected N"),
        ("4:y", "name the state as --steps 4:STATE, one of x"),
        ("4:x:x", "name the time as --steps 4:STATE:TIME, one of t"),
        ("500", "is not finite"),
    ],
)
def test_a_trajectory_that_cannot_be_followed_is_refused(tmp_path, inside, text, said):
    onnx_model(
        [("Mul", "x x", "z"), ("Mul", "z t", "y")],
        {"x": ["N", 8], "t": ["N", 1]},
        {"y": ["N", 8]},
        path=tmp_path / "square.onnx",
    )
    np.savez(
        tmp_path / "data.npz", x=np.full((32, 8), -99, np.float32), t=np.ones((32, 1), np.float32)
    )
    options = (
        "--precision",
        "fp32",
        "--backend",
        "onnxruntime",
        "--device",
        "cpu",
        "--data",
        "data.npz",
    )
    ran = inside("build", "square.onnx", *options, "--steps", text, cwd=tmp_path).expect(2)
    assert said in ran.stdout + ran.stderr
