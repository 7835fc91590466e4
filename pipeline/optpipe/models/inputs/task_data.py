"""Converts a task's samples (images, texts or tensors) to the model's inputs."""

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from optpipe.core.card import ModelCard, Task
from optpipe.core.errors import BadInputError, MissingError, read_as_user_file
from optpipe.core.events import Listener
from optpipe.core.files import (
    MAX_LIST_BYTES,
    hash_file,
    hash_value,
    read_user_bytes,
    require_regular_file,
)
from optpipe.core.records import group_pairs
from optpipe.core.wording import IN_MEMORY, Argument, Call
from optpipe.models.inputs.image_set import (
    ANNOTATIONS,
    ImageSet,
    find_images,
    image_set_from_path,
    is_coco,
    list_coco_images,
    walk_files,
)
from optpipe.models.inputs.images import preprocess_batches
from optpipe.models.inputs.questions import cut_windows
from optpipe.models.inputs.rows import Arrays, batch_from_rows, count_rows
from optpipe.models.inputs.sample_set import AnySet, SampleSet, Unusable, format_unreadable
from optpipe.models.inputs.tensor_files import FORMS, holds_tensors
from optpipe.models.inputs.tensor_set import TensorSet, read_tensor_set
from optpipe.models.inputs.text_set import TextSet, text_set_from_path
from optpipe.models.inputs.tokens import (
    compute_max_tokens,
    encode,
    find_first_tokens,
    find_long_texts,
    gives_types,
    pad_tokens,
    takes_types,
    tokenize,
)
from optpipe.models.sources.text_tokenizer import TYPES, is_function
from optpipe.workspace.entry import Entry
from optpipe.workspace.environment import get_package_version
from optpipe.workspace.file_names import TOKENIZER
from optpipe.workspace.files import write_json
from optpipe.workspace.places import format_extra

OF_TEXTS = (
    Task.TEXT_CLASSIFICATION,
    Task.TOKEN_CLASSIFICATION,
    Task.QUESTION_ANSWERING,
    Task.EMBEDDING,
)
"""Tasks whose samples are texts."""
PYTHON_SUFFIX = ".py"


def suggest_card(card: ModelCard) -> str:
    """The command that writes a model card to complete; empty for a module in memory, which no command can name."""
    if card.source.startswith(IN_MEMORY):
        return ""
    call = Call("build", "MODEL", init="CARD.toml")
    return "`" + call + "` writes a model card with preprocessing to complete"


def load_sample_set(
    model: Entry | None,
    card: ModelCard,
    source: Path,
    count: int | None,
    seed: int,
    listener: Listener,
    *,
    truncate: bool = False,
) -> tuple[SampleSet, tuple[Unusable, ...]]:
    """The samples in `source` for this model: images, or JSON lines for a text model, or tensors for any; and unusable ones.

    Reports omitted samples. Raises BadInputError for a model that takes none of these, and for texts that are longer
    than the model's input, unless `truncate` is set. Only texts need the exported `model`, for its tokenizer.
    """
    if holds_tensors(source):
        return read_tensor_set(source, card.inputs, count, seed), ()
    require_task_data(card)
    read = read_texts if card.tokenization else read_images
    samples, unusable = read(source, count, seed, listener)
    if count is not None and len(samples.files) < count:
        listener.warn(
            Argument("count", count)
            + f": {source} has only {len(samples.files)} usable samples; using all of them"
        )
    if isinstance(samples, TextSet):
        assert model is not None
        longest, tokenizer = compute_max_tokens(card), model.file(TOKENIZER)
        content = tokenizer.read_text(encoding="utf-8")
        samples = fit_texts(samples, content, card, truncate=truncate)
        _describe_windows(samples, longest, listener)
        _warn_of_lost_types(samples, card, content, listener)
        if samples.truncated:
            listener.warn(
                f"{samples.truncated} of {len(samples.files)} texts are truncated to {longest} tokens"
            )
        if card.task is Task.TOKEN_CLASSIFICATION:
            _require_places(card, content)
            encoded = tokenize(list(samples.texts.values()), tokenizer, longest)
            firsts = map(find_first_tokens, samples.texts.values(), encoded)
            samples = replace(samples, first_tokens=dict(zip(samples.texts, firsts, strict=True)))
    return samples, unusable


def read_images(
    source: Path, count: int | None, seed: int, listener: Listener
) -> tuple[ImageSet, tuple[Unusable, ...]]:
    """The result of `image_set_from_path`; warns of unusable images. A folder without images is refused before any step."""
    _refuse_python_file(source, "a folder of images")
    if not source.is_file():
        find_images(source)
    with listener.step(f"read {source}", total=count) as step:
        samples, unusable = image_set_from_path(source, count, seed, step)
    _warn_of_unusable(unusable, "file", listener)
    return samples, unusable


