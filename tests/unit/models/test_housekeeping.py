"""What is stored is listed, shown, removed and hashed; its texts."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from tests.fakes.console import assert_golden, text_of
from tests.fakes.entries import HASH, MIXED, WRONG, artifact_info, proof, put, thing_of

from optpipe.core.entries import Environment
from optpipe.core.errors import BadInputError
from optpipe.core.precision import PlacedNode, Placement
from optpipe.core.records import plain_from_record
from optpipe.models.artifacts.engine_files import hash_engine, measure_engine
from optpipe.models.artifacts.housekeeping import (
    EntryDetails,
    EntrySummary,
    Removal,
    StoreListing,
    collect_garbage,
    describe_run,
    document_from_entry,
    document_from_listing,
    document_from_removal,
    find_run,
    list_stored,
    remove_stored,
)
from optpipe.workspace.entry import MANIFEST, Manifest
from optpipe.workspace.files import FileHash
from optpipe.workspace.runs import begin_run, finish_run
from optpipe.workspace.store import Store


@pytest.fixture
def store(tmp_path):
    found = Store(tmp_path)
    put(found, thing_of("artifact")(), {"a": 1}, files={"file": b"x"})
    return found


def run_in(store, *, whole=True):
    run = begin_run(store.workspace, "bench")
    (run.path / "samples").write_text("abc")
    if whole:
        finish_run(run, command="optpipe bench digits", parents=["0123"])
    return run.path


def test_runs_and_what_is_damaged_are_listed(store):
    damaged = put(store, thing_of("graph")(), {"b": 1})
    (damaged.path / MANIFEST).write_text("{")
    whole, unfinished, broken = run_in(store), run_in(store, whole=False), run_in(store)
    (broken / MANIFEST).write_text("[]")
    listing = list_stored(store)
    assert listing.damaged == (damaged.path.name,)
    said = {each.id: each.status for each in listing.runs}
    assert said == {whole.name: "complete", unfinished.name: "unfinished", broken.name: "damaged"}
    text = text_of(document_from_listing(listing))
    assert f"optpipe store rm {damaged.path.name}" in text
    assert "optpipe bench digits" in text
    assert text_of(document_from_listing(StoreListing("w", (), (), ()))).startswith(
        "nothing stored yet"
    )


def test_a_run_is_shown_and_removed_by_its_name(store):
    run = run_in(store)
    assert find_run(store, run.name[:12]) == run
    assert "optpipe bench digits" in text_of(document_from_entry(describe_run(run)))
    assert remove_stored(store, run.name, with_dependents=False).removed == (run.name,)
    assert not run.exists()
    with pytest.raises(BadInputError, match="optpipe store ls"):
        remove_stored(store, run.name, with_dependents=False)


def test_a_changed_run_is_not_shown_as_if_it_were_whole(store):
    run = run_in(store)
    (run / "samples").write_text("abd")
    with pytest.raises(BadInputError, match=f"optpipe store rm {run.name}"):
        describe_run(run)


def test_a_beginning_that_fits_several_runs_removes_none(store):
    runs = [run_in(store), run_in(store)]
    with pytest.raises(BadInputError, match="matches 2 runs"):
        remove_stored(store, "bench-", with_dependents=False)
    assert all(run.exists() for run in runs)


def test_a_damaged_entry_is_removed_by_name_id_or_gc(store):
    for remove in (
        lambda entry: remove_stored(store, entry.path.name, with_dependents=False),
        lambda entry: remove_stored(store, entry.id, with_dependents=False),
        lambda _: collect_garbage(store, dry_run=False),
    ):
        entry = put(store, thing_of("graph")(), {"b": 1})
        (entry.path / MANIFEST).unlink()
        assert remove(entry).removed == (entry.path.name,)
        assert len(store.list_entries()) == 1


def test_what_gc_would_free_is_what_it_frees(store):
    unneeded, damaged = (
        put(store, thing_of("graph")(), {each: 1}, files={"x": b"y"}) for each in "bc"
    )
    (damaged.path / MANIFEST).write_text("{")
    would = collect_garbage(store, dry_run=True)
    assert unneeded.path.exists()
    assert replace(would, dry_run=False) == collect_garbage(store, dry_run=False)
    assert store.scan_entries()[1] == []


def test_gc_keeps_what_commands_were_asked_for_and_what_that_is_compared_with(tmp_path):
    store = Store(tmp_path)

    def make(kind, *parents, name=""):
        return put(store, thing_of(kind)(), {"of": kind, "name": name}, parents)

    model, calibrated = make("exported"), make("exported", name="calibrated")
    reference, artifact = make("reference", model), make("artifact", model)
    needed = [model, calibrated, reference, artifact, make("verification", artifact, reference)]
    needed += [make("calibration", calibrated), make("preprocessing", model)]
    other = make("exported", name="gone")
    unneeded = make("reference", other, name="gone")
    assert set(collect_garbage(store, dry_run=False).removed) == {
        other.path.name,
        unneeded.path.name,
    }
    assert {each.id for each in store.list_entries()} == {each.id for each in needed}


FILES = {"model.pt2": ("aa", 5), "batch-8.pt2": ("bb", 7), "build.log": ("cc", 100)}


def make_entry(more_files, files=FILES):
    records = {
        name: SimpleNamespace(sha256=sha256, size_bytes=size)
        for name, (sha256, size) in files.items()
    }
    return SimpleNamespace(
        info=SimpleNamespace(file="model.pt2", more_files=more_files),
        manifest=SimpleNamespace(files=records),
        sha256=lambda name: records[name].sha256,
    )


@pytest.mark.parametrize("name", ["model.pt2", "batch-8.pt2"])
def test_every_file_that_is_loaded_counts(name):
    entry = make_entry(("batch-8.pt2",))
    other = make_entry(("batch-8.pt2",), {**FILES, name: ("dd", 1)})
    assert hash_engine(entry) != hash_engine(other)
    assert hash_engine(entry) == hash_engine(
        make_entry(("batch-8.pt2",), {**FILES, "build.log": ("dd", 1)})
    )
    assert measure_engine(entry) == 12


def test_what_is_stored():
    entry = EntrySummary(
        "0123456789ab",
        "artifact",
        "digits",
        "onnxruntime",
        "fp32",
        "cpu",
        705_000,
        "2026-11-22T10:50:20+00:00",
        "/w/store/artifact-0123456789ab",
    )
    run = EntrySummary(
        "bench-1",
        "bench",
        None,
        None,
        None,
        None,
        103_000,
        "2026-11-22T10:51:20",
        "/w/runs/bench-1",
        "interrupted",
        "optpipe bench digits",
    )
    listing = StoreListing("/w", (entry,), ("graph-0f",), (run,))
    files, environment = (
        {"model.onnx": FileHash(HASH, 705_000)},
        Environment(packages={"onnx": "1.23.2"}),
    )
    info = plain_from_record(artifact_info(precision_proof=WRONG, mixed=MIXED))
    manifest = Manifest(
        "artifact",
        entry.id,
        {},
        ("m", "m"),
        files,
        info,
        environment,
        "optpipe build digits",
        "2026-11-22T10:50:17.5+00:00",
        entry.created,
    )
    made = Manifest(
        "bench",
        "1",
        None,
        (entry.id,),
        files,
        {},
        environment,
        "optpipe bench digits",
        "2026-11-22T10:50:20",
        "2026-11-22T10:51:20",
        "interrupted",
    )
    parts = (
        document_from_listing(listing),
        document_from_entry(EntryDetails(entry, manifest)),
        document_from_entry(EntryDetails(run, made)),
        document_from_removal(Removal(("graph-0f",), 2048, True, 1024)),
    )
    assert_golden(text_of(*parts), "stored.txt")


def test_an_engine():
    entry = EntrySummary(
        "0123456789ab",
        "artifact",
        "digits",
        "tensorrt",
        "int8",
        "cuda",
        705_000,
        "2026-11-22T10:50:20+00:00",
        "/w/store/artifact-0123456789ab",
    )
    placement = Placement(
        "CUDAExecutionProvider",
        61,
        2,
        0.004,
        (
            PlacedNode("odd\x1b", "ConvInteger", "CPUExecutionProvider", 0.004),
            PlacedNode("top", "TopK", "CPUExecutionProvider", 0.0),
        ),
    )
    info = plain_from_record(
        artifact_info(precision_proof=replace(proof("int8"), placement=placement))
    )
    manifest = Manifest(
        "artifact",
        entry.id,
        {},
        (),
        {},
        info,
        Environment(),
        "optpipe build digits",
        "2026-11-22T10:50:17.5+00:00",
        entry.created,
    )
    assert_golden(text_of(document_from_entry(EntryDetails(entry, manifest))), "entry.txt")


@pytest.fixture
def outside(tmp_path_factory):
    """A folder with a file that belongs to nobody here."""
    folder = tmp_path_factory.mktemp("outside")
    (folder / "photos").mkdir()
    (folder / "photos" / "one.jpg").write_bytes(b"mine")
    return folder


def is_whole(outside):
    return (outside / "photos" / "one.jpg").read_bytes() == b"mine"


@pytest.mark.parametrize("name", ["tmp", "store"])
def test_gc_deletes_nothing_behind_a_linked_folder(store, outside, name):
    link = store.workspace / name
    if link.exists():
        link.rename(outside / "moved")
        (outside / "moved" / "graph-0123").mkdir()
    link.symlink_to(outside / "moved" if name == "store" else outside)
    with pytest.raises(BadInputError, match="symbolic link"):
        collect_garbage(store, dry_run=False)
    assert is_whole(outside)
    assert name != "store" or (outside / "moved" / "graph-0123").is_dir()


def test_a_lock_file_that_is_a_link_is_not_opened(tmp_path, outside):
    linked = Store(tmp_path / "other")
    (tmp_path / "other" / "locks").mkdir(parents=True)
    linked.lock_path("store").symlink_to(outside / "photos" / "one.jpg")
    with pytest.raises(BadInputError, match="symbolic links"):
        collect_garbage(linked, dry_run=False)
    assert is_whole(outside)


def test_of_a_link_among_what_gc_removes_only_the_link_goes(store, outside):
    (store.workspace / "tmp").mkdir(exist_ok=True)
    (store.workspace / "tmp" / "bench-1").mkdir()
    (store.workspace / "tmp" / "bench-1" / "inside").symlink_to(outside)
    (store.workspace / "tmp" / "bench-2").symlink_to(outside)
    (store.workspace / "tmp" / "a file").write_bytes(b"12345")
    (store.root / "graph-0123").symlink_to(outside)
    assert collect_garbage(store, dry_run=True).scratch_bytes == 5
    collect_garbage(store, dry_run=False)
    assert is_whole(outside)
    assert list((store.workspace / "tmp").iterdir()) == []
    assert not (store.root / "graph-0123").is_symlink()


def test_of_a_linked_run_only_the_link_is_removed(store, outside):
    run = run_in(store)
    run.rename(outside / run.name)
    run.symlink_to(outside / run.name)
    assert remove_stored(store, run.name, with_dependents=False).removed == (run.name,)
    assert not run.is_symlink()
    assert (outside / run.name / "samples").read_text() == "abc"


def test_a_linked_folder_for_notes_on_removed_runs_is_refused(store, outside):
    run = run_in(store)
    (store.workspace / "removed").symlink_to(outside)
    with pytest.raises(BadInputError, match="symbolic link"):
        remove_stored(store, run.name, with_dependents=False)
    assert run.is_dir()
    assert is_whole(outside)
