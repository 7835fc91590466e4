"""What decides results that are kept: the content of data that a user names, wherever they lie."""

import json
import os
from collections.abc import Iterable
from pathlib import Path

from optpipe.core.errors import read_as_user_file
from optpipe.core.hashing import hash_file, hash_value
from optpipe.models.inputs.boxes import is_coco, list_coco_images
from optpipe.models.inputs.images import ANNOTATIONS, walk_files
from optpipe.models.inputs.tensor_set import holds_tensors


def hash_data(source: Path) -> str:
    """The hash of the files that `source` holds: all below a folder; a file, and the samples and annotations that it names.

    Names count from `source`, so that data which were moved are the same. Raises BadInputError for what cannot be read.
    """
    with read_as_user_file(source, "data"):
        if source.is_dir():
            base, found = source, list(walk_files(source))
        else:
            base, found = source.parent, list(_list_named_files(source))
        named = {os.path.relpath(path, base): path for path in found if path.is_file()}
        hashes = {os.fsencode(name).hex(): hash_file(path) for name, path in named.items()}
        return hash_value([hash_file(source) if source.is_file() else None, hashes])


def _list_named_files(source: Path) -> Iterable[Path]:
    """What the manifest or COCO file `source` names, and masks and boxes beside the images."""
    if source.suffix.lower() != ".json" or holds_tensors(source):
        return ()
    if is_coco(source):
        root, names = list_coco_images(source)
        return [root / name for name in names]
    value = json.loads(source.read_bytes())
    if not isinstance(value, dict) or not {"root", "files"} <= value.keys():
        return ()
    root = source.parent / value["root"]
    if not root.is_dir():  # of texts
        return (root,)
    beside = (path for path in walk_files(root) if {*path.relative_to(root).parts} & {*ANNOTATIONS})
    return [*(root / each["path"] for each in value["files"]), *beside]
