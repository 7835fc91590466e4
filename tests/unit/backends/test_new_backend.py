"""A new runtime is one class and one entry of the registry: build, verify, doctor, look-up, options and `auto` follow."""

import ast
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from tests.fakes.entries import artifact_info
from tests.fakes.extensions.optpipe_toy import Toy
from tests.fakes.graphs import onnx_model

import optpipe
from optpipe.backends.registry import BACKENDS, backends_from_text, resolve_effective_options
from optpipe.build.build import build_model
from optpipe.build.doctor import diagnose_machine
from optpipe.build.plan import BuildPlan
from optpipe.core.card import card_from_file
from optpipe.core.entries import ReferenceInfo, WeightsRequest
from optpipe.core.errors import BadInputError
from optpipe.core.events import SilentListener
from optpipe.core.precision import Precision
from optpipe.core.verdict import Verdict
from optpipe.deploy.check import check_deployment
from optpipe.deploy.records import DossierReference
from optpipe.deploy.repository import write_deployment
from optpipe.deploy.session_process import open_artifact
from optpipe.measure.worker.messages import session_from_store
from optpipe.models.artifacts.lookup import find_artifacts, select_runnable
from optpipe.models.export.exported import Model
from optpipe.models.sources.onnx_file import OnnxFileSource
from optpipe.signoff.policy import policy_from_toml
from optpipe.stats.selected_rows import EMPTY
from optpipe.trace import record
from optpipe.trace.record import INPUTS, InferenceJob, WorkerJob
from optpipe.workspace.arrays import write_arrays
from optpipe.workspace.file_names import CARD
from optpipe.workspace.store import Store


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setitem(BACKENDS, "toy", Toy())
    return BACKENDS["toy"]


def build(folder, backend, **options):
    weight = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
    shapes = {"x": ["n", 4]}, {"y": ["n", 4]}
    onnx_model([("MatMul", "x w", "y", {"name": "m"})], *shapes, path=folder / "net.onnx", w=weight)
    store, model = (
        Store(folder / "work"),
        Model(OnnxFileSource(folder / "net.onnx"), WeightsRequest()),
    )
    plan = BuildPlan((Precision.FP32,), (backend,), named=True, options={"toy": options})
    return build_model(model, plan, store, SilentListener()), store


def test_it_is_built_proven_verified_found_and_loaded(tmp_path, toy) -> None:
    result, store = build(tmp_path, toy)
    (built,) = result.artifacts
    assert built.passed
    assert built.entry.info.precision_proof.share.macs == {"fp32": 1.0}
    (found,), _ = select_runnable(find_artifacts("net", store))
    assert found.label == "toy fp32 (cpu)"
    assert found.resolve_effective_options({"toy": {"scale": "2"}}) == {"scale": 2}
    with session_from_store(str(store.workspace), found.entry.path.name, {}) as session:
        assert session.run({"x": np.zeros((2, 4), np.float32)})["y"].shape == (2, 4)


def test_wrong_outputs_are_found(tmp_path, toy) -> None:
    (built,) = build(tmp_path, toy, scale=2)[0].artifacts
    assert built.verification.info.passed is False
    assert built.verification.info.outputs[0].relative == pytest.approx(1.0)


def test_the_command_line_and_doctor_know_it(toy) -> None:
    assert backends_from_text("toy", None) == (toy,)
    with pytest.raises(BadInputError, match="inductor, torch, toy"):
        backends_from_text("other", None)
    (status,) = [each for each in diagnose_machine() if each.name == "backend toy"]
    assert (status.version, status.adds) == (onnx.__version__, "a proof that backends are open")


def test_it_is_deployed_behind_a_session_of_optpipe(tmp_path, toy) -> None:
    pytest.importorskip("tritonclient.grpc.model_config_pb2", reason="needs the extra `triton`")
    result, store = build(tmp_path, toy, scale=2)
    (built,), (samples,) = result.artifacts, store.list_entries(ReferenceInfo)
    signed: Any = SimpleNamespace(
        artifact=built.entry,
        verification=built.verification,
        card=card_from_file(result.model.file(CARD)),
        samples=samples,
        selection=EMPTY,
        policy=policy_from_toml(b'schema = 1\n[size]\nmaximum = "1 MiB"\n'),
        reference=DossierReference("dossier", "0" * 64, Verdict.PASS, (), None),
        preprocessing=None,
        measured=(),
        place=built.entry.manifest.environment,
        runs=(),
    )
    write_deployment(signed, tmp_path / "served", store, "triton")
    checked = check_deployment(tmp_path / "served")
    assert "needs optpipe on the server" in checked.record.triton
    assert checked.serving is not None
    assert checked.serving.own_session
    model = tmp_path / "served" / "models" / checked.record.engine
    assert 'backend: "python"' in (model / "config.pbtxt").read_text()
    inputs = {"x": np.ones((2, 4), np.float32)}
    (answer,) = open_artifact(model / "1", checked.record.options)([inputs])
    with session_from_store(str(store.workspace), built.entry.path.name, {}) as session:
        np.testing.assert_array_equal(answer["y"], session.run(inputs)["y"])


