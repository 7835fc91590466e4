"""DALI pipelines give the pictures of the transform that they were derived from."""

import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from nvidia.dali import fn, pipeline_def, types
from PIL import Image
from tests.fakes.odd_images import make_edge_case_files, make_synthetic_image

from optpipe.core.errors import BadInputError
from optpipe.core.process import JobFailure
from optpipe.core.transform import (
    CenterCrop,
    Decode,
    Normalize,
    Pack,
    Rescale,
    Resize,
    Transform,
    compute_resized_sides,
)
from optpipe.models.inputs.images import preprocess_file
from optpipe.preprocess.dali_pipeline import (
    INPUT,
    DaliPlan,
    _is_whole_jpeg,
    dali_from_transform,
    explain_failure,
    is_edge_case,
)

PLAN = DaliPlan(batch_size=1, threads=1)
STD = 0.25


def through_dali(files, transform, plan=PLAN):
    pipeline = dali_from_transform(transform, replace(plan, batch_size=len(files)), prefetch=1)
    pipeline.feed_input(INPUT, [np.frombuffer(data, np.uint8) for data in files])
    (outputs,) = pipeline.run()
    return [np.asarray(outputs[row]) for row in range(len(files))]


def encoded(pixels, kind="PNG"):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


def levels_apart(transform, got, expected):
    """The difference in 8-bit levels, whatever the transform made of them."""
    scale = transform.rescale.divisor if transform.rescale else 1.0
    std = transform.normalize.std[0] if transform.normalize else 1.0
    return np.abs(got.astype(np.float64) - expected.astype(np.float64)) * scale * std


def ties_fall(geometry, height, width):
    """Whether torch's `nearest` puts an exact tie one pixel lower: it computes floor(x * scale) in float32."""
    for step in geometry:
        after = (
            compute_resized_sides(step, height, width)
            if isinstance(step, Resize)
            else (step.height, step.width)
        )
        if isinstance(step, Resize) and step.interpolation == "nearest":
            for old, new in zip((height, width), after, strict=True):
                places = np.floor(
                    np.arange(new, dtype=np.float32) * (np.float32(old) / np.float32(new))
                )
                if (places != np.arange(new) * old // new).any():
                    return True
        height, width = after
    return False


sides = st.integers(3, 60)
resizes = st.builds(
    Resize,
    st.tuples(st.integers(3, 60)),
    st.sampled_from(["short", "long"]),
    st.sampled_from(["bilinear", "bicubic", "lanczos"]),
    kernel=st.sampled_from(["pillow", "torch"]),
) | st.builds(
    Resize,
    st.tuples(st.integers(3, 60), st.integers(3, 60)),
    st.just("exact"),
    st.sampled_from(["bilinear", "bicubic", "nearest"]),
    kernel=st.just("torch"),
)
side = st.integers(1, 70)
crops = st.builds(
    CenterCrop, side, side, st.sampled_from(["half-even", "floor"]), st.integers(0, 255)
)
endings = st.sampled_from(
    [
        (Pack("HWC", "uint8"),),
        (Pack("CHW", "uint8"),),
        (Rescale(), Pack("HWC")),
        (Rescale(127.5, -1.0), Pack()),
        (Rescale(), Normalize((0.4, 0.5, 0.6), (STD,) * 3), Pack()),
        (Rescale(), Normalize((0.5,), (STD,)), Pack()),
    ]
)


@given(
    st.lists(resizes | crops, max_size=2), endings, sides, sides, st.booleans(), st.integers(0, 5)
)
@example(
    [Resize((3,), kernel="pillow")], (Pack("HWC", "uint8"),), 9, 4, False, 0
)  # loses more rows than columns
@pytest.mark.slow
def test_any_transform_gives_the_same_picture(geometry, ending, height, width, bgr, seed):
    transform = Transform((Decode("BGR" if bgr else "RGB"), *geometry, *ending))
    data = encoded(make_synthetic_image(height, width, seed))
    try:
        expected = preprocess_file(data, transform)
    except BadInputError:
        return  # a side of 0 pixels
    assume(not ties_fall(geometry, height, width))
    (got,) = through_dali([data], transform)
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    apart = levels_apart(transform, got, expected)
    # One level where rounding falls the other way; a second resize can double it and steep filters overshoot.
    assert apart.max(initial=0) <= 1.01 + 3 * len(
        [step for step in geometry if isinstance(step, Resize)]
    )
    assert apart.mean() <= 0.1 + 4 / apart.size  # a picture of nine levels has one off


@pytest.mark.slow
def test_a_batch_may_mix_both_orders():
    transform = Transform((Decode(), Resize((30,)), CenterCrop(28, 28), Rescale(), Pack()))
    shapes = [(160, 51), (51, 160), (91, 80), (23, 71), (71, 23)]
    files = [
        encoded(np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8))
        for shape in shapes
    ]
    for data, got in zip(files, through_dali(files, transform), strict=True):
        assert levels_apart(transform, got, preprocess_file(data, transform)).mean() <= 0.1


