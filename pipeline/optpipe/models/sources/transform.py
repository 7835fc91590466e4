import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, cast

from PIL import Image

from optpipe.core.errors import BadInputError
from optpipe.core.transform import (
    CenterCrop,
    Decode,
    Fit,
    Interpolation,
    Normalize,
    Pack,
    Rescale,
    Resize,
    ResizeKernel,
    Transform,
    TransformStep,
)

_INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos", "box", "hamming")


def transform_from_torchvision(source: Any) -> Transform:
    """Reads a weights preset (`weights.transforms()`) or a `Compose`, of torchvision's v1 or v2 transforms.

    Images come from Pillow in RGB without EXIF rotation, as torchvision's folder datasets load them. Raises
    BadInputError that names the untranslatable step.
    """
    preset = _PRESETS.get(type(source).__name__)
    if preset is not None:
        return preset(source)
    stages = getattr(source, "transforms", None)
    if stages is None and not callable(source):
        raise BadInputError(f"{type(source).__name__}: not an image transform of torchvision")
    return _from_compose(stages if stages is not None else [source])


def transform_from_timm(data_config: Mapping[str, Any]) -> Transform:
    """Reads the result of `timm.data.resolve_data_config`, as `timm.data.create_transform` executes it.

    Raises BadInputError for crop modes and interpolations without an equivalent here.
    """
    mode = data_config.get("crop_mode") or "center"
    name = data_config.get("interpolation") or "bilinear"
    channels, height, width = data_config.get("input_size") or (3, 224, 224)
    if name not in _INTERPOLATIONS:
        _refuse("timm", f"interpolation {name!r}")
    if data_config.get("crop_border_pixels"):
        _refuse("timm", "crop_border_pixels")
    if channels not in (1, 3):
        _refuse("timm", f"input_size with {channels} channels")
    fraction = data_config.get("crop_pct") or 0.875
    scaled = (math.floor(height / fraction), math.floor(width / fraction))
    if mode == "squash":
        resize = Resize(scaled, "exact", cast("Interpolation", name))
    elif mode == "center" and height == width:
        resize = Resize(scaled[:1], "short", cast("Interpolation", name))
    else:
        _refuse("timm", f"crop_mode {mode!r} with input_size {height}×{width}")
    mean = _floats(data_config.get("mean") or (0.485, 0.456, 0.406))
    std = _floats(data_config.get("std") or (0.229, 0.224, 0.225))
    decode = Decode("L" if channels == 1 else "RGB")
    return Transform(
        (decode, resize, CenterCrop(height, width), Rescale(), Normalize(mean, std), Pack())
    )


def transform_from_processor(processor: Any) -> Transform:
    """Reads an image processor of Hugging Face transformers, torchvision- or Pillow-backed.

    Images are rotated upright by EXIF, as transformers' loader does. Raises BadInputError that names the untranslatable
    setting.
    """
    if not hasattr(processor, "do_resize"):
        raise BadInputError(
            f"{type(processor).__name__}: not an image processor (it has no do_resize)"
        )
    name = type(processor).__name__
    for setting in (
        "do_pad",
        "do_thumbnail",
        "do_align_long_axis",
        "do_split_image",
        "do_image_splitting",
    ):
        if getattr(processor, setting, None):
            _refuse(name, setting)
    flips = bool(getattr(processor, "do_flip_channel_order", False))
    if flips and getattr(processor, "do_normalize", False):
        _refuse(name, "do_flip_channel_order together with do_normalize")
    steps: list[TransformStep] = [Decode("BGR" if flips else "RGB", exif=True)]
    if processor.do_resize:
        steps += _processor_resize(processor, name)
    if getattr(processor, "do_center_crop", False):
        steps.append(
            CenterCrop(
                *_sides(name, "crop_size", _size_table(processor.crop_size)), rounding="floor"
            )
        )
    steps += _processor_levels(processor, name)
    return Transform((*steps, Pack()))


def _from_preset(preset: Any, *crop: CenterCrop) -> Transform:
    resize = _sides_list(preset.resize_size)
    fit: Fit = "short" if len(resize) == 1 else "exact"
    scaled = Resize(resize, fit, _interpolation("resize", preset.interpolation))
    levels = Normalize(_floats(preset.mean), _floats(preset.std))
    return Transform((Decode(), scaled, *crop, Rescale(), levels, Pack()))


_PRESETS: Mapping[str, Callable[[Any], Transform]] = {
    "ImageClassification": lambda preset: _from_preset(
        preset, CenterCrop(preset.crop_size[0], preset.crop_size[-1])
    ),
    "SemanticSegmentation": _from_preset,
    "ObjectDetection": lambda _: Transform(
        (Decode(), Rescale(), Pack())
    ),  # resizes and normalizes inside the model
}