def read_texts(
    source: Path, count: int | None, seed: int, listener: Listener
) -> tuple[TextSet, tuple[Unusable, ...]]:
    """The result of `text_set_from_path`; warns of unusable lines."""
    _refuse_python_file(source, "a JSON Lines file")
    with listener.step(f"read {source}", total=count):
        samples, unusable = text_set_from_path(source, count, seed)
    _warn_of_unusable(unusable, "line", listener)
    return samples, unusable


def _refuse_python_file(source: Path, expected: str) -> None:
    """Raises BadInputError for a Python file: its samples are tensors, which other arguments take."""
    if source.suffix.lower() == PYTHON_SUFFIX and source.is_file():
        raise BadInputError(
            f"{source} is a Python file, whose samples are tensors; here give {expected}"
        )


def _warn_of_unusable(unusable: Sequence[Unusable], what: str, listener: Listener) -> None:
    if unusable:
        count = f"1 {what} is" if len(unusable) == 1 else f"{len(unusable)} {what}s are"
        listener.warn(f"{count} skipped: {format_unreadable(unusable, 3)}")


def fit_texts(samples: TextSet, tokenizer: str, card: ModelCard, *, truncate: bool) -> TextSet:
    """`samples` as the model reads it, with its truncated texts counted; `tokenizer` is the content of its file.

    Passages of questions are cut into windows, and nothing of them is lost. Raises BadInputError that names the longest of other
    texts if neither `truncate` nor the set allows cutting.
    """
    _require_fitting_samples(samples, card)
    longest = compute_max_tokens(card)
    texts = {file.path: samples.texts[file.path] for file in samples.files}
    if card.task is Task.QUESTION_ANSWERING:
        _require_places(card, tokenizer)
        pairs = {name: text for name, text in texts.items() if not isinstance(text, str)}
        stride = read_head_count(card, "stride", least=0)  # tokens that windows share
        windows = cut_windows(pairs, tokenizer, longest, stride, samples.name)
        return replace(samples, windows=windows)
    long = find_long_texts(texts, tokenizer, longest)
    if not long:
        return samples
    if truncate or samples.truncate:
        return replace(samples, truncate=True, truncated=len(long))
    line, tokens = max(long.items(), key=lambda pair: pair[1])
    assert card.tokenization is not None
    wider = ""
    if tokens <= card.tokenization.max_length:
        wider = ", or build with " + Argument("shape", card.widen_shapes([tokens]))
    problem = (
        f"{samples.root}, line {line}: {tokens} tokens exceed the maximum input length of {longest}"
    )
    others = f"{len(long)} of {len(texts)} texts are too long"
    raise BadInputError(
        f"{problem} ({others})", remedy="use " + Argument("truncate", True) + " to cut them" + wider
    )


def _require_fitting_samples(samples: TextSet, card: ModelCard) -> None:
    """Raises BadInputError for two texts in a line of a task whose samples are single ones."""
    if card.task is Task.QUESTION_ANSWERING and not samples.asks:
        problem = f"{samples.root}: {card.name} answers questions, but its lines have no question with a context"
        raise BadInputError(
            f'{problem}\ngive SQuAD\'s JSON, or {{"question": "...", "context": "...", "answers": {{"text": ["..."]}}}} in each line'
        )
    if not samples.has_pairs:
        return
    if card.task is Task.TOKEN_CLASSIFICATION:
        problem = f"{samples.root}: tags belong to the words of one text, but its lines have two"
        raise BadInputError(
            f'{problem}\ngive {{"tokens": ["Ada"], "tags": ["B-PER"]}} in each line'
        )
    if card.task is Task.EMBEDDING:
        problem = f"{samples.root}: {card.name} embeds one text at a time, but its lines have two"
        way = 'put each text on its own line, with the same "pair" and "score" for both'
        raise BadInputError(f"{problem}\n{way}")


def _require_places(card: ModelCard, tokenizer: str) -> None:
    """Raises BadInputError for a tokenizer that does not tell where in a text each token is."""
    if is_function(tokenizer):
        problem = f"{card.name}: {card.task} needs the place of each token in its text"
        raise BadInputError(
            f"{problem}, which a Python tokenizer does not give\nuse a tokenizer.json"
        )


def read_head_count(card: ModelCard, name: str, least: int) -> int | None:
    """A whole number of a card's head; None without one. Raises BadInputError for anything else."""
    stated = card.head.get(name)
    if stated is None:
        return None
    if isinstance(stated, bool) or not isinstance(stated, int) or stated < least:
        raise BadInputError(
            f"{card.name}: [head] {name} = {stated!r} is not a whole number from {least} on"
        )
    return stated


