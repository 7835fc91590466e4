"""Chooses the samples for verification and benchmarks: the user's data first, then seeded variations and synthetic data."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from errno import ENOSPC
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from optpipe.backends.onnx_graph import load_onnx
from optpipe.backends.onnx_size_inputs import (
    find_compared_values,
    find_index_bounds,
    find_size_inputs,
)
from optpipe.core.card import InputSpec, ModelCard, Task
from optpipe.core.events import Listener, SilentListener
from optpipe.core.files import hash_file, hash_value
from optpipe.core.transform import CenterCrop, Transform
from optpipe.models.inputs.image_set import ImageSet, find_images
from optpipe.models.inputs.rows import count_rows, list_runs
from optpipe.models.inputs.sample_set import SampleSet, SetFile, draw_subset
from optpipe.models.inputs.task_data import (
    drop_unknown_labels,
    find_label_indices,
    iterate_rows,
    load_sample_set,
)
from optpipe.models.inputs.tensor_files import holds_tensors
from optpipe.models.inputs.tensor_set import TensorSet
from optpipe.models.inputs.text_set import make_shipped_set
from optpipe.models.inputs.tokens import takes_types
from optpipe.workspace.entry import Entry
from optpipe.workspace.environment import get_package_version
from optpipe.workspace.file_names import ONNX
from optpipe.workspace.places import find_shipped_folder

NOISE = "seeded noise"
CALIBRATED_ON = "which INT8 and FP8 are calibrated on"
SAMPLE_COUNT = 8
SAMPLE_BYTES = 128 << 20
GIVEN_COUNT = 256
HELD_OUT_COUNT = 128
HELD_OUT_PART = 4
"""At most one in this many calibration samples is held out."""
FEWEST_HELD_OUT = 8
"""With fewer calibration samples than this times HELD_OUT_PART, all are used for both calibration and verification."""
LABELED_BYTES = 16 << 20
"""Maximum size of a labeled validation set's inputs, which give a build its accuracy."""


@dataclass(frozen=True, slots=True)
class Samples:
    kind: str
    data: str
    """Their origin: `voices.npz, held out from calibration`."""
    drawn: SampleSet | None
    """None for seeded noise."""
    sha256: str
    held_out: tuple[str, ...] = ()


