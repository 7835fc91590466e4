"""Tensors by name, type and shape, and the shapes an engine is built for."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from operator import index
from typing import Any

from optpipe.errors import BadInputError

Shape = tuple[int, ...]
DTYPES = ("float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "bool")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A named tensor. A dimension is a size, or a name where it may change from call to call."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; `tensor_from_dict` reads it."""
        return {"name": self.name, "dtype": self.dtype, "shape": list(self.shape)}


def tensor_from_dict(value: Mapping[str, Any]) -> TensorSpec:
    """Reads `{name, dtype, shape}`; a model card may leave the last two out."""
    return TensorSpec(value["name"], value.get("dtype", "float32"), tuple(value.get("shape", ())))


@dataclass(frozen=True, slots=True)
class InputSpec:
    """A model input with its optimization profile: the smallest, the most usual and the largest shape it will see."""

    name: str
    dtype: str
    min: Shape
    opt: Shape
    max: Shape
    below: int | None = field(default=None, kw_only=True)
    """Of integers such as token identifiers: no value reaches this. None where nothing is known."""

    def __post_init__(self) -> None:
        if not self.min:
            raise BadInputError(f"input '{self.name}' is a scalar; an input needs at least the batch dimension")
        if not len(self.min) == len(self.opt) == len(self.max):
            raise BadInputError(f"input '{self.name}': min, opt and max have different ranks: {self.format_profile()}")
        if any(not 1 <= low <= usual <= high for low, usual, high in zip(self.min, self.opt, self.max, strict=True)):
            raise BadInputError(
                f"input '{self.name}': every dimension must satisfy 1 <= min <= opt <= max; got {self.format_profile()}"
            )

    @property
    def tensor(self) -> TensorSpec:
        """The tensor, with the names `batch`, `dim1`, … where the profile leaves a dimension open."""
        names: tuple[int | str, ...] = tuple(
            low if low == high else ("batch" if axis == 0 else f"dim{axis}")
            for axis, (low, high) in enumerate(zip(self.min, self.max, strict=True))
        )
        return TensorSpec(self.name, self.dtype, names)

    def format_profile(self) -> str:
        """`1x3x224x224:8x3x224x224:64x3x224x224`, as `--shape` takes it."""
        return ":".join("x".join(map(str, shape)) for shape in (self.min, self.opt, self.max))

    def with_batch(self, low: int, usual: int, high: int) -> "InputSpec":
        """The same input with another range for its first dimension."""
        return replace(self, min=(low, *self.min[1:]), opt=(usual, *self.opt[1:]), max=(high, *self.max[1:]))

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; `input_from_dict` reads it."""
        return {
            "name": self.name,
            "dtype": self.dtype,
            "min": list(self.min),
            "opt": list(self.opt),
            "max": list(self.max),
            **({} if self.below is None else {"below": self.below}),
        }


def input_from_dict(value: Mapping[str, Any]) -> InputSpec:
    """Reads `{name, dtype, min, opt, max}`, for integers perhaps `below`; raises `BadInputError` for anything else."""
    try:
        name, dtype = str(value["name"]), str(value.get("dtype", "float32")).removeprefix("torch.")
        low, usual, high = (tuple(index(size) for size in value[key]) for key in ("min", "opt", "max"))
        below = index(value["below"]) if "below" in value else None
    except (KeyError, TypeError, AttributeError) as error:
        raise BadInputError(
            f"invalid input description: {str(value)[:160]}\nexpected name, dtype, and lists of sizes for min, opt and max"
        ) from error
    if unknown := sorted(set(value) - {"name", "dtype", "min", "opt", "max", "below"}):
        raise BadInputError(
            f"input '{name}': unknown field '{unknown[0]}'; fields are name, dtype, min, opt, max, and optionally below for integers"
        )
    if dtype not in DTYPES:
        raise BadInputError(f"input '{name}': unknown dtype {dtype}; choose from {', '.join(DTYPES)}")
    return InputSpec(name, dtype, low, usual, high, below=below)


def batch_range_from_text(text: str) -> tuple[int, int, int]:
    """Reads `--batch`: `8` is fixed, `1:8:64` is min:opt:max."""
    try:
        parts = [int(part) for part in text.split(":")]
    except ValueError:
        parts = []
    if len(parts) == 1:
        parts *= 3
    if len(parts) != 3 or not 1 <= parts[0] <= parts[1] <= parts[2]:
        raise BadInputError(
            f"--batch {text}: expected one size or MIN:OPT:MAX with 1 <= MIN <= OPT <= MAX, such as 1:8:64"
        )
    return parts[0], parts[1], parts[2]


def shapes_from_text(text: str) -> tuple[str, tuple[Shape, Shape, Shape]]:
    """Reads `--shape NAME=SHAPE` or `NAME=MIN:OPT:MAX`, shapes such as `1x3x224x224`."""
    name, _, value = text.partition("=")
    try:
        shapes = [tuple(int(size) for size in shape.lower().split("x")) for shape in value.split(":")]
    except ValueError:
        shapes = []
    if len(shapes) == 1:
        shapes *= 3
    if not name or len(shapes) != 3:
        raise BadInputError(
            f"--shape {text}: expected NAME=MIN:OPT:MAX, such as images=1x3x224x224:8x3x224x224:64x3x224x224"
        )
    return name, (shapes[0], shapes[1], shapes[2])
