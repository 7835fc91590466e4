"""AOTInductor for real, on the CPU: compiled ahead of time, then loaded and measured by a process that compiles nothing."""

import json
import shutil

import numpy as np
import pytest

from optpipe.backends.inductor_packages import Compilation, Packages, compile_packages
from optpipe.core.card import tensor_from_dict
from optpipe.models.artifacts.lookup import find_artifacts
from optpipe.workspace.store import Store
from tests.integration.conftest import optpipe

pytestmark = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")


def done(*arguments, workspace):
    ran = optpipe(*arguments, "--json", workspace=workspace).expect(0)
    return ran.document


def test_digits_compiled_ahead_of_time_answers_like_the_source_in_another_process(exported, tmp_path):
    workspace = exported(tmp_path / "workspace")
    built = done(
        "build", "digits", "--precision", "fp32", "--backend", "inductor", "--device", "cpu", workspace=workspace
    )
    (artifact,) = built["artifacts"]
    assert artifact["precision_proof"]["proven"]
    assert artifact["parity"]["passed"]
    assert artifact["parity"]["top1_accuracy"] > 0.99
    pace = "--batch 2 --processes 1 --min-time 0.2 --percentile 50 --set max-warm-up=1 --max-cv 100%"
    quick = pace.split()
    (measured,) = done("bench", "digits", "--backend", "inductor", *quick, workspace=workspace)["measurements"]
    assert measured["output_check"]["passed"]
    assert measured["samples"] > 10
    manifest = next((workspace / "store").glob(f"artifact-{artifact['id']}*")) / "manifest.json"
    for key, said in (
        ("compiled_by", "compiled by torch 1.0, this is torch"),
        ("compiled_for", "compiled for 1.0, this"),
    ):
        intact = manifest.read_text()
        record = json.loads(intact)
        record["info"]["details"][key] = "1.0"
        manifest.write_text(json.dumps(record))
        ran = optpipe("bench", "digits", "--backend", "inductor", *quick, workspace=workspace)
        manifest.write_text(intact)
        assert ran.status == 3
        assert said in ran.stderr


def test_code_for_single_batch_sizes_is_verified_and_runs_at_these(exported, tmp_path):
    import torch

    workspace = exported(tmp_path / "workspace")
    command = ("build", "digits", "--precision", "fp32", "--backend", "inductor", "--device", "cpu")
    built = done(*command, "--option", "inductor.static_batches=3,2", workspace=workspace)
    (artifact,) = built["artifacts"]
    assert artifact["parity"]["passed"]
    folder = next((workspace / "store").glob(f"artifact-{artifact['id']}*"))
    assert {each.name for each in folder.glob("*.pt2")} == {"model.pt2", "batch-2.pt2", "batch-3.pt2"}
    assert artifact["size_bytes"] == sum(each.stat().st_size for each in folder.glob("*.pt2"))
    found = find_artifacts(artifact["id"], Store(workspace))[0]
    specs = [tensor_from_dict(each) for each in found.entry.info.details["inputs"]]
    (folder / "batch-3.pt2").unlink()
    calls = Packages(folder, "cpu", specs, (2, 3))
    images = torch.from_numpy(
        np.random.default_rng(0).normal(size=(4, *found.card.inputs[0].sample)).astype(np.float32)
    )
    assert torch.allclose(calls(images[:2])[0], calls(images)[0][:2], atol=1e-5)
    with pytest.raises(RuntimeError):  # at its size there is nothing but its own code
        calls(images[:3])


def test_what_another_process_cannot_compile_is_named_and_the_rest_is_compiled(tmp_path):
    import torch

    program = torch.export.export(torch.nn.Linear(3, 2).eval(), (torch.zeros(1, 3),))
    first, wrong, right = (
        Compilation(program, tmp_path / name, configs)
        for name, configs in (("model.pt2", {}), ("batch-1.pt2", {"no_such_setting": True}), ("batch-2.pt2", {}))
    )
    failures = compile_packages(first, [[wrong, right], []], tf32=False)
    assert list(failures) == ["batch-1.pt2"]
    assert "no_such_setting" in failures["batch-1.pt2"]
    assert {each.name for each in tmp_path.iterdir()} == {"model.pt2", "batch-2.pt2"}
