"""Tensors by name, type and shape, and the shapes an engine is built for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import index
from typing import Any

from optpipe.core.errors import BadInputError

Shape = tuple[int, ...]
LARGEST_SIZE = 2**31 - 1
"""Of a dimension: runtimes count in 32 bits."""
DTYPES = ("float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "bool")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A named tensor. A dimension is a size, or a name where it may change from call to call."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    batch: int | None = field(default=0, kw_only=True)
    """The axis that counts samples; None where every call has one value for all of them."""

    @property
    def classes(self) -> int | None:
        """How many scores each sample has, whatever axes of size 1 stand around them; None where they lie along several axes or
        their number is open."""
        sizes = [size for axis, size in enumerate(self.shape) if axis != self.batch and size != 1] or [1]
        return sizes[0] if len(sizes) == 1 and isinstance(sizes[0], int) else None

    def to_dict(self) -> dict[str, str | int | list[int | str]]:
        """The JSON form; `tensor_from_dict` reads it."""
        return {"name": self.name, "dtype": self.dtype, "shape": list(self.shape), **_describe_batch(self.batch)}


def _describe_batch(batch: int | None) -> dict[str, int | str]:
    """The first axis is the batch unless it says otherwise."""
    return {} if batch == 0 else {"batch": "none" if batch is None else batch}


def _batch_from_dict(value: Mapping[str, Any], rank: int) -> int | None:
    """Reads `batch`: an axis, or `none`. Of a tensor without axes it is none."""
    said = value.get("batch", 0 if rank else "none")
    if said == "none":
        return None
    batch = index(said)
    if not 0 <= batch < max(rank, 1):
        raise BadInputError(f"tensor '{value.get('name')}': batch {batch} is not one of its {rank} axes")
    return batch


def tensor_from_dict(value: Mapping[str, Any]) -> TensorSpec:
    """Reads `{name, dtype, shape}`; a model card may leave the last two out."""
    shape = value.get("shape")
    batch = _batch_from_dict(value, 32 if shape is None else len(shape))
    return TensorSpec(value["name"], value.get("dtype", "float32"), tuple(shape or ()), batch=batch)


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
    batch: int | None = field(default=0, kw_only=True)
    """The axis that counts samples: 1 for the state of a recurrent network, (layers, batch, hidden) in ONNX. None where every
    call has one value for all samples, such as a sampling rate."""

    def __post_init__(self) -> None:
        if not self.min:
            object.__setattr__(self, "batch", None)  # a single value
        if not len(self.min) == len(self.opt) == len(self.max):
            raise BadInputError(f"input '{self.name}': min, opt and max have different ranks: {self.format_profile()}")
        if any(not 1 <= low <= usual <= high for low, usual, high in zip(self.min, self.opt, self.max, strict=True)):
            raise BadInputError(
                f"input '{self.name}': every dimension must satisfy 1 <= min <= opt <= max; got {self.format_profile()}"
            )
        if any(size > LARGEST_SIZE for size in self.max):
            raise BadInputError(
                f"input '{self.name}': no dimension may exceed {LARGEST_SIZE}, got {self.format_profile()}"
            )

    @property
    def tensor(self) -> TensorSpec:
        """The tensor, with the names `batch`, `dim1`, … where the profile leaves a dimension open."""
        names: tuple[int | str, ...] = tuple(
            low if low == high else ("batch" if axis == self.batch else f"dim{axis}")
            for axis, (low, high) in enumerate(zip(self.min, self.max, strict=True))
        )
        return TensorSpec(self.name, self.dtype, names, batch=self.batch)

    @property
    def batch_range(self) -> tuple[int, int, int] | None:
        """The smallest, the most usual and the largest batch; None where it has no batch axis."""
        axis = self.batch
        return None if axis is None else (self.min[axis], self.opt[axis], self.max[axis])

    @property
    def sample(self) -> Shape:
        """The most usual shape of one sample, without the batch axis."""
        return tuple(size for axis, size in enumerate(self.opt) if axis != self.batch)

    @property
    def is_image(self) -> bool:
        """Whether its samples have the shape of images: (1 or 3, height, width), or the channels last."""
        return len(self.sample) == 3 and (self.sample[0] in (1, 3) or self.sample[2] in (1, 3))

    def format_profile(self) -> str:
        """`1x3x224x224:8x3x224x224:64x3x224x224`, as `--shape` takes it."""
        return (
            ":".join("x".join(map(str, shape)) for shape in (self.min, self.opt, self.max))
            if self.opt
            else "a single value"
        )

    def with_batch(self, low: int, usual: int, high: int) -> "InputSpec":
        """The same input with another range for its batch axis; itself where it has none."""
        axis = self.batch
        if axis is None:
            return self

        def resized(shape: Shape, size: int) -> Shape:
            return (*shape[:axis], size, *shape[axis + 1 :])

        return replace(self, min=resized(self.min, low), opt=resized(self.opt, usual), max=resized(self.max, high))

    def to_dict(self) -> dict[str, str | int | list[int]]:
        """The JSON form; `input_from_dict` reads it."""
        return {
            "name": self.name,
            "dtype": self.dtype,
            "min": list(self.min),
            "opt": list(self.opt),
            "max": list(self.max),
            **({} if self.below is None else {"below": self.below}),
            **(_describe_batch(self.batch) if self.min else {}),
        }


def input_from_dict(value: Mapping[str, Any]) -> InputSpec:
    """Reads `{name, dtype, min, opt, max}`, perhaps `below` and `batch`; raises `BadInputError` for anything else."""
    try:
        name, dtype = str(value["name"]), str(value.get("dtype", "float32")).removeprefix("torch.")
        low, usual, high = (tuple(index(size) for size in value[key]) for key in ("min", "opt", "max"))
        below = index(value["below"]) if "below" in value else None
        batch = _batch_from_dict(value, len(low))
    except (KeyError, TypeError, AttributeError) as error:
        raise BadInputError(
            f"invalid input description: {str(value)[:160]}\nexpected name, dtype, and lists of sizes for min, opt and max"
        ) from error
    if unknown := sorted(set(value) - {"name", "dtype", "min", "opt", "max", "below", "batch"}):
        raise BadInputError(
            f"input '{name}': unknown field '{unknown[0]}'; fields are name, dtype, min, opt, max, and optionally below and batch"
        )
    if dtype not in DTYPES:
        raise BadInputError(f"input '{name}': unknown dtype {dtype}; choose from {', '.join(DTYPES)}")
    return InputSpec(name, dtype, low, usual, high, below=below, batch=batch)


def batch_range_from_text(text: str, flag: str = "--batch") -> tuple[int, int, int]:
    """Reads `--batch`: `8` is fixed, `1:8:64` is min:opt:max."""
    try:
        parts = [int(part) for part in text.split(":")]
    except ValueError:
        parts = []
    if len(parts) == 1:
        parts *= 3
    if len(parts) != 3 or not 1 <= parts[0] <= parts[1] <= parts[2]:
        raise BadInputError(
            f"{flag} {text}: expected one size or MIN:OPT:MAX with 1 <= MIN <= OPT <= MAX, such as 1:8:64"
        )
    return parts[0], parts[1], parts[2]


def batch_ranges_from_text(text: str) -> tuple[tuple[int, int, int], ...]:
    """Reads `--batch` with one range for each optimization profile: `1:1:1,1:32:64`."""
    return tuple(batch_range_from_text(part.strip()) for part in text.split(","))


def join_batch_ranges(ranges: Sequence[tuple[int, int, int]]) -> tuple[int, int, int]:
    """The range that holds all of them; its usual size is that of the range that reaches furthest."""
    widest = max(ranges, key=lambda each: (each[2], each[1]))
    return min(each[0] for each in ranges), widest[1], widest[2]


def shapes_from_text(text: str) -> tuple[str, tuple[Shape, Shape, Shape]]:
    """Reads `--shape NAME=SHAPE` or `NAME=MIN:OPT:MAX`, shapes such as `1x3x224x224`."""
    name, _, value = text.rpartition("=")
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
