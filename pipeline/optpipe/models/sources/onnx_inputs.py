"""What an ONNX graph says of its inputs: types, shapes, which axis is the batch, and what is still open.

The batch is found from the names where they tell (`batch`, or the name of the first input's first axis), also where it is
not the first axis: the state of ONNX's LSTM and GRU is (directions, batch, hidden).
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from optpipe.core.errors import BadInputError
from optpipe.core.tensors import DTYPES, InputSpec, Shape
from optpipe.models.sources.base import DEFAULT_BATCH_PROFILE

Dims = Sequence[int | str | None]
"""Sizes, names of open dimensions, and None for those without a name."""
_BATCH = re.compile(r"batch|^(n|b|bs)$", re.IGNORECASE)
_NO_BATCH = re.compile(r"seq|time|len|height|width|sample|token|frame|channel|point", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")


def read_input_specs(model: Any, shapes: Mapping[str, tuple[Shape, Shape, Shape]], path: Path) -> tuple[InputSpec, ...]:
    """The inputs that are not constants, with `shapes` from `--shape`.

    Raises `BadInputError` for a type that is not taken, and for open dimensions, with the options to paste.
    """
    constant = {tensor.name for tensor in model.graph.initializer}
    values = [value for value in model.graph.input if value.name not in constant]
    dims = [_read_dims(value) for value in values]
    axes = find_batch_axes(dims)
    opened = [value.name for value, each, axis in zip(values, dims, axes, strict=True) if _is_open(each, axis)]
    if missing := [name for name in opened if name not in shapes]:
        proposed = [
            f"--shape {shlex.quote(_propose_shape(model, value.name, each, axis))}"
            for value, each, axis in zip(values, dims, axes, strict=True)
            if value.name in missing
        ]
        shown = "x".join(
            "?" if not isinstance(size, int) else str(size) for size in dims[_find_index(values, missing[0])]
        )
        raise BadInputError(
            f"{path}: input '{missing[0]}' is {shown}; give its open dimensions as min:opt:max, for example\n"
            f"{' '.join(proposed)}"
        )
    return tuple(_make_spec(*each, shapes, path) for each in zip(values, dims, axes, strict=True))


def _find_index(values: Sequence[Any], name: str) -> int:
    return [value.name for value in values].index(name)


def _read_dims(value: Any) -> list[int | str | None]:
    return [_read_dim(each) for each in value.type.tensor_type.shape.dim]


def _read_dim(each: Any) -> int | str | None:
    if each.HasField("dim_value") and each.dim_value > 0:
        return int(each.dim_value)
    return str(each.dim_param) if _NAME.fullmatch(each.dim_param) else None


def find_batch_axes(inputs: Sequence[Dims]) -> list[int | None]:
    """Which axis of each input is the batch; None for those without one."""
    name = _find_batch_name(inputs)
    first = next((dims for dims in inputs if dims), ())
    fixed = first[0] if first and isinstance(first[0], int) and name is None else None
    return [_find_batch_axis(dims, name, fixed) for dims in inputs]


def _find_batch_name(inputs: Sequence[Dims]) -> str | None:
    names = [size for dims in inputs for size in dims if isinstance(size, str)]
    said = next((name for name in names if _BATCH.search(name)), None)
    first = next((dims[0] for dims in inputs if dims), None)
    return said or (first if isinstance(first, str) and not _NO_BATCH.search(first) else None)


def _find_batch_axis(dims: Dims, name: str | None, fixed: int | None) -> int | None:
    if not dims:
        return None
    if name is not None and name in dims:
        return dims.index(name)
    first = dims[0]
    if first is None:
        return 0
    if isinstance(first, str):  # a name of its own
        return None if _NO_BATCH.search(first) or (name is not None and _BATCH.search(name)) else 0
    if fixed is None:  # the batch is open, and this axis is not
        return 1 if len(dims) == 3 and not isinstance(dims[1], int) else None
    return dims.index(fixed) if fixed in dims[:2] else None


def _is_open(dims: Dims, axis: int | None) -> bool:
    return any(not isinstance(size, int) and index != axis for index, size in enumerate(dims))


def _propose_shape(model: Any, name: str, dims: Dims, axis: int | None) -> str:
    """`--shape` for an input: the model's own metadata where it tells, else a size that is usual for such an input."""
    usual = _guess_size(model, dims)
    shapes = [
        "x".join(
            str(size if isinstance(size, int) else batch if index == axis else usual) for index, size in enumerate(dims)
        )
        for batch in DEFAULT_BATCH_PROFILE
    ]
    return f"{name}={':'.join(dict.fromkeys(shapes))}"


def _guess_size(model: Any, dims: Dims) -> int:
    metadata = {each.key: each.value for each in model.metadata_props}
    if said := re.search(r"\d+", metadata.get("imgsz", "")):
        return int(said.group())
    if len(dims) == 4:
        scores = len(model.graph.output[0].type.tensor_type.shape.dim) == 2
        return 224 if scores else 640
    return 128 if len(dims) > 1 else 1


def _make_spec(
    value: Any, dims: Dims, axis: int | None, shapes: Mapping[str, tuple[Shape, Shape, Shape]], path: Path
) -> InputSpec:
    import onnx

    name: str = onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type).lower()
    dtype = "float32" if name == "float" else name
    if dtype not in DTYPES or not value.type.HasField("tensor_type"):
        shown = dtype if value.type.HasField("tensor_type") else "not a tensor"
        raise BadInputError(f"{path}: input '{value.name}' is {shown}; optpipe takes {', '.join(DTYPES)}")
    if value.name in shapes:
        if len(shapes[value.name][0]) != len(dims):
            raise BadInputError(
                f"--shape {value.name}: the file gives it {len(dims)} dimensions, not {len(shapes[value.name][0])}"
            )
        return InputSpec(value.name, dtype, *shapes[value.name], batch=axis)
    known = [tuple(size if isinstance(size, int) else batch for size in dims) for batch in DEFAULT_BATCH_PROFILE]
    return InputSpec(value.name, dtype, *known, batch=axis)


def name_dimensions(model: Any, specs: Sequence[InputSpec]) -> None:
    """Gives every open dimension of the inputs a name of its own, the batch `batch`, in place.

    Exporters write names that are none (`?`, `-1`): a runtime takes two of them for one dimension. What other tensors call
    by such a name loses it.
    """
    renamed: dict[str, str] = {}
    by_name = {each.name: each for each in specs}
    for value in model.graph.input:
        spec = by_name.get(value.name)
        for axis, dim in enumerate(value.type.tensor_type.shape.dim if spec else ()):
            if dim.HasField("dim_value") and dim.dim_value > 0:
                continue
            if spec is not None and axis == spec.batch:
                if _NAME.fullmatch(dim.dim_param):
                    renamed[dim.dim_param] = "batch"
                dim.dim_param = "batch"
            elif not _NAME.fullmatch(dim.dim_param):
                dim.dim_param = f"{re.sub(r'[^A-Za-z0-9_]', '_', value.name)}_dim{axis}"
    for value in (*model.graph.output, *model.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in renamed:
                dim.dim_param = renamed[dim.dim_param]
            elif dim.dim_param and not _NAME.fullmatch(dim.dim_param):
                dim.Clear()
