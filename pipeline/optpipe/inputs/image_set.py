"""Image sets with provenance: which files, their hashes, how they were drawn. The format is in `calibration/README.md`."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from optpipe.core.hashing import file_sha256
from optpipe.core.transform import Decode, Transform
from optpipe.errors import BadInputError
from optpipe.inputs.images import Unreadable, decoded, find_images, unreadable_text

FORMAT = "optpipe.image-set/1"
MAX_UNREADABLE_SHARE = 0.05
FEW = 500


@dataclass(frozen=True, slots=True)
class SetFile:
    """One picture; `path` is relative to the set's root."""

    path: str
    sha256: str
    label: str | None = None


@dataclass(frozen=True, slots=True)
class ImageSet:
    """Files below `root`, drawn with `seed`; `model` and `transform_sha256` say what it was drawn for, if anything."""

    name: str
    root: Path
    seed: int
    files: tuple[SetFile, ...]
    labels: tuple[str, ...] = ()
    model: str | None = None
    transform_sha256: str | None = None

    @property
    def sha256(self) -> str:
        """One hash that names the whole set: over every file's hash and path, in order."""
        listing = "".join(f"{each.sha256}  {each.path}\n" for each in self.files)
        return hashlib.sha256(listing.encode()).hexdigest()

    @property
    def paths(self) -> tuple[Path, ...]:
        """Where the files lie."""
        return tuple(self.root / each.path for each in self.files)

    def to_dict(self, beside: Path) -> dict[str, Any]:
        """The manifest, as written into the folder `beside`."""
        root = self.root.resolve()
        inside = root.is_relative_to(beside.resolve())
        head = {
            "format": FORMAT,
            "name": self.name,
            "root": root.relative_to(beside.resolve()).as_posix() if inside else str(root),
            "seed": self.seed,
            "count": len(self.files),
            "labels": list(self.labels),
            "model": self.model,
            "transform_sha256": self.transform_sha256,
            "sha256": self.sha256,
        }
        files = [{"path": each.path, "label": each.label, "sha256": each.sha256} for each in self.files]
        return {**{key: value for key, value in head.items() if value not in (None, [])}, "files": files}


