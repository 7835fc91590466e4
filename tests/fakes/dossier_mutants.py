"""Seeded damage to whole dossiers: bytes, JSON, Parquet cells and types, policies, and files, with every hash put right."""

import io
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import polars as pl
from tests.fakes.dossiers import edit, tell_hash
from tests.fakes.mutations import mutate_bytes, mutate_json, mutate_toml

from optpipe.core.files import hash_file
from optpipe.workspace.files import delete_tree
from optpipe.workspace.seal import seal_folder

ODD_VALUES = (0, -1, 1, 255, 10**9, 2**31, 2**62, -(2**63), 2**63 - 1)
ODD_FLOATS = (0.0, -0.5, 1.5, 1e308, -1e308, float("nan"), float("inf"))
KINDS = (
    pl.Int8, pl.Int32, pl.Int64, pl.UInt8, pl.UInt32, pl.UInt64, pl.Float32, pl.Float64, pl.Boolean, pl.String,
    pl.Int128, pl.Date, pl.List(pl.Int64), pl.Binary,
)  # fmt: skip


def mutate_table(content: bytes, rng: random.Random) -> bytes:
    """Changes cells, types, columns or rows of a Parquet file; now and then bytes instead."""
    if rng.random() < 0.15:
        return mutate_bytes(content, rng)
    try:
        return _change_table(content, rng)
    except pl.exceptions.PolarsError:  # no such cast
        return mutate_bytes(content, rng)


def _change_table(content: bytes, rng: random.Random) -> bytes:
    frame = pl.read_parquet(io.BytesIO(content))
    column = frame[rng.choice(frame.columns)]
    rows = len(frame)
    match rng.randrange(8):
        case 0:
            frame = frame.with_columns(column.cast(rng.choice(KINDS), strict=False))
        case 1:
            frame = frame.drop(column.name)
        case 2:
            name = rng.choice(("more", f"{column.name} ", "\x1b[31m", "phase"))
            frame = frame.rename({column.name: name}, strict=False)
        case 3:
            frame = frame.with_columns(column.alias("more"))
        case 4:
            frame = frame.head(rng.choice((0, 1, rows // 2, rows - 1)))
        case 5:
            frame = pl.concat([frame, frame.head(rng.choice((1, rows)))])
        case _:
            frame = frame.with_columns(_mutate_cells(column, rng))
    buffer = io.BytesIO()
    frame.write_parquet(buffer)
    return buffer.getvalue()


def _mutate_cells(column: pl.Series, rng: random.Random) -> pl.Series:
    values = column.to_list()
    for _ in range(rng.choice((1, 1, 3))):
        if not values:
            break
        at = rng.randrange(len(values))
        if column.dtype.is_float():
            odd: object = rng.choice(ODD_FLOATS)
        elif column.dtype == pl.String:
            odd = rng.choice(("", "x", "a\nb", "../x", values[rng.randrange(len(values))]))
        elif isinstance(column.dtype, pl.List):
            odd = rng.choice(([], None, values[at][::-1] if values[at] else []))
        else:
            odd = rng.choice((*ODD_VALUES, values[rng.randrange(len(values))]))
        values[at] = None if rng.random() < 0.1 else odd
    return pl.Series(column.name, values, column.dtype, strict=False)


def _damage_file(path: Path, rng: random.Random) -> None:
    """A deleted, added, renamed or empty file; a pipe, a link or a folder in its place."""
    match rng.randrange(8):
        case 0:
            path.unlink()
        case 1:
            (path.parent / rng.choice(("more.txt", "x.json", "\u202e.md", "A.parquet"))).write_text(
                "{}"
            )
        case 2:
            path.rename(path.with_name(rng.choice(("moved", f"{path.name} ", path.name.upper()))))
        case 3:
            path.write_bytes(b"")
        case 4:
            path.unlink()
            os.mkfifo(path)
        case 5:
            path.unlink()
            path.symlink_to(rng.choice(("/dev/zero", "nowhere", "/etc/hostname")))
        case 6:
            path.unlink()
            path.mkdir()
        case _:
            content = path.read_bytes()
            path.write_bytes(content + content)


class Mutants:
    """Dossiers under a folder, each damaged and restored in place."""

    def __init__(self, sources: dict[str, Path], folder: Path):
        self.sources = sources
        self.honest: dict[str, object] = {}
        """What the verifiers say of the undamaged dossier."""
        self.copies = {
            name: Path(shutil.copytree(source, folder / f"copy-{number}"))
            for number, (name, source) in enumerate(sources.items())
        }

    def make(self, name: str, rng: random.Random) -> tuple[Path, str]:
        """The damaged copy of the dossier `name`, and what was damaged."""
        folder, source = self.copies[name], self.sources[name]
        files = sorted(
            path.relative_to(source).as_posix()
            for path in source.rglob("*")
            if path.is_file() and path.suffix in (".json", ".parquet", ".toml")
        )
        tables = [each for each in files if each.endswith(".parquet")]
        chosen = rng.choice(tables if rng.random() < 0.4 else files)
        path, kind = folder / chosen, "file"
        if rng.random() < 0.15:
            _damage_file(path, rng)
        else:
            change, kind = self._choose(chosen, rng)
            path.write_bytes(change(path.read_bytes(), rng))
        self._put_right(folder, path)
        return folder, f"{name}: {kind} of {chosen}"

    @staticmethod
    def _choose(name: str, rng: random.Random) -> tuple[Callable[..., bytes], str]:
        if name.endswith(".parquet"):
            return mutate_table, "table"
        if name.endswith(".json"):
            return lambda content, rng: mutate_json(content.decode(), rng), "json"
        if rng.random() < 0.8:
            return lambda content, rng: mutate_toml(content.decode(), rng), "toml"
        return mutate_bytes, "bytes"

    @staticmethod
    def _put_right(folder: Path, path: Path) -> None:
        run = next((each for each in path.parents if each.parent.name == "runs"), None)
        if run is not None and path.name != "manifest.json":
            files = {
                each.relative_to(run).as_posix(): {
                    "sha256": hash_file(each),
                    "size_bytes": each.stat().st_size,
                }
                for each in sorted(run.rglob("*"))
                if each.is_file() and not each.is_symlink() and each.name != "manifest.json"
            }
            edit(run / "manifest.json", "files", value=files)
        if run is None and path.suffix == ".parquet" and path.is_file() and not path.is_symlink():
            tell_hash(path)
        seal_folder(folder)

    def restore(self, name: str) -> None:
        folder, source = self.copies[name], self.sources[name]
        wanted = {each.relative_to(source) for each in source.rglob("*")}
        for path in sorted(folder.rglob("*"), reverse=True):
            known = path.relative_to(folder)
            kept = known in wanted and not path.is_symlink()
            if not (kept and path.is_dir() == (source / known).is_dir()):
                delete_tree(path)
        for known in wanted:
            mine, theirs = folder / known, source / known
            same = mine.exists() and (
                mine.is_dir() or (mine.is_file() and mine.read_bytes() == theirs.read_bytes())
            )
            if not same and theirs.is_file():
                mine.unlink(missing_ok=True)
                shutil.copy(theirs, mine)
