"""ONNX operators that move values and compute shapes, by torch. Shapes are whole numbers in the host's memory: nothing waits for a GPU."""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from optpipe.core.errors import StageError

_Attributes = Mapping[str, Any]
READ_ON_HOST = {
    "Clip": {1, 2},
    "ConstantOfShape": {0},
    "CumSum": {1},
    "Expand": {1},
    "Pad": {1, 2, 3},
    "Range": {0, 1, 2},
    "ReduceL2": {1},
    "ReduceMax": {1},
    "ReduceMean": {1},
    "ReduceMin": {1},
    "ReduceSum": {1},
    "Reshape": {1},
    "Resize": {1, 2, 3},
    "Slice": {1, 2, 3, 4},
    "Split": {1},
    "Squeeze": {1},
    "Tile": {1},
    "Trilu": {1},
    "Unsqueeze": {1},
}
"""The inputs whose values decide about shapes, or are single numbers: by operator their positions."""
MADE_ON_DEVICE = ("ConstantOfShape", "Range")
"""Operators without an operand on the device: their last one is there only to say where the output goes."""


WAY_OUT = "use --backend onnxruntime"


def refuse(what: str) -> StageError:
    """For an operator with attributes that nothing here computes."""
    return StageError(f"the torch backend's INT8 does not take {what}; {WAY_OUT}")


def read_axes(inputs: tuple[Any, ...], attributes: _Attributes) -> tuple[int, ...] | None:
    """The attribute `axes`, or the second input; None where there is neither."""
    if attributes.get("axes") is not None:
        return tuple(attributes["axes"])
    given = inputs[1] if len(inputs) > 1 else None
    return None if given is None or not given.numel() else tuple(_read_numbers(given))


def _read_numbers(values: Any) -> list[int]:
    return [int(each) for each in values.reshape(-1)]


def _reshape(inputs: tuple[Any, ...], attributes: _Attributes) -> Any:
    given, shape = inputs[0], _read_numbers(inputs[1])
    if not attributes.get("allowzero", 0):
        shape = [given.shape[axis] if size == 0 else size for axis, size in enumerate(shape)]
    return given.reshape(shape)


def _flatten(inputs: tuple[Any, ...], attributes: _Attributes) -> Any:
    axis = attributes.get("axis", 1)
    return inputs[0].reshape(prod(inputs[0].shape[:axis]), prod(inputs[0].shape[axis:]))


def _cast(inputs: tuple[Any, ...], attributes: _Attributes) -> Any:
    import torch

    types = {
        1: torch.float32,
        10: torch.float16,
        16: torch.bfloat16,
        11: torch.float64,
        7: torch.int64,
        6: torch.int32,
        9: torch.bool,
    }
    if attributes["to"] not in types:
        raise refuse(f"casts to ONNX's type {attributes['to']}")
    return inputs[0].to(types[attributes["to"]])


def _squeeze(inputs: tuple[Any, ...], attributes: _Attributes) -> Any:
    axes = read_axes(inputs, attributes)
    return inputs[0].squeeze() if axes is None else inputs[0].squeeze(axes)


def _unsqueeze(inputs: tuple[Any, ...], attributes: _Attributes) -> Any:
    given, axes = inputs[0], read_axes(inputs, attributes) or ()
    rank = given.dim() + len(axes)
    for axis in sorted(each % rank for each in axes):
        given = given.unsqueeze(axis)
    return given


def _concatenate(inputs: tuple[Any, ...], attributes: _Attributes) -> Any:
    import torch

    return torch.cat(inputs, dim=attributes["axis"])


def _shape(inputs: tuple[Any, ...], attributes: _Attributes) -> Any:
    import torch

    return torch.tensor(tuple(inputs[0].shape)[attributes.get("start", 0) : attributes.get("end")])


def _gather(inputs: tuple[Any, ...], attributes: _Attributes) -> Any:
    given, index = inputs
    axis = attributes.get("axis", 0) % given.dim()
    if index.dim() == 0 and index.device.type == "cpu":
        return given.select(axis, int(index))
    return given[(*[slice(None)] * axis, index)]


def _gather_elements(inputs: tuple[Any, ...], attributes: _Attributes) -> Any:
    given, index = inputs
    axis = attributes.get("axis", 0) % given.dim()
    return given.gather(axis, index % given.shape[axis])


def _gather_points(inputs: tuple[Any, ...], attributes: _Attributes) -> Any:
    if attributes.get("batch_dims", 0):
        raise refuse("GatherND with batch_dims")
    return inputs[0][tuple(inputs[1].unbind(-1))]


