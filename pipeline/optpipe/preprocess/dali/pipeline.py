"""DALI pipelines derived from a transform: fed with encoded files, or reading them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from optpipe.core.errors import MissingError
from optpipe.core.transform import CenterCrop, Resize, Transform
from optpipe.preprocess.dali.decode import decode_mixed, decode_on_cpu, is_edge_case
from optpipe.preprocess.dali.graph import (
    Arithmetic,
    GraphImage,
    apply_dali_step,
    apply_each_step,
    find_crop_to_pack,
    is_border_hidden,
    pack_image,
    process_image,
    require_translatable,
)

INPUT = "DALI_INPUT_0"
"""The name that Triton's DALI backend gives the first input unless a configuration says otherwise."""
DecodeDevice = Literal["cpu", "mixed"]


@dataclass(frozen=True, slots=True)
class DaliPlan:
    """How a derived pipeline runs; nothing here may change a pixel but `decode` and `fancy_upsampling`."""

    decode: DecodeDevice = "cpu"
    """`cpu`: by libjpeg-turbo and its like; `mixed`: by nvJPEG, which ends on the GPU."""
    device: Literal["cpu", "gpu"] = "cpu"
    """Where everything after decoding runs and the result lies; `mixed` needs `gpu`."""
    threads: int = 2
    batch_size: int = 32
    hw_decoder_load: float = 1.0
    """Share of the images that the GPU's JPEG decoder takes; the SMs decode the others.

    On an H200 the former's pixels are libjpeg-turbo's but for single levels, the latter's differ by 0.026 on average.
    """
    fancy_upsampling: bool = True
    """Interpolates chroma as libjpeg-turbo does, which Pillow uses; nvJPEG's default repeats it."""
    cpu_share: float = 0.0
    """Share of the images that the CPU decodes beside the GPU's decoders, with `mixed`."""
    edge_cases: bool = True
    """Sends anything but a whole JPEG to the CPU's decoders and clips 16-bit grayscale, as Pillow reads them."""
    resize: Arithmetic = "exact"
    prefetch: int = 2


def require_dali() -> None:
    """Raises MissingError with the install command where DALI is not installed."""
    try:
        import nvidia.dali  # noqa: F401
    except ImportError as error:
        raise MissingError(
            f"DALI is not installed ({error}); install it with `pip install nvidia-dali-cuda130`"
        ) from error


def dali_from_transform(transform: Transform, plan: DaliPlan, *, prefetch: int | None = None) -> Any:
    """A pipeline that takes encoded files at the input `DALI_INPUT_0` and gives the model's tensor.

    Raises BadInputError that names a step DALI cannot reproduce, MissingError without DALI.
    """
    require_dali()
    require_translatable(transform)

    def graph() -> Any:
        return process_image(_decode_fed_files(transform, plan), transform, plan.resize)

    # declared, so that whoever loads the serialized pipeline can hold its configuration against it
    return _build_pipeline(graph, plan, prefetch, output_dtype=_get_dali_type(transform), output_ndim=3)


def make_steps_pipeline(transform: Transform, plan: DaliPlan) -> Any:
    """The same pipeline with an output after decoding, after every resize and crop, and at the end."""
    require_dali()
    require_translatable(transform)

    def graph() -> Any:
        return list_outputs(_decode_fed_files(transform, plan), transform, plan.resize)

    return _build_pipeline(graph, plan, 1)


def make_single_step_pipeline(
    transform: Transform, step: Resize | CenterCrop | None, plan: DaliPlan, *, floats: bool = False
) -> Any:
    """One step alone on given pixels: what it adds to the difference by itself; None is all after the geometry."""
    require_dali()
    geometry = (*transform.geometry, None)
    hidden = isinstance(step, Resize) and is_border_hidden(step, geometry[geometry.index(step) + 1])

    def graph() -> Any:
        from nvidia.dali import fn, types

        dtype = types.FLOAT if floats else types.UINT8
        pixels = fn.external_source(name=INPUT, dtype=dtype, ndim=3, layout="HWC", device="cpu")
        sides = fn.cast(pixels.shape()[0:2], dtype=types.INT32)
        image = GraphImage(pixels.gpu() if plan.device == "gpu" else pixels, sides)
        if step is not None:
            return apply_dali_step(image, step, plan.resize, border_hidden=hidden).pixels
        return pack_image(image, transform)

    return _build_pipeline(graph, plan, 1, conditionals=False)


