"""What Triton's DALI backend does with the artifact, as far as it can be done without Triton.

Read by protobuf with the fields of Triton's model configuration (github.com/triton-inference-server/common,
protobuf/model_config.proto), and loaded in a process that has nothing but DALI: by the file's place, with the
configuration's batch size, fed at the configuration's input with files of different lengths.
"""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

from optpipe.core.card import card_from_dict
from optpipe.core.events import SilentListener
from optpipe.core.transform import CenterCrop, Decode, Normalize, Pack, Rescale, Resize, Transform
from optpipe.models.inputs.images import preprocess_file
from optpipe.models.inputs.synthetic import make_edge_case_files
from optpipe.preprocess.artifact import CONFIG, PIPELINE, build_preprocessing_artifact, make_triton_config
from optpipe.preprocess.dali_pipeline import DaliPlan
from optpipe.workspace.store import Store

HALF = Normalize((0.5,) * 3, (0.25,) * 3)
TRANSFORMS = {
    "planes": Transform((Decode(), Resize((40,)), CenterCrop(32, 32), Rescale(), HALF, Pack())),
    "halves": Transform((Decode(), Resize((32, 32), "exact"), Rescale(), Pack("HWC", "float16"))),
    "bytes": Transform((Decode("L"), Resize((32, 32), "exact"), Pack("HWC", "uint8"))),
}
CARD = card_from_dict(
    {
        "name": "net",
        "source": "file:net.py",
        "task": "classification",
        "inputs": [
            {"name": "x", "dtype": "float32", "min": [1, 3, 32, 32], "opt": [1, 3, 32, 32], "max": [8, 3, 32, 32]}
        ],
    }
)
LOADER = """
import json, sys
import numpy as np
from nvidia.dali.pipeline import Pipeline
path, batch, name, out = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
pipeline = Pipeline.deserialize(filename=path, batch_size=batch, num_threads=1, device_id=None)
pipeline.build()
assert pipeline.max_batch_size == batch, pipeline.max_batch_size
for _ in range(pipeline.input_feed_count(name)):
    pipeline.feed_input(name, [np.fromfile(each, np.uint8) for each in sys.argv[5:]])
(output,) = pipeline.run()
np.save(out, np.stack([np.asarray(output[row]) for row in range(len(sys.argv) - 5)]))
print(json.dumps({"optpipe": "optpipe" in sys.modules, "torch": "torch" in sys.modules}))
"""
STRING, INT32, INT64, BOOL, MESSAGE, ENUM = 9, 5, 3, 8, 11, 14


def model_config():
    """The fields of Triton's ModelConfig that a DALI model has; anything else does not parse."""
    file = descriptor_pb2.FileDescriptorProto(name="model_config.proto", package="inference", syntax="proto3")
    for enum, names in {
        "DataType": ["TYPE_INVALID", "TYPE_UINT8", "TYPE_FP16", "TYPE_FP32"],
        "Kind": ["KIND_AUTO", "KIND_GPU", "KIND_CPU", "KIND_MODEL"],
    }.items():
        added = file.enum_type.add(name=enum)
        for number, name in enumerate(names):
            added.value.add(name=name, number=number)

    def message(name, /, **fields):
        added = file.message_type.add(name=name)
        for number, (field, (kind, many, of)) in enumerate(fields.items(), 1):
            label = 3 if many else 1
            added.field.add(
                name=field, number=number, type=kind, label=label, type_name=of and f".inference.{of}", json_name=field
            )
        return added

    tensor = {"name": (STRING, 0, None), "data_type": (ENUM, 0, "DataType"), "dims": (INT64, 1, None)}
    message("ModelInput", **tensor, allow_ragged_batch=(BOOL, 0, None))
    message("ModelOutput", **tensor)
    message("ModelInstanceGroup", count=(INT32, 0, None), kind=(ENUM, 0, "Kind"))
    message("ModelDynamicBatching")
    message("ModelParameter", string_value=(STRING, 0, None))
    config = message(
        "ModelConfig",
        name=(STRING, 0, None),
        backend=(STRING, 0, None),
        max_batch_size=(INT32, 0, None),
        input=(MESSAGE, 1, "ModelInput"),
        output=(MESSAGE, 1, "ModelOutput"),
        instance_group=(MESSAGE, 1, "ModelInstanceGroup"),
        dynamic_batching=(MESSAGE, 0, "ModelDynamicBatching"),
        parameters=(MESSAGE, 1, "ModelConfig.ParametersEntry"),
    )
    entry = config.nested_type.add(name="ParametersEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=STRING, label=1)
    entry.field.add(name="value", number=2, type=MESSAGE, label=1, type_name=".inference.ModelParameter")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("inference.ModelConfig"))()