def test_its_layers_are_profiled(tmp_path, toy, monkeypatch) -> None:
    monkeypatch.setattr(record, "measure_cpu_peaks", lambda _: None)
    monkeypatch.setattr(toy, "time_layers", lambda *_: {"m": 1000.0})
    result, store = build(tmp_path, toy)
    (built,) = result.artifacts
    work = InferenceJob(store.workspace, built.entry.id, toy.name, "cpu", {}, 2)
    job = WorkerJob(tmp_path, iterations=2, work=work)
    write_arrays(tmp_path / INPUTS, {"x": np.ones((2, 4), np.float32)})
    found = record.run_job(job)
    assert found.layer_ns == {"m": 1000.0}
    assert found.unprofiled_iteration_ns > 0


def test_no_other_room_asks_for_a_backend_s_name_or_reads_its_details() -> None:
    """A backend answers for itself; what is compared elsewhere are Q/DQ placements, profilers and resampling kernels."""
    package = Path(optpipe.__file__).parent
    asked = []
    for path in package.rglob("*.py"):
        text = path.read_text()
        if package / "backends" in path.parents:
            continue
        assert "info.details" not in text, path
        if not any(f'"{name}"' in text for name in BACKENDS):
            continue
        for node in ast.walk(ast.parse(text)):
            said: list[ast.AST | None] = []
            if isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                known = any(
                    name in ("target", "tracer", "kernel") for name in map(get_last_name, sides)
                )
                said += [] if known else [each for side in sides for each in ast.walk(side)]
            elif isinstance(node, ast.Dict):
                said += node.keys if all(is_name_of_backend(each) for each in node.keys) else []
            elif isinstance(node, ast.MatchValue):
                said = [node.value]
            if any(map(is_name_of_backend, said)):
                asked.append(f"{path.relative_to(package)}: {ast.unparse(node)}")
    assert asked == []


def get_last_name(node: ast.AST) -> str | None:
    return (
        node.attr
        if isinstance(node, ast.Attribute)
        else node.id
        if isinstance(node, ast.Name)
        else None
    )


def is_name_of_backend(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and node.value in BACKENDS


INFO = artifact_info(device="cuda", options={"nhwc": False})


def test_text_from_the_command_line_is_read_as_the_type_of_its_option():
    found = resolve_effective_options(INFO, {"cuda_graph": "false", "cudnn_search": "HEURISTIC"})
    assert found == {
        "nhwc": False,
        "cuda_graph": False,
        "cudnn_search": "HEURISTIC",
        "fuse_conv_bias": False,
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [("nhwc", "maybe"), ("layout", "nhwc"), ("optimization_level", "99"), ("optimization_level", "-2"), ("workspace_bytes", "-1")],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused_by_name(name, value):
    at_run_time = partial(resolve_effective_options, INFO)
    read = (
        at_run_time
        if name in ("nhwc", "layout")
        else partial(BACKENDS["tensorrt-rtx"].recipe, "cuda")
    )
    with pytest.raises(BadInputError, match=name):
        read({name: value})


@pytest.mark.parametrize("name", ["tensorrt", "tensorrt-rtx", "torch-tensorrt", "inductor"])
def test_what_only_a_build_takes_is_not_in_force_at_run_time(name):
    built = artifact_info(
        backend=name, device="cuda", options=BACKENDS[name].recipe("cuda", {})["options"]
    )
    assert resolve_effective_options(built, {}).keys() <= {"cuda_graph"}
    given = next(key for key in built.options if key != "cuda_graph")
    with pytest.raises(
        BadInputError,
        match=rf"is a build option of {name}: optpipe build --option {name}\.{given}=7",
    ):
        resolve_effective_options(built, {given: "7"})


def serve(backend="tensorrt", options=(), version="1.31.1"):
    info = artifact_info(backend=backend, device="cuda", details={"builder": {}})
    return BACKENDS[backend].serving(info, dict(options), version)


def test_options_that_a_server_does_not_take_over_are_named() -> None:
    found = serve("onnxruntime", {"threads": 2, "nhwc": True})
    assert (dict(found.parameters), found.not_carried) == (
        {"intra_op_thread_count": "2"},
        ("nhwc",),
    )
    assert serve("tensorrt", {"cuda_graph": True}).cuda_graph
    assert serve("inductor", {"cuda_graph": True}).not_carried == ("cuda_graph",)
    assert serve("torch", {"cuda_graph": True}).not_carried == ()
