"""Common parts of image and text sets: hashes, labels, a seeded draw, and a manifest as in `calibration/README.md`."""

import csv
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import numpy as np

from optpipe.core.errors import BadInputError, escape
from optpipe.core.files import MAX_LIST_BYTES, hash_text, read_user_text
from optpipe.core.records import group_pairs

MAX_UNREADABLE_SHARE = 0.05
FEW_SAMPLES = 500
Unusable = tuple[Path, str]
"""An image that cannot be decoded, or a line without text, and why."""


@dataclass(frozen=True, slots=True)
class SetFile:
    """`path` is an image's path relative to the set's root, or a text's line number."""

    path: str
    sha256: str
    label: str | None = None
    group: str | None = None
    """The source that it shares with others: a clip, a patient, a document; None if the set names no sources."""


def read_group(value: object) -> str | None:
    """The name of a sample's source. Raises TypeError for anything but a text or an integer."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise TypeError(f"its group is neither a string nor an integer: {json.dumps(value)[:40]}")
    return str(value)


GROUPS_FILE = "groups.csv"
"""In a folder of images: a line `path,group` for each image."""


def read_groups_file(folder: Path, paths: Sequence[str]) -> list[str | None]:
    """The source of each of `paths`, relative to `folder`; all None without a file. Raises BadInputError if it lacks one."""
    file = folder / GROUPS_FILE
    if not file.is_file():
        return [None] * len(paths)
    try:
        rows = list(
            csv.reader(read_user_text(file, MAX_LIST_BYTES).removeprefix("\ufeff").splitlines())
        )
    except (OSError, ValueError, csv.Error) as error:
        raise BadInputError(f"{file} cannot be read: {error}") from error
    if bad := [
        number for number, row in enumerate(rows, 1) if row and (len(row) != 2 or not row[1])
    ]:
        raise BadInputError(f"{file}, line {bad[0]}: give `path,group` for each image")
    known: dict[str, str] = {}
    for number, row in enumerate(rows, 1):
        if row and known.setdefault(row[0], row[1]) != row[1]:
            raise BadInputError(f"{file}, line {number}: {row[0]} has two groups; give it one")
    if missing := [path for path in paths if path not in known]:
        problem = f"{file} names no group for {len(missing)} of {len(paths)} images"
        raise BadInputError(f"{problem} (such as {missing[0]})")
    return [known[path] for path in paths]


def format_unreadable(unreadable: Iterable[Unusable], shown: int = 5) -> str:
    every = tuple(unreadable)
    named = ", ".join(f"{path.name} ({reason})" for path, reason in every[:shown])
    return named + (f" and {len(every) - shown} more" if len(every) > shown else "")


@dataclass(frozen=True)
class SampleSet:
    """Samples in `root`, drawn with `seed`."""

    format: ClassVar[str]
    kind: ClassVar[str]

    name: str
    root: Path
    seed: int
    files: tuple[SetFile, ...]
    labels: tuple[str, ...] = ()
    truncate: bool = False
    """Whether samples longer than the model's input are cut; otherwise they are refused."""
    pairs: Mapping[str, str] = field(default_factory=dict)
    """Common name of samples that are drawn together, by `files[].path`."""

    def __post_init__(self) -> None:
        """Raises BadInputError for a sample that occurs twice: it would count twice, and no dossier may have it."""
        counts = Counter(file.path for file in self.files)
        if len(counts) < len(self.files):
            repeated = counts.most_common(1)[0][0]
            problem = f"{escape(self.name)}: the sample {escape(repeated)} occurs twice"
            raise BadInputError(f"{problem}; name each sample once")

    @property
    def rows(self) -> tuple[SetFile, ...]:
        """What a model reads, in order: the samples, or several parts of each."""
        return self.files

    @property
    def sha256(self) -> str:
        """Over every sample's hash and path, in order."""
        return hash_text("".join(f"{file.sha256}  {file.path}\n" for file in self.files))

    def to_dict(self, beside: Path) -> dict[str, Any]:
        root = self.root.resolve()
        inside = root.is_relative_to(beside.resolve())
        head = {
            "format": self.format,
            "name": self.name,
            "root": root.relative_to(beside.resolve()).as_posix() if inside else str(root),
            "seed": self.seed,
            "count": len(self.files),
            "labels": list(self.labels),
            "truncate": self.truncate or None,
            "sha256": self.sha256,
        }
        files = [
            {"path": file.path, "label": file.label, "sha256": file.sha256}
            | ({} if file.group is None else {"group": file.group})
            for file in self.files
        ]
        return {
            **{key: value for key, value in head.items() if value not in (None, [])},
            "files": files,
        }

    @classmethod
    def from_manifest(cls, path: Path) -> Self:
        """Raises BadInputError if the manifest is not a set of this kind, or its own hash does not match."""
        try:
            value: Mapping[str, Any] = json.loads(read_user_text(path, MAX_LIST_BYTES))
            samples = cls(
                name=str(value["name"]),
                root=path.parent / value["root"],
                seed=int(value["seed"]),
                files=tuple(
                    SetFile(
                        record["path"], record["sha256"], record.get("label"), record.get("group")
                    )
                    for record in value["files"]
                ),
                labels=tuple(value.get("labels", ())),
                truncate=value.get("truncate") is True,
            )
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            RecursionError,
        ) as error:
            what = cls.format.partition(".")[2].partition("/")[0]
            others = (
                "a folder of images, a COCO file, or a manifest"
                if cls.kind == "images"
                else "a manifest"
            )
            problem = f"{path} is not a readable {what} manifest ({type(error).__name__})"
            raise BadInputError(
                f"{problem}\ngive {others} (as in calibration/README.md)"
            ) from error
        if value.get("format") != cls.format or value.get("sha256") != samples.sha256:
            problem = f"{path}: its list of files was changed, or its format is not {cls.format}"
            raise BadInputError(f"{problem}; draw it again")
        return samples


