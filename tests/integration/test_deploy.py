"""From a dossier to a model repository that a running Triton has proven; planted faults are refused, and nothing is left."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import jsonschema
import pytest
import yaml

from optpipe.workspace.seal import seal_folder
from tests.integration.conftest import SERVER, needs_server, optpipe

pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed: the extra `triton`")


FAKES = Path(__file__).parents[1] / "fakes"


@pytest.fixture(scope="module")
def deployed(signed, tmp_path_factory):
    """The dossier's folder with a deployment beside it."""
    found = signed(tmp_path_factory.mktemp("deploy") / "signed")
    target = found.dossier.parent / "deployment"
    optpipe("deploy", found.dossier, "--output", target, workspace=found.workspace).expect(0)
    return found


@pytest.fixture
def deployment(deployed, tmp_path):
    return Path(shutil.copytree(deployed.dossier.parent / "deployment", tmp_path / "deployment"))


def prove(folder, workspace, *more, **environment):
    words = ("deploy", "--check", folder, "--prove", *more)
    ran = optpipe(*words, workspace=workspace, **environment)
    left = subprocess.run(
        ["pgrep", "-f", f"{folder}|model-repository={workspace}"], capture_output=True, text=True
    )
    assert left.stdout == "", "no server and no session may be left"
    assert not list((workspace / "tmp").glob("prove-*"))
    return ran


@needs_server
def test_an_ensemble_from_images_to_labels_is_proven_over_http_and_grpc(deployed, tmp_path):
    proof = (
        optpipe(
            "deploy",
            deployed.dossier,
            "--to",
            "triton",
            "--output",
            "served",
            "--prove",
            "--json",
            workspace=deployed.workspace,
            cwd=tmp_path,
        )
        .expect(0)
        .document["proof"]
    )
    assert [(each["model"], each["protocol"]) for each in proof["comparisons"]] == [
        ("digits_engine", "http"),
        ("digits", "http"),
        ("digits_engine", "grpc"),
        ("digits", "grpc"),
    ]
    for each in proof["comparisons"]:
        assert each["requests"] == each["equal_bits"] > 0
    assert proof["comparisons"][1]["predictions"] == "32 of 32 equal to the signed-off predictions"
    proven = proof["models"]
    assert proven["digits"] == "served by tritonserver"
    assert proven["digits_engine"].startswith("configured, not run: onnxruntime")