def exact(interpolation, kernel, *, antialias=True):
    return Resize((96, 96), "exact", interpolation, antialias, kernel=kernel), Rescale(), Pack()


@pytest.mark.parametrize(
    ("steps", "dtype", "channels"),
    [
        (exact("bilinear", "pillow"), "float32", 3),
        (exact("bicubic", "torch"), "float32", 3),
        (exact("lanczos", "float"), "float32", 3),
        (exact("bilinear", "float", antialias=False), "float32", 3),
        ((Resize((32, 32), "exact"), Rescale(), Pack(dtype="float16")), "float16", 3),
        ((Resize((32, 32), "exact"), Rescale(), Normalize((0.5,), (STD,)), Pack()), "float32", 1),
    ],
)
def test_presets_types_and_grayscale_differ_by_a_level_at_most_on_a_photograph(
    steps, dtype, channels
):
    transform = Transform((Decode("L" if channels == 1 else "RGB"), *steps))
    pixels = make_synthetic_image(300, 401)
    data = encoded(pixels[:, :, 0] if channels == 1 else pixels)
    (got,) = through_dali([data], transform)
    assert (str(got.dtype), len(got)) == (dtype, channels)
    apart = levels_apart(transform, got, preprocess_file(data, transform))
    assert apart.max() <= 1.01 + (0.25 if dtype == "float16" else 0)
    assert apart.mean() <= (0.1 if dtype == "float16" else 0.02)


@pytest.mark.slow
def test_a_batch_may_mix_sizes_formats_and_depths():
    transform = Transform((Decode(), Resize((32,)), CenterCrop(28, 28), Rescale(), Pack()))
    files = [
        encoded(make_synthetic_image(40, 90), "JPEG"),
        encoded(np.arange(64 * 50, dtype=np.uint16).reshape(64, 50)),
        encoded(make_synthetic_image(1, 1)),
        encoded(make_synthetic_image(33, 20), "WEBP"),
    ]
    for data, got in zip(files, through_dali(files, transform), strict=True):
        assert levels_apart(transform, got, preprocess_file(data, transform)).max() <= 1.01


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (Resize((64,), interpolation="box"), "step 2, resize: DALI has no box filter"),
        (Resize((64,), interpolation="hamming"), "no hamming filter"),
        (
            Resize((64,), interpolation="bicubic", antialias=False, kernel="torch"),
            "bicubic without antialias",
        ),
    ],
)
def test_steps_that_dali_cannot_reproduce_are_named(step, said):
    with pytest.raises(BadInputError, match=said):
        dali_from_transform(Transform((Decode(), step, Pack(dtype="uint8"))), PLAN)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("shape", [(300, 401), (150, 90), (100, 1200)])
