import json
import os

import polars as pl
import pytest

from optpipe.core.errors import BadInputError, StageError
from optpipe.core.records import plain_from_record
from optpipe.workspace import runs
from optpipe.workspace.entry import MANIFEST, load_run
from optpipe.workspace.files import write_bytes, write_json, write_parquet


def finished(workspace, kind="bench"):
    run = runs.begin_run(workspace, kind)
    (run.path / "samples").mkdir()
    (run.path / "samples" / "m0.bin").write_bytes(b"abc")
    return runs.finish_run(run, command="optpipe bench 'a b'", parents=["onnxruntime-0123"], model="digits")


def test_a_run_exists_only_once_its_manifest_is_written(tmp_path):
    begun = runs.begin_run(tmp_path, "bench")
    assert runs.list_runs(tmp_path) == ()
    with pytest.raises(BadInputError, match="is incomplete"):
        load_run(begun.path)
    with pytest.raises(BadInputError, match="does not exist"):
        load_run(tmp_path / "nothing")
    runs.finish_run(begun, command="optpipe bench")
    assert [run.name for run in runs.list_runs(tmp_path)] == [begun.name]


def test_runs_are_listed_in_the_order_in_which_they_began(tmp_path):
    made = [finished(tmp_path, kind).name for kind in ("bench", "evaluate") * 8]
    assert [run.name for run in runs.list_runs(tmp_path)] == made
    assert [run.name for run in runs.list_runs(tmp_path, "evaluate")] == made[1::2]


def test_a_run_that_is_worth_nothing_in_part_leaves_nothing(tmp_path):
    def cut_off():
        with runs.open_run(tmp_path, "evaluate") as run:
            (run.path / "half").write_text("x")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cut_off()
    assert not list((tmp_path / "runs").iterdir())
    with runs.open_run(tmp_path, "evaluate") as run:
        runs.finish_run(run, command="optpipe evaluate")
    assert [one.name for one in runs.list_runs(tmp_path)] == [run.name]


def test_what_cannot_be_written_whole_leaves_nothing(tmp_path, monkeypatch):
    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StageError, match="No space left on device; free disk space"):
        write_parquet(tmp_path / "rows.parquet", pl.DataFrame({"a": [1]}))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_the_place_of_a_file_is_not_a_full_disk(tmp_path):
    (tmp_path / "rows").mkdir()
    with pytest.raises(StageError, match="rows: Is a directory; choose another location"):
        write_bytes(tmp_path / "rows", b"x")
    assert [each.name for each in tmp_path.iterdir()] == ["rows"]


def test_every_change_is_found(tmp_path):
    run = finished(tmp_path)
    assert run.find_problems() == []
    (run.path / "samples" / "m0.bin").write_bytes(b"abd")
    (run.path / "extra").write_text("x")
    assert run.find_problems() == ["extra: not in the manifest", "samples/m0.bin: changed"]
    (run.path / "samples" / "m0.bin").unlink()
    assert "samples/m0.bin: missing" in run.find_problems()


def test_another_schema_version_is_refused_by_number(tmp_path):
    run = finished(tmp_path)
    manifest = plain_from_record(run.manifest) | {"schema_version": 99}
    (run.path / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(BadInputError, match="version 99"):
        load_run(run.path)


@pytest.mark.parametrize("missing", ["id", "files", "parents", "environment", "info"])
def test_a_manifest_that_lacks_something_is_damaged_and_says_how_to_remove_it(tmp_path, missing):
    run = finished(tmp_path)
    manifest = plain_from_record(run.manifest)
    del manifest[missing]
    (run.path / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(BadInputError, match=f"optpipe store rm {run.name}"):
        runs.list_runs(tmp_path)


def test_nan_never_reaches_a_file(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "x.json", {"a": float("nan")})