def parsed(text):
    return text_format.Parse(text, model_config())


def test_the_parser_refuses_what_triton_has_not():
    with pytest.raises(text_format.ParseError):
        parsed('name: "x" batch: 8')


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRANSFORMS)
def test_a_process_with_nothing_but_dali_serves_it_as_the_configuration_says(tmp_path, kind):
    transform = TRANSFORMS[kind]
    entry, _ = build_preprocessing_artifact(
        CARD, transform, DaliPlan(batch_size=8), "parent", Store(tmp_path), SilentListener()
    )
    config = parsed(entry.file(CONFIG).read_text())
    assert (config.backend, PIPELINE) == ("dali", "1/model.dali")
    (given,), (made,) = config.input, config.output
    assert given.allow_ragged_batch
    assert list(given.dims) == [-1]
    every = dict(make_edge_case_files())
    chosen = ["baseline 4:2:0.jpg", "grayscale 16 bit.png", "lossy.webp"]
    for name in chosen:
        (tmp_path / name).write_bytes(every[name])
    arguments = [str(entry.file(PIPELINE)), str(config.max_batch_size), given.name, str(tmp_path / "out.npy")]
    done = subprocess.run(
        [sys.executable, "-c", LOADER, *arguments, *(str(tmp_path / name) for name in chosen)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"optpipe": False, "torch": False}
    found = np.load(tmp_path / "out.npy")
    assert list(found.shape[1:]) == list(made.dims)
    types = {0: None, 1: "uint8", 2: "float16", 3: "float32"}
    assert types[made.data_type] == str(found.dtype)
    scale = {"planes": 255 * 0.25, "halves": 255, "bytes": 1}[kind]
    for row, name in enumerate(chosen):
        apart = np.abs(found[row].astype(float) - preprocess_file(every[name], transform)) * scale
        assert apart.max() <= 1.3, name


def test_a_gpus_configuration_says_so():
    config = parsed(make_triton_config(TRANSFORMS["planes"], DaliPlan(decode="mixed", device="gpu", threads=4)))
    assert config.instance_group[0].kind == 1
    assert config.parameters["num_threads"].string_value == "4"
    assert config.HasField("dynamic_batching")


def test_the_pipeline_is_stored_as_a_model_of_tritons_dali_backend(tmp_path):
    transform = TRANSFORMS["planes"]
    entry, cached = build_preprocessing_artifact(
        CARD, transform, DaliPlan(batch_size=8), "parent", Store(tmp_path), SilentListener()
    )
    assert not cached
    assert entry.manifest.parents == ("parent",)
    assert entry.file(PIPELINE).stat().st_size > 1000
    config = entry.file(CONFIG).read_text()
    assert 'backend: "dali"' in config
    assert "dims: [ 3, 32, 32 ]" in config
    assert "max_batch_size: 8" in config
    assert Transform.from_dict(json.loads(entry.file("transform.json").read_text())) == transform


def test_the_same_pipeline_comes_from_the_store_and_another_plan_s_or_model_s_does_not(tmp_path):
    store, transform = Store(tmp_path), TRANSFORMS["planes"]
    first, _ = build_preprocessing_artifact(CARD, transform, DaliPlan(), "parent", store, SilentListener())
    again, cached = build_preprocessing_artifact(CARD, transform, DaliPlan(), "parent", store, SilentListener())
    other, _ = build_preprocessing_artifact(CARD, transform, DaliPlan(threads=1), "parent", store, SilentListener())
    assert cached
    assert first.id == again.id != other.id
    renamed = replace(CARD, name="other")
    entry, _ = build_preprocessing_artifact(renamed, transform, DaliPlan(), "another", store, SilentListener())
    assert (entry.info.model, entry.manifest.parents) == ("other", ("another",))
