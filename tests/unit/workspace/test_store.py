"""Entries and runs: produced once, whole or not at all, damaged ones named."""

import errno
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.entries import Thing, artifact_info, put

from optpipe.core.entries import ArtifactInfo
from optpipe.core.errors import BadInputError, StageError
from optpipe.core.events import SilentListener
from optpipe.core.files import hash_value
from optpipe.core.records import plain_from_record
from optpipe.models.artifacts.housekeeping import collect_garbage, remove_stored
from optpipe.workspace import runs
from optpipe.workspace.entry import MANIFEST, load_run
from optpipe.workspace.files import write_bytes, write_json, write_parquet
from optpipe.workspace.store import Store

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


def write_payload(directory: Path) -> Thing:
    (directory / "payload").write_bytes(b"x" * 1000)
    return Thing()


def test_a_second_request_is_answered_from_the_store(tmp_path: Path) -> None:
    store, calls = Store(tmp_path), []

    def make(directory: Path) -> Thing:
        calls.append(directory)
        return write_payload(directory)

    first, first_cached = store.produce(Thing, {"a": 1}, make, listener=SilentListener())
    second, second_cached = store.produce(Thing, {"a": 1}, make, listener=SilentListener())
    assert (first_cached, second_cached, len(calls)) == (False, True, 1)
    assert first.path == second.path
    assert second.info == Thing(42)


def test_a_file_of_another_size_is_not_read(tmp_path: Path) -> None:
    """It would take hours."""
    store = Store(tmp_path)
    entry = put(store, Thing(), {"of": 1}, files={"model.onnx": b"1234"})
    os.truncate(entry.file("model.onnx"), 2**43)
    assert entry.find_damage() == "model.onnx: changed"
    assert store.get(Thing, {"of": 1}) is None


def test_what_a_build_found_last_is_the_newest(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first, second = (put(store, Thing(), {"a": each}) for each in (1, 2))
    for each in (first, second, first):
        put(store, Thing(), each.manifest.recipe)
        assert store.list_entries()[-1].id == each.id
    assert first.find_problems() == [], "the note of its last use is no damage"


def test_entries_are_listed_in_the_order_in_which_they_were_made(tmp_path: Path) -> None:
    store = Store(tmp_path)
    made = [put(store, Thing(), {"a": each}).id for each in range(30)]
    assert [each.id for each in store.list_entries()] == made


@given(first=json_values, second=json_values)
def test_recipes_share_an_entry_exactly_when_they_are_equal(first: object, second: object) -> None:
    same = json.dumps(first, sort_keys=True) == json.dumps(second, sort_keys=True)
    assert (hash_value(first) == hash_value(second)) == same
    assert hash_value({"a": 1, "b": [2]}) == hash_value({"b": [2], "a": 1}), "in whatever order"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (StageError("it broke"), "it broke"),
        (OSError(errno.ENOSPC, "No space left on device", "half"), "no space left"),
    ],
)
def test_a_maker_that_fails_is_named_and_leaves_nothing_behind(
    tmp_path: Path, error: Exception, said: str
) -> None:
    def make(directory: Path) -> Thing:
        (directory / "half").write_text("half")
        raise error  # a fake: no test machine has a disk to fill

    with pytest.raises(StageError, match=said):
        Store(tmp_path).produce(Thing, {}, make, listener=SilentListener())
    assert Store(tmp_path).list_entries() == []
    assert list((tmp_path / "tmp").iterdir()) == []


@given(position=st.integers(0, 999), value=st.integers(0, 255))
def test_every_changed_byte_is_found(
    tmp_path_factory: pytest.TempPathFactory, position: int, value: int
) -> None:
    store = Store(tmp_path_factory.mktemp("store"))
    entry, _ = store.produce(Thing, {}, write_payload, listener=SilentListener())
    content = bytearray(entry.file("payload").read_bytes())
    changed = content[position] != value
    content[position] = value
    entry.file("payload").write_bytes(content)
    assert (entry.find_damage() is not None) == changed
    if changed:
        with pytest.raises(StageError, match=r"payload: changed\nrebuild it with"):
            store.verify_entry(entry)


