"""AOTInductor for real, on the CPU: compiled ahead of time, then loaded and measured by a process that compiles nothing."""

import json
import shutil

import numpy as np
import pytest

from optpipe.backends.inductor import Inductor
from optpipe.backends.inductor_packages import Compilation, Packages, compile_packages
from optpipe.build.build import build_model
from optpipe.build.plan import BuildPlan
from optpipe.core.card import tensor_from_dict
from optpipe.core.entries import weights_from_text
from optpipe.core.events import SilentListener, finish_steps
from optpipe.core.precision import Precision
from optpipe.models.artifacts.lookup import find_artifacts
from optpipe.models.export.exported import Model
from optpipe.models.sources.resolve import source_from_text
from optpipe.workspace.store import Store
from tests.integration.conftest import optpipe

pytestmark = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler"
)


def done(*arguments, workspace):
    ran = optpipe(*arguments, "--json", workspace=workspace).expect(0)
    return ran.document


@pytest.fixture(scope="module")
def built(exported, tmp_path_factory):
    """A workspace with `digits` for any batch size and, apart from that, for two images; and the artifact."""
    workspace = exported(tmp_path_factory.mktemp("inductor") / "workspace")
    command = ("build", "digits", "--precision", "fp32", "--backend", "inductor", "--device", "cpu")
    (artifact,) = done(*command, "--option", "inductor.static_batches=2", workspace=workspace)[
        "artifacts"
    ]
    return workspace, artifact


def test_digits_compiled_ahead_of_time_answers_like_the_source_in_another_process(built):
    workspace, artifact = built
    assert artifact["precision_proof"]["proven"]
    assert artifact["parity"]["passed"]
    assert artifact["parity"]["top1_accuracy"] > 0.99
    pace = (
        "--batch 2 --processes 1 --min-time 0.2 --percentile 50 --set max-warm-up=1 --max-cv 100%"
    )
    bench = ("bench", "digits", "--backend", "inductor", *pace.split())
    (measured,) = done(*bench, workspace=workspace)["measurements"]
    assert measured["output_check"]["passed"]
    assert measured["samples"] > 10
    manifest = next((workspace / "store").glob(f"artifact-{artifact['id']}*")) / "manifest.json"
    intact = manifest.read_text()
    for key, said in (("by", "by torch 1.0, this is torch"), ("for", "for 1.0, this")):
        record = json.loads(intact)
        record["info"]["details"][f"compiled_{key}"] = "1.0"
        manifest.write_text(json.dumps(record))
        assert f"compiled {said}" in optpipe(*bench, workspace=workspace).expect(3).stderr
    manifest.write_text(intact)


def test_code_for_single_batch_sizes_is_verified_and_runs_at_these(built):
    import torch

    workspace, artifact = built
    folder = next((workspace / "store").glob(f"artifact-{artifact['id']}*"))
    assert {each.name for each in folder.glob("*.pt2")} == {"model.pt2", "batch-2.pt2"}
    assert artifact["size_bytes"] == sum(each.stat().st_size for each in folder.glob("*.pt2"))
    found = find_artifacts(artifact["id"], Store(workspace))[0]
    specs = [tensor_from_dict(each) for each in found.entry.info.details["inputs"]]
    pixels = np.random.default_rng(0).normal(size=(4, *found.card.inputs[0].sample))
    images = torch.from_numpy(pixels.astype(np.float32))
    calls = Packages(folder, "cpu", specs, (2,))
    assert torch.allclose(calls(images[:2])[0], calls(images)[0][:2], atol=1e-5)
    (folder / "batch-2.pt2").unlink()
    with pytest.raises(RuntimeError):  # at its size there is nothing but its own code
        Packages(folder, "cpu", specs, (2,))(images[:2])


def test_builds_go_on_while_others_are_compiled(tmp_path):
    class Watcher(SilentListener):
        def step(self, name, total=None):
            self.warnings.append(name)
            return super().step(name, total)

    model = Model(source_from_text("digits", {}), weights_from_text("random", 0))
    kinds, watcher = ("fp32", "bf16"), Watcher()
    plan = BuildPlan(
        tuple(map(Precision, kinds)),
        (Inductor(),),
        named=True,
        device="cpu",
        gpu_lock=tmp_path / "l",
    )
    built = build_model(model, plan, Store(tmp_path / "workspace"), watcher)
    assert [each.entry.info.precision for each in built.artifacts] == [*kinds]
    assert all(each.verification.info.passed for each in built.artifacts)
    steps = [
        name
        for name in watcher.warnings
        if name.partition(" ")[0] in ("build", "compile", "finish")
    ]
    assert steps == [
        f"{part} inductor {kind}" for part in ("build", "compile", "finish") for kind in kinds
    ]


def test_what_another_process_cannot_compile_is_named_and_the_rest_is_compiled(tmp_path):
    import torch

    program = torch.export.export(torch.nn.Linear(3, 2).eval(), (torch.zeros(1, 3),))
    first, wrong, right = (
        Compilation(program, tmp_path / name, configs)
        for name, configs in (
            ("model.pt2", {}),
            ("batch-1.pt2", {"no_such_setting": True}),
            ("batch-2.pt2", {}),
        )
    )
    failures = finish_steps(compile_packages([[first], [wrong, right]], tf32=False))
    assert list(failures) == ["batch-1.pt2"]
    assert "no_such_setting" in failures["batch-1.pt2"]
    assert {each.name for each in tmp_path.iterdir()} == {"model.pt2", "batch-2.pt2"}
    in_another = compile_packages([[wrong]], tf32=False, gpu_lock=tmp_path / "lock")
    assert finish_steps(in_another).keys() == {"batch-1.pt2"}
