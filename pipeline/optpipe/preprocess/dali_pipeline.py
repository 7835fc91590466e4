"""DALI pipelines derived from a transform: fed with encoded files, or reading them.

Decoding gives Pillow's pixels for every file. Only whole JPEG files, by their first and last bytes, go to the GPU's
decoders; others go to the CPU's, which are the libraries that Pillow uses. Measured on a GPU:

- nvJPEG keeps other colors in a transparent palette PNG, and fills up a truncated JPEG that Pillow rejects. A whole JPEG
  ends with its end-of-image marker; the CPU decodes one with bytes after it, which costs time and no pixels.
- Pillow clips 16-bit grayscale at 255; DALI scales it to 8 bits.
"""

import io
import json
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
from PIL import Image

from optpipe.core import LazyModule
from optpipe.core.card import ModelCard
from optpipe.core.errors import MissingError, StageError, is_out_of_memory
from optpipe.core.events import Listener
from optpipe.core.files import open_user_file
from optpipe.core.process import JobFailure, run_jobs
from optpipe.core.records import plain_from_record
from optpipe.core.transform import Decode, Transform
from optpipe.core.wording import Argument, Call
from optpipe.models.inputs.samples import make_photograph_noise
from optpipe.preprocess.dali_graph import (
    Arguments,
    GraphImage,
    Node,
    apply_each_step,
    find_crop_to_pack,
    pack_image,
    process_image,
    require_translatable,
)
from optpipe.workspace.entry import Entry
from optpipe.workspace.environment import get_package_version
from optpipe.workspace.store import Store

dali = LazyModule("nvidia.dali")
fn, math, types = map(LazyModule, ("nvidia.dali.fn", "nvidia.dali.math", "nvidia.dali.types"))

INPUT = "DALI_INPUT_0"
"""Triton's DALI backend gives the first input this name unless a configuration names it."""


@dataclass(frozen=True, slots=True)
class DaliPlan:
    """Settings of a derived pipeline; only `decode` may change a pixel."""

    decode: Literal["cpu", "mixed"] = "cpu"
    """`cpu`: libjpeg-turbo and similar libraries; `mixed`: nvJPEG, with the pixels on the GPU."""
    device: Literal["cpu", "gpu"] = "cpu"
    """The device of everything after decoding and of the result; `mixed` needs `gpu`."""
    threads: int = 2
    batch_size: int = 32
    hw_decoder_load: float = 1.0
    """Share of the images that the GPU's JPEG decoder takes; the SMs decode the others.

    On an H200 the decoder's pixels differ from libjpeg-turbo's by single levels, those of the SMs by 0.026 on average.
    """
    edge_cases: bool = True
    """Sends anything but a whole JPEG to the CPU's decoders and clips 16-bit grayscale, as Pillow reads them."""
    prefetch: int = 2


def require_dali() -> None:
    """Raises MissingError with the install command."""
    try:
        import nvidia.dali  # noqa: F401
    except ImportError as error:
        problem = f"DALI is not installed ({error})"
        raise MissingError(
            f"{problem}; install it with `pip install nvidia-dali-cuda130`"
        ) from error


def dali_from_transform(
    transform: Transform, plan: DaliPlan, *, prefetch: int | None = None
) -> Any:
    """A pipeline from encoded files at the input `DALI_INPUT_0` to the model's tensor.

    Raises BadInputError for a step that DALI cannot reproduce, MissingError without DALI.
    """
    require_dali()
    require_translatable(transform)

    def graph() -> Any:
        return process_image(_decode_fed_files(transform, plan), transform)

    dtype = {"float32": types.FLOAT, "float16": types.FLOAT16, "uint8": types.UINT8}[
        transform.pack.dtype
    ]
    # declared, so that a reader of the serialized pipeline can compare it with its configuration
    return _build_pipeline(graph, plan, prefetch, output_dtype=dtype, output_ndim=3)