def make_reading_pipeline(
    paths: Sequence[Path], transform: Transform, plan: DaliPlan, *, decode_only: bool = False
) -> Any:
    """A pipeline that reads `paths` again and again: (tensor, index of the file). `decode_only` ends after decoding.

    The files are known, so each is looked at once, here: where none is an edge case the graph needs no branch for them,
    which costs a tenth of the rate on a GPU.
    """
    require_dali()
    require_translatable(transform)
    plan = replace(plan, edge_cases=plan.edge_cases and any(is_edge_case(path, plan.decode) for path in paths))

    def graph() -> Any:
        from nvidia.dali import fn

        encoded, index = fn.readers.file(
            files=[str(path) for path in paths], name="reader", prefetch_queue_depth=plan.prefetch, lazy_init=True
        )
        image = decode_files(encoded, transform, plan, index)
        return (image.pixels if decode_only else process_image(image, transform, plan.resize)), index

    return _build_pipeline(graph, plan, None)


def make_bytes_pipeline(paths: Sequence[Path], plan: DaliPlan) -> Any:
    """Only reads the files: the rate that storage and page cache allow."""
    require_dali()

    def graph() -> Any:
        from nvidia.dali import fn

        names = [str(path) for path in paths]
        encoded, _ = fn.readers.file(files=names, prefetch_queue_depth=plan.prefetch, lazy_init=True)
        return encoded

    return _build_pipeline(graph, replace(plan, decode="cpu", device="cpu"), None, conditionals=False)


def _decode_fed_files(transform: Transform, plan: DaliPlan) -> GraphImage:
    """Encoded files at the pipeline's input, decoded."""
    from nvidia.dali import fn, types

    return decode_files(fn.external_source(name=INPUT, dtype=types.UINT8, ndim=1, device="cpu"), transform, plan)


def decode_files(encoded: Any, transform: Transform, plan: DaliPlan, index: Any = None) -> GraphImage:
    """Decodes where the plan says and brings the pixels to where it goes on.

    The CPU takes its share of files by their `index`; where they have none, by their size.
    """
    if plan.decode == "mixed":
        from nvidia.dali import fn, types

        options = {"hw_decoder_load": plan.hw_decoder_load, "jpeg_fancy_upsampling": plan.fancy_upsampling}
        number = fn.cast(encoded.shape(), dtype=types.INT32) if index is None else index
        share = (number, plan.cpu_share) if plan.cpu_share else None
        return decode_mixed(encoded, transform.decode, options, edge_cases=plan.edge_cases, cpu_share=share)
    image = decode_on_cpu(encoded, transform.decode, edge_cases=plan.edge_cases)
    if plan.device == "gpu":
        image = replace(image, pixels=image.pixels.gpu())
    return image


def list_outputs(image: GraphImage, transform: Transform, arithmetic: Arithmetic) -> tuple[Any, ...]:
    """Pixels after decoding and after every geometric step, then the packed tensor."""
    after = [image, *apply_each_step(image, transform, arithmetic)]
    crop = find_crop_to_pack(transform, after[-2]) if len(after) > 1 else None
    last = pack_image(after[-2], transform, crop) if crop else pack_image(after[-1], transform)
    return (*(each.pixels for each in after), last)


def _get_dali_type(transform: Transform) -> Any:
    from nvidia.dali import types

    return {"float32": types.FLOAT, "float16": types.FLOAT16, "uint8": types.UINT8}[transform.pack.dtype]


def _build_pipeline(
    graph: Callable[[], Any], plan: DaliPlan, prefetch: int | None, *, conditionals: bool | None = None, **declared: Any
) -> Any:
    from nvidia.dali import pipeline_def

    define = pipeline_def(
        graph,
        batch_size=plan.batch_size,
        num_threads=plan.threads,
        device_id=0 if plan.device == "gpu" else None,
        prefetch_queue_depth=prefetch or plan.prefetch,
        enable_conditionals=plan.edge_cases or plan.cpu_share > 0 if conditionals is None else conditionals,
        **declared,
    )
    pipeline = define()
    pipeline.build()
    return pipeline
