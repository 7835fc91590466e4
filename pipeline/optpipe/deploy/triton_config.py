"""Triton's model configurations: made as a protobuf message, written as text, and compared.

Source: model_config.proto of triton-inference-server/common, and docs/user_guide/model_configuration.md.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from optpipe.core import LazyModule
from optpipe.core.card import InputSpec, ModelCard, TensorSpec
from optpipe.core.errors import BadInputError, MissingError, read_as_user_file
from optpipe.core.wording import Call
from optpipe.deploy.triton_messages import make_messages
from optpipe.workspace.file_names import make_file_name
from optpipe.workspace.places import format_extra

text_format = LazyModule("google.protobuf.text_format")
CONFIG = "config.pbtxt"
LABELS = "labels.txt"
WARM_UP = "warmup"
"""Folder in which Triton looks for warm-up data."""
TYPES = {
    "float32": "TYPE_FP32", "float16": "TYPE_FP16", "bfloat16": "TYPE_BF16", "int64": "TYPE_INT64",
    "int32": "TYPE_INT32", "int8": "TYPE_INT8", "uint8": "TYPE_UINT8", "bool": "TYPE_BOOL",
}  # fmt: skip


def list_positions(side: Literal["INPUT", "OUTPUT"], count: int) -> list[str]:
    """`INPUT__0`, `INPUT__1`, …: Triton's PyTorch backend addresses tensors of AOTInductor's packages by position."""
    return [f"{side}__{at}" for at in range(count)]


def require_tritonclient() -> Any:
    """The module with `ModelConfig`. Raises MissingError without tritonclient, which only talking to a server needs."""
    try:
        from tritonclient.grpc import model_config_pb2
    except ImportError as error:
        problem = f"a Triton server is reached through tritonclient ({error})"
        raise MissingError(f"{problem}; install it with `{format_extra('triton')}`") from error
    return model_config_pb2


def get_messages() -> Any:
    """The module with `ModelConfig`: tritonclient's, or the part of it that deployments use."""
    try:
        return require_tritonclient()
    except MissingError:
        return make_messages()


def describe_served(spec: InputSpec | TensorSpec, *, batched: bool) -> TensorSpec:
    """A tensor as clients see it: without the first axis if `batched`; -1 for a variable size."""
    shape = spec.tensor.shape if isinstance(spec, InputSpec) else spec.shape
    sizes = tuple(size if isinstance(size, int) else -1 for size in shape)
    return TensorSpec(spec.name, spec.dtype, sizes[1:] if batched else sizes)


def describe_tensors(
    card: ModelCard, *, batched: bool, by_position: bool = False
) -> tuple[list[TensorSpec], list[TensorSpec]]:
    """A model's inputs and outputs; `by_position` uses the names of `list_positions`."""
    inputs = [describe_served(spec, batched=batched) for spec in card.inputs]
    outputs = [describe_served(spec, batched=batched) for spec in card.outputs]
    if not by_position:
        return inputs, outputs
    return (
        [
            replace(spec, name=name)
            for spec, name in zip(inputs, list_positions("INPUT", len(inputs)), strict=True)
        ],
        [
            replace(spec, name=name)
            for spec, name in zip(outputs, list_positions("OUTPUT", len(outputs)), strict=True)
        ],
    )


def fill_tensors(config: Any, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> None:
    pb = get_messages()
    for target, tensors in ((config.input, inputs), (config.output, outputs)):
        for spec in tensors:
            target.add(
                name=spec.name, data_type=pb.DataType.Value(TYPES[spec.dtype]), dims=spec.shape
            )


def add_warm_up(
    config: Any, folder: Path, name: str, rows: int, inputs: Iterable[tuple[TensorSpec, bytes]]
) -> None:
    """Adds a warm-up request of `rows` samples and writes its inputs to `warmup/` in the model's `folder`."""
    pb = get_messages()
    (folder / WARM_UP).mkdir(exist_ok=True)
    warm_up = config.model_warmup.add(name=name, batch_size=max(rows, 1))
    for spec, content in inputs:
        target = warm_up.inputs[spec.name]
        target.data_type = pb.DataType.Value(TYPES[spec.dtype])
        target.dims.extend(spec.shape)
        target.input_data_file = f"{make_file_name(spec.name)}.{rows}.bin"
        (folder / WARM_UP / target.input_data_file).write_bytes(content)


def write_config(config: Any, folder: Path) -> None:
    """Writes `config.pbtxt`. Raises BadInputError if protobuf reads something else back."""
    path = folder / CONFIG
    path.unlink(missing_ok=True)
    path.write_text(text_format.MessageToString(config), encoding="utf-8")
    if read_config(path) != config:
        raise BadInputError(f"{path} is not read back as it was written")


def read_config(path: Path) -> Any:
    """Raises BadInputError with protobuf's line and reason."""
    pb = get_messages()
    with read_as_user_file(
        path, "a Triton model configuration", "write the deployment again with " + Call("deploy")
    ):
        return text_format.Parse(path.read_text(encoding="utf-8"), pb.ModelConfig())


def find_tensor_differences(
    config: Any, name: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> list[str]:
    """Tensors of a configuration with another name, data type, or shape than the model's; one line each."""
    pb, problems = get_messages(), []
    for what, have, want in (("input", config.input, inputs), ("output", config.output, outputs)):
        known = {
            tensor.name: f"{pb.DataType.Name(tensor.data_type)} {list(tensor.dims)}"
            for tensor in have
        }
        signed = {spec.name: f"{TYPES[spec.dtype]} {list(spec.shape)}" for spec in want}
        for tensor_name in dict.fromkeys((*signed, *known)):
            stated, right = known.get(tensor_name, "missing"), signed.get(tensor_name, "unknown")
            if stated != right:
                problems.append(
                    f"{name}: {what} '{tensor_name}' is {stated} in {CONFIG}, {right} in the signed-off model"
                )
    return problems