def make_steps_pipeline(transform: Transform, plan: DaliPlan) -> Any:
    """The same pipeline with an output after decoding and after every resize and crop, then the packed tensor."""
    require_translatable(transform)

    def graph() -> Any:
        image = _decode_fed_files(transform, plan)
        after = [image, *apply_each_step(image, transform)]
        crop = find_crop_to_pack(transform, after[-2]) if len(after) > 1 else None
        last = pack_image(after[-2], transform, crop) if crop else pack_image(after[-1], transform)
        return (*(stage.pixels for stage in after), last)

    return _build_pipeline(graph, plan, 1)


def make_reading_pipeline(
    paths: Sequence[Path], transform: Transform, plan: DaliPlan, *, decode_only: bool = False
) -> Any:
    """A pipeline that reads `paths` repeatedly: (tensor, index of the file). `decode_only` ends after decoding.

    Each file is checked once, here: if none is an edge case the graph needs no branch for them, which would cost a tenth
    of the rate on a GPU.
    """
    require_translatable(transform)
    plan = replace(
        plan, edge_cases=plan.edge_cases and any(is_edge_case(path, plan.decode) for path in paths)
    )

    def graph() -> Any:
        names, depth = [str(path) for path in paths], plan.prefetch
        encoded, index = fn.readers.file(
            files=names, name="reader", prefetch_queue_depth=depth, lazy_init=True
        )
        image = decode_files(encoded, transform, plan)
        return (image.pixels if decode_only else process_image(image, transform)), index

    return _build_pipeline(graph, plan, None)


def make_bytes_pipeline(paths: Sequence[Path], plan: DaliPlan) -> Any:
    """Measures the rate that storage and page cache allow."""

    def graph() -> Any:
        names = [str(path) for path in paths]
        encoded, _ = fn.readers.file(
            files=names, prefetch_queue_depth=plan.prefetch, lazy_init=True
        )
        return encoded

    return _build_pipeline(graph, replace(plan, decode="cpu", device="cpu", edge_cases=False), None)


def _decode_fed_files(transform: Transform, plan: DaliPlan) -> GraphImage:
    return decode_files(
        fn.external_source(name=INPUT, dtype=types.UINT8, ndim=1, device="cpu"), transform, plan
    )


def decode_files(encoded: Any, transform: Transform, plan: DaliPlan) -> GraphImage:
    """Decodes by the plan and moves the pixels to its device."""
    step = transform.decode
    if plan.decode == "mixed":
        return decode_mixed(encoded, step, plan)
    pixels = _decode_pixels_on_cpu(encoded, _get_decode_settings(step), edge_cases=plan.edge_cases)
    return GraphImage(pixels.gpu() if plan.device == "gpu" else pixels, _read_sides(encoded, step))


def _build_pipeline(
    graph: Callable[[], Any], plan: DaliPlan, prefetch: int | None, **declared: Any
) -> Any:
    require_dali()
    define = dali.pipeline_def(
        graph,
        batch_size=plan.batch_size,
        num_threads=plan.threads,
        device_id=0 if plan.device == "gpu" else None,
        prefetch_queue_depth=prefetch or plan.prefetch,
        enable_conditionals=plan.edge_cases,
        **declared,
    )
    pipeline = define()
    pipeline.build()
    return pipeline


def decode_mixed(encoded: Node, step: Decode, plan: DaliPlan) -> GraphImage:
    """Decodes to 8 bits on the GPU; with `plan.edge_cases` the CPU takes files that are not a whole JPEG.

    Chroma is interpolated as libjpeg-turbo (Pillow) does; nvJPEG's default repeats it.
    """
    settings = _get_decode_settings(step)
    options: Arguments = {"hw_decoder_load": plan.hw_decoder_load, "jpeg_fancy_upsampling": True}
    if not plan.edge_cases:
        pixels = fn.decoders.image(encoded, device="mixed", **settings, **options)
        return GraphImage(pixels, _read_sides(encoded, step))
    for_gpu = _is_whole_jpeg(encoded)
    if for_gpu:
        pixels = fn.decoders.image(encoded, device="mixed", **settings, **options)
    else:
        pixels = _decode_pixels_on_cpu(encoded, settings, edge_cases=True).gpu()
    return GraphImage(pixels, _read_sides(encoded, step))