AnySet = TypeVar("AnySet", bound=SampleSet)


def draw_subset(whole: AnySet, count: int, seed: int = 0) -> AnySet:
    """A stratified sample of `count`, in the set's order; the set itself if it is not larger."""
    if count >= len(whole.files):
        return whole
    pairs = [whole.pairs.get(file.path) for file in whole.files]
    chosen = draw_indices([file.label for file in whole.files], pairs, count, seed)
    return replace(
        whole,
        name=f"{whole.name}/{count}",
        seed=seed,
        files=tuple(whole.files[index] for index in chosen),
    )


def draw_indices(
    labels: Sequence[str | None], pairs: Sequence[str | None], count: int, seed: int
) -> list[int]:
    """A stratified sample of `count` sorted indices, or one more, since pairs are drawn together."""
    members = list(
        group_pairs((at if pair is None else pair, at) for at, pair in enumerate(pairs)).values()
    )
    few = min(count, len(members) - 1) if count < len(labels) else len(members)
    chosen: list[int] = []
    for place in stratify_indices([labels[group[0]] for group in members], few, seed):
        if len(chosen) < count:
            chosen += members[place]
    return sorted(chosen)


def stratify_indices(labels: Sequence[str | None], count: int, seed: int) -> list[int]:
    """All indices, in an order in which every prefix has nearly the labels' shares."""
    rng = np.random.default_rng(seed)
    groups = group_pairs((label, index) for index, label in enumerate(labels))
    ranked: list[tuple[float, float, int]] = []
    for _, members in sorted(groups.items(), key=lambda item: str(item[0])):
        shuffled = rng.permutation(members)
        ranks, ties = (np.arange(len(shuffled)) + 0.5) / len(shuffled), rng.random(len(shuffled))
        ranked += zip(ranks.tolist(), ties.tolist(), shuffled.tolist(), strict=True)
    return (
        [index for _, _, index in sorted(ranked)]
        if count < len(labels)
        else list(range(len(labels)))
    )


def refuse_overlap(calibration: SampleSet, validation: SampleSet) -> None:
    """Raises BadInputError if a sample is in both sets, by content: accuracy on it would prove nothing."""
    judged = {file.sha256 for file in validation.files}
    shared = [file.path for file in calibration.files if file.sha256 in judged]
    if shared:
        repeated = f"{len(shared)} of {len(calibration.files)} calibration {calibration.kind}"
        problem = (
            f"{repeated} are also in the validation set {validation.name} (such as {shared[0]})"
        )
        raise BadInputError(f"{problem}\nuse a calibration set without them")