def _from_compose(stages: Iterable[Any]) -> Transform:
    """A stage's kernel depends on its input: a Pillow image, uint8 or float."""
    decode = Decode()
    steps: list[TransformStep] = []
    kernel: ResizeKernel = "pillow"
    for index, stage in enumerate(stages):
        where = f"step {index + 1}, {type(stage).__name__}"
        if any(isinstance(step, Normalize) for step in steps):
            _refuse("Compose", f"{where} after Normalize")
        match type(stage).__name__:
            case "Resize":
                steps.append(_compose_resize(where, stage, kernel))
            case "CenterCrop":
                crop = _sides_list(stage.size)
                steps.append(CenterCrop(crop[0], crop[-1]))
            case "PILToTensor" | "ToImage" | "MaybePILToTensor":
                kernel = "torch" if kernel == "pillow" else kernel
            case "ToTensor" | "MaybeToTensor":
                kernel = _append_rescale(steps)
            case "ConvertImageDtype" | "ToDtype":
                kernel = _to_dtype(where, stage, steps, kernel)
            case "Normalize" if kernel == "float":
                steps.append(Normalize(_floats(stage.mean), _floats(stage.std)))
            case "Grayscale" if int(stage.num_output_channels) == 1 and not steps:
                decode = Decode("L")
            case "RGB" | "ToPureTensor" | "Identity":
                pass
            case _:
                _refuse("Compose", where)
    if kernel == "pillow":
        _refuse("Compose", "a result that is a Pillow image (add ToTensor or PILToTensor)")
    # Resizing and cropping floats commute with the rescale, since nothing is rounded, so they may precede it.
    geometry = [step for step in steps if isinstance(step, Resize | CenterCrop)]
    levels = [step for step in steps if not isinstance(step, Resize | CenterCrop)]
    return Transform(
        (decode, *geometry, *levels, Pack(dtype="float32" if kernel == "float" else "uint8"))
    )


def _compose_resize(where: str, stage: Any, kernel: ResizeKernel) -> Resize:
    interpolation = _interpolation(where, stage.interpolation)
    antialias = True if kernel == "pillow" else bool(stage.antialias)
    if stage.size is None:
        return Resize((int(stage.max_size),), "long", interpolation, antialias, kernel=kernel)
    size = _sides_list(stage.size)
    fit: Fit = "short" if len(size) == 1 else "exact"
    return Resize(size, fit, interpolation, antialias, stage.max_size, kernel)


def _append_rescale(steps: list[TransformStep]) -> ResizeKernel:
    if not any(isinstance(step, Rescale) for step in steps):
        steps.append(Rescale())
    return "float"


def _to_dtype(
    where: str, stage: Any, steps: list[TransformStep], kernel: ResizeKernel
) -> ResizeKernel:
    dtype = str(stage.dtype).removeprefix("torch.")
    if (
        kernel == "pillow"
        or dtype not in ("float32", "uint8")
        or (dtype == "uint8" and kernel == "float")
    ):
        _refuse("Compose", f"{where} to {dtype} of a {kernel} image")
    if dtype == "uint8":
        return kernel
    return _append_rescale(steps) if getattr(stage, "scale", True) else "float"


def _processor_resize(processor: Any, name: str) -> list[TransformStep]:
    """The resize of the processor's class; ConvNeXT crops after it."""
    size = _size_table(processor.size)
    interpolation = _interpolation(name, processor.resample)
    kernel: ResizeKernel = "pillow" if getattr(processor, "backend", None) == "pil" else "torch"
    if name.startswith("ConvNext"):
        side = size.get("shortest_edge")
        if side is None:
            _refuse(name, f"size {size}")
        if side >= 384:
            return [Resize((side, side), "exact", interpolation, kernel=kernel)]
        scaled = int(side / processor.crop_pct)
        return [
            Resize((scaled,), "short", interpolation, kernel=kernel),
            CenterCrop(side, side, "floor"),
        ]
    if set(size) == {"shortest_edge"}:
        return [Resize((size["shortest_edge"],), "short", interpolation, kernel=kernel)]
    return [Resize(_sides(name, "size", size), "exact", interpolation, kernel=kernel)]


def _processor_levels(processor: Any, name: str) -> list[TransformStep]:
    steps: list[TransformStep] = []
    if getattr(processor, "do_rescale", False):
        divisor = 1.0 / float(processor.rescale_factor)
        nearest = float(round(divisor))
        exact = nearest if nearest and abs(divisor - nearest) < 1e-6 else divisor
        steps.append(Rescale(exact, -1.0 if getattr(processor, "rescale_offset", False) else 0.0))
    if getattr(processor, "include_top", False):
        _refuse(name, "include_top (a second normalization)")
    if getattr(processor, "do_normalize", False):
        steps.append(Normalize(_floats(processor.image_mean), _floats(processor.image_std)))
    return steps


def _size_table(size: Any) -> dict[str, int]:
    """A processor's size as a plain table; SizeDict lists absent sides as None."""
    pairs = size.items() if hasattr(size, "items") else vars(size).items()
    return {str(name): int(value) for name, value in pairs if value is not None}


def _sides(name: str, setting: str, size: Mapping[str, int]) -> tuple[int, int]:
    if set(size) != {"height", "width"}:
        _refuse(name, f"{setting} {dict(size)}")
    return size["height"], size["width"]


def _sides_list(size: Any) -> tuple[int, ...]:
    return (int(size),) if isinstance(size, int | float) else tuple(int(side) for side in size)


def _floats(values: Any) -> tuple[float, ...]:
    """Floats from a list, or from a float32 tensor with their written digits: 0.485, not 0.4850000143."""
    if hasattr(values, "numpy"):
        return tuple(float(str(value)) for value in values.numpy())
    return tuple(float(value) for value in values)


def _interpolation(where: str, value: Any) -> Interpolation:
    name = (
        Image.Resampling(value).name.lower()
        if isinstance(value, int)
        else str(getattr(value, "value", value))
    )
    if name not in _INTERPOLATIONS:
        _refuse(where, f"interpolation {name!r}")
    return cast("Interpolation", name)


def _refuse(source: str, step: str) -> NoReturn:
    problem = f"{source}: {step} cannot be translated"
    raise BadInputError(
        f"{problem}\ndescribe the preprocessing in a model card ([[preprocessing.steps]])"
    )