def _slice(inputs: tuple[Any, ...], _: _Attributes) -> Any:
    given, starts, ends, axes, steps = (*inputs, None, None)[:5]
    begins, stops = _read_numbers(starts), _read_numbers(ends)
    over = list(range(len(begins))) if axes is None else _read_numbers(axes)
    for axis, begin, stop, step in zip(
        over, begins, stops, [1] * len(begins) if steps is None else _read_numbers(steps), strict=True
    ):
        size = given.shape[axis]
        chosen, first = range(size)[begin:stop:step], [slice(None)] * (axis % given.dim())
        if step < 0:  # torch has no negative steps
            given, chosen = given.flip(axis), range(size - 1 - chosen.start, size - 1 - chosen.stop, -step)
        given = given[(*first, slice(chosen.start, chosen.stop, chosen.step))]
    return given


def _pad(inputs: tuple[Any, ...], attributes: _Attributes) -> Any:
    import torch

    given, pads, value, axes = (*inputs, None, None)[:4]
    amounts, rank = _read_numbers(pads), given.dim()
    over = list(range(rank)) if axes is None else [each % rank for each in _read_numbers(axes)]
    around = {axis: (amounts[i], amounts[len(over) + i]) for i, axis in enumerate(over)}
    order = [each for axis in reversed(range(rank)) for each in around.get(axis, (0, 0))]
    mode = attributes.get("mode", b"constant").decode()
    if mode == "constant":
        return torch.nn.functional.pad(given, order, value=0.0 if value is None else value.item())
    while order and order[-2:] == [0, 0]:
        order = order[:-2]
    known = {"edge": "replicate", "reflect": "reflect", "wrap": "circular"}
    return torch.nn.functional.pad(given, order, mode=known[mode])


def _expand(inputs: tuple[Any, ...], _: _Attributes) -> Any:
    import torch

    return inputs[0].expand(torch.broadcast_shapes(tuple(inputs[0].shape), tuple(_read_numbers(inputs[1]))))


def _get_device(beside: tuple[Any, ...]) -> Any:
    return beside[0].device if beside else "cpu"


def _range(inputs: tuple[Any, ...], _: _Attributes) -> Any:
    import torch

    start, limit, step = (each.item() for each in inputs[:3])
    return torch.arange(start, limit, step, device=_get_device(inputs[3:]), dtype=inputs[0].dtype)


def _fill(inputs: tuple[Any, ...], attributes: _Attributes) -> Any:
    import onnx
    import torch

    value = (
        torch.from_numpy(onnx.numpy_helper.to_array(attributes["value"]).copy())
        if "value" in attributes
        else torch.zeros(1)
    )
    return torch.full(_read_numbers(inputs[0]), value.item(), dtype=value.dtype, device=_get_device(inputs[1:]))


def _where(inputs: tuple[Any, ...], _: _Attributes) -> Any:
    import torch

    return torch.where(*inputs)


def _keep_triangle(inputs: tuple[Any, ...], attributes: _Attributes) -> Any:
    diagonal = int(inputs[1]) if len(inputs) > 1 else 0
    return inputs[0].triu(diagonal) if attributes.get("upper", 1) else inputs[0].tril(diagonal)


def _depth_to_space(inputs: tuple[Any, ...], attributes: _Attributes) -> Any:
    images, channels, height, width = inputs[0].shape
    block = attributes["blocksize"]
    if attributes.get("mode", b"DCR") == b"CRD":
        split = inputs[0].reshape(images, channels // block**2, block, block, height, width).permute(0, 1, 4, 2, 5, 3)
    else:
        split = inputs[0].reshape(images, block, block, channels // block**2, height, width).permute(0, 3, 4, 1, 5, 2)
    return split.reshape(images, channels // block**2, height * block, width * block)


def _space_to_depth(inputs: tuple[Any, ...], attributes: _Attributes) -> Any:
    images, channels, height, width = inputs[0].shape
    block = attributes["blocksize"]
    split = inputs[0].reshape(images, channels, height // block, block, width // block, block)
    return split.permute(0, 3, 5, 1, 2, 4).reshape(images, channels * block**2, height // block, width // block)


def _transpose(inputs: tuple[Any, ...], attributes: _Attributes) -> Any:
    return inputs[0].permute(tuple(attributes.get("perm", range(inputs[0].dim())[::-1])))


MOVEMENTS: dict[str, Callable[[tuple[Any, ...], _Attributes], Any]] = {
    "Cast": _cast,
    "Concat": _concatenate,
    "ConstantOfShape": _fill,
    "DepthToSpace": _depth_to_space,
    "Expand": _expand,
    "Flatten": _flatten,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_points,
    "Identity": lambda inputs, _: inputs[0],
    "Pad": _pad,
    "Range": _range,
    "Reshape": _reshape,
    "Shape": _shape,
    "Slice": _slice,
    "SpaceToDepth": _space_to_depth,
    "Split": lambda inputs, attributes: inputs[0].narrow(attributes["axis"], attributes["start"], attributes["length"]),
    "Squeeze": _squeeze,
    "Tile": lambda inputs, _: inputs[0].repeat(_read_numbers(inputs[1])),
    "Transpose": _transpose,
    "Trilu": _keep_triangle,
    "Unsqueeze": _unsqueeze,
    "Where": _where,
}
