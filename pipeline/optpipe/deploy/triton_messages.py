"""The part of Triton's `ModelConfig` that deployments use, without tritonclient.

The names, kinds, and order of the fields are those of model_config.proto of triton-inference-server/common. Only the text format
is written and read with these messages, so their field numbers have no meaning.
"""

from collections.abc import Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any

_PACKAGE = "optpipe.triton"
_DATA_TYPES = (
    "TYPE_INVALID",
    "TYPE_BOOL",
    "TYPE_UINT8",
    "TYPE_UINT16",
    "TYPE_UINT32",
    "TYPE_UINT64",
    "TYPE_INT8",
    "TYPE_INT16",
    "TYPE_INT32",
    "TYPE_INT64",
    "TYPE_FP16",
    "TYPE_FP32",
    "TYPE_FP64",
    "TYPE_STRING",
    "TYPE_BF16",
)
_KINDS = ("KIND_AUTO", "KIND_GPU", "KIND_CPU", "KIND_MODEL")
_MESSAGES: Mapping[str, Mapping[str, str]] = {
    "ModelInput": {
        "name": "string",
        "data_type": "DataType",
        "dims": "repeated int64",
        "allow_ragged_batch": "bool",
    },
    "ModelOutput": {
        "name": "string",
        "data_type": "DataType",
        "dims": "repeated int64",
        "label_filename": "string",
    },
    "ModelParameter": {"string_value": "string"},
    "ModelInstanceGroup": {
        "name": "string",
        "count": "int32",
        "gpus": "repeated int32",
        "kind": "Kind",
        "profile": "repeated string",
    },
    "ModelDynamicBatching": {
        "preferred_batch_size": "repeated int32",
        "max_queue_delay_microseconds": "uint64",
    },
    "Cuda": {"graphs": "bool"},
    "ModelOptimizationPolicy": {"cuda": "Cuda"},
    "WarmUpInput": {
        "data_type": "DataType",
        "dims": "repeated int64",
        "zero_data": "bool",
        "random_data": "bool",
        "input_data_file": "string",
    },
    "ModelWarmup": {
        "name": "string",
        "batch_size": "uint32",
        "inputs": "map WarmUpInput",
        "count": "uint32",
    },
    "Step": {
        "model_name": "string",
        "model_version": "int64",
        "input_map": "map string",
        "output_map": "map string",
    },
    "ModelEnsembling": {"step": "repeated Step"},
    "ModelConfig": {
        "name": "string",
        "platform": "string",
        "max_batch_size": "int32",
        "input": "repeated ModelInput",
        "output": "repeated ModelOutput",
        "instance_group": "repeated ModelInstanceGroup",
        "default_model_filename": "string",
        "dynamic_batching": "ModelDynamicBatching",
        "optimization": "ModelOptimizationPolicy",
        "parameters": "map ModelParameter",
        "ensemble_scheduling": "ModelEnsembling",
        "model_warmup": "repeated ModelWarmup",
        "backend": "string",
    },
}


@cache
def make_messages() -> Any:
    """`ModelConfig`, `ModelInstanceGroup`, `DataType`, and the values of both enums, as tritonclient's `model_config_pb2` has them."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    from google.protobuf.internal import enum_type_wrapper

    file = descriptor_pb2.FileDescriptorProto(
        name="optpipe/triton.proto", package=_PACKAGE, syntax="proto3"
    )
    _add_enum(file.enum_type, "DataType", _DATA_TYPES)
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        if name == "ModelInstanceGroup":
            _add_enum(message.enum_type, "Kind", _KINDS)
        for number, (field, kind) in enumerate(fields.items(), 1):
            _add_field(message, field, kind, number)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)

    def find(name: str) -> Any:
        return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))

    types = enum_type_wrapper.EnumTypeWrapper(pool.FindEnumTypeByName(f"{_PACKAGE}.DataType"))
    return SimpleNamespace(
        ModelConfig=find("ModelConfig"),
        ModelInstanceGroup=find("ModelInstanceGroup"),
        DataType=types,
        **{name: types.Value(name) for name in _DATA_TYPES},
    )


def _add_enum(enums: Any, name: str, values: tuple[str, ...]) -> None:
    enum = enums.add(name=name)
    for number, value in enumerate(values):
        enum.value.add(name=value, number=number)


def _add_field(message: Any, name: str, kind: str, number: int) -> None:
    """`kind` is a type, `repeated TYPE`, or `map TYPE` with text keys."""
    *form, of = kind.split()
    many = bool(form)
    field = message.field.add(name=name, number=number, label=3 if many else 1)
    if form == ["map"]:
        entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
        entry.options.map_entry = True
        _add_field(entry, "key", "string", 1)
        _add_field(entry, "value", of, 2)
        field.type, field.type_name = 11, f".{_PACKAGE}.{message.name}.{entry.name}"
    elif of == "DataType":
        field.type, field.type_name = 14, f".{_PACKAGE}.DataType"
    elif of == "Kind":
        field.type, field.type_name = 14, f".{_PACKAGE}.ModelInstanceGroup.Kind"
    elif of in _MESSAGES:
        field.type, field.type_name = 11, f".{_PACKAGE}.{of}"
    else:
        scalars = {"int64": 3, "uint64": 4, "int32": 5, "bool": 8, "string": 9, "uint32": 13}
        field.type = scalars[of]