def test_a_hidden_border_is_not_missed(interpolation, shape):
    resize = Resize((235,), interpolation=interpolation)
    transform = Transform((Decode(), resize, CenterCrop(224, 224), Rescale(), Pack()))
    noise = np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)
    (got,) = through_dali([encoded(noise)], transform)
    apart = levels_apart(transform, got, preprocess_file(encoded(noise), transform))
    assert apart.max() <= 2.01
    assert apart.mean() <= 0.05


FILES = dict(make_edge_case_files())


def for_gpu(files):
    def graph():
        encoded = fn.external_source(name="X", dtype=types.UINT8, ndim=1, device="cpu")
        return _is_whole_jpeg(encoded), encoded

    pipeline = pipeline_def(
        graph, batch_size=len(files), num_threads=1, device_id=None, prefetch_queue_depth=1
    )()
    pipeline.feed_input("X", [np.frombuffer(data, np.uint8) for data in files])
    where, _ = pipeline.run()
    return [bool(np.asarray(where[row])) for row in range(len(files))]


@pytest.mark.slow
def test_odd_files_come_through_as_pillow_reads_them():
    half = Normalize((0.5,) * 3, (STD,) * 3)
    transform = Transform((Decode(), Resize((72,)), CenterCrop(64, 63), Rescale(), half, Pack()))
    truncated = FILES["truncated.jpg"]
    for name, data in FILES.items():
        if data != truncated:
            (got,) = through_dali([data], transform)
            assert levels_apart(transform, got, preprocess_file(data, transform)).max() <= 1.01, (
                name
            )
    with pytest.raises(BadInputError, match="truncated"):
        preprocess_file(truncated, transform)
    with pytest.raises(RuntimeError):
        through_dali([truncated], transform)


def test_whole_jpeg_files_go_to_the_gpu_and_everything_odd_to_the_cpu():
    tails = {
        f"{index}": FILES["progressive.jpg"] + tail
        for index, tail in enumerate([b"\0", b"\xff", b"thumbnail"])
    }
    starts = {
        f"few {data!r}": data for data in (b"\xff", b"\xff\xd8", b"\xff\xd8\xff", b"\xff\xd9")
    }
    every = {**FILES, **tails, **starts}
    found = dict(zip(every, for_gpu(list(every.values())), strict=True))
    assert found == {name: name.endswith(".jpg") and name != "truncated.jpg" for name in every}


def test_files_that_are_known_are_looked_at_before(tmp_path):
    odd: dict[Any, set[str]] = {"mixed": set(), "cpu": set()}
    for name, data in FILES.items():
        path = tmp_path / name
        path.write_bytes(data)
        for decode, found in odd.items():
            if is_edge_case(path, decode):
                found.add(name)
    assert odd["mixed"] == {
        name for name in FILES if not name.endswith(".jpg") or name == "truncated.jpg"
    }
    assert odd["cpu"] == {"grayscale 16 bit.png"}
    (tmp_path / "empty").write_bytes(b"")
    assert is_edge_case(tmp_path / "empty", "mixed")


REFUSED = """RuntimeError: Critical error in pipeline:
Error in CPU operator `nvidia.dali.fn.decoders.image`,
which was used in the pipeline definition with the following traceback:

encountered:

nvImageCodec failure: '#4'
Current pipeline object is no longer valid.
"""


@pytest.mark.parametrize(
    ("stderr", "status", "said"),
    [
        ("RuntimeError: CUDA out of memory. Tried to allocate", 1, "out of memory; use a smaller"),
        ("CUDA runtime API error cudaErrorMemoryAllocation (2)", 1, "out of memory"),
        ("Traceback\n  x\nValueError: no such thing\n", 1, "ValueError: no such thing"),
        ("", -9, "killed by signal 9 (out of host memory?)"),
        ("Traceback", None, "timed out after 20 s"),
        (
            REFUSED,
            1,
            "DALI: the decoder does not support this format (nvImageCodec status 4); `optpipe preprocess",
        ),
    ],
)
def test_a_failed_process_gives_its_reason_in_one_line(stderr, status, said):
    assert said in explain_failure(JobFailure(stderr, status), 20)