def image_set_from_manifest(path: Path) -> ImageSet:
    """Reads a manifest. Raises BadInputError where it is no image set or its own hash does not hold."""
    try:
        value: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        files = tuple(SetFile(each["path"], each["sha256"], each.get("label")) for each in value["files"])
        found = ImageSet(
            name=str(value["name"]),
            root=path.parent / value["root"],
            seed=int(value["seed"]),
            files=files,
            labels=tuple(value.get("labels", ())),
            model=value.get("model"),
            transform_sha256=value.get("transform_sha256"),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        message = f"{path} is not a readable image-set manifest ({type(error).__name__}); calibration/README.md has the format"
        raise BadInputError(message) from error
    if value.get("format") != FORMAT or value.get("sha256") != found.sha256:
        message = f"{path}: its list of files was changed, or it is not in the format {FORMAT}; draw it again"
        raise BadInputError(message)
    return found


def checked(found: ImageSet) -> ImageSet:
    """`found`, after every file was held against its hash. Raises BadInputError that names the first that differs."""
    for each, path in zip(found.files, found.paths, strict=True):
        if not path.is_file() or file_sha256(path) != each.sha256:
            problem = "has changed" if path.is_file() else "is missing"
            message = f"image set {found.name}: {path} {problem}; draw the set again"
            raise BadInputError(message)
    return found


def image_set(source: Path, count: int | None = None, seed: int = 0) -> tuple[ImageSet, tuple[Unreadable, ...]]:
    """The set that `source` names: a manifest, or `count` pictures drawn out of a folder; and what was unreadable.

    A folder whose pictures all lie in class folders is labelled by them, and the sample has the classes in their own
    proportions. Raises BadInputError for an empty folder, or too many unreadable files.
    """
    if source.is_file():
        found = image_set_from_manifest(source)
        if count is None or count >= len(found.files):
            return checked(found), ()
        return checked(image_subset(found, count, seed)), ()
    paths = find_images(source).paths
    labels = _folder_labels(source, paths)
    wanted = len(paths) if count is None else min(count, len(paths))
    order = _stratified(labels, wanted, seed)
    kept, bad = _readable([paths[index] for index in order], wanted, source)
    by_path = dict(zip(paths, labels, strict=True))
    files = tuple(
        SetFile(path.relative_to(source).as_posix(), file_sha256(path), by_path[path]) for path in sorted(kept)
    )
    names = tuple(sorted({label for label in labels if label is not None}))
    return ImageSet(source.name, source, seed, files, names), bad


def image_subset(whole: ImageSet, count: int, seed: int = 0) -> ImageSet:
    """A stratified sample of `count` out of a set, in the set's order; the set itself where it is no larger."""
    if count >= len(whole.files):
        return whole
    chosen = _stratified([each.label for each in whole.files], count, seed)[:count]
    return replace(
        whole, name=f"{whole.name}/{count}", seed=seed, files=tuple(whole.files[index] for index in sorted(chosen))
    )


def _folder_labels(root: Path, paths: Sequence[Path]) -> list[str | None]:
    """The first folder below `root` of every picture; none at all unless there are at least two and no loose picture."""
    parts = [path.relative_to(root).parts for path in paths]
    names = {each[0] for each in parts if len(each) > 1}
    if len(names) < 2 or any(len(each) == 1 for each in parts):
        return [None] * len(paths)
    return [each[0] for each in parts]


def _stratified(labels: Sequence[str | None], count: int, seed: int) -> list[int]:
    """All indices in an order whose first `count`, and every other prefix, hold the labels in nearly their own shares."""
    rng = np.random.default_rng(seed)
    groups: dict[str | None, list[int]] = {}
    for index, label in enumerate(labels):
        groups.setdefault(label, []).append(index)
    ranked: list[tuple[float, float, int]] = []
    for _, members in sorted(groups.items(), key=lambda item: str(item[0])):
        shuffled = rng.permutation(members)
        ties = rng.random(len(shuffled))
        ranked += [
            ((rank + 0.5) / len(shuffled), float(tie), int(index))
            for rank, (index, tie) in enumerate(zip(shuffled, ties, strict=True))
        ]
    return [index for _, _, index in sorted(ranked)] if count < len(labels) else list(range(len(labels)))


def _readable(paths: Iterable[Path], wanted: int, source: Path) -> tuple[list[Path], tuple[Unreadable, ...]]:
    """The first `wanted` pictures that decode; an unreadable one is replaced by the next in line."""
    kept: list[Path] = []
    bad: list[Unreadable] = []
    for path in paths:
        if len(kept) == wanted:
            break
        try:
            decoded(path, Decode())
            kept.append(path)
        except BadInputError as error:
            bad.append(Unreadable(path, str(error).rpartition(": ")[2]))
    if not kept or len(bad) > max(1, MAX_UNREADABLE_SHARE * (len(kept) + len(bad))):
        message = f"{source}: {len(bad)} of {len(kept) + len(bad)} images cannot be read, 5 % are allowed\n{unreadable_text(bad, 3)}"
        raise BadInputError(message)
    return kept, tuple(bad)


def refuse_overlap(calibration: ImageSet, validation: ImageSet) -> None:
    """Raises BadInputError where a picture is in both sets, by content: accuracy on it would prove nothing."""
    judged = {each.sha256 for each in validation.files}
    shared = [each.path for each in calibration.files if each.sha256 in judged]
    if shared:
        message = (
            f"{len(shared)} of {len(calibration.files)} calibration images are also in the validation set"
            f" {validation.name} (such as {shared[0]})\ngive --images a folder without them"
        )
        raise BadInputError(message)


def refuse_other_model(found: ImageSet, model: str, transform: Transform) -> None:
    """Raises BadInputError where the set was drawn for another model or preprocessing."""
    if found.model is not None and found.model != model:
        message = f"image set {found.name} was drawn for model {found.model}, not for {model}; give --images its folder"
        raise BadInputError(message)
    if found.transform_sha256 is not None and found.transform_sha256 != transform.hash:
        message = f"image set {found.name} was drawn for another preprocessing than {model}'s; give --images its folder"
        raise BadInputError(message)