def test_a_changed_byte_is_found_although_size_and_time_are_put_right(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr("optpipe.workspace.store.SETTLED_NS", 0)
    store = Store(tmp_path)
    file = put(store, Thing(), {}, files={"payload": b"x" * 1000}).file("payload")
    assert store.get(Thing, {}) is not None
    assert list((tmp_path / "notes").glob("intact-*")), "from now on no byte is read"
    assert store.get(Thing, {}) is not None
    before = file.stat()
    file.write_bytes(b"y" + file.read_bytes()[1:])
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert store.get(Thing, {}) is None


def test_a_damaged_entry_is_made_again_and_said(tmp_path: Path) -> None:
    store, listener = Store(tmp_path), SilentListener()
    entry, _ = store.produce(Thing, {}, write_payload, listener=listener)
    entry.file("payload").write_bytes(b"short")
    again, cached = store.produce(Thing, {}, write_payload, listener=listener)
    assert not cached
    assert again.find_damage() is None
    assert listener.warnings == [f"store entry {entry.path.name} was damaged and is being rebuilt"]


def _produce(workspace: Path, calls: "multiprocessing.Queue[int]") -> None:
    def make(directory: Path) -> Thing:
        calls.put(os.getpid())
        time.sleep(0.2)
        return write_payload(directory)

    Store(workspace).produce(Thing, {}, make, listener=SilentListener())


def _produce_slowly(workspace: Path) -> None:
    def make(directory: Path) -> Thing:
        (directory / "half").write_text("half")
        time.sleep(30)
        return Thing()

    Store(workspace).produce(Thing, {}, make, listener=SilentListener())


def test_killed_at_any_moment_the_next_run_goes_on(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=_produce_slowly, args=(tmp_path,))
    process.start()
    while not list(tmp_path.glob("tmp/*/half")):
        time.sleep(0.01)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert Store(tmp_path).list_entries() == []
    entry, cached = Store(tmp_path).produce(Thing, {}, write_payload, listener=SilentListener())
    assert not cached
    assert sorted(path.name for path in entry.path.iterdir()) == [MANIFEST, "payload"]


@pytest.mark.slow
def test_two_builds_of_the_same_thing_take_turns(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    calls: multiprocessing.Queue[int] = fork.Queue()
    processes = [fork.Process(target=_produce, args=(tmp_path, calls)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert calls.get(timeout=5)
    assert calls.empty()


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"schema": 1, "files": []}', '{"schema": 1, "files": {}, "parents": []}', None],
)
def test_an_unreadable_manifest_is_named_with_its_remedy_and_made_again(
    tmp_path: Path, text: str | None
) -> None:
    store = Store(tmp_path)
    entry, _ = store.produce(Thing, {"a": 1}, write_payload, listener=SilentListener())
    other = put(store, Thing(), {"a": 2})
    if text is None:
        (entry.path / MANIFEST).unlink()
    else:
        (entry.path / MANIFEST).write_text(text)
    found, damaged = store.scan_entries()
    assert ([each.id for each in found], damaged) == ([other.id], [entry.path])
    with pytest.raises(BadInputError, match=f"optpipe store rm {entry.path.name}"):
        store.list_entries()
    again, cached = store.produce(Thing, {"a": 1}, write_payload, listener=SilentListener())
    assert (again.id, cached, len(store.list_entries())) == (entry.id, False, 2)


@pytest.mark.parametrize(
    "change", [{"schema_version": 7}, {"info": {"answer": "of an earlier version"}}]
)
def test_an_entry_of_another_version_is_left_out_and_made_again(tmp_path: Path, change) -> None:
    store, listener = Store(tmp_path), SilentListener()
    entry, _ = store.produce(Thing, {"a": 1}, write_payload, listener=listener)
    other = put(store, Thing(), {"a": 2})
    manifest = json.loads((entry.path / MANIFEST).read_text())
    (entry.path / MANIFEST).write_text(json.dumps(manifest | change))
    assert [each.id for each in store.list_entries(Thing)] == [other.id]
    assert store.list_other_versions(Thing) == [entry.name]
    again, cached = store.produce(Thing, {"a": 1}, write_payload, listener=listener)
    assert (again.id, cached, len(store.list_entries(Thing))) == (entry.id, False, 2)
    assert listener.warnings == [
        f"store entry {entry.name} is of another version of optpipe and is being rebuilt"
    ]


def test_what_another_process_has_removed_is_no_failure(tmp_path: Path) -> None:
    store = Store(tmp_path)
    entry, _ = store.produce(Thing, {"a": 1}, write_payload, listener=SilentListener())
    assert store.remove_folder(entry.path) > entry.size_bytes
    assert store.remove_folder(entry.path) == 0


def test_nothing_is_removed_while_another_process_makes_entries(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    made, go_on = fork.Event(), fork.Event()

    def other() -> None:
        def make(directory: Path) -> Thing:
            made.set()
            go_on.wait(60)
            return write_payload(directory)

        Store(tmp_path).produce(Thing, {"a": 1}, write_payload, listener=SilentListener())
        Store(tmp_path).produce(ArtifactInfo, {"a": 2}, make, listener=SilentListener())  # type: ignore[arg-type] # never read

    process = fork.Process(target=other)
    process.start()
    assert made.wait(60)
    store = Store(tmp_path)
    entry = store.list_entries()[0]
    with pytest.raises(StageError, match="another optpipe process is using"):
        collect_garbage(store, dry_run=False)
    with pytest.raises(StageError, match="another optpipe process is using"):
        remove_stored(store, entry.id, with_dependents=False)
    go_on.set()
    process.join(60)
    assert collect_garbage(store, dry_run=False).removed == (entry.path.name,)


def test_a_scratch_folder_belongs_to_its_process_until_it_ends(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.scratch("dossier") as folder:
        (folder / "file").write_text("x")
        assert collect_garbage(store, dry_run=False).scratch_bytes == 0
        assert (folder / "file").is_file()
    assert not folder.exists()
    dead = tmp_path / "tmp" / "dossier-0123"
    dead.mkdir()
    (dead / "file").write_text("x")
    assert collect_garbage(store, dry_run=False).scratch_bytes == 1
    assert not dead.exists()


def test_find_needs_one_entry(tmp_path: Path) -> None:
    store = Store(tmp_path)
    entry, _ = store.produce(Thing, {"a": 1}, write_payload, listener=SilentListener())
    put(store, Thing(), {"a": 2})
    assert store.find(entry.id[:8]).id == entry.id
    with pytest.raises(BadInputError, match="optpipe store ls"):
        store.find("zzz")
    with pytest.raises(BadInputError, match="use a longer prefix"):
        store.find("thing-")


def test_a_model_name_leads_to_its_entries(tmp_path: Path) -> None:
    store = Store(tmp_path)
    entry = put(store, artifact_info(model="net"), {})
    said = f"^'net' is a model, not an ID; specify one of its entries: artifact-{entry.id}; `optpipe store ls`"
    with pytest.raises(BadInputError, match=said):
        store.find("net")
    with pytest.raises(
        BadInputError, match=r"no entry matches 'other' in [^;]*; `optpipe store ls` lists entries"
    ):
        store.find("other")


def finished(workspace, kind="bench"):
    run = runs.begin_run(workspace, kind)
    (run.path / "samples").mkdir()
    (run.path / "samples" / "m0.bin").write_bytes(b"abc")
    return runs.finish_run(
        run, command="optpipe bench 'a b'", parents=["onnxruntime-0123"], model="digits"
    )


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
