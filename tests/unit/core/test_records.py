import math
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import pytest

from optpipe.core.errors import BadInputError
from optpipe.core.records import json_from_record, plain_from_record, read_record, record_from_json, record_from_plain


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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            '{"kind": "bench", "files": [{"path": "a", "bytes": "1"}]}',
            r"run.json: expected `int`, got `str`.*files.*bytes",
        ),
        ('{"kind": "sing"}', r"invalid enum value 'sing'.*kind"),
        ("{}", "missing required field `kind`"),
        ('{"kind": "bench", "value": NaN}', "malformed"),
        ("[" * 100_000, "run.json: "),
        ("\xff", "run.json: "),
    ],
)
def test_what_is_wrong_is_named_with_its_place(text: str, said: str) -> None:
    with pytest.raises(BadInputError, match=said):
        record_from_json(text.encode("latin-1"), Run, "run.json")


def test_a_missing_file_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"cannot read .*gone\.json"):
        read_record(tmp_path / "gone.json", Run)
