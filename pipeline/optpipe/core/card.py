"""A model's card: its inputs, task, preprocessing and labels."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import prod
from operator import index
from pathlib import Path
from typing import Any

from optpipe.core.errors import BadInputError
from optpipe.core.files import get_memory_bytes, hash_value
from optpipe.core.records import plain_from_record
from optpipe.core.suggestions import suggest_names
from optpipe.core.transform import Transform
from optpipe.core.wording import Argument

Shape = tuple[int, ...]
LARGEST_SIZE = 2**31 - 1
"""Maximum size of a dimension; runtimes use 32-bit integers."""
DTYPES = ("float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "bool")


def _describe_tensor(spec: "TensorSpec | InputSpec") -> Mapping[str, Any]:
    """Omits None, and the batch axis if it is the first."""
    plain = {
        name: value
        for name, value in plain_from_record(spec).items()
        if value is not None and name != "batch"
    }
    single = isinstance(spec, InputSpec) and not spec.min
    return (
        plain
        if spec.batch == 0 or single
        else {**plain, "batch": "none" if spec.batch is None else spec.batch}
    )


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A named tensor. A dimension is a size, or a name if it varies between calls."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    batch: int | None = field(default=0, kw_only=True)
    """The axis that counts samples; None if all samples of a call share one value."""

    @property
    def classes(self) -> int | None:
        """Number of scores of each sample; None if they span several axes or their number is open."""
        sizes = [
            size for axis, size in enumerate(self.shape) if axis != self.batch and size != 1
        ] or [1]
        return sizes[0] if len(sizes) == 1 and isinstance(sizes[0], int) else None

    to_dict = _describe_tensor


def _batch_from_dict(value: Mapping[str, Any], rank: int) -> int | None:
    said = value.get("batch", 0 if rank else "none")
    if said == "none":
        return None
    batch = index(said)
    if not 0 <= batch < max(rank, 1):
        raise BadInputError(
            f"tensor '{value.get('name')}': batch {batch} is not one of its {rank} axes"
        )
    return batch


def tensor_from_dict(value: Mapping[str, Any]) -> TensorSpec:
    """Reads `{name, dtype, shape}`; a model card may omit the last two."""
    shape = value.get("shape")
    batch = _batch_from_dict(value, 32 if shape is None else len(shape))
    return TensorSpec(value["name"], value.get("dtype", "float32"), tuple(shape or ()), batch=batch)


@dataclass(frozen=True, slots=True)
class InputSpec:
    """A model input with the minimum, optimal and maximum shape of its optimization profile."""

    name: str
    dtype: str
    min: Shape
    opt: Shape
    max: Shape
    below: int | None = field(default=None, kw_only=True)
    """Exclusive upper bound of integers such as token identifiers; None if unknown."""
    batch: int | None = field(default=0, kw_only=True)
    """The axis that counts samples: 1 for a recurrent state (layers, batch, hidden). None if all samples of a call share one value."""

    def __post_init__(self) -> None:
        if not self.min:
            object.__setattr__(self, "batch", None)  # a single value
        if not len(self.min) == len(self.opt) == len(self.max):
            raise BadInputError(
                f"input '{self.name}': min, opt and max have different ranks: {self.format_profile()}"
            )
        if any(
            not 1 <= low <= usual <= high and (axis == self.batch or {low, usual, high} != {0})
            for axis, (low, usual, high) in enumerate(
                zip(self.min, self.opt, self.max, strict=True)
            )
        ):
            raise BadInputError(
                f"input '{self.name}': every dimension must satisfy 1 <= min <= opt <= max; got {self.format_profile()}"
            )
        if any(size > LARGEST_SIZE for size in self.max):
            raise BadInputError(
                f"input '{self.name}': no dimension may exceed {LARGEST_SIZE}, got {self.format_profile()}"
            )

    @property
    def tensor(self) -> TensorSpec:
        """The tensor; dimensions that the profile leaves open are named `batch`, `dim1`, …"""
        names: tuple[int | str, ...] = tuple(
            low if low == high else ("batch" if axis == self.batch else f"dim{axis}")
            for axis, (low, high) in enumerate(zip(self.min, self.max, strict=True))
        )
        return TensorSpec(self.name, self.dtype, names, batch=self.batch)

    @property
    def batch_range(self) -> tuple[int, int, int] | None:
        """(min, opt, max); None without a batch axis."""
        axis = self.batch
        return None if axis is None else (self.min[axis], self.opt[axis], self.max[axis])

    @property
    def sample(self) -> Shape:
        """The optimal shape of one sample, without the batch axis."""
        return tuple(size for axis, size in enumerate(self.opt) if axis != self.batch)

    @property
    def is_image(self) -> bool:
        """Whether samples have the shape of images: (1 or 3, height, width), or channels last."""
        return len(self.sample) == 3 and (self.sample[0] in (1, 3) or self.sample[2] in (1, 3))

    def format_profile(self) -> str:
        """`1x3x224x224:8x3x224x224:64x3x224x224`, as `--shape` takes it."""
        shapes = ("x".join(map(str, shape)) for shape in (self.min, self.opt, self.max))
        return ":".join(shapes) if self.opt else "a single value"

    def with_batch(self, low: int, usual: int, high: int) -> "InputSpec":
        """The same input with another batch range; unchanged without a batch axis."""
        axis = self.batch
        if axis is None:
            return self

        def resized(shape: Shape, size: int) -> Shape:
            return (*shape[:axis], size, *shape[axis + 1 :])

        return replace(
            self,
            min=resized(self.min, low),
            opt=resized(self.opt, usual),
            max=resized(self.max, high),
        )

    to_dict = _describe_tensor


def input_from_dict(value: Mapping[str, Any]) -> InputSpec:
    """Reads `{name, dtype, min, opt, max}` with optional `below` and `batch`. Raises BadInputError for anything else."""
    try:
        name, dtype = str(value["name"]), str(value.get("dtype", "float32")).removeprefix("torch.")
        low, usual, high = (
            tuple(index(size) for size in value[key]) for key in ("min", "opt", "max")
        )
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
        raise BadInputError(
            f"input '{name}': unknown dtype {dtype}; choose from {', '.join(DTYPES)}"
        )
    return InputSpec(name, dtype, low, usual, high, below=below, batch=batch)


def batch_range_from_text(text: str, flag: str = "batch") -> tuple[int, int, int]:
    """Reads `--batch`: `8` is fixed, `1:8:64` is min:opt:max."""
    parts = text.split(":")
    with suppress(ValueError):
        low, usual, high = map(int, parts * 3 if len(parts) == 1 else parts)
        if 1 <= low <= usual <= high:
            return low, usual, high
    raise BadInputError(
        "expected one size or MIN:OPT:MAX with 1 <= MIN <= OPT <= MAX, such as 1:8:64",
        argument=Argument(flag, text),
    )


def batch_ranges_from_text(text: str) -> tuple[tuple[int, int, int], ...]:
    """Reads one range for each optimization profile: `1:1:1,1:32:64`."""
    return tuple(batch_range_from_text(part.strip()) for part in text.split(","))


def shapes_from_text(text: str) -> tuple[str, tuple[Shape, Shape, Shape]]:
    """Reads `--shape NAME=SHAPE` or `NAME=MIN:OPT:MAX`, shapes such as `1x3x224x224`."""
    name, _, value = text.rpartition("=")
    with suppress(ValueError):
        shapes = [
            tuple(int(size) for size in shape.lower().split("x")) for shape in value.split(":")
        ]
        low, usual, high = shapes * 3 if len(shapes) == 1 else shapes
        if name:
            return name, (low, usual, high)
    raise BadInputError(
        "expected NAME=MIN:OPT:MAX, such as images=1x3x224x224:8x3x224x224:64x3x224x224",
        argument=Argument("shape", text),
    )


class Task(StrEnum):
    CLASSIFICATION = "classification"
    TEXT_CLASSIFICATION = "text-classification"
    TOKEN_CLASSIFICATION = "token-classification"
    QUESTION_ANSWERING = "question-answering"
    MULTI_LABEL = "multi-label-classification"
    REGRESSION = "regression"
    DETECTION = "detection"
    SEGMENTATION = "segmentation"
    EMBEDDING = "embedding"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Tokenization:
    """Tokenization by the `tokenizer.json` with this hash, stored with the model."""

    sha256: str
    max_length: int
    pad_id: int = 0

    @property
    def hash(self) -> str:
        return hash_value(plain_from_record(self))


@dataclass(frozen=True, slots=True)
class ModelCard:
    name: str
    source: str
    """Canonical MODEL text, such as `torchvision:resnet50`."""
    task: Task
    inputs: tuple[InputSpec, ...]
    outputs: tuple[TensorSpec, ...] = ()
    """Empty until the model is exported."""
    transform: Transform | None = None
    """From an image file to the first input; None if the input is not an image."""
    labels: tuple[str, ...] = ()
    data: Mapping[str, str] = field(default_factory=dict)
    """Image-set manifests by role: `train`, `calibration`, `validation`."""
    tokenization: Tokenization | None = None
    """From text to the inputs; None if the input is not text or its tokenizer is unknown."""
    head: Mapping[str, str | float] = field(default_factory=dict)
    """How a detector decodes boxes (`layout`, `minimum_score`, `nms_iou`, `max_boxes`), an encoder's `pooling`, the `threshold`
    from which a class of several counts, or the `stride` and `longest_answer` of answers, in tokens."""

    def __post_init__(self) -> None:
        names = [spec.name for spec in self.inputs]
        if doubled := {name for name in names if names.count(name) > 1}:
            raise BadInputError(f"{self.name}: two inputs have the same name '{min(doubled)}'")
        if self.batch_range[0] > self.batch_range[2]:
            ranges = ", ".join(f"{spec.name} {spec.format_profile()}" for spec in self.inputs)
            raise BadInputError(
                f"{self.name}: its inputs have no batch size in common: {ranges}\n"
                'name the batch axis in a model card: batch = 1, or batch = "none"'
            )
        if self.transform is not None and names and len(names) != 1:
            raise BadInputError(
                f"{self.name}: preprocessing produces one input, but the model takes {', '.join(names)}\n"
                "omit the preprocessing; tensors are compared, but accuracy is not evaluated"
            )

    @property
    def takes_images(self) -> bool:
        return self.transform is not None or any(spec.is_image for spec in self.inputs)

    @property
    def batched(self) -> bool:
        """Whether any input has a batch axis. Without one, each call is one sample."""
        return any(spec.batch is not None for spec in self.inputs)

    @property
    def batch_range(self) -> tuple[int, int, int]:
        """(min, opt, max) batch size that all inputs take; 1 without a batch axis."""
        ranges = [spec.batch_range for spec in self.inputs if spec.batch_range is not None] or [
            (1, 1, 1)
        ]
        low, high = max(span[0] for span in ranges), min(span[2] for span in ranges)
        return low, min(max(ranges[0][1], low), high), high

    @property
    def length_axes(self) -> dict[str, int]:
        """The axis that counts tokens, by input; empty for a model without sequences, or with several lengths.

        It is the only open axis besides the batch of an input of rank 2 or 3; if it is fixed, axis 1 of a text model's
        inputs.
        """
        text = self.tokenization is not None or any(
            spec.name == "input_ids" for spec in self.inputs
        )
        axes: dict[str, int] = {}
        for spec in self.inputs:
            others = [axis for axis in range(len(spec.min)) if axis != spec.batch]
            usable = [axis for axis in others if spec.min[axis] != spec.max[axis]]
            usable = usable or (others if text and len(others) == 1 else [])
            if spec.batch is not None and len(spec.min) in (2, 3) and len(usable) == 1:
                axes[spec.name] = usable[0]
        ranges = {
            (spec.min[axes[spec.name]], spec.max[axes[spec.name]])
            for spec in self.inputs
            if spec.name in axes
        }
        return axes if len(ranges) == 1 else {}

    @property
    def length_range(self) -> tuple[int, int] | None:
        """(min, max) sequence length; None without sequences."""
        for spec in self.inputs:
            if (axis := self.length_axes.get(spec.name)) is not None:
                return spec.min[axis], spec.max[axis]
        return None

    def with_usual_length(self, length: int) -> "ModelCard":
        inputs = []
        for spec in self.inputs:
            axis, usual = self.length_axes.get(spec.name), list(spec.opt)
            if axis is not None:
                usual[axis] = length
            inputs.append(replace(spec, opt=tuple(usual)))
        return replace(self, inputs=tuple(inputs))

    def widen_shapes(self, lengths: Sequence[int]) -> dict[str, tuple[Shape, Shape, Shape]]:
        """By input, the shapes of a build whose sequence profile includes `lengths`."""
        shapes = {}
        for spec in self.inputs:
            if (axis := self.length_axes.get(spec.name)) is not None:
                low, high = list(spec.min), list(spec.max)
                low[axis], high[axis] = min(low[axis], *lengths), max(high[axis], *lengths)
                shapes[spec.name] = (tuple(low), spec.opt, tuple(high))
        return shapes

    @property
    def preprocessing_sha256(self) -> str | None:
        """Hash of the transform or tokenization; None if neither is known."""
        known = self.transform or self.tokenization
        return known.hash if known else None

    def to_dict(self) -> Mapping[str, Any]:
        return {
            "name": self.name,
            "source": self.source,
            "task": str(self.task),
            "inputs": [spec.to_dict() for spec in self.inputs],
            "outputs": [spec.to_dict() for spec in self.outputs],
            "preprocessing": self.transform.to_dict() if self.transform else None,
            "labels": list(self.labels),
            "data": dict(self.data),
            **({"tokenization": plain_from_record(self.tokenization)} if self.tokenization else {}),
            **({"head": dict(self.head)} if self.head else {}),
        }

    def with_batch(self, size: int) -> "ModelCard":
        """The same model for one batch size; unchanged if no input has a batch."""
        return self.with_profile((size, size, size), {}) if self.batched else self

    def with_profile(
        self, batch: tuple[int, int, int] | None, shapes: Mapping[str, tuple[Shape, Shape, Shape]]
    ) -> "ModelCard":
        """The same model with another profile. A shape given for one input of a text model applies to all its inputs.

        Raises BadInputError for an unknown input, another rank, and different shapes in a text model.
        """
        names = [spec.name for spec in self.inputs]
        if unknown := sorted(set(shapes) - set(names)):
            raise BadInputError(
                f"unknown input '{unknown[0]}'; {self.name} has inputs {', '.join(names)}",
                argument="shape",
            )
        one_shape = self.tokenization is not None and len({spec.opt for spec in self.inputs}) == 1
        if one_shape and shapes:
            shapes = dict.fromkeys(names, next(iter(shapes.values()))) | dict(shapes)
        inputs = []
        for spec in self.inputs:
            resized = spec.with_batch(*batch) if batch and spec.name not in shapes else spec
            if spec.name in shapes:
                low, usual, high = shapes[spec.name]
                resized = replace(spec, min=low, opt=usual, max=high)
            if len(resized.min) != len(spec.min):
                raise BadInputError(
                    f"{self.name} takes {len(spec.min)} dimensions, {spec.format_profile()}",
                    argument=Argument("shape", spec.name),
                )
            inputs.append(resized)
        profiles = {spec.name: spec.format_profile() for spec in inputs}
        if one_shape and len(set(profiles.values())) > 1:
            (first, shape), *others = profiles.items()
            odd, other = next(other for other in others if other[1] != shape)
            raise BadInputError(
                f"{first} has {shape}, but {odd} has {other}",
                argument="shape",
                remedy="all inputs of a text model have one shape: "
                + Argument("shape", f"{first}={shape}")
                + " alone sets it",
            )
        return replace(self, inputs=tuple(inputs))


def require_matching_input(card: ModelCard) -> None:
    """Raises BadInputError if one batch exceeds the memory, or the preprocessing makes images of another size."""
    for tensor in card.inputs:
        if prod(tensor.min) * 4 > get_memory_bytes():
            raise BadInputError(
                f"{card.name}: one batch of input '{tensor.name}', {'x'.join(map(str, tensor.min))}, exceeds this machine's memory"
            )
    if card.transform is None or card.transform.size is None:
        return
    made, pack, spec = card.transform.shape, card.transform.pack, card.inputs[0]
    fits = len(spec.opt) == 4 and all(
        low <= side <= high
        for low, side, high in zip(spec.min[1:], made, spec.max[1:], strict=True)
    )
    if not fits or pack.dtype != spec.dtype:
        raise BadInputError(
            f"{card.name}: preprocessing produces {pack.dtype} of shape {'×'.join(map(str, made))} ({pack.order}), "
            f"but input {spec.name} expects {spec.dtype}, {spec.format_profile()}"
        )


def name_from_factory(source: str) -> str:
    """`net.make` for `folder/net.py:make`."""
    file, _, factory = source.rpartition(":")
    return f"{Path(file).stem}.{factory}"


def task_from_text(text: object) -> Task:
    """Raises BadInputError that lists the tasks, for an unknown one."""
    try:
        return Task(str(text))
    except ValueError as error:
        hint = f"{suggest_names(str(text), Task)} tasks are {', '.join(Task)}".lstrip()
        raise BadInputError(f"unknown task {str(text)!r}: {hint}") from error


def card_from_dict(value: Mapping[str, Any]) -> ModelCard:
    task = task_from_text(value.get("task", Task.OTHER))
    try:
        return ModelCard(
            name=str(value["name"]),
            source=str(value["source"]),
            task=task,
            inputs=tuple(input_from_dict(spec) for spec in value.get("inputs", ())),
            outputs=tuple(tensor_from_dict(spec) for spec in value.get("outputs", ())),
            transform=Transform.from_dict(value["preprocessing"])
            if value.get("preprocessing")
            else None,
            labels=tuple(map(str, value.get("labels", ()))),
            data=dict(value.get("data", {})),
            tokenization=Tokenization(**value["tokenization"])
            if value.get("tokenization")
            else None,
            head=dict(value.get("head", {})),
        )
    except (KeyError, ValueError, TypeError) as error:
        raise BadInputError(
            f"model card '{value.get('name', '?')}': {type(error).__name__} {error}; see models/README.md for the format"
        ) from error


def card_from_file(path: Path) -> ModelCard:
    return card_from_dict(json.loads(path.read_text(encoding="utf-8")))
