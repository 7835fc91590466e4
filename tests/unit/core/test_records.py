"""Records and files come back as they were written, and nothing outside of a folder is read."""

import math
import os
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import pytest

from optpipe.core.errors import BadInputError
from optpipe.core.files import Files
from optpipe.core.records import (
    json_from_record,
    plain_from_record,
    read_record,
    record_from_json,
    record_from_plain,
)


class Kind(StrEnum):
    BENCH = "bench"


@dataclass(frozen=True, slots=True)
class File:
    path: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Run:
    kind: Kind
    files: tuple[File, ...] = ()
    value: float | None = None
    details: dict[str, int] = field(default_factory=dict)


def test_a_record_comes_back_as_it_was_written(tmp_path: Path) -> None:
    run = Run(Kind.BENCH, (File("a", 1),), 0.1, {"x": 2})
    (tmp_path / "run.json").write_bytes(json_from_record(run))
    assert read_record(tmp_path / "run.json", Run) == run
    assert record_from_plain(plain_from_record(run), Run, "here") == run


def test_a_number_that_is_not_finite_is_null() -> None:
    assert plain_from_record(Run(Kind.BENCH, value=math.nan))["value"] is None


def test_a_file_name_that_is_not_utf8_is_written_as_python_shows_it() -> None:
    run = Run(Kind.BENCH, (File("a/\udcff.png", 1),), math.nan, {"\udcff": 2})
    assert plain_from_record(run) == {
        "kind": "bench",
        "files": [{"path": "a/\\udcff.png", "bytes": 1}],
        "value": None,
        "details": {"\\udcff": 2},
    }
    assert record_from_json(json_from_record(run), Run, "here").files[0].path == "a/\\udcff.png"


@pytest.mark.parametrize(("text", "said"), [
    ('{"kind": "bench", "files": [{"path": "a", "bytes": "1"}]}', r"run.json: expected `int`, got `str`.*files.*bytes"),
    ('{"kind": "sing"}', r"invalid enum value 'sing'.*kind"),
    ("{}", "missing required field `kind`"),
    ('{"kind": "bench", "value": NaN}', "malformed"),
    ("[" * 100_000, "run.json: "),
    ("\xff", "run.json: "),
])  # fmt: skip
def test_what_is_wrong_is_named_with_its_place(text: str, said: str) -> None:
    with pytest.raises(BadInputError, match=said):
        record_from_json(text.encode("latin-1"), Run, "run.json")


def test_a_missing_file_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"cannot read .*gone\.json"):
        read_record(tmp_path / "gone.json", Run)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "secret").write_text("outside")
    inner = tmp_path / "folder" / "runs"
    inner.mkdir(parents=True)
    (inner / "a").write_text("inside")
    (inner / "link").symlink_to(tmp_path / "secret")
    (inner.parent / "out").symlink_to(tmp_path)
    os.mkfifo(inner / "pipe")
    return inner.parent


@pytest.mark.parametrize(
    "name",
    [
        "../secret",
        "runs/../../secret",
        "runs/link",
        "out/secret",
        "runs/pipe",
        "runs",
        "",
        "/etc/passwd",
        "runs/none",
    ],
)
def test_nothing_outside_the_folder_is_read(folder, name):
    for files in (Files(folder), Files(folder, kept={})):
        with pytest.raises(BadInputError):
            files.read(name)
    with pytest.raises(BadInputError):
        Files(folder).hash(name)


def test_a_kept_file_is_opened_once(folder):
    files = Files(folder, kept={})
    inner = files.below("runs")
    assert (files.read("runs/a"), inner.has("a"), inner.has("link")) == (b"inside", True, False)
    (folder / "runs" / "a").write_text("changed")
    assert inner.read("a") == b"inside"
    assert inner.hash("a") != Files(folder).hash("runs/a")