FAULTS = {
    "wrong dtype": (
        "digits_engine/config.pbtxt",
        "TYPE_FP32",
        "TYPE_FP16",
        "TYPE_FP16 [3, 32, 32] in config.pbtxt, TYPE_FP32 [3, 32, 32]",
    ),
    "wrong layout": (
        "digits_engine/config.pbtxt",
        "dims: 3\n  dims: 32\n  dims: 32",
        "dims: 32\n  dims: 32\n  dims: 3",
        "TYPE_FP32 [32, 32, 3] in config.pbtxt, TYPE_FP32 [3, 32, 32]",
    ),
    "other label order": ("digits/labels.txt", "0\n1\n2\n", "0\n2\n1\n", "differs from class 1 on"),
    "missing warm-up": (
        "digits_engine/config.pbtxt",
        r"model_warmup .*(?=backend)",
        "",
        "model_warmup is missing",
    ),
    "other preprocessing": (
        "digits_preprocess/1/transform.json",
        r"0\.3437",
        "0.9",
        "is not the preprocessing of the model card",
    ),
    "not protobuf": (
        "digits/config.pbtxt",
        "ensemble_scheduling",
        "ensemble_sheduling",
        "no field named",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_refused_although_the_folder_was_sealed_again(
    deployment, deployed, inside, fault
):
    name, old, new, reason = FAULTS[fault]
    path = deployment / "models" / name
    text = path.read_text()
    assert re.search(old, text, re.DOTALL)
    path.write_text(re.sub(old, new, text, count=1, flags=re.DOTALL))
    check = ("deploy", "--check", deployment, "--workspace", deployed.workspace)
    assert f"{name}: changed" in inside(*check, cwd=deployment).expect(2).stderr, (
        "the seal shows a changed byte"
    )
    seal_folder(deployment)
    assert reason in inside(*check, cwd=deployment).expect(2).stderr


def test_another_engine_is_refused_by_its_hash(deployment, deployed, inside):
    with (deployment / "models/digits_engine/1/model.onnx").open("ab") as file:
        file.write(b"\0")
    seal_folder(deployment)
    ran = inside(
        "deploy", "--check", deployment, "--workspace", deployed.workspace, cwd=deployment
    ).expect(2)
    assert "model.onnx: changed" in ran.stderr


def test_bad_input_is_one_line_and_writes_nothing(deployed, tmp_path, inside):
    there, workspace = tmp_path / "there", deployed.workspace
    there.mkdir()
    broken = Path(shutil.copytree(deployed.dossier, tmp_path / "broken"))
    (broken / "verdict.json").write_text("{}")
    for words, status, reason in (
        ((deployed.dossier, "--output", there), 2, "already exists"),
        ((broken, "--output", tmp_path / "new"), 2, "verdict.json: changed"),
        ((tmp_path / "nothing", "--output", tmp_path / "new"), 2, "does not exist"),
        ((deployed.dossier,), 2, "--output"),
        (("--check", there), 2, "is not a deployment"),
        (
            (
                deployed.dossier,
                "--output",
                tmp_path / "new",
                "--prove",
                "--server",
                tmp_path / "no",
            ),
            2,
            "--server",
        ),
        (
            (deployed.dossier, "--output", tmp_path / "new", "--to", "folder", "--prove"),
            2,
            "use --to triton",
        ),
        (
            (deployed.dossier, "--output", tmp_path / "new", "--to", "kserve"),
            2,
            "requires --storage-uri",
        ),
        (
            (deployed.dossier, "--output", tmp_path / "new", "--image", "triton:26.05"),
            2,
            "needs --to kserve",
        ),
    ):
        ran = inside("deploy", *words, "--workspace", workspace, cwd=tmp_path)
        assert (ran.status, reason in ran.stderr) == (status, True), ran.stderr
        assert not (tmp_path / "new").exists()
    elsewhere = inside(
        "deploy", deployed.dossier, "--output", tmp_path / "new", "--workspace", there, cwd=tmp_path
    ).expect(2)
    assert "is not in" in elsewhere.stderr


@pytest.fixture
def with_numpy_2(tmp_path):
    """An environment that has the bundled server, and this one's NumPy 2."""
    assert SERVER is not None
    base = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
    subprocess.run([base, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    site = next((tmp_path / "env" / "lib").glob("python*")) / "site-packages"
    bundled = next((Path(SERVER) / "lib").glob("python*")) / "site-packages"
    (site / "both.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n{bundled}\n")
    return tmp_path / "env"


@needs_server
def test_numpy_2_in_the_server_s_environment_is_refused(deployment, deployed, with_numpy_2):
    ran = prove(deployment, deployed.workspace, "--server", with_numpy_2).expect(2)
    assert "silently serves wrong tensors with NumPy 2" in ran.stderr


@needs_server
def test_a_server_that_refuses_a_model_or_dies_says_why(deployment, deployed, tmp_path):
    program = tmp_path / "bin" / "tritonserver"
    program.parent.mkdir()
    program.write_text(
        "#!/bin/sh\necho 'E1122 10:00:00.0 1 x.cc:1] \"no space on device\"'\nexit 3\n"
    )
    program.chmod(0o755)
    ran = prove(deployment, deployed.workspace, "--server", program).expect(4)
    assert "did not start (exit status 3): no space on device" in ran.stderr


@needs_server
def test_wrong_tensors_of_a_running_server_are_refused(deployment, deployed, monkeypatch):
    """What no configuration shows: the session behind the server gives another output than the signed-off one."""
    from optpipe.core.errors import GateError
    from optpipe.core.events import SilentListener
    from optpipe.deploy import proof
    from optpipe.deploy.check import check_deployment
    from optpipe.deploy.server import find_server
    from optpipe.deploy.triton_models import SHIM
    from optpipe.workspace.store import Store

    planted = deployment.parent / "planted.py"
    text = SHIM["model.py"].read_text()
    planted.write_text(text.replace("array.copy() for", "array[..., ::-1].copy() for"))
    assert planted.read_text() != text
    monkeypatch.setattr(proof, "SHIM", {**SHIM, "model.py": planted})
    checked = check_deployment(deployment)
    with pytest.raises(GateError, match="output 'logits' is not the signed-off one"):
        proof.prove_deployment(
            checked, find_server(SERVER), Store(deployed.workspace), SilentListener()
        )


WITHOUT_OPTPIPE = "import runpy, sys; sys.modules['optpipe'] = None; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"


FROM_THREADS = """
import json, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
sys.path.insert(0, "")
from predict import predict
with ThreadPoolExecutor(8) as threads:
    found = threads.map(lambda name: predict([Path(name).read_bytes()])[0][0], sys.argv[1:] * 4)
print(json.dumps(list(found)[-len(sys.argv[1:]):]))
"""
"""A server calls from several threads at once."""


def test_an_inference_service_lies_beside_the_repository_and_is_checked_with_it(
    deployed, tmp_path, inside
):
    target, workspace = tmp_path / "service", deployed.workspace
    inside(
        "deploy",
        deployed.dossier,
        "--to",
        "kserve",
        "--storage-uri",
        "oci://registry.example.com/digits:1",
        "--output",
        target,
        "--workspace",
        workspace,
        cwd=tmp_path,
    ).expect(0)
    document = yaml.safe_load((target / "inference-service.yaml").read_text())
    schema = json.loads((FAKES / "kserve_v1beta1.schema.json").read_text())
    jsonschema.validate(document, schema)
    assert document["metadata"]["annotations"]["optpipe/verdict"] == "PASS"
    models = {path.name for path in (target / "models").iterdir()}
    assert models == {"digits", "digits_engine", "digits_preprocess"}
    inside("deploy", "--check", target, "--workspace", workspace, cwd=tmp_path).expect(0)
    tuned = inside("deploy", "--check", target, "--tune", "--workspace", workspace, cwd=tmp_path)
    assert tuned.status in (2, 3)  # 3 without a server
    (target / "inference-service.yaml").write_text("kind: InferenceService\n")
    changed = inside("deploy", "--check", target, "--workspace", workspace, cwd=tmp_path)
    assert (changed.status, "inference-service.yaml" in changed.stderr) == (2, True)


def test_a_folder_predicts_what_was_signed_off_without_optpipe(deployed, tmp_path):
    target = tmp_path / "folder"
    optpipe(
        "deploy",
        deployed.dossier,
        "--to",
        "folder",
        "--output",
        target,
        workspace=deployed.workspace,
    ).expect(0)
    images = json.loads((target / "deployment.json").read_text())["images"]
    files = [target / "requests" / name for name in images]
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_OPTPIPE, target / "predict.py", *files],
        capture_output=True,
        text=True,
        env=alone,
        cwd=tmp_path,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    labels = [line.split()[1] for line in run.stdout.splitlines()]
    assert labels == [str(prediction) for prediction in images.values()]
    served = subprocess.run(
        [sys.executable, "-c", FROM_THREADS, *files],
        capture_output=True,
        text=True,
        env=alone | {"PYTHONDONTWRITEBYTECODE": "1"},
        cwd=target,
        timeout=120,
        check=False,
    )
    assert json.loads(served.stdout) == labels, served.stderr
    with (target / "engine/model.onnx").open("ab") as file:
        file.write(b"\0")
    changed = optpipe("deploy", "--check", target, workspace=deployed.workspace).expect(2)
    assert "engine/model.onnx: changed" in changed.stderr
    seal_folder(target)
    resealed = optpipe("deploy", "--check", target, workspace=deployed.workspace)
    assert (resealed.status, "model.onnx: changed" in resealed.stderr) == (2, True)


@needs_server
def test_a_text_model_without_a_pass_needs_a_reason_and_is_served_by_its_engine_alone(
    tmp_path, shared
):
    from tests.integration.test_text import train_reviews

    shutil.copytree(shared("reviews", train_reviews), tmp_path / "reviews")
    model, workspace, policy = (
        f"hf:{tmp_path / 'reviews'}",
        tmp_path / "workspace",
        tmp_path / "policy.toml",
    )
    policy.write_text('schema = 1\n[size]\nmaximum = "10 MiB"\n')
    optpipe(
        "build", model, "--precision", "fp32", "--backend", "onnxruntime", workspace=workspace
    ).expect(0)
    words = (
        "signoff",
        model,
        "--policy",
        policy,
        "--no-measure",
        "--no-figures",
        "--output",
        tmp_path / "dossier",
    )
    assert optpipe(*words, workspace=workspace).status == 5, "nothing was measured"
    deploy = ("deploy", tmp_path / "dossier", "--output", tmp_path / "served", "--prove", "--json")
    refused = optpipe(*deploy, workspace=workspace).expect(1)
    assert "not an unqualified PASS (INCONCLUSIVE); pass --because TEXT" in refused.stderr
    assert not (tmp_path / "served").exists()
    ran = optpipe(*deploy, "--because", "a trial on the staging host", workspace=workspace).expect(
        0
    )
    assert ran.document["deployment"]["dossier"]["because"] == "a trial on the staging host"
    assert [each["protocol"] for each in ran.document["proof"]["comparisons"]] == ["http", "grpc"]
    for each in ran.document["proof"]["comparisons"]:
        assert each["requests"] == each["equal_bits"] > 0


@needs_server
def test_a_detector_is_served_from_images_to_boxes(tmp_path, shapes):
    policy, dossier = tmp_path / "policy.toml", tmp_path / "dossier"
    shapes("shapes-detector", tmp_path / "workspace")
    policy.write_text('schema = 1\n[build]\nprecision = "fp32"\n[size]\nmaximum = "10 MiB"\n')
    words = ("--policy", policy, "--no-measure", "--no-figures", "--output", dossier)
    optpipe("signoff", "shapes-detector", *words, workspace=tmp_path / "workspace").expect(
        5
    )  # it was not measured
    deploy = ("deploy", dossier, "--because", "trial", "--output", tmp_path / "served", "--prove")
    ran = optpipe(*deploy, "--json", workspace=tmp_path / "workspace").expect(0)
    compared = {
        (each["model"], each["protocol"]): each for each in ran.document["proof"]["comparisons"]
    }
    for protocol in ("http", "grpc"):
        each = compared["shapes-detector", protocol]
        assert each["requests"] == each["equal_bits"] == 32


def test_an_image_model_without_evidence_of_its_preprocessing_is_refused(
    deployed, tmp_path, inside
):
    bare, workspace = tmp_path / "bare", deployed.workspace
    words = (
        "deploy",
        deployed.dossier,
        "--no-ensemble",
        "--output",
        bare,
        "--workspace",
        workspace,
    )
    assert inside(*words, cwd=tmp_path).status == 0
    assert [path.name for path in (bare / "models").iterdir()] == ["digits_engine"]
    policy, target = tmp_path / "policy.toml", tmp_path / "dossier"
    policy.write_text('schema = 1\n[build]\nbackend = "onnxruntime"\n[size]\nmaximum = "10 MiB"\n')
    alone = Path(shutil.copytree(workspace, tmp_path / "workspace"))
    for path in (alone / "runs").glob("preprocess-*"):
        shutil.rmtree(path)
    signoff = (
        "signoff",
        "digits",
        "--policy",
        policy,
        "--no-measure",
        "--no-figures",
        "--output",
        target,
    )
    assert inside(*signoff, "--workspace", alone, cwd=tmp_path).status == 0
    ran = inside(
        "deploy", target, "--output", tmp_path / "new", "--workspace", alone, cwd=tmp_path
    ).expect(2)
    assert "has no evidence of the preprocessing; run `optpipe preprocess digits" in ran.stderr
    assert not (tmp_path / "new").exists()


@needs_server
def test_a_server_that_dies_or_is_not_ready_in_time_is_named_and_gone(tmp_path):
    from optpipe.core.errors import StageError
    from optpipe.deploy.server import find_server, run_server

    program, models = find_server(SERVER), tmp_path / "models"
    models.mkdir()
    find = ["pgrep", "-f", f"model-repository={models}"]

    def serve_and_kill() -> None:
        (tmp_path / "one").mkdir()
        with run_server(program, models, tmp_path / "one") as server:
            assert "NumPy 1" in server[2]
            for pid in subprocess.run(find, capture_output=True, text=True).stdout.split():
                os.kill(int(pid), signal.SIGKILL)
            while subprocess.run(find, capture_output=True, text=True).stdout:
                time.sleep(0.05)
            raise StageError("a request was refused")

    with pytest.raises(StageError, match=r"tritonserver died \(exit status -9\)"):
        serve_and_kill()
    (tmp_path / "two").mkdir()
    with (
        pytest.raises(StageError, match="was not ready after 0 s"),
        run_server(program, models, tmp_path / "two", limit_s=0),
    ):
        pass
    assert subprocess.run(find, capture_output=True, text=True).stdout == ""