def _describe_windows(samples: TextSet, longest: int, listener: Listener) -> None:
    long = sum(len(samples.windows.get(file.path, ())) > 1 for file in samples.files)
    if long:
        problem = f"{long} of {len(samples.files)} contexts are longer than {longest} tokens"
        listener.inform(f"{problem}; all are read in {len(samples.rows)} windows, which overlap")


def _warn_of_lost_types(
    samples: TextSet, card: ModelCard, tokenizer: str, listener: Listener
) -> None:
    if samples.has_pairs and not takes_types(card) and gives_types(tokenizer):
        listener.warn(
            f"{card.name} has no input {TYPES}, so that only separators tell its two texts apart"
        )


def resolve_texts(
    source: Path, card: ModelCard, tokenizer: str | None, folder: Path, *, truncate: bool
) -> Path:
    """Checks `source` with `fit_texts` before the export; returns it, or a manifest in `folder` if texts are cut.

    A model without a tokenizer needs no check.
    """
    if card.tokenization is None or tokenizer is None or holds_tensors(source):
        return source
    require_task_data(card)
    samples = fit_texts(text_set_from_path(source)[0], tokenizer, card, truncate=truncate)
    if not samples.truncated:
        return source
    place = folder / f"{samples.sha256[:12]}.json"
    write_json(place, samples.to_dict(folder))
    return place


def write_subset(
    source: Path, card: ModelCard, count: int, seed: int, folder: Path, listener: Listener
) -> Path:
    """The manifest, in `folder`, of `count` samples of images or texts, drawn by `seed`."""
    require_task_data(card)
    read = read_texts if card.tokenization else read_images
    samples, _ = read(source, count, seed, listener)
    place = folder / f"{samples.sha256[:12]}.json"
    write_json(place, samples.to_dict(folder))
    return place


def require_task_data(card: ModelCard) -> None:
    """Raises BadInputError if nothing is known that turns files or texts into the model's inputs."""
    if card.transform is not None:
        return
    if card.tokenization is None:
        if card.task in OF_TEXTS:
            problem = f"{card.name} has no tokenizer to convert texts to inputs"
            message = f'{problem}; a model card names one: tokenizer = "tokenizer.json", or "file.py:function"'

        else:
            way = f"give its inputs as tensors ({FORMS}), or a model card with preprocessing"
            message = f"{card.name} has no preprocessing, so images cannot be turned into its inputs: {way}"
            if way := suggest_card(card):
                message += "\n" + way
        raise BadInputError(message)
    if get_package_version("tokenizers") is None:
        raise MissingError(
            f"{card.name} requires the tokenizers package; install it with `{format_extra('hf')}`"
        )


def fit_batch_size(card: ModelCard, wanted: int) -> int:
    smallest, _, largest = card.batch_range
    return max(smallest, min(wanted, largest))


def iterate_input_batches(
    model: Entry, card: ModelCard, samples: SampleSet, size: int, *, by_length: bool = False
) -> Iterator[tuple[dict[str, np.ndarray], int]]:
    """Batches of the model's inputs, of `size` samples, each with its number of samples.

    A fixed batch is filled up with the last sample. `by_length` groups texts of similar length to reduce padding.
    """
    least = card.batch_range[0]
    for rows in iterate_rows(model, card, samples, size, by_length=by_length):
        count = count_rows(rows)
        order = np.minimum(np.arange(max(count, least)), count - 1)
        filled = {name: value[order] for name, value in rows.items()} if count < least else rows
        yield batch_from_rows(card, filled), count


def iterate_rows(
    model: Entry | None, card: ModelCard, samples: SampleSet, size: int, *, by_length: bool = False
) -> Iterator[Arrays]:
    if isinstance(samples, TensorSet):
        yield from samples.batches(size)
        return
    if isinstance(samples, TextSet):
        assert model is not None
        if samples.windows:
            rows = [part.tokens for file in samples.files for part in samples.windows[file.path]]
        else:
            texts = [samples.texts[file.path] for file in samples.files]
            rows = encode(texts, model.file(TOKENIZER), compute_max_tokens(card))
        if by_length:
            rows.sort(key=lambda row: len(row.ids))
        yield from (
            pad_tokens(card, rows[start : start + size]) for start in range(0, len(rows), size)
        )
        return
    assert isinstance(samples, ImageSet)
    assert card.transform is not None
    for pixels in preprocess_batches(samples.paths, card.transform, size, threads=2):
        yield {card.inputs[0].name: pixels}


