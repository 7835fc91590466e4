"""Files for Triton are the same with and without tritonclient, and refusals come before the verification."""

import subprocess
import sys
from importlib.util import find_spec

import pytest
from tests.fakes.entries import artifact_info

from optpipe.core.card import TensorSpec
from optpipe.core.errors import BadInputError, MissingError
from optpipe.deploy import triton_config
from optpipe.deploy.early import require_loader
from optpipe.deploy.triton_config import add_warm_up, fill_tensors, read_config, write_config
from optpipe.deploy.triton_messages import make_messages
from optpipe.workspace import places

INPUTS = [TensorSpec("image", "float32", (3, -1, -1)), TensorSpec("ids", "int64", (8,))]
OUTPUTS = [TensorSpec("logits", "float16", (10,))]


def write_everything(pb, folder, *, batching):
    """A configuration with every field that a deployment writes; an ensemble has steps, and others batch."""
    folder.mkdir()
    config = pb.ModelConfig(name="net", platform="onnxruntime_onnx", max_batch_size=8)
    config.backend, config.default_model_filename = "onnxruntime", "engine.onnx"
    fill_tensors(config, INPUTS, OUTPUTS)
    config.input[0].allow_ragged_batch = True
    config.output[0].label_filename = "labels.txt"
    kind = pb.ModelInstanceGroup.Kind.Value("KIND_CPU")
    group = config.instance_group.add(count=2, kind=kind)
    group.profile.extend(["0", "1"])
    config.parameters["threads"].string_value = "2"
    config.optimization.cuda.graphs = True
    if batching:
        config.dynamic_batching.max_queue_delay_microseconds = 300
        config.dynamic_batching.preferred_batch_size.extend([4, 8])
    else:
        add_step(config)
    config.model_warmup.add(name="one", batch_size=1)
    add_warm_up(config, folder, "all", 8, [(INPUTS[0], b"0" * 12)])
    write_config(config, folder)
    return (folder / triton_config.CONFIG).read_text(encoding="utf-8")


def add_step(config):
    step = config.ensemble_scheduling.step.add(model_name="net_engine", model_version=-1)
    step.input_map["image"], step.output_map["logits"] = "preprocessed", "logits"


@pytest.mark.skipif(not find_spec("tritonclient"), reason="compares with the extra `triton`")
@pytest.mark.parametrize("batching", [True, False])
def test_a_configuration_is_the_same_text_without_tritonclient(tmp_path, monkeypatch, batching):
    pb = triton_config.require_tritonclient()
    theirs = write_everything(pb, tmp_path / "theirs", batching=batching)

    def refuse():
        raise MissingError("not installed")

    monkeypatch.setattr(triton_config, "require_tritonclient", refuse)
    ours = write_everything(triton_config.get_messages(), tmp_path / "ours", batching=batching)
    assert ours == theirs
    found = read_config(tmp_path / "theirs" / triton_config.CONFIG)
    assert found.instance_group[0].count == 2
    assert [*found.model_warmup[1].inputs["image"].dims] == [3, -1, -1]
    assert found.HasField("dynamic_batching") == batching


def test_types_have_their_names_in_both():
    pb = make_messages()
    for name in triton_config.TYPES.values():
        assert pb.DataType.Name(pb.DataType.Value(name)) == name


@pytest.mark.parametrize(
    ("clone", "said"), [(True, "uv sync --extra triton"), (False, "pip install 'optpipe[triton]'")]
)
def test_the_way_to_install_fits_the_place(tmp_path, monkeypatch, clone, said):
    package = tmp_path / "pipeline" / "optpipe"
    if clone:
        (tmp_path / "pyproject.toml").touch()
    monkeypatch.setattr(places, "_PACKAGE", package)
    assert places.format_extra("triton") == said


def test_a_backend_without_a_loader_is_refused_for_a_folder():
    from dataclasses import replace

    require_loader(artifact_info(), "folder")
    other = replace(artifact_info(), backend="tensorrt-rtx")
    require_loader(other, "triton")
    with pytest.raises(
        BadInputError, match="no loader for artifacts of tensorrt-rtx; use --to triton"
    ):
        require_loader(other, "folder")


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["a.jpg", "--help"]])
def test_the_program_of_a_folder_explains_itself_without_its_packages(tmp_path, words):
    from optpipe.backends.registry import BACKENDS

    loader = BACKENDS["onnxruntime"].serving(artifact_info(), {}, "").loader
    (tmp_path / "predict.py").write_bytes(loader.read_bytes())
    run = [sys.executable, "-I", "-S", "predict.py", *words]
    ran = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0
    assert "usage: predict.py IMAGE" in ran.stdout
    assert not ran.stderr