def is_edge_case(path: Path, decode: str) -> bool:
    """Whether decoding on `cpu` or `mixed` needs the branch for edge cases, by the file's first and last bytes."""
    size = path.stat().st_size
    with open_user_file(path) as file:
        head = file.read(28)
        file.seek(max(0, size - 2))
        tail = file.read(2)
    if decode == "cpu":
        return head[:4] == b"\x89PNG" and head[24:28] == b"\x10\0\0\0"
    return head[:3] != b"\xff\xd8\xff" or tail != b"\xff\xd9"


def _is_whole_jpeg(encoded: Node) -> Node:
    size = fn.cast(encoded.shape()[0], dtype=types.INT32)
    # ITU-T T.81, table B.1: a file starts with SOI (FF D8) and another marker, and ends with EOI (FF D9)
    return ((_read_number(encoded, [0], 4) & 0xFFFFFF) == 0xFFD8FF) & (
        _read_number(encoded, size - 2, 2) == 0xD9FF
    )


def _decode_pixels_on_cpu(encoded: Node, settings: Arguments, *, edge_cases: bool) -> Node:
    """Decodes to 8 bits on the CPU.

    `edge_cases` adds a branch for 16-bit grayscale PNG: a Python `if` on a graph node, which DALI rewrites under
    `enable_conditionals`.
    """
    if not edge_cases:
        return fn.decoders.image(encoded, device="cpu", **settings)
    # PNG specification, 5.2 and 11.2.1: the signature; bytes 24 to 27 are depth 16, grayscale, and two zeros
    wide_gray = (_read_number(encoded, [0], 4) == 0x474E5089) & (
        _read_number(encoded, [24], 4) == 16
    )
    if wide_gray:
        levels = fn.decoders.image(encoded, device="cpu", dtype=types.UINT16, **settings)
        pixels = fn.cast(math.min(levels, 255), dtype=types.UINT8)
    else:
        pixels = fn.decoders.image(encoded, device="cpu", **settings)
    return pixels


def _get_decode_settings(step: Decode) -> Arguments:
    kinds = {"RGB": types.RGB, "BGR": types.BGR, "L": types.GRAY}
    return {"output_type": kinds[step.channels], "adjust_orientation": step.exif}


def _read_sides(encoded: Node, step: Decode) -> Node:
    return fn.peek_image_shape(encoded, adjust_orientation=step.exif, dtype=types.INT32)[0:2]


def _read_number(encoded: Node, start: Any, count: int) -> Node:
    """`count` bytes of a file (2 or 4) as a little-endian number; 0 after its end."""
    some = fn.slice(encoded, start=start, shape=[count], axes=[0], out_of_bounds_policy="pad")
    return fn.reinterpret(some, dtype=types.UINT32 if count == 4 else types.UINT16, shape=[])


PIPELINE = "1/model.dali"


@dataclass(frozen=True, slots=True)
class PreprocessingInfo:
    KIND: ClassVar[str] = "preprocessing"

    model: str
    transform_sha256: str
    plan: DaliPlan
    file: str


def build_preprocessing_artifact(
    card: ModelCard,
    transform: Transform,
    plan: DaliPlan,
    model: str,
    store: Store,
    listener: Listener,
) -> tuple[Entry[PreprocessingInfo], bool]:
    """The serialized pipeline and the transform of the exported `model`.

    The written file is loaded and must give the same tensor as the original pipeline.
    """
    recipe = {
        "revision": 5,
        "model": model,
        "transform": transform.hash,
        "plan": plain_from_record(plan),
        "dali": get_package_version("nvidia-dali-cuda130"),
    }

    def make(directory: Path) -> PreprocessingInfo:
        target = directory / PIPELINE
        target.parent.mkdir()
        dali_from_transform(transform, plan).serialize(filename=str(target))
        _require_same(target, transform, plan)
        (directory / "transform.json").write_text(
            json.dumps(transform.to_dict(), indent=1), encoding="utf-8"
        )
        return PreprocessingInfo(card.name, transform.hash, plan, PIPELINE)

    return store.produce(
        PreprocessingInfo, recipe, make, parents=(model,), listener=listener, runs_code=True
    )