def find_label_indices(
    samples: SampleSet, card: ModelCard, classes: int
) -> NDArray[np.int64] | None:
    """Class indices of the samples; None without labels.

    A label is one of the card's names, or an index; otherwise the set's sorted folders are the classes, where nothing speaks
    against it (see `_are_classes_in_order`). Raises BadInputError for other labels.
    """
    names = [file.label for file in samples.files]
    if any(name is None for name in names):
        return None
    known = set(map(str, names))
    numbers = {name: number for name in known if (number := _read_number(name)) is not None}
    if known <= set(card.labels):
        index = index_labels(card, known)
    elif len(numbers) == len(known) and {*numbers.values()} <= {*range(classes)}:
        index = {name: int(number) for name, number in numbers.items()}
    elif not numbers and _are_classes_in_order(samples, card, classes):
        index = {label: position for position, label in enumerate(sorted(samples.labels))}
    else:
        odd = min(known - set(card.labels))
        if isinstance(samples, TextSet):
            own = f"its labels ({', '.join(card.labels[:12])}) or " if card.labels else ""
            way = f"use {own}class indices 0 to {classes - 1}"
        else:
            way = f"name the folders after its labels or class indices, or provide all {classes} folders in class order"
        raise BadInputError(f"label '{odd}' of {samples.name} is not a class of {card.name}: {way}")
    return np.array([index[str(name)] for name in names], np.int64)


def _read_number(label: str) -> float | None:
    """The number that a label is: 3 for `3` and `3.0`, 0.5 for `0.5`; None for a name."""
    return float(label) if re.fullmatch(r"[+-]?\d+(\.\d+)?", label) else None


def _are_classes_in_order(samples: SampleSet, card: ModelCard, classes: int) -> bool:
    """Whether the sorted folders of images stand for the classes, as ImageNet's identifiers do.

    Their number is that of the classes, and none is called as a label of the card, but for its case and its spaces: then the
    card's order holds, and the alphabet's is another.
    """
    if isinstance(samples, TextSet) or len(samples.labels) != classes:
        return False
    own = {_fold(label) for label in card.labels}
    return own.isdisjoint(map(_fold, samples.labels))


def _fold(label: str) -> str:
    return re.sub(r"[\W_]+", "", label).casefold()


def index_labels(card: ModelCard, used: Iterable[str]) -> dict[str, int]:
    """The class of each of the card's labels.

    Raises BadInputError if one that is `used` names several classes, as some do in ImageNet's list (crane: a bird, a machine).
    """
    places = group_pairs((label, place) for place, label in enumerate(card.labels))
    if several := sorted(label for label in used if len(places.get(label, ())) > 1):
        listed = " and ".join(map(str, places[several[0]]))
        raise BadInputError(
            f"label '{several[0]}' of {card.name} names the classes {listed}\n"
            "use class indices as the labels of the data, or different labels in the model card"
        )
    return {label: indices[0] for label, indices in places.items()}


def drop_unknown_labels(samples: AnySet, card: ModelCard, listener: Listener) -> AnySet:
    """`samples`, without labels that are not classes of the model: enough for calibration."""
    classes = card.outputs[0].classes if card.outputs else None
    try:
        if classes is not None:
            find_label_indices(samples, card, classes)
    except BadInputError as error:
        listener.warn(f"{str(error).partition(':')[0]}; ignoring folders and labels")
        return replace(
            samples, files=tuple(replace(file, label=None) for file in samples.files), labels=()
        )
    return samples


def hash_data(source: Path) -> str:
    """Hash of the files that `source` holds: everything below a folder; a file, and the samples and annotations that it names.

    Names are relative to `source`, so that moved data keep their hash. Raises BadInputError for unreadable data.
    """
    with read_as_user_file(source, "data"):
        base, files = source.parent, list[Path]()
        if not source.is_dir():
            require_regular_file(source)
        if source.is_dir():
            base, files = source, list(walk_files(source))
        elif is_coco(source):
            root, names = list_coco_images(source)
            files = [root / name for name in names]
        elif source.suffix.lower() == ".json" and not holds_tensors(source):
            value = json.loads(read_user_bytes(source, MAX_LIST_BYTES))
            if isinstance(value, dict) and {"root", "files"} <= value.keys():
                root = source.parent / value["root"]
                files = [root]  # texts
                if root.is_dir():  # masks and boxes are next to the images
                    files = [root / record["path"] for record in value["files"]]
                    files += (
                        path
                        for path in walk_files(root)
                        if {*path.relative_to(root).parts} & {*ANNOTATIONS}
                    )
        named = {os.path.relpath(path, base): path for path in files if path.is_file()}
        hashes = {os.fsencode(name).hex(): hash_file(path) for name, path in named.items()}
        return hash_value([hash_file(source) if source.is_file() else None, hashes])
