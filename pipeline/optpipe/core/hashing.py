"""SHA-256 of files and of plain values."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def hash_file(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_text(text: str) -> str:
    """The SHA-256 of a text in UTF-8, as of a file that holds it."""
    return hashlib.sha256(text.encode()).hexdigest()


def hash_value(value: Any) -> str:
    """The SHA-256 of a JSON-like value, independent of key order.

    Raises `TypeError` for anything JSON cannot hold: a key that silently fell back to `repr` would not be stable.
    """
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hash_text(canonical)


def hash_arrays(tensors: Mapping[str, Any]) -> str:
    """The SHA-256 of named arrays (anything NumPy can view): names, types, shapes and bytes, in name order."""
    import numpy as np

    digest = hashlib.sha256()
    for name in sorted(tensors):
        array = np.ascontiguousarray(tensors[name])
        digest.update(f"{name}\0{array.dtype.str}\0{array.shape}\0".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