def load_pipeline(path: Path, plan: DaliPlan) -> Any:
    return dali.Pipeline.deserialize(
        filename=str(path),
        batch_size=plan.batch_size,
        num_threads=plan.threads,
        device_id=0 if plan.device == "gpu" else None,
        prefetch_queue_depth=1,
    )


def _require_same(path: Path, transform: Transform, plan: DaliPlan) -> None:
    single = replace(plan, batch_size=1)
    loaded = load_pipeline(path, single)
    fresh = dali_from_transform(transform, single, prefetch=1)
    file = io.BytesIO()
    levels = 127 + 48 * make_photograph_noise(np.random.default_rng(5), 231, 309, 3)
    Image.fromarray(np.clip(levels, 0, 255).astype(np.uint8)).save(file, "JPEG")
    data = np.frombuffer(file.getvalue(), np.uint8)
    results = []
    for pipeline in (loaded, fresh):
        pipeline.feed_input(INPUT, [data])
        results.append(np.array(pipeline.run()[0].as_cpu()[0]))
    if not np.array_equal(results[0], results[1]):
        raise StageError(
            f"{path.name}: the serialized pipeline does not reproduce the original pipeline's tensor"
        )


Result = TypeVar("Result")

HARDWARE_QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
"""CUDA maps streams onto 8 hardware queues by default, and streams that share a queue wait for each other. DALI's decoder has
26 streams: some waited for a whole enqueued inference, and nothing overlapped (on an H200 0.67 of inference alone
with 8 queues, 0.90 with 32)."""
_IMAGE_CODEC = {
    "nvImageCodec failure: '#3'": "the decoder reports a damaged file (nvImageCodec status 3)",
    "nvImageCodec failure: '#4'": "the decoder does not support this format (nvImageCodec status 4)",
}
"""nvimgcodec.h: NVIMGCODEC_STATUS_BAD_CODESTREAM and NVIMGCODEC_STATUS_CODESTREAM_UNSUPPORTED."""


def run_dali_jobs(
    module: str, jobs: Sequence[object], kind: type[Result], limit_s: float
) -> Generator[Result | str]:
    """`run_jobs`, with a one-line reason in place of the result of a failed job."""
    for result in run_jobs(module, jobs, kind, limit_s, HARDWARE_QUEUES):
        yield explain_failure(result, limit_s) if isinstance(result, JobFailure) else result


def explain_dali_error(text: str) -> str:
    """The message of a DALI operator, between a traceback and the pipeline's end; otherwise the last line that names an error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if "encountered:" in lines[:-1]:
        said = lines[lines.index("encountered:") + 1].rstrip(" :")
        return _IMAGE_CODEC.get(said, said)[:200]
    named = [line for line in lines if "Error" in line or line.startswith("Assert")]
    return (named or lines or [""])[-1][:300]


def explain_failure(failure: JobFailure, limit_s: float) -> str:
    stderr, status = failure.stderr, failure.exit_status
    if status is None:
        return f"timed out after {limit_s:.0f} s"
    if is_out_of_memory(stderr):
        return "out of memory; use a smaller " + Argument("batch_size") + " or fewer threads"
    if status < 0:
        return f"killed by signal {-status}" + (" (out of host memory?)" if status == -9 else "")
    if "encountered:" not in stderr:
        return explain_dali_error(stderr) or f"exit status {status}"
    problem = f"DALI: {explain_dali_error(stderr)}"
    if "fn.decoders" not in stderr:
        return problem
    preprocess = Call("preprocess", "MODEL", images="DIR")
    return problem + "; `" + preprocess + "` lists the files it cannot decode"