def choose_samples(
    card: ModelCard,
    given: Path | None,
    calibration: Path | None = None,
    model: Entry[Any] | None = None,
    listener: Listener | None = None,
    *,
    truncate: bool = False,
) -> Samples:
    """The first available of: `given`, the card's validation set, samples held out of `calibration` or the card's
    calibration set, shipped images or texts, seeded noise.

    Checks names, types and shapes. Only texts need the exported `model`, for its tokenizer.
    """
    listener = listener or SilentListener()
    tokenizes = (
        card.tokenization is not None
        and model is not None
        and get_package_version("tokenizers") is not None
    )
    readable = card.transform is not None or tokenizes
    bits = (
        int(spec.dtype.strip(ascii_lowercase) or 8) * math.prod(spec.sample) for spec in card.inputs
    )
    room = SAMPLE_BYTES // max(sum(bits) // 8, 1)  # `bool` states no bits and has 8

    def load(source: Path, count: int | None, *, cut: bool) -> SampleSet:
        return load_sample_set(model, card, source, count, 0, SilentListener(), truncate=cut)[0]

    if given is not None:
        drawn = load(given, GIVEN_COUNT, cut=truncate)
        return _samples_from_set(
            drawn, max(SAMPLE_COUNT, min(GIVEN_COUNT, room)), card, listener, drawn.name
        )
    if "validation" in card.data and readable:
        drawn = load(Path(card.data["validation"]), None, cut=True)
        most = (
            max(SAMPLE_COUNT, room * LABELED_BYTES // SAMPLE_BYTES)
            if card.transform
            else GIVEN_COUNT
        )
        return _samples_from_set(
            drawn, most, card, listener, f"{drawn.name}, the card's validation set"
        )
    own = card.data.get("calibration")
    source = calibration or (Path(own) if own else None)
    if source is not None and (readable or holds_tensors(source)):
        drawn, most = load(source, None, cut=truncate), max(SAMPLE_COUNT, min(HELD_OUT_COUNT, room))
        return _hold_out(drawn, most, card, listener)
    if card.transform is not None:
        folder = find_shipped_folder("calibration") / "samples"
        files = tuple(
            SetFile(path.name, hash_file(path)) for path in find_images(folder)[:SAMPLE_COUNT]
        )
        shipped: SampleSet = ImageSet("photographs", folder, 0, files)
        return Samples("images", "photographs that optpipe ships", shipped, shipped.sha256)
    if tokenizes:
        shipped = make_shipped_set(paired=takes_types(card))
        return Samples("texts", "sentences that optpipe ships", shipped, shipped.sha256)
    seed = {"synthetic": 1, "inputs": [spec.to_dict() for spec in card.inputs]}
    return Samples("synthetic", NOISE, None, hash_value(seed))


def _samples_from_set(
    source: SampleSet, most: int, card: ModelCard, listener: Listener, data: str
) -> Samples:
    """At most `most` samples of `source`; only tensors with the most frequent shapes, which share a batch."""
    if isinstance(source, TensorSet):
        source = source.keep_usual_shapes()
    drawn = draw_subset(source, most)
    if card.task in (Task.CLASSIFICATION, Task.TEXT_CLASSIFICATION):
        drawn = drop_unknown_labels(drawn, card, listener)
    return Samples(source.kind, data, drawn, drawn.sha256)


def _hold_out(whole: SampleSet, most: int, card: ModelCard, listener: Listener) -> Samples:
    count = min(most, len({file.sha256 for file in whole.files}) // HELD_OUT_PART)
    if count < FEWEST_HELD_OUT:
        return _samples_from_set(whole, most, card, listener, f"{whole.name}, {CALIBRATED_ON}")
    chosen = _samples_from_set(
        whole, count, card, listener, f"{whole.name}, held out from calibration"
    )
    assert chosen.drawn is not None
    return replace(chosen, held_out=tuple(sorted({file.sha256 for file in chosen.drawn.files})))


def load_sample_inputs(
    card: ModelCard, samples: Samples, model: Entry[Any] | None = None
) -> dict[str, NDArray[Any]]:
    """A row per sample, or SAMPLE_COUNT rows of noise; repeated until they fill the smallest batch."""
    least = card.batch_range[0]
    if samples.drawn is None:
        graph = load_onnx(model.file(ONNX), weights=False) if model else None
        return make_noise_rows(card, max(SAMPLE_COUNT, least), graph)
    if card.transform is not None:
        transform = card.transform
        if transform.size is None:  # cropped to the opt shape, so that images share a batch
            before = (transform.decode, *transform.geometry)
            height, width = card.inputs[0].opt[2:4]
            crop = CenterCrop(height, width)
            card = replace(
                card, transform=Transform((*before, crop, *transform.steps[len(before) :]))
            )
    parts = list(iterate_rows(model, card, samples.drawn, len(samples.drawn.rows)))
    rows = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    if least > 1:  # samples with different unbatched inputs cannot share a batch
        longest = max(list_runs(card.inputs, rows), key=lambda run: run.stop - run.start)
        rows = {name: value[longest] for name, value in rows.items()}
    order = np.arange(max(count_rows(rows), least)) % count_rows(rows)
    return {name: np.ascontiguousarray(value[order]) for name, value in rows.items()}


def make_noise_rows(card: ModelCard, count: int, graph: Any = None) -> dict[str, NDArray[Any]]:
    """`count` rows of noise by input; values that the `graph` compares an input with are given to it."""
    compared = {} if graph is None else find_compared_values(graph)
    inputs = card.inputs if graph is None else bound_noise(card.inputs, graph)
    made = {}
    for seed, spec in enumerate(inputs):
        shared = spec.batch is None and card.batched
        shape = (1 if shared else count, *spec.sample)
        values = make_synthetic_tensor(shape, spec.dtype, seed, spec.below, compared.get(spec.name))
        made[spec.name] = values.repeat(count, axis=0) if shared else values
    return made


SIZE_BOUND = 8
"""Noise for an input that is a size stays below it, so that no tensor outgrows memory. Users' data may be larger."""


def bound_noise(inputs: Sequence[InputSpec], graph: Any) -> tuple[InputSpec, ...]:
    """`inputs` with what their noise stays below in an ONNX `graph`: the rows of a table, or SIZE_BOUND for a size."""
    rows, sizes = find_index_bounds(graph), find_size_inputs(graph)
    bounded = []
    for spec in inputs:
        known = [spec.below, rows.get(spec.name), SIZE_BOUND if spec.name in sizes else None]
        bounded.append(
            replace(spec, below=min((bound for bound in known if bound is not None), default=None))
        )
    return tuple(bounded)


def read_sample_labels(card: ModelCard, samples: Samples) -> NDArray[np.int64] | None:
    """Classes of a classifier's samples; None without labels."""
    classes = card.outputs[0].classes if card.outputs else None
    if (
        samples.drawn is None
        or classes is None
        or card.task not in (Task.CLASSIFICATION, Task.TEXT_CLASSIFICATION)
    ):
        return None
    return find_label_indices(samples.drawn, card, classes)


POOL_SIZE = 64


def vary_inputs(
    real: Mapping[str, NDArray[Any]], size: int, seed: int, shared: frozenset[str] = frozenset()
) -> dict[str, NDArray[Any]]:
    """`size` rows per input: the real ones, then copies rolled along their last axis by a seeded step.

    Inputs in `shared` have one value for a whole batch and keep it. A rolled image has the same values, and so the same
    power draw and rounding, and no cache has seen it.
    """
    count = min(len(array) for array in real.values())
    steps = np.random.default_rng(seed).integers(1, 1 << 16, size)
    rows: dict[str, NDArray[Any]] = {}
    for name, array in real.items():
        made = [array[row] for row in range(min(count, size))]
        for row in range(count, size):
            same = name in shared or array.ndim < 2
            step = 1 + int(steps[row]) % max(array.shape[-1] - 1, 1)
            made.append(array[row % count] if same else np.roll(array[row % count], step, axis=-1))
        rows[name] = np.ascontiguousarray(np.stack(made))
    return rows


def save_pool(directory: Path, prefix: str, arrays: Mapping[str, NDArray[Any]]) -> dict[str, str]:
    """Writes each array to `directory`; returns name → file. Raises OSError with ENOSPC if the disk is full."""
    directory.mkdir(parents=True, exist_ok=True)
    files: dict[str, str] = {}
    for index, (name, array) in enumerate(arrays.items()):
        path = directory / f"{prefix}{index}.npy"
        try:
            np.save(path, array, allow_pickle=False)
        except OSError as error:
            if error.errno is None:  # raised by NumPy after a short write
                raise OSError(ENOSPC, os.strerror(ENOSPC), str(path)) from error
            raise
        files[name] = str(path)
    return files


BRIGHTNESS = 0.5
"""Standard deviation of the mean of a synthetic image, as a share of that of all values. A model that looks at the mean of an image sees
nothing in images of mean zero, and one that subtracts it subtracts rounding errors."""
SMALLEST_VOCABULARY = 1000
"""No vocabulary is smaller."""


def make_synthetic_tensor(
    shape: Sequence[int],
    dtype: DTypeLike = np.float32,
    seed: int = 0,
    below: int | None = None,
    value: int | None = None,
) -> NDArray[np.generic]:
    """A tensor like a model's real input, different in every row of the batch.

    Four axes with 1 or 3 channels: images with the spectrum of photographs, each of its own brightness, of zero mean and unit variance
    over many images. Integers: uniform
    below `below` and SMALLEST_VOCABULARY, like token identifiers. Booleans: either. Everything else: standard normal.
    With a `value`, that everywhere.
    """
    kind = np.dtype(dtype)
    if value is not None:
        return np.full(tuple(shape), value, kind)
    random = np.random.default_rng(seed)
    if kind.kind in "iub":
        values_of_kind = 2 if kind.kind == "b" else int(np.iinfo(kind).max) + 1
        limit = min(below or SMALLEST_VOCABULARY, SMALLEST_VOCABULARY, values_of_kind)
        return random.integers(0, limit, tuple(shape)).astype(kind)
    if len(shape) == 4 and shape[1] in (1, 3):
        rows = [
            make_photograph_noise(random, shape[2], shape[3], shape[1]) for _ in range(shape[0])
        ]
        values = (
            np.stack([np.moveaxis(row, -1, 0) for row in rows]) if rows else np.zeros(tuple(shape))
        )
        brightness = BRIGHTNESS * random.standard_normal((shape[0], 1, 1, 1))
        return (math.sqrt(1 - BRIGHTNESS**2) * values + brightness).astype(kind)
    return random.standard_normal(tuple(shape)).astype(kind)


def make_photograph_noise(
    random: np.random.Generator, height: int, width: int, channels: int
) -> NDArray[np.float64]:
    """Noise with amplitude 1/f, as natural scenes have (Field 1987); channels share most of their luminance."""
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None, :])
    frequency[0, 0] = 1.0
    spectrum = np.fft.rfft2(random.standard_normal((channels + 1, height, width))) / frequency
    planes = np.fft.irfft2(spectrum, s=(height, width))
    mixed = 0.85 * planes[:1] + 0.35 * planes[1:]
    spread = mixed.std()
    return np.moveaxis((mixed - mixed.mean()) / (spread if spread > 0 else 1.0), 0, -1)
