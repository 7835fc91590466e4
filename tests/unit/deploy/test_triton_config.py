"""A written configuration is read back as it was meant, and every other tensor shows."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe.core.card import InputSpec, TensorSpec
from optpipe.core.errors import BadInputError
from optpipe.deploy.triton_config import (
    TYPES,
    Served,
    describe_served,
    fill_tensors,
    find_tensor_differences,
    read_config,
    text_from_config,
)

pb = pytest.importorskip(
    "tritonclient.grpc.model_config_pb2", reason="tritonclient is not installed: the extra `triton`"
)

names = st.text(st.characters(categories=["L", "N"], include_characters="_:/ \"'\n"), min_size=1, max_size=8)
served = st.builds(
    Served, names, st.sampled_from(sorted(TYPES)), st.lists(st.integers(-1, 512).filter(bool), max_size=4).map(tuple)
)
tensors = st.lists(served, min_size=1, max_size=3, unique_by=lambda each: each.name)


def config_of(inputs, outputs):
    config = pb.ModelConfig(name="net", max_batch_size=8)
    fill_tensors(config, inputs, outputs)
    return config


@given(tensors, tensors)
def test_what_is_written_is_read_back(tmp_path_factory, inputs, outputs):
    path = tmp_path_factory.mktemp("config") / "config.pbtxt"
    path.write_text(text_from_config(config_of(inputs, outputs)), encoding="utf-8")
    found = read_config(path)
    assert found == config_of(inputs, outputs)
    assert find_tensor_differences(found, "net", inputs, outputs) == []


@given(tensors, tensors, st.data())
def test_one_other_dtype_or_shape_is_one_line(inputs, outputs, data):
    at = data.draw(st.integers(0, len(inputs) - 1))
    other = data.draw(st.sampled_from(["dtype", "dims"]))
    changed = list(inputs)
    if other == "dtype":
        changed[at] = replace(inputs[at], dtype=data.draw(st.sampled_from(sorted(set(TYPES) - {inputs[at].dtype}))))
    else:
        changed[at] = replace(inputs[at], dims=(*inputs[at].dims, 3))
    found = find_tensor_differences(config_of(changed, outputs), "net", inputs, outputs)
    assert len(found) == 1
    assert ("TYPE_" if other == "dtype" else "shape") in found[0]


def test_a_missing_and_a_foreign_tensor_are_named():
    config = config_of([Served("other", "float32", (3,))], [])
    assert find_tensor_differences(config, "net", [Served("image", "float32", (3,))], []) == [
        "net: input 'image' is missing from config.pbtxt",
        "net: input 'other' of config.pbtxt is not in the signed-off model",
    ]


@pytest.mark.parametrize("text", ["no protobuf at all {", "max_batch_size: many", "\x00\xff"])
def test_a_file_that_is_no_configuration_is_bad_input(tmp_path, text):
    (tmp_path / "config.pbtxt").write_text(text)
    with pytest.raises(BadInputError, match="cannot be read as a Triton model configuration"):
        read_config(tmp_path / "config.pbtxt")


def test_sizes_that_may_change_are_minus_one():
    spec = InputSpec("tokens", "int64", (1, 8), (4, 16), (16, 32))
    assert describe_served(spec, batched=True) == Served("tokens", "int64", (-1,))
    assert describe_served(TensorSpec("logits", "float32", ("batch", 10)), batched=False) == Served(
        "logits", "float32", (-1, 10)
    )
